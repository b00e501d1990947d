// One vector of f32 per instruction set, for sources that are compiled once per set (`<op>_cpu.cpp`, see isa.h).
//
//   Floats   16 lanes with AVX-512, 8 with AVX2, 8 of a plain array otherwise; kLanes says how many
//   f16, bf16   storage types: load and store convert, rounding to nearest even
//
// Everything is force-inlined and lives in the namespace of the set, so that no code of one set is ever linked into
// another. Include it only in such sources. Sums run in one fixed order: sum(a) depends on the lanes of `a` alone.
// Between sets results may differ in the last bits (lanes, fused operations), within a set never.
#pragma once

#if !defined(SHOAL_ISA)
#error "simd.h belongs to sources that are compiled per instruction set"
#endif

#include <cstdint>

#if defined(SHOAL_ISA_AVX2) || defined(SHOAL_ISA_AVX512)
#include <immintrin.h>
#else
#include <cmath>

#include "shoal/base/float_bits.h"
#endif

#define SHOAL_INLINE [[gnu::always_inline]] inline

namespace shoal::SHOAL_ISA {

struct f16 {
  uint16_t bits;
};
struct bf16 {
  uint16_t bits;
};

#if defined(SHOAL_ISA_AVX512)

constexpr int kLanes = 16;
struct Floats {
  __m512 v;
};

SHOAL_INLINE __mmask16 first_lanes(int64_t n) { return static_cast<__mmask16>((1u << static_cast<unsigned>(n)) - 1u); }
SHOAL_INLINE Floats widen_bf16(__m256i halves) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16))};
}
// Not _mm512_cvtneps_pbh: it flushes subnormal numbers.
SHOAL_INLINE __m256i narrow_bf16(Floats a) {
  const __m512i bits = _mm512_castps_si512(a.v);
  const __m512i high = _mm512_srli_epi32(bits, 16);
  const __m512i lowest = _mm512_and_si512(high, _mm512_set1_epi32(1));
  const __m512i rounded =
      _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(_mm512_set1_epi32(0x7fff), lowest)), 16);
  const __mmask16 is_nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
  return _mm512_cvtepi32_epi16(_mm512_mask_or_epi32(rounded, is_nan, high, _mm512_set1_epi32(0x40)));
}
SHOAL_INLINE __m256i narrow_f16(Floats a) { return _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT); }

SHOAL_INLINE Floats splat(float a) { return {_mm512_set1_ps(a)}; }
SHOAL_INLINE Floats load(const float* p) { return {_mm512_loadu_ps(p)}; }
SHOAL_INLINE Floats load(const f16* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
SHOAL_INLINE Floats load(const bf16* p) { return widen_bf16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
// The first n lanes (0 < n < kLanes) from memory, the others 0; nothing beyond them is read.
SHOAL_INLINE Floats load_partial(const float* p, int64_t n) { return {_mm512_maskz_loadu_ps(first_lanes(n), p)}; }
SHOAL_INLINE Floats load_partial(const f16* p, int64_t n) {
  return {_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first_lanes(n), p))};
}
SHOAL_INLINE Floats load_partial(const bf16* p, int64_t n) {
  return widen_bf16(_mm256_maskz_loadu_epi16(first_lanes(n), p));
}
SHOAL_INLINE void store(float* p, Floats a) { _mm512_storeu_ps(p, a.v); }
SHOAL_INLINE void store(f16* p, Floats a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow_f16(a)); }
SHOAL_INLINE void store(bf16* p, Floats a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow_bf16(a)); }
SHOAL_INLINE void store_partial(float* p, Floats a, int64_t n) { _mm512_mask_storeu_ps(p, first_lanes(n), a.v); }
SHOAL_INLINE void store_partial(f16* p, Floats a, int64_t n) {
  _mm256_mask_storeu_epi16(p, first_lanes(n), narrow_f16(a));
}
SHOAL_INLINE void store_partial(bf16* p, Floats a, int64_t n) {
  _mm256_mask_storeu_epi16(p, first_lanes(n), narrow_bf16(a));
}

SHOAL_INLINE Floats operator+(Floats a, Floats b) { return {_mm512_add_ps(a.v, b.v)}; }
SHOAL_INLINE Floats operator-(Floats a, Floats b) { return {_mm512_sub_ps(a.v, b.v)}; }
SHOAL_INLINE Floats operator*(Floats a, Floats b) { return {_mm512_mul_ps(a.v, b.v)}; }
SHOAL_INLINE Floats operator/(Floats a, Floats b) { return {_mm512_div_ps(a.v, b.v)}; }
SHOAL_INLINE Floats fma(Floats a, Floats b, Floats c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
SHOAL_INLINE Floats max(Floats a, Floats b) { return {_mm512_max_ps(a.v, b.v)}; }
SHOAL_INLINE Floats min(Floats a, Floats b) { return {_mm512_min_ps(a.v, b.v)}; }
SHOAL_INLINE Floats abs(Floats a) { return {_mm512_abs_ps(a.v)}; }
SHOAL_INLINE Floats if_less(Floats a, Floats b, Floats then, Floats other) {
  return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), other.v, then.v)};
}
SHOAL_INLINE Floats copy_sign(Floats magnitude, Floats sign) {
  const __m512 mask = _mm512_set1_ps(-0.0f);
  return {_mm512_or_ps(_mm512_andnot_ps(mask, magnitude.v), _mm512_and_ps(mask, sign.v))};
}
SHOAL_INLINE Floats swap_pairs(Floats a) { return {_mm512_permute_ps(a.v, 0xb1)}; }
SHOAL_INLINE Floats round(Floats a) {
  return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
// a * 2^n for integral n in [-252, 252].
SHOAL_INLINE Floats scale_by_power(Floats a, Floats n) { return {_mm512_scalef_ps(a.v, n.v)}; }

SHOAL_INLINE __m256 half(Floats a, int upper) {
  return upper ? _mm512_extractf32x8_ps(a.v, 1) : _mm512_castps512_ps256(a.v);
}
SHOAL_INLINE float sum8(__m256 a) {
  __m128 r = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  r = _mm_add_ps(r, _mm_movehl_ps(r, r));
  return _mm_cvtss_f32(_mm_add_ss(r, _mm_movehdup_ps(r)));
}
SHOAL_INLINE float max8(__m256 a) {
  __m128 r = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  r = _mm_max_ps(r, _mm_movehl_ps(r, r));
  return _mm_cvtss_f32(_mm_max_ss(r, _mm_movehdup_ps(r)));
}
SHOAL_INLINE float sum(Floats a) { return sum8(_mm256_add_ps(half(a, 0), half(a, 1))); }
SHOAL_INLINE float largest(Floats a) { return max8(_mm256_max_ps(half(a, 0), half(a, 1))); }

#elif defined(SHOAL_ISA_AVX2)

constexpr int kLanes = 8;
struct Floats {
  __m256 v;
};

SHOAL_INLINE __m256i first_lanes(int64_t n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(n)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
SHOAL_INLINE Floats widen_bf16(__m128i halves) {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16))};
}
SHOAL_INLINE __m128i narrow_bf16(Floats a) {
  const __m256i bits = _mm256_castps_si256(a.v);
  const __m256i high = _mm256_srli_epi32(bits, 16);
  const __m256i lowest = _mm256_and_si256(high, _mm256_set1_epi32(1));
  const __m256i rounded =
      _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(_mm256_set1_epi32(0x7fff), lowest)), 16);
  const __m256i quiet = _mm256_or_si256(high, _mm256_set1_epi32(0x40));
  const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(a.v, a.v, _CMP_UNORD_Q));
  const __m256i words = _mm256_blendv_epi8(rounded, quiet, is_nan);
  return _mm256_castsi256_si128(_mm256_permute4x64_epi64(_mm256_packus_epi32(words, words), 0xd8));
}
SHOAL_INLINE __m128i narrow_f16(Floats a) { return _mm256_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT); }
SHOAL_INLINE __m128i load_halves(const void* p, int64_t n) {
  alignas(16) uint16_t buffer[8] = {};
  for (int64_t i = 0; i < n; ++i) {
    buffer[i] = static_cast<const uint16_t*>(p)[i];
  }
  return _mm_load_si128(reinterpret_cast<const __m128i*>(buffer));
}
SHOAL_INLINE void store_halves(void* p, __m128i halves, int64_t n) {
  alignas(16) uint16_t buffer[8];
  _mm_store_si128(reinterpret_cast<__m128i*>(buffer), halves);
  for (int64_t i = 0; i < n; ++i) {
    static_cast<uint16_t*>(p)[i] = buffer[i];
  }
}

SHOAL_INLINE Floats splat(float a) { return {_mm256_set1_ps(a)}; }
SHOAL_INLINE Floats load(const float* p) { return {_mm256_loadu_ps(p)}; }
SHOAL_INLINE Floats load(const f16* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
SHOAL_INLINE Floats load(const bf16* p) { return widen_bf16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
// The first n lanes (0 < n < kLanes) from memory, the others 0; nothing beyond them is read.
SHOAL_INLINE Floats load_partial(const float* p, int64_t n) { return {_mm256_maskload_ps(p, first_lanes(n))}; }
SHOAL_INLINE Floats load_partial(const f16* p, int64_t n) { return {_mm256_cvtph_ps(load_halves(p, n))}; }
SHOAL_INLINE Floats load_partial(const bf16* p, int64_t n) { return widen_bf16(load_halves(p, n)); }
SHOAL_INLINE void store(float* p, Floats a) { _mm256_storeu_ps(p, a.v); }
SHOAL_INLINE void store(f16* p, Floats a) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), narrow_f16(a)); }
SHOAL_INLINE void store(bf16* p, Floats a) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), narrow_bf16(a)); }
SHOAL_INLINE void store_partial(float* p, Floats a, int64_t n) { _mm256_maskstore_ps(p, first_lanes(n), a.v); }
SHOAL_INLINE void store_partial(f16* p, Floats a, int64_t n) { store_halves(p, narrow_f16(a), n); }
SHOAL_INLINE void store_partial(bf16* p, Floats a, int64_t n) { store_halves(p, narrow_bf16(a), n); }

SHOAL_INLINE Floats operator+(Floats a, Floats b) { return {_mm256_add_ps(a.v, b.v)}; }
SHOAL_INLINE Floats operator-(Floats a, Floats b) { return {_mm256_sub_ps(a.v, b.v)}; }
SHOAL_INLINE Floats operator*(Floats a, Floats b) { return {_mm256_mul_ps(a.v, b.v)}; }
SHOAL_INLINE Floats operator/(Floats a, Floats b) { return {_mm256_div_ps(a.v, b.v)}; }
SHOAL_INLINE Floats fma(Floats a, Floats b, Floats c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
SHOAL_INLINE Floats max(Floats a, Floats b) { return {_mm256_max_ps(a.v, b.v)}; }
SHOAL_INLINE Floats min(Floats a, Floats b) { return {_mm256_min_ps(a.v, b.v)}; }
SHOAL_INLINE Floats abs(Floats a) { return {_mm256_andnot_ps(_mm256_set1_ps(-0.0f), a.v)}; }
SHOAL_INLINE Floats if_less(Floats a, Floats b, Floats then, Floats other) {
  return {_mm256_blendv_ps(other.v, then.v, _mm256_cmp_ps(a.v, b.v, _CMP_LT_OQ))};
}
SHOAL_INLINE Floats copy_sign(Floats magnitude, Floats sign) {
  const __m256 mask = _mm256_set1_ps(-0.0f);
  return {_mm256_or_ps(_mm256_andnot_ps(mask, magnitude.v), _mm256_and_ps(mask, sign.v))};
}
SHOAL_INLINE Floats swap_pairs(Floats a) { return {_mm256_permute_ps(a.v, 0xb1)}; }
SHOAL_INLINE Floats round(Floats a) { return {_mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
// a * 2^n for integral n in [-252, 252]: in two steps, since one factor may be beyond the range of f32.
SHOAL_INLINE Floats scale_by_power(Floats a, Floats n) {
  const __m256i exponent = _mm256_cvtps_epi32(n.v);
  const __m256i first = _mm256_srai_epi32(exponent, 1);
  const __m256i second = _mm256_sub_epi32(exponent, first);
  const __m256i bias = _mm256_set1_epi32(127);
  const __m256 factor = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(first, bias), 23));
  const __m256 other = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(second, bias), 23));
  return {_mm256_mul_ps(_mm256_mul_ps(a.v, factor), other)};
}

SHOAL_INLINE float sum(Floats a) {
  __m128 r = _mm_add_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  r = _mm_add_ps(r, _mm_movehl_ps(r, r));
  return _mm_cvtss_f32(_mm_add_ss(r, _mm_movehdup_ps(r)));
}
SHOAL_INLINE float largest(Floats a) {
  __m128 r = _mm_max_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  r = _mm_max_ps(r, _mm_movehl_ps(r, r));
  return _mm_cvtss_f32(_mm_max_ss(r, _mm_movehdup_ps(r)));
}

#else  // scalar

constexpr int kLanes = 8;
struct Floats {
  float v[kLanes];
};

// Applies a function lane by lane; simple enough for the compiler's vectoriser.
template <class Function>
SHOAL_INLINE Floats each_lane(Function function) {
  Floats result;
  for (int i = 0; i < kLanes; ++i) {
    result.v[i] = function(i);
  }
  return result;
}
SHOAL_INLINE float widen(float a) { return a; }
SHOAL_INLINE float widen(f16 a) { return f16_to_f32(a.bits); }
SHOAL_INLINE float widen(bf16 a) { return bf16_to_f32(a.bits); }
SHOAL_INLINE void narrow(float& to, float a) { to = a; }
SHOAL_INLINE void narrow(f16& to, float a) { to.bits = f32_to_f16(a); }
SHOAL_INLINE void narrow(bf16& to, float a) { to.bits = f32_to_bf16(a); }

SHOAL_INLINE Floats splat(float a) {
  return each_lane([&](int) { return a; });
}
template <class T>
SHOAL_INLINE Floats load(const T* p) {
  return each_lane([&](int i) { return widen(p[i]); });
}
// The first n lanes (0 < n < kLanes) from memory, the others 0; nothing beyond them is read.
template <class T>
SHOAL_INLINE Floats load_partial(const T* p, int64_t n) {
  return each_lane([&](int i) { return i < n ? widen(p[i]) : 0.0f; });
}
template <class T>
SHOAL_INLINE void store(T* p, const Floats& a) {
  for (int i = 0; i < kLanes; ++i) {
    narrow(p[i], a.v[i]);
  }
}
template <class T>
SHOAL_INLINE void store_partial(T* p, const Floats& a, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    narrow(p[i], a.v[i]);
  }
}

SHOAL_INLINE Floats operator+(const Floats& a, const Floats& b) {
  return each_lane([&](int i) { return a.v[i] + b.v[i]; });
}
SHOAL_INLINE Floats operator-(const Floats& a, const Floats& b) {
  return each_lane([&](int i) { return a.v[i] - b.v[i]; });
}
SHOAL_INLINE Floats operator*(const Floats& a, const Floats& b) {
  return each_lane([&](int i) { return a.v[i] * b.v[i]; });
}
SHOAL_INLINE Floats operator/(const Floats& a, const Floats& b) {
  return each_lane([&](int i) { return a.v[i] / b.v[i]; });
}
// Fused only where the processor has it: the library's emulation is tens of times slower.
SHOAL_INLINE Floats fma(const Floats& a, const Floats& b, const Floats& c) {
#if defined(__FP_FAST_FMAF)
  return each_lane([&](int i) { return std::fma(a.v[i], b.v[i], c.v[i]); });
#else
  return each_lane([&](int i) { return a.v[i] * b.v[i] + c.v[i]; });
#endif
}
// As the x86 instructions: b where either is NaN.
SHOAL_INLINE Floats max(const Floats& a, const Floats& b) {
  return each_lane([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
}
SHOAL_INLINE Floats min(const Floats& a, const Floats& b) {
  return each_lane([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; });
}
SHOAL_INLINE Floats abs(const Floats& a) {
  return each_lane([&](int i) { return std::fabs(a.v[i]); });
}
SHOAL_INLINE Floats if_less(const Floats& a, const Floats& b, const Floats& then, const Floats& other) {
  return each_lane([&](int i) { return a.v[i] < b.v[i] ? then.v[i] : other.v[i]; });
}
SHOAL_INLINE Floats copy_sign(const Floats& magnitude, const Floats& sign) {
  return each_lane([&](int i) { return std::copysign(magnitude.v[i], sign.v[i]); });
}
SHOAL_INLINE Floats swap_pairs(const Floats& a) {
  return each_lane([&](int i) { return a.v[i ^ 1]; });
}
SHOAL_INLINE float sum(const Floats& a) {
  float r[4];
  for (int i = 0; i < 4; ++i) {
    r[i] = a.v[i] + a.v[i + 4];
  }
  return (r[0] + r[2]) + (r[1] + r[3]);
}
SHOAL_INLINE float largest(const Floats& a) {
  float r = a.v[0];
  for (int i = 1; i < kLanes; ++i) {
    r = r > a.v[i] ? r : a.v[i];
  }
  return r;
}
SHOAL_INLINE Floats exp(const Floats& a) {
  return each_lane([&](int i) { return std::exp(a.v[i]); });
}
SHOAL_INLINE Floats tanh(const Floats& a) {
  return each_lane([&](int i) { return std::tanh(a.v[i]); });
}

#endif

#if defined(SHOAL_ISA_AVX2) || defined(SHOAL_ISA_AVX512)

// Within 1.5 ulp (simd_test.cpp runs through every exponent); 0 for -inf, +inf beyond 88.72, NaN for NaN.
SHOAL_INLINE Floats exp(Floats x) {
  x = min(splat(89.0f), max(splat(-104.0f), x));  // in this order of operands NaN passes
  const Floats n = round(x * splat(0x1.715476p+0f));
  // ln 2 as a sum of two floats; minimax polynomials for |r| <= ln(2) / 2 and, below, for |x| <= 0.625.
  const Floats r = fma(n, splat(0x1.05c610p-29f), fma(n, splat(-0x1.62e430p-1f), x));
  Floats p = splat(1.381445909e-03f);
  p = fma(p, r, splat(8.368780836e-03f));
  p = fma(p, r, splat(4.166839272e-02f));
  p = fma(p, r, splat(1.666651964e-01f));
  p = fma(p, r, splat(4.999999404e-01f));
  p = fma(p * r, r, r) + splat(1.0f);
  return scale_by_power(p, n);
}

// Within 3 ulp: an odd polynomial near 0, where 1 - 2 / (e^2x + 1) would cancel.
SHOAL_INLINE Floats tanh(Floats x) {
  const Floats magnitude = abs(x);
  const Floats square = x * x;
  Floats p = splat(-5.702577531e-03f);
  p = fma(p, square, splat(2.063701302e-02f));
  p = fma(p, square, splat(-5.373910442e-02f));
  p = fma(p, square, splat(1.333143562e-01f));
  p = fma(p, square, splat(-3.333328068e-01f));
  const Floats near = fma(p * square, x, x);
  const Floats far = splat(1.0f) - splat(2.0f) / (exp(magnitude + magnitude) + splat(1.0f));
  return if_less(magnitude, splat(0.625f), near, copy_sign(far, x));
}

#endif

SHOAL_INLINE Floats zero() { return splat(0.0f); }

SHOAL_INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// The first n lanes from and to memory of any stride.
template <class T>
SHOAL_INLINE Floats load_lanes(const T* p, int64_t stride, int64_t n) {
  if (stride == 1) {
    return n == kLanes ? load(p) : load_partial(p, n);
  }
  T lanes[kLanes] = {};
  for (int64_t i = 0; i < n; ++i) {
    lanes[i] = p[i * stride];
  }
  return load(lanes);
}

template <class T>
SHOAL_INLINE void store_lanes(T* p, int64_t stride, int64_t n, const Floats& a) {
  if (stride == 1) {
    if (n == kLanes) {
      store(p, a);
    } else {
      store_partial(p, a, n);
    }
    return;
  }
  T lanes[kLanes];
  store(lanes, a);
  for (int64_t i = 0; i < n; ++i) {
    p[i * stride] = lanes[i];
  }
}

}  // namespace shoal::SHOAL_ISA
