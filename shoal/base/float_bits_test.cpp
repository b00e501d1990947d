// Conversions of small floats against decoding by formula and rounding by search, both in double; and against hashes
// of what numpy and ml_dtypes give (tests/golden/make_float_golden.py).
#include "shoal/base/float_bits.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "testkit/testkit.h"

namespace shoal {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

uint32_t bits_of(float value) { return std::bit_cast<uint32_t>(value); }

// A binary format: its layout and what its largest exponent means.
struct Layout {
  int exponent_bits;
  int mantissa_bits;
  int bias;
  bool has_infinity;  // otherwise only the code with all bits set is NaN
};
constexpr Layout kF16{5, 10, 15, true};
constexpr Layout kBf16{8, 7, 127, true};
constexpr Layout kE4m3{4, 3, 7, false};

// Value of the code without its sign; NaN and infinity as doubles.
double decode(const Layout& layout, uint32_t magnitude) {
  const uint32_t mantissa = magnitude & ((1u << layout.mantissa_bits) - 1);
  const int exponent = static_cast<int>(magnitude >> layout.mantissa_bits);
  const int last_exponent = (1 << layout.exponent_bits) - 1;
  if (layout.has_infinity && exponent == last_exponent) {
    return mantissa == 0 ? HUGE_VAL : NAN;
  }
  if (!layout.has_infinity && exponent == last_exponent && mantissa == (1u << layout.mantissa_bits) - 1) {
    return NAN;
  }
  const double significand = mantissa + (exponent == 0 ? 0.0 : std::ldexp(1.0, layout.mantissa_bits));
  return std::ldexp(significand, std::max(exponent, 1) - layout.bias - layout.mantissa_bits);
}

// Rounds by looking for the nearest of all values; a tie goes to the even code. Beyond the largest value: the value
// that one more step would have decides, as IEEE 754 has it, and then infinity or saturation.
class Rounder {
 public:
  explicit Rounder(const Layout& layout) : layout_(layout) {
    for (uint32_t code = 0; std::isfinite(decode(layout, code)); ++code) {
      values_.push_back(decode(layout, code));
    }
    const size_t last = values_.size() - 1;
    beyond_ = values_[last] + (values_[last] - values_[last - 1]);
  }

  const std::vector<double>& values() const { return values_; }
  double beyond() const { return beyond_; }

  // The code for |value|, finite or infinite.
  uint32_t round(double value) const {
    const double magnitude = std::abs(value);
    const auto last = static_cast<uint32_t>(values_.size() - 1);
    const auto upper = std::upper_bound(values_.begin(), values_.end(), magnitude);
    const auto below = static_cast<uint32_t>(upper - values_.begin()) - 1;
    const double next = upper == values_.end() ? beyond_ : *upper;
    const double to_below = magnitude - values_[below];
    const double to_next = next - magnitude;
    const bool up = to_next < to_below || (to_next == to_below && below % 2 == 1);
    if (below == last && up) {
      return layout_.has_infinity ? last + 1 : last;
    }
    return below + (up ? 1 : 0);
  }

 private:
  Layout layout_;
  std::vector<double> values_;  // ascending; the index is the code
  double beyond_ = 0.0;
};

template <class Decode>
size_t count_bad_decodes(const Layout& layout, int num_bits, Decode&& convert) {
  const uint32_t sign_bit = 1u << (num_bits - 1);
  size_t num_bad = 0;
  for (uint32_t code = 0; code < 2 * sign_bit; ++code) {
    const float actual = convert(code);
    const double expected = decode(layout, code & (sign_bit - 1));
    const bool negative = (code & sign_bit) != 0;
    const bool same = std::isnan(expected) ? std::isnan(actual) : actual == (negative ? -expected : expected);
    num_bad += same && std::signbit(actual) == negative ? 0 : 1;
  }
  return num_bad;
}

TEST(FloatBits, DecodesEveryCode) {
  EXPECT_EQ(count_bad_decodes(kF16, 16, [](uint32_t c) { return f16_to_f32(static_cast<uint16_t>(c)); }), 0u);
  EXPECT_EQ(count_bad_decodes(kBf16, 16, [](uint32_t c) { return bf16_to_f32(static_cast<uint16_t>(c)); }), 0u);
  EXPECT_EQ(count_bad_decodes(kE4m3, 8, [](uint32_t c) { return e4m3_to_f32(static_cast<uint8_t>(c)); }), 0u);
}

TEST(FloatBits, DecodesEveryE8m0) {
  for (int code = 0; code < 255; ++code) {
    EXPECT_EQ(e8m0_to_f32(static_cast<uint8_t>(code)), std::ldexp(1.0, code - 127)) << code;
  }
  EXPECT_TRUE(std::isnan(e8m0_to_f32(255)));
}

// Every value, every midpoint of neighbours and the floats on both sides of each, with both signs; random bits.
template <class Encode>
size_t count_bad_encodes(const Layout& layout, int num_bits, Encode&& encode) {
  const Rounder rounder(layout);
  const uint32_t sign_bit = 1u << (num_bits - 1);
  size_t num_bad = 0;
  const auto check = [&](float value) {
    for (const float f : {value, -value}) {
      const uint32_t expected = rounder.round(f) | (std::signbit(f) ? sign_bit : 0);
      num_bad += encode(f) != expected ? 1 : 0;
    }
  };
  for (size_t code = 0; code < rounder.values().size(); ++code) {
    const double value = rounder.values()[code];
    const double next = code + 1 < rounder.values().size() ? rounder.values()[code + 1] : rounder.beyond();
    const double midpoint = value + (next - value) / 2;
    // Midpoints below the smallest float subnormal or above the largest float are not floats; the nearest one will do.
    for (const float f : {static_cast<float>(value), static_cast<float>(midpoint)}) {
      check(f);
      check(std::nextafter(f, kInf));
      check(std::nextafter(f, -kInf));
    }
  }
  testkit::Random random(1);
  for (int i = 0; i < 200'000; ++i) {
    const auto f = std::bit_cast<float>(static_cast<uint32_t>(random.bits()));
    if (!std::isnan(f)) {
      check(f);
    }
  }
  for (const float f : {0.0f, kInf, std::numeric_limits<float>::max(), std::numeric_limits<float>::denorm_min(),
                        std::numeric_limits<float>::min()}) {
    check(f);
  }
  return num_bad;
}

TEST(FloatBits, RoundsToNearestEven) {
  EXPECT_EQ(count_bad_encodes(kF16, 16, [](float f) { return f32_to_f16(f); }), 0u);
  EXPECT_EQ(count_bad_encodes(kBf16, 16, [](float f) { return f32_to_bf16(f); }), 0u);
  EXPECT_EQ(count_bad_encodes(kE4m3, 8, [](float f) { return f32_to_e4m3(f); }), 0u);
}

TEST(FloatBits, EdgesByHand) {
  EXPECT_EQ(f32_to_f16(65504.0f), 0x7bff);
  EXPECT_EQ(f32_to_f16(65519.996f), 0x7bff);
  EXPECT_EQ(f32_to_f16(65520.0f), 0x7c00);
  EXPECT_EQ(f32_to_f16(0x1p-24f), 0x0001);
  EXPECT_EQ(f32_to_f16(0x1p-25f), 0x0000);  // tie with zero: even
  EXPECT_EQ(f32_to_f16(-0x1.000002p-25f), 0x8001);
  EXPECT_EQ(f32_to_f16(0x3ffp-24f + 0x1p-25f), 0x0400);  // the largest subnormal rounds up to the smallest normal
  EXPECT_EQ(f32_to_bf16(std::numeric_limits<float>::max()), 0x7f80);
  EXPECT_EQ(f32_to_bf16(1.00390625f), 0x3f80);  // 1 + 2^-8: tie to even
  EXPECT_EQ(f32_to_bf16(1.01171875f), 0x3f82);  // 1 + 3 * 2^-8: tie to even
  EXPECT_EQ(f32_to_e4m3(448.0f), 0x7e);
  EXPECT_EQ(f32_to_e4m3(464.0f), 0x7e);
  EXPECT_EQ(f32_to_e4m3(1e9f), 0x7e);
  EXPECT_EQ(f32_to_e4m3(-kInf), 0xfe);
  EXPECT_EQ(f32_to_e4m3(0x1p-9f), 0x01);
  EXPECT_EQ(f32_to_e4m3(0x1p-10f), 0x00);
  EXPECT_EQ(f32_to_e4m3(0x3p-10f), 0x02);
  EXPECT_EQ(bits_of(e8m0_to_f32(0)), 0x00400000u);
}

TEST(FloatBits, NanStaysNan) {
  for (const uint32_t payload : {0x7fc00000u, 0x7f800001u, 0x7fffffffu, 0x7f801000u, 0xff800001u, 0xffc00000u}) {
    const auto nan = std::bit_cast<float>(payload);
    const bool negative = (payload >> 31) != 0;
    EXPECT_TRUE(std::isnan(f16_to_f32(f32_to_f16(nan)))) << payload;
    EXPECT_TRUE(std::isnan(bf16_to_f32(f32_to_bf16(nan)))) << payload;
    EXPECT_EQ(f32_to_e4m3(nan), negative ? 0xff : 0x7f) << payload;
    EXPECT_EQ(f32_to_f16(nan) >> 15, negative ? 1 : 0) << payload;
    EXPECT_EQ(f32_to_bf16(nan) >> 15, negative ? 1 : 0) << payload;
  }
  EXPECT_EQ(f32_to_f16(kNan), 0x7e00);
  EXPECT_EQ(f32_to_bf16(kNan), 0x7fc0);
}

TEST(FloatBits, EveryCodeSurvivesTheRoundTrip) {
  size_t num_bad = 0;
  for (uint32_t code = 0; code < 65536; ++code) {
    const auto c = static_cast<uint16_t>(code);
    num_bad += std::isnan(f16_to_f32(c)) || f32_to_f16(f16_to_f32(c)) == c ? 0 : 1;
    num_bad += std::isnan(bf16_to_f32(c)) || f32_to_bf16(bf16_to_f32(c)) == c ? 0 : 1;
  }
  for (int code = 0; code < 256; ++code) {
    const auto c = static_cast<uint8_t>(code);
    num_bad += f32_to_e4m3(e4m3_to_f32(c)) == c ? 0 : 1;  // the two NaN codes too
  }
  EXPECT_EQ(num_bad, 0u);
}

TEST(FloatBits, WorksInConstantExpressions) {
  static_assert(f16_to_f32(0x3c00) == 1.0f && f32_to_f16(1.0f) == 0x3c00);
  static_assert(f32_to_f16(0x1p-24f) == 1 && f16_to_f32(1) == 0x1p-24f);
  static_assert(bf16_to_f32(0x3f80) == 1.0f && f32_to_bf16(1.0f) == 0x3f80);
  static_assert(e4m3_to_f32(0x38) == 1.0f && f32_to_e4m3(1.0f) == 0x38);
  static_assert(e8m0_to_f32(127) == 1.0f);
}

// FNV-1a over the little-endian bytes, as the script makes it; every NaN is 0x7fc00000.
class Hash {
 public:
  template <class T>
  void add(T value) {
    for (size_t i = 0; i < sizeof(T); ++i) {
      hash_ = (hash_ ^ ((static_cast<uint64_t>(value) >> (8 * i)) & 0xff)) * 0x100000001b3ull;
    }
  }
  void add_float(float value) { add(std::isnan(value) ? 0x7fc00000u : bits_of(value)); }
  uint64_t value() const { return hash_; }

 private:
  uint64_t hash_ = 0xcbf29ce484222325ull;
};

TEST(FloatBits, AgreesWithNumpyAndMlDtypes) {
  Hash f16, bf16, e4m3, e8m0;
  for (uint32_t code = 0; code < 65536; ++code) {
    f16.add_float(f16_to_f32(static_cast<uint16_t>(code)));
    bf16.add_float(bf16_to_f32(static_cast<uint16_t>(code)));
  }
  for (uint32_t code = 0; code < 256; ++code) {
    e4m3.add_float(e4m3_to_f32(static_cast<uint8_t>(code)));
    e8m0.add_float(e8m0_to_f32(static_cast<uint8_t>(code)));
  }
  EXPECT_EQ(f16.value(), 0x1f87f165810ea7c5ull);
  EXPECT_EQ(bf16.value(), 0xcf8e09175d8f5ba5ull);
  EXPECT_EQ(e4m3.value(), 0xdad1d9c50f749ca5ull);
  EXPECT_EQ(e8m0.value(), 0x6d2c8b41c3f0e5a5ull);

  Hash to_f16, to_bf16, to_e4m3;
  for (uint32_t i = 0; i < 65536; ++i) {
    const auto f = std::bit_cast<float>(i * 65537u);
    if (!std::isfinite(f)) {
      continue;
    }
    to_f16.add(f32_to_f16(f));
    to_bf16.add(f32_to_bf16(f));
    if (std::abs(f) <= 448.0f) {
      to_e4m3.add(f32_to_e4m3(f));
    }
  }
  EXPECT_EQ(to_f16.value(), 0x458f333dc7c37c72ull);
  EXPECT_EQ(to_bf16.value(), 0x57f9b99d0e18b929ull);
  EXPECT_EQ(to_e4m3.value(), 0x3f4f7aa73dcad8c5ull);
}

}  // namespace
}  // namespace shoal
