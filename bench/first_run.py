"""What a newcomer waits for: `make demo` on a clean clone, again, `make test`; then load time and peak memory.

Usage: bench/first_run.py [--no-tests] [--model smollm2] [-o bench/results/FILE.json]

Clones HEAD into a temporary folder. The compiler cache is off; the model comes from the user's cache.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ops_peers import ROOT, processor

FOOTPRINT = """
import json, resource, statistics, sys, time
import shoal

seconds = []
for _ in range(5):
    start = time.perf_counter()
    llm = shoal.LLM(sys.argv[1])
    seconds.append(time.perf_counter() - start)
    info = llm.info
    del llm
llm = shoal.LLM(sys.argv[1])
llm.generate(["The sea is"] * 4, shoal.SamplingParams(max_tokens=64, temperature=0))
print(json.dumps({
    "load_s": statistics.median(seconds),
    "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    "weight_bytes": info["weight_bytes"],
    "kv_bytes": info["kv_bytes"],
}))
"""


def seconds_of(command: list[str], folder: Path) -> tuple[float, str]:
    start = time.perf_counter()
    run = subprocess.run(command, cwd=folder, env=dict(os.environ, CCACHE_DISABLE="1"), capture_output=True, text=True)
    if run.returncode != 0:
        sys.exit(f"first_run: {' '.join(command)} failed:\n{run.stdout[-2000:]}{run.stderr[-2000:]}")
    return time.perf_counter() - start, run.stdout + run.stderr


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-tests", action="store_true")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        clone = Path(temporary) / "shoal"
        subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=clone, capture_output=True, text=True)
        result = {
            "kind": "first_run",
            "model": options.model,
            "processor": processor(),
            "threads": os.cpu_count(),
            "date": time.strftime("%Y-%m-%d"),
            "commit": commit.stdout.strip(),
        }
        result["demo_s"], _ = seconds_of(["make", "demo"], clone)
        result["demo_again_s"] = statistics.median(seconds_of(["make", "demo"], clone)[0] for _ in range(3))
        _, printed = seconds_of([".venv/bin/python", "-c", FOOTPRINT, options.model], clone)
        result |= json.loads(printed.splitlines()[-1])
        if not options.no_tests:
            result["test_s"], printed = seconds_of(["make", "test"], clone)
            result["tests"] = next(line for line in reversed(printed.splitlines()) if " passed, " in line)
    print(json.dumps(result, indent=1))
    if options.output:
        options.output.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
