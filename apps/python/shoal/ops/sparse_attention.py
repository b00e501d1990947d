"""Attention over positions that an indexer selected."""

from __future__ import annotations

from typing import Any

from shoal.ops._call import call


def sparse_paged_attention(
    *,
    query: Any,
    key: Any = None,
    value: Any = None,
    key_cache: Any,
    value_cache: Any,
    cumulative_sequence_length: Any,
    past_seqlens: Any,
    block_table: Any,
    slot_mapping: Any = None,
    selected_indices: Any,
    selected_counts: Any,
    auxiliary_key: Any = None,
    auxiliary_value: Any = None,
    auxiliary_lengths: Any = None,
    cos_cache: Any = None,
    sin_cache: Any = None,
    head_sink: Any = None,
    q_norm_weight: Any = None,
    k_norm_weight: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    attention_metadata: Any = None,
    num_heads: int,
    kv_num_heads: int,
    scale: float | None = None,
    softcap: float | None = None,
    local_window_size: int = -1,
    is_causal: int = 1,
    attention_mode: str = "selected_only",
    selected_kv_source: str = "main",
    auxiliary_cache_layout: str = "contiguous",
    auxiliary_kv_shared: int = 0,
    do_rotary: int = 0,
    rotary_interleaved: int = 0,
    rotary_offset: int = 0,
    qk_norm_epsilon: float = 1e-6,
    k_quant_type: str = "NONE",
    v_quant_type: str = "NONE",
    out: Any = None,
) -> tuple[Any, Any, Any]:
    """Appends the keys and values of a step to a paged cache, then attends to selected positions.

    The append is that of `paged_attention`.

    Token t of sequence b, at position pos = past_seqlens[b] + its place in the step, attends in one softmax to

    - with attention_mode "local_plus_selected": positions max(0, pos - local_window_size + 1) to pos of the main cache
      (from 0 if local_window_size is not positive; to the end of the step if not is_causal);
    - the first selected_counts[t] entries of selected_indices[t]: positions of the main cache, or rows of the auxiliary
      one with selected_kv_source "auxiliary". Of the main cache, one that is in the local window counts once; equal
      entries each carry weight.

    Entries that are no valid position (negative, beyond the sequence, in the future, of an unmapped page; beyond
    auxiliary_lengths) are left out. A token without a valid one is zero, also with a sink. A token of this step is seen
    through its own key and value, or through its codes in an int8 cache; through the cache's row where its slot is
    negative; not at all where its slot is beyond the pool.

    Sizes: N num_heads, G kv_num_heads (divides N), H head size (a multiple of 8), S page size (a power of two, at least
    16), P pages, C columns of the page table, M entries, A rows of the auxiliary cache, B sequences, T the type of
    `query` (float16, bfloat16; float32 on the CPU).

    Args:
        query: [num_tokens, N * H] T; packed Q, K, V [num_tokens, (N + 2 G) * H] when `key` and `value` are absent.
        key, value: [num_tokens, G * H] T.
        key_cache, value_cache: [P, S, G, H] T or int8 (float32 on the CPU), contiguous, **changed in place**.
        cumulative_sequence_length: [B + 1] int32.
        past_seqlens: [B] int32, tokens already in the cache.
        block_table: [B, C] int32, the page of positions [i S, (i + 1) S); -1 is unmapped.
        slot_mapping: [num_tokens] int32, the flat slot to write; negative: do not write.
        selected_indices: [num_tokens, M] int32.
        selected_counts: [num_tokens] int32, clamped to 0 ... M.
        auxiliary_key, auxiliary_value: [B, A, 1 or G, H] T, with selected_kv_source "auxiliary" only; with
            auxiliary_kv_shared the key is also the value, which must be absent then.
        auxiliary_lengths: [B] int32, valid rows, with selected_kv_source "auxiliary" only.
        cos_cache, sin_cache: [max_pos, rotary_dim / 2] T, with do_rotary.
        head_sink: [N] T, one more logit in each head's softmax.
        q_norm_weight, k_norm_weight: [H] T, RMS norm of heads before rotary (qk_norm_epsilon).
        k_scale, v_scale: float32, [1] (PER_TENSOR) or G * H elements (PER_CHANNEL), with an int8 cache.
        attention_metadata: [5] int32 on the host, bounds of lengths, none negative; never changes a result.
        scale: None or 0 is 1 / sqrt(H).
        softcap: x becomes softcap * tanh(x / softcap); None or 0 is off.
        local_window_size: keys that a token sees, itself included; -1 is all.
        is_causal: 0 lets a token see the whole step.
        attention_mode: "selected_only" or "local_plus_selected".
        selected_kv_source: "main" or "auxiliary".
        auxiliary_cache_layout: "contiguous".
        rotary_interleaved, rotary_offset: pairs (2i, 2i + 1); the first rotated channel, a multiple of 8.
        k_quant_type, v_quant_type: NONE, PER_TENSOR, PER_CHANNEL.
        out: (output, key_cache, value_cache) or the output alone; the caches can only be themselves.

    Returns:
        (output [num_tokens, N * H] T, key_cache, value_cache): the caches are the arrays that were given.

    Raises:
        InvalidArgument: names the input or attribute; nothing has been written.
        Unsupported: arrays on a device that this build has no path for.

    Source: ONNX Runtime com.microsoft::SparsePagedAttention.
    """
    return call("sparse_paged_attention", locals())


def dynamic_sparse_attention(
    *,
    query: Any,
    key: Any = None,
    value: Any = None,
    past_key: Any = None,
    past_value: Any = None,
    auxiliary_key: Any = None,
    auxiliary_value: Any = None,
    selected_indices: Any,
    selected_counts: Any,
    seqlens_k: Any,
    total_sequence_length: Any,
    cos_cache: Any = None,
    sin_cache: Any = None,
    position_ids: Any = None,
    q_norm_weight: Any = None,
    k_norm_weight: Any = None,
    head_sink: Any = None,
    committed_length: Any = None,
    key_scale: Any = None,
    value_scale: Any = None,
    num_heads: int,
    kv_num_heads: int,
    scale: float | None = None,
    is_causal: int = 1,
    attention_mode: str = "selected_only",
    selected_kv_source: str = "main",
    local_window_size: int = -1,
    auxiliary_kv_shared: int = 0,
    smooth_softmax: int = 0,
    output_bf16: int = 0,
    do_rotary: int = 0,
    rotary_interleaved: int = 0,
    rotary_offset: int = 0,
    qk_norm_epsilon: float = 1e-6,
    out: Any = None,
) -> tuple[Any, Any, Any, Any]:
    """Appends the keys and values of a dense batch to contiguous caches, then attends to selected positions.

    Sequence b has seqlens_k[b] + 1 tokens with its S new ones, which stand at its end. A token at position pos attends
    in one softmax to the first selected_counts entries of its row of selected_indices that are valid:

    - attention_mode "selected_only" with selected_kv_source "main": positions 0 to pos of the cache;
    - "local_plus_selected" with "auxiliary": rows of the auxiliary cache, together with the last local_window_size
      positions up to pos of the main one.

    Equal entries each carry weight. A token without a valid entry is zero, also with a sink. A sequence whose length
    does not fit S and the cache reads nothing of the main cache and writes only the rows that land inside it.

    Sizes: N num_heads, G kv_num_heads (divides N), H head size, C capacity, L rows of the auxiliary cache, M entries, B
    sequences of S new tokens; T the type of `value` (packed: of `query`), or bfloat16 with output_bf16. Inputs of type
    T may also be of the type of `query`.

    Args:
        query: [B, S, N * H] float32, float16 or bfloat16; packed Q, K, V [B, S, (N + 2 G) * H] when `key` and `value`
            are absent.
        key, value: [B, S, G * H]; `key` is of the type of `query`.
        past_key, past_value: [B, G, C, H] of the type of `query`, float16 or int8, contiguous. With room for
            total_sequence_length they are **changed in place**; otherwise, or without them, new caches of that capacity
            come back: what they hold, then zeros, then the new rows.
        auxiliary_key, auxiliary_value: [B, G, L, H] T, with selected_kv_source "auxiliary" only; the value may be
            absent with auxiliary_kv_shared: the key then.
        selected_indices: [B * S, M] int32.
        selected_counts: [B * S] int32, clamped to 0 ... M.
        seqlens_k: [B] int32, total length minus one.
        total_sequence_length: the largest total length, an int or one int32; at least S.
        cos_cache, sin_cache: [max_pos, rotary_dim / 2] T, with do_rotary. Outside them a head is not turned.
        position_ids: [B, S] int64, rotary positions in place of the tokens' own.
        q_norm_weight, k_norm_weight: [H] T, RMS norm of heads before rotary (qk_norm_epsilon).
        head_sink: [N] T, one more logit in each head's softmax.
        committed_length: [1] or [B] int32, tokens before this step: for validation_status only.
        key_scale, value_scale: G * H elements float32, with an int8 cache: codes are x / scale, rounded half to even.
        scale: None or 0 is 1 / sqrt(H).
        is_causal: 1.
        local_window_size: keys of the window, the token itself included; positive with local_plus_selected.
        smooth_softmax: a sink of 0 where head_sink is absent.
        output_bf16: a bfloat16 output of float16 query, key and value.
        rotary_interleaved, rotary_offset: pairs (2i, 2i + 1); the first rotated channel, a multiple of 8.
        out: (output, present_key, present_value, validation_status), shorter, or the output alone; a cache that is
            changed in place can only be itself.

    Returns:
        (output [B, S, N * H] T, present_key, present_value, validation_status [1] int32). The status is 0, or the first
        that holds of: 10 a scale that is not positive and finite; 9 committed_length + S is not the total length, or
        that does not fit; and then, of the first row that has one: 7 a length that fits neither S, nor
        total_sequence_length, nor the cache; 8 a rotary position outside the tables; 1 a count outside 0 ... M; 2 an
        entry after the count that is not -1; 3 a negative one; 4 one beyond its source; 6 one after pos; 5 one seen
        before.

    Raises:
        InvalidArgument: names the input or attribute; nothing has been written.
        Unsupported: arrays on a device that this build has no path for.

    Source: ONNX Runtime com.microsoft::DynamicSparseAttention.
    """
    return call("dynamic_sparse_attention", locals())
