// Kernels of matmul_fp4 for one instruction set.
#include "shoal/base/float_bits.h"
#include "shoal/cpu/code_tiles.h"
#include "shoal/cpu/tile_product.h"
#include "shoal/ops/matmul_fp4/matmul_fp4_problem.h"

namespace shoal::SHOAL_ISA {

// Twice the e2m1 numbers plus 12: below 256 and not negative, as the unpacked codes must be.
alignas(16) constexpr uint8_t kShiftedNumbers[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

template <class T>
SHOAL_INLINE Floats rounded(Floats a);
template <>
SHOAL_INLINE Floats rounded<bf16>(Floats a) {
  // To nearest even in the bits; the NaN that a product makes has no low bits and stays one.
  const Words bits = as_words(a);
  const Words half = add_words(splat_word(0x7fff), shift_right<16>(bits) & splat_word(1));
  return as_floats(add_words(bits, half) & splat_word(0xffff0000));
}
template <>
SHOAL_INLINE Floats rounded<f16>(Floats a) {
#if defined(SHOAL_ISA_AVX512)
  return {_mm512_cvtph_ps(narrow_f16(a))};
#elif defined(SHOAL_ISA_AVX2)
  return {_mm256_cvtph_ps(narrow_f16(a))};
#else
  return each_lane([&](int i) { return f16_to_f32(f32_to_f16(a.v[i])); });
#endif
}

// kPerColumn: blocks that are no multiple of 16 columns have an entry for each column.
template <class T, bool kPerColumn>
class Fp4Weights {
 public:
  static constexpr int64_t kChunk = kCodeChunk;
  static constexpr bool kDirect = !kPerColumn;  // that one is rare: less code

  explicit Fp4Weights(const MatMulFp4Problem& problem)
      : problem_(problem),
        codes_{static_cast<const uint8_t*>(problem.args.B.data), problem.k / 2, problem.n},
        global_(splat(problem.global)) {}

  // Not inlined: it is long, and each of its callers would have a copy.
  [[gnu::noinline]] void load(int slot, int64_t n, int64_t k, int64_t count) {
    if (k == 0) {
      start_of_rows(codes_, n, starts_[slot]);
    }
    unpack_codes<4>(starts_[slot], codes_.row_bytes, k, count, words_[slot]);
    for (int64_t w = 0; w < count / 4; ++w) {
      uint32_t* word = words_[slot] + w * kLanes;
      store_words(word, look_up(load_words(word), kShiftedNumbers));
    }
    constexpr int64_t kStep = kPerColumn ? 1 : 16;
    for (int64_t p = 0; p < count; p += kStep) {
      const int64_t column = kPerColumn ? k + (p & ~int64_t{31}) + code_order<4>()[p & 31] : k + p;
      const int64_t block = column / problem_.args.block_size;
      read_entry(slot, p / kStep, n, block < problem_.k_blocks ? block : problem_.k_blocks - 1);
    }
  }

  SHOAL_INLINE void four(int slot, int64_t at, Floats (&w)[4]) const {
    Words codes[4];
    split_bytes(load_words(words_[slot] + at / 4 * kLanes), codes);
    for (int j = 0; j < 4; ++j) {
      const int64_t entry = kPerColumn ? at + j : at / 16;
      // Exact: a number of 5 bits times a scale of 4. Then the one product that rounds.
      const Floats block = (to_floats(codes[j]) - splat(12.0f)) * SHOAL_ISA::load(half_scales_[slot][entry]);
      w[j] = rounded<T>(block * global_);
    }
  }

  SHOAL_INLINE void expand(int slot, int64_t at, int64_t count, float* tile) const {
    for (int64_t i = 0; i < count; i += 4) {
      Floats w[4];
      four(slot, at + i, w);
      for (int j = 0; j < 4; ++j) {
        store(tile + (i + j) * kLanes, w[j]);
      }
    }
  }

 private:
  void read_entry(int slot, int64_t entry, int64_t n, int64_t block) {
    const uint8_t* from = static_cast<const uint8_t*>(problem_.args.weight_scale.data) + block;
    for (int lane = 0; lane < kLanes; ++lane) {
      const int64_t row = n + lane < problem_.n ? n + lane : problem_.n - 1;
      half_scales_[slot][entry][lane] = 0.5f * e4m3_to_f32(from[row * problem_.k_blocks]);
    }
  }

  const MatMulFp4Problem& problem_;
  CodeRows codes_;
  const uint8_t* starts_[kSlots][kLanes];
  Floats global_;
  alignas(64) uint32_t words_[kSlots][kChunkWords * kLanes];
  alignas(64) float half_scales_[kSlots][kPerColumn ? kCodeChunk : kCodeChunk / 16][kLanes];
};

template <class T>
static void outputs_of(const MatMulFp4Problem& p, const cpu::ProductRows& rows, const cpu::ProductOut& out,
                       int64_t begin, int64_t end) {
  if (p.args.block_size % 16 == 0) {
    Fp4Weights<T, false> weights(p);
    product_outputs(weights, rows, out, begin, end);
  } else {
    Fp4Weights<T, true> weights(p);
    product_outputs(weights, rows, out, begin, end);
  }
}

void matmul_fp4_outputs(const MatMulFp4Problem& problem, const cpu::ProductRows& rows, const cpu::ProductOut& out,
                        int64_t begin, int64_t end) {
  if (problem.args.A.dtype == DType::kF16) {
    outputs_of<f16>(problem, rows, out, begin, end);
  } else {
    outputs_of<bf16>(problem, rows, out, begin, end);
  }
}

void matmul_fp4_prepare(const MatMulFp4Problem& problem, int64_t first, int64_t begin, int64_t end,
                        const cpu::ProductRows& rows) {
  for (int64_t row_idx = begin; row_idx < end; ++row_idx) {
    prepare_row(problem.args.A, first + row_idx, code_order<4>(), rows.values + row_idx * rows.stride);
  }
}

}  // namespace shoal::SHOAL_ISA
