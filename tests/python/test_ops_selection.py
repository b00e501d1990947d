"""shoal.ops: selection merges, row selection and the latent pool against float64 definitions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ops_reference import BF16

from shoal import InvalidArgument, ops

INT_MAX = 2**31 - 1
DTYPES = [np.float32, np.float16, BF16]


def ints(*values: Any) -> np.ndarray:
    return np.array(values, np.int32)


# Merges


def merged(base: list[int], count: int, more: Any, capacity: int) -> tuple[list[int], int, int]:
    """One row by the contract: (indices, count, status). `more` is a range or a list with its count."""
    prefix, added = base[: max(count, 0)], list(more[0])[: max(more[1], 0)]
    sound = 0 <= count <= len(base) and 0 <= more[1] <= len(more[0]) and min([0, *prefix, *added]) >= 0
    union = list(dict.fromkeys(prefix + added))
    status = 1 if not sound else 2 if len(union) > capacity else 0
    union = [] if status else union
    return union + [-1] * (capacity - len(union)), len(union), status


def expect_merged(result: Any, expected: list[tuple[list[int], int, int]]) -> None:
    for array, values in zip(result, zip(*expected, strict=True), strict=True):
        assert array.dtype == np.int32
        np.testing.assert_array_equal(array, values)


index = st.integers(-1, 12)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_merges_agree_with_the_definition(data: Any) -> None:
    rows, columns, queries, extra = (data.draw(st.integers(low, 5)) for low in (1, 0, 0, 0))
    capacity = data.draw(st.integers(1, 12))
    base = [data.draw(st.lists(index, min_size=columns, max_size=columns)) for _ in range(rows)]
    counts = data.draw(st.lists(st.integers(-1, columns + 1), min_size=rows, max_size=rows))
    chosen = data.draw(st.lists(st.integers(-1, rows), min_size=queries, max_size=queries))
    arguments = dict(
        base_indices=np.array(base, np.int32).reshape(rows, columns),
        base_counts=ints(*counts),
        base_row_indices=ints(*chosen),
        max_output_entries=capacity,
    )

    def row(i: int, more: Any) -> tuple[list[int], int, int]:
        if not 0 <= chosen[i] < rows:
            return [-1] * capacity, 0, 1
        return merged(base[chosen[i]], counts[chosen[i]], more, capacity)

    starts, lengths = ([data.draw(st.integers(-1, 12)) for _ in range(queries)] for _ in range(2))
    ends = [s + n for s, n in zip(starts, lengths, strict=True)]
    ranges = {"range_starts": ints(*starts), "range_ends": ints(*ends)}
    # A negative start is malformed also where the range is empty.
    expected = [row(i, (range(starts[i], ends[i]), lengths[i] if starts[i] >= 0 else -1)) for i in range(queries)]
    if queries > 0:
        expect_merged(ops.sparse_attention_selection_merge(**arguments, **ranges), expected)
        result = ops.packed_sparse_attention_indexer_merge(**arguments, **ranges, policy_mode="append_range")
        expect_merged(result, expected)

    added = [data.draw(st.lists(index, min_size=extra, max_size=extra)) for _ in range(queries)]
    added_counts = data.draw(st.lists(st.integers(-1, extra + 1), min_size=queries, max_size=queries))
    result = ops.packed_sparse_attention_indexer_merge(
        **arguments,
        additional_indices=np.array(added, np.int32).reshape(queries, extra),
        additional_counts=ints(*added_counts),
        policy_mode="append_indices",
    )
    assert [r.shape for r in result] == [(queries, capacity), (queries,), (queries,)]
    if queries > 0:
        expect_merged(result, [row(i, (added[i], added_counts[i])) for i in range(queries)])


def test_merge_of_a_range_by_hand() -> None:
    base = ints([7, 3, 7, -9], [5, -1, INT_MAX, 0], [INT_MAX, 1, 0, 0])
    arguments = dict(
        base_indices=base, base_counts=ints(3, 1, 2), base_row_indices=ints(0, 0, 1, 2, 2), max_output_entries=4
    )
    indices, counts, status = ops.sparse_attention_selection_merge(
        **arguments, range_starts=ints(2, 2, 5, INT_MAX - 1, 0), range_ends=ints(5, 6, 5, INT_MAX, INT_MAX)
    )
    expected = [[7, 3, 2, 4], [-1] * 4, [5, -1, -1, -1], [INT_MAX, 1, INT_MAX - 1, -1], [-1] * 4]
    np.testing.assert_array_equal(indices, expected)
    np.testing.assert_array_equal(counts, [4, 0, 1, 3, 0])
    np.testing.assert_array_equal(status, [0, 2, 0, 0, 2])


def test_merge_takes_views_and_out() -> None:
    wide = np.full((4, 8), -5, np.int32)
    wide[::2, ::2] = [[4, 1, 4, 2], [9, 8, 7, 6]]
    memory = np.full((2, 12), 77, np.int32)
    out = memory[:, ::2]
    result = ops.packed_sparse_attention_indexer_merge(
        base_indices=wide[::2, ::2],
        base_counts=ints(4, 3, 2)[::2][::-1],
        base_row_indices=ints(1, 0),
        additional_indices=np.asfortranarray(ints([8, 5], [1, 3])),
        additional_counts=ints(2, 2),
        max_output_entries=6,
        policy_mode="append_indices",
        out=(out, None, None),
    )
    assert result[0] is out and (memory[:, 1::2] == 77).all()
    np.testing.assert_array_equal(out, [[9, 8, 7, 6, 5, -1], [4, 1, 3, -1, -1, -1]])
    np.testing.assert_array_equal(result[1], [5, 3])


def test_merges_name_what_is_wrong() -> None:
    base = dict(base_indices=ints([1, 2]), base_counts=ints(2), base_row_indices=ints(0), max_output_entries=4)
    by_range = {"range_starts": ints(0), "range_ends": ints(1)}
    more = {"additional_indices": ints([3]), "additional_counts": ints(1)}
    for name, change in {
        "max_output_entries": {"max_output_entries": 0},
        "max_output_entries ": {"max_output_entries": 2**30 + 1},
        "max_output_entries  ": {"max_output_entries": 1.5},
        "base_indices": {"base_indices": ints(1, 2)},
        "base_indices ": {"base_indices": np.array([[1, 2]], np.int64)},
        "base_counts": {"base_counts": ints(1, 1)},
        "base_row_indices": {"base_row_indices": ints([0])},
        "range_starts": {"range_starts": ints(0, 1)},
        "range_ends": {"range_ends": np.array([1.0])},
        "out": {"out": np.zeros((1, 5), np.int32)},
    }.items():
        with pytest.raises(InvalidArgument, match=name.strip()):
            ops.sparse_attention_selection_merge(**base | by_range | change)
        with pytest.raises(InvalidArgument, match=name.strip()):
            ops.packed_sparse_attention_indexer_merge(**base | by_range | change, policy_mode="append_range")
    for name, mode, inputs in (
        ("policy_mode", "append", by_range),
        ("additional_indices", "append_range", by_range | more),
        ("additional_counts", "append_range", by_range | {"additional_counts": ints(1)}),
        ("range_starts", "append_range", more),
        ("range_ends", "append_range", {"range_starts": ints(0)}),
        ("range_starts", "append_indices", by_range | more),
        ("range_ends", "append_indices", more | {"range_ends": ints(1)}),
        ("additional_indices", "append_indices", by_range),
        ("additional_counts", "append_indices", {"additional_indices": ints([3])}),
        ("additional_counts", "append_indices", more | {"additional_counts": ints(1, 1)}),
    ):
        with pytest.raises(InvalidArgument, match=name):
            ops.packed_sparse_attention_indexer_merge(**base, **inputs, policy_mode=mode)
    for function, missing in (
        (ops.packed_sparse_attention_indexer_merge, "policy_mode"),
        (ops.sparse_attention_selection_merge, "range_starts"),
    ):
        with pytest.raises(TypeError, match=missing):
            function(**base)
    with pytest.raises(TypeError, match="policy_mode"):
        ops.sparse_attention_selection_merge(**base, **by_range, policy_mode="append_range")


# Number grids


def rounded(x: np.ndarray, dtype: Any) -> np.ndarray:
    return x.astype(np.float32).astype(dtype).astype(np.float64)


def block_scale(x: np.ndarray, limit: float, floor: float) -> np.ndarray:
    amax = np.abs(x).max(axis=-1, keepdims=True)
    return np.where(amax > 0, 2.0 ** np.ceil(np.log2(np.maximum(amax / limit, floor))), 1.0)


def through_fp8(x: np.ndarray) -> np.ndarray:
    blocks = x.reshape(*x.shape[:-1], -1, 64)
    scale = block_scale(blocks, 448, 1e-30)
    a = np.minimum(np.abs(blocks / scale), 448)
    step = 2.0 ** (np.maximum(np.floor(np.log2(np.maximum(a, 1e-30))), -6) - 3)
    return (np.copysign(np.rint(a / step) * step, blocks) * scale).reshape(x.shape)


def through_rotated_fp4(x: np.ndarray, dtype: Any) -> np.ndarray:
    d = x.shape[-1]
    matrix = np.ones((1, 1))
    while len(matrix) < d:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    blocks = rounded(x @ matrix / np.sqrt(d), dtype).reshape(*x.shape[:-1], -1, 32)
    scale = block_scale(blocks, 6, 1e-38)
    a = np.minimum(np.abs(blocks / scale), 6)
    step = np.where(a < 2, 0.5, np.where(a < 4, 1, 2))
    return (np.copysign(step * np.ceil(a / step - 0.5), blocks) * scale).reshape(x.shape)


def rotated(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """The last channels, as many as the tables have, in pairs."""
    width = cos.shape[-1]
    if width == 0:
        return x
    tail, turned = x[..., -width:], np.empty_like(x[..., -width:])
    turned[..., 0::2], turned[..., 1::2] = -tail[..., 1::2], tail[..., 0::2]
    return np.concatenate([x[..., :-width], tail * cos + turned * sin], axis=-1)


# Row selection


class Select:
    """A step whose scores are exact in float32: small whole numbers, right angles."""

    def __init__(self, dtype: Any, past: list[int], tokens: int, rng: Any, **sizes: int) -> None:
        self.heads, self.width, self.rope, self.ratio, self.topk, self.capacity, self.fp4 = (
            sizes.get(k, v) for k, v in dict(heads=3, width=64, rope=16, ratio=4, topk=4, capacity=40, fp4=1).items()
        )
        batch, self.dtype, self.tokens = len(past), np.dtype(dtype), tokens

        def whole(*shape: int) -> np.ndarray:
            return rng.integers(-2, 3, shape).astype(dtype)

        self.past = np.array(past, np.int64)
        self.first = (self.past // self.ratio)[:, None]
        self.last = ((self.past + tokens - 1) // self.ratio)[:, None]
        self.query = whole(batch, tokens, self.heads * self.width)
        self.rows = whole(batch, (tokens - 1) // self.ratio + 2, self.width)
        self.cache = whole(batch, self.capacity, self.width)
        for b in range(batch):
            self.cache[b, self.first[b, 0] :] = np.nan
        self.weights = whole(batch, tokens, self.heads)
        quarter = np.repeat(rng.integers(0, 4, (batch, tokens, self.rope // 2)), 2, axis=-1)
        self.cos, self.sin = (np.array(table, np.float32)[quarter] for table in ((1, 0, -1, 0), (0, 1, 0, -1)))

    def arguments(self) -> dict[str, Any]:
        return dict(
            query=self.query, cos=self.cos, sin=self.sin, rows=self.rows, first_slot=self.first, last_slot=self.last,
            past_cache=self.cache, weights=self.weights, past_lens=self.past, num_heads=self.heads, head_dim=self.width,
            rope_head_dim=self.rope, ratio=self.ratio, topk=self.topk, row_id_offset=1000, scale=0.25,
            simulate_rotated_fp4=self.fp4,
        )  # fmt: skip

    def expected(self) -> tuple[np.ndarray, np.ndarray]:
        cache = self.cache.copy()
        selection = np.full((len(self.past), self.tokens, self.topk), -1, np.int64)
        for b, past in enumerate(self.past):
            for c in range(self.first[b, 0], min(self.last[b, 0] + 1, self.capacity)):
                cache[b, c] = self.rows[b, c - self.first[b, 0]]
            for s in range(self.tokens):
                q = self.query[b, s].astype(np.float64).reshape(self.heads, self.width)
                q = rotated(q, self.cos[b, s], self.sin[b, s])
                q = through_rotated_fp4(q, self.dtype) if self.fp4 else q
                visible = min((past + s + 1) // self.ratio, self.capacity)
                keys = cache[b, :visible].astype(np.float64)
                scores = np.maximum(q @ keys.T, 0).T @ (self.weights[b, s].astype(np.float64) * 0.25)
                order = np.arange(visible) if visible <= self.topk else np.argsort(-scores, kind="stable")[: self.topk]
                selection[b, s, : len(order)] = np.sort(order) + 1000
        return selection, cache


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fp4", [0, 1])
@pytest.mark.parametrize("tokens", [1, 6])
def test_sparse_row_select(dtype: Any, fp4: int, tokens: int) -> None:
    rng = np.random.default_rng(tokens)
    for topk in (1, 4, 18, 40):
        case = Select(dtype, [0, 7, 61, 140], tokens, rng, topk=topk, fp4=fp4, width=64 if fp4 else 24)
        arguments = case.arguments()
        before = case.cache.tobytes()
        selection, cache = ops.sparse_row_select(**arguments)
        expected, expected_cache = case.expected()
        np.testing.assert_array_equal(selection, expected)
        assert selection.dtype == np.int64 and cache.dtype == case.dtype and case.cache.tobytes() == before
        for b in range(4):
            live = case.last[b, 0] + 1
            assert cache[b, :live].tobytes() == expected_cache[b, :live].tobytes()
        own = case.cache.copy()
        again = ops.sparse_row_select(**arguments | {"past_cache": own}, out=(None, own))
        assert again[1] is own and again[0].tobytes() == selection.tobytes()
        assert own.tobytes() == cache.tobytes()


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    tokens=st.integers(1, 9),
    sizes=st.fixed_dictionaries(
        {
            "heads": st.integers(1, 5),
            "ratio": st.integers(1, 6),
            "topk": st.integers(1, 12),
            "capacity": st.integers(12, 50),
            "rope": st.sampled_from([0, 2, 64]),
            "fp4": st.integers(0, 1),
        }
    ),
)
def test_sparse_row_select_of_any_size(seed: int, tokens: int, sizes: dict[str, int]) -> None:
    rng = np.random.default_rng(seed)
    past = [int(p) for p in rng.integers(0, 12 * sizes["ratio"], 2)]
    case = Select(DTYPES[seed % 3], past, tokens, rng, **sizes)
    np.testing.assert_array_equal(ops.sparse_row_select(**case.arguments())[0], case.expected()[0])


def test_sparse_row_select_takes_views_and_flat_tables() -> None:
    case = Select(np.float16, [30, 61], 3, np.random.default_rng(1))
    arguments = case.arguments()
    expected = ops.sparse_row_select(**arguments)
    wide = np.zeros((2, 40, 128), np.float16)[:, :, ::2]
    wide[...] = case.cache
    odd = np.zeros(case.query.nbytes + 1, np.uint8)[1:].view(np.float16).reshape(case.query.shape)
    odd[...] = case.query
    changed = arguments | {
        "query": odd, "past_cache": wide, "rows": np.asfortranarray(case.rows), "weights": case.weights.reshape(-1),
        "cos": case.cos.reshape(6, 16), "sin": np.asfortranarray(case.sin),
    }  # fmt: skip
    for first, second in zip(ops.sparse_row_select(**changed), expected, strict=True):
        assert first.tobytes() == second.tobytes()
    ops.sparse_row_select(**changed, out=(None, wide))
    assert wide.tobytes() == expected[1].tobytes()


def test_sparse_row_select_of_malformed_contents_keeps_to_its_sequence() -> None:
    case = Select(np.float32, [30, 61], 3, np.random.default_rng(2))
    case.cache[...] = 1
    right = ops.sparse_row_select(**case.arguments())
    extreme = np.iinfo(np.int64)
    for name in ("first_slot", "last_slot", "past_lens"):
        for value in (-1, -5, extreme.min, extreme.max, 39, 40, 41):
            array = case.arguments()[name].copy()
            array[0] = value
            results = [ops.sparse_row_select(**case.arguments() | {name: array}) for _ in range(2)]
            assert all(a.tobytes() == b.tobytes() for a, b in zip(*results, strict=True))
            assert all(a[1].tobytes() == b[1].tobytes() for a, b in zip(results[0], right, strict=True))
            assert ((results[0][0] == -1) | ((results[0][0] >= 1000) & (results[0][0] < 1040))).all()


def test_sparse_row_select_names_what_is_wrong() -> None:
    case = Select(np.float32, [30, 61], 3, np.random.default_rng(3))
    for name, change in {
        "num_heads": {"num_heads": 0},
        "head_dim": {"head_dim": 0},
        "rope_head_dim": {"rope_head_dim": 7},
        "rope_head_dim ": {"rope_head_dim": 66},
        "ratio": {"ratio": 0},
        "topk": {"topk": 0},
        "topk ": {"topk": 41},
        "row_id_offset": {"row_id_offset": 0},
        "simulate_rotated_fp4": {"simulate_rotated_fp4": 2},
        "simulate_rotated_fp4 ": {"head_dim": 48},
        "query": {"query": case.query[:, :, 1:]},
        "query ": {"query": case.query.astype(np.int32)},
        "cos": {"cos": case.cos[:1]},
        "cos ": {"cos": None},
        "sin": {"sin": case.sin.astype(np.float16)},
        "rows": {"rows": case.rows.astype(np.float16)},
        "rows ": {"rows": case.rows[:, :, :3]},
        "first_slot": {"first_slot": case.first[:, 0]},
        "last_slot": {"last_slot": case.last.astype(np.int32)},
        "past_cache": {"past_cache": case.cache[:, :, 1:]},
        "weights": {"weights": case.weights[:, :, 1:]},
        "weights ": {"weights": case.weights.astype(BF16)},
        "past_lens": {"past_lens": case.past[:1]},
        "out": {"out": np.zeros((2, 3, 5), np.int64)},
    }.items():
        with pytest.raises(InvalidArgument, match=name.strip()):
            ops.sparse_row_select(**case.arguments() | change)
    with pytest.raises(TypeError, match="dtype"):
        ops.sparse_row_select(**case.arguments(), dtype=1)


# Latent pool


class Pool:
    def __init__(
        self, dtype: Any, ratio: int, m: int, d: int, tokens: int, past: list[int], seed: int = 0, **more: Any
    ):
        rng = np.random.default_rng(seed)
        self.ratio, self.m, self.d, self.tokens, self.dtype = ratio, m, d, tokens, np.dtype(dtype)
        self.rope, self.fp8, self.fp4, self.length = (
            more.get(k, v) for k, v in dict(rope=64, fp8=0, fp4=0, length=64).items()
        )
        batch, span, features = len(past), m * ratio, m * d
        self.past = np.array(past, np.int64)

        def normal(*shape: int, dtype: Any = np.float32) -> np.ndarray:
            return rng.standard_normal(shape).astype(dtype)

        self.kv, self.score = (normal(batch, tokens, features, dtype=dtype) for _ in range(2))
        self.state_kv, self.state_score = normal(batch, span, features), normal(batch, span, features)
        for b in range(batch):  # before the sequence
            self.state_kv[b, : max(span - past[b], 0)] = self.state_score[b, : max(span - past[b], 0)] = np.nan
        self.ape, self.weight = normal(ratio, features) / 2, np.abs(normal(d)) + np.float32(0.5)
        angle = np.outer(np.arange(self.length), 10000.0 ** (-np.arange(0, self.rope, 2) / max(self.rope, 1)))
        self.cos, self.sin = (np.repeat(f(angle), 2, axis=-1).astype(np.float32) for f in (np.cos, np.sin))

    def arguments(self) -> dict[str, Any]:
        return dict(
            kv=self.kv, score=self.score, past_state_kv=self.state_kv, past_state_score=self.state_score, ape=self.ape,
            norm_weight=self.weight, cos=self.cos, sin=self.sin, past_lens=self.past, ratio=self.ratio,
            window_multiplier=self.m, head_dim=self.d, rope_head_dim=self.rope, max_seq_len=self.length,
            simulate_fp8=self.fp8, simulate_rotated_fp4=self.fp4,
        )  # fmt: skip

    def row(self, b: int, j: int) -> np.ndarray:
        past, span, r, d = int(self.past[b]), self.m * self.ratio, self.ratio, self.d
        start = (past // r + j) * r
        kv = np.concatenate([self.state_kv[b], self.kv[b].astype(np.float32)]).astype(np.float64)
        score = np.concatenate([self.state_score[b], self.score[b].astype(np.float32)]).astype(np.float64)
        tokens = [t for t in range(start - (self.m - 1) * r, start + r) if 0 <= t < past + self.tokens]
        if not tokens:  # finite, to be ignored
            pooled = kv[-1, :d]
        else:
            first = [d if self.m == 2 and t >= start else 0 for t in tokens]
            logits = np.array(
                [(score[t - past + span] + self.ape[t % r])[f : f + d] for t, f in zip(tokens, first, strict=True)]
            )
            values = np.array([kv[t - past + span][f : f + d] for t, f in zip(tokens, first, strict=True)])
            w = np.exp(logits - logits.max(0))
            pooled = (w / w.sum(0) * values).sum(0)
        pooled = rounded(pooled, self.dtype)
        x = pooled / np.sqrt((pooled**2).mean() + 1e-6) * self.weight
        at = min(start, self.length - 1)
        x = rotated(x, self.cos[at].astype(np.float64), self.sin[at].astype(np.float64))
        if self.fp8:
            x[: d - self.rope] = through_fp8(x[: d - self.rope])
        x = through_rotated_fp4(x, self.dtype) if self.fp4 else x
        return rounded(x, self.dtype)

    def check(self, results: Any) -> None:
        rows, first, last, count, state_kv, state_score = results
        assert rows.dtype == self.dtype and {a.dtype for a in (first, last, count)} == {np.dtype(np.int64)}
        number = -(-self.tokens // self.ratio) + 1
        assert count.shape == () and int(count) == number and rows.shape == (len(self.past), number, self.d)
        np.testing.assert_array_equal(first[:, 0], self.past // self.ratio)
        np.testing.assert_array_equal(last[:, 0], (self.past + self.tokens - 1) // self.ratio)
        span = self.m * self.ratio
        for state, past, new in ((state_kv, self.state_kv, self.kv), (state_score, self.state_score, self.score)):
            whole = np.concatenate([past, new.astype(np.float32)], axis=1)[:, -span:]
            np.testing.assert_array_equal(state, whole)
        expected = np.array([[self.row(b, j) for j in range(number)] for b in range(len(self.past))])
        tolerance = {"float32": 1e-5, "float16": 6e-3, "bfloat16": 6e-3}[self.dtype.name]
        beyond = np.abs(rows.astype(np.float64) - expected) > tolerance * np.maximum(1, np.abs(expected))
        assert beyond.mean() <= (5e-3 if self.fp8 or self.fp4 or self.dtype == BF16 else 0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("ratio", "m", "d"), [(4, 2, 128), (8, 1, 128), (4, 2, 512), (128, 1, 512)])
@pytest.mark.parametrize(("fp8", "fp4"), [(0, 0), (1, 0), (0, 1), (1, 1)])
def test_gated_latent_pool(dtype: Any, ratio: int, m: int, d: int, fp8: int, fp4: int) -> None:
    for tokens, past in ((7, [0, 5]), (1, [11, 3]), (1, [1000, 1001]), (70, [0, 3])):
        case = Pool(dtype, ratio, m, d, tokens, past, fp8=fp8, fp4=fp4, length=1024)
        case.check(ops.gated_latent_pool(**case.arguments()))


@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_gated_latent_pool_of_a_long_prompt(dtype: Any) -> None:
    case = Pool(dtype, 128, 1, 512, 1024, [0, 3], fp8=1, length=1100)
    case.check(ops.gated_latent_pool(**case.arguments()))


@settings(max_examples=60, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    ratio=st.integers(1, 9),
    m=st.integers(1, 2),
    d=st.sampled_from([2, 6, 64, 70]),
    tokens=st.integers(0, 20),
    past=st.lists(st.integers(0, 40), min_size=1, max_size=3),
    seed=st.integers(0, 1000),
)
def test_gated_latent_pool_of_any_size(
    dtype: Any, ratio: int, m: int, d: int, tokens: int, past: list[int], seed: int
) -> None:
    case = Pool(dtype, ratio, m, d, tokens, past, seed, rope=seed % 2 * (d // 2 // 2 * 2), length=50)
    arguments = case.arguments()
    results = ops.gated_latent_pool(**arguments)
    if tokens == 0:  # a row of a sequence without any token is zero
        for b in np.flatnonzero(case.past == 0):
            assert not results[0][b].any()
        case.past[case.past == 0] = ratio * 9
        case.state_kv, case.state_score = np.nan_to_num(case.state_kv), np.nan_to_num(case.state_score)
        results = ops.gated_latent_pool(**case.arguments())
    case.check(results)
    joined = arguments | {"kv": np.concatenate([case.kv, case.score], axis=2), "score": None}
    if tokens > 0:
        assert ops.gated_latent_pool(**joined)[0].tobytes() == results[0].tobytes()


def test_gated_latent_pool_in_place_and_with_views() -> None:
    case = Pool(np.float16, 4, 2, 128, 9, [5, 17], fp8=1, fp4=1)
    arguments = case.arguments()
    expected = ops.gated_latent_pool(**arguments)
    own = case.state_kv.copy(), case.state_score.copy()
    wide = np.zeros((2, 9, 512), np.float16)[:, :, ::2]
    wide[...] = case.kv
    count = np.zeros((), np.int64)
    result = ops.gated_latent_pool(
        **arguments
        | {"kv": wide, "ape": np.asfortranarray(case.ape), "past_state_kv": own[0], "past_state_score": own[1]},
        out=(None, None, None, count, *own),
    )
    assert result[3] is count and result[4] is own[0] and result[5] is own[1]
    for first, second in zip(result, expected, strict=True):
        assert first.tobytes() == second.tobytes()


def test_gated_latent_pool_of_malformed_lengths_keeps_to_its_sequence() -> None:
    case = Pool(np.float32, 4, 2, 128, 5, [8, 17])
    right = ops.gated_latent_pool(**case.arguments())
    for value in (-1, np.iinfo(np.int64).min, np.iinfo(np.int64).max):
        results = ops.gated_latent_pool(**case.arguments() | {"past_lens": np.array([value, 17])})
        assert not results[0][0].any() and results[1][0, 0] == 0 and results[2][0, 0] == -1
        for i in (0, 1, 2, 4, 5):
            assert results[i][1].tobytes() == right[i][1].tobytes()


def test_gated_latent_pool_names_what_is_wrong() -> None:
    case = Pool(np.float32, 4, 2, 128, 5, [8, 17])
    for name, change in {
        "ratio": {"ratio": 0},
        "window_multiplier": {"window_multiplier": 3},
        "head_dim": {"head_dim": 0},
        "rope_head_dim": {"rope_head_dim": 63},
        "rope_head_dim ": {"rope_head_dim": 130},
        "max_seq_len": {"max_seq_len": 0},
        "max_seq_len ": {"max_seq_len": 65},
        "epsilon": {"epsilon": -1.0},
        "epsilon ": {"epsilon": float("nan")},
        "simulate_fp8": {"simulate_fp8": 1, "rope_head_dim": 62},
        "simulate_fp8 ": {"simulate_fp8": 2},
        "simulate_rotated_fp4": {"simulate_rotated_fp4": 1, "head_dim": 96},
        "kv": {"kv": case.kv[:, :, 1:]},
        "kv ": {"kv": case.kv.astype(np.int32)},
        "kv  ": {"score": None},
        "score": {"score": case.score.astype(np.float16)},
        "past_state_kv": {"past_state_kv": case.state_kv.astype(np.float16)},
        "past_state_score": {"past_state_score": case.state_score[:, 1:]},
        "ape": {"ape": case.ape[1:]},
        "norm_weight": {"norm_weight": case.weight[1:]},
        "cos": {"cos": case.cos[1:]},
        "sin": {"sin": None},
        "past_lens": {"past_lens": case.past.astype(np.int32)},
        "out": {"out": np.zeros((2, 2, 128), np.float32)},
    }.items():
        with pytest.raises(InvalidArgument, match=name.strip()):
            ops.gated_latent_pool(**case.arguments() | change)
    with pytest.raises(TypeError, match="head_dim"):
        ops.gated_latent_pool(**{k: v for k, v in case.arguments().items() if k != "head_dim"})


def test_torch_tensors() -> None:
    torch = pytest.importorskip("torch")
    case = Pool(np.float32, 4, 2, 128, 9, [5, 17])
    arguments = {k: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for k, v in case.arguments().items()}
    for first, second in zip(
        ops.gated_latent_pool(**arguments), ops.gated_latent_pool(**case.arguments()), strict=True
    ):
        assert isinstance(first, torch.Tensor) and first.numpy().tobytes() == second.tobytes()
    select = Select(np.float32, [30, 61], 3, np.random.default_rng(5))
    arguments = {k: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for k, v in select.arguments().items()}
    for name in ("query", "rows", "past_cache", "weights"):
        arguments[name] = arguments[name].bfloat16()
    selection, cache = ops.sparse_row_select(**arguments)
    assert cache.dtype == torch.bfloat16
    np.testing.assert_array_equal(selection.numpy(), ops.sparse_row_select(**select.arguments())[0])
    result = ops.sparse_attention_selection_merge(
        base_indices=torch.tensor([[1, 2]], dtype=torch.int32),
        base_counts=torch.tensor([2], dtype=torch.int32),
        base_row_indices=torch.tensor([0], dtype=torch.int32),
        range_starts=torch.tensor([2], dtype=torch.int32),
        range_ends=torch.tensor([4], dtype=torch.int32),
        max_output_entries=4,
    )
    assert [r.tolist() for r in result] == [[[1, 2, 3, -1]], [3], [0]]
