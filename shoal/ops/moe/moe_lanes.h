// Vectors of the expert kernels: one output a lane. Codes come as 32-bit words, word w of every lane in one vector.
//
// Only for sources that are compiled per instruction set. Plain C++ has no vectors of integers: it decodes code by
// code.
#pragma once

#include <cstring>

#include "shoal/cpu/simd.h"
#include "shoal/quant/block.h"

namespace shoal::SHOAL_ISA {

#if defined(SHOAL_ISA_AVX512)

struct Ints {
  __m512i v;
};
SHOAL_INLINE Floats fused(Floats a, Floats b, Floats c) { return fma(a, b, c); }
template <int N>
SHOAL_INLINE Ints shift_right(Ints a) {
  return {_mm512_srli_epi32(a.v, N)};
}
template <int N>
SHOAL_INLINE Ints shift_left(Ints a) {
  return {_mm512_slli_epi32(a.v, N)};
}
template <int N>
SHOAL_INLINE Ints shift_right_signed(Ints a) {
  return {_mm512_srai_epi32(a.v, N)};
}
SHOAL_INLINE Ints splat_int(uint32_t a) { return {_mm512_set1_epi32(static_cast<int>(a))}; }
SHOAL_INLINE Ints operator&(Ints a, Ints b) { return {_mm512_and_si512(a.v, b.v)}; }
SHOAL_INLINE Ints operator|(Ints a, Ints b) { return {_mm512_or_si512(a.v, b.v)}; }
SHOAL_INLINE Floats to_floats(Ints a) { return {_mm512_cvtepi32_ps(a.v)}; }
SHOAL_INLINE Floats as_floats(Ints a) { return {_mm512_castsi512_ps(a.v)}; }
// All bits where a == b.
SHOAL_INLINE Ints where_equal(Ints a, Ints b) { return {_mm512_movm_epi32(_mm512_cmpeq_epi32_mask(a.v, b.v))}; }
// Byte J of each lane.
template <int J>
SHOAL_INLINE Ints byte_of(Ints a) {
  const __m128i control = _mm_setr_epi32(-0x7f7f8000 + J, -0x7f7f7ffc + J, -0x7f7f7ff8 + J, -0x7f7f7ff4 + J);
  return {_mm512_shuffle_epi8(a.v, _mm512_broadcast_i32x4(control))};
}
// table[low four bits of a lane].
SHOAL_INLINE Floats look_up_floats(const float* table, Ints a) {
  return {_mm512_permutexvar_ps(a.v, _mm512_loadu_ps(table))};
}
// The low 16 bits of each lane, an f16.
SHOAL_INLINE Floats low_f16(Ints a) { return {_mm512_cvtph_ps(_mm512_cvtepi32_epi16(a.v))}; }
// table[low four bits of a byte], in each byte; the high bits are 0.
SHOAL_INLINE Ints look_up(const int8_t* table, Ints a) {
  const __m128i entries = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
  return {_mm512_shuffle_epi8(_mm512_broadcast_i32x4(entries), a.v)};
}
// The nibbles of kLanes / 2 bytes, low ones first; one nibble of each of kLanes bytes.
SHOAL_INLINE Ints adjacent_nibbles(const std::byte* p) {
  const __m512i words = _mm512_inserti64x4(_mm512_set1_epi32(static_cast<int>(block::u32(p))),
                                           _mm256_set1_epi32(static_cast<int>(block::u32(p + 4))), 1);
  const __m512i shifts = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28);
  return {_mm512_and_si512(_mm512_srlv_epi32(words, shifts), _mm512_set1_epi32(15))};
}
SHOAL_INLINE Ints strided_nibbles(const std::byte* p, bool high) {
  const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return {_mm512_and_si512(_mm512_srl_epi32(bytes, _mm_cvtsi32_si128(high ? 4 : 0)), _mm512_set1_epi32(15))};
}
SHOAL_INLINE Floats round_f16(Floats a) { return {_mm512_cvtph_ps(narrow_f16(a))}; }
SHOAL_INLINE Floats round_bf16(Floats a) { return widen_bf16(narrow_bf16(a)); }

SHOAL_INLINE __m128i load_16(const std::byte* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
// Words 0 to 3 of the 16 bytes at rows[lane] + offset: 4x4 transpositions in each 128-bit part.
SHOAL_INLINE void load_words(const std::byte* const* rows, int64_t offset, Ints (&words)[4]) {
  __m512i y[4];
  for (int i = 0; i < 4; ++i) {
    const __m256i low =
        _mm256_inserti128_si256(_mm256_castsi128_si256(load_16(rows[i] + offset)), load_16(rows[i + 4] + offset), 1);
    const __m256i high = _mm256_inserti128_si256(_mm256_castsi128_si256(load_16(rows[i + 8] + offset)),
                                                 load_16(rows[i + 12] + offset), 1);
    y[i] = _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
  }
  const __m512i a = _mm512_unpacklo_epi32(y[0], y[1]);
  const __m512i b = _mm512_unpacklo_epi32(y[2], y[3]);
  const __m512i c = _mm512_unpackhi_epi32(y[0], y[1]);
  const __m512i d = _mm512_unpackhi_epi32(y[2], y[3]);
  words[0].v = _mm512_unpacklo_epi64(a, b);
  words[1].v = _mm512_unpackhi_epi64(a, b);
  words[2].v = _mm512_unpacklo_epi64(c, d);
  words[3].v = _mm512_unpackhi_epi64(c, d);
}

#elif defined(SHOAL_ISA_AVX2)

struct Ints {
  __m256i v;
};
SHOAL_INLINE Floats fused(Floats a, Floats b, Floats c) { return fma(a, b, c); }
template <int N>
SHOAL_INLINE Ints shift_right(Ints a) {
  return {_mm256_srli_epi32(a.v, N)};
}
template <int N>
SHOAL_INLINE Ints shift_left(Ints a) {
  return {_mm256_slli_epi32(a.v, N)};
}
template <int N>
SHOAL_INLINE Ints shift_right_signed(Ints a) {
  return {_mm256_srai_epi32(a.v, N)};
}
SHOAL_INLINE Ints splat_int(uint32_t a) { return {_mm256_set1_epi32(static_cast<int>(a))}; }
SHOAL_INLINE Ints operator&(Ints a, Ints b) { return {_mm256_and_si256(a.v, b.v)}; }
SHOAL_INLINE Ints operator|(Ints a, Ints b) { return {_mm256_or_si256(a.v, b.v)}; }
SHOAL_INLINE Floats to_floats(Ints a) { return {_mm256_cvtepi32_ps(a.v)}; }
SHOAL_INLINE Floats as_floats(Ints a) { return {_mm256_castsi256_ps(a.v)}; }
SHOAL_INLINE Ints where_equal(Ints a, Ints b) { return {_mm256_cmpeq_epi32(a.v, b.v)}; }
template <int J>
SHOAL_INLINE Ints byte_of(Ints a) {
  const __m128i control = _mm_setr_epi32(-0x7f7f8000 + J, -0x7f7f7ffc + J, -0x7f7f7ff8 + J, -0x7f7f7ff4 + J);
  return {_mm256_shuffle_epi8(a.v, _mm256_broadcastsi128_si256(control))};
}
SHOAL_INLINE Floats low_f16(Ints a) {
  const __m256i words = _mm256_and_si256(a.v, _mm256_set1_epi32(0xffff));
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(words, words), 0x08);
  return {_mm256_cvtph_ps(_mm256_castsi256_si128(packed))};
}
SHOAL_INLINE Ints look_up(const int8_t* table, Ints a) {
  const __m128i entries = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
  return {_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(entries), a.v)};
}
SHOAL_INLINE Ints adjacent_nibbles(const std::byte* p) {
  const __m256i shifts = _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28);
  const __m256i nibbles = _mm256_srlv_epi32(_mm256_set1_epi32(static_cast<int>(block::u32(p))), shifts);
  return {_mm256_and_si256(nibbles, _mm256_set1_epi32(15))};
}
SHOAL_INLINE Ints strided_nibbles(const std::byte* p, bool high) {
  const __m256i bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  return {_mm256_and_si256(_mm256_srl_epi32(bytes, _mm_cvtsi32_si128(high ? 4 : 0)), _mm256_set1_epi32(15))};
}
SHOAL_INLINE Floats round_f16(Floats a) { return {_mm256_cvtph_ps(narrow_f16(a))}; }
SHOAL_INLINE Floats round_bf16(Floats a) { return widen_bf16(narrow_bf16(a)); }

SHOAL_INLINE __m128i load_16(const std::byte* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
SHOAL_INLINE void load_words(const std::byte* const* rows, int64_t offset, Ints (&words)[4]) {
  __m256i y[4];
  for (int i = 0; i < 4; ++i) {
    y[i] = _mm256_inserti128_si256(_mm256_castsi128_si256(load_16(rows[i] + offset)), load_16(rows[i + 4] + offset), 1);
  }
  const __m256i a = _mm256_unpacklo_epi32(y[0], y[1]);
  const __m256i b = _mm256_unpacklo_epi32(y[2], y[3]);
  const __m256i c = _mm256_unpackhi_epi32(y[0], y[1]);
  const __m256i d = _mm256_unpackhi_epi32(y[2], y[3]);
  words[0].v = _mm256_unpacklo_epi64(a, b);
  words[1].v = _mm256_unpackhi_epi64(a, b);
  words[2].v = _mm256_unpacklo_epi64(c, d);
  words[3].v = _mm256_unpackhi_epi64(c, d);
}

#else

// Fused on every machine: the chain C3 is exact in its bits.
SHOAL_INLINE Floats fused(const Floats& a, const Floats& b, const Floats& c) {
  return each_lane([&](int i) { return __builtin_fmaf(a.v[i], b.v[i], c.v[i]); });
}
SHOAL_INLINE Floats round_f16(const Floats& a) {
  return each_lane([&](int i) { return f16_to_f32(f32_to_f16(a.v[i])); });
}
SHOAL_INLINE Floats round_bf16(const Floats& a) {
  return each_lane([&](int i) { return bf16_to_f32(f32_to_bf16(a.v[i])); });
}

#endif

// A number as a type, and f(Number<0>) ... f(Number<N - 1>): loops whose counter ends up in an immediate operand.
template <int N>
struct Number {
  static constexpr int value = N;
};
template <int N, int Begin = 0, class Body>
SHOAL_INLINE void unroll(const Body& body) {
  if constexpr (N - Begin == 1) {
    body(Number<Begin>{});
  } else if constexpr (N > Begin) {  // halves: compilers limit the depth of inlining
    constexpr int kMiddle = Begin + (N - Begin) / 2;
    unroll<kMiddle, Begin>(body);
    unroll<N, kMiddle>(body);
  }
}

}  // namespace shoal::SHOAL_ISA
