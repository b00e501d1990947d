// Kernels of matmul_fp8 for one instruction set.
#include "shoal/base/float_bits.h"
#include "shoal/cpu/code_tiles.h"
#include "shoal/cpu/tile_product.h"
#include "shoal/ops/matmul_fp8/matmul_fp8_problem.h"

namespace shoal::SHOAL_ISA {

// e4m3 bytes as f32: exponent and mantissa in their places give the number times 2^-120, subnormal ones too.
SHOAL_INLINE Floats e4m3_numbers(Words bytes) {
  const Words magnitude = bytes & splat_word(0x7f);
  const Words nan = all_ones_where_equal(magnitude, splat_word(0x7f));
  const Words sign = shift_left<24>(bytes & splat_word(0x80));
  return as_floats(shift_left<20>(magnitude) | sign | nan) * splat(0x1p120f);
}

// kPerColumn: blocks that are no multiple of 16 columns have an entry for each column.
template <bool kPerColumn>
class Fp8Weights {
 public:
  static constexpr int64_t kChunk = kCodeChunk;
  static constexpr bool kDirect = !kPerColumn;  // that one is rare: less code

  explicit Fp8Weights(const MatMulFp8Problem& problem)
      : problem_(problem), codes_{static_cast<const uint8_t*>(problem.args.B.data), problem.k, problem.n} {}

  // Not inlined: it is long, and each of its callers would have a copy.
  [[gnu::noinline]] void load(int slot, int64_t n, int64_t k, int64_t count) {
    if (k == 0) {
      start_of_rows(codes_, n, starts_[slot]);
    }
    unpack_codes<8>(starts_[slot], codes_.row_bytes, k, count, words_[slot]);
    constexpr int64_t kStep = kPerColumn ? 1 : 16;
    for (int64_t p = 0; p < count; p += kStep) {
      const int64_t block = (k + p) / problem_.args.block_size;
      const int64_t inside = block < problem_.k_blocks ? block : problem_.k_blocks - 1;
      const float* from = static_cast<const float*>(problem_.args.b_scale.data) + inside;
      for (int lane = 0; lane < kLanes; ++lane) {
        const int64_t row = n + lane < problem_.n ? n + lane : problem_.n - 1;
        scales_[slot][p / kStep][lane] = from[row * problem_.k_blocks];
      }
    }
  }

  SHOAL_INLINE void four(int slot, int64_t at, Floats (&w)[4]) const {
    Words codes[4];
    split_bytes(load_words(words_[slot] + at / 4 * kLanes), codes);
    for (int j = 0; j < 4; ++j) {
      w[j] = e4m3_numbers(codes[j]) * SHOAL_ISA::load(scales_[slot][kPerColumn ? at + j : at / 16]);
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
  const MatMulFp8Problem& problem_;
  CodeRows codes_;
  const uint8_t* starts_[kSlots][kLanes];
  alignas(64) uint32_t words_[kSlots][kChunkWords * kLanes];
  alignas(64) float scales_[kSlots][kPerColumn ? kCodeChunk : kCodeChunk / 16][kLanes];
};

void matmul_fp8_outputs(const MatMulFp8Problem& problem, const cpu::ProductRows& rows, const cpu::ProductOut& out,
                        int64_t begin, int64_t end) {
  if (problem.args.block_size % 16 == 0) {
    Fp8Weights<false> weights(problem);
    product_outputs(weights, rows, out, begin, end);
  } else {
    Fp8Weights<true> weights(problem);
    product_outputs(weights, rows, out, begin, end);
  }
}

void matmul_fp8_prepare(const MatMulFp8Problem& problem, int64_t first, int64_t begin, int64_t end,
                        const cpu::ProductRows& rows) {
  for (int64_t row_idx = begin; row_idx < end; ++row_idx) {
    float* values = rows.values + row_idx * rows.stride;
    prepare_row(problem.args.A, first + row_idx, nullptr, values);
    if (!problem.rounds_rows) {
      continue;
    }
    const bool is_f16 = problem.args.A.dtype == DType::kF16;
    for (int64_t k = 0; k < problem.k; ++k) {
      const float value = e4m3_to_f32(f32_to_e4m3(values[k] / problem.a_scale)) * problem.a_scale;
      values[k] = is_f16 ? f16_to_f32(f32_to_f16(value)) : bf16_to_f32(f32_to_bf16(value));
    }
  }
}

}  // namespace shoal::SHOAL_ISA
