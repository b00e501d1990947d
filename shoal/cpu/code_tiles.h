// Packed codes of kLanes rows as words of four bytes, one row a lane: the first step of decoding weights that come raw,
// row by row, as LSB-first streams of 2, 3, 4 or 8 bits. For sources compiled per instruction set.
//
//   Words    kLanes 32-bit lanes; word w of a chunk holds in byte j of lane l the code of position 4 w + j of row l
//   position the codes of 32 columns are reordered so that unpacking is one shift and one mask for a word; see
//            kCodeOrder. Rows of activations are brought into the same order once a call (prepare_row)
#pragma once

#include <cstdint>
#include <cstring>

#include "shoal/cpu/simd.h"

namespace shoal::SHOAL_ISA {

constexpr int64_t kCodeChunk = 128;              // columns unpacked at a time
constexpr int64_t kChunkWords = kCodeChunk / 4;  // words of a chunk
constexpr int64_t kUnitBytes = 16;               // bytes of a row that are transposed at a time

#if defined(SHOAL_ISA_AVX512)

struct Words {
  __m512i v;
};
SHOAL_INLINE Words load_words(const uint32_t* p) { return {_mm512_loadu_si512(p)}; }
SHOAL_INLINE void store_words(uint32_t* p, Words a) { _mm512_storeu_si512(p, a.v); }
SHOAL_INLINE Words splat_word(uint32_t a) { return {_mm512_set1_epi32(static_cast<int>(a))}; }
SHOAL_INLINE Words operator&(Words a, Words b) { return {_mm512_and_si512(a.v, b.v)}; }
SHOAL_INLINE Words operator|(Words a, Words b) { return {_mm512_or_si512(a.v, b.v)}; }
template <int kBits>
SHOAL_INLINE Words shift_right(Words a) {
  return {_mm512_srli_epi32(a.v, kBits)};
}
template <int kBits>
SHOAL_INLINE Words shift_left(Words a) {
  return {_mm512_slli_epi32(a.v, kBits)};
}
SHOAL_INLINE Floats to_floats(Words a) { return {_mm512_cvtepi32_ps(a.v)}; }
SHOAL_INLINE Floats as_floats(Words a) { return {_mm512_castsi512_ps(a.v)}; }
SHOAL_INLINE Words as_words(Floats a) { return {_mm512_castps_si512(a.v)}; }
SHOAL_INLINE Words add_words(Words a, Words b) { return {_mm512_add_epi32(a.v, b.v)}; }
SHOAL_INLINE Words all_ones_where_equal(Words a, Words b) {
  return {_mm512_movm_epi32(_mm512_cmpeq_epi32_mask(a.v, b.v))};
}
// table[code] for every byte, codes below 16.
SHOAL_INLINE Words look_up(Words codes, const uint8_t* table) {
  return {
      _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table))), codes.v)};
}
SHOAL_INLINE __m512i four_rows(const uint8_t* const* rows, int first, int64_t at) {
  const auto row = [&](int i) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[first + 4 * i] + at)); };
  __m512i v = _mm512_castsi128_si512(row(0));
  v = _mm512_inserti32x4(v, row(1), 1);
  v = _mm512_inserti32x4(v, row(2), 2);
  return _mm512_inserti32x4(v, row(3), 3);
}
// 16 bytes of every row to four words.
SHOAL_INLINE void transpose_unit(const uint8_t* const* rows, int64_t at, Words (&words)[4]) {
  const __m512i a = four_rows(rows, 0, at);
  const __m512i b = four_rows(rows, 1, at);
  const __m512i c = four_rows(rows, 2, at);
  const __m512i d = four_rows(rows, 3, at);
  const __m512i ab_low = _mm512_unpacklo_epi32(a, b);
  const __m512i ab_high = _mm512_unpackhi_epi32(a, b);
  const __m512i cd_low = _mm512_unpacklo_epi32(c, d);
  const __m512i cd_high = _mm512_unpackhi_epi32(c, d);
  words[0] = {_mm512_unpacklo_epi64(ab_low, cd_low)};
  words[1] = {_mm512_unpackhi_epi64(ab_low, cd_low)};
  words[2] = {_mm512_unpacklo_epi64(ab_high, cd_high)};
  words[3] = {_mm512_unpackhi_epi64(ab_high, cd_high)};
}

#elif defined(SHOAL_ISA_AVX2)

struct Words {
  __m256i v;
};
SHOAL_INLINE Words load_words(const uint32_t* p) { return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))}; }
SHOAL_INLINE void store_words(uint32_t* p, Words a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), a.v); }
SHOAL_INLINE Words splat_word(uint32_t a) { return {_mm256_set1_epi32(static_cast<int>(a))}; }
SHOAL_INLINE Words operator&(Words a, Words b) { return {_mm256_and_si256(a.v, b.v)}; }
SHOAL_INLINE Words operator|(Words a, Words b) { return {_mm256_or_si256(a.v, b.v)}; }
template <int kBits>
SHOAL_INLINE Words shift_right(Words a) {
  return {_mm256_srli_epi32(a.v, kBits)};
}
template <int kBits>
SHOAL_INLINE Words shift_left(Words a) {
  return {_mm256_slli_epi32(a.v, kBits)};
}
SHOAL_INLINE Floats to_floats(Words a) { return {_mm256_cvtepi32_ps(a.v)}; }
SHOAL_INLINE Floats as_floats(Words a) { return {_mm256_castsi256_ps(a.v)}; }
SHOAL_INLINE Words as_words(Floats a) { return {_mm256_castps_si256(a.v)}; }
SHOAL_INLINE Words add_words(Words a, Words b) { return {_mm256_add_epi32(a.v, b.v)}; }
SHOAL_INLINE Words all_ones_where_equal(Words a, Words b) { return {_mm256_cmpeq_epi32(a.v, b.v)}; }
// table[code] for every byte, codes below 16.
SHOAL_INLINE Words look_up(Words codes, const uint8_t* table) {
  return {_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table))),
                              codes.v)};
}
// 16 bytes of every row to four words.
SHOAL_INLINE void transpose_unit(const uint8_t* const* rows, int64_t at, Words (&words)[4]) {
  const auto row = [&](int i) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[i] + at)); };
  const __m256i a = _mm256_set_m128i(row(4), row(0));
  const __m256i b = _mm256_set_m128i(row(5), row(1));
  const __m256i c = _mm256_set_m128i(row(6), row(2));
  const __m256i d = _mm256_set_m128i(row(7), row(3));
  const __m256i ab_low = _mm256_unpacklo_epi32(a, b);
  const __m256i ab_high = _mm256_unpackhi_epi32(a, b);
  const __m256i cd_low = _mm256_unpacklo_epi32(c, d);
  const __m256i cd_high = _mm256_unpackhi_epi32(c, d);
  words[0] = {_mm256_unpacklo_epi64(ab_low, cd_low)};
  words[1] = {_mm256_unpackhi_epi64(ab_low, cd_low)};
  words[2] = {_mm256_unpacklo_epi64(ab_high, cd_high)};
  words[3] = {_mm256_unpackhi_epi64(ab_high, cd_high)};
}

#else

struct Words {
  uint32_t v[kLanes];
};
template <class Function>
SHOAL_INLINE Words each_word(Function function) {
  Words result;
  for (int i = 0; i < kLanes; ++i) {
    result.v[i] = function(i);
  }
  return result;
}
SHOAL_INLINE Words load_words(const uint32_t* p) {
  return each_word([&](int i) { return p[i]; });
}
SHOAL_INLINE void store_words(uint32_t* p, const Words& a) { std::memcpy(p, a.v, sizeof(a.v)); }
SHOAL_INLINE Words splat_word(uint32_t a) {
  return each_word([&](int) { return a; });
}
SHOAL_INLINE Words operator&(const Words& a, const Words& b) {
  return each_word([&](int i) { return a.v[i] & b.v[i]; });
}
SHOAL_INLINE Words operator|(const Words& a, const Words& b) {
  return each_word([&](int i) { return a.v[i] | b.v[i]; });
}
template <int kBits>
SHOAL_INLINE Words shift_right(const Words& a) {
  return each_word([&](int i) { return a.v[i] >> kBits; });
}
template <int kBits>
SHOAL_INLINE Words shift_left(const Words& a) {
  return each_word([&](int i) { return a.v[i] << kBits; });
}
SHOAL_INLINE Floats to_floats(const Words& a) {
  return each_lane([&](int i) { return static_cast<float>(static_cast<int32_t>(a.v[i])); });
}
SHOAL_INLINE Floats as_floats(const Words& a) {
  return each_lane([&](int i) { return __builtin_bit_cast(float, a.v[i]); });
}
SHOAL_INLINE Words as_words(const Floats& a) {
  return each_word([&](int i) { return __builtin_bit_cast(uint32_t, a.v[i]); });
}
SHOAL_INLINE Words add_words(const Words& a, const Words& b) {
  return each_word([&](int i) { return a.v[i] + b.v[i]; });
}
SHOAL_INLINE Words all_ones_where_equal(const Words& a, const Words& b) {
  return each_word([&](int i) { return a.v[i] == b.v[i] ? 0xffffffffu : 0u; });
}
SHOAL_INLINE Words look_up(const Words& codes, const uint8_t* table) {
  return each_word([&](int i) {
    uint32_t word = 0;
    for (int j = 0; j < 32; j += 8) {
      word |= static_cast<uint32_t>(table[(codes.v[i] >> j) & 15]) << j;
    }
    return word;
  });
}
SHOAL_INLINE void transpose_unit(const uint8_t* const* rows, int64_t at, Words (&words)[4]) {
  for (int lane = 0; lane < kLanes; ++lane) {
    for (int w = 0; w < 4; ++w) {
      std::memcpy(&words[w].v[lane], rows[lane] + at + 4 * w, 4);
    }
  }
}

#endif

// Where the code of position p stands among 32 columns.
template <int kBits>
struct CodeOrder;
template <>
struct CodeOrder<2> {
  static constexpr uint8_t kColumns[32] = {0,  4,  8,  12, 1,  5,  9,  13, 2,  6,  10, 14, 3,  7,  11, 15,
                                           16, 20, 24, 28, 17, 21, 25, 29, 18, 22, 26, 30, 19, 23, 27, 31};
};
template <>
struct CodeOrder<4> {
  static constexpr uint8_t kColumns[32] = {0,  2,  4,  6,  1,  3,  5,  7,  8,  10, 12, 14, 9,  11, 13, 15,
                                           16, 18, 20, 22, 17, 19, 21, 23, 24, 26, 28, 30, 25, 27, 29, 31};
};
template <int kBits>
SHOAL_INLINE constexpr const uint8_t* code_order() {
  if constexpr (kBits == 2 || kBits == 4) {
    return CodeOrder<kBits>::kColumns;
  } else {
    return nullptr;  // in order
  }
}

struct CodeRows {
  const uint8_t* data = nullptr;  // [n, row_bytes], any alignment
  int64_t row_bytes = 0;
  int64_t n = 0;
};

// Where rows first ... of a group start; rows behind the last repeat it.
SHOAL_INLINE void start_of_rows(const CodeRows& rows, int64_t first, const uint8_t* (&starts)[kLanes]) {
  for (int lane = 0; lane < kLanes; ++lane) {
    const int64_t row = first + lane < rows.n ? first + lane : rows.n - 1;
    starts[lane] = rows.data + row * rows.row_bytes;
  }
}

// Four codes of 3 bits from the lowest 12, one a byte.
SHOAL_INLINE Words spread_3_bits(Words a) {
  return (a & splat_word(7)) | shift_left<5>(a & splat_word(7u << 3)) | shift_left<10>(a & splat_word(7u << 6)) |
         shift_left<15>(a & splat_word(7u << 9));
}

// Codes of 2, 4 or 8 bits: a transposed word holds 8 / bits words of codes, interleaved.
template <int kBits>
SHOAL_INLINE Words part_of_word(Words word, int part) {
  if constexpr (kBits == 8) {
    return word;
  } else if constexpr (kBits == 4) {
    return (part == 0 ? word : shift_right<4>(word)) & splat_word(0x0f0f0f0f);
  } else {
    const Words shifted = part == 0   ? word
                          : part == 1 ? shift_right<2>(word)
                          : part == 2 ? shift_right<4>(word)
                                      : shift_right<6>(word);
    return shifted & splat_word(0x03030303);
  }
}

// Asks for what a group's rows hold two chunks further: hardware does not follow as many streams. Behind the end of
// memory it does nothing.
template <int kBits>
SHOAL_INLINE void prefetch_codes(const uint8_t* const (&starts)[kLanes], int64_t k) {
  const int64_t at = k / 8 * kBits + 2 * kBits * kUnitBytes;
  for (int lane = 0; lane < kLanes; ++lane) {
    for (int line = 0; line < kBits * kUnitBytes; line += 64) {
      __builtin_prefetch(starts[lane] + at + line);
    }
  }
}

// Unpacks `count` codes (at most 128, rounded up to 32) of a group's rows from column k, a multiple of 128, on. Codes
// behind the end of a row are 0.
template <int kBits>
SHOAL_INLINE void unpack_codes(const uint8_t* const (&starts)[kLanes], int64_t row_bytes, int64_t k, int64_t count,
                               uint32_t* words) {
  int64_t first = k / 8 * kBits;
  const int64_t num_units = (count * kBits / 8 + kUnitBytes - 1) / kUnitBytes;
  const int64_t left = row_bytes - first;
  const uint8_t* const* rows = starts;
  const uint8_t* padded_rows[kLanes];
  alignas(64) uint8_t padded[kLanes][kBits * kUnitBytes];
  if (left < num_units * kUnitBytes) {
    for (int lane = 0; lane < kLanes; ++lane) {
      std::memset(padded[lane], 0, sizeof(padded[lane]));
      if (left > 0) {
        std::memcpy(padded[lane], starts[lane] + first, static_cast<size_t>(left));
      }
      padded_rows[lane] = padded[lane];
    }
    rows = padded_rows;
    first = 0;
  } else {
    prefetch_codes<kBits>(starts, k);
  }
  alignas(64) uint32_t raw[kBits == 3 ? 12 * kLanes : 1];
  for (int64_t u = 0; u < num_units; ++u) {
    Words unit[4];
    transpose_unit(rows, first + u * kUnitBytes, unit);
    for (int i = 0; i < 4; ++i) {
      if constexpr (kBits != 3) {
        constexpr int kParts = 8 / kBits;
        for (int part = 0; part < kParts; ++part) {
          store_words(words + (kParts * (4 * u + i) + part) * kLanes, part_of_word<kBits>(unit[i], part));
        }
      } else {
        store_words(raw + (4 * u + i) * kLanes, unit[i]);
      }
    }
  }
  if constexpr (kBits == 3) {
    for (int64_t i = 0; i < (count + 31) / 32; ++i) {  // 32 codes are three words
      const uint32_t* from = raw + 3 * i * kLanes;
      uint32_t* to = words + 8 * i * kLanes;
      const Words a = load_words(from);
      const Words b = load_words(from + kLanes);
      const Words c = load_words(from + 2 * kLanes);
      const Words eights[4] = {a, shift_right<24>(a) | shift_left<8>(b), shift_right<16>(b) | shift_left<16>(c),
                               shift_right<8>(c)};
      for (int e = 0; e < 4; ++e) {
        store_words(to + 2 * e * kLanes, spread_3_bits(eights[e]));
        store_words(to + (2 * e + 1) * kLanes, spread_3_bits(shift_right<12>(eights[e])));
      }
    }
  }
}

// The four codes of a word as integers below 256.
SHOAL_INLINE void split_bytes(Words word, Words (&codes)[4]) {
  const Words mask = splat_word(0xff);
  codes[0] = word & mask;
  codes[1] = shift_right<8>(word) & mask;
  codes[2] = shift_right<16>(word) & mask;
  codes[3] = shift_right<24>(word);
}

}  // namespace shoal::SHOAL_ISA
