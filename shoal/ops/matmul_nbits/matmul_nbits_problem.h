// A checked call of matmul_nbits: sizes and what the kernels of every instruction set share.
#pragma once

#include "shoal/cpu/product_rows.h"
#include "shoal/ops/matmul_nbits/matmul_nbits.h"

namespace shoal {

struct MatMulNBitsProblem {
  MatMulNBitsArgs args;
  int64_t m = 0;         // rows of A
  int64_t k_blocks = 0;  // ceil(K / block_size)
  int64_t row_bytes = 0;
  bool is_empty = false;        // B is omitted
  bool packed_zeros = false;    // zero_points are u8
  bool quantises_rows = false;  // accuracy_level 4 without g_idx
  int64_t y_stride = 0;

  float default_zero() const { return static_cast<float>(1 << (args.bits - 1)); }
};

// int8 activations of accuracy_level 4. A segment is what shares a scale and a sum in int32: a block, or 128 columns of
// a longer one.
struct QuantisedRows {
  int8_t* codes = nullptr;  // [count, stride], positions as in ProductRows
  float* scales = nullptr;  // [count, num_segments]
  float* sums = nullptr;    // [count, num_segments], of the codes
  int64_t num_segments = 0;
};

constexpr int64_t kNBitsSegment = 128;

inline int64_t segment_size(const MatMulNBitsProblem& problem) {
  return problem.args.block_size < kNBitsSegment ? problem.args.block_size : kNBitsSegment;
}

// scale = amax / 127; `inverse` is what values are multiplied by. NaN and 0 where a value is not finite.
struct RowScale {
  float scale;
  float inverse;
};
[[gnu::always_inline]] inline RowScale row_scale(float amax) {
  if (!(amax <= 0x1.fffffep127f)) {
    return {__builtin_nanf(""), 0.0f};
  }
  if (amax < 0x1p-120f) {  // 127 / amax would overflow: such a block counts as zero
    return {0.0f, 0.0f};
  }
  return {amax / 127.0f, 127.0f / amax};
}

void matmul_nbits_ref(const MatMulNBitsProblem& problem);

// Makes rows first + [begin, end) of A ready in rows.values + ... (and, for accuracy_level 4, in `quantised`).
SHOAL_DECLARE_FOR_EACH_ISA(void matmul_nbits_prepare(const MatMulNBitsProblem& problem, int64_t first, int64_t begin,
                                                     int64_t end, const cpu::ProductRows& rows,
                                                     const QuantisedRows& quantised))
// Outputs [begin, end) of the rows.
SHOAL_DECLARE_FOR_EACH_ISA(void matmul_nbits_outputs(const MatMulNBitsProblem& problem, const cpu::ProductRows& rows,
                                                     const QuantisedRows& quantised, const cpu::ProductOut& out,
                                                     int64_t begin, int64_t end))

}  // namespace shoal
