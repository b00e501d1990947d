"""shoal.ops: conventions, and every other bound operator against float64."""

from __future__ import annotations

import inspect
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from ops_reference import BF16, FP8

from shoal import InvalidArgument, Unsupported, _core, ops

RNG = np.random.default_rng(7)
TOLERANCE = {"float16": 4e-3, "bfloat16": 3e-2, "float32": 2e-5}
CONTRACT = """
paged_attention sparse_paged_attention dynamic_sparse_attention packed_sparse_attention_indexer sparse_attention_indexer
sparse_attention_selection_merge packed_sparse_attention_indexer_merge sparse_row_select gated_latent_pool
qmoe moe_router moe_group_router moe_packed matmul_nbits matmul_packed matmul_fp4 matmul_fp8
causal_conv_with_state varlen_causal_conv_with_state gated_delta_net linear_attention linear_attention_gate mamba2_verify
quantize dequantize explain
""".split()


def normal(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return RNG.standard_normal(shape).astype(dtype)


def close(actual: np.ndarray, expected: np.ndarray, dtype: Any = None) -> None:
    tolerance = TOLERANCE[np.dtype(dtype or actual.dtype).name]
    np.testing.assert_allclose(actual.astype(np.float64), expected, rtol=tolerance, atol=tolerance)


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def softplus(x: np.ndarray) -> np.ndarray:
    return np.log1p(np.exp(x))


# Conventions


def test_every_operator_of_the_contracts_is_there_with_documentation() -> None:
    assert sorted(ops.__all__) == sorted(CONTRACT)
    for name in CONTRACT:
        assert inspect.getdoc(getattr(ops, name)), name


@pytest.mark.parametrize("name", sorted(_core.ops.operators()))
def test_signatures_are_the_fields_of_the_binding(name: str) -> None:
    if name in ("quantize", "dequantize"):
        return
    parameters = inspect.signature(getattr(ops, name)).parameters
    assert set(parameters) == {*_core.ops.operators()[name]["uses"], "out"}
    assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in parameters.values())


def test_missing_and_unknown_keywords_are_type_errors() -> None:
    with pytest.raises(TypeError, match="decay_scale"):
        ops.linear_attention_gate(a=normal(1, 1, 2), dt_bias=normal(2))
    with pytest.raises(TypeError, match="gamma"):
        ops.linear_attention_gate(a=normal(1, 1, 2), dt_bias=normal(2), decay_scale=normal(2), gamma=1)
    with pytest.raises(TypeError, match="gamma"):
        ops.explain("linear_attention_gate", a=normal(1, 1, 2), dt_bias=normal(2), decay_scale=normal(2), gamma=1)


def test_explain_names_the_variant_and_checks() -> None:
    arguments = {"a": normal(1, 1, 2), "dt_bias": normal(2), "decay_scale": normal(2)}
    text = ops.explain("linear_attention_gate", **arguments)
    assert f"cpu {_core.ops.default_isa()}" in text and "cuda" in text
    with pytest.raises(InvalidArgument, match="dt_bias"):
        ops.explain("linear_attention_gate", **arguments | {"dt_bias": normal(3)})
    with pytest.raises(InvalidArgument, match="nothing"):
        ops.explain("nothing")


def test_out_takes_views_states_and_overlapping_memory() -> None:
    x, weight, past = normal(2, 3, 5), normal(3, 1, 4), normal(2, 3, 3)
    output, state, update = ops.causal_conv_with_state(input=x, weight=weight, past_state=past)
    assert update is None
    memory = np.zeros(x.nbytes + 1, np.uint8)
    odd = memory[1:].view(np.float32).reshape(x.shape)
    own = past.copy()
    result = ops.causal_conv_with_state(input=x, weight=weight, past_state=own, out=(odd, own))
    assert result[0] is odd and result[1] is own
    assert odd.tobytes() == output.tobytes() and own.tobytes() == state.tobytes()
    wide = np.zeros((2, 3, 10), np.float32)
    same = x.copy()
    ops.causal_conv_with_state(input=x, weight=weight, past_state=past, out=wide[:, :, ::2])
    ops.causal_conv_with_state(input=same, weight=weight, past_state=past, out=same)
    assert wide[:, :, ::2].tobytes() == output.tobytes() and same.tobytes() == output.tobytes()
    assert not wide[:, :, 1::2].any()


def test_out_of_the_wrong_kind_is_refused_by_name() -> None:
    x, weight = normal(2, 3, 5), normal(3, 1, 4)
    read_only = np.zeros_like(x)
    read_only.flags.writeable = False
    broadcast = np.lib.stride_tricks.as_strided(np.zeros(1, np.float32), x.shape, (0, 0, 0))
    for out in (read_only, broadcast, x.astype(np.float16), x[:1].copy(), (None, None, x.copy()), [None] * 4):
        with pytest.raises(InvalidArgument, match="out"):
            ops.causal_conv_with_state(input=x, weight=weight, out=out)
    assert not read_only.any()


def test_inputs_at_odd_offsets_with_any_strides_and_byte_orders() -> None:
    x, weight = normal(2, 3, 5), normal(3, 1, 4)
    expected = ops.causal_conv_with_state(input=x, weight=weight)[0].tobytes()
    odd = np.zeros(x.nbytes + 1, np.uint8)[1:].view(np.float32).reshape(x.shape)
    odd[...] = x
    packed = np.zeros(x.shape, [("pad", np.uint8), ("x", np.float32)])
    packed["x"] = x
    for view in (odd, packed["x"], x.astype(">f4"), x[:, :, ::-1].copy()[:, :, ::-1], np.asfortranarray(x)):
        assert ops.causal_conv_with_state(input=view, weight=weight)[0].tobytes() == expected


class Speaks:
    """An array of another library: DLPack only."""

    def __init__(self, array: np.ndarray, device: tuple[int, int] = (1, 0)) -> None:
        self.array, self.device = array, device

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __array_namespace__(self) -> type[Speaks]:
        return Speaks

    @staticmethod
    def asarray(array: np.ndarray) -> Speaks:
        return Speaks(array)


def test_other_libraries_devices_and_mixtures() -> None:
    x, weight = normal(2, 3, 5), normal(3, 1, 4)
    result = ops.causal_conv_with_state(input=Speaks(x), weight=Speaks(weight))
    assert isinstance(result[0], Speaks) and isinstance(result[1], Speaks)
    assert result[0].array.tobytes() == ops.causal_conv_with_state(input=x, weight=weight)[0].tobytes()
    with pytest.raises(InvalidArgument, match=r"weight.*one library"):
        ops.causal_conv_with_state(input=Speaks(x), weight=weight)
    with pytest.raises(Unsupported, match=r"input.*cuda:0"):
        ops.causal_conv_with_state(input=Speaks(x, (2, 0)), weight=Speaks(weight))


def test_torch_tensors() -> None:
    torch = pytest.importorskip("torch")
    x, weight = torch.randn(2, 3, 5).bfloat16(), torch.randn(3, 1, 4).bfloat16()
    output, state, _ = ops.causal_conv_with_state(input=x, weight=weight)
    expected = ops.causal_conv_with_state(
        input=x.float().numpy().astype(BF16), weight=weight.float().numpy().astype(BF16)
    )
    assert output.dtype == torch.bfloat16 and state.dtype == torch.bfloat16
    assert (output.float().numpy() == expected[0].astype(np.float32)).all()
    out = torch.zeros(2, 3, 10, dtype=torch.bfloat16)[:, :, ::2]
    assert ops.causal_conv_with_state(input=x, weight=weight, out=out)[0] is out
    assert torch.equal(out, output)
    with pytest.raises(InvalidArgument, match=r"weight.*one library"):
        ops.causal_conv_with_state(input=x, weight=weight.float().numpy())
    parts = ops.quantize("fp8_e4m3", x.float().reshape(2, 15))
    assert parts["codes"].dtype == torch.float8_e4m3fn
    assert ops.dequantize("fp8_e4m3", parts, (2, 15)).dtype == torch.float32


# Convolutions and recurrences


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16])
@pytest.mark.parametrize("activation", ["none", "silu"])
def test_causal_conv(dtype: Any, activation: str) -> None:
    x, weight, bias, past = (
        normal(2, 3, 5, dtype=dtype),
        normal(3, 1, 4, dtype=dtype),
        normal(3, dtype=dtype),
        normal(2, 3, 6, dtype=dtype),
    )
    output, state, update = ops.causal_conv_with_state(
        input=x.swapaxes(1, 2),
        weight=weight,
        bias=bias,
        past_state=past.swapaxes(1, 2),
        dilation=2,
        activation=activation,
        channels_last=1,
        state_update_capacity=2,
    )
    whole = np.concatenate([past, x], axis=2).astype(np.float64)
    expected = bias.astype(np.float64)[None, :, None] + sum(
        weight[:, 0, j].astype(np.float64)[None, :, None] * whole[:, :, 2 * j : 2 * j + 5] for j in range(4)
    )
    close(output.swapaxes(1, 2), silu(expected) if activation == "silu" else expected)
    assert state.swapaxes(1, 2).tobytes() == np.concatenate([past, x], axis=2)[:, :, -6:].tobytes()
    assert update.tobytes() == x[:, :, :2].swapaxes(1, 2).tobytes()


def test_varlen_causal_conv() -> None:
    lengths, x, weight, past = [3, 0, 2], normal(5, 4), normal(4, 1, 3), normal(3, 4, 2)
    cu = np.cumsum([0, *lengths]).astype(np.int32)
    count = np.array([9, 1, 1], np.int32)
    output, state, update = ops.varlen_causal_conv_with_state(
        input=x,
        weight=weight,
        cumulative_sequence_length=cu,
        initial_state=past,
        capture_count=count,
        state_update_capacity=2,
    )
    for b in range(3):
        whole = np.concatenate([past[b].T, x[cu[b] : cu[b + 1]]])
        expected = [(whole[t : t + 3].astype(np.float64) * weight[:, 0].T).sum(0) for t in range(lengths[b])]
        close(output[cu[b] : cu[b + 1]], np.reshape(expected, (-1, 4)))
        assert (whole[-2:] == state[b].T).all()
    assert (
        (update[0] == x[:2]).all() and not update[1].any() and (update[2, 0] == x[3]).all() and not update[2, 1].any()
    )


def delta_rule(q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """One head: q, k [T, Dk], v [T, Dv], g, beta [T], state [Dk, Dv]."""
    state, outputs = state.astype(np.float64), []
    for t in range(len(q)):
        state = np.exp(g[t]) * state
        state = state + np.outer(k[t], beta[t] * (v[t] - state.T @ k[t]))
        outputs.append(scale * state.T @ q[t])
    return np.array(outputs), state


def test_gated_delta_net() -> None:
    q, k, v = normal(5, 1, 8), normal(5, 1, 8), normal(5, 2, 4)
    k /= np.linalg.norm(k, axis=2, keepdims=True)
    g, beta, state = -np.abs(normal(5, 2)), np.abs(normal(5, 2)) / 2, normal(2, 2, 4, 8)
    cu, before = np.array([0, 2, 5], np.int32), state.tobytes()
    output, final, update = ops.gated_delta_net(
        query=q, key=k, value=v, decay=g, beta=beta, cu_seqlens=cu, initial_state=state
    )
    assert update is None and state.tobytes() == before
    for b in range(2):
        for h in range(2):
            rows = slice(cu[b], cu[b + 1])
            o, s = delta_rule(q[rows, 0], k[rows, 0], v[rows, h], g[rows, h], beta[rows, h], state[b, h].T, 8**-0.5)
            close(output[rows, h], o)
            close(final[b, h], s.T)
    captured = {"capture_count": np.array([1, 1], np.int32), "state_update_capacity": 1}
    arguments = {
        "query": q,
        "key": k,
        "value": v,
        "decay": g,
        "beta": beta,
        "cu_seqlens": cu,
        "initial_state": state,
        **captured,
    }
    assert ops.gated_delta_net(**arguments)[2].any()
    assert not ops.gated_delta_net(**arguments, state_update_active=0)[2].any()


def test_linear_attention_and_its_gate() -> None:
    q, k, v = normal(2, 3, 8), normal(2, 3, 8), normal(2, 3, 4)
    k /= np.linalg.norm(k, axis=2, keepdims=True)
    a, dt_bias, decay_scale, b = normal(2, 3, 1), normal(1), -np.abs(normal(1)), normal(2, 3, 1)
    g, beta = ops.linear_attention_gate(a=a, dt_bias=dt_bias, decay_scale=decay_scale, b=b)
    close(g, decay_scale * softplus(a.astype(np.float64) + dt_bias))
    close(beta, 1 / (1 + np.exp(-b.astype(np.float64))))
    output, state = ops.linear_attention(query=q, key=k, value=v, decay=g, beta=beta, q_num_heads=1, kv_num_heads=1)
    for i in range(2):
        o, s = delta_rule(q[i], k[i], v[i], g[i, :, 0], beta[i, :, 0], np.zeros((8, 4)), 8**-0.5)
        close(output[i], o)
        close(state[i, 0], s)


def test_mamba2_verify() -> None:
    heads, di, channels = 2, 128, 384
    projection = (normal(2, di + channels + heads) / 2).astype(BF16)
    conv_state, ssm_state = normal(2, channels, 3, dtype=BF16), normal(2, heads, 128, 64) / 8
    weight, bias, norm = (normal(channels, 4) / 2).astype(BF16), normal(channels, dtype=BF16), normal(di)
    dt_bias, a, d = normal(heads), -np.abs(normal(heads)), normal(heads)
    arguments = dict(
        projection=projection,
        conv_state=conv_state,
        ssm_state=ssm_state,
        conv_weight=weight,
        conv_bias=bias,
        dt_bias=dt_bias,
        A_negative=a,
        D=d,
        norm_weight=norm,
        heads=heads,
        n_groups=1,
    )
    y, conv, ssm, no_xbc, no_readout = ops.mamba2_verify(**arguments, state_row=1)
    assert no_xbc is None and no_readout is None
    window, state = conv_state[1].astype(np.float64), ssm_state[1].astype(np.float64)
    for t in range(2):
        row = projection[t].astype(np.float64)
        gate, x, dt = row[:di], row[di : di + channels], np.maximum(softplus(row[di + channels :] + dt_bias), 1e-3)
        taps = np.concatenate([window, x[:, None]], axis=1)
        window = taps[:, 1:]
        xbc = silu(bias.astype(np.float64) + (weight.astype(np.float64) * taps).sum(1)).astype(BF16).astype(np.float64)
        heads_x, b, c = xbc[:di].reshape(heads, 64), xbc[di : di + 128], xbc[di + 128 :]
        state = np.exp(a * dt)[:, None, None] * state + b[None, :, None] * (dt[:, None] * heads_x)[:, None, :]
        readout = (d[:, None] * heads_x + np.einsum("n,hnp->hp", c, state)).reshape(di)
        v = readout * silu(gate)
        close(y[t], v / np.sqrt((v**2).mean() + 1e-5) * norm)
        np.testing.assert_allclose(ssm[t], state, rtol=2e-2, atol=2e-2)
        assert (conv[t].astype(np.float64) == window).all()
    readout = np.zeros((2, di), np.float32)
    again = ops.mamba2_verify(**arguments, state_row=np.array([1], np.int32), out=(None, None, None, None, readout))
    assert again[4] is readout and readout.any() and again[0].tobytes() == y.tobytes()


# Products and formats


@pytest.mark.parametrize("fmt", ["int2", "int4", "int8", "fp8_e4m3", "mxfp4", "nvfp4", "q8_0", "q4_0", "bf16"])
@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_quantize_and_back(fmt: str, dtype: Any) -> None:
    x = normal(6, 64, dtype=dtype)
    parts = ops.quantize(fmt, x)
    y = ops.dequantize(fmt, parts | {"zeros": parts.get("zeros")}, x.shape)
    assert y.dtype == np.float32 and y.shape == x.shape
    step = {
        "int2": 2.0,
        "int4": 0.4,
        "int8": 0.03,
        "fp8_e4m3": 0.3,
        "mxfp4": 1.5,
        "nvfp4": 0.8,
        "q8_0": 0.03,
        "q4_0": 0.5,
        "bf16": 0.02,
    }[fmt]
    assert np.abs(y - x.astype(np.float32)).max() < step


def test_formats_are_refused_by_name() -> None:
    x = normal(2, 64)
    for name, wrong in {
        "format": lambda: ops.quantize("int5", x),
        "block_size": lambda: ops.quantize("int4", x, block_size=48),
        "scales": lambda: ops.dequantize("int4", {"codes": ops.quantize("int4", x)["codes"]}, x.shape),
        "parts": lambda: ops.dequantize("int4", [1], x.shape),
        "extra": lambda: ops.dequantize("q8_0", ops.quantize("q8_0", x) | {"extra": x}, x.shape),
    }.items():
        with pytest.raises(InvalidArgument, match=name):
            wrong()


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_matmul_nbits(bits: int, dtype: Any) -> None:
    a, w, bias = normal(2, 3, 64, dtype=dtype), normal(5, 64, dtype=dtype), normal(5, dtype=dtype)
    parts = ops.quantize(f"int{bits}", w)
    y = ops.matmul_nbits(
        A=a,
        B=parts["codes"].reshape(5, 2, 4 * bits),
        scales=parts["scales"],
        bias=bias,
        K=64,
        N=5,
        block_size=32,
        bits=bits,
    )
    weights = ops.dequantize(f"int{bits}", parts, w.shape).astype(np.float64)
    close(y, a.astype(np.float64) @ weights.T + bias.astype(np.float64))


def test_matmul_packed_takes_ids_and_names() -> None:
    a, w = normal(3, 64), normal(5, 64)
    codes = ops.quantize("q8_0", w)["codes"]
    y = ops.matmul_packed(A=a, B=codes, packed_type="Q8_0", N=5, K=64)
    close(y, a.astype(np.float64) @ ops.dequantize("q8_0", {"codes": codes}, w.shape).astype(np.float64).T)
    assert ops.matmul_packed(A=a, B=codes, packed_type=8, N=5, K=64).tobytes() == y.tobytes()
    strided = np.zeros((10, codes.shape[1]), np.uint8)[::2]
    strided[...] = codes
    assert ops.matmul_packed(A=a, B=strided, packed_type=8, N=5, K=64).tobytes() == y.tobytes()
    with pytest.raises(InvalidArgument, match="packed_type"):
        ops.matmul_packed(A=a, B=codes, packed_type="Q9_9", N=5, K=64)
    with pytest.raises(Unsupported, match="packed_type"):
        ops.matmul_packed(A=a, B=codes, packed_type="IQ1_S", N=5, K=64)


def test_matmul_fp4_takes_packed_bytes_and_ml_dtypes() -> None:
    a, codes = normal(3, 32, dtype=BF16), RNG.integers(0, 16, (5, 32)).astype(np.uint8)
    scale, scale_2 = np.abs(normal(5, 2)).astype(FP8), np.float32(0.5)
    values = codes.view(ml_dtypes.float4_e2m1fn)
    packed = codes[:, ::2] | (codes[:, 1::2] << 4)
    weights = (values.astype(np.float32) * np.repeat(scale.astype(np.float32), 16, axis=1) * scale_2).astype(BF16)
    y = ops.matmul_fp4(A=a, B=packed, weight_scale=scale, weight_scale_2=np.array([scale_2]))
    close(y, a.astype(np.float64) @ weights.astype(np.float64).T)
    assert ops.matmul_fp4(A=a, B=values, weight_scale=scale, weight_scale_2=np.array(scale_2)).tobytes() == y.tobytes()


def test_matmul_fp8() -> None:
    a, w, scale = normal(3, 160, dtype=np.float16), normal(5, 160).astype(FP8), np.abs(normal(5, 2))
    y = ops.matmul_fp8(A=a, B=w, b_scale=scale)
    weights = w.astype(np.float64) * np.repeat(scale.astype(np.float64), 128, axis=1)[:, :160]
    np.testing.assert_allclose(y.astype(np.float64), a.astype(np.float64) @ weights.T, rtol=2e-3, atol=2e-2)


def test_products_name_what_is_wrong() -> None:
    a, b, scales = normal(3, 64), np.zeros((5, 2, 16), np.uint8), normal(5, 2)
    for name, change in {
        "N": {"N": -1},
        "B": {"N": 6},
        "K": {"K": 1 << 70},
        "scales": {"scales": normal(5, 3)},
        "block_size": {"block_size": 24},
        "out": {"out": normal(3, 4)},
    }.items():
        with pytest.raises(InvalidArgument, match=name):
            ops.matmul_nbits(**{"A": a, "B": b, "scales": scales, "K": 64, "N": 5, "block_size": 32} | change)
    out = np.zeros((3, 10), np.float32)[:, ::2]
    full = {"A": a, "B": b, "scales": scales, "K": 64, "N": 5, "block_size": 32}
    assert ops.matmul_nbits(**full, out=out) is out
    assert out.tobytes() == ops.matmul_nbits(**full).tobytes()


# Experts


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def mixture(x: Any, probs: Any, gate: Any, up: Any, down: Any, k: int) -> np.ndarray:
    """SwiGLU experts in float64; weights are the softmax's, normalised over the chosen."""
    x, probs = x.astype(np.float64), softmax(probs.astype(np.float64))
    result = np.zeros((len(x), down.shape[1]))
    for t in range(len(x)):
        chosen = np.argsort(-probs[t], kind="stable")[:k]
        for e in chosen:
            h = silu(gate[e] @ x[t]) * (up[e] @ x[t])
            result[t] += probs[t, e] / probs[t, chosen].sum() * (down[e] @ h)
    return result


def test_qmoe_int4_in_blocks_with_odd_views() -> None:
    x, probs = normal(6, 64), normal(6, 4)
    w1, w2 = normal(4, 64, 64) / 8, normal(4, 64, 32) / 8
    one, two = ops.quantize("int4", w1), ops.quantize("int4", w2)
    arguments = dict(
        input=x, router_probs=probs, fc1_experts_weights=one["codes"], fc1_scales=one["scales"], fc2_experts_weights=two["codes"], fc2_scales=two["scales"],
        k=2, activation_type="swiglu", swiglu_fusion=2, normalize_routing_weights=1, block_size=32,
    )  # fmt: skip
    y = ops.qmoe(**arguments)
    first, second = (
        ops.dequantize("int4", one, w1.shape).astype(np.float64),
        ops.dequantize("int4", two, w2.shape).astype(np.float64),
    )
    close(y, mixture(x, probs, first[:, :32], first[:, 32:], second, 2))
    wide = np.zeros((6, 128), np.float32)[:, ::2]
    wide[...] = x
    again = x.copy()
    assert ops.qmoe(**arguments | {"input": wide}).tobytes() == y.tobytes()
    assert ops.qmoe(**arguments | {"input": again}, out=again) is again and again.tobytes() == y.tobytes()
    for name, change in {
        "fc1_scales": {"fc1_scales": None},
        "k": {"k": 9},
        "quant_type": {"quant_type": "int9"},
        "router_probs": {"router_probs": probs[:2]},
    }.items():
        with pytest.raises(InvalidArgument, match=name):
            ops.qmoe(**arguments | change)


def test_moe_packed() -> None:
    x, probs = normal(5, 64), normal(5, 3)
    weights = [normal(3, 32, 64) / 8, normal(3, 32, 64) / 8, normal(3, 64, 32) / 8]
    codes = [ops.quantize("q8_0", w)["codes"] for w in weights]
    gate, up, down = (
        ops.dequantize("q8_0", {"codes": c}, w.shape).astype(np.float64) for c, w in zip(codes, weights, strict=True)
    )
    y = ops.moe_packed(
        input=x,
        router_probs=probs,
        gate_experts_weights=codes[0],
        up_experts_weights=codes[1],
        down_experts_weights=codes[2],
        gate_type="Q8_0",
        up_type=8,
        down_type="q8_0",
        k=2,
    )
    close(y, mixture(x, probs, gate, up, down, 2))
    with pytest.raises(InvalidArgument, match="up_experts_weights"):
        ops.moe_packed(
            input=x,
            router_probs=probs,
            gate_experts_weights=codes[0],
            down_experts_weights=codes[2],
            gate_type=8,
            up_type=8,
            down_type=8,
        )


@pytest.mark.parametrize("dtype", ["float32", "float16", BF16])
def test_moe_router(dtype: Any) -> None:
    scores, bias = normal(4, 8), normal(8)
    probs, scale = ops.moe_router(
        scores=scores, bias=bias, topk=3, local_expert_start=2, local_expert_count=5, route_scale=2.0, dtype=dtype
    )
    assert probs.dtype == np.dtype(dtype) and probs.shape == (4, 5) and scale.shape == (4, 1)
    o = np.sqrt(softplus(scores.astype(np.float64)))
    expected, sums = np.full((4, 5), -1e4 if dtype == "float16" else -1e30), np.zeros((4, 1))
    for t in range(4):
        chosen = np.argsort(-(o[t] + bias), kind="stable")[:3]
        for e in chosen:
            if 2 <= e < 7:
                expected[t, e - 2] = np.log(o[t, e] / o[t, chosen].sum())
                sums[t] += 2 * o[t, e] / o[t, chosen].sum()
    np.testing.assert_allclose(probs.astype(np.float64), expected, rtol=1e-2)
    close(scale, sums)
    with pytest.raises(InvalidArgument, match="dtype"):
        ops.moe_router(scores=scores, local_expert_count=8, dtype=3.5)


def test_moe_group_router() -> None:
    logits, bias = normal(4, 8), np.zeros(8, np.float32)
    probs, no_scores, no_weights = ops.moe_group_router(
        logits=logits, expert_bias=bias, top_k=2, n_group=4, topk_group=2
    )
    assert no_scores is None and no_weights is None
    s = 1 / (1 + np.exp(-logits.astype(np.float64)))
    for t in range(4):
        kept = np.argsort(-s[t].reshape(4, 2).sum(1), kind="stable")[:2]
        masked = np.where(np.isin(np.arange(8) // 2, kept), s[t], -1)
        expected = np.full(8, -10000.0)
        chosen = np.argsort(-masked, kind="stable")[:2]
        expected[chosen] = np.log(s[t, chosen])
        np.testing.assert_allclose(probs[t], expected, rtol=1e-5)
    none, scores, weights = ops.moe_group_router(logits=logits, expert_bias=bias, top_k=2, full_scores=True)
    assert none is None
    close(scores, s)
    close(weights, s)
