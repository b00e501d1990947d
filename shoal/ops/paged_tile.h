// The inner loops of the fast path: dot products, softmax and weighted sums of one tile of keys. Compiled per
// instruction set.
//
// What a reader would get wrong: the arithmetic of a row must not depend on how many rows are done together, nor on
// whether the cache is read in place. Lanes are keys: a dot product is two chains over the channels (each half of
// them), a weighted sum is one chain over the keys in ascending order, and both are the same in every kernel. Masked
// keys have weight 0, which adds nothing.
#pragma once

#include <bit>

#include "shoal/ops/paged_rows.h"

namespace shoal::paged::SHOAL_ISA {

// Rows that are done together, with accumulators of four vectors each in registers. Few rows and long vectors rather
// than the reverse: on Zen a broadcast costs more than a load (6 rows x 2 vectors: 0.67 of the speed of 3 x 4).
#if defined(SHOAL_ISA_AVX512)
constexpr int kRowTile = 6;
#elif defined(SHOAL_ISA_AVX2)
constexpr int kRowTile = 3;
#else
constexpr int kRowTile = 1;
#endif
constexpr int kColumns = 4;
constexpr int kVectors = static_cast<int>(kTile) / kLanes;
constexpr int64_t kKeyStep = kColumns * kLanes;  // keys of one pass of the dot products

// 2^x for x <= 0 within 2 ulp; 0 below 2^-126, NaN for NaN.
SHOAL_INLINE Floats exp2_below(Floats x) {
  x = max(splat(-127.0f), x);
  const Floats magic = splat(0x1.8p23f);  // adding it leaves the rounded integer in the low bits
  const Floats shifted = x + magic;
  const Floats f = x - (shifted - magic);
  Floats p = splat(1.5353361588628206e-04f);
  p = fma(p, f, splat(1.3398874519175187e-03f));
  p = fma(p, f, splat(9.6184373597896610e-03f));
  p = fma(p, f, splat(5.5503324707934540e-02f));
  p = fma(p, f, splat(2.4022647913597842e-01f));
  p = fma(p, f, splat(6.9314720285527640e-01f));
  p = fma(p, f, splat(1.0f));
#if defined(SHOAL_ISA_AVX512)
  const __m512i power =
      _mm512_add_epi32(_mm512_slli_epi32(_mm512_castps_si512(shifted.v), 23), _mm512_castps_si512(splat(1.0f).v));
  return p * Floats{_mm512_castsi512_ps(power)};
#elif defined(SHOAL_ISA_AVX2)
  const __m256i power =
      _mm256_add_epi32(_mm256_slli_epi32(_mm256_castps_si256(shifted.v), 23), _mm256_castps_si256(splat(1.0f).v));
  return p * Floats{_mm256_castsi256_ps(power)};
#else
  return p * each_lane([&](int i) {
           return std::bit_cast<float>((std::bit_cast<uint32_t>(shifted.v[i]) << 23) + std::bit_cast<uint32_t>(1.0f));
         });
#endif
}

// Channels of the first of the two chains of a dot product.
SHOAL_INLINE int64_t first_half(int64_t channels) { return (channels / 2 + 7) / 8 * 8; }

// Dot products of kRows queries with the keys of a transposed tile [kTile / kKeyStep, channels, kKeyStep], keys
// [begin, end) in whole steps, into `scores` [kRows, kTile].
template <int kRows>
SHOAL_INLINE void score_rows(const float* query, int64_t stride, int64_t channels, const float* tile, int64_t begin,
                             int64_t end, float* scores) {
  for (int64_t j = begin; j < end; j += kKeyStep) {
    const float* keys = tile + j * channels;
    Floats acc[kRows][kColumns];
    const auto chain = [&](int64_t from, int64_t to) __attribute__((always_inline)) {
      for (int r = 0; r < kRows; ++r) {
        for (int i = 0; i < kColumns; ++i) {
          acc[r][i] = zero();
        }
      }
      for (int64_t c = from; c < to; ++c) {
        Floats q[kRows];
        for (int r = 0; r < kRows; ++r) {
          q[r] = splat(query[r * stride + c]);
        }
        for (int i = 0; i < kColumns; ++i) {
          const Floats k = load(keys + c * kKeyStep + i * kLanes);
          for (int r = 0; r < kRows; ++r) {
            acc[r][i] = fma(q[r], k, acc[r][i]);
          }
        }
      }
    };
    const int64_t half_channels = first_half(channels);
    chain(0, half_channels);
    for (int r = 0; r < kRows; ++r) {
      for (int i = 0; i < kColumns; ++i) {
        store(scores + r * kTile + j + i * kLanes, acc[r][i]);
      }
    }
    chain(half_channels, channels);
    for (int r = 0; r < kRows; ++r) {
      for (int i = 0; i < kColumns; ++i) {
        float* s = scores + r * kTile + j + i * kLanes;
        store(s, load(s) + acc[r][i]);
      }
    }
  }
}

// acc[r] = acc[r] * factor[r] + sum over keys [begin, end) of weights[r, key] * V[key], columns [column, + kCount
// vectors).
template <int kRows, int kCount, Store kStore>
SHOAL_INLINE void add_columns(const float* weights, const float* factors, const std::byte* const* values, int64_t begin,
                              int64_t end, int64_t column, int64_t stride, float* acc) {
  Floats sums[kRows][kCount];
  for (int r = 0; r < kRows; ++r) {
    const Floats factor = splat(factors[r]);
    for (int i = 0; i < kCount; ++i) {
      sums[r][i] = load(acc + r * stride + column + i * kLanes) * factor;
    }
  }
  for (int64_t j = begin; j < end; ++j) {
    const std::byte* v = values[j] + column * kBytesOf<kStore>;
    Floats weight[kRows];
    for (int r = 0; r < kRows; ++r) {
      weight[r] = splat(weights[r * kTile + j]);
    }
    for (int i = 0; i < kCount; ++i) {
      const Floats value = load_codes<kStore>(v + i * kLanes * kBytesOf<kStore>);
      for (int r = 0; r < kRows; ++r) {
        sums[r][i] = fma(weight[r], value, sums[r][i]);
      }
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int i = 0; i < kCount; ++i) {
      store(acc + r * stride + column + i * kLanes, sums[r][i]);
    }
  }
}

template <int kRows, Store kStore>
SHOAL_INLINE void add_rows(const float* weights, const float* factors, const std::byte* const* values, int64_t begin,
                           int64_t end, int64_t stride, float* acc) {
  int64_t column = 0;
  for (; column + kColumns * kLanes <= stride; column += kColumns * kLanes) {
    add_columns<kRows, kColumns, kStore>(weights, factors, values, begin, end, column, stride, acc);
  }
  for (; column < stride; column += kLanes) {
    add_columns<kRows, 1, kStore>(weights, factors, values, begin, end, column, stride, acc);
  }
}

// Calls body.operator()<rows>(first row) for `count` rows, in tiles that differ by one row at most.
template <class Body>
SHOAL_INLINE void for_row_tiles(int64_t count, Body body) {
  int64_t num_tiles = (count + kRowTile - 1) / kRowTile;
  for (int64_t r = 0; r < count; --num_tiles) {
    const int64_t rows = (count - r + num_tiles - 1) / num_tiles;
    switch (rows) {
#if defined(SHOAL_ISA_AVX512)
      case 6: body.template operator()<6>(r); break;
      case 5: body.template operator()<5>(r); break;
      case 4: body.template operator()<4>(r); break;
#endif
#if !defined(SHOAL_ISA_SCALAR)
      case 3: body.template operator()<3>(r); break;
      case 2: body.template operator()<2>(r); break;
#endif
      default: body.template operator()<1>(r); break;
    }
    r += rows;
  }
}

inline void scores_of_tile(const float* query, int64_t num_rows, int64_t stride, int64_t channels, const float* tile,
                           int64_t begin, int64_t end, float* scores) {
  for_row_tiles(
      num_rows, [&]<int kRows>(int64_t r) __attribute__((always_inline)) {
        score_rows<kRows>(query + r * stride, stride, channels, tile, begin, end, scores + r * kTile);
      });
}

template <Store kStore>
inline void add_values(const float* weights, const float* factors, int64_t num_rows, const std::byte* const* values,
                       int64_t begin, int64_t end, int64_t stride, float* acc) {
  for_row_tiles(
      num_rows, [&]<int kRows>(int64_t r) __attribute__((always_inline)) {
        add_rows<kRows, kStore>(weights + r * kTile, factors + r, values, begin, end, stride, acc + r * stride);
      });
}

// Calls body.operator()<store>() for the storages that the kernels read in place.
template <class Body>
SHOAL_INLINE void visit_store(Store store, Body body) {
  switch (store) {
    case Store::kF16: return body.template operator()<Store::kF16>();
    case Store::kBF16: return body.template operator()<Store::kBF16>();
    case Store::kI8: return body.template operator()<Store::kI8>();
    default: return body.template operator()<Store::kF32>();
  }
}

// How dot products become logits, in units of log 2.
struct Logits {
  float factor = 1.0f;  // without softcap: x = dot * factor
  float inner = 0.0f;   // with it: x = cap * tanh(dot * inner)
  float cap = 0.0f;     // 0: none
};

// Which keys of a tile a row admits: [begin, end) less those that are not mapped.
struct RowMask {
  int64_t begin = 0;
  int64_t end = 0;
  const float* unmapped = nullptr;  // [kTile], 1 for a key without a page; null if all have one
};

alignas(64) constexpr float kKeyIdx[kTile] = {0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15,
                                              16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31,
                                              32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43, 44, 45, 46, 47,
                                              48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 58, 59, 60, 61, 62, 63};

// Dot products of one row to softmax numerators in place. Returns their sum; `row_max` is the running maximum.
SHOAL_INLINE float weigh_row(const Logits& logits, const RowMask& mask, float* scores, float& row_max) {
  Floats x[kVectors];
  Floats tile_max = splat(kEmpty);
  const Floats masked = splat(-__builtin_inff());
  const Floats limit = splat(-kEmpty);
  for (int i = 0; i < kVectors; ++i) {
    x[i] = load(scores + i * kLanes);
    if (logits.cap > 0.0f) {
      x[i] = tanh(x[i] * splat(logits.inner)) * splat(logits.cap);
    } else {
      x[i] = min(limit, x[i] * splat(logits.factor));
    }
  }
  if (mask.begin > 0 || mask.end < kTile || mask.unmapped != nullptr) {
    const Floats begin = splat(static_cast<float>(mask.begin));
    const Floats end = splat(static_cast<float>(mask.end));
    for (int i = 0; i < kVectors; ++i) {
      const Floats key = load(kKeyIdx + i * kLanes);
      x[i] = if_less(key, end, if_less(key, begin, masked, x[i]), masked);
      if (mask.unmapped != nullptr) {
        x[i] = if_less(splat(0.5f), load(mask.unmapped + i * kLanes), masked, x[i]);
      }
    }
  }
  for (int i = 0; i < kVectors; ++i) {
    tile_max = max(x[i], tile_max);
  }
  const float largest_logit = largest(tile_max);
  row_max = largest_logit > row_max ? largest_logit : row_max;
  const Floats shift = splat(row_max);
  Floats total = zero();
  for (int i = 0; i < kVectors; ++i) {
    const Floats weight = exp2_below(x[i] - shift);
    store(scores + i * kLanes, weight);
    total = total + weight;
  }
  return sum(total);
}

// Whether a V row of [begin, end) has an infinity or a NaN.
inline bool has_non_finite(const std::byte* const* values, int64_t begin, int64_t end, int64_t stride) {
  const Floats infinity = splat(__builtin_inff());
  Floats found = zero();
  for (int64_t j = begin; j < end; ++j) {
    const auto* v = reinterpret_cast<const float*>(values[j]);
    for (int64_t c = 0; c < stride; c += kLanes) {
      found = max(found, if_less(abs(load(v + c)), infinity, zero(), splat(1.0f)));
    }
  }
  return largest(found) > 0.0f;
}

}  // namespace shoal::paged::SHOAL_ISA
