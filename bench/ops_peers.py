"""Operators of shoal.ops against ONNX Runtime's CPU kernels: the same arrays, the same threads, interleaved rounds.

The peer runs in an environment of its own under build/peers/onnxruntime (onnxruntime, onnx from PyPI). Results of both
are compared before anything is timed.

Usage: bench/ops_peers.py [--threads 2] [--rounds 5] [--filter TEXT] [-o bench/results/FILE.json]
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
PYTHON = ROOT / "build" / "peers" / "onnxruntime" / "bin" / "python"
PACKAGES = ["onnxruntime==1.32.0", "onnx==1.23.2"]
# Inputs that change from call to call; the others are a model's weights.
ACTIVATIONS = {"A", "input", "router_probs", "query", "key", "value", "decay", "beta", "past_state", "initial_state"}


# ---- cases
WARM_UP = 0.2  # seconds


def codes(random: np.random.Generator, *shape: int) -> np.ndarray:
    return random.integers(0, 256, shape, dtype=np.uint8)


def matmul(bits: int, level: int, m: int, k: int, n: int, block: int = 32) -> dict[str, Any]:
    random = np.random.default_rng(1)
    return {
        "op": "MatMulNBits",
        "name": "matmul_nbits",
        "inputs": {
            "A": random.standard_normal((m, k)).astype(np.float32),
            "B": codes(random, n, k // block, block * bits // 8),
            "scales": np.full((n, k // block), 2.0**-bits / 16, np.float32),
        },
        "attributes": {"K": k, "N": n, "bits": bits, "block_size": block, "accuracy_level": level},
        "outputs": 1,
        "flops": 2 * m * n * k,
        "bytes": n * k * bits // 8,
        "tolerance": 0.02 if level == 4 else 1e-4,
    }


def qmoe(bits: int, m: int, hidden: int, inter: int, experts: int, k: int, block: int = 32) -> dict[str, Any]:
    random = np.random.default_rng(2)
    probs = random.standard_normal((m, experts)).astype(np.float32)
    touched = len(np.unique(np.argsort(-probs, axis=1)[:, :k]))
    scale = 2.0**-bits / 8
    return {
        "op": "QMoE",
        "name": "qmoe",
        "inputs": {
            "input": random.standard_normal((m, hidden)).astype(np.float32),
            "router_probs": probs,
            "fc1_experts_weights": codes(random, experts, 2 * inter, hidden * bits // 8),
            "fc1_scales": np.full((experts, 2 * inter, hidden // block), scale, np.float32),
            "": None,
            "fc2_experts_weights": codes(random, experts, hidden, inter * bits // 8),
            "fc2_scales": np.full((experts, hidden, inter // block), scale, np.float32),
        },
        "attributes": {
            "k": k, "activation_type": "swiglu", "swiglu_fusion": 1, "normalize_routing_weights": 1,
            "expert_weight_bits": bits, "block_size": block,
        },
        "outputs": 1,
        "flops": 2 * m * k * 3 * hidden * inter,
        "bytes": touched * 3 * hidden * inter * bits // 8,
        # The peer's 8-bit experts quantise activations, its 2-bit path is off by up to 0.8 %.
        "tolerance": {8: 0.05, 2: 0.01}.get(bits, 1e-3),
    }  # fmt: skip


def conv(length: int, channels: int) -> dict[str, Any]:
    random = np.random.default_rng(3)
    return {
        "op": "CausalConvWithState",
        "name": "causal_conv_with_state",
        "inputs": {
            "input": random.standard_normal((1, channels, length)).astype(np.float32),
            "weight": random.standard_normal((channels, 1, 4)).astype(np.float32),
            "": None,
            "past_state": random.standard_normal((1, channels, 3)).astype(np.float32),
        },
        "attributes": {"activation": "silu"},
        "outputs": 2,
        "flops": 8 * length * channels,
        "bytes": 8 * length * channels,
        "tolerance": 1e-4,
    }


def delta_net(tokens: int, q_heads: int, v_heads: int, width: int) -> dict[str, Any]:
    random = np.random.default_rng(4)

    def normal(*shape: int) -> np.ndarray:
        return random.standard_normal(shape).astype(np.float32)

    return {
        "op": "GatedDeltaNet",
        "name": "gated_delta_net",
        "inputs": {
            "query": normal(tokens, q_heads, width),
            "key": normal(tokens, q_heads, width),
            "value": normal(tokens, v_heads, width),
            "cu_seqlens": np.array([0, tokens], np.int32),
            "decay": -np.abs(normal(tokens, v_heads)),
            "beta": random.uniform(0, 1, (tokens, v_heads)).astype(np.float32),
            "initial_state": normal(1, v_heads, width, width),
        },
        "attributes": {"qk_l2_norm": 1},
        "outputs": 2,
        "flops": 7 * tokens * v_heads * width * width,
        "bytes": 8 * v_heads * width * width,
        "tolerance": 1e-3,
    }


CASES = {
    **{
        f"MatMulNBits {bits} bits, level {level}, 2048 x 2048, {m} rows": (matmul, bits, level, m, 2048, 2048)
        for bits in (4, 8)
        for level in (0, 4)
        for m in (1, 8, 512)
    },
    **{
        f"QMoE {bits} bits, Qwen3-30B-A3B layer of 32 experts, {m} rows": (qmoe, bits, m, 2048, 768, 32, 8)
        for bits in (4, 8)
        for m in (1, 8, 512)
    },
    **{f"QMoE {bits} bits, the same, {m} rows": (qmoe, bits, m, 2048, 768, 32, 8) for bits in (2,) for m in (1, 8)},
    **{f"CausalConvWithState 8192 channels, {n} tokens": (conv, n, 8192) for n in (1, 512)},
    **{f"GatedDeltaNet Qwen3-Next layer, {n} tokens": (delta_net, n, 16, 32, 128) for n in (1, 512)},
}


# ---- workers: a line with a case's name in, a line of JSON out
def ort_call(case: dict[str, Any], threads: int) -> Any:
    import onnxruntime
    from onnx import TensorProto, helper

    types = {"float32": TensorProto.FLOAT, "uint8": TensorProto.UINT8, "int32": TensorProto.INT32}
    outputs = [f"y{i}" for i in range(case["outputs"])]
    names = list(case["inputs"])
    node = helper.make_node(case["op"], names, outputs, domain="com.microsoft", **case["attributes"])
    fed = {n: a for n, a in case["inputs"].items() if n in ACTIVATIONS}
    fixed = {n: a for n, a in case["inputs"].items() if n and n not in ACTIVATIONS}
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info(n, types[a.dtype.name], a.shape) for n, a in fed.items()],
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in outputs],
        [helper.make_tensor(n, types[a.dtype.name], a.shape, a.tobytes(), raw=True) for n, a in fixed.items()],
    )
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    opsets = [helper.make_opsetid("", 24), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=11)
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return lambda: session.run(None, fed)


def shoal_call(case: dict[str, Any]) -> Any:
    import shoal.ops

    operator = getattr(shoal.ops, case["name"])
    arguments = {n: a for n, a in case["inputs"].items() if n} | case["attributes"]
    return lambda: operator(**arguments)


def worker(engine: str, threads: int) -> None:
    kept: tuple[str, Any] = ("", None)
    for line in sys.stdin:
        name = line.strip()
        if kept[0] != name:
            make, *sizes = CASES[name]
            case = make(*sizes)
            kept = (name, ort_call(case, threads) if engine == "onnxruntime" else shoal_call(case))
        run = kept[1]
        first = run()
        first = first[0] if isinstance(first, tuple | list) else first
        # The other engine's threads may still spin, and ours sleep: both measure warm.
        calls, start = 0, time.perf_counter()
        while calls == 0 or time.perf_counter() - start < WARM_UP:
            run()
            calls += 1
        count = max(3, min(50, int(0.3 * calls / (time.perf_counter() - start))))
        seconds = []
        for _ in range(count):
            start = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - start)
        sample = first.reshape(-1)[:: max(1, first.size // 500)]
        print(json.dumps({"seconds": statistics.median(seconds), "sample": sample.tolist()}), flush=True)


# ---- orchestration
def bandwidth() -> float:
    """Bytes a second that plain reading of memory reaches, here with one sum a thread."""
    from concurrent.futures import ThreadPoolExecutor

    threads = os.cpu_count() or 1
    parts = [np.ones(16 << 20, np.float64) for _ in range(threads)]
    with ThreadPoolExecutor(threads) as pool:
        seconds = []
        for _ in range(5):
            start = time.perf_counter()
            list(pool.map(np.sum, parts))
            seconds.append(time.perf_counter() - start)
    return sum(p.nbytes for p in parts) / statistics.median(seconds)


def processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def workers(threads: int) -> Iterator[tuple[str, subprocess.Popen]]:
    if not PYTHON.exists():
        print(f"installing {' '.join(PACKAGES)} into {PYTHON.parent.parent.relative_to(ROOT)}", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", str(PYTHON.parent.parent)], check=True)
        subprocess.run([str(PYTHON), "-m", "pip", "install", "-q", *PACKAGES], check=True)
    env = dict(os.environ, SHOAL_THREADS=str(threads), OMP_NUM_THREADS=str(threads))
    for engine, python in (("shoal", Path(sys.executable)), ("onnxruntime", PYTHON)):
        command = [str(python), __file__, "--worker", engine, "--threads", str(threads)]
        yield engine, subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)


def ask(process: subprocess.Popen, name: str) -> dict[str, Any]:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(name + "\n")
    process.stdin.flush()
    line = process.stdout.readline()
    if not line:
        raise SystemExit(f"ops_peers: a worker ended at {name}")
    return json.loads(line)


def measure(name: str, engines: dict[str, subprocess.Popen], rounds: int) -> dict[str, Any]:
    make, *sizes = CASES[name]
    case = make(*sizes)
    seconds: dict[str, list[float]] = {engine: [] for engine in engines}
    samples = {}
    for _ in range(rounds):
        for engine, process in engines.items():
            answer = ask(process, name)
            seconds[engine].append(answer["seconds"])
            samples[engine] = np.array(answer["sample"])
    ours, theirs = samples["shoal"], samples["onnxruntime"]
    difference = float(np.abs(ours - theirs).max() / np.abs(theirs).max())
    if difference > case["tolerance"]:
        print(f"ops_peers: {name}: results differ by {difference:.1e} of the largest", file=sys.stderr)
    medians = {engine: statistics.median(values) for engine, values in seconds.items()}
    return {"seconds": medians, "flops": case["flops"], "bytes": case["bytes"], "difference": difference}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--filter", default="")
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options.worker, options.threads)
        return 0
    engines = dict(workers(options.threads))
    roof = bandwidth()
    print(f"reading memory: {roof / 1e9:.1f} GB/s")
    results = {}
    for name in CASES:
        if options.filter not in name:
            continue
        result = results[name] = measure(name, engines, options.rounds)
        own, peer = result["seconds"]["shoal"], result["seconds"]["onnxruntime"]
        print(
            f"{name}: shoal {own * 1e6:.0f} us, onnxruntime {peer * 1e6:.0f} us, ratio {peer / own:.2f}; "
            f"{result['bytes'] / own / 1e9:.1f} GB/s ({100 * result['bytes'] / own / roof:.0f} % of reading), "
            f"{result['flops'] / own / 1e9:.1f} GFLOP/s, difference {result['difference']:.1e}",
            flush=True,
        )
    for process in engines.values():
        process.terminate()
    if options.output:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT)
        document = {
            "kind": "ops_peers",
            "model": "operators",
            "processor": processor(),
            "threads": options.threads,
            "rounds": options.rounds,
            "date": time.strftime("%Y-%m-%d"),
            "commit": commit.stdout.strip(),
            "packages": PACKAGES,
            "read_bytes_per_s": roof,
            "results": results,
        }
        options.output.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
