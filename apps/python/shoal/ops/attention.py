"""Attention over paged caches."""

from __future__ import annotations

from typing import Any

from shoal.ops._call import call


def paged_attention(
    *,
    query: Any,
    key: Any = None,
    value: Any = None,
    key_cache: Any,
    value_cache: Any = None,
    cumulative_sequence_length: Any,
    past_seqlens: Any,
    block_table: Any,
    cos_cache: Any = None,
    sin_cache: Any = None,
    slot_mapping: Any = None,
    head_sink: Any = None,
    q_norm_weight: Any = None,
    k_norm_weight: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    attention_metadata: Any = None,
    num_heads: int,
    kv_num_heads: int,
    scale: float | None = None,
    softcap: float = 0.0,
    local_window_size: int = -1,
    is_causal: int = 1,
    do_rotary: int = 0,
    rotary_interleaved: int = 0,
    rotary_offset: int = 0,
    qk_norm_epsilon: float = 1e-6,
    k_quant_type: str = "NONE",
    v_quant_type: str = "NONE",
    k_cache_dtype: str = "",
    v_cache_dtype: str = "",
    kv_cache_layout: str = "SEPARATE",
    v_head_size: int = 0,
    out: Any = None,
) -> tuple[Any, Any, Any]:
    """Appends the step's keys and values to a paged cache, then attends from every token of the step.

    A step is ragged: sequence b has the tokens cumulative_sequence_length[b] to [b + 1], at positions past_seqlens[b]
    and on. Prefill chunk, decode and verification of drafted tokens are the same call with other lengths.

    Sizes: N num_heads, Nk kv_num_heads (divides N), H head size (a multiple of 8), S page size (a power of two, at
    least 16), P pages, M columns of the page table, B sequences, T the type of `query` (float16, bfloat16; float32 on
    the CPU).

    Args:
        query: [num_tokens, N * H] T; packed Q, K, V [num_tokens, (N + 2 Nk) * H] when `key` and `value` are absent.
        key, value: [num_tokens, Nk * H] T. With kv_cache_layout LATENT there is no `value`.
        key_cache, value_cache: [P, S, Nk, H], contiguous, **changed in place**: float32, float16, bfloat16, int8,
            float8_e4m3fn, or int4 as uint8 [P, S, Nk, H / 2] (low nibble the even channel, code + 8) with
            k_cache_dtype / v_cache_dtype "int4". Both may differ. LATENT has no `value_cache`.
        cumulative_sequence_length: [B + 1] int32.
        past_seqlens: [B] int32, tokens already in the cache.
        block_table: [B, M] int32, the page of positions [i S, (i + 1) S); -1 is unmapped.
        cos_cache, sin_cache: [max_pos, rotary_dim / 2] T, with do_rotary.
        slot_mapping: [num_tokens] int32, the flat slot to write; negative: do not write.
        head_sink: [N] T, one more logit in each head's softmax.
        q_norm_weight, k_norm_weight: [H] T, RMS norm of heads before rotary (qk_norm_epsilon).
        k_scale, v_scale: float32, [1] (PER_TENSOR) or Nk * H elements (PER_CHANNEL), with a quantised cache.
        attention_metadata: [2] or [3] int32 on the host, bounds of lengths; never changes a result on the CPU.
        scale: None or 0 is 1 / sqrt(H).
        softcap: x becomes softcap * tanh(x / softcap); 0 is off.
        local_window_size: keys that a token sees, itself included; -1 is all.
        is_causal: 0 lets a token see the whole step.
        rotary_interleaved, rotary_offset: pairs (2i, 2i + 1); the first rotated channel, a multiple of 8.
        k_quant_type, v_quant_type: NONE, PER_TENSOR, PER_CHANNEL.
        kv_cache_layout, v_head_size: LATENT reads V from the first v_head_size channels of the K row.
        out: (output, key_cache, value_cache) or the output alone; the caches can only be themselves.

    Returns:
        (output [num_tokens, N * v_head_size] T, key_cache, value_cache): the caches are the arrays that were given.

    Raises:
        InvalidArgument: names the input or attribute; nothing has been written.
        Unsupported: arrays on a device that this build has no path for.

    Malformed contents (page ids, offsets, slots) are masked, never read: such rows are zero.
    Source: ONNX Runtime com.microsoft::PagedAttention.
    """
    return call("paged_attention", locals())
