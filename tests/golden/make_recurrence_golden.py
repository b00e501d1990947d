"""Writes recurrence/<operator>.json: inputs and outputs of onnxruntime's CPU kernels (oracle of causal_conv_test and
delta_net_test).

    python make_recurrence_golden.py        (needs onnx, onnxruntime 1.32 and numpy)

A file is a list of cases {"attributes": {}, "inputs": {name: tensor}, "outputs": {name: tensor}}, a tensor being
{"type", "shape", "values"}, a value being the shortest decimal that f32 tells apart. Inputs are multiples of 1/64.
What these kernels lack (dynamic taps, captures and windows of a convolution) is tested otherwise.
"""

import json
import pathlib

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper

TYPES = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16, "int32": TensorProto.INT32}
OUTPUTS = {
    "CausalConvWithState": ["output", "present_state"],
    "VarlenCausalConvWithState": ["output", "final_state", "state_update"],
    "GatedDeltaNet": ["output", "final_state", "state_update"],
    "LinearAttention": ["output", "present_state"],
    "LinearAttentionGate": ["decay", "beta"],
}
# Input names in the order of the schema: an absent one keeps its place.
INPUTS = {
    "CausalConvWithState": ["input", "weight", "bias", "past_state"],
    "VarlenCausalConvWithState": [
        *["input", "weight", "cumulative_sequence_length", "bias", "initial_state", "capture_count"],
    ],
    "GatedDeltaNet": [
        *["query", "key", "value", "cu_seqlens", "decay", "beta", "initial_state", "a_log", "dt_bias"],
        *["capture_count", "state_update_active"],
    ],
    "LinearAttention": ["query", "key", "value", "past_state", "decay", "beta"],
    "LinearAttentionGate": ["a", "dt_bias", "decay_scale", "b"],
}


def as_json(array):
    return {
        "type": str(array.dtype),
        "shape": list(array.shape),
        "values": [float(str(x)) for x in array.ravel().astype(np.float32)],
    }


def run(op, attributes, inputs, num_outputs):
    names = INPUTS[op]
    unknown = set(inputs) - set(names)
    assert not unknown, unknown
    while names[-1] not in inputs:
        names = names[:-1]
    node = helper.make_node(
        op,
        [name if name in inputs else "" for name in names],
        OUTPUTS[op][:num_outputs],
        domain="com.microsoft",
        **attributes,
    )
    graph = helper.make_graph(
        [node],
        op,
        [helper.make_tensor_value_info(name, TYPES[str(x.dtype)], x.shape) for name, x in inputs.items()],
        [onnx.ValueInfoProto(name=name) for name in OUTPUTS[op][:num_outputs]],
    )
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)], ir_version=10
    )
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return dict(zip(OUTPUTS[op], session.run(None, inputs), strict=False))


class Cases:
    def __init__(self, op, seed):
        self.op = op
        self.random = np.random.default_rng(seed)
        self.cases = []

    def floats(self, *shape, dtype="float32", scale=1.0):
        return (np.round(self.random.standard_normal(shape) * scale * 64) / 64).astype(dtype)

    def rates(self, *shape, dtype="float32"):
        return (np.round(self.random.uniform(0.05, 0.95, shape) * 64) / 64).astype(dtype)

    def add(self, inputs, num_outputs=2, **attributes):
        outputs = run(self.op, attributes, inputs, num_outputs)
        self.cases.append(
            {
                "attributes": attributes,
                "inputs": {name: as_json(x) for name, x in inputs.items()},
                "outputs": {name: as_json(x) for name, x in outputs.items()},
            }
        )

    def write(self, name):
        text = ",\n".join(json.dumps(case) for case in self.cases)
        (pathlib.Path(__file__).parent / "recurrence" / f"{name}.json").write_text(f"[\n{text}\n]\n")


def causal_conv():
    cases = Cases("CausalConvWithState", 1)
    for num_taps, length, dilation, activation, channels_last, dtype in (
        (1, 3, 1, "none", 0, "float32"),
        (2, 1, 1, "silu", 0, "float32"),
        (3, 4, 1, "none", 0, "float32"),
        (4, 5, 1, "swish", 0, "float32"),
        (4, 1, 1, "silu", 0, "float16"),
        (4, 5, 3, "silu", 0, "float32"),
        (3, 5, 2, "none", 1, "float32"),
        (4, 11, 1, "silu", 1, "float16"),
    ):
        for with_optional in (False, True):
            reach = (num_taps - 1) * dilation
            inputs = {
                "input": cases.floats(*((2, length, 5) if channels_last else (2, 5, length)), dtype=dtype),
                "weight": cases.floats(5, 1, num_taps, dtype=dtype),
            }
            if with_optional:
                inputs["bias"] = cases.floats(5, dtype=dtype)
                inputs["past_state"] = cases.floats(*((2, reach, 5) if channels_last else (2, 5, reach)), dtype=dtype)
            cases.add(inputs, dilation=dilation, activation=activation, channels_last=channels_last)
    cases.write("causal_conv_with_state")


def varlen_causal_conv():
    cases = Cases("VarlenCausalConvWithState", 2)
    for num_taps, dilation, activation, capacity, dtype in (
        (1, 1, "none", 0, "float32"),
        (2, 1, "silu", 2, "float32"),
        (4, 1, "silu", 0, "float16"),
        (4, 3, "swish", 8, "float32"),
        (3, 1, "none", 1, "float16"),
    ):
        offsets = np.array([0, 1, 5, 5, 14], np.int32)
        inputs = {
            "input": cases.floats(14, 5, dtype=dtype),
            "weight": cases.floats(5, 1, num_taps, dtype=dtype),
            "cumulative_sequence_length": offsets,
            "initial_state": cases.floats(4, 5, (num_taps - 1) * dilation, dtype=dtype),
        }
        if capacity > 0:
            inputs["capture_count"] = np.array([3, 2, 1, -1], np.int32)
            inputs["bias"] = cases.floats(5, dtype=dtype)
        cases.add(
            inputs, 3 if capacity else 2, dilation=dilation, activation=activation, state_update_capacity=capacity
        )
    cases.write("varlen_causal_conv_with_state")


def gated_delta_net():
    cases = Cases("GatedDeltaNet", 3)
    offsets = np.array([0, 1, 4, 7], np.int32)
    for rule, options, dtype in (
        ("linear", {}, "float32"),
        ("gated", {}, "float32"),
        ("gated", {"per_key": True}, "float32"),
        ("delta", {"capacity": 2}, "float32"),
        ("gated_delta", {"capacity": 3}, "float32"),
        ("gated_delta", {"capacity": 2, "per_key": True}, "float32"),
        ("gated_delta", {"gate": "qwen", "sigmoid": True, "capacity": 2}, "float32"),
        ("gated_delta", {"gate": "softplus", "per_key": True, "bias_per_key": True}, "float32"),
        ("gated_delta", {"gate": "kda", "per_key": True, "sigmoid": True}, "float32"),
        ("gated_delta", {"gate": "sigmoid"}, "float32"),
        ("gated_delta", {"rank4": True, "sigmoid": True}, "float32"),
        ("gated_delta", {"packed": True}, "float32"),
        ("gated_delta", {"gate": "qwen", "sigmoid": True}, "float16"),
        ("delta", {"sigmoid": True}, "float16"),
    ):
        num_tokens, batch, q_heads, v_heads, k_dim, v_dim = 7, 3, 2, 4, 6, 5
        tokens = (num_tokens,)
        if options.get("rank4"):
            num_tokens, batch = 6, 3
            tokens = (batch, 2)
        inputs = {
            "query": cases.floats(*tokens, q_heads, k_dim, dtype=dtype),
            "key": cases.floats(*tokens, q_heads, k_dim, dtype=dtype),
            "value": cases.floats(*tokens, v_heads, v_dim, dtype=dtype),
            "initial_state": cases.floats(batch, v_heads, v_dim, k_dim),
        }
        if options.get("packed"):
            inputs = {
                "query": cases.floats(num_tokens, 2 * q_heads * k_dim + v_heads * v_dim),
                "initial_state": inputs["initial_state"],
            }
        if not options.get("rank4"):
            inputs["cu_seqlens"] = offsets
        attributes = {"update_rule": rule, "qk_l2_norm": 1}
        gate = options.get("gate")
        if rule in ("gated", "gated_delta"):
            width = (v_heads, k_dim) if options.get("per_key") else (v_heads,)
            decay = cases.floats(*tokens, *width, dtype=dtype)
            inputs["decay"] = decay if gate else -np.abs(decay)
        if rule in ("delta", "gated_delta"):
            beta = cases.floats(*tokens, v_heads, dtype=dtype)
            inputs["beta"] = beta if options.get("sigmoid") else np.clip(np.abs(beta), 0, 1)
        if options.get("sigmoid"):
            attributes["beta_activation"] = "sigmoid"
        if gate:
            attributes["gate_activation"] = gate
            inputs["a_log"] = cases.floats(v_heads, scale=0.5)
            inputs["dt_bias"] = cases.floats(v_heads, k_dim) if options.get("bias_per_key") else cases.floats(v_heads)
            if gate in ("kda", "sigmoid"):
                attributes["gate_lower_bound"] = -3.0
        if options.get("capacity"):
            attributes["state_update_capacity"] = options["capacity"]
            inputs["capture_count"] = np.array([5, 2, 1], np.int32)
        # The suffix of a capture is unspecified: the test compares the prefix.
        cases.add(inputs, 3 if options.get("capacity") else 2, **attributes)
    cases.write("gated_delta_net")


def linear_attention():
    cases = Cases("LinearAttention", 4)
    for rule, q_heads, kv_heads, per_key, beta_heads, with_past, scale, dtype in (
        ("linear", 2, 2, False, 0, False, 0.0, "float32"),
        ("gated", 4, 2, True, 0, True, 0.0, "float32"),
        ("gated", 2, 4, False, 0, True, 0.5, "float32"),
        ("delta", 2, 2, False, 1, True, 0.0, "float32"),
        ("gated_delta", 2, 2, True, 2, True, 1.5, "float32"),
        ("gated_delta", 4, 2, False, 2, False, 0.0, "float32"),
        ("gated_delta", 2, 4, False, 4, True, 0.0, "float16"),
    ):
        k_dim, v_dim = 4, 5
        key = cases.floats(2, 5, kv_heads, k_dim)
        key /= np.sqrt(np.sum(key * key, axis=-1, keepdims=True) + 1)
        key = np.round(key * 64) / 64
        inputs = {
            "query": cases.floats(2, 5, q_heads * k_dim, dtype=dtype),
            "key": key.reshape(2, 5, kv_heads * k_dim).astype(dtype),
            "value": cases.floats(2, 5, kv_heads * v_dim, dtype=dtype),
        }
        if with_past:
            inputs["past_state"] = cases.floats(2, kv_heads, k_dim, v_dim, dtype=dtype)
        if rule in ("gated", "gated_delta"):
            inputs["decay"] = -np.abs(cases.floats(2, 5, kv_heads * (k_dim if per_key else 1), dtype=dtype))
        if beta_heads:
            inputs["beta"] = cases.rates(2, 5, beta_heads, dtype=dtype)
        cases.add(inputs, update_rule=rule, q_num_heads=q_heads, kv_num_heads=kv_heads, scale=scale)
    cases.write("linear_attention")


def linear_attention_gate():
    cases = Cases("LinearAttentionGate", 5)
    for dtype, with_beta in (("float32", True), ("float16", True), ("float32", False)):
        inputs = {
            "a": cases.floats(2, 5, 6, dtype=dtype, scale=8.0),
            "dt_bias": cases.floats(6),
            "decay_scale": -np.abs(cases.floats(6)),
        }
        if with_beta:
            inputs["b"] = cases.floats(2, 5, 6, dtype=dtype, scale=4.0)
        cases.add(inputs, 2 if with_beta else 1)
    cases.write("linear_attention_gate")


if __name__ == "__main__":
    (pathlib.Path(__file__).parent / "recurrence").mkdir(exist_ok=True)
    causal_conv()
    varlen_causal_conv()
    gated_delta_net()
    linear_attention()
    linear_attention_gate()
