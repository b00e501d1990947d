# demo: fetch the default model and answer.  test: everything.  See CONTRIBUTING.md.
.PHONY: demo build test test-sanitizers fuzz bench gpu-check format lint lock clean

CHANGED ?= HEAD
CPP := $(shell git ls-files '*.h' '*.cpp' '*.cuh' '*.cu' 2>/dev/null)

demo:
	@scripts/build
	@.venv/bin/shoal run smollm2 -p "Explain in two sentences why the sky is blue." -n 80 --temp 0

build:
	@scripts/build

test:
	@scripts/build --tests
	@.venv/bin/python scripts/run_tests.py

# Address and undefined-behaviour sanitizers over all C++ tests, thread sanitizer over the threaded layers.
test-sanitizers:
	@scripts/setup --tests
	@scripts/sanitize

# FUZZ_SECONDS per target, from the stored corpus.
FUZZ_SECONDS ?= 20
fuzz:
	@scripts/setup
	@scripts/fuzz $(FUZZ_SECONDS)

bench:
	@scripts/build
	@.venv/bin/shoal bench smollm2

# On a machine with a GPU: builds the CUDA kernels, tests and measures them; writes bench/results and docs/performance.md.
gpu-check:
	@scripts/setup --tests
	@PATH="$(CURDIR)/.venv/bin:$$PATH" cmake --preset release -B build/cuda -DSHOAL_CUDA=ON
	@PATH="$(CURDIR)/.venv/bin:$$PATH" cmake --build build/cuda
	@.venv/bin/python bench/gpu_check.py && .venv/bin/python bench/report.py

format:
	@scripts/setup
	@.venv/bin/python scripts/reference.py && .venv/bin/python bench/report.py
	@.venv/bin/clang-format -i $(CPP)
	@.venv/bin/ruff format -q . && .venv/bin/ruff check -q --fix .

lint:
	@scripts/setup
	@.venv/bin/clang-format --dry-run -Werror $(CPP)
	@.venv/bin/ruff format -q --check . && .venv/bin/ruff check -q .
	@.venv/bin/python scripts/reference.py --check && .venv/bin/python bench/report.py --check
	@scripts/tidy $(CHANGED)

# Pins every direct and indirect Python package, with hashes, for all Pythons that are supported.
lock:
	@scripts/setup
	@.venv/bin/python -m pip install -q uv
	@.venv/bin/uv pip compile -q requirements.in --universal --python-version 3.10 --generate-hashes --no-header -o requirements.lock

clean:
	rm -rf build dist
