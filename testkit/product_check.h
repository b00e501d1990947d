// Checks of a product Y = A W^T that tests of several operators share: sums in f64 and the tolerance of f32 sums.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "testkit/guarded_tensor.h"

namespace shoal::testkit {

// What of the sum of |a w| rounding in f32 may cost: partial sums of 128 terms, then one for each 128 columns; measured
// errors are five times smaller.
constexpr double kProductTolerance = 0x1p-19;

// y[m, n] against the sum over k of a[m, k] * w[n, k], times factor, plus bias[n] (empty: none), rounded to `type`.
inline void expect_product(const std::vector<float>& y, const std::vector<double>& a, const std::vector<double>& w,
                           const std::vector<float>& bias, int64_t k, DType type, const std::string& where,
                           double factor = 1.0) {
  const int64_t m = static_cast<int64_t>(a.size()) / k;
  const int64_t n = static_cast<int64_t>(w.size()) / k;
  ASSERT_EQ(static_cast<int64_t>(y.size()), m * n);
  for (int64_t i = 0; i < m * n; ++i) {
    double sum = 0.0;
    double magnitude = 0.0;
    for (int64_t j = 0; j < k; ++j) {
      const double term = a[static_cast<size_t>(i / n * k + j)] * w[static_cast<size_t>(i % n * k + j)] * factor;
      sum += term;
      magnitude += std::fabs(term);
    }
    sum += bias.empty() ? 0.0 : static_cast<double>(bias[static_cast<size_t>(i % n)]);
    // The last term: half the smallest number of f16.
    const double bound = rounding_of(type) * 1.01 * std::fabs(sum) + kProductTolerance * (magnitude + std::fabs(sum)) +
                         (type == DType::kF16 ? 0x1p-25 : 1e-30);
    ASSERT_NEAR(y[static_cast<size_t>(i)], sum, bound) << where << " at " << i / n << ", " << i % n;
  }
}

inline std::vector<double> as_doubles(const std::vector<float>& values) { return {values.begin(), values.end()}; }

}  // namespace shoal::testkit
