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

}  // namespace
}  // namespace shoal::SHOAL_ISA
