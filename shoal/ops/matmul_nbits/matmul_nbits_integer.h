// Products of int8 activations with packed codes (accuracy_level 4): exact sums of a segment in int32, segments added
// in f32. Part of matmul_nbits_cpu.cpp.
//
//   out += (sum of code * q - zero * sum of q) * (scale * row scale)      the bracket is exact for integral zeros
#pragma once

#include "shoal/cpu/code_tiles.h"
#include "shoal/cpu/tile_product.h"
#include "shoal/ops/matmul_nbits/matmul_nbits_problem.h"

namespace shoal::SHOAL_ISA {

SHOAL_INLINE uint32_t four_codes(const int8_t* p) {
  uint32_t word = 0;
  std::memcpy(&word, p, sizeof(word));
  return word;
}

// Adds to dots[r][g] the products of `num_words` words of each group with the codes of each row.
#if defined(SHOAL_ISA_AVX512)

template <int kBits, int NumRows, int NumGroups>
SHOAL_INLINE void dot_words(const uint32_t* const (&words)[NumGroups], const int8_t* a, int64_t a_stride,
                            int64_t num_words, Words (&dots)[NumRows][NumGroups]) {
  for (int64_t i = 0; i < num_words; ++i) {
    Words w[NumGroups];
    for (int g = 0; g < NumGroups; ++g) {
      w[g] = load_words(words[g] + i * kLanes);
    }
    for (int r = 0; r < NumRows; ++r) {
      const Words q = splat_word(four_codes(a + r * a_stride + 4 * i));
      for (int g = 0; g < NumGroups; ++g) {
        dots[r][g].v = _mm512_dpbusd_epi32(dots[r][g].v, w[g].v, q.v);
      }
    }
  }
}

// The same for one unit of a single row and group: its words need no memory between unpacking and product.
template <int kBits>
SHOAL_INLINE void dot_unit(const Words (&unit)[4], const int8_t* q, Words& dot) {
  constexpr int kParts = 8 / kBits;
  for (int i = 0; i < 4; ++i) {
    for (int part = 0; part < kParts; ++part) {
      const Words w = part_of_word<kBits>(unit[i], part);
      dot.v = _mm512_dpbusd_epi32(dot.v, w.v, splat_word(four_codes(q + 4 * (kParts * i + part))).v);
    }
  }
}
constexpr int kCodeOffset8 = 0;

#elif defined(SHOAL_ISA_AVX2)

template <int kBits, int NumRows, int NumGroups>
SHOAL_INLINE void dot_words(const uint32_t* const (&words)[NumGroups], const int8_t* a, int64_t a_stride,
                            int64_t num_words, Words (&dots)[NumRows][NumGroups]) {
  const __m256i ones = _mm256_set1_epi16(1);
  if constexpr (kBits == 8) {
    // The instruction multiplies unsigned by signed bytes and saturates pairs at 16 bits: 255 * 127 * 2 is too much, so
    // codes are taken minus 128, their magnitudes (at most 128) times activations with their signs.
    const __m256i offset = _mm256_set1_epi8(static_cast<char>(-128));
#pragma GCC unroll 4
    for (int64_t i = 0; i < num_words; ++i) {
      __m256i w[NumGroups];
      __m256i magnitude[NumGroups];
      for (int g = 0; g < NumGroups; ++g) {
        w[g] = _mm256_xor_si256(load_words(words[g] + i * kLanes).v, offset);
        magnitude[g] = _mm256_abs_epi8(w[g]);
      }
      for (int r = 0; r < NumRows; ++r) {
        const Words q = splat_word(four_codes(a + r * a_stride + 4 * i));
        for (int g = 0; g < NumGroups; ++g) {
          const __m256i pairs = _mm256_maddubs_epi16(magnitude[g], _mm256_sign_epi8(q.v, w[g]));
          dots[r][g].v = _mm256_add_epi32(dots[r][g].v, _mm256_madd_epi16(pairs, ones));
        }
      }
    }
  } else {
    constexpr int64_t kMost = 8;  // sums of 16 bits: 8 * 2 * 15 * 127 = 30480 still fits
    for (int64_t first = 0; first < num_words; first += kMost) {
      const int64_t last = num_words - first < kMost ? num_words : first + kMost;
      __m256i pairs[NumRows][NumGroups];
      for (int r = 0; r < NumRows; ++r) {
        for (int g = 0; g < NumGroups; ++g) {
          pairs[r][g] = _mm256_setzero_si256();
        }
      }
#pragma GCC unroll 4
      for (int64_t i = first; i < last; ++i) {
        Words w[NumGroups];
        for (int g = 0; g < NumGroups; ++g) {
          w[g] = load_words(words[g] + i * kLanes);
        }
        for (int r = 0; r < NumRows; ++r) {
          const Words q = splat_word(four_codes(a + r * a_stride + 4 * i));
          for (int g = 0; g < NumGroups; ++g) {
            pairs[r][g] = _mm256_add_epi16(pairs[r][g], _mm256_maddubs_epi16(w[g].v, q.v));
          }
        }
      }
      for (int r = 0; r < NumRows; ++r) {
        for (int g = 0; g < NumGroups; ++g) {
          dots[r][g].v = _mm256_add_epi32(dots[r][g].v, _mm256_madd_epi16(pairs[r][g], ones));
        }
      }
    }
  }
}

// The same for one unit of a single row and group: its words need no memory between unpacking and product.
template <int kBits>
SHOAL_INLINE void dot_unit(const Words (&unit)[4], const int8_t* q, Words& dot) {
  constexpr int kParts = 8 / kBits;
  const __m256i ones = _mm256_set1_epi16(1);
  if constexpr (kBits == 8) {
    const __m256i offset = _mm256_set1_epi8(static_cast<char>(-128));
    for (int i = 0; i < 4; ++i) {
      const __m256i w = _mm256_xor_si256(unit[i].v, offset);
      const __m256i signed_q = _mm256_sign_epi8(splat_word(four_codes(q + 4 * i)).v, w);
      const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), signed_q);
      dot.v = _mm256_add_epi32(dot.v, _mm256_madd_epi16(pairs, ones));
    }
  } else {
    __m256i pairs = _mm256_setzero_si256();  // a unit's sums fit 16 bits: 8 * 2 * 15 * 127, 16 * 2 * 3 * 127
    for (int i = 0; i < 4; ++i) {
      for (int part = 0; part < kParts; ++part) {
        const Words w = part_of_word<kBits>(unit[i], part);
        const Words codes = splat_word(four_codes(q + 4 * (kParts * i + part)));
        pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16(w.v, codes.v));
      }
    }
    dot.v = _mm256_add_epi32(dot.v, _mm256_madd_epi16(pairs, ones));
  }
}
constexpr int kCodeOffset8 = 128;

#else

template <int kBits, int NumRows, int NumGroups>
SHOAL_INLINE void dot_words(const uint32_t* const (&words)[NumGroups], const int8_t* a, int64_t a_stride,
                            int64_t num_words, Words (&dots)[NumRows][NumGroups]) {
  for (int r = 0; r < NumRows; ++r) {
    for (int g = 0; g < NumGroups; ++g) {
      for (int64_t i = 0; i < num_words; ++i) {
        const int8_t* q = a + r * a_stride + 4 * i;
        for (int lane = 0; lane < kLanes; ++lane) {
          const uint32_t w = words[g][i * kLanes + lane];
          int32_t sum = 0;
          for (int j = 0; j < 4; ++j) {
            sum += static_cast<int32_t>((w >> (8 * j)) & 0xff) * q[j];
          }
          dots[r][g].v[lane] += static_cast<uint32_t>(sum);
        }
      }
    }
  }
}
constexpr int kCodeOffset8 = 0;

#endif

// Adds a segment's products to the sums of one row and group.
template <class Weights>
SHOAL_INLINE void add_segment(const Weights& weights, int slot, int64_t at, Words dot_word, Floats row_scale,
                              Floats minus_row_sum, float* sums) {
  Floats dot = to_floats(dot_word);
  if constexpr (Weights::kBits == 8 && kCodeOffset8 != 0) {
    dot = dot - minus_row_sum * splat(static_cast<float>(kCodeOffset8));  // exact: below 2^24
  }
  dot = fma(minus_row_sum, weights.zero(slot, at), dot);
  store(sums, fma(dot, weights.scale(slot, at) * row_scale, load(sums)));
}

// One chunk of at most 128 columns: rows row_idx ... of NumGroups groups.
template <class Weights, int NumRows, int NumGroups>
SHOAL_INLINE void integer_tile(const Weights& weights, const cpu::ProductRows& rows, const QuantisedRows& quantised,
                               int64_t row_idx, int64_t k, int64_t count, float* sums) {
  const int64_t segment = weights.segment();
  for (int64_t at = 0; at < count; at += segment) {
    const int64_t num_words = (count - at < segment ? count - at : segment) / 4;
    const uint32_t* words[NumGroups];
    for (int g = 0; g < NumGroups; ++g) {
      words[g] = weights.words(g) + at / 4 * kLanes;
    }
    Words dots[NumRows][NumGroups];
    for (int r = 0; r < NumRows; ++r) {
      for (int g = 0; g < NumGroups; ++g) {
        dots[r][g] = splat_word(0);
      }
    }
    dot_words<Weights::kBits, NumRows, NumGroups>(words, quantised.codes + row_idx * rows.stride + k + at, rows.stride,
                                                  num_words, dots);
    const int64_t segment_idx = (k + at) / segment;
    for (int r = 0; r < NumRows; ++r) {
      const int64_t idx = (row_idx + r) * quantised.num_segments + segment_idx;
      const Floats row_scale = splat(quantised.scales[idx]);
      const Floats row_sum = splat(-quantised.sums[idx]);
      for (int g = 0; g < NumGroups; ++g) {
        add_segment(weights, g, at, dots[r][g], row_scale, row_sum, sums + r * kTileOutputs + g * kLanes);
      }
    }
  }
}

template <class Weights, int NumGroups>
static void integer_rows(const Weights& weights, const cpu::ProductRows& rows, const QuantisedRows& quantised,
                         int64_t k, int64_t count, float* sums) {
  int64_t row_idx = 0;
  for (; row_idx + 4 <= rows.count; row_idx += 4) {
    integer_tile<Weights, 4, NumGroups>(weights, rows, quantised, row_idx, k, count, sums + row_idx * kTileOutputs);
  }
  if (row_idx + 2 <= rows.count) {
    integer_tile<Weights, 2, NumGroups>(weights, rows, quantised, row_idx, k, count, sums + row_idx * kTileOutputs);
    row_idx += 2;
  }
  if (row_idx < rows.count) {
    integer_tile<Weights, 1, NumGroups>(weights, rows, quantised, row_idx, k, count, sums + row_idx * kTileOutputs);
  }
}

#if !defined(SHOAL_ISA_SCALAR)
// A chunk that lies within its rows, of a single row of activations; segments are whole units.
template <class Weights, int NumGroups>
static void integer_single(Weights& weights, const QuantisedRows& quantised, int64_t k, int64_t count, float* sums) {
  constexpr int kBits = Weights::kBits;
  constexpr int64_t kUnitCodes = kUnitBytes * 8 / kBits;
  const int64_t segment = weights.segment();
  for (int64_t at = 0; at < count; at += segment) {
    const int64_t end = count - at < segment ? count : at + segment;
    Words dots[NumGroups];
    for (int g = 0; g < NumGroups; ++g) {
      dots[g] = splat_word(0);
    }
    for (int64_t i = at; i < end; i += kUnitCodes) {
      for (int g = 0; g < NumGroups; ++g) {
        Words unit[4];
        transpose_unit(weights.starts(g), (k + i) / 8 * kBits, unit);
        dot_unit<kBits>(unit, quantised.codes + k + i, dots[g]);
      }
    }
    const int64_t idx = (k + at) / segment;
    for (int g = 0; g < NumGroups; ++g) {
      add_segment(weights, g, at, dots[g], splat(quantised.scales[idx]), splat(-quantised.sums[idx]),
                  sums + g * kLanes);
    }
  }
}
#endif

// Products with the rows' codes of one chunk.
template <class Weights, int NumGroups>
SHOAL_INLINE void integer_chunk(Weights& weights, const cpu::ProductRows& rows, const QuantisedRows& quantised,
                                int64_t n, int64_t k, int64_t count, float* sums) {
#if !defined(SHOAL_ISA_SCALAR)
  if constexpr (Weights::kBits != 3) {
    if (rows.count == 1 && weights.has_whole_units(k, count)) {
      for (int g = 0; g < NumGroups; ++g) {
        weights.load_entries(g, n + g * kLanes, k, count);
      }
      integer_single<Weights, NumGroups>(weights, quantised, k, count, sums);
      return;
    }
  }
#endif
  for (int g = 0; g < NumGroups; ++g) {
    weights.load(g, n + g * kLanes, k, count);
  }
  integer_rows<Weights, NumGroups>(weights, rows, quantised, k, count, sums);
}

template <class Weights>
static void integer_outputs(Weights& weights, const cpu::ProductRows& rows, const QuantisedRows& quantised,
                            const cpu::ProductOut& out, int64_t begin, int64_t end) {
  alignas(64) float sums[cpu::kProductRows * kTileOutputs];
  for (int64_t n = begin; n < end; n += kTileOutputs) {
    const int num_groups = end - n > kLanes ? 2 : 1;
    std::memset(sums, 0, static_cast<size_t>(rows.count * kTileOutputs) * sizeof(float));
    for (int64_t k = 0; k < rows.stride; k += kCodeChunk) {
      const int64_t count = rows.stride - k < kCodeChunk ? rows.stride - k : kCodeChunk;
      if (num_groups == 2) {
        integer_chunk<Weights, 2>(weights, rows, quantised, n, k, count, sums);
      } else {
        integer_chunk<Weights, 1>(weights, rows, quantised, n, k, count, sums);
      }
    }
    for (int64_t row_idx = 0; row_idx < rows.count; ++row_idx) {
      for (int g = 0; g < num_groups; ++g) {
        finish_outputs(out, row_idx, n + g * kLanes, load(sums + row_idx * kTileOutputs + g * kLanes));
      }
    }
  }
}

// Codes of row `row_idx` from its values, which are in order.
static void quantise_row(const MatMulNBitsProblem& p, const cpu::ProductRows& rows, const QuantisedRows& quantised,
                         int64_t row_idx, const uint8_t* order) {
  const float* values = rows.values + row_idx * rows.stride;
  int8_t* codes = quantised.codes + row_idx * rows.stride;
  const int64_t block_size = p.args.block_size;
  const int64_t segment = block_size < kNBitsSegment ? block_size : kNBitsSegment;
  for (int64_t first = 0; first < rows.stride; first += block_size) {
    const int64_t last = rows.stride - first < block_size ? rows.stride : first + block_size;
    Floats amaxes = zero();
    Floats spoilt = zero();  // NaN where a value is infinite or NaN
    for (int64_t i = first; i < last; i += kLanes) {
      const Floats x = load(values + i);
      amaxes = max(abs(x), amaxes);
      spoilt = fma(x, zero(), spoilt);
    }
    const float amax = sum(spoilt) == 0.0f ? largest(amaxes) : __builtin_inff();
    const RowScale scale = row_scale(amax);
    for (int64_t begin = first; begin < last; begin += segment) {
      const int64_t end = last - begin < segment ? last : begin + segment;
      int32_t total = 0;
      for (int64_t i = begin; i < end; ++i) {
        // Position i of the codes is a column of the same 32, which the block or its neighbour half holds.
        const int64_t column = order == nullptr ? i : (i & ~int64_t{31}) + order[i & 31];
        const float nearest = __builtin_rintf(values[column] * scale.inverse);
        const int32_t code = amax <= 0x1.fffffep127f ? static_cast<int32_t>(nearest) : 0;
        codes[i] = static_cast<int8_t>(code);
        total += code;
      }
      const int64_t idx = row_idx * quantised.num_segments + begin / segment;
      quantised.scales[idx] = scale.scale;
      quantised.sums[idx] = static_cast<float>(total);
    }
  }
}

}  // namespace shoal::SHOAL_ISA
