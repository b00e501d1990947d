"""Runs all tests (CTest, pytest) and counts them: the last line reads "N passed, N failed, N skipped".

Usage: run_tests.py [--build DIR] [--cpp-only]
"""

import argparse
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def counts(junit: Path) -> tuple[int, int, int]:
    """Passed, failed, skipped test cases of a JUnit file."""
    cases = list(ElementTree.parse(junit).iter("testcase"))
    failed = sum(1 for c in cases if c.find("failure") is not None or c.find("error") is not None)
    skipped = sum(1 for c in cases if c.find("skipped") is not None or c.get("status") in ("notrun", "disabled"))
    return len(cases) - failed - skipped, failed, skipped


def run(command: list[str], junit: Path, env: dict[str, str]) -> tuple[int, int, int]:
    junit.unlink(missing_ok=True)
    status = subprocess.run(command, cwd=ROOT, env=env).returncode
    if not junit.exists():
        print(f"run_tests: {command[0]} wrote no results", file=sys.stderr)
        return 0, 1, 0
    passed, failed, skipped = counts(junit)
    if status != 0 and failed == 0:  # a crash outside any test is a failure too
        failed = 1
    return passed, failed, skipped


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build", default="build/release")
    parser.add_argument("--cpp-only", action="store_true")
    options = parser.parse_args()
    build = ROOT / options.build
    env = dict(os.environ, SHOAL_BUILD_DIR=str(build))
    bin_dir = Path(sys.executable).parent
    env["PATH"] = f"{bin_dir}{os.pathsep}{env['PATH']}"

    junit = build / "ctest.xml"
    jobs = str(os.cpu_count() or 1)
    ctest = [
        "ctest",
        "--test-dir",
        str(build),
        "-j",
        jobs,
        "--output-on-failure",
        "--quiet",
        "--output-junit",
        str(junit),
    ]
    results = [run(ctest, junit, env)]
    if not options.cpp_only:
        junit = build / "pytest.xml"
        results.append(run([sys.executable, "-m", "pytest", "-q", f"--junitxml={junit}", "tests"], junit, env))
    passed, failed, skipped = (sum(column) for column in zip(*results, strict=True))
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    return 1 if failed or passed == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
