"""Checks and measures the CUDA paths on this machine's GPU, and writes what it saw to bench/results.

Tests of the CUDA paths, compute-sanitizer over a part of them, `device_bench`, and `engine_bench` on random models. The
figures of docs/performance.md come from the file that this writes.

Usage: bench/gpu_check.py [--build DIR] [--out FILE] [--commit ID] [--models NAME:CONTEXTS ...] [--quick]
       --build: where the tests and benches were built, any folder above them (build/cuda); --quick: no sanitizers
"""

import argparse
import datetime
import json
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTS = {  # program: the tests that need a device
    "rows_test": "*Cuda*",
    "device_test": "*",
    "matmul_device_test": "*",
    "paged_attention_test": "*Cuda*",
    "engine_test": "Device*:*/Device*:Golden*",
}
SANITIZED = [  # tool, program, tests: few enough for minutes
    ("memcheck", "rows_test", "*Cuda*"),
    ("memcheck", "device_test", "*"),
    ("memcheck", "matmul_device_test", "*q4_k*:*q6_k*:*q8_0*:*Tiled*:*Exact*"),
    ("memcheck", "paged_attention_test", "*Cuda*window6*:*Cuda*_all*:*Cuda*decode_n1*:*Cuda*int8_PER*:*Long*Cuda*"),
    ("racecheck", "paged_attention_test", "*Cuda*float16_all*:*Cuda*decode_n8*:*Cuda*int8_PER_TENSOR"),
    ("racecheck", "matmul_device_test", "*q4_k*:*Tiled*"),
    ("initcheck", "device_test", "*"),
    ("synccheck", "matmul_device_test", "*q4_k*"),
]
BATCH_TOKENS = 8192
BF16_TFLOP_S = 770  # cuBLAS, 8192^3, random data, measured on an H200 in November 2026; other GPUs have other roofs


def find(build: Path, name: str) -> str:
    found = [p for p in build.rglob(name) if p.is_file()]
    if not found:
        sys.exit(f"gpu_check: no {name} under {build}: build it with SHOAL_CUDA=ON, SHOAL_TESTS=ON, SHOAL_BENCH=ON")
    return str(found[0])


def smi(query: str) -> list[str]:
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits"]
    return [cell.strip() for cell in subprocess.run(command, capture_output=True, text=True).stdout.split(",")]


def run_tests(build: Path) -> tuple[int, list[str]]:
    passed, failed = 0, []
    for name, tests in TESTS.items():
        done = subprocess.run([find(build, name), f"--gtest_filter={tests}"], capture_output=True, text=True)
        text = done.stdout + done.stderr
        count = re.search(r"\[  PASSED  \] (\d+) test", text)
        own = re.findall(r"^\[  FAILED  \] (\S+)$", text, re.M)
        own += [] if count and (done.returncode == 0 or own) else [f"{name}: status {done.returncode}"]
        passed += int(count.group(1)) if count else 0
        failed += own
        print(f"{name}: {count.group(0) if count else 'no result'}, {len(own)} failed", flush=True)
    return passed, failed


def run_sanitizers(build: Path) -> list[str]:
    tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(tool).exists():
        return ["not there"]
    lines = []
    for kind, name, tests in SANITIZED:
        command = [tool, "--tool", kind, find(build, name), f"--gtest_filter={tests}"]
        text = subprocess.run(command, capture_output=True, text=True).stdout
        summary = re.search(r"(?:ERROR|RACECHECK) SUMMARY: (.*)", text)
        lines.append(f"{kind} {name}: {summary.group(1) if summary else 'no result'}")
        print(lines[-1], flush=True)
    return lines


def json_lines(command: list[str]) -> list[dict]:
    print("$", *command, flush=True)
    done = subprocess.run(command, capture_output=True, text=True)
    print(done.stdout, done.stderr, sep="", flush=True)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def run_model(build: Path, name: str, contexts: str) -> dict:
    command = [find(build, "engine_bench"), f"synthetic:{name}", "--device", "cuda", "--context", contexts]
    first, *rows = json_lines([*command, "--batch-tokens", str(BATCH_TOKENS)])
    return {"name": name, "weight_bytes": first["weight_bytes"], "kv_dtype": first["kv_dtype"], "contexts": rows}


class Clock(threading.Thread):
    """The highest clock of the multiprocessors while it runs."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.highest = 0
        self.stopping = False

    def run(self) -> None:
        while not self.stopping:
            self.highest = max(self.highest, int(float(smi("clocks.sm")[0])))
            time.sleep(1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build", type=Path, default=ROOT / "build" / "cuda")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", default="")
    parser.add_argument("--models", nargs="*", default=["qwen3-30b-a3b:512,8192,32768", "gpt-oss-120b:512,8192,32768"])
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    gpu, driver = smi("name,driver_version")
    passed, failed = run_tests(options.build)
    sanitizers = [] if options.quick else run_sanitizers(options.build)
    clock = Clock()
    clock.start()
    roof, *operators = json_lines([find(options.build, "device_bench")])
    models = [run_model(options.build, *model.split(":")) for model in options.models]
    clock.stopping = True
    cuda = re.search(r"CUDA Version: (\S+)", subprocess.run(["nvidia-smi"], capture_output=True, text=True).stdout)
    commit = (
        options.commit
        or subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
        ).stdout.strip()
    )
    clean = sum("0 errors" in line or "0 hazards" in line for line in sanitizers)
    result = {
        "kind": "device",
        "gpu": gpu,
        "driver": driver,
        "cuda": cuda.group(1) if cuda else "",
        "date": datetime.date.today().isoformat(),
        "commit": commit,
        "sm_mhz": clock.highest,
        "tests_passed": passed,
        "tests_failed": failed,
        "sanitizers": f"{clean} of {len(sanitizers)} runs without a finding",
        "sanitizer_runs": sanitizers,
        "copy_gb_s": roof["copy_gb_s"],
        "bf16_tflop_s": BF16_TFLOP_S,
        "max_batch_tokens": BATCH_TOKENS,
        "models": models,
        "operators": operators,
    }
    out = options.out or ROOT / "bench" / "results" / f"{result['date']}-{gpu.lower().replace(' ', '-')}.json"
    out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{passed} passed, {len(failed)} failed; {result['sanitizers']}; written to {out}")
    return 1 if failed or clean < len(sanitizers) else 0


if __name__ == "__main__":
    sys.exit(main())
