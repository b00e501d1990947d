// Reference of matmul_fp4: the formula, with sums in f64.
#include <vector>

#include "shoal/ops/element.h"
#include "shoal/ops/matmul_fp4/matmul_fp4_problem.h"
#include "shoal/quant/code_stream.h"
#include "shoal/quant/nvfp4.h"

namespace shoal {

void matmul_fp4_ref(const MatMulFp4Problem& p) {
  const MatMulFp4Args& a = p.args;
  std::vector<double> weights(static_cast<size_t>(p.k));
  for (int64_t n = 0; n < p.n; ++n) {
    for (int64_t k = 0; k < p.k; ++k) {
      const float number = NVFP4::number(read_code(a.B.as<const std::byte>() + n * (p.k / 2), 4, k));
      const float scale = NVFP4::scale(DType::kU8, a.weight_scale.data, n * p.k_blocks + k / a.block_size);
      uint32_t rounded = 0;  // room for any type
      write_element(a.A.dtype, &rounded, 0, number * scale * p.global);
      weights[static_cast<size_t>(k)] = read_element(a.A.dtype, &rounded, 0);
    }
    for (int64_t row = 0; row < p.m; ++row) {
      const int64_t start = cpu::row_offset(a.A, row);
      double sum = 0.0;
      for (int64_t k = 0; k < p.k; ++k) {
        const double value = read_element(a.A.dtype, a.A.data, start + k * a.A.stride(a.A.rank - 1));
        sum += value * weights[static_cast<size_t>(k)];
      }
      if (a.bias) {
        sum += static_cast<double>(read_element(a.bias.dtype, a.bias.data, n));
      }
      write_element(a.Y.dtype, a.Y.data, row * p.y_stride + n, static_cast<float>(sum));
    }
  }
}

}  // namespace shoal
