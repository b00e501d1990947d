"""Float64 definitions of the operators, by plain loops, independent of the library."""

from __future__ import annotations

import ml_dtypes
import numpy as np

BF16 = np.dtype(ml_dtypes.bfloat16)
FP8 = np.dtype(ml_dtypes.float8_e4m3fn)


def encode(values: np.ndarray, scale: np.ndarray, kind: str) -> np.ndarray:
    """Codes of a quantised cache: x / scale in f32, clamped, rounded half to even."""
    quotient = np.where(scale == 0, 0, values.astype(np.float32) / np.where(scale == 0, 1, scale).astype(np.float32))
    if kind == "int8":
        return np.rint(np.clip(quotient, -128, 127)).astype(np.int8)
    if kind == "fp8":
        return np.clip(quotient, -448, 448).astype(FP8)
    codes = (np.rint(np.clip(quotient, -8, 7)).astype(np.int32) + 8).astype(np.uint8)
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def decode(codes: np.ndarray, scale: np.ndarray, kind: str) -> np.ndarray:
    if kind == "int4":
        whole = np.empty((*codes.shape[:-1], codes.shape[-1] * 2))
        whole[..., 0::2] = (codes & 15).astype(np.float64) - 8
        whole[..., 1::2] = (codes >> 4).astype(np.float64) - 8
        return whole * scale
    return codes.astype(np.float64) * scale


def paged_attention(
    q: np.ndarray,
    k_cache: np.ndarray,
    v_cache: np.ndarray,
    cu: np.ndarray,
    past: np.ndarray,
    table: np.ndarray,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    window: int = -1,
    causal: bool = True,
    sink: np.ndarray | None = None,
) -> np.ndarray:
    """q [tokens, N, H]; caches [P, S, Nk, H] in float64 after the append; -> [tokens, N * H]."""
    num_tokens, num_heads, head_size = q.shape
    page_size, group = k_cache.shape[1], num_heads // k_cache.shape[2]
    scale = scale if scale else 1 / np.sqrt(head_size)
    result = np.zeros((num_tokens, num_heads, head_size))
    for b in range(len(past)):
        total = past[b] + cu[b + 1] - cu[b]
        for t in range(cu[b], cu[b + 1]):
            position = past[b] + t - cu[b]
            last = position if causal else total - 1
            first = max(0, position - window + 1) if window > 0 else 0
            p = np.arange(first, last + 1)
            p = p[table[b, p // page_size] >= 0]
            rows = (table[b, p // page_size], p % page_size)
            k, v = (np.repeat(cache[rows], group, axis=1) for cache in (k_cache, v_cache))  # [keys, N, H]
            x = scale * np.einsum("nh,knh->nk", q[t].astype(np.float64), k)
            x = softcap * np.tanh(x / softcap) if softcap > 0 else x
            extra = np.full((num_heads, 1), -np.inf) if sink is None else sink.astype(np.float64)[:, None]
            top = np.concatenate([x, extra], axis=1).max(axis=1, keepdims=True)
            weights = np.exp(x - top)
            if len(p) > 0:
                result[t] = np.einsum("nk,knh->nh", weights / (weights.sum(1, keepdims=True) + np.exp(extra - top)), v)
    return result.reshape(num_tokens, num_heads * head_size)
