// A checked call of matmul_fp8.
#pragma once

#include "shoal/cpu/product_rows.h"
#include "shoal/ops/matmul_fp8/matmul_fp8.h"

namespace shoal {

struct MatMulFp8Problem {
  MatMulFp8Args args;
  int64_t m = 0;  // rows of A
  int64_t n = 0;
  int64_t k = 0;
  int64_t k_blocks = 0;  // ceil(k / block_size)
  bool rounds_rows = false;
  float a_scale = 1.0f;
  int64_t y_stride = 0;
};

void matmul_fp8_ref(const MatMulFp8Problem& problem);

SHOAL_DECLARE_FOR_EACH_ISA(void matmul_fp8_prepare(const MatMulFp8Problem& problem, int64_t first, int64_t begin,
                                                   int64_t end, const cpu::ProductRows& rows))
SHOAL_DECLARE_FOR_EACH_ISA(void matmul_fp8_outputs(const MatMulFp8Problem& problem, const cpu::ProductRows& rows,
                                                   const cpu::ProductOut& out, int64_t begin, int64_t end))

}  // namespace shoal
