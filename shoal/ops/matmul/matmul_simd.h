// The few vector operations of the matmul kernels, one struct an instruction set: `group` lanes, one output a lane.
//
// Included only by matmul_cpu.cpp; everything is inside its namespace.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(SHOAL_ISA_AVX2) || defined(SHOAL_ISA_AVX512)
#include <immintrin.h>
#endif

#include "shoal/base/float_bits.h"
#include "shoal/ops/matmul/matmul_layout.h"

#define SHOAL_INLINE [[gnu::always_inline]] static inline

namespace shoal::SHOAL_ISA {
namespace {

#if defined(SHOAL_ISA_AVX512)

constexpr int kGroup = 16;
using F = __m512;
SHOAL_INLINE F zero() { return _mm512_setzero_ps(); }
SHOAL_INLINE F load(const float* p) { return _mm512_loadu_ps(p); }
SHOAL_INLINE F load_f16(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
SHOAL_INLINE F load_bf16(const uint16_t* p) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
SHOAL_INLINE F broadcast(float value) { return _mm512_set1_ps(value); }
SHOAL_INLINE F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
SHOAL_INLINE F add(F a, F b) { return _mm512_add_ps(a, b); }
SHOAL_INLINE void store(float* p, F v) { _mm512_storeu_ps(p, v); }

using I = __m512i;
SHOAL_INLINE I load_int(const void* p) { return _mm512_loadu_si512(p); }
SHOAL_INLINE I zero_int() { return _mm512_setzero_si512(); }
SHOAL_INLINE I broadcast_i32(int32_t value) { return _mm512_set1_epi32(value); }
SHOAL_INLINE I broadcast_i8(int value) { return _mm512_set1_epi8(static_cast<char>(value)); }
SHOAL_INLINE I broadcast_16_bytes(const void* p) {
  return _mm512_broadcast_i32x4(_mm_loadu_si128(static_cast<const __m128i*>(p)));
}
SHOAL_INLINE I bit_and(I a, I b) { return _mm512_and_si512(a, b); }
SHOAL_INLINE I bit_or(I a, I b) { return _mm512_or_si512(a, b); }
SHOAL_INLINE I bit_xor(I a, I b) { return _mm512_xor_si512(a, b); }
template <int N>
SHOAL_INLINE I shift_16(I a) {  // left by N bits, right if N is negative; 16-bit lanes
  return N >= 0 ? _mm512_slli_epi16(a, N >= 0 ? N : 0) : _mm512_srli_epi16(a, N < 0 ? -N : 0);
}
template <int N>
SHOAL_INLINE I shift_32(I a) {
  return N >= 0 ? _mm512_slli_epi32(a, N >= 0 ? N : 0) : _mm512_srli_epi32(a, N < 0 ? -N : 0);
}
SHOAL_INLINE I shuffle_bytes(I table, I indices) { return _mm512_shuffle_epi8(table, indices); }
SHOAL_INLINE I add_32(I a, I b) { return _mm512_add_epi32(a, b); }
SHOAL_INLINE I sub_32(I a, I b) { return _mm512_sub_epi32(a, b); }
SHOAL_INLINE I madd_16(I a, I b) { return _mm512_madd_epi16(a, b); }
SHOAL_INLINE F to_float(I a) { return _mm512_cvtepi32_ps(a); }
SHOAL_INLINE I load_pairs_u8(const void* p) {  // [G][2] bytes to 16-bit lanes
  return _mm512_cvtepu8_epi16(_mm256_loadu_si256(static_cast<const __m256i*>(p)));
}
SHOAL_INLINE I load_pairs_i8(const void* p) {
  return _mm512_cvtepi8_epi16(_mm256_loadu_si256(static_cast<const __m256i*>(p)));
}
SHOAL_INLINE F mul(F a, F b) { return _mm512_mul_ps(a, b); }
SHOAL_INLINE F neg_fma(F a, F b, F c) { return _mm512_fnmadd_ps(a, b, c); }  // c - a b

#elif defined(SHOAL_ISA_AVX2)

constexpr int kGroup = 8;
using F = __m256;
SHOAL_INLINE F zero() { return _mm256_setzero_ps(); }
SHOAL_INLINE F load(const float* p) { return _mm256_loadu_ps(p); }
SHOAL_INLINE F load_f16(const uint16_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
SHOAL_INLINE F load_bf16(const uint16_t* p) {
  const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
SHOAL_INLINE F broadcast(float value) { return _mm256_set1_ps(value); }
SHOAL_INLINE F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
SHOAL_INLINE F add(F a, F b) { return _mm256_add_ps(a, b); }
SHOAL_INLINE void store(float* p, F v) { _mm256_storeu_ps(p, v); }

using I = __m256i;
SHOAL_INLINE I load_int(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
SHOAL_INLINE I zero_int() { return _mm256_setzero_si256(); }
SHOAL_INLINE I broadcast_i32(int32_t value) { return _mm256_set1_epi32(value); }
SHOAL_INLINE I broadcast_i8(int value) { return _mm256_set1_epi8(static_cast<char>(value)); }
SHOAL_INLINE I broadcast_16_bytes(const void* p) {
  return _mm256_broadcastsi128_si256(_mm_loadu_si128(static_cast<const __m128i*>(p)));
}
SHOAL_INLINE I bit_and(I a, I b) { return _mm256_and_si256(a, b); }
SHOAL_INLINE I bit_or(I a, I b) { return _mm256_or_si256(a, b); }
SHOAL_INLINE I bit_xor(I a, I b) { return _mm256_xor_si256(a, b); }
template <int N>
SHOAL_INLINE I shift_16(I a) {  // left by N bits, right if N is negative; 16-bit lanes
  return N >= 0 ? _mm256_slli_epi16(a, N >= 0 ? N : 0) : _mm256_srli_epi16(a, N < 0 ? -N : 0);
}
template <int N>
SHOAL_INLINE I shift_32(I a) {
  return N >= 0 ? _mm256_slli_epi32(a, N >= 0 ? N : 0) : _mm256_srli_epi32(a, N < 0 ? -N : 0);
}
SHOAL_INLINE I shuffle_bytes(I table, I indices) { return _mm256_shuffle_epi8(table, indices); }
SHOAL_INLINE I add_32(I a, I b) { return _mm256_add_epi32(a, b); }
SHOAL_INLINE I sub_32(I a, I b) { return _mm256_sub_epi32(a, b); }
SHOAL_INLINE I madd_16(I a, I b) { return _mm256_madd_epi16(a, b); }
SHOAL_INLINE F to_float(I a) { return _mm256_cvtepi32_ps(a); }
SHOAL_INLINE I load_pairs_u8(const void* p) {  // [G][2] bytes to 16-bit lanes
  return _mm256_cvtepu8_epi16(_mm_loadu_si128(static_cast<const __m128i*>(p)));
}
SHOAL_INLINE I load_pairs_i8(const void* p) {
  return _mm256_cvtepi8_epi16(_mm_loadu_si128(static_cast<const __m128i*>(p)));
}
SHOAL_INLINE F mul(F a, F b) { return _mm256_mul_ps(a, b); }
SHOAL_INLINE F neg_fma(F a, F b, F c) { return _mm256_fnmadd_ps(a, b, c); }  // c - a b

#else

constexpr int kGroup = 8;
struct F {
  float lane[kGroup];
};
SHOAL_INLINE F zero() { return {}; }
SHOAL_INLINE F load(const float* p) {
  F v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
SHOAL_INLINE F load_f16(const uint16_t* p) {
  F v;
  for (int i = 0; i < kGroup; ++i) {
    v.lane[i] = f16_to_f32(p[i]);
  }
  return v;
}
SHOAL_INLINE F load_bf16(const uint16_t* p) {
  F v;
  for (int i = 0; i < kGroup; ++i) {
    v.lane[i] = bf16_to_f32(p[i]);
  }
  return v;
}
SHOAL_INLINE F broadcast(float value) {
  F v;
  for (float& lane : v.lane) {
    lane = value;
  }
  return v;
}
SHOAL_INLINE F fma(const F& a, const F& b, const F& c) {
  F v;
  for (int i = 0; i < kGroup; ++i) {
    v.lane[i] = __builtin_fmaf(a.lane[i], b.lane[i], c.lane[i]);
  }
  return v;
}
SHOAL_INLINE F add(const F& a, const F& b) {
  F v;
  for (int i = 0; i < kGroup; ++i) {
    v.lane[i] = a.lane[i] + b.lane[i];
  }
  return v;
}
SHOAL_INLINE void store(float* p, const F& v) { std::memcpy(p, &v, sizeof v); }

#endif

// What is left of a tile's outputs after padding; `n` is the part's size.
SHOAL_INLINE int64_t lanes_of(int64_t n, int64_t group_idx) {
  const int64_t left = n - group_idx * kGroup;
  return left < kGroup ? left : kGroup;
}

SHOAL_INLINE void copy_lanes(float* to, const float* from, int64_t lanes) {
  for (int64_t i = 0; i < lanes; ++i) {
    to[i] = from[i];
  }
}

// Stores one row of a group's sums, with the bias, at its place in `out`.
SHOAL_INLINE void store_outputs(const MatmulPart& part, const MatmulRows& rows, int64_t row_idx, int64_t group_idx,
                                const F& sums) {
  const int64_t column = part.out_begin + group_idx * kGroup;
  const int64_t lanes = lanes_of(part.n, group_idx);
  float* out = rows.out + row_idx * rows.out_stride + column;
  if (lanes == kGroup) {
    store(out, rows.bias != nullptr ? add(sums, load(rows.bias + column)) : sums);
    return;
  }
  float values[kGroup];
  store(values, sums);
  for (int64_t i = 0; i < lanes; ++i) {
    out[i] = rows.bias != nullptr ? values[i] + rows.bias[column + i] : values[i];
  }
}

// A number as a type, and f(Number<0>) ... f(Number<N - 1>): loops whose counter ends up in an immediate operand.
template <int N>
struct Number {
  static constexpr int value = N;
};
template <int N, int Begin = 0, class Body>
[[gnu::always_inline]] inline void unroll(const Body& body) {
  if constexpr (Begin < N) {
    body(Number<Begin>{});
    unroll<N, Begin + 1>(body);
  }
}

}  // namespace
}  // namespace shoal::SHOAL_ISA
