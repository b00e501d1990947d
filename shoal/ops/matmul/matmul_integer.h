// Integer kernels of AVX2 and AVX-512: int8 activations, codes as stored (see IntegerLayout), one output a lane.
//
// Sums of a block are exact in int32, so the order inside a block is free; blocks are added in ascending order:
//   acc = fma(d * a.scale, sum, acc), then for formats with a minimum acc = fma(m, a.sum, acc).
// Included only by matmul_cpu.cpp.
#pragma once

#include "shoal/ops/matmul/matmul_layout.h"
#include "shoal/ops/matmul/matmul_simd.h"

#define SHOAL_INLINE_LAMBDA __attribute__((always_inline))
#define SHOAL_INLINE_MEMBER [[gnu::always_inline]] inline

namespace shoal::SHOAL_ISA {
namespace {

constexpr int kVector = 4 * kGroup;  // bytes

template <Format kFormat>
struct Codec {
  static constexpr IntegerLayout kLayout = *integer_layout(kFormat);
  static constexpr bool kSuper = kLayout.blocks_per_scale() > 1;
  static constexpr bool kHasMin = kLayout.scales == ScaleKind::kScaleMin || kLayout.scales == ScaleKind::kSuperMin;
  static constexpr bool kHalfMin = kLayout.scales == ScaleKind::kSuperHalfMin;  // a minimum for each half
  static constexpr bool kHalves = kLayout.scales == ScaleKind::kSuperHalf || kHalfMin;
  static constexpr bool kSigned = kLayout.low_bits == 8 || kLayout.table != CodeTable::kNone;

#if defined(SHOAL_ISA_AVX512)
  // vpdpbusd wants unsigned codes: signed ones are stored or looked up with 128 added.
  static constexpr int kOffset = kSigned ? 128 : kLayout.offset;
#else
  static constexpr int kOffset = kLayout.offset;
#endif
  static constexpr int kOffsetLog2 = kOffset == 0 ? 0 : __builtin_ctz(kOffset);
  static_assert(kOffset == 0 || kOffset == 1 << kOffsetLog2);

  // Scales of the current block.
  F d;
  F min;
  I pairs;  // 16-bit lanes [output][2]
  I mins;   // the same, of kHalfMin

  SHOAL_INLINE Codec read_scales(const std::byte* scales, int64_t block_idx) {
    Codec codec;
    const std::byte* at = scales + block_idx / kLayout.blocks_per_scale() * kLayout.scale_bytes() * kGroup;
    const auto* halves = reinterpret_cast<const uint16_t*>(at);
    codec.d = load_f16(halves);
    if constexpr (kLayout.scales == ScaleKind::kScaleMin) {
      codec.min = load_f16(halves + kGroup);
    } else if constexpr (kLayout.scales == ScaleKind::kSuperMin) {
      codec.pairs = load_pairs_u8(at + 4 * kGroup + block_idx % 8 * 2 * kGroup);
      codec.min = mul(load_f16(halves + kGroup), to_float(shift_32<-16>(codec.pairs)));
    } else if constexpr (kLayout.scales == ScaleKind::kSuperHalf) {
      codec.pairs = load_pairs_i8(at + 2 * kGroup + block_idx % 8 * 2 * kGroup);
    } else if constexpr (kHalfMin) {
      const I both = load_pairs_u8(at + 4 * kGroup + block_idx % 8 * 2 * kGroup);
      codec.pairs = bit_and(both, broadcast_i32(0x000f000f));
      codec.mins = shift_16<-4>(both);
      codec.min = load_f16(halves + kGroup);
    }
    return codec;
  }

  // Sum over the block of minimum * factor * activation, exact.
  SHOAL_INLINE_MEMBER F min_sum(const QuantBlock& block) const {
    int32_t half_sums;
    std::memcpy(&half_sums, block.half_sums, 4);
    return to_float(madd_16(mins, broadcast_i32(half_sums)));
  }

  // Codes of step J of the block at `codes`: unsigned, or signed bytes on AVX2 if kSigned.
  template <int J>
  SHOAL_INLINE I step(const std::byte* codes) {
    if constexpr (kLayout.low_bits == 8) {
      const I code = load_int(codes + J * kVector);
      return kOffset == 128 ? bit_xor(code, broadcast_i8(0x80)) : code;
    } else {
      constexpr int kLow = kLayout.low_bits;  // bits, and vectors
      const I packed = load_int(codes + J % kLow * kVector);
      I code = bit_and(J < kLow ? packed : shift_16<-(J / kLow * kLow)>(packed), broadcast_i8((1 << kLow) - 1));
      if constexpr (kLayout.high_bits == 1) {
        code = bit_or(code, bit_and(shift_16<kLow - J>(load_int(codes + kLow * kVector)), broadcast_i8(1 << kLow)));
      } else if constexpr (kLayout.high_bits == 2) {
        const I high = load_int(codes + (4 + J / 4) * kVector);
        code = bit_or(code, bit_and(shift_16<4 - 2 * (J % 4)>(high), broadcast_i8(0x30)));
      } else if constexpr (kLayout.table != CodeTable::kNone) {
        code = shuffle_bytes(broadcast_16_bytes(table_bytes(kLayout.table)), code);
        code = kOffset == 128 ? bit_xor(code, broadcast_i8(0x80)) : code;
      }
      return code;
    }
  }
};

SHOAL_INLINE I broadcast_4_codes(const int8_t* codes) {
  int32_t four;
  std::memcpy(&four, codes, 4);
  return broadcast_i32(four);
}

// Codes of a tile's rows, `stride` bytes apart. Spread: every four codes stand in all lanes of a vector of their own,
// so that a kernel loads where it would broadcast.
template <bool kSpread>
struct Activations {
  static constexpr int kStepBytes = kSpread ? kVector : 4;
  static constexpr int kBlockBytes = 8 * kStepBytes;
  const int8_t* codes;
  int64_t stride;
  template <int kStep>
  SHOAL_INLINE_MEMBER I get(int row) const {
    const int8_t* at = codes + row * stride + kStep * kStepBytes;
    return kSpread ? load_int(at) : broadcast_4_codes(at);
  }
};

#if defined(SHOAL_ISA_AVX512)

// sums[r] = sum over the block of (code - offset) * factor * activation, times the integer scales where the format has
// them; rounded to f32 once.
//
// Every number of it but the product with the scale is a whole number below 2^24: 255 * 127 * 32 products * 16 of the
// factor. So the sums of the halves are joined in f32, exactly, where vpmulld would take two instructions on one port.
// Where the halves have scales of their own that would round twice, and int32 stays.
template <Format kFormat, int kNumRows, bool kSpread>
[[gnu::always_inline]] inline void block_sums(const Codec<kFormat>& codec, const std::byte* codes,
                                              const Activations<kSpread>& a, const QuantBlock* blocks,
                                              int64_t blocks_stride, F (&sums)[kNumRows]) {
  using Codes = Codec<kFormat>;
  I whole[kNumRows];
  unroll<2>([&](auto half) SHOAL_INLINE_LAMBDA {
    I partial[kNumRows];
    for (int r = 0; r < kNumRows; ++r) {
      if constexpr (Codes::kOffset != 0) {
        partial[r] = shift_32<Codes::kOffsetLog2>(broadcast_i32(blocks[r * blocks_stride].minus_codes[half.value]));
      } else {
        partial[r] = zero_int();
      }
    }
    unroll<4>([&](auto step) SHOAL_INLINE_LAMBDA {
      constexpr int kStep = half.value * 4 + step.value;
      const I code = Codes::template step<kStep>(codes);
      for (int r = 0; r < kNumRows; ++r) {
        // u8 times s8, four products added to an int32 without saturation.
        partial[r] = _mm512_dpbusd_epi32(partial[r], code, a.template get<kStep>(r));
      }
    });
    I scale;
    if constexpr (Codes::kHalves) {
      scale = _mm512_srai_epi32(half.value == 0 ? shift_32<16>(codec.pairs) : codec.pairs, 16);
    }
    for (int r = 0; r < kNumRows; ++r) {
      const QuantBlock& block = blocks[r * blocks_stride];
      if constexpr (!Codes::kHalves) {
        const F factor = broadcast(block.factors[half.value]);
        const F sum = to_float(partial[r]);
        sums[r] = half.value == 0 ? mul(sum, factor) : fma(sum, factor, sums[r]);
      } else {
        const I factor = broadcast_i32(block.factor_pairs[half.value] & 0xffff);
        const I product = _mm512_mullo_epi32(_mm512_mullo_epi32(partial[r], factor), scale);
        whole[r] = half.value == 0 ? product : add_32(whole[r], product);
      }
    }
  });
  for (int r = 0; r < kNumRows; ++r) {
    if constexpr (Codes::kHalves) {
      sums[r] = to_float(whole[r]);
    } else if constexpr (Codes::kSuper) {
      sums[r] = mul(sums[r], to_float(bit_and(codec.pairs, broadcast_i32(0xffff))));
    }
  }
}

#else

// The same on AVX2, where vpmaddubsw adds two products in int16 with saturation. How many of its results may be added
// before widening, with activations in [-127, 127]:
//   codes to 15   |pair| <= 15 * 127 * 2 =  3810; 4 of them (a half) 15240 <= 32767
//   codes to 31   |pair| <= 31 * 127 * 2 =  7874; 4 of them 31496
//   codes to 63   |pair| <= 63 * 127 * 2 = 16002; 2 of them 32004
//   signed bytes, as |code| times sign(code) * activation: |pair| <= 128 * 127 * 2 = 32512, 1
template <Format kFormat>
constexpr int kChain = Codec<kFormat>::kSigned ? 1
                       : Codec<kFormat>::kLayout.high_bits < 2 ? 4
                                                               : 2;

// Widening multiplies by the activations' factor and the integer scale of the half, |product| <= 128 * 16, the same in
// both 16-bit lanes of an output.
template <Format kFormat>
SHOAL_INLINE I weight_factor(const Codec<kFormat>& codec, int half) {
  using Codes = Codec<kFormat>;
  if constexpr (!Codes::kSuper) {
    return zero_int();  // not used
  } else if (Codes::kHalves && half == 1) {
    return bit_or(shift_32<-16>(codec.pairs), bit_and(codec.pairs, broadcast_i32(static_cast<int32_t>(0xffff0000))));
  } else {
    return bit_or(shift_32<16>(codec.pairs), bit_and(codec.pairs, broadcast_i32(0xffff)));
  }
}

template <Format kFormat, int kNumRows, bool kSpread>
[[gnu::always_inline]] inline void block_sums(const Codec<kFormat>& codec, const std::byte* codes,
                                              const Activations<kSpread>& a, const QuantBlock* blocks,
                                              int64_t blocks_stride, F (&rounded)[kNumRows]) {
  using Codes = Codec<kFormat>;
  constexpr int kLength = kChain<kFormat>;
  I sums[kNumRows];
  unroll<8 / kLength>([&](auto chain) SHOAL_INLINE_LAMBDA {
    I partial[kNumRows];
    unroll<kLength>([&](auto link) SHOAL_INLINE_LAMBDA {
      constexpr int kStep = chain.value * kLength + link.value;
      const I code = Codes::template step<kStep>(codes);
      for (int r = 0; r < kNumRows; ++r) {
        const I activations = a.template get<kStep>(r);
        const I products = Codes::kSigned
                               ? _mm256_maddubs_epi16(_mm256_abs_epi8(code), _mm256_sign_epi8(activations, code))
                               : _mm256_maddubs_epi16(code, activations);
        partial[r] = link.value == 0 ? products : _mm256_add_epi16(partial[r], products);
        // Compilers turn the chain into a tree of all products, which takes 32 registers. Opaque, it stays a chain.
        asm("" : "+x"(partial[r]));
      }
    });
    constexpr int kHalf = chain.value * kLength / 4;
    const I weight = weight_factor(codec, kHalf);
    for (int r = 0; r < kNumRows; ++r) {
      I factor = broadcast_i32(blocks[r * blocks_stride].factor_pairs[kHalf]);
      if constexpr (Codes::kSuper) {
        factor = _mm256_mullo_epi16(factor, weight);
      }
      const I wide = _mm256_madd_epi16(partial[r], factor);
      sums[r] = chain.value == 0 ? wide : add_32(sums[r], wide);
    }
  });
  if constexpr (Codes::kOffset != 0) {
    for (int r = 0; r < kNumRows; ++r) {
      const QuantBlock& block = blocks[r * blocks_stride];
      I offset;
      if constexpr (Codes::kHalves) {
        int32_t half_sums;
        std::memcpy(&half_sums, block.half_sums, 4);
        offset = _mm256_madd_epi16(codec.pairs, broadcast_i32(half_sums));
      } else {
        offset = broadcast_i32(block.total);
      }
      sums[r] = sub_32(sums[r], shift_32<Codes::kOffsetLog2>(offset));
    }
  }
  for (int r = 0; r < kNumRows; ++r) {
    rounded[r] = to_float(sums[r]);
  }
}

#endif

// Codes and scales of a group are two streams of a few KiB, too short for the hardware to follow from group to group.
// Groups are adjacent, so fetching a fixed distance ahead of both streams covers all of the next ones. k = 576, one
// row, one core of a Zen 1: 5.8 GB/s without, 7.2, 10.3 and 10.8 GB/s at 1, 2 and 4 KiB; plain reading 9 to 12.
constexpr int64_t kPrefetchBytes = 4096;
constexpr int64_t kMaxColdRows = 16;  // beyond, products take longer than the weights take to come

SHOAL_INLINE void prefetch_ahead(const std::byte* at, int num_bytes) {
  for (int line = 0; line < num_bytes; line += 64) {
    _mm_prefetch(reinterpret_cast<const char*>(at) + kPrefetchBytes + line, _MM_HINT_T0);
  }
}

// Rows [row_idx, row_idx + kNumRows) of one group.
template <Format kFormat, int kNumRows, bool kSpread>
void integer_tile(const MatmulPart& part, const MatmulRows& rows, const QuantRows& quant, Activations<kSpread> a,
                  int64_t row_idx, int64_t group_idx) {
  using Codes = Codec<kFormat>;
  constexpr int kCodeBytes = Codes::kLayout.code_bytes() * kGroup;
  constexpr int kScaleBytes = Codes::kLayout.scale_bytes() * kGroup / Codes::kLayout.blocks_per_scale();
  const int64_t num_blocks = rows.k / kQuantBlock;
  const std::byte* codes = part.packed.data() + group_idx * static_cast<int64_t>(part.group_bytes);
  const std::byte* scales = codes + code_region_bytes(Codes::kLayout, rows.k, kGroup);
  const QuantBlock* blocks = quant.blocks + row_idx * num_blocks;
  const bool cold = rows.m <= kMaxColdRows;
  F acc[kNumRows];
  for (F& sum : acc) {
    sum = zero();
  }
  for (int64_t b = 0; b < num_blocks; ++b) {
    if (cold) {
      prefetch_ahead(codes, kCodeBytes);
      prefetch_ahead(scales + b * kScaleBytes, kScaleBytes);
    }
    const Codes codec = Codes::read_scales(scales, b);
    F sums[kNumRows];
    block_sums<kFormat, kNumRows>(codec, codes, a, blocks, num_blocks, sums);
    for (int r = 0; r < kNumRows; ++r) {
      const QuantBlock& block = blocks[r * num_blocks];
      acc[r] = fma(mul(codec.d, broadcast(block.scale)), sums[r], acc[r]);
      if constexpr (Codes::kHalfMin) {
        acc[r] = neg_fma(mul(codec.min, broadcast(block.scale)), codec.min_sum(block), acc[r]);
      } else if constexpr (Codes::kHasMin) {
        const F sum = broadcast(block.sum);
        acc[r] = Codes::kSuper ? neg_fma(codec.min, sum, acc[r]) : fma(codec.min, sum, acc[r]);
      }
    }
    codes += kCodeBytes;
    a.codes += Activations<kSpread>::kBlockBytes;
    blocks += 1;
  }
  for (int r = 0; r < kNumRows; ++r) {
    store_outputs(part, rows, row_idx + r, group_idx, acc[r]);
  }
}

// Rows [begin, end) of one group, in tiles of the largest sizes.
template <Format kFormat, int kNumRows>
void integer_rows(const MatmulPart& part, const MatmulRows& rows, const QuantRows& quant, int64_t begin, int64_t end,
                  int64_t group_idx) {
  for (; begin + kNumRows <= end; begin += kNumRows) {
    const Activations<false> a{quant.codes + begin * rows.k, rows.k};
    integer_tile<kFormat, kNumRows>(part, rows, quant, a, begin, group_idx);
  }
  if constexpr (kNumRows > 1) {
    integer_rows<kFormat, kNumRows / 2>(part, rows, quant, begin, end, group_idx);
  }
}

#if defined(SHOAL_ISA_AVX512)

constexpr int kIntegerRows = 8;  // 8 sums and 8 accumulators of 32 registers

#else

constexpr int kIntegerRows = kSpreadRows;   // 4 sums and 4 accumulators of 16 registers
constexpr int64_t kChunkBytes = 128 << 10;  // weights that stay in L2 while the rows pass
constexpr int64_t kFewestGroups = 8;        // for which spreading a tile pays

SHOAL_INLINE void spread_codes(const int8_t* codes, int64_t num_codes, int8_t* spread) {
  for (int64_t i = 0; i < num_codes; i += 4) {
    _mm256_store_si256(reinterpret_cast<__m256i*>(spread + i / 4 * kVector), broadcast_4_codes(codes + i));
  }
}

// Full tiles of rows; returns how many rows are done. On Zen 1 broadcasts take arithmetic units: with k = 576 and q4_1
// tiles reach 66 % of what vpmaddubsw alone would allow, 60 % without spreading; k = 4096, beyond L1, is even. Formats
// of signed codes gain nothing: they widen every product.
template <Format kFormat>
int64_t spread_tiles(const MatmulPart& part, const MatmulRows& rows, const QuantRows& quant, int64_t begin,
                     int64_t end) {
  const int64_t num_rows = rows.m / kIntegerRows * kIntegerRows;
  const int64_t row_bytes = rows.k / 4 * kVector;
  for (int64_t row = 0; row < num_rows; row += kIntegerRows) {
    spread_codes(quant.codes + row * rows.k, kIntegerRows * rows.k, quant.spread);
    for (int64_t g = begin; g < end; ++g) {
      integer_tile<kFormat, kIntegerRows>(part, rows, quant, Activations<true>{quant.spread, row_bytes}, row, g);
    }
  }
  return num_rows;
}

#endif

constexpr int64_t kRowBlock = 64;  // rows whose codes stay in L2 while the groups pass: 96 KiB at k = 1536

template <Format kFormat>
void integer_groups(const MatmulPart& part, const MatmulRows& rows, const QuantRows& quant, int64_t begin,
                    int64_t end) {
#if defined(SHOAL_ISA_AVX2)
  if (rows.m == 1 && end - begin >= kFewestGroups) {  // decode of q2_k 13 %, of q4_1 8 % faster than with broadcasts
    spread_codes(quant.codes, rows.k, quant.spread);
    for (int64_t g = begin; g < end; ++g) {
      integer_tile<kFormat, 1>(part, rows, quant, Activations<true>{quant.spread, 0}, 0, g);
    }
    return;
  }
  if (!Codec<kFormat>::kSigned && rows.m >= kIntegerRows && end - begin >= kFewestGroups) {
    const int64_t fitting = kChunkBytes / static_cast<int64_t>(part.group_bytes);
    const int64_t step = fitting > kFewestGroups ? fitting : kFewestGroups;
    for (int64_t chunk = begin; chunk < end; chunk += step) {
      const int64_t chunk_end = chunk + step < end ? chunk + step : end;
      const int64_t row = spread_tiles<kFormat>(part, rows, quant, chunk, chunk_end);
      for (int64_t g = chunk; g < chunk_end; ++g) {
        integer_rows<kFormat, kIntegerRows / 2>(part, rows, quant, row, rows.m, g);
      }
    }
    return;
  }
#endif
  for (int64_t block = 0; block < rows.m; block += kRowBlock) {
    const int64_t block_end = block + kRowBlock < rows.m ? block + kRowBlock : rows.m;
    for (int64_t g = begin; g < end; ++g) {
      integer_rows<kFormat, kIntegerRows>(part, rows, quant, block, block_end, g);
    }
  }
}

// Eight values at a time; the same bits as the scalar form.
void quantize_row(const float* a, int64_t k, int8_t* codes, QuantBlock* blocks) {
  const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
  for (int64_t b = 0; b < k / kQuantBlock; ++b) {
    __m256 x[4];
    // Magnitudes of floats order like their bits, with infinity and NaN on top.
    __m128i tops[2];
    for (int half = 0; half < 2; ++half) {
      __m256i largest = _mm256_setzero_si256();
      for (int i = 2 * half; i < 2 * half + 2; ++i) {
        x[i] = _mm256_loadu_ps(a + b * kQuantBlock + 8 * i);
        largest = _mm256_max_epi32(largest, _mm256_and_si256(_mm256_castps_si256(x[i]), magnitude));
      }
      __m128i top = _mm_max_epi32(_mm256_castsi256_si128(largest), _mm256_extracti128_si256(largest, 1));
      top = _mm_max_epi32(top, _mm_shuffle_epi32(top, 0x4e));
      tops[half] = _mm_max_epi32(top, _mm_shuffle_epi32(top, 0xb1));
    }
    const QuantScale scale = quant_scale(__builtin_bit_cast(float, _mm_cvtsi128_si32(tops[0])),
                                         __builtin_bit_cast(float, _mm_cvtsi128_si32(tops[1])));
    __m256i rounded[4];
    for (int i = 0; i < 4; ++i) {
      rounded[i] = _mm256_cvtps_epi32(_mm256_mul_ps(x[i], _mm256_set1_ps(scale.inverses[i / 2])));  // to nearest even
    }
    // Packing works inside 128-bit halves: undone by the last permutation.
    const __m256i words = _mm256_packs_epi32(rounded[0], rounded[1]);
    const __m256i words2 = _mm256_packs_epi32(rounded[2], rounded[3]);
    const __m256i bytes =
        _mm256_permutevar8x32_epi32(_mm256_packs_epi16(words, words2), _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes + b * kQuantBlock), bytes);
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), bytes);
    __m256i sums = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
    sums = _mm256_add_epi32(sums, _mm256_shuffle_epi32(sums, 0x4e));
    sums = _mm256_add_epi32(sums, _mm256_shuffle_epi32(sums, 0xb1));
    blocks[b] = quant_block(scale, _mm256_extract_epi32(sums, 0), _mm256_extract_epi32(sums, 4));
  }
}

}  // namespace
}  // namespace shoal::SHOAL_ISA
