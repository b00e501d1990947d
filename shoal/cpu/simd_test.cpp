// simd.h on every instruction set of this machine: accuracy against f64, conversions against base/float_bits.h.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <vector>

#include "shoal/base/float_bits.h"
#include "shoal/cpu/isa.h"
#include "testkit/testkit.h"

namespace shoal {

SHOAL_DECLARE_FOR_EACH_ISA(void simd_exp(const float* x, float* out, int64_t count);
                           void simd_tanh(const float* x, float* out, int64_t count);
                           void simd_f16(const float* x, uint16_t* halves, float* back, int64_t count);
                           void simd_bf16(const float* x, uint16_t* halves, float* back, int64_t count);
                           int simd_reduce(const float* x, int64_t n, float* total, float* most, float* swapped))

namespace {

// Every 1009th bit pattern: all exponents, both signs, infinities, NaN, subnormal numbers. A multiple of 16 values.
std::vector<float> many_floats() {
  std::vector<float> values;
  for (uint64_t bits = 0; bits < (uint64_t{1} << 32); bits += 1009) {
    values.push_back(std::bit_cast<float>(static_cast<uint32_t>(bits)));
  }
  for (const float special :
       {0.0f, -0.0f, INFINITY, -INFINITY, NAN, 88.72f, 88.73f, -87.4f, -103.9f, -104.1f, 0.625f}) {
    values.push_back(special);
  }
  while (values.size() % 16 != 0) {
    values.push_back(1.0f);
  }
  return values;
}

double ulps(float actual, double exact) {
  if (std::isnan(exact)) {
    return std::isnan(actual) ? 0.0 : INFINITY;
  }
  const float rounded = static_cast<float>(exact);
  if (std::isinf(rounded) || std::isinf(actual)) {
    return rounded == actual || std::abs(exact) > 0x1.fffffcp127 ? 0.0 : INFINITY;
  }
  const int exponent = std::max(std::ilogb(std::max(std::abs(rounded), 0x1p-126f)), -126);
  return std::abs(actual - exact) / std::ldexp(1.0, exponent - 23);
}

template <class Exact>
double worst_ulps(void (*function)(const float*, float*, int64_t), Exact exact) {
  static const std::vector<float> x = many_floats();
  std::vector<float> out(x.size());
  function(x.data(), out.data(), static_cast<int64_t>(x.size()));
  double worst = 0.0;
  for (size_t i = 0; i < x.size(); ++i) {
    worst = std::max(worst, ulps(out[i], exact(static_cast<double>(x[i]))));
  }
  return worst;
}

TEST(Simd, ExpAndTanhAreWithinFourUlp) {
  for (const cpu::Isa isa : cpu::available_isas()) {
    SCOPED_TRACE(cpu::to_string(isa));
    const double exp_ulps = worst_ulps(SHOAL_PICK_ISA(isa, simd_exp), [](double x) { return std::exp(x); });
    const double tanh_ulps = worst_ulps(SHOAL_PICK_ISA(isa, simd_tanh), [](double x) { return std::tanh(x); });
    EXPECT_LE(exp_ulps, 1.5);
    EXPECT_LE(tanh_ulps, 3.0);
    RecordProperty("exp", std::to_string(exp_ulps));
    RecordProperty("tanh", std::to_string(tanh_ulps));
  }
}

TEST(Simd, ConversionsAgreeWithFloatBits) {
  std::vector<float> x = many_floats();
  for (uint32_t halves = 0; halves < 65536; ++halves) {  // ties of both types
    x.push_back(std::bit_cast<float>((halves << 16) | 0x8000u));
    x.push_back(f16_to_f32(static_cast<uint16_t>(halves)));
    x.push_back(f16_to_f32(static_cast<uint16_t>(halves)) * 1.00048828125f);
  }
  x.resize(x.size() / 16 * 16 + 5);
  for (const cpu::Isa isa : cpu::available_isas()) {
    SCOPED_TRACE(cpu::to_string(isa));
    testkit::Guarded<uint16_t> halves(x.size());
    testkit::Guarded<float> back(x.size());
    size_t num_bad = 0;
    SHOAL_PICK_ISA(isa, simd_f16)(x.data(), halves.data(), back.data(), static_cast<int64_t>(x.size()));
    for (size_t i = 0; i < x.size(); ++i) {
      const uint16_t expected = f32_to_f16(x[i]);
      num_bad += halves.data()[i] != expected;
      num_bad += !std::isnan(x[i]) && back.data()[i] != f16_to_f32(expected);
    }
    SHOAL_PICK_ISA(isa, simd_bf16)(x.data(), halves.data(), back.data(), static_cast<int64_t>(x.size()));
    for (size_t i = 0; i < x.size(); ++i) {
      const uint16_t expected = f32_to_bf16(x[i]);
      num_bad += halves.data()[i] != expected;
      num_bad += !std::isnan(x[i]) && back.data()[i] != bf16_to_f32(expected);
    }
    EXPECT_EQ(num_bad, 0u);
    EXPECT_TRUE(halves.guards_intact());
    EXPECT_TRUE(back.guards_intact());
  }
}

TEST(Simd, ReductionsAndPartialVectors) {
  for (const cpu::Isa isa : cpu::available_isas()) {
    SCOPED_TRACE(cpu::to_string(isa));
    const auto reduce = SHOAL_PICK_ISA(isa, simd_reduce);
    for (int64_t n = 1; n <= 16; ++n) {
      std::vector<float> x(static_cast<size_t>(n));  // exactly n values: reading more is an error under a sanitizer
      for (int64_t i = 0; i < n; ++i) {
        x[static_cast<size_t>(i)] = static_cast<float>((i * 7) % 16 + 1);
      }
      float total = 0.0f;
      float most = 0.0f;
      float swapped[16] = {};
      if (n > 8 && isa != cpu::Isa::kAvx512) {
        break;
      }
      const int lanes = reduce(x.data(), n, &total, &most, swapped);
      float expected_total = 0.0f;
      float expected_most = 0.0f;
      for (int64_t i = 0; i < lanes; ++i) {
        const float value = i < n ? x[static_cast<size_t>(i)] : 0.0f;
        expected_total += value;
        expected_most = std::max(expected_most, value);
        EXPECT_EQ(swapped[i ^ 1], value);
      }
      EXPECT_EQ(total, expected_total);
      EXPECT_EQ(most, expected_most);
    }
  }
}

}  // namespace
}  // namespace shoal
