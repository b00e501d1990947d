// A checked call of matmul_fp4.
#pragma once

#include "shoal/cpu/product_rows.h"
#include "shoal/ops/matmul_fp4/matmul_fp4.h"

namespace shoal {

struct MatMulFp4Problem {
  MatMulFp4Args args;
  int64_t m = 0;  // rows of A
  int64_t n = 0;
  int64_t k = 0;
  int64_t k_blocks = 0;  // ceil(k / block_size)
  float global = 1.0f;   // weight_scale_2
  int64_t y_stride = 0;
};

void matmul_fp4_ref(const MatMulFp4Problem& problem);

SHOAL_DECLARE_FOR_EACH_ISA(void matmul_fp4_prepare(const MatMulFp4Problem& problem, int64_t first, int64_t begin,
                                                   int64_t end, const cpu::ProductRows& rows))
SHOAL_DECLARE_FOR_EACH_ISA(void matmul_fp4_outputs(const MatMulFp4Problem& problem, const cpu::ProductRows& rows,
                                                   const cpu::ProductOut& out, int64_t begin, int64_t end))

}  // namespace shoal
