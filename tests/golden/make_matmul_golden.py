"""Writes matmul/nbits.bin with ONNX Runtime and matmul/packed.bin with the PyPI package `gguf`.

    python make_matmul_golden.py

Needs onnx, onnxruntime 1.32, gguf and numpy. Both files are lists of cases, little-endian, until the end of the file.

nbits.bin: i32 bits, block_size, M, N, K, is_f16, zeros (0 none, 1 packed, 2 of A's type), has_g_idx, has_bias; then A, B,
scales, zero_points, g_idx, bias (what applies) and Y as f32. Inputs of A's type are stored in it. accuracy_level is 0. There is no case with both g_idx and zero_points: ONNX Runtime 1.32 then takes 8 for
every zero.

packed.bin: i32 packed_type, M, N, K; A as f16, B, and as f64 the products with W as it is and with W rounded to f16.
"""

import pathlib

import numpy as np
import onnxruntime
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants
from onnx import TensorProto, helper

# bits, block_size, M, N, K, is_f16, zeros, has_g_idx, has_bias
NBITS = [
    (4, 32, 3, 24, 64, 0, 0, 0, 0),
    (4, 32, 1, 32, 96, 0, 1, 0, 1),
    (4, 16, 5, 17, 80, 0, 1, 0, 1),
    (4, 64, 2, 16, 100, 0, 0, 0, 0),
    (4, 128, 2, 16, 256, 0, 2, 0, 0),
    (4, 32, 3, 16, 96, 0, 0, 1, 0),
    (4, 32, 3, 24, 64, 1, 0, 0, 0),
    (4, 32, 3, 24, 64, 1, 1, 0, 1),
    (8, 32, 3, 24, 64, 0, 0, 0, 0),
    (8, 32, 2, 17, 96, 0, 1, 0, 1),
    (8, 64, 2, 16, 128, 1, 0, 0, 0),
    (8, 64, 2, 16, 128, 1, 1, 0, 0),
    (2, 32, 3, 24, 64, 0, 0, 0, 0),
    (2, 64, 2, 16, 128, 0, 1, 0, 1),
    (2, 64, 2, 16, 128, 1, 0, 0, 0),
]
PACKED = (
    "Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K IQ2_XXS IQ2_XS IQ2_S IQ3_XXS IQ3_S IQ4_NL IQ4_XS MXFP4 NVFP4"
)
# Offsets of f16 scales in a block, which get ordinary values.
SCALES = {
    "Q4_0": [0],
    "Q4_1": [0, 2],
    "Q5_0": [0],
    "Q5_1": [0, 2],
    "Q8_0": [0],
    "Q2_K": [80, 82],
    "Q3_K": [108],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
}


def nbits_case(rng: np.random.Generator, case: tuple[int, ...]) -> bytes:
    bits, block_size, m, n, k, is_f16, zeros, has_g_idx, has_bias = case
    blocks = -(-k // block_size)
    dtype, onnx_type = (np.float16, TensorProto.FLOAT16) if is_f16 else (np.float32, TensorProto.FLOAT)
    feeds = {
        "A": rng.standard_normal((m, k)).astype(dtype),
        "B": rng.integers(0, 256, (n, blocks, block_size * bits // 8), dtype=np.uint8),
        "scales": rng.uniform(0.01, 0.1, (n, blocks)).astype(dtype),
    }
    names = ["A", "B", "scales", "", "", ""]
    if zeros == 1:
        codes = rng.integers(0, 1 << bits, (n, blocks))
        packed = np.zeros((n, -(-blocks * bits // 8)), dtype=np.uint8)
        for block in range(blocks):
            packed[:, block * bits // 8] |= (codes[:, block] << (block * bits % 8)).astype(np.uint8)
        feeds["zero_points"] = packed
    elif zeros == 2:
        feeds["zero_points"] = rng.uniform(0, 15, (n, blocks)).astype(dtype)
    if has_g_idx:
        feeds["g_idx"] = rng.permutation(np.arange(k) // block_size).astype(np.int32)
    if has_bias:
        feeds["bias"] = rng.standard_normal(n).astype(dtype)
    for index, name in enumerate(["zero_points", "g_idx", "bias"]):
        if name in feeds:
            names[3 + index] = name
    node = helper.make_node(
        "MatMulNBits", names, ["Y"], domain="com.microsoft", K=k, N=n, bits=bits, block_size=block_size
    )
    types = {np.dtype(np.uint8): TensorProto.UINT8, np.dtype(np.int32): TensorProto.INT32, np.dtype(dtype): onnx_type}
    constants = [  # everything but A: ONNX Runtime then packs B as it does for models
        helper.make_tensor(name, types[value.dtype], value.shape, value.tobytes(), raw=True)
        for name, value in feeds.items()
        if name != "A"
    ]
    graph = helper.make_graph(
        [node],
        "matmul",
        [helper.make_tensor_value_info("A", onnx_type, [m, k])],
        [helper.make_tensor_value_info("Y", onnx_type, [m, n])],
        constants,
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    result = session.run(None, {"A": feeds["A"]})[0]
    order = ["A", "B", "scales", "zero_points", "g_idx", "bias"]
    arrays = b"".join(feeds[name].tobytes() for name in order if name in feeds)
    return np.array(case, dtype="<i4").tobytes() + arrays + result.astype("<f4").tobytes()


def packed_case(rng: np.random.Generator, name: str) -> bytes:
    qtype = GGMLQuantizationType[name]
    block_size, block_bytes = GGML_QUANT_SIZES[qtype]
    m, n, k = 3, 5, 256
    blocks = rng.integers(0, 256, (n * k // block_size, block_bytes), dtype=np.uint8)
    for offset in SCALES.get(name, [0] if name.startswith("IQ") else []):
        ordinary = rng.uniform(0.01, 0.05, len(blocks)).astype(np.float16)
        blocks[:, offset : offset + 2] = ordinary.view(np.uint8).reshape(-1, 2)
    if name == "MXFP4":
        blocks[:, 0] = rng.integers(120, 128, len(blocks))
    if name == "NVFP4":
        blocks[:, :4] = rng.integers(0x20, 0x40, (len(blocks), 4))
    rows = blocks.reshape(n, -1)
    weights = quants.dequantize(rows, qtype).astype(np.float32).reshape(n, k)
    a = rng.standard_normal((m, k)).astype(np.float16)
    exact = a.astype(np.float64) @ weights.astype(np.float64).T
    rounded = a.astype(np.float64) @ weights.astype(np.float16).astype(np.float64).T
    header = np.array([qtype.value, m, n, k], dtype="<i4").tobytes()
    return header + a.tobytes() + rows.tobytes() + exact.astype("<f8").tobytes() + rounded.astype("<f8").tobytes()


def main() -> None:
    folder = pathlib.Path(__file__).parent / "matmul"
    folder.mkdir(exist_ok=True)
    rng = np.random.default_rng(7)
    (folder / "nbits.bin").write_bytes(b"".join(nbits_case(rng, case) for case in NBITS))
    (folder / "packed.bin").write_bytes(b"".join(packed_case(rng, name) for name in PACKED.split()))


if __name__ == "__main__":
    main()
