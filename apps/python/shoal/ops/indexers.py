"""Indexers of sparse attention: which positions or compressed entries a token may read."""

from __future__ import annotations

from typing import Any

from shoal.errors import InvalidArgument
from shoal.ops._arrays import Array
from shoal.ops._call import call


def _refuse_own_buffers(op: str, arguments: dict[str, Any], outputs: dict[int, str]) -> None:
    """A buffer of csa in `out=` must not be its own input: compaction would overwrite what it still has to read."""
    out = arguments["out"]
    given = list(out) if isinstance(out, tuple | list) else [out]
    if arguments["policy_mode"] != "csa":
        return
    for place, past in outputs.items():
        if place < len(given) and given[place] is not None and arguments[past] is not None:
            target, source = Array(op, "out", given[place]), Array(op, past, arguments[past])
            low, high = target.extent()
            if low < high and source.extent()[0] < source.extent()[1] and target.view[0] == source.view[0]:
                raise InvalidArgument(
                    f"{op}: out shares memory with {past}, which policy_mode csa does not allow for its buffers"
                )


def packed_sparse_attention_indexer(
    *,
    query: Any,
    key: Any = None,
    query_norm_weight: Any,
    key_norm_weight: Any,
    cos_cache: Any,
    sin_cache: Any,
    cumulative_sequence_lengths: Any,
    past_sequence_lengths: Any,
    gate: Any = None,
    position_bias: Any = None,
    head_weights: Any = None,
    position_ids: Any = None,
    past_key_state: Any,
    past_kv_buffer: Any,
    past_gate_buffer: Any = None,
    past_state_lengths: Any,
    state_update_capture_count: Any = None,
    state_update_active: Any = None,
    indexshare_mode: Any = None,
    merged_indices: Any = None,
    merged_counts: Any = None,
    merged_status: Any = None,
    policy_mode: str,
    compress_ratio: int,
    state_capacity: int,
    token_budget: int | None = None,
    index_topk: int | None = None,
    epsilon: float = 1e-6,
    scale: float | None = None,
    head_weight_scale: float | None = None,
    state_update_capacity: int = 0,
    max_output_entries: int = 0,
    indexshare_state_policy: str = "default",
    out: Any = None,
) -> tuple[Any, ...]:
    """Selects what sparse attention may read, for every token of a packed batch, and keeps the keys that decide.

    T tokens, B requests, N heads of H channels, r = compress_ratio. Heads of queries and finished keys go through
    RMSNorm, the norm weight and rotary.

    policy_mode "qsa": block e is the mean of its r keys, finished at position e * r. A token at position p (past
    length + own offset) sees n = (p + 1) // r blocks, scores them with scale * sum over h of max(0, q[h] . key[e]),
    and selects the tokens of the best min(token_budget // r, n), r for each, then the tokens n * r ... p.

    policy_mode "csa": channel c of entry e is a mean, weighted by a softmax over gate + position_bias, of the second
    half of the channels of tokens e * r ... e * r + r - 1 and the first half of the r tokens before them. A token with
    position_ids p sees (p + 1) // r entries, scores them with scale * head_weight_scale * sum over h of
    head_weights[h] * max(0, q[h] . key[e]), and selects the best index_topk entries.

    Best first, of equal scores the lower index, NaN last; max(0, NaN) is 0.

    Args:
        query: [T, N * H] f32, f16 or bf16, the type of all floats; qsa without `key`: [T, (N + 1) * H], the key last.
        key: [T, H] for qsa, [T, 2 * H] for csa.
        query_norm_weight, key_norm_weight: [H], the multipliers themselves (fold 1 + gamma).
        cos_cache, sin_cache: [P, R] or [B, P, R]; positions are clamped to P. qsa rotates the first R channels (even),
            halves against each other, each half with its own entries; csa the last 2 * R, neighbours in pairs.
        cumulative_sequence_lengths: [B + 1] int32, from 0 to T.
        past_sequence_lengths: [B] int32, tokens before this call.
        gate, position_bias, head_weights, position_ids: csa only: [T, 2 * H], [r, 2 * H], [T, N], [T] int64.
        past_key_state: [B, state_capacity, H]; may be f32 with bf16 activations.
        past_kv_buffer: [B, 2 * r - 1, H] for qsa, [B, 2 * r - 1, 2 * H] for csa: projections of tokens that wait.
        past_gate_buffer: csa only, as past_kv_buffer.
        past_state_lengths: [B, 2] int32: entries in the key state, tokens in the buffer.
        state_update_capture_count: qsa only, [B] int32, tokens to capture; required with state_update_capacity.
        state_update_active: qsa only, an int; 0 captures nothing.
        indexshare_mode, merged_indices, merged_counts, merged_status: all or none, with max_output_entries. 0 selects
            as ever (refresh; merged_* have no rows). 1 hands on row b of [B, max_output_entries], [B], [B] int32 for
            request b; query and head_weights have no rows then.
        policy_mode: qsa or csa. Inputs and attributes of the other policy must be absent.
        compress_ratio: r > 0.
        state_capacity: entries of the key state, > 0.
        token_budget: qsa only, > 0, a multiple of r.
        index_topk: csa only, > 0.
        epsilon: of RMSNorm, >= 0.
        scale: of the scores, 1 / sqrt(H).
        head_weight_scale: csa only, 1 / sqrt(N).
        state_update_capacity: qsa only, 0 to 8.
        max_output_entries: columns of the selection with index sharing; 0: none.
        indexshare_state_policy: the state with indexshare_mode 1: hold (default of qsa; key, gate and position_ids have
            no rows) or advance (default of csa, not with qsa: one token a request).
        out: the outputs in order, None for new arrays. A state may be its own input, except the buffers of csa; the
            selection may be merged_*.

    Returns:
        (selected_indices, selected_counts, present_key_state, present_kv_buffer, present_gate_buffer,
        present_state_lengths, state_update, indexshare_status, state_status).
        selected_indices [T, M] int32: M is token_budget + r - 1, index_topk or max_output_entries; then -1.
        selected_counts [T] int32. present_*: as past_*; what lies behind the lengths means nothing; the gate buffer is
        None for qsa. state_update [B, state_update_capacity, H]: for each captured token the finished key if it
        completed a block, else its raw key, zeros elsewhere; None without a capacity. indexshare_status [T] int32, None
        without index sharing. state_status [B] int32: 0 applied or held, 1 inconsistent metadata, 2 state_capacity
        would be exceeded; with 1 and 2 the state stays, lengths are clamped into range and the request's tokens select
        nothing.

    Raises:
        InvalidArgument: names the input or attribute; nothing has been written. Malformed contents raise nothing.

    Source: ONNX Runtime com.microsoft::PackedSparseAttentionIndexer.
    """
    arguments = locals()
    _refuse_own_buffers("packed_sparse_attention_indexer", arguments, {3: "past_kv_buffer", 4: "past_gate_buffer"})
    return call("packed_sparse_attention_indexer", arguments)


def sparse_attention_indexer(
    *,
    query: Any,
    key: Any = None,
    query_norm_weight: Any,
    key_norm_weight: Any,
    cos_cache: Any,
    sin_cache: Any,
    mask: Any = None,
    past_key: Any,
    gate: Any = None,
    position_bias: Any = None,
    head_weights: Any = None,
    position_ids: Any = None,
    past_sequence_length: Any = None,
    past_proj_buffer: Any = None,
    policy_mode: str,
    compress_ratio: int,
    token_budget: int | None = None,
    index_topk: int | None = None,
    epsilon: float = 1e-6,
    scale: float | None = None,
    head_weight_scale: float | None = None,
    out: Any = None,
) -> tuple[Any, Any, Any]:
    """Selects what sparse attention may read, for every token of a batch of equally long sequences.

    B sequences of S tokens, N heads of H channels, r = compress_ratio. Scores and order are those of
    `packed_sparse_attention_indexer`. With policy_mode "qsa" the state holds raw keys; blocks of r tokens are formed
    among the visible ones (mask != 0, up to the query's own position past + s) in order, pooled anew, not rounded, and
    rotated at the position of their first token. With "csa" it holds finished keys and the projections that wait.

    Args:
        query: [B, S, N * H] f32, f16 or bf16, the type of all floats; qsa without `key`: [B, S, (N + 1) * H].
        key: [B, S, H] for qsa, [B, S, 2 * H] for csa.
        query_norm_weight, key_norm_weight: [H], the multipliers themselves (fold 1 + gamma).
        cos_cache, sin_cache: [P, R] or [B, P, R], as in the packed operator.
        mask: qsa only, [B, past + S] int64; None: all visible.
        past_key: [B, past, H], or [B, capacity, H] with past_sequence_length.
        gate, position_bias, head_weights, position_ids: csa only: [B, S, 2 * H], [r, 2 * H], [B, S, N], [B, S] int64.
        past_sequence_length: an int, the rows of past_key that count (csa: compressed keys); None: all.
        past_proj_buffer: csa only, [2, B, less than 2 * r, 2 * H]: keys and gates of the tokens that wait.
        policy_mode: qsa or csa. Inputs and attributes of the other policy must be absent.
        compress_ratio: r > 0.
        token_budget: qsa only, > 0, a multiple of r.
        index_topk: csa only, > 0.
        epsilon: of RMSNorm, >= 0.
        scale: of the scores, 1 / sqrt(H).
        head_weight_scale: csa only, 1 / sqrt(N).
        out: (selected_indices, present_key, present_proj_buffer), None for new arrays; with past_sequence_length
            present_key may be past_key. present_proj_buffer must not be past_proj_buffer.

    Returns:
        (selected_indices [B, S, token_budget + r - 1 or index_topk] int32, then -1; present_key, with the rows of this
        call; present_proj_buffer [2, B, waiting tokens, 2 * H], None for qsa).

    Raises:
        InvalidArgument: names the input or attribute; nothing has been written.

    Source: ONNX Runtime com.microsoft::SparseAttentionIndexer.
    """
    arguments = locals()
    _refuse_own_buffers("sparse_attention_indexer", arguments, {2: "past_proj_buffer"})
    return call("sparse_attention_indexer", arguments)
