// Reference of matmul_packed: the formula, with sums in f64.
#include <cmath>
#include <vector>

#include "shoal/ops/element.h"
#include "shoal/ops/matmul_packed/matmul_packed_problem.h"

namespace shoal {
namespace {

float rounded(DType type, float value) {
  uint32_t storage = 0;
  write_element(type, &storage, 0, value);
  return read_element(type, &storage, 0);
}

float activated(PackedActivation activation, float y) {
  switch (activation) {
    case PackedActivation::kNone: return y;
    case PackedActivation::kRelu2: return y < 0.0f ? 0.0f : y * y;
    case PackedActivation::kSilu: return static_cast<float>(y / (1.0 + std::exp(-static_cast<double>(y))));
  }
  return y;
}

}  // namespace

void matmul_packed_ref(const MatMulPackedProblem& p) {
  const MatMulPackedArgs& a = p.args;
  std::vector<float> weights(static_cast<size_t>(a.K));
  for (int64_t n = 0; n < a.N; ++n) {
    decode_row(p.format, a.B.as<const std::byte>() + n * p.row_bytes, a.K, weights.data());
    for (float& weight : weights) {
      weight = p.rounds_weights ? rounded(a.A.dtype, weight) : weight;
    }
    for (int64_t row = 0; row < p.m; ++row) {
      const int64_t start = cpu::row_offset(a.A, row);
      double sum = 0.0;
      for (int64_t k = 0; k < a.K; ++k) {
        const double value = read_element(a.A.dtype, a.A.data, start + k * a.A.stride(a.A.rank - 1));
        sum += value * static_cast<double>(weights[static_cast<size_t>(k)]);
      }
      const float y = rounded(a.A.dtype, static_cast<float>(sum * static_cast<double>(p.global)));
      write_element(a.Y.dtype, a.Y.data, row * p.y_stride + n, activated(p.activation, y));
    }
  }
}

}  // namespace shoal
