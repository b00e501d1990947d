"""Linear attention with a recurrent state, and the Mamba-2 mixer."""

from __future__ import annotations

from typing import Any

from shoal.ops._call import call


def gated_delta_net(
    *,
    query: Any,
    key: Any = None,
    value: Any = None,
    cu_seqlens: Any = None,
    decay: Any = None,
    beta: Any = None,
    initial_state: Any = None,
    a_log: Any = None,
    dt_bias: Any = None,
    capture_count: Any = None,
    state_update_active: Any = None,
    update_rule: str = "gated_delta",
    scale: float = 0.0,
    gate_activation: str = "none",
    beta_activation: str = "none",
    qk_l2_norm: int = 0,
    chunk_size: int = 64,
    gate_lower_bound: float = -5.0,
    state_update_capacity: int = 0,
    out: Any = None,
) -> tuple[Any, Any, Any]:
    """Gated delta network over packed sequences: S = exp(g) S + k (beta (v - (exp(g) S)^T k))^T, o = scale S^T q.

    Sizes: Hq query and key heads, Hv value heads (a multiple of Hq), Dk and Dv head sizes, T the type of `query`
    (float32, float16, bfloat16), B sequences. The token axis may be spelled [batch, tokens] without `cu_seqlens`.

    Args:
        query: [num_tokens, Hq, Dk] T; packed [num_tokens, 2 Hq Dk + Hv Dv] without `key` and `value`.
        key, value: [num_tokens, Hq, Dk] and [num_tokens, Hv, Dv] T.
        cu_seqlens: [B + 1] int32; None: sequences of equal length.
        decay: [num_tokens, Hv] or [num_tokens, Hv, Dk], float32 or T; exactly when the rule uses it.
        beta: [num_tokens, Hv], the type of decay; exactly when the rule uses it.
        initial_state: [B, Hv, Dv, Dk] float32; None: zeros.
        a_log, dt_bias: [Hv] float32 (dt_bias also per key), exactly when gate_activation is not none.
        capture_count: [B] int32, exactly when state_update_capacity is positive.
        state_update_active: an int or [1] int32 on the host; 0 makes `state_update` all zero.
        update_rule: linear, gated, delta or gated_delta.
        scale: 0 is 1 / sqrt(Dk).
        gate_activation: none, softplus (qwen) or sigmoid (kda, with gate_lower_bound).
        beta_activation: none or sigmoid.
        qk_l2_norm: 1 normalises q and k.
        chunk_size: a hint, above 0.
        state_update_capacity: C, 0 to 8.
        out: (output, final_state, state_update), None for new arrays. final_state may be initial_state itself.

    Returns:
        (output [num_tokens, Hv, Dv] T, final_state [B, Hv, Dv, Dk] float32,
        state_update [B, C * (decay_width + Hq Dk + Hv Dv)] float32 or None).

    Raises:
        InvalidArgument: names the input or attribute; nothing has been written. Malformed cu_seqlens raise nothing.

    Source: ONNX Runtime com.microsoft::GatedDeltaNet.
    """
    return call("gated_delta_net", locals())


def linear_attention(
    *,
    query: Any,
    key: Any,
    value: Any,
    past_state: Any = None,
    decay: Any = None,
    beta: Any = None,
    q_num_heads: int,
    kv_num_heads: int,
    update_rule: str = "gated_delta",
    scale: float = 0.0,
    chunk_size: int = 64,
    state_window: int = 0,
    out: Any = None,
) -> tuple[Any, Any]:
    """Linear attention over batches of B sequences of L tokens (0 is legal: the state is copied).

    Hq = q_num_heads, Hkv = kv_num_heads; either is a multiple of the other. T is the type of `query`.

    Args:
        query, key, value: [B, L, Hq Dk], [B, L, Hkv Dk], [B, L, Hkv Dv] T (float32, float16, bfloat16).
        past_state: [B, Hkv, Dk, Dv], or [W, B, Hkv, Dk, Dv] with state_window W; any float type. None: zeros.
        decay: [B, L, Hkv] or [B, L, Hkv Dk] T, for gated and gated_delta.
        beta: [B, L, Hkv] or [B, L, 1] T, for delta and gated_delta.
        update_rule: linear, gated, delta or gated_delta.
        scale: 0 is 1 / sqrt(Dk).
        state_window: W > 0 keeps the states after the last W tokens. 0 to 8.
        out: (output, present_state), None for new arrays. present_state may be past_state itself.

    Returns:
        (output [B, L, max(Hq, Hkv) Dv] T, present_state, of the type of past_state, else T).

    Raises:
        InvalidArgument: names the input or attribute; nothing has been written.

    Source: ONNX Runtime com.microsoft::LinearAttention.
    """
    return call("linear_attention", locals())


def linear_attention_gate(*, a: Any, dt_bias: Any, decay_scale: Any, b: Any = None, out: Any = None) -> tuple[Any, Any]:
    """Gates of linear attention: decay = decay_scale * softplus(a + dt_bias), beta = sigmoid(b).

    Args:
        a, b: [B, L, H] float32, float16 or bfloat16, the same.
        dt_bias, decay_scale: [H] float32.
        out: (decay, beta), None for new arrays.

    Returns:
        (decay [B, L, H], beta [B, L, H] or None without b), of the type of `a`.

    Raises:
        InvalidArgument: names the input; nothing has been written.

    Source: ONNX Runtime com.microsoft::LinearAttentionGate.
    """
    return call("linear_attention_gate", locals())


def mamba2_verify(
    *,
    projection: Any,
    conv_state: Any,
    ssm_state: Any,
    conv_weight: Any,
    conv_bias: Any,
    dt_bias: Any,
    A_negative: Any,
    D: Any,
    norm_weight: Any,
    state_row: Any,
    heads: int,
    n_groups: int,
    head_dim: int = 64,
    d_state: int = 128,
    epsilon: float = 1e-5,
    time_step_min: float = 1e-3,
    out: Any = None,
) -> tuple[Any, Any, Any, Any, Any]:
    """A Mamba-2 mixer for R consecutive tokens of one sequence; keeps the states after each of them.

    di = heads * head_dim, channels = di + 2 * n_groups * d_state. Token t writes row t of the snapshots (the last
    `slots` tokens if there are more).

    Args:
        projection: [R, di + channels + heads] bfloat16: gate, xBC, dt.
        conv_state: [slots, channels, 3] bfloat16, oldest first.
        ssm_state: [slots, heads, d_state, head_dim] float32.
        conv_weight: [channels, 4] or [channels, 1, 4] bfloat16; conv_bias [channels] bfloat16.
        dt_bias, A_negative, D: [heads] float32; norm_weight [di] float32.
        state_row: an int or [1] int32: the row of the states to start from. Outside [0, slots): all outputs are NaN.
        out: (Y, conv_snapshots, ssm_snapshots, xbc, readout), None for new arrays; the snapshots may be the states
            themselves. The last two are made only into memory given here.

    Returns:
        (Y [R, di] bfloat16, conv_snapshots, ssm_snapshots, xbc or None, readout or None).

    Raises:
        InvalidArgument: names the input or attribute; nothing has been written.
        Unsupported: head_dim other than 64, d_state other than 128.

    Source: ONNX Runtime com.microsoft::Mamba2Verify.
    """
    return call("mamba2_verify", locals())
