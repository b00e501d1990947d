"""shoal.ops: the sparse attention indexers against float64 definitions that work on whole histories of tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ops_reference import BF16

from shoal import InvalidArgument, ops

DTYPES = [np.float32, np.float16, BF16]
TOLERANCE = {np.dtype(np.float32): 1e-5, np.dtype(np.float16): 4e-3, BF16: 3e-2}


def ints(*values: Any) -> np.ndarray:
    return np.array(values, np.int32)


def finished(x: np.ndarray, weight: np.ndarray, cos: np.ndarray, sin: np.ndarray, position: int, csa: bool) -> Any:
    """RMSNorm (epsilon 1e-6) and rotary of a row in float64."""
    x = x / np.sqrt(np.mean(x * x) + 1e-6) * weight
    at = min(max(position, 0), len(cos) - 1)
    c, s = cos[at], sin[at]
    if csa:
        tail = x[len(x) - 2 * len(c) :].reshape(-1, 2)
        turned = np.stack([tail[:, 0] * c - tail[:, 1] * s, tail[:, 1] * c + tail[:, 0] * s], -1)
        return np.concatenate([x[: len(x) - 2 * len(c)], turned.ravel()])
    half = len(c) // 2
    rotated = np.concatenate([-x[half : 2 * half], x[:half]])
    return np.concatenate([x[: 2 * half] * c + rotated * s, x[2 * half :]])


class Model:
    """Random weights, and what follows from a history of tokens."""

    def __init__(self, rng: np.random.Generator, csa: bool, dtype: Any, r: int = 4, n: int = 2, h: int = 8) -> None:
        self.csa, self.dtype, self.r, self.n, self.h = csa, np.dtype(dtype), r, n, h
        self.width = 2 * h if csa else h
        columns = h // 2 if csa else h - h % 4
        angle = rng.uniform(-3, 3, (40, columns))
        self.cos, self.sin = np.cos(angle).astype(dtype), np.sin(angle).astype(dtype)
        self.query_norm, self.key_norm = ((1 + 0.3 * rng.standard_normal(h)).astype(dtype) for _ in range(2))
        self.bias = (0.5 * rng.standard_normal((r, self.width))).astype(dtype)

    def tokens(self, rng: np.random.Generator, count: int) -> dict[str, np.ndarray]:
        widths = {"query": self.n * self.h, "key": self.width, "gate": self.width, "head_weights": self.n}
        return {name: rng.standard_normal((count, w)).astype(self.dtype) for name, w in widths.items()}

    def finish(self, row: np.ndarray, weight: np.ndarray, position: int) -> np.ndarray:
        f64 = (a.astype(np.float64) for a in (row, weight, self.cos, self.sin))
        return finished(*f64, position, self.csa)

    def entry(self, history: dict[str, np.ndarray], e: int) -> np.ndarray:
        key, gate = (history[name].astype(np.float64) for name in ("key", "gate"))
        now = slice(e * self.r, (e + 1) * self.r)
        if not self.csa:
            return self.finish(key[now].mean(0), self.key_norm, e * self.r)
        bias = self.bias.astype(np.float64)
        values, logits = key[now, self.h :], (gate[now] + bias)[:, self.h :]
        if e > 0:
            before = slice((e - 1) * self.r, e * self.r)
            values = np.concatenate([key[before, : self.h], values])
            logits = np.concatenate([(gate[before] + bias)[:, : self.h], logits])
        weights = np.exp(logits - logits.max(0))
        return self.finish((weights * values).sum(0) / weights.sum(0), self.key_norm, e * self.r)

    def waiting(self, length: int) -> slice:
        return slice(max(0, length // self.r - 1) * self.r if self.csa else length // self.r * self.r, length)

    def scores(self, history: dict[str, np.ndarray], position: int, keys: np.ndarray, row: int) -> np.ndarray:
        q = history["query"][row].reshape(self.n, self.h)
        q = np.stack([self.finish(head, self.query_norm, position) for head in q])
        weights = history["head_weights"][row].astype(np.float64) if self.csa else np.ones(self.n)
        return weights @ np.maximum(0, q @ keys.astype(np.float64).T)

    def shared(self) -> dict[str, Any]:
        weights = {"query_norm_weight": self.query_norm, "key_norm_weight": self.key_norm}
        tables = {"cos_cache": self.cos, "sin_cache": self.sin}
        csa = {"position_bias": self.bias} if self.csa else {}
        return weights | tables | csa | {"policy_mode": "csa" if self.csa else "qsa", "compress_ratio": self.r}


def packed_arguments(
    model: Model, histories: list[dict[str, np.ndarray]], past: list[int], capacity: int, limit: int
) -> dict[str, Any]:
    """Request b has seen past[b] tokens of its history; the others are new."""
    counts = [len(h["key"]) - p for h, p in zip(histories, past, strict=True)]
    width = model.width
    keys = np.full((len(past), capacity, model.h), np.nan, model.dtype)
    buffers = np.full((2, len(past), 2 * model.r - 1, width), np.nan, model.dtype)
    lengths = np.zeros((len(past), 2), np.int32)
    for b, (history, p) in enumerate(zip(histories, past, strict=True)):
        for e in range(p // model.r):
            keys[b, e] = model.entry(history, e).astype(model.dtype)
        wait = model.waiting(p)
        lengths[b] = p // model.r, wait.stop - wait.start
        for plane, name in enumerate(("key", "gate")):
            buffers[plane, b, : lengths[b, 1]] = history[name][wait]
    new = {name: np.concatenate([h[name][p:] for h, p in zip(histories, past, strict=True)]) for name in histories[0]}
    arguments = model.shared() | dict(
        query=new["query"],
        key=new["key"],
        cumulative_sequence_lengths=np.cumsum([0, *counts], dtype=np.int32),
        past_sequence_lengths=np.array(past, np.int32),
        past_key_state=keys,
        past_kv_buffer=buffers[0],
        past_state_lengths=lengths,
        state_capacity=capacity,
    )
    if not model.csa:
        return arguments | {"token_budget": limit}
    positions = np.concatenate([np.arange(p, p + n) for p, n in zip(past, counts, strict=True)]).astype(np.int64)
    more = {"gate": new["gate"], "head_weights": new["head_weights"], "position_ids": positions}
    return arguments | more | {"past_gate_buffer": buffers[1], "index_topk": limit}


def expected_row(model: Model, order: np.ndarray, position: int, limit: int) -> list[int]:
    if model.csa:
        return [int(e) for e in order[:limit]]
    blocks = order[: limit // model.r]
    tail = range((position + 1) // model.r * model.r, position + 1)
    return [int(b) * model.r + i for b in blocks for i in range(model.r)] + list(tail)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_packed_agrees_with_the_definition(data: Any) -> None:
    csa = data.draw(st.booleans())
    dtype = data.draw(st.sampled_from(DTYPES))
    r = data.draw(st.integers(1, 5))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    model = Model(rng, csa, dtype, r, data.draw(st.integers(1, 3)), data.draw(st.sampled_from([4, 8, 20])))
    past = data.draw(st.lists(st.integers(0, 17), min_size=1, max_size=3))
    counts = [data.draw(st.integers(0, 9)) for _ in past]
    histories = [model.tokens(rng, p + n) for p, n in zip(past, counts, strict=True)]
    limit = data.draw(st.integers(1, 4)) * (1 if csa else r)
    capacity = data.draw(st.integers(max(1, max(past) // r), 30))
    arguments = packed_arguments(model, histories, past, capacity, limit)
    if not csa and data.draw(st.booleans()):
        arguments["query"] = np.concatenate([arguments["query"], arguments.pop("key")], axis=1)
    indices, chosen, keys, kv, gate, lengths, update, sharing, status = ops.packed_sparse_attention_indexer(**arguments)

    assert indices.dtype == chosen.dtype == lengths.dtype == status.dtype == np.int32
    assert indices.shape == (sum(counts), limit if csa else limit + r - 1)
    assert update is None and sharing is None and (gate is not None) == csa
    first = 0
    for b, history in enumerate(histories):
        total = past[b] + counts[b]
        rows = slice(first, first + counts[b])
        first += counts[b]
        if total // r > capacity:
            assert status[b] == 2
            np.testing.assert_array_equal(lengths[b], arguments["past_state_lengths"][b])
            assert keys[b].tobytes() == arguments["past_key_state"][b].tobytes()  # NaN as well
            assert kv[b].tobytes() == arguments["past_kv_buffer"][b].tobytes()
            assert (indices[rows] == -1).all() and (chosen[rows] == 0).all()
            continue
        assert status[b] == 0
        wait = model.waiting(total)
        assert list(lengths[b]) == [total // r, wait.stop - wait.start]
        for e in range(total // r):
            tolerance = TOLERANCE[np.dtype(dtype)]
            np.testing.assert_allclose(keys[b, e].astype(float), model.entry(history, e), rtol=0, atol=tolerance)
        np.testing.assert_array_equal(kv[b, : lengths[b, 1]], history["key"][wait])
        if csa:
            np.testing.assert_array_equal(gate[b, : lengths[b, 1]], history["gate"][wait])
        for i in range(counts[b]):
            position = past[b] + i
            scores = model.scores(history, position, keys[b, : (position + 1) // r], position)
            gaps = np.diff(np.sort(scores))
            order = np.argsort(-scores, kind="stable")
            row = expected_row(model, order, position, limit)
            assert chosen[rows][i] == len(row)
            assert (indices[rows][i, len(row) :] == -1).all()
            # Equal scores are zeros of max(0, .), which are exact; between others a near tie may go either way.
            if not ((gaps > 0) & (gaps < 1e-4)).any():
                assert list(indices[rows][i, : len(row)]) == row


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_dense_agrees_with_the_definition(data: Any) -> None:
    csa = data.draw(st.booleans())
    dtype = data.draw(st.sampled_from(DTYPES))
    r, batch = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 2))
    past, count = data.draw(st.integers(0, 17)), data.draw(st.integers(1, 9))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    model = Model(rng, csa, dtype, r)
    histories = [model.tokens(rng, past + count) for _ in range(batch)]
    new = {name: np.stack([h[name][past:] for h in histories]) for name in histories[0]}
    limit = data.draw(st.integers(1, 4)) * (1 if csa else r)
    arguments = model.shared() | {"query": new["query"], "key": new["key"]}
    mask = np.ones((batch, past + count), np.int64)
    if csa:
        wait = model.waiting(past)
        old = np.array([[model.entry(h, e) for e in range(past // r)] for h in histories]).reshape(batch, -1, model.h)
        arguments |= dict(
            gate=new["gate"],
            head_weights=new["head_weights"],
            position_ids=np.tile(np.arange(past, past + count), (batch, 1)),
            past_proj_buffer=np.stack([np.stack([h[name][wait] for h in histories]) for name in ("key", "gate")]),
            index_topk=limit,
        )
        added = (past + count) // r - past // r
    else:
        old, added = np.stack([h["key"][:past] for h in histories]), count
        arguments["token_budget"] = limit
        if data.draw(st.booleans()):
            mask = arguments["mask"] = rng.integers(0, 3, mask.shape)
    arguments["past_key"] = old.astype(dtype)
    if data.draw(st.booleans()):  # with room behind
        arguments["past_sequence_length"] = old.shape[1]
        room = np.full((batch, added + 2, model.h), np.nan)
        arguments["past_key"] = np.concatenate([old, room], axis=1).astype(dtype)
    indices, present, buffer = ops.sparse_attention_indexer(**arguments)

    assert present.shape[1] == (
        old.shape[1] + added if "past_sequence_length" not in arguments else old.shape[1] + added + 2
    )
    assert (buffer is not None) == csa
    for b, history in enumerate(histories):
        if csa:
            wait = model.waiting(past + count)
            np.testing.assert_array_equal(buffer[0, b], history["key"][wait])
            np.testing.assert_array_equal(buffer[1, b], history["gate"][wait])
        else:
            np.testing.assert_array_equal(present[b, : past + count], history["key"])
        for i in range(count):
            position = past + i
            seen = np.flatnonzero(mask[b, : position + 1])
            if csa:
                keys = present[b, : (position + 1) // r].astype(np.float64)
            else:
                blocks = [seen[j * r : (j + 1) * r] for j in range(len(seen) // r)]
                raw = history["key"].astype(np.float64)
                rows = [model.finish(raw[block].mean(0), model.key_norm, int(block[0])) for block in blocks]
                keys = np.array(rows).reshape(-1, model.h)
            scores = model.scores(history, position, keys, position)
            gaps = np.diff(np.sort(scores))
            row = expected_row(model, np.argsort(-scores, kind="stable"), len(seen) - 1, limit)
            row = row if csa else [int(seen[rank]) for rank in row]
            assert (indices[b, i, len(row) :] == -1).all() and (indices[b, i, : len(row)] >= 0).all()
            if not ((gaps > 0) & (gaps < 1e-4)).any():
                assert list(indices[b, i, : len(row)]) == row


def small(csa: bool, dtype: Any = np.float32, **changes: Any) -> dict[str, Any]:
    rng = np.random.default_rng(5)
    model = Model(rng, csa, dtype)
    histories = [model.tokens(rng, n) for n in (9, 7)]
    return packed_arguments(model, histories, [5, 6], 6, 8) | changes


def same(left: Any, right: Any) -> None:
    for a, b in zip(left, right, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize("csa", [False, True])
def test_packed_takes_views_and_odd_offsets(csa: bool) -> None:
    arguments = small(csa)
    right = ops.packed_sparse_attention_indexer(**arguments)
    views = {}
    for name, value in arguments.items():
        if isinstance(value, np.ndarray):
            shape = tuple(2 * n + 1 for n in value.shape)
            wide = np.zeros(shape, value.dtype)
            view = wide[tuple(slice(1, None, 2) for _ in shape)]
            view[...] = value
            value = view
        views[name] = value
    same(ops.packed_sparse_attention_indexer(**views), right)
    unaligned = {}
    for name, value in arguments.items():
        if isinstance(value, np.ndarray):
            raw = np.zeros(value.nbytes + 1, np.uint8)[1:]
            raw[...] = np.frombuffer(value.tobytes(), np.uint8)
            value = raw.view(value.dtype).reshape(value.shape)
        unaligned[name] = value
    same(ops.packed_sparse_attention_indexer(**unaligned), right)


def test_packed_states_stay_untouched_or_are_their_own_output() -> None:
    arguments = small(False)
    kept = {name: value.copy() for name, value in arguments.items() if isinstance(value, np.ndarray)}
    right = ops.packed_sparse_attention_indexer(**arguments)
    for name, value in kept.items():
        np.testing.assert_array_equal(arguments[name], value)
    states = [arguments[name] for name in ("past_key_state", "past_kv_buffer", "past_state_lengths")]
    result = ops.packed_sparse_attention_indexer(**arguments, out=(None, None, *states[:2], None, states[2]))
    same(result, right)
    assert result[2] is states[0] and result[3] is states[1] and result[5] is states[2]


def test_csa_buffers_must_not_be_their_own_output() -> None:
    arguments = small(True)
    key_state, lengths = arguments["past_key_state"], arguments["past_state_lengths"]
    right = ops.packed_sparse_attention_indexer(**arguments)
    before = {name: arguments[name].copy() for name in ("past_kv_buffer", "past_gate_buffer", "past_key_state")}
    for place, name in ((3, "past_kv_buffer"), (4, "past_gate_buffer")):
        out = [None] * 9
        out[place] = arguments[name]
        with pytest.raises(InvalidArgument, match=name):
            ops.packed_sparse_attention_indexer(**arguments, out=tuple(out))
        strided = np.zeros((2, 7, 32), np.float32)[:, :, ::2]
        strided[...] = arguments[name]
        with pytest.raises(InvalidArgument, match=name):
            out[place] = strided
            ops.packed_sparse_attention_indexer(**arguments | {name: strided}, out=tuple(out))
    for name, value in before.items():
        np.testing.assert_array_equal(arguments[name], value)
    result = ops.packed_sparse_attention_indexer(**arguments, out=(None, None, key_state, None, None, lengths))
    same(result, right)
    assert result[2] is key_state


def test_key_state_in_f32_under_bf16() -> None:
    for csa in (False, True):
        arguments = small(csa, BF16)
        arguments["past_key_state"] = arguments["past_key_state"].astype(np.float32)
        keys = ops.packed_sparse_attention_indexer(**arguments)[2]
        assert keys.dtype == np.float32
        assert (keys[0, 1] != keys[0, 1].astype(BF16).astype(np.float32)).any()
        with pytest.raises(InvalidArgument, match="past_key_state"):
            half = small(csa, np.float16)
            ops.packed_sparse_attention_indexer(**half | {"past_key_state": half["past_key_state"].astype(np.float32)})


def test_capture_holds_prepared_and_raw_keys() -> None:
    capture = dict(state_update_capacity=3, state_update_capture_count=ints(4, 1))
    arguments = small(False) | capture
    result = ops.packed_sparse_attention_indexer(**arguments)
    keys, update = result[2], result[6]
    raw = arguments["key"]
    np.testing.assert_array_equal(update[0], [raw[0], raw[1], keys[0, 1]])  # tokens 5, 6, 7
    np.testing.assert_array_equal(update[1], [raw[4], np.zeros(8), np.zeros(8)])
    for active in (0, [0], ints(0)):
        update = ops.packed_sparse_attention_indexer(**arguments, state_update_active=active)[6]
        assert update.shape == (2, 3, 8) and not update.any()
    same(ops.packed_sparse_attention_indexer(**arguments, state_update_active=np.int64(2)), result)


def test_refresh_then_reuse() -> None:
    arguments = small(False)
    none = dict(merged_indices=np.zeros((0, 14), np.int32), merged_counts=ints(), merged_status=ints())
    fresh = ops.packed_sparse_attention_indexer(**arguments, **none, max_output_entries=14, indexshare_mode=0)
    assert fresh[0].shape == (5, 14) and not fresh[7].any() and (fresh[0][:, 11:] == -1).all()
    same([fresh[0][:, :11], *fresh[1:7]], ops.packed_sparse_attention_indexer(**arguments)[:7])

    reuse = arguments | dict(
        query=arguments["query"][:0],
        key=arguments["key"][:0],
        cumulative_sequence_lengths=ints(0, 1, 2),
        merged_indices=fresh[0][3:],
        merged_counts=fresh[1][3:],
        merged_status=fresh[7][3:],
        max_output_entries=14,
        indexshare_mode=1,
    )
    result = ops.packed_sparse_attention_indexer(**reuse)
    same(result[:2], [fresh[0][3:], fresh[1][3:]])
    same(result[2:4], [arguments["past_key_state"], arguments["past_kv_buffer"]])
    assert not result[7].any() and not result[8].any()
    moved = ops.packed_sparse_attention_indexer(**reuse | {"cumulative_sequence_lengths": ints(0, 0, 2)})
    assert list(moved[7]) == list(moved[8]) == [1, 1] and not moved[1].any() and (moved[0] == -1).all()
    own = [reuse["merged_indices"].copy(), reuse["merged_counts"].copy()]
    shared = reuse | {"merged_indices": own[0], "merged_counts": own[1]}
    same(ops.packed_sparse_attention_indexer(**shared, out=tuple(own)), result)


def test_reuse_advances_csa() -> None:
    rng = np.random.default_rng(6)
    model = Model(rng, True, np.float32)
    histories = [model.tokens(rng, 6), model.tokens(rng, 8)]
    arguments = packed_arguments(model, histories, [5, 7], 6, 3)
    plain = ops.packed_sparse_attention_indexer(**arguments)
    sharing = dict(
        query=arguments["query"][:0],
        head_weights=arguments["head_weights"][:0],
        indexshare_mode=1,
        max_output_entries=4,
        merged_indices=ints([3, 1, -1, -1], [2, 0, 1, -1]),
        merged_counts=ints(2, 3),
        merged_status=ints(0, 5),
    )
    result = ops.packed_sparse_attention_indexer(**arguments | sharing)
    same(result[:2], [sharing["merged_indices"], sharing["merged_counts"]])
    same([result[5], result[7], result[8]], [plain[5], ints(0, 5), ints(0, 0)])
    for b in range(2):
        entries, waiting = plain[5][b]
        for state, count in ((2, entries), (3, waiting), (4, waiting)):
            np.testing.assert_array_equal(result[state][b, :count], plain[state][b, :count])
    held = arguments | sharing | {"indexshare_state_policy": "hold", "key": arguments["key"][:0]}
    held |= {"gate": arguments["gate"][:0], "position_ids": arguments["position_ids"][:0]}
    same(ops.packed_sparse_attention_indexer(**held)[2:4], [arguments["past_key_state"], arguments["past_kv_buffer"]])


def test_packed_names_what_is_wrong() -> None:
    def rejects(csa: bool, name: str, **change: Any) -> None:
        arguments = small(csa)
        out = np.full((5, 11 if not csa else 8), 77, np.int32)
        with pytest.raises(InvalidArgument, match=name):
            ops.packed_sparse_attention_indexer(**arguments | change, out=(out,))
        assert (out == 77).all()

    for csa in (False, True):
        rejects(csa, "policy_mode", policy_mode="other")
        rejects(csa, "compress_ratio", compress_ratio=0)
        rejects(csa, "state_capacity", state_capacity=0)
        rejects(csa, "state_capacity", state_capacity=7)
        rejects(csa, "epsilon", epsilon=-1e-6)
        rejects(csa, "scale", scale="big")
        rejects(csa, "query", query=np.zeros((5, 15), np.float32))
        rejects(csa, "past_state_lengths", past_state_lengths=np.zeros((2, 2), np.int64))
        rejects(csa, "cumulative_sequence_lengths", cumulative_sequence_lengths=ints(0, 4, 4, 5))
        rejects(csa, "max_output_entries", max_output_entries=1)
        rejects(csa, "indexshare_mode", max_output_entries=20)
        rejects(csa, "merged_counts", merged_counts=ints())
        rejects(csa, "indexshare_state_policy", indexshare_state_policy="drop")
    rejects(False, "token_budget", token_budget=6)
    rejects(False, "token_budget", token_budget=None)
    rejects(False, "index_topk", index_topk=4)
    rejects(False, "position_ids", position_ids=np.arange(5))
    rejects(False, "state_update_capacity", state_update_capacity=9)
    rejects(False, "state_update_capture_count", state_update_capacity=1)
    rejects(False, "advance", indexshare_state_policy="advance")
    rejects(True, "index_topk", index_topk=0)
    rejects(True, "token_budget", token_budget=8)
    rejects(True, "key", key=None)
    rejects(True, "gate", gate=None)
    rejects(True, "position_ids", position_ids=np.arange(5, dtype=np.int32))
    rejects(True, "state_update_capacity", state_update_capacity=1)
    rejects(True, "state_update_active", state_update_active=1)


def dense(csa: bool, dtype: Any = np.float32) -> dict[str, Any]:
    rng = np.random.default_rng(8)
    model = Model(rng, csa, dtype)
    new = {name: value.reshape(2, 3, -1) for name, value in model.tokens(rng, 6).items()}
    arguments = model.shared() | {"query": new["query"], "key": new["key"]}
    arguments["past_key"] = rng.standard_normal((2, 4, 8)).astype(dtype)
    if not csa:
        return arguments | {"token_budget": 8}
    more = {"gate": new["gate"], "head_weights": new["head_weights"], "position_ids": np.full((2, 3), 18)}
    buffer = rng.standard_normal((2, 2, 6, 16)).astype(dtype)
    return arguments | more | {"past_proj_buffer": buffer, "index_topk": 3}


def test_dense_by_hand() -> None:
    ones, still = (
        np.ones(2, np.float32),
        dict(cos_cache=np.ones((9, 2), np.float32), sin_cache=np.zeros((9, 2), np.float32)),
    )
    indices, present, buffer = ops.sparse_attention_indexer(
        query=np.array([[[1, 1], [-1, -1]]], np.float32),
        key=np.array([[[1, 1], [2, 2]]], np.float32),
        query_norm_weight=ones,
        key_norm_weight=ones,
        past_key=np.array([[[1, 1], [3, 3], [-1, -1], [-5, -5]]], np.float32),
        policy_mode="qsa",
        compress_ratio=2,
        token_budget=2,
        **still,
    )
    np.testing.assert_array_equal(indices, [[[0, 1, 4], [2, 3, -1]]])
    np.testing.assert_array_equal(present[0, :, 0], [1, 3, -1, -5, 1, 2])
    assert buffer is None


def test_dense_state_with_room_is_its_own_output() -> None:
    for csa in (False, True):
        arguments = dense(csa)
        right = ops.sparse_attention_indexer(**arguments)
        rows = right[1].shape[1]
        room = np.full((2, rows + 1, 8), np.nan, np.float32)
        room[:, :4] = arguments["past_key"]
        result = ops.sparse_attention_indexer(
            **arguments | {"past_key": room}, past_sequence_length=ints(4), out=(None, room)
        )
        assert result[1] is room
        same([result[0], result[2], room[:, :rows]], [right[0], right[2], right[1]])
        assert np.isnan(room[:, rows:]).all()


def test_dense_csa_buffer_must_not_be_its_own_output() -> None:
    arguments = dense(True)
    arguments["past_proj_buffer"] = buffer = arguments["past_proj_buffer"][:, :, :5]
    assert ops.sparse_attention_indexer(**arguments)[2].shape == (2, 2, 4, 16)
    arguments["query"], arguments["key"] = arguments["query"][:, :1], arguments["key"][:, :1]
    for name in ("gate", "head_weights", "position_ids"):
        arguments[name] = arguments[name][:, :1]
    arguments["past_proj_buffer"] = buffer = np.ascontiguousarray(np.repeat(buffer, 2, axis=2)[:, :, :7])
    out = (None, None, buffer[:, :, :4])
    with pytest.raises(InvalidArgument, match="past_proj_buffer"):
        ops.sparse_attention_indexer(**arguments, out=out)


def test_dense_names_what_is_wrong() -> None:
    def rejects(csa: bool, name: str, **change: Any) -> None:
        with pytest.raises(InvalidArgument, match=name):
            ops.sparse_attention_indexer(**dense(csa) | change)

    for csa in (False, True):
        rejects(csa, "policy_mode", policy_mode=None)
        rejects(csa, "compress_ratio", compress_ratio=-4)
        rejects(csa, "past_sequence_length", past_sequence_length=5)
        rejects(csa, "past_sequence_length", past_sequence_length=4)
        rejects(csa, "past_key", past_key=np.zeros((2, 4, 7), np.float32))
        rejects(csa, "cos_cache", cos_cache=np.zeros((4, 3), np.float32))
    rejects(False, "mask", mask=np.ones((2, 6), np.int64))
    rejects(False, "mask", mask=np.ones((2, 7), np.int32))
    rejects(False, "out", out=(None, None, np.zeros((2, 2, 4, 16), np.float32)))
    rejects(True, "mask", mask=np.ones((2, 7), np.int64))
    rejects(True, "past_proj_buffer", past_proj_buffer=None)
    rejects(True, "past_proj_buffer", past_proj_buffer=np.zeros((2, 2, 8, 16), np.float32))
    rejects(True, "head_weight_scale", head_weight_scale=float("nan"))


def test_torch_tensors() -> None:
    torch = pytest.importorskip("torch")
    for csa in (False, True):
        for function, arguments in (
            (ops.packed_sparse_attention_indexer, small(csa, BF16)),
            (ops.sparse_attention_indexer, dense(csa, BF16)),
        ):
            right = function(**arguments)
            tensors = {
                name: value
                if not isinstance(value, np.ndarray)
                else torch.from_numpy(value.view(np.int16)).view(torch.bfloat16)
                if value.dtype == BF16
                else torch.from_numpy(value)
                for name, value in arguments.items()
            }
            result = function(**tensors)
            for a, b in zip(result, right, strict=True):
                if b is not None:
                    assert isinstance(a, torch.Tensor)
                    np.testing.assert_array_equal(a.float().numpy(), b.astype(np.float32))
