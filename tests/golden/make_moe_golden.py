"""Writes moe/*.bin: calls of QMoE and MoEGroupRouter and what ONNX Runtime's CPU kernels make of them.

    python make_moe_golden.py        (needs onnxruntime 1.32, onnx, ml_dtypes)

A file is, little-endian: u32 number of arrays, then for each: u32 bytes of name, name, u32 ONNX element type, u32 rank,
i64 dims, u64 bytes, data. Inputs carry the schema's names, the result is `output`.

ONNX Runtime's QMoE differs on purpose in what is kept out of here: softmax over the chosen experts (so routing weights
are normalised everywhere), ties of logits, and dropped small weights. Its 8-bit experts quantise activations, its int3
rounds weights: the tests' tolerances say so.
"""

import pathlib
import struct

import ml_dtypes
import numpy as np
import onnxruntime as ort
from onnx import TensorProto, helper

HERE = pathlib.Path(__file__).parent / "moe"
FLOATS = {
    "f32": (np.float32, TensorProto.FLOAT),
    "f16": (np.float16, TensorProto.FLOAT16),
    "bf16": (ml_dtypes.bfloat16, TensorProto.BFLOAT16),
}
TYPES = {
    np.dtype(np.float32): TensorProto.FLOAT,
    np.dtype(np.float16): TensorProto.FLOAT16,
    np.dtype(ml_dtypes.bfloat16): TensorProto.BFLOAT16,
    np.dtype(np.uint8): TensorProto.UINT8,
    np.dtype(ml_dtypes.float8_e8m0fnu): TensorProto.FLOAT8E8M0,
}
QMOE_INPUTS = (
    "input router_probs fc1_experts_weights fc1_scales fc1_experts_bias fc2_experts_weights fc2_scales fc2_experts_bias "
    "fc3_experts_weights fc3_scales fc3_experts_bias fc1_zero_points fc2_zero_points fc3_zero_points router_weights "
    "fc1_global_scale fc2_global_scale"
).split()


def run(op: str, names: list[str], arrays: dict[str, np.ndarray], attributes: dict, outputs: list[str]) -> dict:
    """Runs one node; weights are initializers, as the kernels expect."""
    fed = [name for name in ("input", "router_probs", "logits") if name in arrays]
    initializers = [
        helper.make_tensor(name, TYPES[array.dtype], array.shape, array.tobytes(), raw=True)
        for name, array in arrays.items()
        if name not in fed
    ]
    used = [name if name in arrays else "" for name in names]
    while used and not used[-1]:
        used.pop()
    dtype = TYPES[arrays[fed[0]].dtype]
    node = helper.make_node(op, used, outputs, domain="com.microsoft", **attributes)
    inputs = [helper.make_tensor_value_info(n, TYPES[arrays[n].dtype], arrays[n].shape) for n in fed]
    made = [
        helper.make_tensor_value_info(
            n, TensorProto.FLOAT if n in ("selection_scores", "router_weights") else dtype, None
        )
        for n in outputs
        if n
    ]
    graph = helper.make_graph([node], "g", inputs, made, initializers)
    opsets = [helper.make_opsetid("", 24), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=11)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    binding = session.io_binding()
    keep = []
    for name in fed:
        array = arrays[name]
        raw = array.view(np.uint16) if array.dtype == ml_dtypes.bfloat16 else array
        keep.append(ort.OrtValue.ortvalue_from_numpy_with_onnx_type(np.ascontiguousarray(raw), TYPES[array.dtype]))
        binding.bind_ortvalue_input(name, keep[-1])
    for name in filter(None, outputs):
        binding.bind_output(name)
    session.run_with_iobinding(binding)
    results = {}
    for name, value in zip(filter(None, outputs), binding.get_outputs(), strict=True):
        shape = value.shape()
        count = int(np.prod(shape))
        element = np.dtype(np.float32 if value.element_type() == TensorProto.FLOAT else np.uint16)
        import ctypes

        raw = (ctypes.c_uint8 * (count * element.itemsize)).from_address(value.data_ptr())
        array = np.frombuffer(bytes(raw), element).reshape(shape)
        if element == np.uint16:
            array = array.view(arrays[fed[0]].dtype)
        results[name] = array
    return results


def write(name: str, arrays: dict[str, np.ndarray]) -> None:
    out = [struct.pack("<I", len(arrays))]
    for key, array in arrays.items():
        data = np.ascontiguousarray(array).tobytes()
        out.append(struct.pack("<I", len(key)) + key.encode())
        out.append(struct.pack("<II", TYPES[array.dtype], array.ndim))
        out.append(struct.pack(f"<{array.ndim}q", *array.shape) + struct.pack("<Q", len(data)) + data)
    HERE.mkdir(exist_ok=True)
    (HERE / f"{name}.bin").write_bytes(b"".join(out))


def pack(codes: np.ndarray, bits: int) -> np.ndarray:
    """LSB-first along the last axis, rows padded to whole bytes."""
    flat = np.unpackbits(codes.astype(np.uint8)[..., None], axis=-1, bitorder="little")[..., :bits]
    return np.packbits(flat.reshape(*codes.shape[:-1], -1), axis=-1, bitorder="little")


def qmoe(
    name, seed, dtype, bits, block, activation, *, zeros=False, bias=False, t=5, h=64, i=32, e=4, k=2, **attributes
):
    rng = np.random.default_rng(seed)
    floats = FLOATS[dtype][0]
    fused = 2 if activation == "swiglu" else 1
    arrays = {
        "input": rng.standard_normal((t, h)).astype(floats),
        "router_probs": rng.permuted(np.linspace(-1.5, 1.5, e)[None].repeat(t, 0), axis=1).astype(floats),
    }
    for part, n, width in (("fc1", fused * i, h), ("fc2", h, i)):
        arrays[f"{part}_experts_weights"] = pack(rng.integers(0, 1 << bits, (e, n, width)), bits)
        size = (e, n, width // block) if block else (e, n)
        arrays[f"{part}_scales"] = (rng.uniform(0.5, 1.5, size) * 0.7 / (1 << (bits - 1)) * 8 / width**0.5 / 4).astype(
            floats
        )
        if bias:
            arrays[f"{part}_experts_bias"] = (rng.standard_normal((e, n)) * 0.2).astype(floats)
        if zeros:
            arrays[f"{part}_zero_points"] = pack(rng.integers(1 << (bits - 2), 3 << (bits - 2), size), bits)
    attributes |= {"k": k, "activation_type": activation, "normalize_routing_weights": 1, "expert_weight_bits": bits}
    if activation == "swiglu":
        attributes["swiglu_fusion"] = 1
    if block:
        attributes["block_size"] = block
    arrays["output"] = run("QMoE", QMOE_INPUTS, arrays, attributes, ["output"])["output"]
    write(name, arrays)


def qmoe_fp4(name, seed, t=4, h=64, i=32, e=4, k=2):
    rng = np.random.default_rng(seed)
    floats = ml_dtypes.bfloat16
    arrays = {
        "input": rng.standard_normal((t, h)).astype(floats),
        "router_probs": rng.permuted(np.linspace(-1.5, 1.5, e)[None].repeat(t, 0), axis=1).astype(floats),
    }
    for part, n, width in (("fc1", 2 * i, h), ("fc2", h, i)):
        arrays[f"{part}_experts_weights"] = rng.integers(0, 256, (e, n, width // 2), dtype=np.uint8)
        scales = np.exp2(rng.integers(-5, -2, (e, n, width // 32))).astype(ml_dtypes.float8_e8m0fnu)
        arrays[f"{part}_scales"] = scales
        arrays[f"{part}_global_scale"] = rng.uniform(0.5, 1.5, e).astype(np.float32)
    attributes = {"k": k, "activation_type": "swiglu", "normalize_routing_weights": 1, "swiglu_fusion": 1}
    attributes |= {"quant_type": "fp4", "weights_prepacked": 1, "expert_weight_bits": 4}
    arrays["output"] = run("QMoE", QMOE_INPUTS, arrays, attributes, ["output"])["output"]
    write(name, arrays)


def group_router(name, seed, dtype, t, e, full=False, width=0, **attributes):
    rng = np.random.default_rng(seed)
    arrays = {
        "logits": (rng.standard_normal((t, width or e)) * (1 if width else 2)).astype(FLOATS[dtype][0]),
        "expert_bias": (rng.standard_normal(e) * 0.1).astype(np.float32),
    }
    if width:
        arrays["projection_weight"] = (rng.standard_normal((e, width)) / width**0.5).astype(FLOATS[dtype][0])
    outputs = ["", "selection_scores", "router_weights"] if full else ["router_probs"]
    results = run("MoEGroupRouter", ["logits", "expert_bias", "projection_weight"], arrays, attributes, outputs)
    write(name, arrays | results)


def main() -> None:
    qmoe("int4_f32_swiglu", 1, "f32", 4, 32, "swiglu", zeros=True, bias=True)
    qmoe("int4_f16_rows_silu", 2, "f16", 4, 0, "silu")
    qmoe("int4_f32_gelu", 3, "f32", 4, 32, "gelu", bias=True)
    qmoe("int8_f32_relu", 4, "f32", 8, 32, "relu")
    qmoe(
        "int8_f16_limited", 5, "f16", 8, 32, "swiglu", bias=True, activation_alpha=1.702, activation_beta=1.0,
        swiglu_limit=0.8,
    )  # fmt: skip
    qmoe("int3_bf16_swiglu", 6, "bf16", 3, 32, "swiglu", weights_prepacked=0)
    qmoe_fp4("fp4_bf16_rows", 7)
    group_router("group_f32", 11, "f32", 6, 16, top_k=4, n_group=4, topk_group=2)
    group_router("group_f16", 12, "f16", 6, 24, top_k=5, n_group=8, topk_group=3, group_topk=3, router_sentinel=-77.0)
    group_router("group_full", 13, "bf16", 5, 16, full=True, top_k=4)
    group_router("group_projected", 14, "f32", 5, 8, full=True, width=256, top_k=2)


if __name__ == "__main__":
    main()
