"""shoal.ops: attention over selected positions against a float64 oracle."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ops_reference import BF16

from shoal import InvalidArgument, ops

TOLERANCE = {
    "float16": {"rtol": 2e-3, "atol": 2e-3},
    "bfloat16": {"rtol": 5e-3, "atol": 6e-3},
    "float32": {"rtol": 1e-4, "atol": 1e-5},
}
DTYPES = [np.float32, np.float16, BF16]


def ints(*values: Any) -> np.ndarray:
    return np.array(values, np.int32)


def softmax_sum(x: np.ndarray, values: np.ndarray, softcap: float = 0.0, sink: float | None = None) -> np.ndarray:
    """Weighted sum of values [keys, H] by scaled logits [keys]; zero without a key."""
    if len(x) == 0:
        return np.zeros(values.shape[-1])
    x = softcap * np.tanh(x / softcap) if softcap else x
    top = x.max() if sink is None else max(x.max(), sink)
    weights = np.exp(x - top)
    return weights @ values / (weights.sum() + (0 if sink is None else np.exp(sink - top)))


def quantised(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    return np.rint(np.clip(x.astype(np.float32) / scale.astype(np.float32), -128, 127)).astype(np.int8)


def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    y = x.astype(np.float64)
    return (y / np.sqrt((y**2).mean(-1, keepdims=True) + 1e-6) * weight.astype(np.float64)).astype(x.dtype)


def rotated(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, offset: int, interleaved: bool) -> np.ndarray:
    """x [..., H] with one row of the tables for each leading index of [..., 1, H]."""
    y, half = x.astype(np.float64), cos.shape[-1]
    span = np.arange(2 * half).reshape(half, 2).T if interleaved else np.arange(2 * half).reshape(2, half)
    first, second = offset + span[0], offset + span[1]
    c, s = cos.astype(np.float64), sin.astype(np.float64)
    out = y.copy()
    out[..., first] = y[..., first] * c - y[..., second] * s
    out[..., second] = y[..., second] * c + y[..., first] * s
    return out.astype(x.dtype)


# Paged


N, G, H, S, P = 4, 2, 16, 16, 7


class Paged:
    """A ragged step over poisoned pages, with its expected caches and output."""

    def __init__(
        self,
        past: list[int],
        lengths: list[int],
        selected: list[list[int]],
        dtype: Any = np.float16,
        int8: str = "",
        seed: int = 0,
        **attributes: Any,
    ) -> None:
        rng = np.random.default_rng(seed)
        self.dtype, self.int8, self.attributes = np.dtype(dtype), int8, attributes
        self.past, self.lengths = past, lengths
        self.cu = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        tokens, batch = int(self.cu[-1]), len(past)
        self.table = np.full((batch, 4), -1, np.int32)
        order = iter(rng.permutation(P))
        for b in range(batch):
            for i in range(-(-(past[b] + lengths[b]) // S)):
                self.table[b, i] = next(order)
        self.q, self.k, self.v = (rng.standard_normal((tokens, n, H)).astype(self.dtype) for n in (N, G, G))
        columns = max(map(len, selected), default=0)
        self.counts = ints(*(len(selected[t % len(selected)]) for t in range(tokens)))
        self.indices = np.zeros((tokens, columns), np.int32)  # 0 past the count: it would show
        for t in range(tokens):
            self.indices[t, : self.counts[t]] = selected[t % len(selected)]
        self.k_scale, self.v_scale = ((rng.uniform(0.02, 0.05, G * H)).astype(np.float32) for _ in range(2))
        if int8 == "PER_TENSOR":
            self.k_scale, self.v_scale = self.k_scale[:1], self.v_scale[:1]
        if int8:
            caches = [np.full((P, S, G, H), 127, np.int8) for _ in range(2)]
        else:
            caches = [np.full((P, S, G, H), np.nan, self.dtype) for _ in range(2)]
        for b in range(batch):
            for p in range(past[b]):
                for cache, scale in zip(caches, (self.k_scale, self.v_scale), strict=True):
                    row = rng.standard_normal((G, H)).astype(self.dtype)
                    cache[self.table[b, p // S], p % S] = self.stored(row, scale)
        self.k_cache, self.v_cache = caches
        self.aux_lengths = ints(*(rng.integers(0, 6) for _ in range(batch)))
        heads = attributes.pop("aux_heads", 1)
        self.aux_k, self.aux_v = (rng.standard_normal((batch, 6, heads, H)).astype(self.dtype) for _ in range(2))
        for b in range(batch):
            self.aux_k[b, self.aux_lengths[b] :] = self.aux_v[b, self.aux_lengths[b] :] = np.nan
        self.sink = rng.standard_normal(N).astype(self.dtype)

    def stored(self, row: np.ndarray, scale: np.ndarray) -> np.ndarray:
        full = np.broadcast_to(scale, G * H).reshape(G, H) if self.int8 else None
        return quantised(row, full) if self.int8 else row

    def loaded(self, row: np.ndarray, scale: np.ndarray) -> np.ndarray:
        full = np.broadcast_to(scale, G * H).reshape(G, H).astype(np.float64) if self.int8 else 1.0
        return row.astype(np.float64) * full

    def arguments(self, **more: Any) -> dict[str, Any]:
        arguments: dict[str, Any] = {
            "query": self.q.reshape(len(self.q), N * H),
            "key": self.k.reshape(len(self.k), G * H),
            "value": self.v.reshape(len(self.v), G * H),
            "key_cache": self.k_cache.copy(),
            "value_cache": self.v_cache.copy(),
            "cumulative_sequence_length": self.cu,
            "past_seqlens": ints(*self.past),
            "block_table": self.table,
            "selected_indices": self.indices,
            "selected_counts": self.counts,
            "num_heads": N,
            "kv_num_heads": G,
        }
        if self.int8:
            arguments |= {"k_scale": self.k_scale, "v_scale": self.v_scale}
            arguments |= {"k_quant_type": self.int8, "v_quant_type": self.int8}
        attributes = dict(self.attributes)
        if attributes.get("selected_kv_source") == "auxiliary":
            arguments |= {"auxiliary_key": self.aux_k, "auxiliary_lengths": self.aux_lengths}
            if not attributes.get("auxiliary_kv_shared"):
                arguments["auxiliary_value"] = self.aux_v
        if attributes.pop("sink", False):
            arguments["head_sink"] = self.sink
        return arguments | attributes | more

    def expected(self, slots: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        a = self.attributes
        k_cache, v_cache = self.k_cache.copy(), self.v_cache.copy()
        flat_k, flat_v = k_cache.reshape(P * S, G, H), v_cache.reshape(P * S, G, H)
        sequence = np.repeat(np.arange(len(self.past)), self.lengths)
        position = [self.past[b] + t - self.cu[b] for t, b in enumerate(sequence)]

        def mapped(b: int, p: int) -> int:
            page = self.table[b, p // S] if p // S < self.table.shape[1] else -1
            return -1 if page < 0 else int(page) * S + p % S

        for t, b in enumerate(sequence):
            slot = mapped(b, position[t]) if slots is None else slots[t]
            if 0 <= slot < P * S:
                flat_k[slot], flat_v[slot] = self.stored(self.k[t], self.k_scale), self.stored(self.v[t], self.v_scale)
        output = np.zeros((len(self.q), N, H))
        for t, b in enumerate(sequence):
            pos, length, first = position[t], self.past[b] + self.lengths[b], self.cu[b]
            last = pos if a.get("is_causal", 1) else length - 1
            window = a.get("local_window_size", -1)
            local = range(max(0, pos - window + 1) if window > 0 else 0, last + 1)
            if a.get("attention_mode", "selected_only") == "selected_only":
                local = range(0)
            rows: list[tuple[np.ndarray, np.ndarray]] = []
            auxiliary = a.get("selected_kv_source") == "auxiliary"
            for place, p in [*(("main", p) for p in local), *((None, p) for p in self.indices[t, : self.counts[t]])]:
                if place is None and auxiliary:
                    if 0 <= p < self.aux_lengths[b]:
                        k = np.broadcast_to(self.aux_k[b, p], (G, H)).astype(np.float64)
                        v = np.broadcast_to(self.aux_v[b, p], (G, H)).astype(np.float64)
                        rows.append((k, k if a.get("auxiliary_kv_shared") else v))
                    continue
                if (place is None and p in local) or not 0 <= p <= min(last, length - 1) or mapped(b, p) < 0:
                    continue
                slot = mapped(b, p)
                if p >= self.past[b] and slots is not None:
                    asked = slots[first + p - self.past[b]]
                    if asked >= P * S:
                        continue
                    slot = asked if asked >= 0 else slot
                rows.append((self.loaded(flat_k[slot], self.k_scale), self.loaded(flat_v[slot], self.v_scale)))
            for h in range(N):
                g = h // (N // G)
                k = np.array([row[0][g] for row in rows]).reshape(-1, H)
                v = np.array([row[1][g] for row in rows]).reshape(-1, H)
                x = (a.get("scale") or H**-0.5) * (k @ self.q[t, h].astype(np.float64))
                sink = float(self.sink[h]) if a.get("sink") else None
                output[t, h] = softmax_sum(x, v, a.get("softcap", 0.0), sink)
        return output.reshape(len(self.q), N * H), k_cache, v_cache

    def check(self, slots: np.ndarray | None = None, **more: Any) -> np.ndarray:
        arguments = self.arguments(slot_mapping=slots, **more)
        expected, k_cache, v_cache = self.expected(slots)
        result = ops.sparse_paged_attention(**arguments)
        assert result[1] is arguments["key_cache"] and result[2] is arguments["value_cache"]
        assert result[1].tobytes() == k_cache.tobytes() and result[2].tobytes() == v_cache.tobytes()
        assert result[0].dtype == self.dtype
        np.testing.assert_allclose(result[0].astype(np.float64), expected, **TOLERANCE[self.dtype.name])
        return result[0]


SELECTED = [[0, 9, 14, 15, 9, -1, 1000000, 16], [2], [], [30, 3, 17, 5]]
MODES: list[dict[str, Any]] = [
    {},
    {"attention_mode": "local_plus_selected", "local_window_size": 4},
    {"attention_mode": "local_plus_selected"},
    {"selected_kv_source": "auxiliary"},
    {"selected_kv_source": "auxiliary", "auxiliary_kv_shared": 1},
    {
        "selected_kv_source": "auxiliary",
        "attention_mode": "local_plus_selected",
        "local_window_size": 3,
        "aux_heads": 2,
    },
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", MODES)
def test_paged_modes_and_sources(mode: dict[str, Any], dtype: Any) -> None:
    Paged([15, 0], [3, 2], SELECTED, dtype, **mode).check()
    Paged([15, 0], [3, 2], SELECTED, dtype, sink=True, softcap=2.0, scale=0.7, is_causal=0, **mode).check()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("int8", ["PER_TENSOR", "PER_CHANNEL"])
def test_paged_int8_caches_hold_the_exact_codes(int8: str, dtype: Any) -> None:
    for mode in MODES:
        case = Paged([15, 3], [4, 2], SELECTED, dtype, int8, **mode)
        case.check()
        if int8 == "PER_CHANNEL":
            case.check(k_scale=case.k_scale.reshape(G, 1, H), v_scale=case.v_scale.reshape(1, G, H))
        else:
            case.check(k_scale=case.k_scale.reshape(()), v_scale=case.v_scale.reshape(1, 1))


@pytest.mark.parametrize("int8", ["", "PER_CHANNEL"])
def test_paged_slots(int8: str) -> None:
    case = Paged([15], [4], [[15, 16, 17, 18], [0, 15, 16]], np.float16, int8)
    pages = set(range(P)) - set(case.table[0])
    case.table[0, 2] = pages.pop()
    cached = np.random.default_rng(5).standard_normal((G, H)).astype(np.float16)
    for p in range(15, 19):  # what an earlier step left there
        case.k_cache[case.table[0, p // S], p % S] = case.stored(cached, case.k_scale)
        case.v_cache[case.table[0, p // S], p % S] = case.stored(2 * cached, case.v_scale)
    elsewhere = case.table[0, 2] * S + 5
    written = case.check(ints(case.table[0, 0] * S + 15, -1, P * S, elsewhere))
    kept = case.check(ints(-1, -1, -1, -1))
    assert written.tobytes() != kept.tobytes()


def test_paged_packed_norm_and_rotary_are_those_of_paged_attention() -> None:
    rng = np.random.default_rng(3)
    for dtype in DTYPES:
        case = Paged([15, 0], [3, 2], [list(range(20))], dtype)
        more = {
            "cos_cache": rng.standard_normal((32, 8)).astype(dtype),
            "sin_cache": rng.standard_normal((32, 8)).astype(dtype),
            "q_norm_weight": rng.standard_normal(H).astype(dtype),
            "k_norm_weight": rng.standard_normal(H).astype(dtype),
            "do_rotary": 1,
            "rotary_interleaved": 1,
        }
        arguments = case.arguments(**more)
        packed = np.concatenate([arguments.pop(name) for name in ("query", "key", "value")], axis=1)
        dense = {name: value for name, value in arguments.items() if not name.startswith("selected")}
        dense |= {"key_cache": case.k_cache.copy(), "value_cache": case.v_cache.copy()}
        expected = ops.paged_attention(query=packed, **dense)
        output, k_cache, v_cache = ops.sparse_paged_attention(query=packed, **arguments)
        assert k_cache.tobytes() == expected[1].tobytes() and v_cache.tobytes() == expected[2].tobytes()
        tolerance = TOLERANCE[np.dtype(dtype).name]
        np.testing.assert_allclose(output.astype(np.float64), expected[0].astype(np.float64), **tolerance)


def test_paged_production_geometry() -> None:
    rng, rows = np.random.default_rng(11), 3
    table = ints(2, 0, 4, 1, 3, -1)[None]
    q = rng.standard_normal((rows, 24, 256)).astype(np.float16)
    k, v = (rng.standard_normal((rows, 2, 256)).astype(np.float16) for _ in range(2))
    caches = [rng.standard_normal((5, 16, 2, 256)).astype(np.float16) for _ in range(2)]
    indices = np.concatenate([[-1, 1000000], rng.integers(0, 18, 255)]).astype(np.int32)[None].repeat(rows, 0)
    counts = ints(257, 9, 0)
    sink = np.full(24, 0.25, np.float16)
    output, k_cache, v_cache = ops.sparse_paged_attention(
        query=q.reshape(rows, -1),
        key=k.reshape(rows, -1),
        value=v.reshape(rows, -1),
        key_cache=caches[0],
        value_cache=caches[1],
        cumulative_sequence_length=ints(0, rows),
        past_seqlens=ints(15),
        block_table=table,
        selected_indices=indices,
        selected_counts=counts,
        head_sink=sink,
        num_heads=24,
        kv_num_heads=2,
        softcap=2.0,
    )
    flat = [cache.reshape(80, 2, 256).astype(np.float64) for cache in (k_cache, v_cache)]
    for t in range(rows):
        p = indices[t, : counts[t]]
        p = p[(p >= 0) & (p <= 15 + t)]
        slots = table[0, p // 16] * 16 + p % 16
        for h in range(24):
            x = flat[0][slots, h // 12] @ q[t, h].astype(np.float64) / 16
            expected = softmax_sum(x, flat[1][slots, h // 12], 2.0, 0.25)
            np.testing.assert_allclose(output[t, h * 256 : h * 256 + 256], expected, rtol=2e-3, atol=2e-3)
    assert not output[2].any()


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_paged_agrees_with_the_definition(data: Any) -> None:
    batch = data.draw(st.integers(1, 2))
    past = data.draw(st.lists(st.sampled_from([0, 1, 14, 15, 16, 31]), min_size=batch, max_size=batch))
    lengths = data.draw(st.lists(st.integers(0, 3), min_size=batch, max_size=batch))
    entry = st.one_of(st.integers(-2, 36), st.sampled_from([-(2**31), 2**31 - 1, 64]))
    selected = data.draw(st.lists(st.lists(entry, max_size=9), min_size=1, max_size=3))
    mode = data.draw(st.sampled_from(MODES))
    more = {"is_causal": data.draw(st.integers(0, 1)), "sink": data.draw(st.booleans())}
    int8 = data.draw(st.sampled_from(["", "PER_TENSOR", "PER_CHANNEL"]))
    dtype = data.draw(st.sampled_from(DTYPES))
    Paged(past, lengths, selected, dtype, int8, data.draw(st.integers(0, 99)), **more, **mode).check()


def test_paged_views_at_any_byte_with_any_strides() -> None:
    case = Paged([15, 0], [3, 2], SELECTED, **MODES[5])
    plain = ops.sparse_paged_attention(**case.arguments())[0]
    arguments = case.arguments()
    for name in ("key_cache", "value_cache"):
        cache = arguments[name]
        memory = np.empty(cache.nbytes + 1, np.uint8)
        arguments[name] = memory[1:].view(cache.dtype).reshape(cache.shape)
        arguments[name][...] = cache
    for name, value in list(arguments.items()):
        if isinstance(value, np.ndarray) and not name.endswith("_cache"):
            wide = np.zeros((*value.shape[:-1], 2 * value.shape[-1] + 1), value.dtype)[..., 1::2]
            wide[...] = value
            arguments[name] = wide
    out = np.zeros((5, 2 * N * H), np.float16)[:, ::2]
    result = ops.sparse_paged_attention(**arguments, out=out)
    assert result[0] is out and out.tobytes() == plain.tobytes()


def test_paged_empty_steps_and_metadata() -> None:
    case = Paged([5], [0], [[1]])
    output, k_cache, _ = ops.sparse_paged_attention(**case.arguments())
    assert output.shape == (0, N * H) and k_cache.tobytes() == case.k_cache.tobytes()
    case = Paged([5], [2], SELECTED)
    plain = ops.sparse_paged_attention(**case.arguments())[0].tobytes()
    for metadata in ([2, 0, 8, 0, 8], (0, 0, 0, 0, 0), np.arange(5)):
        assert ops.sparse_paged_attention(**case.arguments(attention_metadata=metadata))[0].tobytes() == plain


def test_paged_torch() -> None:
    torch = pytest.importorskip("torch")
    case = Paged([15, 0], [3, 2], SELECTED, np.float16, **MODES[5])
    expected = ops.sparse_paged_attention(**case.arguments())
    arguments = {n: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for n, v in case.arguments().items()}
    output, k_cache, _ = ops.sparse_paged_attention(**arguments)
    assert k_cache is arguments["key_cache"]
    assert output.numpy().tobytes() == expected[0].tobytes() and k_cache.numpy().tobytes() == expected[1].tobytes()


def test_paged_rejections_name_the_argument_and_write_nothing() -> None:
    main, other = Paged([3], [2], SELECTED), Paged([3], [2], SELECTED, **MODES[5])
    int8 = Paged([3], [2], SELECTED, int8="PER_TENSOR")
    f32 = np.float32
    wrong: list[tuple[str, Paged, dict[str, Any]]] = [
        ("num_heads", main, {"num_heads": 3}),
        ("kv_num_heads", main, {"kv_num_heads": 0}),
        ("attention_mode", main, {"attention_mode": "all"}),
        ("attention_mode", main, {"attention_mode": 1}),
        ("selected_kv_source", main, {"selected_kv_source": "both"}),
        ("auxiliary_cache_layout", main, {"auxiliary_cache_layout": "paged"}),
        ("auxiliary_kv_shared", main, {"auxiliary_kv_shared": 2}),
        ("qk_norm_epsilon", main, {"qk_norm_epsilon": 0.0}),
        ("selected_indices", main, {"selected_indices": main.indices[:1]}),
        ("selected_indices", main, {"selected_indices": main.indices[0]}),
        ("selected_indices", main, {"selected_indices": main.indices.astype(np.int64)}),
        ("selected_counts", main, {"selected_counts": main.counts[:1]}),
        ("selected_counts", main, {"selected_counts": main.counts[None]}),
        ("auxiliary_key", main, {"auxiliary_key": other.aux_k}),
        ("auxiliary_value", main, {"auxiliary_value": other.aux_v}),
        ("auxiliary_lengths", main, {"auxiliary_lengths": other.aux_lengths}),
        ("auxiliary_key", other, {"auxiliary_key": None}),
        ("auxiliary_value", other, {"auxiliary_value": None}),
        ("auxiliary_lengths", other, {"auxiliary_lengths": None}),
        ("auxiliary_value", other, {"auxiliary_kv_shared": 1}),
        ("auxiliary_key", other, {"auxiliary_key": other.aux_k[:, :, [0, 1, 1]], "auxiliary_value": other.aux_v}),
        ("auxiliary_key", other, {"auxiliary_key": other.aux_k.astype(f32), "auxiliary_value": other.aux_v}),
        ("auxiliary_value", other, {"auxiliary_value": other.aux_v[:, :3]}),
        ("auxiliary_lengths", other, {"auxiliary_lengths": ints(1, 2)}),
        ("k_quant_type", int8, {"k_quant_type": "NONE"}),
        ("v_quant_type", int8, {"v_quant_type": "NONE"}),
        ("k_scale", int8, {"k_scale": None}),
        ("v_scale", int8, {"v_scale": np.ones(3, f32)}),
        ("attention_metadata", main, {"attention_metadata": [1, 2, 3]}),
        ("attention_metadata", main, {"attention_metadata": [1, 2, 3, 4, -5]}),
        ("cos_cache", main, {"do_rotary": 1}),
        ("head_sink", main, {"head_sink": np.zeros(3, np.float16)}),
        ("block_table", main, {"block_table": main.table[0]}),
        ("value_cache", main, {"value_cache": main.v_cache.astype(BF16)}),
        ("out", main, {"out": np.zeros((1, 1), np.float16)}),
        ("out", main, {"out": (None, main.k_cache.copy())}),
    ]
    for name, case, change in wrong:
        arguments = case.arguments() | change
        with pytest.raises(InvalidArgument, match=name):
            ops.sparse_paged_attention(**arguments)
        for cache, before in (("key_cache", case.k_cache), ("value_cache", case.v_cache)):
            assert cache in change or arguments[cache].tobytes() == before.tobytes(), name
    with pytest.raises(TypeError, match="selected_counts"):
        ops.sparse_paged_attention(**{n: v for n, v in main.arguments().items() if n != "selected_counts"})


# Dense batches


class Dynamic:
    """A dense step over poisoned caches, with its expected caches and output."""

    def __init__(
        self,
        lengths: list[int],
        seq: int,
        selected: list[list[int]],
        dtype: Any = np.float32,
        capacity: int | None = 12,
        int8: bool = False,
        local: int = 0,
        shared: bool = False,
        seed: int = 0,
        cache: Any = None,
        **attributes: Any,
    ) -> None:
        rng = np.random.default_rng(seed)
        self.dtype, self.int8, self.local, self.shared = np.dtype(dtype), int8, local, shared
        self.lengths, self.seq, self.attributes, self.batch = lengths, seq, attributes, len(lengths)
        self.total = max([seq, *lengths]) if attributes.get("fitting", True) else seq
        attributes.pop("fitting", None)
        b = self.batch
        self.q, self.k, self.v = (rng.standard_normal((b, seq, n, H)).astype(self.dtype) for n in (N, G, G))
        columns = max(map(len, selected), default=0)
        rows = b * seq
        self.counts = ints(*(len(selected[r % len(selected)]) for r in range(rows)))
        self.indices = np.full((rows, columns), -1, np.int32)
        for r in range(rows):
            self.indices[r, : self.counts[r]] = selected[r % len(selected)]
        self.key_scale, self.value_scale = (rng.uniform(0.02, 0.05, G * H).astype(np.float32) for _ in range(2))
        self.cache_type = np.dtype(np.int8) if int8 else np.dtype(cache or self.dtype)
        self.past: list[np.ndarray] | None = None
        if capacity is not None:
            shape = (b, G, capacity, H)
            self.past = []
            for _ in range(2):
                if int8:
                    array = rng.integers(-128, 128, shape).astype(np.int8)
                else:
                    array = rng.standard_normal(shape).astype(self.cache_type)
                    for i, length in enumerate(lengths):
                        array[i, :, max(0, length - seq) :] = np.nan
                self.past.append(array)
        self.capacity = max(capacity or 0, self.total)
        self.aux_k, self.aux_v = (rng.standard_normal((b, G, 6, H)).astype(self.dtype) for _ in range(2))
        self.sink = rng.standard_normal(N).astype(self.dtype)

    def arguments(self, **more: Any) -> dict[str, Any]:
        shape = (self.batch, self.seq, -1)
        arguments: dict[str, Any] = {
            "query": self.q.reshape(shape),
            "key": self.k.reshape(shape),
            "value": self.v.reshape(shape),
            "selected_indices": self.indices,
            "selected_counts": self.counts,
            "seqlens_k": ints(*self.lengths) - 1,
            "total_sequence_length": self.total,
            "num_heads": N,
            "kv_num_heads": G,
        }
        if self.past is not None:
            arguments |= {"past_key": self.past[0].copy(), "past_value": self.past[1].copy()}
        if self.int8:
            arguments |= {"key_scale": self.key_scale, "value_scale": self.value_scale}
        if self.local:
            arguments |= {
                "attention_mode": "local_plus_selected",
                "selected_kv_source": "auxiliary",
                "local_window_size": self.local,
                "auxiliary_key": self.aux_k,
                "auxiliary_kv_shared": int(self.shared),
            }
            if not self.shared:
                arguments["auxiliary_value"] = self.aux_v
        attributes = dict(self.attributes)
        if attributes.pop("sink", False):
            arguments["head_sink"] = self.sink
        return arguments | attributes | more

    def expected(self, k: np.ndarray | None = None, q: np.ndarray | None = None) -> tuple[np.ndarray, ...]:
        """With k and q for the keys and queries after norm and rotary."""
        k, q = self.k if k is None else k, self.q if q is None else q
        caches = [np.zeros((self.batch, G, self.capacity, H), self.cache_type) for _ in range(2)]
        for cache, past, rows, scale in zip(
            caches, self.past or [None, None], (k, self.v), (self.key_scale, self.value_scale), strict=True
        ):
            if past is not None:
                cache[:, :, : past.shape[2]] = past
            for b, length in enumerate(self.lengths):
                for s in range(self.seq):
                    p = length - self.seq + s
                    if 0 <= p < self.capacity:
                        row = rows[b, s]
                        cache[b, :, p] = quantised(row, scale.reshape(G, H)) if self.int8 else row
        values = [c.astype(np.float64) for c in caches]
        if self.int8:
            values[0] *= self.key_scale.astype(np.float64).reshape(1, G, 1, H)
            values[1] *= self.value_scale.astype(np.float64).reshape(1, G, 1, H)
        output = np.zeros((self.batch, self.seq, N, H))
        for b, length in enumerate(self.lengths):
            for s in range(self.seq):
                sound = self.seq <= length <= self.capacity
                pos = length - self.seq + s if sound else -1
                entries = self.indices[b * self.seq + s, : self.counts[b * self.seq + s]]
                for h in range(N):
                    g = h // (N // G)
                    if self.local:
                        near = np.arange(max(0, pos - self.local + 1), pos + 1)
                        far = entries[(entries >= 0) & (entries < 6)]
                        aux_v = self.aux_k if self.shared else self.aux_v
                        keys = np.concatenate([values[0][b, g, near], self.aux_k[b, g, far].astype(np.float64)])
                        rows = np.concatenate([values[1][b, g, near], aux_v[b, g, far].astype(np.float64)])
                    else:
                        near = entries[(entries >= 0) & (entries <= pos)]
                        keys, rows = values[0][b, g, near], values[1][b, g, near]
                    x = (self.attributes.get("scale") or H**-0.5) * (keys @ q[b, s, h].astype(np.float64))
                    sink = float(self.sink[h]) if self.attributes.get("sink") else None
                    sink = 0.0 if sink is None and self.attributes.get("smooth_softmax") else sink
                    output[b, s, h] = softmax_sum(x, rows, 0.0, sink)
        return (output.reshape(self.batch, self.seq, N * H), *caches)

    def check(self, **more: Any) -> Any:
        arguments = self.arguments(**more)
        result = ops.dynamic_sparse_attention(**arguments)
        expected = self.expected()
        assert [a.dtype for a in result] == [self.dtype, self.cache_type, self.cache_type, np.dtype(np.int32)]
        for name, actual, cache in zip(("past_key", "past_value"), result[1:3], expected[1:], strict=True):
            in_place = self.past is not None and self.past[0].shape[2] >= self.total
            assert (actual is arguments.get(name)) == in_place
            assert actual.tobytes() == cache.tobytes()
            if self.past is not None and not in_place:
                assert arguments[name].tobytes() == self.past[name == "past_value"].tobytes()
        np.testing.assert_allclose(result[0].astype(np.float64), expected[0], **TOLERANCE[self.dtype.name])
        assert result[3].shape == (1,)
        return result


ENTRIES = [[0, 9, 3, 9, -1, 1000000], [2], [], [5, 3, 1, 4]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("capacity", [None, 0, 7, 10, 12])
@pytest.mark.parametrize("mode", [{}, {"local": 3}, {"local": 100, "shared": True}])
def test_dynamic_modes_caches_and_types(mode: dict[str, Any], capacity: int | None, dtype: Any) -> None:
    Dynamic([10, 6], 2, ENTRIES, dtype, capacity, **mode).check()
    Dynamic([10, 6], 2, ENTRIES, dtype, capacity, sink=True, scale=0.3, **mode).check()
    Dynamic([10, 6], 2, ENTRIES, dtype, capacity, smooth_softmax=1, **mode).check()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", [{}, {"local": 3}])
def test_dynamic_int8_and_half_caches(mode: dict[str, Any], dtype: Any) -> None:
    for capacity in (7, 12):
        Dynamic([10, 6], 2, ENTRIES, dtype, capacity, int8=True, **mode).check()
        Dynamic([10, 6], 2, ENTRIES, dtype, capacity, cache=np.float16, **mode).check()


def test_dynamic_codes_round_half_to_even_and_saturate() -> None:
    case = Dynamic([1], 1, [[0]], capacity=2, int8=True)
    case.key_scale[:], case.value_scale[:] = 1.0, 2.0
    case.k[0, 0, 0, :8] = [0.5, 1.5, -0.5, -2.5, 200, -200, 127.5, -128.5]
    case.v[0, 0, 0, :4] = [1, 3, 1e9, -1e9]
    _, key, value, status = ops.dynamic_sparse_attention(**case.arguments())
    assert key[0, 0, 0, :8].tolist() == [0, 2, 0, -2, 127, -128, 127, -128]
    assert value[0, 0, 0, :4].tolist() == [0, 2, 127, -128]
    assert status.tolist() == [0]


@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_dynamic_packed_norm_and_rotary(dtype: Any, interleaved: int) -> None:
    rng = np.random.default_rng(2)
    case = Dynamic([10, 6], 2, ENTRIES, dtype)
    cos, sin = (rng.standard_normal((12, 4)).astype(dtype) for _ in range(2))
    q_weight, k_weight = (rng.standard_normal(H).astype(dtype) for _ in range(2))
    for positions in (None, np.array([[3, 11], [0, 12]], np.int64)):
        at = np.array([[8, 9], [4, 5]]) if positions is None else positions
        inside = (at < 12)[:, :, None, None]
        table = np.minimum(at, 11)[:, :, None]

        def prepared(x: np.ndarray, weight: np.ndarray, inside: Any = inside, table: Any = table) -> np.ndarray:
            x = norm(x, weight)
            return np.where(inside, rotated(x, cos[table], sin[table], 8, bool(interleaved)), x)

        arguments = case.arguments(
            cos_cache=cos, sin_cache=sin, do_rotary=1, rotary_interleaved=interleaved, rotary_offset=8,
            q_norm_weight=q_weight, k_norm_weight=k_weight, position_ids=positions,
        )  # fmt: skip
        packed = np.concatenate([arguments.pop(name) for name in ("query", "key", "value")], axis=2)
        output, key, value, status = ops.dynamic_sparse_attention(query=packed, **arguments)
        k = prepared(case.k, k_weight)
        expected = case.expected(k, prepared(case.q, q_weight))
        tolerance = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}[np.dtype(dtype).name]
        np.testing.assert_allclose(key.astype(np.float64), expected[1].astype(np.float64), tolerance, tolerance)
        assert value.tobytes() == expected[2].tobytes()
        np.testing.assert_allclose(output.astype(np.float64), expected[0], **TOLERANCE[np.dtype(dtype).name])
        assert status.tolist() == [6]  # entry 9 of the first row, whose token is at 8


def test_dynamic_output_bf16() -> None:
    case = Dynamic([10, 6], 2, ENTRIES, np.float16)
    plain = ops.dynamic_sparse_attention(**case.arguments())
    output, key, _, _ = ops.dynamic_sparse_attention(**case.arguments(output_bf16=1))
    assert output.dtype == BF16 and key.dtype == np.float16 and key.tobytes() == plain[1].tobytes()
    np.testing.assert_allclose(output.astype(np.float64), case.expected()[0], rtol=5e-3, atol=6e-3)
    with pytest.raises(InvalidArgument, match="output_bf16"):
        ops.dynamic_sparse_attention(**Dynamic([10, 6], 2, ENTRIES).arguments(output_bf16=1))


@pytest.mark.parametrize("local", [0, 3])
def test_dynamic_sequences_that_do_not_fit(local: int) -> None:
    for lengths in ([1, 14], [0, 13], [-(2**31) + 1, 2**31 - 1]):
        case = Dynamic(lengths, 2, [[0, 1, 2, 5]], local=local, fitting=False)
        case.total = 2
        assert case.check()[3].tolist() == [7]


def test_dynamic_validation_status() -> None:
    def status(case: Dynamic, **more: Any) -> int:
        return int(ops.dynamic_sparse_attention(**case.arguments(**more))[3][0])

    good = Dynamic([10, 6], 2, [[0, 3, 5], [1], [4, 2, 3], [0]])
    assert status(good) == 0
    rotary = {"cos_cache": np.ones((10, 4), np.float32), "sin_cache": np.ones((10, 4), np.float32), "do_rotary": 1}
    assert status(good, **rotary) == 0
    assert status(good, **rotary, position_ids=np.array([[0, 1], [2, 10]])) == 8
    assert status(good, selected_counts=ints(3, 1, 4, 1)) == 1
    assert status(good, selected_counts=ints(3, 1, -1, 1)) == 1
    assert status(good, selected_counts=ints(2, 1, 3, 1)) == 2
    assert status(good, selected_counts=ints(3, 2, 3, 1)) == 3
    for entries, code in (([4, 6, 3], 4), ([4, 5, 3], 6), ([4, 3, 4], 5), ([-1, 4, 4], 3), ([4, 4, -1], 5)):
        assert status(Dynamic([10, 6], 2, [[0, 3, 5], [1], entries, [0]])) == code
    assert status(Dynamic([10, 6], 2, [[0, 3, 5], [1], [6], [0]], local=2)) == 4
    assert status(Dynamic([10, 6], 2, [[0, 3, 5], [1], [5], [0]], local=2)) == 0
    assert status(good, seqlens_k=ints(9, 0)) == 7
    assert status(good, seqlens_k=ints(10, 5)) == 7  # above total_sequence_length
    assert status(good, committed_length=ints(8, 4)) == 0
    assert status(good, committed_length=ints(8, 5)) == 9
    assert status(good, committed_length=ints(8)) == 9
    assert status(good, committed_length=ints(11, 4), seqlens_k=ints(12, 5)) == 9
    for committed in (np.array(4, np.int32), ints(4)):
        assert status(Dynamic([6], 2, [[0]]), committed_length=committed) == 0
        assert status(Dynamic([7], 2, [[0]]), committed_length=committed) == 9
    int8 = Dynamic([10, 6], 2, [[0, 3, 5], [1], [4, 2, 3], [0]], int8=True)
    assert status(int8) == 0
    assert status(int8, key_scale=int8.key_scale.reshape(G, 1, H)) == 0
    for wrong in (0.0, -0.1, np.inf, np.nan):
        scale = int8.value_scale.copy()
        scale[5] = wrong
        assert status(int8, value_scale=scale) == 10


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_dynamic_agrees_with_the_definition(data: Any) -> None:
    batch, seq = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 3))
    lengths = data.draw(st.lists(st.integers(seq, 14), min_size=batch, max_size=batch))
    entry = st.one_of(st.integers(-2, 15), st.sampled_from([-(2**31), 2**31 - 1]))
    selected = data.draw(st.lists(st.lists(entry, max_size=9), min_size=1, max_size=3))
    more = {
        "capacity": data.draw(st.sampled_from([None, 3, 9, 14, 20])),
        "local": data.draw(st.sampled_from([0, 1, 4, 50])),
        "shared": data.draw(st.booleans()),
        "sink": data.draw(st.booleans()),
        "seed": data.draw(st.integers(0, 99)),
    }
    more["int8"] = more["capacity"] is not None and data.draw(st.booleans())
    Dynamic(lengths, seq, selected, data.draw(st.sampled_from(DTYPES)), **more).check()


def test_dynamic_out_views_and_scalars() -> None:
    case = Dynamic([10, 6], 2, ENTRIES, np.float16, local=3)
    plain = [a.tobytes() for a in ops.dynamic_sparse_attention(**case.arguments())]
    for total in (10, np.int32(10), np.array(10), np.array([10]), [10]):
        again = ops.dynamic_sparse_attention(**case.arguments(total_sequence_length=total))
        assert [a.tobytes() for a in again] == plain
    arguments = case.arguments()
    for name, value in list(arguments.items()):
        if isinstance(value, np.ndarray):
            memory = np.empty(value.nbytes + 1, np.uint8)
            view = memory[1:].view(value.dtype).reshape(value.shape)
            if not name.startswith("past"):
                view = np.zeros((*value.shape[:-1], 2 * value.shape[-1]), value.dtype)[..., ::2]
            view[...] = value
            arguments[name] = view
    out = (np.zeros((2, 2, 2 * N * H), np.float16)[:, :, ::2], arguments["past_key"], None, ints(-1))
    result = ops.dynamic_sparse_attention(**arguments, out=out)
    assert result[0] is out[0] and result[1] is arguments["past_key"] and result[3] is out[3]
    assert [a.tobytes() for a in result] == plain
    grown = Dynamic([10, 6], 2, ENTRIES, np.float16, capacity=9)
    fresh = np.full((2, G, 10, H), 7, np.float16)
    result = ops.dynamic_sparse_attention(**grown.arguments(), out=(None, fresh))
    assert result[1] is fresh and fresh.tobytes() == grown.expected()[1].tobytes()


def test_dynamic_torch() -> None:
    torch = pytest.importorskip("torch")
    for capacity in (9, 12):
        case = Dynamic([10, 6], 2, ENTRIES, np.float16, capacity)
        expected = ops.dynamic_sparse_attention(**case.arguments())
        arguments = {n: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for n, v in case.arguments().items()}
        result = ops.dynamic_sparse_attention(**arguments)
        assert [a.numpy().tobytes() for a in result] == [a.tobytes() for a in expected]
        assert (result[1] is arguments["past_key"]) == (capacity == 12)


def test_dynamic_rejections_name_the_argument_and_write_nothing() -> None:
    main, near = Dynamic([10, 6], 2, ENTRIES), Dynamic([10, 6], 2, ENTRIES, local=3)
    int8, f16 = Dynamic([10, 6], 2, ENTRIES, int8=True), np.float16
    wrong: list[tuple[str, Dynamic, dict[str, Any]]] = [
        ("num_heads", main, {"num_heads": 0}),
        ("kv_num_heads", main, {"kv_num_heads": 3}),
        ("is_causal", main, {"is_causal": 0}),
        ("attention_mode", main, {"attention_mode": "local_plus_selected", "local_window_size": 2}),
        ("selected_kv_source", main, {"selected_kv_source": "auxiliary"}),
        ("attention_mode", main, {"attention_mode": "all"}),
        ("local_window_size", near, {"local_window_size": -1}),
        ("local_window_size", main, {"local_window_size": 0}),
        ("scale", main, {"scale": -1.0}),
        ("scale", main, {"scale": float("inf")}),
        ("rotary_offset", main, {"rotary_offset": 4}),
        ("qk_norm_epsilon", main, {"qk_norm_epsilon": -1.0}),
        ("smooth_softmax", main, {"smooth_softmax": 2}),
        ("query", main, {"query": main.q.reshape(4, -1)}),
        ("key", main, {"key": main.k.reshape(2, 2, -1).astype(f16)}),
        ("past_key", main, {"past_key": None}),
        ("past_value", main, {"past_value": None}),
        ("past_key", main, {"past_key": np.zeros((2, G, 12, 8), np.float32)}),
        ("total_sequence_length", main, {"total_sequence_length": 1}),
        ("total_sequence_length", main, {"total_sequence_length": [10, 10]}),
        ("total_sequence_length", main, {"total_sequence_length": None}),
        ("key_scale", main, {"key_scale": main.key_scale}),
        ("key_scale", int8, {"key_scale": None}),
        ("value_scale", int8, {"value_scale": int8.value_scale[:3]}),
        ("auxiliary_key", main, {"auxiliary_key": main.aux_k}),
        ("auxiliary_key", near, {"auxiliary_key": None, "auxiliary_value": None}),
        ("auxiliary_value", near, {"auxiliary_value": None}),
        ("auxiliary_value", near, {"auxiliary_value": near.aux_v[:, :, :2]}),
        ("selected_indices", main, {"selected_indices": main.indices[:3]}),
        ("selected_counts", main, {"selected_counts": main.counts.reshape(2, 2)}),
        ("seqlens_k", main, {"seqlens_k": ints(1)}),
        ("committed_length", main, {"committed_length": ints(1, 2, 3)}),
        ("position_ids", main, {"position_ids": ints([1, 2], [3, 4])}),
        ("cos_cache", main, {"do_rotary": 1}),
        ("head_sink", main, {"head_sink": np.zeros(3, np.float32)}),
        ("k_norm_weight", main, {"q_norm_weight": np.zeros(H, np.float32)}),
        ("out", main, {"out": np.zeros((2, 2, 3), np.float32)}),
        ("out", main, {"out": (None, np.zeros((2, G, 12, H), np.float32))}),
    ]  # fmt: skip
    for name, case, change in wrong:
        arguments = case.arguments() | change
        with pytest.raises(InvalidArgument, match=name):
            ops.dynamic_sparse_attention(**arguments)
        assert case.past is not None
        for cache, before in zip(("past_key", "past_value"), case.past, strict=True):
            assert cache in change or arguments[cache].tobytes() == before.tobytes(), name
    with pytest.raises(TypeError, match="seqlens_k"):
        ops.dynamic_sparse_attention(**{n: v for n, v in main.arguments().items() if n != "seqlens_k"})
