"""shoal.ops.paged_attention against a float64 oracle."""

from __future__ import annotations

from typing import Any

import numpy as np
import ops_reference as reference
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ops_reference import BF16, FP8

from shoal import InvalidArgument, ops

TOLERANCE = {
    "float16": {"rtol": 2e-3, "atol": 2e-3},
    "bfloat16": {"rtol": 5e-3, "atol": 6e-3},
    "float32": {"rtol": 1e-4, "atol": 1e-5},
}
CACHES = {"plain": None, "int8": np.dtype(np.int8), "fp8": FP8, "int4": np.dtype(np.uint8)}
N, NK, H, S = 4, 2, 16, 16


class Case:
    """A ragged step over poisoned pages, its arguments, and its expected caches and output."""

    def __init__(
        self, past: list[int], lengths: list[int], dtype: Any = np.float16, kind: str = "plain", seed: int = 0
    ) -> None:
        rng = np.random.default_rng(seed)
        self.kind, self.dtype = kind, np.dtype(dtype)
        self.past = np.array(past, np.int32)
        self.cu = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        tokens = int(self.cu[-1])
        pages = [-(-(p + n) // S) for p, n in zip(past, lengths, strict=True)]
        order = rng.permutation(sum(pages) + 2)
        self.table = np.full((len(past), max([*pages, 1])), -1, np.int32)
        for b, count in enumerate(pages):
            self.table[b, :count] = order[sum(pages[:b]) :][:count]
        self.q, self.k, self.v = (rng.standard_normal((tokens, n, H)).astype(self.dtype) for n in (N, NK, NK))
        self.k_scale = rng.uniform(0.02, 0.3, NK * H).astype(np.float32).reshape(NK, 1, H)
        self.v_scale = np.array([0.11], np.float32)
        width = H // 2 if kind == "int4" else H
        shape = (len(order), S, NK, width)
        stored = CACHES[kind] or self.dtype
        poison = np.full(shape, 0x7F, np.uint8).view(stored) if stored.itemsize == 1 else np.full(shape, np.nan, stored)
        self.k_cache, self.v_cache = poison.copy(), poison.copy()
        for b in range(len(past)):
            for p in range(past[b]):
                slot = (self.table[b, p // S], p % S)
                self.k_cache[slot] = self.stored(rng.standard_normal((NK, H)).astype(self.dtype), self.k_scale[:, 0])
                self.v_cache[slot] = self.stored(rng.standard_normal((NK, H)).astype(self.dtype), self.v_scale)

    def stored(self, rows: np.ndarray, scale: np.ndarray) -> np.ndarray:
        return rows if self.kind == "plain" else reference.encode(rows, scale, self.kind)

    def values(self, cache: np.ndarray, scale: np.ndarray) -> np.ndarray:
        return (
            cache.astype(np.float64)
            if self.kind == "plain"
            else reference.decode(cache, scale.astype(np.float64), self.kind)
        )

    def arguments(self, packed: bool = False, **more: Any) -> dict[str, Any]:
        flat = [a.reshape(len(a), a.shape[1] * H) for a in (self.q, self.k, self.v)]
        arguments: dict[str, Any] = {
            "query": np.concatenate(flat, axis=1) if packed else flat[0],
            "key_cache": self.k_cache.copy(),
            "value_cache": self.v_cache.copy(),
            "cumulative_sequence_length": self.cu,
            "past_seqlens": self.past,
            "block_table": self.table,
            "num_heads": N,
            "kv_num_heads": NK,
        }
        if not packed:
            arguments |= {"key": flat[1], "value": flat[2]}
        if self.kind != "plain":
            arguments |= {
                "k_scale": self.k_scale,
                "v_scale": self.v_scale,
                "k_quant_type": "PER_CHANNEL",
                "v_quant_type": "PER_TENSOR",
            }
        if self.kind == "int4":
            arguments |= {"k_cache_dtype": "int4", "v_cache_dtype": "int4"}
        return arguments | more

    def expected_caches(self, slots: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        k_cache, v_cache = self.k_cache.copy(), self.v_cache.copy()
        for b in range(len(self.past)):
            for t in range(self.cu[b], self.cu[b + 1]):
                p = self.past[b] + t - self.cu[b]
                slot = self.table[b, p // S] * S + p % S if slots is None else slots[t]
                if slot >= 0:
                    k_cache[slot // S, slot % S] = self.stored(self.k[t], self.k_scale[:, 0])
                    v_cache[slot // S, slot % S] = self.stored(self.v[t], self.v_scale)
        return k_cache, v_cache

    def check(self, arguments: dict[str, Any], slots: np.ndarray | None = None, **options: Any) -> np.ndarray:
        output, k_cache, v_cache = ops.paged_attention(**arguments)
        assert k_cache is arguments["key_cache"] and v_cache is arguments["value_cache"]
        k_expected, v_expected = self.expected_caches(slots)
        assert k_cache.tobytes() == k_expected.tobytes()
        assert v_cache.tobytes() == v_expected.tobytes()
        k_values, v_values = self.values(k_cache, self.k_scale[:, 0]), self.values(v_cache, self.v_scale)
        expected = reference.paged_attention(self.q, k_values, v_values, self.cu, self.past, self.table, **options)
        assert output.dtype == self.dtype
        np.testing.assert_allclose(output.astype(np.float64), expected, **TOLERANCE[self.dtype.name])
        return output


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16])
def test_prefill_decode_and_verify_in_one_step(dtype: Any, packed: bool) -> None:
    case = Case([0, 15, 30, 5], [17, 1, 4, 0], dtype)
    case.check(case.arguments(packed))


@pytest.mark.parametrize("dtype", [np.float16, BF16])
@pytest.mark.parametrize("kind", ["int8", "fp8", "int4"])
def test_quantised_caches_hold_the_exact_bytes(kind: str, dtype: Any) -> None:
    case = Case([0, 14], [5, 4], dtype, kind)
    case.check(case.arguments())


@pytest.mark.parametrize(
    ("attributes", "options"),
    [
        ({"local_window_size": 7}, {"window": 7}),
        ({"softcap": 1.5}, {"softcap": 1.5}),
        ({"scale": 0.5}, {"scale": 0.5}),
        ({"is_causal": 0}, {"causal": False}),
    ],
)
def test_attributes(attributes: dict[str, Any], options: dict[str, Any]) -> None:
    case = Case([3, 20], [9, 2])
    case.check(case.arguments(**attributes), **options)


def test_sink() -> None:
    case = Case([3, 20], [9, 2])
    sink = np.array([0.5, -1, 2, 0], np.float16)
    case.check(case.arguments(head_sink=sink), sink=sink)


def test_slot_mapping_says_where_to_write() -> None:
    case = Case([3], [4])
    slots = np.array([case.table[0, 0] * S + 3, case.table[0, 0] * S + 4, -1, -1], np.int32)
    arguments = case.arguments(
        slot_mapping=slots, key_cache=np.nan_to_num(case.k_cache), value_cache=np.nan_to_num(case.v_cache)
    )
    case.k_cache, case.v_cache = arguments["key_cache"].copy(), arguments["value_cache"].copy()
    case.check(arguments, slots)


def test_verification_equals_decoding_bit_for_bit() -> None:
    whole = Case([10], [4])
    verified = ops.paged_attention(**(arguments := whole.arguments()))[0]
    k_cache, v_cache = whole.k_cache.copy(), whole.v_cache.copy()
    for t in range(4):
        one = arguments | {name: arguments[name][t : t + 1] for name in ("query", "key", "value")}
        one |= {"cumulative_sequence_length": np.array([0, 1], np.int32), "past_seqlens": np.array([10 + t], np.int32)}
        decoded = ops.paged_attention(**one | {"key_cache": k_cache, "value_cache": v_cache})[0]
        assert decoded.tobytes() == verified[t : t + 1].tobytes()


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from([0, 1, 14, 15, 16, 17, 31, 32, 33]), st.sampled_from([0, 1, 2, 15, 16, 17])),
        min_size=1,
        max_size=3,
    ),
    st.sampled_from(["plain", "int8", "int4", "fp8"]),
    st.integers(0, 1000),
)
def test_page_edges_with_poison_in_unread_slots(sizes: list[tuple[int, int]], kind: str, seed: int) -> None:
    case = Case([p for p, _ in sizes], [n for _, n in sizes], np.float16, kind, seed)
    case.check(case.arguments())


def test_caches_at_any_byte_and_strided_inputs() -> None:
    case = Case([0, 15], [5, 2])
    arguments = case.arguments()
    straight = ops.paged_attention(**case.arguments())[0]
    for name in ("key_cache", "value_cache"):
        cache = arguments[name]
        memory = np.empty(cache.nbytes + 1, np.uint8)
        arguments[name] = memory[1:].view(cache.dtype).reshape(cache.shape)
        arguments[name][...] = cache
    for name in ("query", "key", "value"):
        wide = np.zeros((len(case.q), 2 * arguments[name].shape[1]), np.float16)
        wide[:, ::2] = arguments[name]
        arguments[name] = wide[:, ::2]
    assert case.check(arguments).tobytes() == straight.tobytes()


def test_rejections_name_the_argument_and_write_nothing() -> None:
    case = Case([3], [2])
    good = case.arguments()
    read_only = good["key_cache"].copy()
    read_only.flags.writeable = False
    strided = np.zeros((*good["key_cache"].shape[:3], 2 * H), np.float16)[..., ::2]
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("num_heads", {"num_heads": 3}),
        ("scale", {"scale": "much"}),
        ("is_causal", {"is_causal": 2}),
        ("kv_num_heads", {"kv_num_heads": 1.0}),
        ("k_quant_type", {"k_quant_type": "PER_TENSOR"}),
        ("key_cache", {"key_cache": read_only}),
        ("key_cache", {"key_cache": strided}),
        ("key_cache", {"value_cache": good["key_cache"]}),
        ("value_cache", {"value_cache": None}),
        ("block_table", {"block_table": case.table.astype(np.int64)}),
        ("query", {"query": good["query"].astype(np.float64)}),
        ("query", {"query": [1, 2]}),
        ("attention_metadata", {"attention_metadata": "x"}),
        ("attention_metadata", {"attention_metadata": [1, 1 << 40]}),
        ("out", {"out": np.zeros((1, 1), np.float16)}),
        ("out", {"out": (None, good["key_cache"].copy())}),
        ("out", {"out": (None, None, None, None)}),
    ]
    for name, change in wrong:
        arguments = good | change
        before = [good[cache].tobytes() for cache in ("key_cache", "value_cache")]
        with pytest.raises(InvalidArgument, match=name):
            ops.paged_attention(**arguments)
        assert before == [good[cache].tobytes() for cache in ("key_cache", "value_cache")]


def test_host_metadata_never_changes_the_result() -> None:
    case = Case([3], [2])
    plain = ops.paged_attention(**case.arguments())[0]
    for metadata in ([2, 5], (2, 5, 0), np.array([2, 5], np.int32), np.array([2, 5])):
        assert ops.paged_attention(**case.arguments(attention_metadata=metadata))[0].tobytes() == plain.tobytes()
