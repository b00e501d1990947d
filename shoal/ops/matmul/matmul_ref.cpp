// The definition of right: sums in f64 over decoded rows.
#include <cmath>
#include <vector>

#include "shoal/ops/matmul/matmul_layout.h"
#include "shoal/ops/matmul/matmul_pack.h"

namespace shoal {
namespace {

// A row of activations as the integer kernels see it: int8 codes times the scale of their half of a block.
std::vector<double> quantised(const float* a, int64_t k) {
  std::vector<double> values(static_cast<size_t>(k));
  for (int64_t b = 0; b < k; b += kQuantBlock) {
    float amax[2] = {0.0f, 0.0f};
    bool finite = true;
    for (int64_t i = 0; i < kQuantBlock; ++i) {
      finite = finite && std::isfinite(a[b + i]);
      amax[i / kQuantHalf] = std::fmax(amax[i / kQuantHalf], std::fabs(a[b + i]));
    }
    const QuantScale scale = quant_scale(finite ? amax[0] : std::numeric_limits<float>::quiet_NaN(), amax[1]);
    for (int64_t i = 0; i < kQuantBlock; ++i) {
      const int64_t half = i / kQuantHalf;
      const double code = finite ? static_cast<double>(std::nearbyint(a[b + i] * scale.inverses[half])) : 0.0;
      values[static_cast<size_t>(b + i)] = static_cast<double>(scale.scale) * scale.factors[half] * code;
    }
  }
  return values;
}

}  // namespace

void matmul_reference(const MatmulWeight::Impl& weight, const MatmulRows& rows) {
  std::vector<float> w(static_cast<size_t>(weight.k));
  std::vector<std::vector<double>> a(static_cast<size_t>(rows.m));
  for (const MatmulPart& part : weight.parts) {
    const bool rounds = weight.precision == MatmulPrecision::kDefault && has_integer_kernel(part.raw);
    for (int64_t m = 0; m < rows.m; ++m) {
      const float* row = rows.a + m * rows.a_stride;
      a[static_cast<size_t>(m)] = rounds ? quantised(row, weight.k) : std::vector<double>(row, row + weight.k);
    }
    for (int64_t n = 0; n < part.n; ++n) {
      decode_rows(part.raw, n, n + 1, w.data());
      const int64_t column = part.out_begin + n;
      for (int64_t m = 0; m < rows.m; ++m) {
        double sum = 0.0;
        for (size_t i = 0; i < w.size(); ++i) {
          sum += a[static_cast<size_t>(m)][i] * static_cast<double>(w[i]);
        }
        if (rows.bias != nullptr) {
          sum += static_cast<double>(rows.bias[column]);
        }
        rows.out[m * rows.out_stride + column] = static_cast<float>(sum);
      }
    }
  }
}

}  // namespace shoal
