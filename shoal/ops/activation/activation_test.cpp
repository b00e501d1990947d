// gated_activation: values worked by hand, every type, gate and instruction set against the reference, rejections.
#include "shoal/ops/activation/activation.h"

#include <gtest/gtest.h>

#include <cmath>

#include "shoal/cpu/thread_pool.h"
#include "shoal/tensor/matcher.h"
#include "testkit/guarded_tensor.h"

namespace shoal {
namespace {

using testkit::GuardedTensor;

constexpr Gate kGates[] = {Gate::kSilu, Gate::kGeluTanh, Gate::kGelu, Gate::kRelu, Gate::kSigmoid, Gate::kClamped};

cpu::ThreadPool& pool() {
  static cpu::ThreadPool pool(2);
  return pool;
}

// Where the result goes and how gate and value lie.
enum class Layout { kApart, kIntoGate, kIntoValue, kHalves };

struct Case {
  DType dtype;
  Gate kind;
  int64_t num_tokens;
  int64_t width;
  Layout layout = Layout::kApart;
  std::string name() const {
    return concat(to_string(dtype), " gate ", static_cast<int>(kind), " [", num_tokens, ", ", width, "] layout ",
                  static_cast<int>(layout));
  }
};

std::vector<float> run(const Case& c, const std::vector<float>& gate, const std::vector<float>& value,
                       const OpContext& context) {
  const std::vector<int64_t> shape = {c.num_tokens, c.width};
  GuardedTensor out(c.dtype, shape, 5);
  GuardedTensor gates(c.dtype, shape, gate, 3);
  GuardedTensor values(c.dtype, shape, value, 1);
  GuardedTensor both(c.dtype, {c.num_tokens, 2, c.width}, [&] {
    std::vector<float> halves;
    for (int64_t t = 0; t < c.num_tokens; ++t) {
      halves.insert(halves.end(), gate.begin() + t * c.width, gate.begin() + (t + 1) * c.width);
      halves.insert(halves.end(), value.begin() + t * c.width, value.begin() + (t + 1) * c.width);
    }
    return halves;
  }());
  GatedActivationArgs args{.out = out.view(), .gate = gates.view(), .value = values.view(), .kind = c.kind};
  if (c.kind == Gate::kClamped) {
    args.alpha = 1.702f;
    args.limit = 2.5f;
  }
  if (c.layout == Layout::kHalves) {
    args.gate = TensorView(both.view().data, c.dtype, shape);
    args.gate.strides[0] = 2 * c.width;
    args.value = args.gate;
    args.value.data = static_cast<char*>(args.gate.data) + static_cast<size_t>(c.width) * size_of(c.dtype);
  }
  args.out = c.layout == Layout::kIntoGate ? args.gate : c.layout == Layout::kIntoValue ? args.value : args.out;
  gated_activation(args, context);
  EXPECT_TRUE(out.intact() && gates.intact() && values.intact() && both.intact()) << c.name();
  return (c.layout == Layout::kIntoGate ? gates : c.layout == Layout::kIntoValue ? values : out).values();
}

TEST(GatedActivation, ByHand) {
  // From tables: silu(1) = 1/(1+1/e); Phi(1), Phi(-2) of the normal distribution; gelu_tanh(1) = 0.84119199.
  struct Known {
    Gate kind;
    float gate;
    double result;
  };
  std::vector<OpContext> contexts = {{.pool = &pool(), .variant = "ref"}};
  for (const cpu::Isa isa : cpu::available_isas()) {
    contexts.push_back({.pool = &pool(), .isa = isa});
  }
  for (const Known& known :
       {Known{Gate::kSilu, 1.0f, 0.7310585786}, Known{Gate::kSilu, -1.0f, -0.2689414214},
        Known{Gate::kGelu, 1.0f, 0.8413447461}, Known{Gate::kGelu, -2.0f, -0.0455002639},
        Known{Gate::kGeluTanh, 1.0f, 0.8411919906}, Known{Gate::kGeluTanh, -1.0f, -0.1588080094},
        Known{Gate::kRelu, 2.5f, 2.5}, Known{Gate::kRelu, -2.5f, 0.0}, Known{Gate::kSigmoid, 1.0f, 0.7310585786}}) {
    for (const OpContext& context : contexts) {
      const auto result = run({DType::kF32, known.kind, 1, 1}, {known.gate}, {3.0f}, context);
      EXPECT_NEAR(result[0], 3.0 * known.result, 1e-6) << static_cast<int>(known.kind) << " of " << known.gate;
    }
  }
}

TEST(GatedActivation, ClampedByHand) {
  // 2.5 / (1 + exp(-4.255)) * (2.5 + 1) and -1 / (1 + exp(1.702)) * (-2.5 + 1)
  for (const std::string_view variant : {"ref", "cpu"}) {
    const auto result = run({DType::kF32, Gate::kClamped, 1, 2}, {7.0f, -1.0f}, {3.0f, -4.0f},
                            {.pool = &pool(), .isa = cpu::available_isas().back(), .variant = variant});
    EXPECT_NEAR(result[0], 8.6275484, 1e-5);
    EXPECT_NEAR(result[1], 0.2313064, 1e-6);
  }
}

TEST(GatedActivation, EveryInstructionSetAgreesWithTheReference) {
  for (const cpu::Isa isa : cpu::available_isas()) {
    SCOPED_TRACE(cpu::to_string(isa));
    for (const DType dtype : kFloats) {
      for (const Gate kind : kGates) {
        for (const auto& [num_tokens, width] :
             {std::pair<int64_t, int64_t>{0, 8}, {1, 1}, {2, 7}, {3, 16}, {2, 33}, {9, 2048}}) {
          for (const Layout layout : {Layout::kApart, Layout::kIntoGate, Layout::kIntoValue, Layout::kHalves}) {
            const Case c{dtype, kind, num_tokens, width, layout};
            testkit::Random random(static_cast<uint64_t>(width));
            const auto gate = random.normals(static_cast<size_t>(num_tokens * width), 3.0f);
            const auto value = random.normals(gate.size());
            const auto actual = run(c, gate, value, {.pool = &pool(), .isa = isa});
            const auto expected = run(c, gate, value, {.pool = &pool(), .variant = "ref"});
            // Two roundings to the type may fall on different sides of a tie; u of the GELUs is f32, and exp makes its
            // absolute error (up to 100 * 2^-24 here) a relative one. 1e-14: the reference itself cancels
            // in 1 + tanh.
            const double rtol = (dtype == DType::kF32 ? 0.0 : 2.0 * testkit::rounding_of(dtype)) +
                                (kind == Gate::kSilu || kind == Gate::kRelu || kind == Gate::kSigmoid ? 1e-6 : 1e-5);
            const auto same = testkit::compare(actual, expected, rtol, dtype == DType::kF16 ? 0x1p-24 : 1e-14);
            EXPECT_TRUE(same) << c.name() << ": " << same.text;
          }
        }
      }
    }
  }
}

TEST(GatedActivation, ExtremeGates) {
  const std::vector<float> gate = {0.0f,  -0.0f,  INFINITY, -INFINITY, NAN,    1e30f,   -1e30f, 100.0f, -100.0f,
                                   88.0f, -88.0f, 1e-40f,   -1e-40f,   1e-20f, -1e-20f, 13.0f,  -13.0f};
  const std::vector<float> value(gate.size(), 1.0f);
  for (const cpu::Isa isa : cpu::available_isas()) {
    for (const Gate kind : kGates) {
      const Case c{DType::kF32, kind, 1, static_cast<int64_t>(gate.size())};
      const auto actual = run(c, gate, value, {.pool = &pool(), .isa = isa});
      const auto same = testkit::compare(actual, run(c, gate, value, {.pool = &pool(), .variant = "ref"}), 1e-5, 1e-35);
      EXPECT_TRUE(same) << cpu::to_string(isa) << " " << c.name() << ": " << same.text;
    }
  }
}

TEST(GatedActivation, Rejections) {
  GuardedTensor x(DType::kF16, {3, 8});
  GuardedTensor wide(DType::kF16, {3, 9});
  GuardedTensor other(DType::kBF16, {3, 8});
  const GatedActivationArgs good{.out = x.view(), .gate = x.view(), .value = x.view()};
  const auto error = [&](auto change, std::string_view variant = "") {
    GatedActivationArgs args = good;
    change(args);
    return testkit::error_of([&] { gated_activation(args, {.pool = &pool(), .variant = variant}); });
  };
  EXPECT_EQ(error([](auto& a) { a.value = {}; }), "gated_activation: value is required");
  EXPECT_EQ(error([&](auto& a) { a.value = wide.view(); }),
            "gated_activation: value has shape [3, 9], expected [num_tokens = 3, width = 8] (from gate)");
  EXPECT_EQ(error([&](auto& a) { a.out = other.view(); }), "gated_activation: out has type bfloat16, expected float16");
  EXPECT_EQ(error([](auto& a) { a.gate.dtype = DType::kI8; }),
            "gated_activation: gate has type int8, expected float32 or float16 or bfloat16");
  EXPECT_EQ(error([](auto& a) { a.out.strides[1] = 2; }),
            "gated_activation: out must be contiguous in its last dimension");
  EXPECT_EQ(error([](auto& a) {
              a.value.device = {DeviceType::kCuda, 1};
            }),
            "gated_activation: value is on another device than the other arguments");
  EXPECT_EQ(error([](auto& a) { a.kind = static_cast<Gate>(9); }), "gated_activation: kind is 9, expected a Gate");
  EXPECT_EQ(error([](auto& a) { a.limit = -1.0f; }),
            "gated_activation: alpha is 1 and limit -1, expected a finite number and one that is not negative");
  EXPECT_EQ(error([](auto&) {}, "x"), "gated_activation: no variant \"x\"; known are ref, cpu");
}

}  // namespace
}  // namespace shoal
