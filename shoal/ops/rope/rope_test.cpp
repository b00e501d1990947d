// rope: tables against transformers and closed forms, rotation by hand, every instruction set bit for bit against ref.
#include "shoal/ops/rope/rope.h"

#include <gtest/gtest.h>

#include <cmath>
#include <complex>

#include "shoal/cpu/thread_pool.h"
#include "shoal/tensor/matcher.h"
#include "testkit/guarded_tensor.h"
#include "tests/golden/rope_golden.h"

namespace shoal {
namespace {

using testkit::GuardedTensor;

cpu::ThreadPool& pool() {
  static cpu::ThreadPool pool(2);
  return pool;
}

float at(const Tensor& table, int64_t pos, int64_t column) {
  return table.view().as<float>()[pos * table.view().dim(1) + column];
}

TEST(RopeTables, AgreeWithTransformers) {
  const std::vector<RopeGolden> goldens = rope_golden();
  ASSERT_EQ(goldens.size(), 10u);
  for (const RopeGolden& golden : goldens) {
    SCOPED_TRACE(&golden - goldens.data());
    const RopeTables tables = make_rope_tables(golden.config, 8192);
    for (size_t column = 0; column < golden.inv_freq.size(); ++column) {
      const int64_t c = static_cast<int64_t>(column);
      const double factor = std::hypot(at(tables.cos, 1, c), at(tables.sin, 1, c));
      const double inv_freq = std::atan2(at(tables.sin, 1, c), at(tables.cos, 1, c));
      EXPECT_NEAR(factor, golden.attention_factor, 1e-6 * golden.attention_factor);
      EXPECT_NEAR(inv_freq, golden.inv_freq[column], 1e-6 * golden.inv_freq[column]);
      for (const int64_t pos : {0, 7, 1000, 8191}) {
        // The golden frequency is f32: its angle is known to 2^-23 of itself.
        const double angle = static_cast<double>(pos) * golden.inv_freq[column];
        const double tolerance = golden.attention_factor * (1e-6 + angle * 0x1p-22);
        EXPECT_NEAR(at(tables.cos, pos, c), golden.attention_factor * std::cos(angle), tolerance);
        EXPECT_NEAR(at(tables.sin, pos, c), golden.attention_factor * std::sin(angle), tolerance);
      }
    }
  }
}

TEST(RopeTables, AnglesAreExactAtFarPositions) {
  // theta 10000 and 4 channels: inverse frequencies 1 and 0.01.
  const RopeTables tables = make_rope_tables({.rotary_dim = 4}, 200001);
  EXPECT_EQ(at(tables.cos, 200000, 0), static_cast<float>(std::cos(200000.0)));
  EXPECT_NEAR(at(tables.sin, 200000, 1), std::sin(2000.0), 1e-7);
  EXPECT_EQ(at(tables.cos, 0, 1), 1.0f);
  EXPECT_EQ(at(tables.sin, 0, 1), 0.0f);
}

TEST(RopeTables, FrequencyFactorsDivide) {
  const RopeTables tables = make_rope_tables({.rotary_dim = 4, .freq_factors = {2.0f, 8.0f}}, 3);
  EXPECT_EQ(at(tables.sin, 2, 0), static_cast<float>(std::sin(1.0)));
  EXPECT_NEAR(at(tables.sin, 2, 1), std::sin(0.0025), 1e-9);
  const RopeTables scaled =
      make_rope_tables({.rotary_dim = 4, .scaling = RopeScaling::kLinear, .factor = 4, .freq_factors = {2, 8}}, 3);
  EXPECT_EQ(at(scaled.sin, 2, 0), static_cast<float>(std::sin(0.25)));
}

TEST(RopeTables, Rejections) {
  const auto error = [](const RopeConfig& config, int64_t max_pos = 4) {
    return testkit::error_of([&] { make_rope_tables(config, max_pos); });
  };
  EXPECT_EQ(error({.rotary_dim = 7}), "rope tables: rotary_dim is 7, expected an even number > 0");
  EXPECT_EQ(error({}), "rope tables: rotary_dim is 0, expected an even number > 0");
  EXPECT_EQ(error({.rotary_dim = 4}, -1), "rope tables: max_pos is -1, expected >= 0");
  EXPECT_EQ(error({.rotary_dim = 4, .theta = 0}), "rope tables: theta is 0, expected a number > 0");
  EXPECT_EQ(error({.rotary_dim = 4, .theta = NAN}), "rope tables: theta is nan, expected a number > 0");
  EXPECT_EQ(error({.rotary_dim = 4, .scaling = RopeScaling::kLinear, .factor = -2}),
            "rope tables: factor is -2, expected a number > 0");
  EXPECT_EQ(error({.rotary_dim = 4, .scaling = RopeScaling::kYarn, .original_max_positions = 0}),
            "rope tables: original_max_positions is 0, expected a number > 0");
  EXPECT_EQ(error({.rotary_dim = 4, .scaling = RopeScaling::kLlama3, .low_freq_factor = 4}),
            "rope tables: high_freq_factor is 4, expected more than low_freq_factor = 4");
  EXPECT_EQ(error({.rotary_dim = 4, .scaling = RopeScaling::kLlama3, .low_freq_factor = 0}),
            "rope tables: low_freq_factor is 0, expected a number > 0");
  EXPECT_EQ(error({.rotary_dim = 4, .scaling = RopeScaling::kYarn, .beta_fast = 0}),
            "rope tables: beta_fast is 0, expected a number > 0");
  EXPECT_EQ(error({.rotary_dim = 4, .scaling = RopeScaling::kYarn, .beta_slow = -1}),
            "rope tables: beta_slow is -1, expected a number > 0");
  EXPECT_EQ(error({.rotary_dim = 4, .theta = 1, .scaling = RopeScaling::kYarn}),
            "rope tables: theta is 1, for which yarn is not defined");
  EXPECT_EQ(error({.rotary_dim = 4, .scaling = RopeScaling::kYarn, .attention_factor = -1}),
            "rope tables: attention_factor is -1, expected a number >= 0");
  EXPECT_EQ(error({.rotary_dim = 4, .scaling = RopeScaling::kYarn, .mscale = -1}),
            "rope tables: mscale is -1 and mscale_all_dim 0, expected numbers >= 0");
  EXPECT_EQ(error({.rotary_dim = 4, .freq_factors = {1.0f}}),
            "rope tables: freq_factors has 1 values, expected rotary_dim / 2 = 2");
  EXPECT_EQ(error({.rotary_dim = 4, .freq_factors = {1.0f, 0.0f}}),
            "rope tables: freq_factors is 0, expected a number > 0");
}

struct Case {
  DType dtype;
  int64_t num_tokens, num_heads, head_dim, rotary_dim;
  int64_t offset = 0;
  bool interleaved = false;
  bool in_place = false;
  std::string name() const {
    return concat(to_string(dtype), " [", num_tokens, ", ", num_heads, ", ", head_dim, "] rotary ", rotary_dim, " at ",
                  offset, interleaved ? " interleaved" : "", in_place ? " in place" : "");
  }
};

constexpr int64_t kMaxPos = 50;

std::vector<float> run(const Case& c, const std::vector<float>& values, std::vector<int32_t> positions,
                       const OpContext& context) {
  const RopeTables tables = make_rope_tables({.rotary_dim = c.rotary_dim, .theta = 100.0}, kMaxPos);
  GuardedTensor x(c.dtype, {c.num_tokens, c.num_heads, c.head_dim}, values, 3);
  GuardedTensor out(c.dtype, {c.num_tokens, c.num_heads, c.head_dim}, 5);
  GuardedTensor& where = c.in_place ? x : out;
  positions.resize(static_cast<size_t>(c.num_tokens));
  rope({.out = where.view(),
        .x = x.view(),
        .positions = TensorView(positions.data(), DType::kI32, {c.num_tokens}),
        .cos = tables.cos,
        .sin = tables.sin,
        .interleaved = c.interleaved,
        .rotary_offset = c.offset},
       context);
  EXPECT_TRUE(x.intact() && out.intact()) << c.name();
  return where.values();
}

TEST(Rope, RotatesComplexNumbers) {
  // A pair (a, b) is the complex number a + ib, and is multiplied by exp(i pos inv_freq): an oracle of its own form.
  for (const bool interleaved : {false, true}) {
    const Case c{DType::kF32, 1, 1, 8, 4, 2, interleaved};
    const std::vector<float> x = {9, 8, 1, 2, 3, 4, 7, 6};
    std::vector<float> expected = x;
    for (size_t column = 0; column < 2; ++column) {
      const size_t first = 2 + (interleaved ? 2 * column : column);
      const size_t second = interleaved ? first + 1 : first + 2;
      const auto turned = std::complex<double>(x[first], x[second]) *
                          std::polar(1.0, 11.0 * std::pow(100.0, -0.5 * static_cast<double>(column)));
      expected[first] = static_cast<float>(turned.real());
      expected[second] = static_cast<float>(turned.imag());
    }
    std::vector<OpContext> contexts = {{.pool = &pool(), .variant = "ref"}};
    for (const cpu::Isa isa : cpu::available_isas()) {
      contexts.push_back({.pool = &pool(), .isa = isa});
    }
    for (const OpContext& context : contexts) {
      const auto same = testkit::compare(run(c, x, {11}, context), expected, 1e-6, 1e-6);
      EXPECT_TRUE(same) << same.text;
    }
  }
}

TEST(Rope, EveryInstructionSetGivesTheBitsOfTheReference) {
  for (const cpu::Isa isa : cpu::available_isas()) {
    SCOPED_TRACE(cpu::to_string(isa));
    for (const DType dtype : kFloats) {
      for (const bool interleaved : {false, true}) {
        for (const bool in_place : {false, true}) {
          for (const Case& shape :
               {Case{dtype, 0, 2, 8, 8}, Case{dtype, 1, 1, 2, 2}, Case{dtype, 3, 2, 10, 6, 3},
                Case{dtype, 2, 3, 66, 66}, Case{dtype, 5, 4, 64, 64}, Case{dtype, 40, 4, 192, 64, 128},
                Case{dtype, 2, 2, 70, 34, 36}, Case{dtype, 2, 1, 600, 600}, Case{dtype, 3, 2, 96, 24}}) {
            Case c = shape;
            c.interleaved = interleaved;
            c.in_place = in_place;
            testkit::Random random(static_cast<uint64_t>(c.head_dim));
            const auto x = random.normals(static_cast<size_t>(c.num_tokens * c.num_heads * c.head_dim));
            std::vector<int32_t> positions;
            for (int64_t t = 0; t < c.num_tokens; ++t) {
              positions.push_back(static_cast<int32_t>(random.integer(0, kMaxPos - 1)));
            }
            const auto actual = run(c, x, positions, {.pool = &pool(), .isa = isa});
            EXPECT_EQ(actual, run(c, x, positions, {.pool = &pool(), .variant = "ref"})) << c.name();
          }
        }
      }
    }
  }
}

TEST(Rope, Rejections) {
  GuardedTensor x(DType::kF32, {2, 3, 8});
  GuardedTensor half(DType::kF16, {2, 3, 8});
  GuardedTensor more(DType::kF32, {2, 4, 8});
  std::vector<int32_t> positions = {0, 9};
  const RopeTables tables = make_rope_tables({.rotary_dim = 6}, 10);
  const RopeTables longer = make_rope_tables({.rotary_dim = 6}, 11);
  const RopeArgs good{.out = x.view(),
                      .x = x.view(),
                      .positions = TensorView(positions.data(), DType::kI32, {2}),
                      .cos = tables.cos,
                      .sin = tables.sin};
  const auto error = [&](auto change, std::string_view variant = "ref") {
    RopeArgs args = good;
    change(args);
    return testkit::error_of([&] { rope(args, {.pool = &pool(), .variant = variant}); });
  };
  EXPECT_EQ(error([](auto&) {}), "");
  EXPECT_EQ(error([](auto& a) { a.rotary_offset = 2; }), "");
  EXPECT_EQ(error([](auto& a) { a.rotary_offset = 3; }), "rope: channels 3 to 9 would be rotated, but head_dim is 8");
  EXPECT_EQ(error([](auto& a) { a.rotary_offset = -1; }), "rope: channels -1 to 5 would be rotated, but head_dim is 8");
  EXPECT_EQ(error([&](auto& a) { a.out = half.view(); }), "rope: out has type float16, expected float32");
  EXPECT_EQ(error([&](auto& a) { a.out = more.view(); }),
            "rope: out has shape [2, 4, 8], expected [num_tokens = 2, num_heads = 3, head_dim = 8] (from x)");
  EXPECT_EQ(error([](auto& a) { a.x.strides[2] = 2; }), "rope: x must be contiguous in its last dimension");
  EXPECT_EQ(error([](auto& a) { a.positions.shape[0] = 1; }),
            "rope: positions has shape [1], expected [num_tokens = 2] (from x)");
  EXPECT_EQ(error([](auto& a) { a.positions.dtype = DType::kI64; }), "rope: positions has type int64, expected int32");
  EXPECT_EQ(error([&](auto& a) { a.sin = longer.sin; }),
            "rope: sin has shape [11, 3], expected [max_pos = 10, rotary_dim/2 = 3] (from cos)");
  EXPECT_EQ(error([](auto& a) { a.cos.dtype = DType::kF16; }), "rope: cos has type float16, expected float32");
  EXPECT_EQ(error([](auto& a) {
              a.cos.device = {DeviceType::kCuda, 0};
            }),
            "rope: cos is on another device than the other arguments");
  EXPECT_EQ(error([&](auto&) { positions[1] = 10; }), "rope: positions[1] is 10, outside [0, max_pos = 10)");
  EXPECT_EQ(error([&](auto&) { positions[1] = -1; }), "rope: positions[1] is -1, outside [0, max_pos = 10)");
  EXPECT_EQ(error([&](auto&) { positions[1] = 1; }, "best"), "rope: no variant \"best\"; known are ref, cpu");
}

}  // namespace
}  // namespace shoal
