// The definition of right: sums in f64 over decoded rows.
#include <vector>

#include "shoal/ops/matmul/matmul_layout.h"

namespace shoal {

void matmul_reference(const MatmulWeight::Impl& weight, const MatmulRows& rows) {
  std::vector<float> w(static_cast<size_t>(weight.k));
  for (const MatmulPart& part : weight.parts) {
    for (int64_t n = 0; n < part.n; ++n) {
      decode_rows(part.raw, n, n + 1, w.data());
      const int64_t column = part.out_begin + n;
      for (int64_t m = 0; m < rows.m; ++m) {
        const float* a = rows.a + m * rows.a_stride;
        double sum = 0.0;
        for (int64_t i = 0; i < weight.k; ++i) {
          sum += static_cast<double>(a[i]) * static_cast<double>(w[static_cast<size_t>(i)]);
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
