"""The installed C++ package: examples/ build against it with find_package, and run. SHOAL_BUILD_DIR names the build."""

import os
import subprocess
from pathlib import Path

import pytest

import shoal

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "tests" / "golden" / "models" / "llama"


def run(*command: object) -> str:
    result = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    build = os.environ.get("SHOAL_BUILD_DIR")
    if build is None:
        pytest.skip("SHOAL_BUILD_DIR is not set: `make test` sets it")
    folder = tmp_path_factory.mktemp("installed")
    run("cmake", "--install", build, "--component", "cpp", "--prefix", folder / "prefix")
    run("cmake", "-S", ROOT / "examples", "-B", folder / "build", f"-DCMAKE_PREFIX_PATH={folder / 'prefix'}")
    run("cmake", "--build", folder / "build", "--parallel", "2")
    return folder / "build"


def test_operator(examples: Path):
    assert run(examples / "matmul").split() == ["12"] * 6


def test_engine_gives_what_the_python_front_gives(examples: Path):
    prompt = [3, 1, 4, 1, 5, 9]
    params = shoal.SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
    [expected] = shoal.LLM(str(MODEL)).generate([prompt], params)
    assert run(examples / "generate", MODEL, *prompt).split() == [str(id) for id in expected.token_ids]


def test_installed_headers_have_no_tests(examples: Path):
    names = [path.name for path in (examples.parent / "prefix" / "include").rglob("*") if path.is_file()]
    assert "shoal.h" in names
    assert "formats.def" in names
    assert not [name for name in names if name.endswith(("_cases.h", "_rejections.h", "_test.cpp"))]
