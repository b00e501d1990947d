// The inner loops of the fast path: dot products, softmax and weighted sums of one tile of keys. Compiled per
// instruction set.
//
// What a reader would get wrong: the arithmetic of a row must not depend on how many rows are done together. A dot
// product is kept in one vector of lanes over the channels and summed by one fixed tree; a weighted sum runs over the
// keys in ascending order; both are the same for every number of rows. Masked keys have weight 0, which adds nothing.
#pragma once

#include <bit>

#include "shoal/ops/paged_attention/paged_attention_plan.h"
#include "shoal/ops/paged_attention/paged_attention_rows.h"

namespace shoal::paged::SHOAL_ISA {

// Rows whose accumulators fit the registers: 4 vectors a row, one vector of K or V, a broadcast for each row.
#if defined(SHOAL_ISA_AVX512)
constexpr int kRowTile = 6;
#elif defined(SHOAL_ISA_AVX2)
constexpr int kRowTile = 3;
#else
constexpr int kRowTile = 1;
#endif
constexpr int kVectors = static_cast<int>(kTile) / kLanes;

// One more storage type for load(): codes of int8.
struct i8 {
  int8_t code;
};
#if defined(SHOAL_ISA_AVX512)
SHOAL_INLINE Floats load(const i8* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
#elif defined(SHOAL_ISA_AVX2)
SHOAL_INLINE Floats load(const i8* p) { return {load8_i8(reinterpret_cast<const std::byte*>(p))}; }
#else
SHOAL_INLINE Floats load(const i8* p) {
  return each_lane([&](int i) { return static_cast<float>(p[i].code); });
}
#endif
using ::shoal::SHOAL_ISA::load;

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

// Sums of the lanes of four vectors.
SHOAL_INLINE void store_sums(const Floats* a, float* out) {
#if defined(SHOAL_ISA_AVX512)
  const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a[0].v, a[1].v), _mm512_unpackhi_ps(a[0].v, a[1].v));
  const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(a[2].v, a[3].v), _mm512_unpackhi_ps(a[2].v, a[3].v));
  const __m512d lo = _mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
  const __m512d hi = _mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
  const Floats quads = {_mm512_add_ps(_mm512_castpd_ps(lo), _mm512_castpd_ps(hi))};
  const __m256 s = _mm256_add_ps(half(quads, 0), half(quads, 1));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1)));
#elif defined(SHOAL_ISA_AVX2)
  const __m256 ab = _mm256_add_ps(_mm256_unpacklo_ps(a[0].v, a[1].v), _mm256_unpackhi_ps(a[0].v, a[1].v));
  const __m256 cd = _mm256_add_ps(_mm256_unpacklo_ps(a[2].v, a[3].v), _mm256_unpackhi_ps(a[2].v, a[3].v));
  const __m256d lo = _mm256_unpacklo_pd(_mm256_castps_pd(ab), _mm256_castps_pd(cd));
  const __m256d hi = _mm256_unpackhi_pd(_mm256_castps_pd(ab), _mm256_castps_pd(cd));
  const __m256 s = _mm256_add_ps(_mm256_castpd_ps(lo), _mm256_castpd_ps(hi));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1)));
#else
  for (int i = 0; i < 4; ++i) {
    out[i] = sum(a[i]);
  }
#endif
}

// Dot products of kRows queries with keys [begin, end), both multiples of 4, into `scores` [kRows, kTile].
template <int kRows, class T>
SHOAL_INLINE void score_rows(const float* query, int64_t stride, const void* const* keys, int64_t begin, int64_t end,
                             float* scores) {
  for (int64_t j = begin; j < end; j += 4) {
    const T* k0 = static_cast<const T*>(keys[j]);
    const T* k1 = static_cast<const T*>(keys[j + 1]);
    const T* k2 = static_cast<const T*>(keys[j + 2]);
    const T* k3 = static_cast<const T*>(keys[j + 3]);
    Floats acc[kRows][4];
    for (int r = 0; r < kRows; ++r) {
      for (int i = 0; i < 4; ++i) {
        acc[r][i] = zero();
      }
    }
    for (int64_t c = 0; c < stride; c += kLanes) {
      Floats q[kRows];
      for (int r = 0; r < kRows; ++r) {
        q[r] = load(query + r * stride + c);
      }
      const auto add = [&](const T* k, int i) __attribute__((always_inline)) {
        const Floats key = load(k + c);
        for (int r = 0; r < kRows; ++r) {
          acc[r][i] = fma(q[r], key, acc[r][i]);
        }
      };
      add(k0, 0);
      add(k1, 1);
      add(k2, 2);
      add(k3, 3);
    }
    for (int r = 0; r < kRows; ++r) {
      store_sums(acc[r], scores + r * kTile + j);
    }
  }
}

// acc[r] = acc[r] * factor[r] + sum over keys [begin, end) of weights[r, key] * V[key], columns [column, + kColumns
// vectors).
template <int kRows, int kColumns, class T>
SHOAL_INLINE void add_columns(const float* weights, const float* factors, const void* const* values, int64_t begin,
                              int64_t end, int64_t column, int64_t stride, float* acc) {
  Floats sums[kRows][kColumns];
  for (int r = 0; r < kRows; ++r) {
    const Floats factor = splat(factors[r]);
    for (int i = 0; i < kColumns; ++i) {
      sums[r][i] = load(acc + r * stride + column + i * kLanes) * factor;
    }
  }
  for (int64_t j = begin; j < end; ++j) {
    const T* v = static_cast<const T*>(values[j]) + column;
    Floats weight[kRows];
    for (int r = 0; r < kRows; ++r) {
      weight[r] = splat(weights[r * kTile + j]);
    }
    for (int i = 0; i < kColumns; ++i) {
      const Floats value = load(v + i * kLanes);
      for (int r = 0; r < kRows; ++r) {
        sums[r][i] = fma(weight[r], value, sums[r][i]);
      }
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int i = 0; i < kColumns; ++i) {
      store(acc + r * stride + column + i * kLanes, sums[r][i]);
    }
  }
}

template <int kRows, class T>
SHOAL_INLINE void add_rows(const float* weights, const float* factors, const void* const* values, int64_t begin,
                           int64_t end, int64_t stride, float* acc) {
  int64_t column = 0;
  for (; column + 4 * kLanes <= stride; column += 4 * kLanes) {
    add_columns<kRows, 4, T>(weights, factors, values, begin, end, column, stride, acc);
  }
  for (; column < stride; column += kLanes) {
    add_columns<kRows, 1, T>(weights, factors, values, begin, end, column, stride, acc);
  }
}

// Calls body with the number of rows as a constant: `count` of them, in tiles that differ by one row at most.
template <class Body>
SHOAL_INLINE void for_row_tiles(int64_t count, Body body) {
  int64_t num_tiles = (count + kRowTile - 1) / kRowTile;
  for (int64_t r = 0; r < count; --num_tiles) {
    const int64_t rows = (count - r + num_tiles - 1) / num_tiles;
    body(r, rows);
    r += rows;
  }
}

template <class T>
inline void scores_of(const float* query, int64_t num_rows, int64_t stride, const void* const* keys, int64_t begin,
                      int64_t end, float* scores) {
  for_row_tiles(
      num_rows, [&](int64_t r, int64_t rows) __attribute__((always_inline)) {
        const float* q = query + r * stride;
        float* s = scores + r * kTile;
        switch (rows) {
#if defined(SHOAL_ISA_AVX512)
          case 6: return score_rows<6, T>(q, stride, keys, begin, end, s);
          case 5: return score_rows<5, T>(q, stride, keys, begin, end, s);
          case 4: return score_rows<4, T>(q, stride, keys, begin, end, s);
#endif
#if defined(SHOAL_ISA_AVX512) || defined(SHOAL_ISA_AVX2)
          case 3: return score_rows<3, T>(q, stride, keys, begin, end, s);
          case 2: return score_rows<2, T>(q, stride, keys, begin, end, s);
#endif
          default: return score_rows<1, T>(q, stride, keys, begin, end, s);
        }
      });
}

template <class T>
inline void add_values(const float* weights, const float* factors, int64_t num_rows, const void* const* values,
                       int64_t begin, int64_t end, int64_t stride, float* acc) {
  for_row_tiles(
      num_rows, [&](int64_t r, int64_t rows) __attribute__((always_inline)) {
        const float* w = weights + r * kTile;
        const float* f = factors + r;
        float* a = acc + r * stride;
        switch (rows) {
#if defined(SHOAL_ISA_AVX512)
          case 6: return add_rows<6, T>(w, f, values, begin, end, stride, a);
          case 5: return add_rows<5, T>(w, f, values, begin, end, stride, a);
          case 4: return add_rows<4, T>(w, f, values, begin, end, stride, a);
#endif
#if defined(SHOAL_ISA_AVX512) || defined(SHOAL_ISA_AVX2)
          case 3: return add_rows<3, T>(w, f, values, begin, end, stride, a);
          case 2: return add_rows<2, T>(w, f, values, begin, end, stride, a);
#endif
          default: return add_rows<1, T>(w, f, values, begin, end, stride, a);
        }
      });
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
inline bool has_non_finite(const void* const* values, int64_t begin, int64_t end, int64_t stride) {
  const Floats infinity = splat(__builtin_inff());
  Floats found = zero();
  for (int64_t j = begin; j < end; ++j) {
    const float* v = static_cast<const float*>(values[j]);
    for (int64_t c = 0; c < stride; c += kLanes) {
      found = max(found, if_less(abs(load(v + c)), infinity, zero(), splat(1.0f)));
    }
  }
  return largest(found) > 0.0f;
}

}  // namespace shoal::paged::SHOAL_ISA
