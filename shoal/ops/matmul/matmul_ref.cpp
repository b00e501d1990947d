// The definition of right: sums in f64 over decoded rows.
#include <cmath>
#include <vector>

#include "shoal/ops/matmul/matmul_layout.h"

namespace shoal {
namespace {

// A row of activations as the integer kernels see it: int8 codes times the scale of their block of 32.
std::vector<double> quantised(const float* a, int64_t k) {
  std::vector<double> values(static_cast<size_t>(k));
  for (int64_t b = 0; b < k; b += kQuantBlock) {
    float amax = 0.0f;
    for (int64_t i = b; i < b + kQuantBlock; ++i) {
      amax = std::isfinite(a[i]) ? std::fmax(amax, std::fabs(a[i])) : std::numeric_limits<float>::quiet_NaN();
      if (std::isnan(amax)) {
        break;
      }
    }
    const QuantScale scale = quant_scale(amax);
    for (int64_t i = b; i < b + kQuantBlock; ++i) {
      const double code = std::isnan(amax) ? 0.0 : static_cast<double>(std::nearbyint(a[i] * scale.inverse));
      values[static_cast<size_t>(i)] = static_cast<double>(scale.scale) * code;
    }
  }
  return values;
}

}  // namespace

void matmul_reference(const MatmulWeight::Impl& weight, const MatmulRows& rows) {
  std::vector<float> w(static_cast<size_t>(weight.k));
  std::vector<std::vector<double>> a(static_cast<size_t>(rows.m));
  for (const MatmulPart& part : weight.parts) {
    const bool rounds = weight.precision == MatmulPrecision::kDefault && integer_layout(part.raw.format).has_value();
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
