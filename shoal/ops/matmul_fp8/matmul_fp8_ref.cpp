// Reference of matmul_fp8: the formula, with sums in f64.
#include <vector>

#include "shoal/ops/element.h"
#include "shoal/ops/matmul_fp8/matmul_fp8_problem.h"

namespace shoal {
namespace {

double value_of(const MatMulFp8Problem& p, int64_t offset) {
  const DType type = p.args.A.dtype;
  const float value = read_element(type, p.args.A.data, offset);
  if (!p.rounds_rows) {
    return value;
  }
  uint32_t rounded = 0;  // room for any type
  write_element(type, &rounded, 0, e4m3_to_f32(f32_to_e4m3(value / p.a_scale)) * p.a_scale);
  return read_element(type, &rounded, 0);
}

}  // namespace

void matmul_fp8_ref(const MatMulFp8Problem& p) {
  const MatMulFp8Args& a = p.args;
  std::vector<double> weights(static_cast<size_t>(p.k));
  for (int64_t n = 0; n < p.n; ++n) {
    for (int64_t k = 0; k < p.k; ++k) {
      const float scale = a.b_scale.as<const float>()[n * p.k_blocks + k / a.block_size];
      weights[static_cast<size_t>(k)] = e4m3_to_f32(a.B.as<const uint8_t>()[n * p.k + k]) * scale;
    }
    for (int64_t row = 0; row < p.m; ++row) {
      const int64_t start = cpu::row_offset(a.A, row);
      double sum = 0.0;
      for (int64_t k = 0; k < p.k; ++k) {
        sum += value_of(p, start + k * a.A.stride(a.A.rank - 1)) * weights[static_cast<size_t>(k)];
      }
      if (a.bias) {
        sum += static_cast<double>(read_element(a.bias.dtype, a.bias.data, n));
      }
      write_element(a.Y.dtype, a.Y.data, row * p.y_stride + n, static_cast<float>(sum));
    }
  }
}

}  // namespace shoal
