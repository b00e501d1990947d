// The Mamba-2 mixer phase by phase against brute force in f64, each phase from the intermediate results that the call
// itself returned (a bf16 rounding may fall on either side); bits where the contract fixes them.
#include "shoal/ops/mamba2/mamba2.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>

#include "shoal/cpu/thread_pool.h"
#include "testkit/bound_tensors.h"
#include "testkit/expect_error.h"

namespace shoal {
namespace {

using testkit::BoundTensors;
using Floats = std::vector<float>;

cpu::ThreadPool& pool() {
  static cpu::ThreadPool pool(2);
  return pool;
}

std::vector<OpContext> contexts() {
  std::vector<OpContext> list = {{.pool = &pool(), .variant = "ref"}};
  for (const cpu::Isa isa : cpu::available_isas()) {
    list.push_back({.pool = &pool(), .isa = isa});
  }
  return list;
}

std::string name_of(const OpContext& context) {
  return context.variant.empty() ? std::string(cpu::to_string(context.isa)) : std::string(context.variant);
}

float at(const Floats& values, int64_t i) { return values[static_cast<size_t>(i)]; }
Floats part(const Floats& values, int64_t begin, int64_t end) { return {values.begin() + begin, values.begin() + end}; }
double silu(double x) { return x / (1 + std::exp(-x)); }

struct Mixer {
  int64_t num_rows = 3, num_slots = 4, heads = 4, groups = 2;
  int32_t state_row = 1;
  Floats projection{}, conv_state{}, ssm_state{}, conv_weight{}, conv_bias{}, dt_bias{}, a_negative{}, d{}, norm{};

  int64_t inner() const { return heads * 64; }
  int64_t channels() const { return inner() + 2 * groups * 128; }
  int64_t width() const { return inner() + channels() + heads; }
  void fill(uint64_t seed) {
    testkit::Random random(seed);
    const auto floats = [&](int64_t count, DType dtype, float deviation) {
      Floats values = random.normals(static_cast<size_t>(count), deviation);
      for (float& value : values) {
        value = testkit::rounded_to(dtype, value);
      }
      return values;
    };
    projection = floats(num_rows * width(), DType::kBF16, 1.0f);
    conv_state = floats(num_slots * channels() * 3, DType::kBF16, 1.0f);
    ssm_state = floats(num_slots * heads * 128 * 64, DType::kF32, 0.5f);
    conv_weight = floats(channels() * 4, DType::kBF16, 0.5f);
    conv_bias = floats(channels(), DType::kBF16, 0.2f);
    dt_bias = floats(heads, DType::kF32, 1.0f);
    a_negative = floats(heads, DType::kF32, 1.0f);
    for (float& value : a_negative) {
      value = -std::fabs(value);
    }
    d = floats(heads, DType::kF32, 1.0f);
    norm = floats(inner(), DType::kF32, 1.0f);
  }
  // One row as a call of its own that starts from the given states.
  Mixer row(int64_t t, const Floats& conv, const Floats& ssm, int32_t start) const {
    Mixer single = *this;
    single.num_rows = 1;
    single.state_row = start;
    single.projection = part(projection, t * width(), (t + 1) * width());
    single.conv_state = conv;
    single.ssm_state = ssm;
    return single;
  }
};

struct Results {
  Floats y, conv, ssm, xbc, readout;
};

Results run(const Mixer& c, const OpContext& context, bool in_place = false, bool intermediates = true) {
  BoundTensors tensors;
  const int64_t padding = in_place ? 0 : 5;
  Mamba2VerifyArgs args;
  args.projection = tensors.floats(DType::kBF16, {c.num_rows, c.width()}, c.projection, padding);
  args.conv_state = tensors.floats(DType::kBF16, {c.num_slots, c.channels(), 3}, c.conv_state, padding);
  args.ssm_state = tensors.floats(DType::kF32, {c.num_slots, c.heads, 128, 64}, c.ssm_state, padding);
  args.conv_weight = in_place ? tensors.floats(DType::kBF16, {c.channels(), 1, 4}, c.conv_weight)
                              : tensors.floats(DType::kBF16, {c.channels(), 4}, c.conv_weight, 3);
  args.conv_bias = tensors.floats(DType::kBF16, {c.channels()}, c.conv_bias);
  args.dt_bias = tensors.floats(DType::kF32, {c.heads}, c.dt_bias);
  args.A_negative = tensors.floats(DType::kF32, {c.heads}, c.a_negative);
  args.D = tensors.floats(DType::kF32, {c.heads}, c.d);
  args.norm_weight = tensors.floats(DType::kF32, {c.inner()}, c.norm);
  args.state_row = tensors.integers({c.state_row});
  args.heads = c.heads;
  args.n_groups = c.groups;
  const Mamba2VerifyShapes shapes = mamba2_verify_shapes(args);
  const auto output = [&](const OutputSpec& spec) { return tensors.output(spec.dtype, spec.shape, padding); };
  args.Y = output(shapes.Y);
  args.conv_snapshots = in_place ? args.conv_state : output(shapes.conv_snapshots);
  args.ssm_snapshots = in_place ? args.ssm_state : output(shapes.ssm_snapshots);
  if (intermediates) {
    args.xbc = output(shapes.xbc);
    args.readout = output(shapes.readout);
  }
  Workspace workspace(mamba2_verify_workspace_bytes(args, context.pool->num_threads()));
  OpContext with_workspace = context;
  with_workspace.workspace = &workspace;
  mamba2_verify(args, with_workspace);
  EXPECT_TRUE(tensors.intact());
  Results r{
      tensors.values_of(args.Y), tensors.values_of(args.conv_snapshots), tensors.values_of(args.ssm_snapshots), {}, {}};
  if (intermediates) {
    r.xbc = tensors.values_of(args.xbc);
    r.readout = tensors.values_of(args.readout);
  }
  return r;
}

void expect_close(const Floats& actual, const Floats& right, double rtol, double atol, const char* what) {
  const auto close = testkit::compare(actual, right, rtol, atol);
  EXPECT_TRUE(close) << what << ": " << close.text;
}

void expect_right(const Mixer& c, const Results& r) {
  // Convolution, and its snapshots as plain copies.
  Floats xbc, conv = c.conv_state;
  const auto sample = [&](int64_t pos, int64_t channel) {
    return pos >= 0 ? at(c.projection, pos * c.width() + c.inner() + channel)
                    : at(c.conv_state, (c.state_row * c.channels() + channel) * 3 + 3 + pos);
  };
  const int64_t skipped = std::max<int64_t>(0, c.num_rows - c.num_slots);
  for (int64_t t = 0; t < c.num_rows; ++t) {
    for (int64_t channel = 0; channel < c.channels(); ++channel) {
      double sum = at(c.conv_bias, channel);
      for (int64_t tap = 0; tap < 4; ++tap) {
        sum += static_cast<double>(at(c.conv_weight, channel * 4 + tap)) * sample(t - 3 + tap, channel);
      }
      xbc.push_back(static_cast<float>(silu(sum)));
      for (int64_t i = 0; t >= skipped && i < 3; ++i) {
        conv[static_cast<size_t>(((t - skipped) * c.channels() + channel) * 3 + i)] = sample(t - 2 + i, channel);
      }
    }
  }
  expect_close(r.xbc, xbc, 0x1p-8 * 1.01, 1e-6, "xbc");
  EXPECT_EQ(r.conv, conv);
  // Recurrence, from the xbc that the call returned.
  Floats readout(r.readout.size()), ssm = c.ssm_state;
  for (int64_t h = 0; h < c.heads; ++h) {
    std::vector<double> state(128 * 64);
    for (int64_t i = 0; i < 128 * 64; ++i) {
      state[static_cast<size_t>(i)] = at(c.ssm_state, (c.state_row * c.heads + h) * 128 * 64 + i);
    }
    const int64_t group = h / (c.heads / c.groups);
    for (int64_t t = 0; t < c.num_rows; ++t) {
      const double raw =
          static_cast<double>(at(c.projection, t * c.width() + c.inner() + c.channels() + h)) + at(c.dt_bias, h);
      const double dt = std::max(raw > 20 ? raw : std::log1p(std::exp(raw)), static_cast<double>(1e-3f));
      for (int64_t i = 0; i < 64; ++i) {
        const double x = at(r.xbc, t * c.channels() + h * 64 + i);
        double sum = at(c.d, h) * x;
        for (int64_t n = 0; n < 128; ++n) {
          double& s = state[static_cast<size_t>(n * 64 + i)];
          const int64_t b_at = t * c.channels() + c.inner() + group * 128 + n;
          s = std::exp(at(c.a_negative, h) * dt) * s + dt * x * at(r.xbc, b_at);
          sum += s * at(r.xbc, b_at + c.groups * 128);
        }
        readout[static_cast<size_t>(t * c.inner() + h * 64 + i)] = static_cast<float>(sum);
      }
      for (int64_t i = 0; t >= skipped && i < 128 * 64; ++i) {
        ssm[static_cast<size_t>(((t - skipped) * c.heads + h) * 128 * 64 + i)] =
            static_cast<float>(state[static_cast<size_t>(i)]);
      }
    }
  }
  expect_close(r.readout, readout, 1e-5, 2e-4, "readout");
  expect_close(r.ssm, ssm, 1e-5, 1e-5, "ssm_snapshots");
  // Gate and norm, from the readout that the call returned.
  Floats y;
  const int64_t size = c.inner() / c.groups;
  for (int64_t t = 0; t < c.num_rows; ++t) {
    for (int64_t i = 0; i < c.inner(); ++i) {
      const auto gated = [&](int64_t j) {
        return at(r.readout, t * c.inner() + j) * silu(at(c.projection, t * c.width() + j));
      };
      double squares = 0;
      for (int64_t j = i / size * size; j < (i / size + 1) * size; ++j) {
        squares += gated(j) * gated(j);
      }
      y.push_back(static_cast<float>(gated(i) / std::sqrt(squares / static_cast<double>(size) + 1e-5) * at(c.norm, i)));
    }
  }
  expect_close(r.y, y, 0x1p-8 * 1.01, 1e-6, "Y");
}

TEST(Mamba2Verify, BruteForce) {
  uint64_t seed = 0;
  for (const auto& [num_rows, num_slots] : {std::pair{1, 1}, {1, 3}, {3, 4}, {4, 4}, {5, 2}, {6, 1}}) {
    for (const auto& [heads, groups] : {std::pair{1, 1}, {4, 2}}) {
      Mixer c{.num_rows = num_rows, .num_slots = num_slots, .heads = heads, .groups = groups};
      c.state_row = num_slots - 1;
      c.fill(++seed);
      for (const OpContext& context : contexts()) {
        SCOPED_TRACE(concat(name_of(context), " rows ", num_rows, " slots ", num_slots, " heads ", heads));
        const Results r = run(c, context);
        expect_right(c, r);
        const Results in_place = run(c, context, /*in_place=*/true, /*intermediates=*/false);
        EXPECT_EQ(in_place.y, r.y);
        EXPECT_EQ(in_place.conv, r.conv);
        EXPECT_EQ(in_place.ssm, r.ssm);
        cpu::ThreadPool three(3);
        OpContext other = context;
        other.pool = &three;
        EXPECT_EQ(run(c, other).y, r.y);
      }
    }
  }
}

TEST(Mamba2Verify, RowsOneByOneGiveTheSameBits) {
  Mixer c{.num_rows = 4, .num_slots = 5, .state_row = 2};
  c.fill(21);
  for (const OpContext& context : contexts()) {
    const Results whole = run(c, context);
    const int64_t conv_size = c.channels() * 3, ssm_size = c.heads * 128 * 64;
    Floats conv = c.conv_state, ssm = c.ssm_state;
    for (int64_t t = 0; t < 4; ++t) {
      const Results single = run(c.row(t, conv, ssm, t == 0 ? 2 : 0), context);
      EXPECT_EQ(single.y, part(whole.y, t * c.inner(), (t + 1) * c.inner())) << name_of(context);
      EXPECT_EQ(part(single.conv, 0, conv_size), part(whole.conv, t * conv_size, (t + 1) * conv_size));
      EXPECT_EQ(part(single.ssm, 0, ssm_size), part(whole.ssm, t * ssm_size, (t + 1) * ssm_size));
      conv = single.conv;
      ssm = single.ssm;
    }
    // An accepted prefix of two rows goes on from its snapshot.
    const Results next = run(c.row(2, whole.conv, whole.ssm, 1), context);
    EXPECT_EQ(next.y, part(whole.y, 2 * c.inner(), 3 * c.inner())) << name_of(context);
  }
}

TEST(Mamba2Verify, PartitionsOfTheReadout) {
  // No decay and the smallest time step, so that f32 arithmetic here has the same bits.
  for (const int64_t num_slots : {1, 2}) {
    Mixer c{.num_rows = 1, .num_slots = num_slots, .heads = 1, .groups = 1, .state_row = 0};
    c.fill(31);
    c.a_negative = {0.0f};
    c.dt_bias = {-1000.0f};
    for (const OpContext& context : contexts()) {
      const Results r = run(c, context);
      const auto emulate = [&](int64_t num_partitions) {
        Floats readout;
        for (int64_t i = 0; i < 64; ++i) {
          float total = 0;
          for (int64_t p = 0; p < num_partitions; ++p) {
            float sum = 0;
            for (int64_t n = 128 / num_partitions * p; n < 128 / num_partitions * (p + 1); ++n) {
              const float driven = 1e-3f * at(r.xbc, i);
              const float s = at(c.ssm_state, n * 64 + i) + driven * at(r.xbc, 64 + n);
              sum += at(r.xbc, 64 + 128 + n) * s;
            }
            total = p == 0 ? sum : total + sum;
          }
          readout.push_back(at(c.d, 0) * at(r.xbc, i) + total);
        }
        return readout;
      };
      EXPECT_EQ(r.readout, emulate(num_slots == 1 ? 2 : 4)) << name_of(context);
      EXPECT_NE(r.readout, emulate(num_slots == 1 ? 4 : 2)) << name_of(context);
    }
  }
}

TEST(Mamba2Verify, UnknownStateRowGivesNan) {
  for (const int32_t state_row : {-1, 3, INT32_MAX, INT32_MIN}) {
    for (const int64_t num_rows : {2, 5}) {
      Mixer c{.num_rows = num_rows, .num_slots = 3, .heads = 2, .groups = 1, .state_row = state_row};
      c.fill(41);
      for (const OpContext& context : contexts()) {
        const Results r = run(c, context);
        const auto expect_nan = [&](const Floats& values) {
          for (const float value : values) {
            ASSERT_TRUE(std::isnan(value)) << name_of(context);
          }
        };
        const int64_t written = std::min<int64_t>(num_rows, 3);
        const int64_t conv_size = c.channels() * 3, ssm_size = c.heads * 128 * 64;
        expect_nan(r.y);
        expect_nan(r.xbc);
        expect_nan(r.readout);
        expect_nan(part(r.conv, 0, written * conv_size));
        expect_nan(part(r.ssm, 0, written * ssm_size));
        EXPECT_EQ(part(r.conv, written * conv_size, 3 * conv_size),
                  part(c.conv_state, written * conv_size, 3 * conv_size));
        EXPECT_EQ(part(r.ssm, written * ssm_size, 3 * ssm_size), part(c.ssm_state, written * ssm_size, 3 * ssm_size));
      }
    }
  }
}

TEST(Mamba2Verify, TimeStepKeepsNan) {
  Mixer c{.num_rows = 2, .num_slots = 2, .heads = 2, .groups = 1, .state_row = 0};
  c.fill(51);
  c.dt_bias = {NAN, 30.0f};
  for (const OpContext& context : contexts()) {
    const Results r = run(c, context);
    EXPECT_TRUE(std::isnan(r.readout[0])) << name_of(context);
    EXPECT_TRUE(std::isfinite(r.readout[64])) << name_of(context);
  }
}

TEST(Mamba2Verify, Rejections) {
  BoundTensors tensors;
  const Floats zeros(2 * 2 * 128 * 64);
  const auto floats = [&](std::vector<int64_t> shape, DType dtype = DType::kBF16) {
    return tensors.floats(dtype, std::move(shape), zeros);
  };
  Mamba2VerifyArgs good;
  good.heads = 2;
  good.n_groups = 1;
  good.projection = floats({3, 128 + 384 + 2});
  good.conv_state = floats({2, 384, 3});
  good.ssm_state = floats({2, 2, 128, 64}, DType::kF32);
  good.conv_weight = floats({384, 4});
  good.conv_bias = floats({384});
  good.dt_bias = good.A_negative = good.D = floats({2}, DType::kF32);
  good.norm_weight = floats({128}, DType::kF32);
  good.state_row = tensors.integers({0});
  good.Y = floats({3, 128});
  good.conv_snapshots = floats({2, 384, 3});
  good.ssm_snapshots = floats({2, 2, 128, 64}, DType::kF32);
  const auto error = [&](auto change) {
    Mamba2VerifyArgs args = good;
    change(args);
    Workspace workspace(1 << 20);
    return testkit::error_of([&] { mamba2_verify(args, {.pool = &pool(), .workspace = &workspace}); });
  };
  const std::string op = "mamba2_verify: ";
  EXPECT_EQ(error([](auto&) {}), "");
  EXPECT_EQ(error([](auto& a) { a.heads = 0; }), op + "heads is 0, expected more than 0");
  EXPECT_EQ(error([](auto& a) { a.n_groups = 3; }), op + "n_groups is 3, expected a divisor of heads = 2");
  EXPECT_EQ(error([](auto& a) { a.n_groups = 0; }), op + "n_groups is 0, expected a divisor of heads = 2");
  EXPECT_EQ(error([](auto& a) { a.epsilon = -1; }), op + "epsilon is -1, expected a finite value of at least 0");
  EXPECT_EQ(error([](auto& a) { a.time_step_min = NAN; }),
            op + "time_step_min is nan, expected a finite value of at least 0");
  EXPECT_EQ(error([](auto& a) { a.head_dim = 0; }), op + "head_dim is 0, expected more than 0");
  for (const auto& entry :
       {std::pair{"head_dim", &Mamba2VerifyArgs::head_dim}, {"d_state", &Mamba2VerifyArgs::d_state}}) {
    const auto member = entry.second;
    testkit::expect_error(ErrorCode::kUnsupported, op + entry.first + " is 32, only ", [&] {
      Mamba2VerifyArgs args = good;
      args.*member = 32;
      mamba2_verify(args, {.pool = &pool()});
    });
  }
  EXPECT_EQ(error([&](auto& a) {
              a.projection = floats({3, 512});
            }),
            op + "projection has shape [3, 512], expected [num_rows, 514]");
  EXPECT_EQ(error([&](auto& a) {
              a.projection = floats({0, 514});
            }),
            op + "projection has shape [0, 514], expected at least one row");
  EXPECT_EQ(error([&](auto& a) {
              a.projection = floats({3, 514}, DType::kF16);
            }),
            op + "projection has type float16, expected bfloat16");
  EXPECT_EQ(error([&](auto& a) {
              a.conv_state = floats({2, 384, 4});
            }),
            op + "conv_state has shape [2, 384, 4], expected [slots, channels = 384, 3]");
  EXPECT_EQ(error([&](auto& a) {
              a.conv_state = floats({0, 384, 3});
            }),
            op + "conv_state has shape [0, 384, 3], expected at least one slot");
  EXPECT_EQ(error([&](auto& a) {
              a.ssm_state = floats({1, 2, 128, 64}, DType::kF32);
            }),
            op + "ssm_state has shape [1, 2, 128, 64], expected [slots = 2, heads = 2, 128, 64] (from conv_state)");
  EXPECT_EQ(error([&](auto& a) {
              a.conv_weight = floats({384, 1, 3});
            }),
            op + "conv_weight has shape [384, 1, 3], expected [channels = 384, 1, 4]");
  EXPECT_EQ(error([&](auto& a) {
              a.conv_weight = floats({384, 3});
            }),
            op + "conv_weight has shape [384, 3], expected [channels = 384, 4]");
  EXPECT_EQ(error([](auto& a) { a.conv_bias = {}; }), op + "conv_bias is required");
  EXPECT_EQ(error([&](auto& a) { a.dt_bias = floats({2}); }), op + "dt_bias has type bfloat16, expected float32");
  EXPECT_EQ(error([&](auto& a) { a.A_negative = floats({1}, DType::kF32); }),
            op + "A_negative has shape [1], expected [heads = 2]");
  EXPECT_EQ(error([&](auto& a) { a.D = floats({3}, DType::kF32); }), op + "D has shape [3], expected [heads = 2]");
  EXPECT_EQ(error([&](auto& a) { a.norm_weight = floats({64}, DType::kF32); }),
            op + "norm_weight has shape [64], expected [heads * head_dim = 128]");
  EXPECT_EQ(error([&](auto& a) {
              a.state_row = tensors.integers({0, 1});
            }),
            op + "state_row has shape [2], expected [1]");
  EXPECT_EQ(error([&](auto& a) { a.state_row = floats({1}, DType::kF32); }),
            op + "state_row has type float32, expected int32");
  EXPECT_EQ(error([&](auto& a) { a.Y = floats({3, 64}); }), op + "Y has shape [3, 64], expected [3, 128]");
  EXPECT_EQ(error([](auto& a) { a.ssm_snapshots = {}; }), op + "ssm_snapshots is required");
  EXPECT_EQ(error([&](auto& a) { a.readout = floats({3, 128}); }), op + "readout has type bfloat16, expected float32");
  testkit::expect_error(ErrorCode::kInvalidArgument, op + "workspace is required",
                        [&] { mamba2_verify(good, {.pool = &pool()}); });
}

}  // namespace
}  // namespace shoal
