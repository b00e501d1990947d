// A checked call of matmul_packed.
#pragma once

#include "shoal/cpu/product_rows.h"
#include "shoal/ops/matmul_packed/matmul_packed.h"
#include "shoal/quant/format.h"

namespace shoal {

enum class PackedActivation : uint8_t { kNone, kRelu2, kSilu };

struct MatMulPackedProblem {
  MatMulPackedArgs args;
  Format format = Format::kQ4_0;
  PackedActivation activation = PackedActivation::kNone;
  int64_t m = 0;  // rows of A
  int64_t row_bytes = 0;
  int64_t block_size = 0;
  int64_t block_bytes = 0;
  bool rounds_weights = true;  // to A's type
  float global = 1.0f;
  int64_t y_stride = 0;
};

void matmul_packed_ref(const MatMulPackedProblem& problem);

SHOAL_DECLARE_FOR_EACH_ISA(void matmul_packed_prepare(const MatMulPackedProblem& problem, int64_t first, int64_t begin,
                                                      int64_t end, const cpu::ProductRows& rows))
SHOAL_DECLARE_FOR_EACH_ISA(void matmul_packed_outputs(const MatMulPackedProblem& problem, const cpu::ProductRows& rows,
                                                      const cpu::ProductOut& out, int64_t begin, int64_t end))

}  // namespace shoal
