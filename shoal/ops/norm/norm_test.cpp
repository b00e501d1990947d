// rms_norm: a case worked by hand, brute force in f64 for the reference and for every instruction set, rejections.
#include "shoal/ops/norm/norm.h"

#include <gtest/gtest.h>

#include <cmath>

#include "shoal/cpu/thread_pool.h"
#include "shoal/tensor/matcher.h"
#include "testkit/guarded_tensor.h"

namespace shoal {
namespace {

using testkit::GuardedTensor;

cpu::ThreadPool& pool() {
  static cpu::ThreadPool pool(2);
  return pool;
}

struct Case {
  DType dtype = DType::kF32;
  DType weight_dtype = DType::kF32;
  int64_t num_tokens = 0;
  int64_t hidden = 0;
  bool residual = false;
  bool in_place = false;
  int64_t padding = 0;
  uint64_t seed = 1;
  std::string name() const {
    return concat(to_string(dtype), " weight ", to_string(weight_dtype), " [", num_tokens, ", ", hidden, "]",
                  residual ? " residual" : "", in_place ? " in place" : "", " padding ", padding, " seed ", seed);
  }
};

std::vector<Case> cases() {
  std::vector<Case> list;
  for (const DType dtype : kFloats) {
    for (const DType weight_dtype : {DType::kF32, dtype}) {
      for (const bool residual : {false, true}) {
        for (const bool in_place : {false, true}) {
          for (const auto& [num_tokens, hidden] :
               {std::pair<int64_t, int64_t>{0, 8}, {1, 1}, {1, 7}, {3, 16}, {2, 33}, {5, 64}, {3, 127}, {4, 576}}) {
            list.push_back({dtype, weight_dtype, num_tokens, hidden, residual, in_place, hidden % 5});
          }
        }
      }
    }
    list.push_back({dtype, dtype, 2, 16384, true, false, 0, 7});
    list.push_back({dtype, dtype, 200, 192, true, true, 3, 8});  // several ranges of the pool
  }
  return list;
}

struct Inputs {
  std::vector<float> x, residual, weight;
};

Inputs inputs_of(const Case& c) {
  testkit::Random random(c.seed);
  const size_t count = static_cast<size_t>(c.num_tokens * c.hidden);
  Inputs in{random.normals(count, 2.0f), random.normals(count), random.normals(static_cast<size_t>(c.hidden))};
  for (float& value : in.x) value = testkit::rounded_to(c.dtype, value);
  for (float& value : in.residual) value = testkit::rounded_to(c.dtype, value);
  for (float& value : in.weight) value = testkit::rounded_to(c.weight_dtype, value);
  return in;
}

struct Outputs {
  std::vector<float> out, residual_out;
};

Outputs run(const Case& c, const Inputs& in, const OpContext& context, float eps = 1e-5f) {
  GuardedTensor x(c.dtype, {c.num_tokens, c.hidden}, in.x, c.padding);
  GuardedTensor weight(c.weight_dtype, {c.hidden}, in.weight);
  const std::vector<int64_t> shape = {c.num_tokens, c.hidden};
  GuardedTensor residual =
      c.residual ? GuardedTensor(c.dtype, shape, in.residual, 2 * c.padding) : GuardedTensor(c.dtype, shape);
  GuardedTensor out(c.dtype, {c.num_tokens, c.hidden}, 3 * c.padding);
  GuardedTensor residual_out(c.dtype, {c.num_tokens, c.hidden});
  GuardedTensor& where = c.in_place ? x : out;
  GuardedTensor& sums = c.in_place ? residual : residual_out;
  RmsNormArgs args{.out = where.view(), .x = x.view(), .weight = weight.view(), .eps = eps};
  if (c.residual) {
    args.residual = residual.view();
    args.residual_out = sums.view();
  }
  rms_norm(args, context);
  EXPECT_TRUE(x.intact() && weight.intact() && residual.intact() && out.intact() && residual_out.intact());
  return {where.values(), c.residual ? sums.values() : std::vector<float>()};
}

// The formula in f64; the sum with the residual is one f32 addition, as documented.
Outputs brute_force(const Case& c, const Inputs& in) {
  Outputs expected;
  for (int64_t t = 0; t < c.num_tokens; ++t) {
    double total = 0.0;
    std::vector<float> row(static_cast<size_t>(c.hidden));
    for (size_t h = 0; h < row.size(); ++h) {
      const size_t at = static_cast<size_t>(t * c.hidden) + h;
      row[h] = c.residual ? in.x[at] + in.residual[at] : in.x[at];
      total += static_cast<double>(row[h]) * row[h];
    }
    for (size_t h = 0; h < row.size(); ++h) {
      expected.out.push_back(static_cast<float>(in.weight[h] * static_cast<double>(row[h]) /
                                                std::sqrt(total / static_cast<double>(c.hidden) + 1e-5f)));
      if (c.residual) {
        expected.residual_out.push_back(testkit::rounded_to(c.dtype, row[h]));
      }
    }
  }
  return expected;
}

void expect_close(const Case& c, const Outputs& actual, const Outputs& expected) {
  // One rounding to the type, plus what f32 sums and products lose.
  const auto out = testkit::compare(actual.out, expected.out, testkit::rounding_of(c.dtype) + 1e-6, 0x1p-25);
  EXPECT_TRUE(out) << c.name() << ": " << out.text;
  EXPECT_EQ(actual.residual_out, expected.residual_out) << c.name();
}

TEST(RmsNorm, ByHand) {
  // mean of squares of (3, 4, 0, 0) is 6.25; root 2.5.
  const Case c{.num_tokens = 1, .hidden = 4};
  const Inputs in{{3, 4, 0, 0}, {}, {1, 2, 3, 4}};
  for (const cpu::Isa isa : cpu::available_isas()) {
    EXPECT_EQ(run(c, in, {.pool = &pool(), .isa = isa}, 0.0f).out, (std::vector<float>{1.2f, 3.2f, 0, 0}));
  }
  EXPECT_EQ(run(c, in, {.pool = &pool(), .variant = "ref"}, 0.0f).out, (std::vector<float>{1.2f, 3.2f, 0, 0}));
}

TEST(RmsNorm, ReferenceAgreesWithBruteForce) {
  for (const Case& c : cases()) {
    const Inputs in = inputs_of(c);
    expect_close(c, run(c, in, {.pool = &pool(), .variant = "ref"}), brute_force(c, in));
  }
}

TEST(RmsNorm, EveryInstructionSetAgreesWithBruteForce) {
  for (const cpu::Isa isa : cpu::available_isas()) {
    SCOPED_TRACE(cpu::to_string(isa));
    for (const Case& c : cases()) {
      const Inputs in = inputs_of(c);
      expect_close(c, run(c, in, {.pool = &pool(), .isa = isa}), brute_force(c, in));
    }
  }
}

TEST(RmsNorm, ARowDoesNotDependOnItsNeighboursOrTheThreads) {
  const Case batch{.dtype = DType::kBF16, .num_tokens = 61, .hidden = 515, .residual = true, .seed = 3};
  const Inputs in = inputs_of(batch);
  cpu::ThreadPool one(1);
  for (const cpu::Isa isa : cpu::available_isas()) {
    const Outputs all = run(batch, in, {.pool = &pool(), .isa = isa});
    for (const int64_t t : {int64_t{0}, int64_t{30}, int64_t{60}}) {
      Case single = batch;
      single.num_tokens = 1;
      const auto row = [&](const std::vector<float>& values) {
        return std::vector<float>(values.begin() + t * 515, values.begin() + (t + 1) * 515);
      };
      const Outputs alone = run(single, {row(in.x), row(in.residual), in.weight}, {.pool = &one, .isa = isa});
      EXPECT_EQ(alone.out, row(all.out));
      EXPECT_EQ(alone.residual_out, row(all.residual_out));
    }
  }
}

TEST(RmsNorm, Rejections) {
  GuardedTensor x(DType::kF32, {3, 8});
  GuardedTensor half(DType::kF16, {3, 8});
  GuardedTensor narrow(DType::kF32, {3, 4});
  GuardedTensor weight(DType::kF32, {8});
  GuardedTensor short_weight(DType::kF32, {7});
  GuardedTensor bf16_weight(DType::kBF16, {8});
  const RmsNormArgs good{.out = x.view(), .x = x.view(), .weight = weight.view()};
  const auto error = [&](auto change, std::string_view variant = "") {
    RmsNormArgs args = good;
    change(args);
    return testkit::error_of([&] { rms_norm(args, {.pool = &pool(), .variant = variant}); });
  };
  EXPECT_EQ(error([](auto& a) { a.x = {}; }), "rms_norm: x is required");
  EXPECT_EQ(error([&](auto& a) { a.weight = short_weight.view(); }),
            "rms_norm: weight has shape [7], expected [hidden = 8] (from x)");
  EXPECT_EQ(error([&](auto& a) { a.weight = bf16_weight.view(); }),
            "rms_norm: weight has type bfloat16, expected float32");
  EXPECT_EQ(error([&](auto& a) { a.weight = bf16_weight.view(), a.x = a.out = half.view(); }),
            "rms_norm: weight has type bfloat16, expected float32 or float16");
  EXPECT_EQ(error([&](auto& a) { a.out = half.view(); }), "rms_norm: out has type float16, expected float32");
  EXPECT_EQ(error([&](auto& a) { a.out = narrow.view(); }),
            "rms_norm: out has shape [3, 4], expected [num_tokens = 3, hidden = 8] (from x)");
  EXPECT_EQ(error([](auto& a) { a.x.strides[1] = 2; }), "rms_norm: x must be contiguous in its last dimension");
  EXPECT_EQ(error([](auto& a) { a.x.dtype = DType::kI32; }),
            "rms_norm: x has type int32, expected float32 or float16 or bfloat16");
  EXPECT_EQ(error([&](auto& a) { a.residual = x.view(); }),
            "rms_norm: residual and residual_out must be given together");
  EXPECT_EQ(error([&](auto& a) { a.residual = x.view(), a.residual_out = narrow.view(); }),
            "rms_norm: residual_out has shape [3, 4], expected [num_tokens = 3, hidden = 8] (from x)");
  EXPECT_EQ(error([](auto& a) {
              a.out.device = {DeviceType::kCuda, 0};
            }),
            "rms_norm: out is on another device than the other arguments");
  EXPECT_EQ(error([](auto& a) { a.eps = -1.0f; }), "rms_norm: eps is -1, expected a number >= 0");
  EXPECT_EQ(error([](auto&) {}, "fast"), "rms_norm: no variant \"fast\"; known are ref, cpu");
}

}  // namespace
}  // namespace shoal
