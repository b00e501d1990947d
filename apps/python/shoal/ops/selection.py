"""Selections of sparse attention: merging them, making the compressed rows they name, choosing among these."""

from __future__ import annotations

from typing import Any

from shoal.ops._call import call


def sparse_attention_selection_merge(
    *,
    base_indices: Any,
    base_counts: Any,
    base_row_indices: Any,
    range_starts: Any,
    range_ends: Any,
    max_output_entries: int,
    out: Any = None,
) -> tuple[Any, Any, Any]:
    """Stable union of a cached selection and a range of indices, for each of N queries.

    The same as `packed_sparse_attention_indexer_merge` with the policy append_range.

    Args:
        base_indices: [R, C] int32, cached selections. Any strides.
        base_counts: [R] int32, how many entries of a row belong to it; the others are not read.
        base_row_indices: [N] int32, the cached row of each query.
        range_starts, range_ends: [N] int32, the indices to add: start <= index < end.
        max_output_entries: columns of the result, 1 to 2**30.
        out: (selected_indices, selected_counts, status), None for new arrays.

    Returns:
        (selected_indices [N, max_output_entries], selected_counts [N], status [N]), all int32. A row is the first
        occurrences of the cached entries in order, then what is new in the range, ascending, then -1. Status 1: a row
        index, count, range or entry is malformed; 2: the union has more than max_output_entries. Such a row is -1
        throughout and its count 0; other rows are not affected.

    Raises:
        InvalidArgument: names the input or attribute; nothing has been written. Malformed contents raise nothing.

    Source: ONNX Runtime com.microsoft::SparseAttentionSelectionMerge.
    """
    return call("sparse_attention_selection_merge", locals())


def packed_sparse_attention_indexer_merge(
    *,
    base_indices: Any,
    base_counts: Any,
    base_row_indices: Any,
    range_starts: Any = None,
    range_ends: Any = None,
    additional_indices: Any = None,
    additional_counts: Any = None,
    max_output_entries: int,
    policy_mode: str,
    out: Any = None,
) -> tuple[Any, Any, Any]:
    """Stable union of a cached selection with a range of indices or with a second selection, for each of N queries.

    Args:
        base_indices: [R, C] int32, cached selections. Any strides.
        base_counts: [R] int32, how many entries of a row belong to it; the others are not read.
        base_row_indices: [N] int32, the cached row of each query.
        range_starts, range_ends: [N] int32, start <= index < end; with append_range only.
        additional_indices, additional_counts: [N, A] and [N] int32, as base_indices and base_counts; with
            append_indices only.
        max_output_entries: columns of the result, 1 to 2**30.
        policy_mode: append_range or append_indices.
        out: (selected_indices, selected_counts, status), None for new arrays.

    Returns:
        (selected_indices [N, max_output_entries], selected_counts [N], status [N]), all int32. A row is the first
        occurrences of the cached entries in order, then what is new, ascending in a range and else in order, then -1.
        Status 1: a row index, count, range or entry is malformed; 2: the union has more than max_output_entries. Such a
        row is -1 throughout and its count 0; other rows are not affected.

    Raises:
        InvalidArgument: names the input or attribute; nothing has been written. Malformed contents raise nothing.

    Source: ONNX Runtime com.microsoft::PackedSparseAttentionIndexerMerge.
    """
    return call("packed_sparse_attention_indexer_merge", locals())


def sparse_row_select(
    *,
    query: Any,
    cos: Any,
    sin: Any,
    rows: Any,
    first_slot: Any,
    last_slot: Any,
    past_cache: Any,
    weights: Any,
    past_lens: Any,
    num_heads: int,
    head_dim: int,
    rope_head_dim: int = 0,
    ratio: int = 1,
    topk: int,
    row_id_offset: int,
    scale: float = 1.0,
    simulate_rotated_fp4: int = 1,
    out: Any = None,
) -> tuple[Any, Any]:
    """Puts this step's compressed rows into the scoring cache and keeps the best `topk` rows that a token may see.

    score[c] = sum over heads h of max(0, q[h] . cache[c]) * (weights[h] * scale), with the last rope_head_dim channels
    of each head of the query rotated in pairs and, with simulate_rotated_fp4, each head times the Hadamard matrix over
    sqrt(head_dim), rounded to T, then to FP4 and back (blocks of 32, ties toward zero). Token s sees
    (past_lens + s + 1) // ratio rows; if that is no more than topk, all of them are kept.

    Sizes: B sequences of S tokens, N num_heads, d head_dim, J rows a sequence, T float32, float16 or bfloat16, the type
    of all arrays but the rotary values (float32) and the int64 ones.

    Args:
        query: [B, S, N * d] T. Any strides.
        cos, sin: B * S * rope_head_dim values in any shape, float32: one for each channel, every angle twice. None if
            rope_head_dim is 0.
        rows: [B, J, d] T, rows first_slot and on of each sequence.
        first_slot, last_slot: [B, 1] int64, which rows of the cache come from `rows`.
        past_cache: [B, capacity, d] T.
        weights: B * S * N values in any shape, T.
        past_lens: [B] int64, tokens before this step.
        rope_head_dim: even, 0 to head_dim.
        ratio: tokens of a row, at least 1.
        topk: 1 to the capacity.
        row_id_offset: added to each chosen row, at least 1.
        simulate_rotated_fp4: 0 or 1; head_dim must be a power of two of at least 32 then.
        out: (selection, present_cache), None for new arrays. present_cache may be past_cache itself.

    Returns:
        (selection [B, S, topk] int64, present_cache as past_cache). A token's rows are in ascending order, each plus
        row_id_offset, then -1. Of equal scores the lower row is chosen; +0 is above -0, NaN below everything.

    Raises:
        InvalidArgument: names the input or attribute; nothing has been written. Malformed slots and lengths raise
            nothing: rows without a source or a place are left out.

    Source: ONNX Runtime com.microsoft::SparseRowSelect.
    """
    return call("sparse_row_select", locals())


def gated_latent_pool(
    *,
    kv: Any,
    score: Any = None,
    past_state_kv: Any,
    past_state_score: Any,
    ape: Any,
    norm_weight: Any,
    cos: Any,
    sin: Any,
    past_lens: Any,
    ratio: int = 4,
    window_multiplier: int = 1,
    head_dim: int,
    rope_head_dim: int = 0,
    max_seq_len: int,
    epsilon: float = 1e-6,
    simulate_fp8: int = 0,
    simulate_rotated_fp4: int = 0,
    out: Any = None,
) -> tuple[Any, Any, Any, Any, Any, Any]:
    """Pools `ratio` consecutive tokens into one latent row each, with a rolling state of the last tokens.

    A row is, per channel, the sum of its tokens' kv weighted with the softmax of score + ape, rounded to T; then
    RMSNorm, rotary of the last rope_head_dim channels in pairs at the row's first token, and the number grids that are
    asked for. With window_multiplier 2 a row pools the first half of the features of the ratio tokens before its own,
    too, and the second half of its own. Tokens that are not there (before the sequence, or still to come) have no part.

    Sizes: B sequences of S tokens, d head_dim, F = window_multiplier * d, span = window_multiplier * ratio,
    J = ceil(S / ratio) + 1, T float32, float16 or bfloat16.

    Args:
        kv: [B, S, F] T; without `score` [B, S, 2 F], kv and then score in every row. Any strides.
        score: [B, S, F] T.
        past_state_kv, past_state_score: [B, span, F] float32, kv and score of the last span tokens.
        ape: [ratio, F] float32, added to the score of each token of a window.
        norm_weight: [d] float32.
        cos, sin: [max_seq_len, rope_head_dim] float32, every angle twice. None if rope_head_dim is 0.
        past_lens: [B] int64, tokens before this step.
        ratio: tokens of a row, at least 1.
        window_multiplier: 1 or 2.
        rope_head_dim: even, 0 to head_dim.
        max_seq_len: rows of the tables; later positions use the last one.
        epsilon: of the norm, finite and not negative.
        simulate_fp8: 1: the channels without rotary to FP8 E4M3 and back, in blocks of 64, which must divide them.
        simulate_rotated_fp4: 1: the row times Hadamard / sqrt(d), rounded to T, to FP4 and back in blocks of 32, ties
            toward zero; d must be a power of two of at least 32.
        out: one for each result, None for new arrays. A present state may be its past state itself.

    Returns:
        (rows [B, J, d] T, first_slot [B, 1] int64, last_slot [B, 1] int64, row_count int64 without dimensions,
        present_state_kv, present_state_score, both as the past states). rows[:, j] is row first_slot + j of its
        sequence; those above last_slot are to be ignored. row_count is J.

    Raises:
        InvalidArgument: names the input or attribute; nothing has been written. A past length outside 0 to 2**62 - 1
            raises nothing: the rows of its sequence are zero and its slots 0 and -1.

    Source: ONNX Runtime com.microsoft::GatedLatentPool.
    """
    return call("gated_latent_pool", locals())
