"""Times of ONNX Runtime's MatMulNBits on the CPU: the lines of matmul_nbits_bench.

    python matmul_nbits_peer.py [threads] [n = k] [bits,...] [m,...]

Needs numpy, onnx and onnxruntime.
"""

import sys
import time

import numpy as np
import onnxruntime
from onnx import TensorProto, helper


def session(size: int, bits: int, block_size: int, level: int, threads: int) -> onnxruntime.InferenceSession:
    rng = np.random.default_rng(1)
    b = rng.integers(0, 256, (size, size // block_size, block_size * bits // 8), dtype=np.uint8)
    scales = np.full((size, size // block_size), 0.01, dtype=np.float32)
    attributes = {"K": size, "N": size, "bits": bits, "block_size": block_size, "accuracy_level": level}
    node = helper.make_node("MatMulNBits", ["A", "B", "scales"], ["Y"], domain="com.microsoft", **attributes)
    graph = helper.make_graph(
        [node],
        "matmul",
        [helper.make_tensor_value_info("A", TensorProto.FLOAT, ["m", size])],
        [helper.make_tensor_value_info("Y", TensorProto.FLOAT, ["m", size])],
        [
            helper.make_tensor("B", TensorProto.UINT8, b.shape, b.tobytes(), raw=True),
            helper.make_tensor("scales", TensorProto.FLOAT, scales.shape, scales.tobytes(), raw=True),
        ],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def main() -> None:
    arguments = sys.argv[1:] + ["2", "2048", "4,8,2", "1,8,512"][len(sys.argv) - 1 :]
    threads, size = int(arguments[0]), int(arguments[1])
    print(f"onnxruntime {onnxruntime.__version__}, {threads} threads, n = k = {size}")
    for bits in map(int, arguments[2].split(",")):
        for block_size in (32, 128):
            for level in (0, 4):
                run = session(size, bits, block_size, level, threads).run
                for m in map(int, arguments[3].split(",")):
                    a = np.random.default_rng(2).uniform(-1, 1, (m, size)).astype(np.float32)
                    run(None, {"A": a})
                    seconds = []
                    for _ in range(3 if m > 64 else 15):
                        start = time.perf_counter()
                        run(None, {"A": a})
                        seconds.append(time.perf_counter() - start)
                    seconds.sort()
                    rate = 2e-9 * m * size * size / seconds[0]
                    print(
                        f"bits {bits} block {block_size} level {level} m {m}: least {seconds[0] * 1e6:.0f} us, "
                        f"median {seconds[len(seconds) // 2] * 1e6:.0f} us, {rate:.1f} GFLOP/s",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
