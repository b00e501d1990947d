// Rows of T and of the cache formats to and from f32, with vectors. Compiled per instruction set.
//
// Everything here works on multiples of 8 channels, which is what head_dim promises, and reads and writes nothing else.
#pragma once

#include <cstring>

#include "shoal/cpu/simd.h"
#include "shoal/ops/paged_problem.h"

namespace shoal::paged::SHOAL_ISA {

using namespace ::shoal::SHOAL_ISA;  // simd.h

#if defined(SHOAL_ISA_AVX2) || defined(SHOAL_ISA_AVX512)

SHOAL_INLINE __m128i load8_bytes(const std::byte* in) { return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(in)); }

SHOAL_INLINE __m256 load8_f32(const std::byte* in) { return _mm256_loadu_ps(reinterpret_cast<const float*>(in)); }
SHOAL_INLINE __m256 load8_f16(const std::byte* in) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(in)));
}
SHOAL_INLINE __m256 load8_bf16(const std::byte* in) {
  const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(in));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}
SHOAL_INLINE __m256 load8_i8(const std::byte* in) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(load8_bytes(in))); }
// E4M3's exponent and mantissa are those of an f16 that is 2^8 times smaller; only NaN needs care.
SHOAL_INLINE __m256 load8_f8(const std::byte* in) {
  const __m128i codes = _mm_cvtepu8_epi16(load8_bytes(in));
  const __m128i magnitude = _mm_and_si128(codes, _mm_set1_epi16(0x7f));
  const __m128i sign = _mm_slli_epi16(_mm_andnot_si128(_mm_set1_epi16(0x7f), codes), 8);
  const __m128i is_nan = _mm_and_si128(_mm_cmpeq_epi16(magnitude, _mm_set1_epi16(0x7f)), _mm_set1_epi16(0x7c00));
  const __m128i halves = _mm_or_si128(_mm_or_si128(sign, is_nan), _mm_slli_epi16(magnitude, 7));
  return _mm256_mul_ps(_mm256_cvtph_ps(halves), _mm256_set1_ps(256.0f));
}
SHOAL_INLINE __m256 load8_i4(const std::byte* in) {
  int word = 0;
  std::memcpy(&word, in, 4);
  const __m256i shifted = _mm256_srlv_epi32(_mm256_set1_epi32(word), _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28));
  const __m256i codes = _mm256_and_si256(shifted, _mm256_set1_epi32(15));
  return _mm256_cvtepi32_ps(_mm256_sub_epi32(codes, _mm256_set1_epi32(8)));
}

// Codes of `count` channels (without the scale) as f32.
inline void decode_row(Store store, const std::byte* in, int64_t count, float* out) {
  const auto each8 = [&](int64_t step_bytes, auto load8) __attribute__((always_inline)) {
    for (int64_t i = 0; i < count; i += 8, in += step_bytes) {
      _mm256_storeu_ps(out + i, load8(in));
    }
  };
  switch (store) {
    case Store::kF32: each8(32, [](const std::byte* p) { return load8_f32(p); }); break;
    case Store::kF16: each8(16, [](const std::byte* p) { return load8_f16(p); }); break;
    case Store::kBF16: each8(16, [](const std::byte* p) { return load8_bf16(p); }); break;
    case Store::kI8: each8(8, [](const std::byte* p) { return load8_i8(p); }); break;
    case Store::kF8: each8(8, [](const std::byte* p) { return load8_f8(p); }); break;
    case Store::kI4: each8(4, [](const std::byte* p) { return load8_i4(p); }); break;
  }
}

SHOAL_INLINE __m128i narrow8_bf16(__m256 a) {
  const __m256i bits = _mm256_castps_si256(a);
  const __m256i high = _mm256_srli_epi32(bits, 16);
  const __m256i lowest = _mm256_and_si256(high, _mm256_set1_epi32(1));
  const __m256i rounded =
      _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(_mm256_set1_epi32(0x7fff), lowest)), 16);
  const __m256i quiet = _mm256_or_si256(high, _mm256_set1_epi32(0x40));
  const __m256i words = _mm256_blendv_epi8(rounded, quiet, _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q)));
  return _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
}

// Codes of x / scale, rounded to nearest even. Divides: a reciprocal gives other codes.
SHOAL_INLINE __m256i codes8(const float* values, const float* scales, float low, float high) {
  const __m256 scale = _mm256_loadu_ps(scales);
  const __m256 quotient = _mm256_div_ps(_mm256_loadu_ps(values), scale);
  const __m256 is_zero = _mm256_cmp_ps(scale, _mm256_setzero_ps(), _CMP_EQ_OQ);
  const __m256 v = _mm256_andnot_ps(is_zero, quotient);
  return _mm256_cvtps_epi32(_mm256_min_ps(_mm256_max_ps(v, _mm256_set1_ps(low)), _mm256_set1_ps(high)));
}

// The inverse of decode_row, with the contract's rounding.
inline void write_row(Store store, const float* values, const float* scales, int64_t count, std::byte* out) {
  switch (store) {
    case Store::kF32: std::memcpy(out, values, static_cast<size_t>(count) * sizeof(float)); break;
    case Store::kF16:
      for (int64_t i = 0; i < count; i += 8) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(out + 2 * i),
                         _mm256_cvtps_ph(_mm256_loadu_ps(values + i), _MM_FROUND_TO_NEAREST_INT));
      }
      break;
    case Store::kBF16:
      for (int64_t i = 0; i < count; i += 8) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(out + 2 * i), narrow8_bf16(_mm256_loadu_ps(values + i)));
      }
      break;
    case Store::kI8:
      for (int64_t i = 0; i < count; i += 8) {
        const __m256i codes = codes8(values + i, scales + i, -128.0f, 127.0f);
        const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(codes), _mm256_extracti128_si256(codes, 1));
        _mm_storel_epi64(reinterpret_cast<__m128i*>(out + i), _mm_packs_epi16(words, words));
      }
      break;
    case Store::kI4:
      for (int64_t i = 0; i < count; i += 8) {
        const __m256i codes = _mm256_add_epi32(codes8(values + i, scales + i, -8.0f, 7.0f), _mm256_set1_epi32(8));
        // Each 64-bit half holds a low nibble at bit 0 and a high one at bit 32: bring them together, gather 4 bytes.
        const __m256i pairs = _mm256_or_si256(codes, _mm256_srli_epi64(codes, 28));
        alignas(32) uint8_t bytes[32];
        _mm256_store_si256(reinterpret_cast<__m256i*>(bytes), pairs);
        const uint8_t packed[4] = {bytes[0], bytes[8], bytes[16], bytes[24]};
        std::memcpy(out + i / 2, packed, 4);
      }
      break;
    case Store::kF8: encode_row(store, values, scales, count, out); break;
  }
}

#else

inline void decode_row(Store store, const std::byte* in, int64_t count, float* out) {
  decode_codes(store, in, count, out);
}
inline void write_row(Store store, const float* values, const float* scales, int64_t count, std::byte* out) {
  encode_row(store, values, scales, count, out);
}

#endif

// ---- what the kernels read in place: f32, f16, bf16, i8 ----

template <Store kStore>
constexpr int64_t kBytesOf = kStore == Store::kF32  ? 4
                             : kStore == Store::kI8 ? 1
                                                    : 2;

#if defined(SHOAL_ISA_AVX2) || defined(SHOAL_ISA_AVX512)

template <Store kStore>
SHOAL_INLINE __m256 load8(const std::byte* in) {
  if constexpr (kStore == Store::kF32) {
    return load8_f32(in);
  } else if constexpr (kStore == Store::kF16) {
    return load8_f16(in);
  } else if constexpr (kStore == Store::kBF16) {
    return load8_bf16(in);
  } else {
    return load8_i8(in);
  }
}

// Channels [c, c + 8) of 8 rows: out[i] has channel c + i of every row.
SHOAL_INLINE void transpose8_f32(const std::byte* const* rows, int64_t c, __m256* out) {
  for (int part = 0; part < 2; ++part) {
    __m256 m[4];
    for (int i = 0; i < 4; ++i) {
      const auto* low = reinterpret_cast<const float*>(rows[i]) + c + 4 * part;
      const auto* high = reinterpret_cast<const float*>(rows[i + 4]) + c + 4 * part;
      m[i] = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(low)), _mm_loadu_ps(high), 1);
    }
    const __m256d a = _mm256_castps_pd(_mm256_unpacklo_ps(m[0], m[1]));
    const __m256d b = _mm256_castps_pd(_mm256_unpackhi_ps(m[0], m[1]));
    const __m256d d = _mm256_castps_pd(_mm256_unpacklo_ps(m[2], m[3]));
    const __m256d e = _mm256_castps_pd(_mm256_unpackhi_ps(m[2], m[3]));
    out[4 * part] = _mm256_castpd_ps(_mm256_unpacklo_pd(a, d));
    out[4 * part + 1] = _mm256_castpd_ps(_mm256_unpackhi_pd(a, d));
    out[4 * part + 2] = _mm256_castpd_ps(_mm256_unpacklo_pd(b, e));
    out[4 * part + 3] = _mm256_castpd_ps(_mm256_unpackhi_pd(b, e));
  }
}
SHOAL_INLINE void transpose8_halves(const std::byte* const* rows, int64_t c, __m128i* out) {
  __m128i a[8];
  for (int i = 0; i < 4; ++i) {
    const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[2 * i] + 2 * c));
    const __m128i y = _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[2 * i + 1] + 2 * c));
    a[2 * i] = _mm_unpacklo_epi16(x, y);
    a[2 * i + 1] = _mm_unpackhi_epi16(x, y);
  }
  for (int i = 0; i < 2; ++i) {
    const __m128i low0 = _mm_unpacklo_epi32(a[i], a[i + 2]);
    const __m128i low1 = _mm_unpackhi_epi32(a[i], a[i + 2]);
    const __m128i high0 = _mm_unpacklo_epi32(a[i + 4], a[i + 6]);
    const __m128i high1 = _mm_unpackhi_epi32(a[i + 4], a[i + 6]);
    out[4 * i] = _mm_unpacklo_epi64(low0, high0);
    out[4 * i + 1] = _mm_unpackhi_epi64(low0, high0);
    out[4 * i + 2] = _mm_unpacklo_epi64(low1, high1);
    out[4 * i + 3] = _mm_unpackhi_epi64(low1, high1);
  }
}
SHOAL_INLINE void transpose8_i8(const std::byte* const* rows, int64_t c, __m256* out) {
  __m128i a[4];
  for (int i = 0; i < 4; ++i) {
    a[i] = _mm_unpacklo_epi8(load8_bytes(rows[2 * i] + c), load8_bytes(rows[2 * i + 1] + c));
  }
  const __m128i low[2] = {_mm_unpacklo_epi16(a[0], a[1]), _mm_unpackhi_epi16(a[0], a[1])};
  const __m128i high[2] = {_mm_unpacklo_epi16(a[2], a[3]), _mm_unpackhi_epi16(a[2], a[3])};
  for (int i = 0; i < 2; ++i) {
    const __m128i two[2] = {_mm_unpacklo_epi32(low[i], high[i]), _mm_unpackhi_epi32(low[i], high[i])};
    for (int k = 0; k < 2; ++k) {
      out[4 * i + 2 * k] = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(two[k]));
      out[4 * i + 2 * k + 1] = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_unpackhi_epi64(two[k], two[k])));
    }
  }
}
template <Store kStore>
SHOAL_INLINE void transpose8_lanes(const std::byte* const* rows, int64_t c, __m256* out) {
  if constexpr (kStore == Store::kF32) {
    transpose8_f32(rows, c, out);
  } else if constexpr (kStore == Store::kI8) {
    transpose8_i8(rows, c, out);
  } else {
    __m128i halves[8];
    transpose8_halves(rows, c, halves);
    for (int i = 0; i < 8; ++i) {
      out[i] = kStore == Store::kF16 ? _mm256_cvtph_ps(halves[i])
                                     : _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves[i]), 16));
    }
  }
}

#if defined(SHOAL_ISA_AVX512)
template <Store kStore>
SHOAL_INLINE Floats load_codes(const std::byte* in) {
  return {_mm512_insertf32x8(_mm512_castps256_ps512(load8<kStore>(in)), load8<kStore>(in + 8 * kBytesOf<kStore>), 1)};
}
template <Store kStore>
SHOAL_INLINE void transpose8(const std::byte* const* rows, int64_t c, Floats* out) {
  __m256 low[8];
  __m256 high[8];
  transpose8_lanes<kStore>(rows, c, low);
  transpose8_lanes<kStore>(rows + 8, c, high);
  for (int i = 0; i < 8; ++i) {
    out[i] = {_mm512_insertf32x8(_mm512_castps256_ps512(low[i]), high[i], 1)};
  }
}
#else
template <Store kStore>
SHOAL_INLINE Floats load_codes(const std::byte* in) {
  return {load8<kStore>(in)};
}
template <Store kStore>
SHOAL_INLINE void transpose8(const std::byte* const* rows, int64_t c, Floats* out) {
  __m256 lanes[8];
  transpose8_lanes<kStore>(rows, c, lanes);
  for (int i = 0; i < 8; ++i) {
    out[i] = {lanes[i]};
  }
}
#endif

#else

template <Store kStore>
SHOAL_INLINE Floats load_codes(const std::byte* in) {
  Floats out;
  decode_codes(kStore, in, kLanes, out.v);
  return out;
}
// Channels [c, c + 8) of kLanes rows: out[i] has channel c + i of every row.
template <Store kStore>
SHOAL_INLINE void transpose8(const std::byte* const* rows, int64_t c, Floats* out) {
  float row[8];
  for (int lane = 0; lane < kLanes; ++lane) {
    decode_codes(kStore, rows[lane] + c * kBytesOf<kStore>, 8, row);
    for (int i = 0; i < 8; ++i) {
      out[i].v[lane] = row[i];
    }
  }
}

#endif

SHOAL_INLINE Store plain_store(DType type) {
  return type == DType::kF16 ? Store::kF16 : type == DType::kBF16 ? Store::kBF16 : Store::kF32;
}

// `count` values of T as f32; any strides.
inline void read_values(DType type, const Matrix& matrix, int64_t row, int64_t first, int64_t count, float* out) {
  if (matrix.column_stride == static_cast<int64_t>(size_of(type)) && count % 8 == 0) {
    decode_row(plain_store(type), matrix.data + row * matrix.row_stride + first * matrix.column_stride, count, out);
  } else {
    load_row(type, matrix, row, first, count, out);
  }
}

// Rounds f32 values to T in place.
inline void round_values(DType type, int64_t count, float* values) {
#if defined(SHOAL_ISA_AVX2) || defined(SHOAL_ISA_AVX512)
  if (type == DType::kF16) {
    for (int64_t i = 0; i < count; i += 8) {
      const __m128i halves = _mm256_cvtps_ph(_mm256_loadu_ps(values + i), _MM_FROUND_TO_NEAREST_INT);
      _mm256_storeu_ps(values + i, _mm256_cvtph_ps(halves));
    }
  } else if (type == DType::kBF16) {
    for (int64_t i = 0; i < count; i += 8) {
      const __m256i words = _mm256_cvtepu16_epi32(narrow8_bf16(_mm256_loadu_ps(values + i)));
      _mm256_storeu_ps(values + i, _mm256_castsi256_ps(_mm256_slli_epi32(words, 16)));
    }
  }
#else
  if (type != DType::kF32) {
    constexpr int64_t kStep = 64;
    std::byte rounded[2 * kStep];
    for (int64_t i = 0; i < count; i += kStep) {
      const int64_t n = count - i < kStep ? count - i : kStep;
      encode_row(plain_store(type), values + i, nullptr, n, rounded);
      decode_codes(plain_store(type), rounded, n, values + i);
    }
  }
#endif
}

}  // namespace shoal::paged::SHOAL_ISA
