// MoEPacked: every GGUF type against f64, routing with and without router_weights, rejections.
#include <gtest/gtest.h>

#include "shoal/cpu/thread_pool.h"
#include "shoal/ops/moe/moe_cases.h"
#include "shoal/quant/format.h"
#include "testkit/expect_error.h"

namespace shoal {
namespace {

using moe_cases::at;
using moe_cases::Memory;
using testkit::expect_error;
using testkit::GuardedTensor;
using testkit::rounded_to;

// Packed types and where their f16 scales stand in a block.
struct Type {
  int64_t id;
  std::vector<int> scales;
};
const std::vector<Type>& types() {
  static const std::vector<Type> list = {{2, {0}},       {3, {0, 2}}, {6, {0}},     {7, {0, 2}},  {8, {0}},
                                         {10, {80, 82}}, {11, {108}}, {12, {0, 2}}, {13, {0, 2}}, {14, {208}},
                                         {16, {0}},      {17, {0}},   {18, {0}},    {20, {0}},    {21, {0}},
                                         {22, {0}},      {23, {0}},   {39, {}},     {40, {}}};
  return list;
}

cpu::ThreadPool& pool() {
  static cpu::ThreadPool pool(2);
  return pool;
}

struct Experts {
  TensorView weights;
  std::vector<float> values;  // [e, n, k], rounded to the activations' type
};

// Random blocks, whose scales are set so that values are about 1 / sqrt(k).
Experts make_experts(Memory& memory, testkit::Random& random, const Type& type, int64_t e, int64_t n, int64_t k,
                     DType dtype) {
  const Format format = format_from_ggml_type(static_cast<uint32_t>(type.id)).value();
  const FormatInfo& about = info(format);
  Experts experts{memory.make(DType::kU8, {e, n, row_bytes(format, k)}), {}};
  std::vector<float> values(at(about.block_size));
  auto* block = experts.weights.as<std::byte>();
  for (int64_t b = 0; b < e * n * k / about.block_size; ++b, block += about.block_bytes) {
    for (int i = 0; i < about.block_bytes; ++i) {
      block[i] = static_cast<std::byte>(random.integer(0, 255));
    }
    for (int i = 0; i < (type.id == 39 ? 1 : type.id == 40 ? 4 : 0); ++i) {
      block[i] = static_cast<std::byte>(type.id == 39 ? random.integer(121, 123) : random.integer(0x10, 0x18));
    }
    const auto set_scales = [&](float scale) {
      const uint16_t bits = f32_to_f16(scale);
      for (const int place : type.scales) {
        std::memcpy(block + place, &bits, sizeof(bits));
      }
    };
    set_scales(1.0f);
    decode_row(format, block, about.block_size, values.data());
    double square = 1e-9;
    for (const float value : values) {
      square += static_cast<double>(value) * static_cast<double>(value);
    }
    set_scales(static_cast<float>(std::sqrt(static_cast<double>(about.block_size) / square / static_cast<double>(k))));
    decode_row(format, block, about.block_size, values.data());
    for (const float value : values) {
      experts.values.push_back(rounded_to(dtype, value));
    }
  }
  return experts;
}

struct Call {
  Call(const Type& gate_type, const Type& up_type, const Type& down_type, DType dtype, int64_t tokens, bool squared,
       bool full, uint64_t seed)
      : t(tokens), full_scores(full) {
    testkit::Random random(seed);
    gate = make_experts(memory, random, gate_type, e, i, h, dtype);
    down = make_experts(memory, random, down_type, e, h, i, dtype);
    x = random.normals(at(t * h));
    scores = random.normals(at(t * e));
    for (int64_t n = 0; n < t * e; ++n) {
      mixing.push_back(random.uniform(0.1f, 1.0f));  // their sum divides
    }
    for (float& value : x) {
      value = rounded_to(dtype, value);
    }
    args.input = memory.floats(dtype, {t, h}, x);
    args.router_probs = memory.floats(DType::kF32, {t, e}, scores);
    args.gate_experts_weights = gate.weights;
    args.down_experts_weights = down.weights;
    args.gate_type = gate_type.id;
    args.down_type = down_type.id;
    args.k = 2;
    if (squared) {
      args.activation_type = "relu2";
    } else {
      up = make_experts(memory, random, up_type, e, i, h, dtype);
      args.up_experts_weights = up.weights;
      args.up_type = up_type.id;
    }
    if (full) {
      args.router_weights = memory.floats(DType::kF32, {t, e}, mixing);
      args.routed_scaling_factor = 2.5f;
      args.routing_epsilon = 0.125f;
    }
  }

  std::vector<float> expected() const {
    std::vector<float> y;
    for (int64_t row = 0; row < t; ++row) {
      std::vector<int64_t> order = {0, 1, 2};
      std::sort(order.begin(), order.end(),
                [&](int64_t a, int64_t b) { return scores[at(row * e + a)] > scores[at(row * e + b)]; });
      double weights[2], sum = 0;
      for (int j = 0; j < 2; ++j) {
        const size_t place = at(row * e + order[at(j)]);
        weights[j] = full_scores ? static_cast<double>(mixing[place]) : std::exp(static_cast<double>(scores[place]));
        sum += weights[j];
      }
      std::vector<double> out(at(h));
      for (int j = 0; j < 2; ++j) {
        const double weight = full_scores ? weights[j] / (sum + 0.125) * 2.5 : weights[j] / sum;
        const int64_t expert = order[at(j)];
        std::vector<double> hidden;
        for (int64_t n = 0; n < i; ++n) {
          const double g = dot(gate, expert, n, i, h, x, row * h);
          hidden.push_back(args.up_experts_weights ? g / (1 + std::exp(-g)) * dot(up, expert, n, i, h, x, row * h)
                                                   : std::max(g, 0.0) * std::max(g, 0.0));
        }
        for (int64_t n = 0; n < h; ++n) {
          out[at(n)] += weight * dot(down, expert, n, h, i, hidden, 0);
        }
      }
      y.insert(y.end(), out.begin(), out.end());
    }
    return y;
  }

  template <class X>
  static double dot(const Experts& w, int64_t expert, int64_t n, int64_t num_n, int64_t num_k, const std::vector<X>& in,
                    int64_t offset) {
    double sum = 0;
    for (int64_t k = 0; k < num_k; ++k) {
      sum +=
          static_cast<double>(in[at(offset + k)]) * static_cast<double>(w.values[at((expert * num_n + n) * num_k + k)]);
    }
    return sum;
  }

  int64_t t, h = 256, i = 256, e = 3;
  bool full_scores;
  Memory memory;
  Experts gate, up, down;
  std::vector<float> x, scores, mixing;
  MoEPackedArgs args;
};

std::vector<float> run(MoEPackedArgs args, cpu::Isa isa, std::string_view variant = "") {
  GuardedTensor output(args.input.dtype, {args.input.dims().begin(), args.input.dims().end()});
  args.output = output.view();
  Workspace workspace(moe_packed_workspace_bytes(args, 2));
  moe_packed(args, {.pool = &pool(), .workspace = &workspace, .isa = isa, .variant = variant});
  EXPECT_TRUE(output.intact());
  return output.values();
}

TEST(MoEPacked, EveryTypeAgreesWithF64) {
  uint64_t seed = 0;
  for (const Type& type : types()) {
    const DType dtype = seed % 3 == 0 ? DType::kF32 : seed % 3 == 1 ? DType::kF16 : DType::kBF16;
    const Type& other = types()[(seed + 5) % types().size()];  // three types in a layer
    const Type& third = types()[(seed + 9) % types().size()];
    const bool squared = seed % 2 == 1;
    SCOPED_TRACE(concat("types ", type.id, ", ", other.id, ", ", third.id, " ", to_string(dtype)));
    ++seed;
    const Call call(type, other, third, dtype, 3, squared, seed % 4 < 2, seed);
    const std::vector<float> expected = call.expected();
    const double tolerance = dtype == DType::kF32 ? 1e-4 : dtype == DType::kF16 ? 0.03 : 0.3;
    for (const cpu::Isa isa : cpu::available_isas()) {
      const testkit::Comparison result = testkit::compare(run(call.args, isa), expected, 0.0, tolerance);
      EXPECT_TRUE(result.ok) << cpu::to_string(isa) << ": " << result.text;
    }
    if (seed % 5 == 0) {  // slow: it decodes a row for each output
      const std::vector<float> reference = run(call.args, cpu::Isa::kScalar, "ref");
      EXPECT_TRUE(testkit::compare(reference, expected, 0.0, tolerance).ok);
      if (squared) {
        EXPECT_EQ(run(call.args, cpu::available_isas().back()), reference);
      }
    }
  }
}

TEST(MoEPacked, RowsDoNotDependOnEachOther) {
  const Call call(types()[7], types()[9], types()[4], DType::kBF16, 7, false, true, 77);
  const cpu::Isa isa = cpu::available_isas().back();
  const std::vector<float> together = run(call.args, isa);
  MoEPackedArgs args = call.args;
  args.input = args.input.rows(4, 5);
  args.router_probs = args.router_probs.rows(4, 5);
  args.router_weights = args.router_weights.rows(4, 5);
  EXPECT_EQ(run(args, isa), std::vector<float>(together.begin() + 4 * 256, together.begin() + 5 * 256));
}

TEST(MoEPacked, PoisonedRowsAndNoTokens) {
  Call call(types()[4], types()[4], types()[4], DType::kF32, 3, false, true, 5);
  const cpu::Isa isa = cpu::available_isas().back();
  const std::vector<float> clean = run(call.args, isa);
  call.args.router_probs.as<float>()[3] = INFINITY;  // token 1 takes expert 0
  call.args.router_weights.as<float>()[3] = -INFINITY;
  call.args.router_probs.as<float>()[7] = NAN;  // last of token 2
  call.args.router_weights.as<float>()[7] = NAN;
  for (const std::vector<float>& y : {run(call.args, isa), run(call.args, isa, "ref")}) {
    for (int64_t n = 0; n < 256; ++n) {
      EXPECT_TRUE(testkit::compare({&y[at(n)], 1}, {&clean[at(n)], 1}, 1e-5, 1e-5).ok);
      EXPECT_FALSE(std::isfinite(y[at(256 + n)]));
      EXPECT_TRUE(std::isfinite(y[at(512 + n)]));
    }
  }
  call.args.input = call.args.input.rows(0, 0);
  call.args.router_probs = call.args.router_probs.rows(0, 0);
  call.args.router_weights = TensorView();
  call.args.routing_epsilon = 0.0f;
  call.args.routed_scaling_factor = 1.0f;
  EXPECT_TRUE(run(call.args, isa).empty());
}

TEST(MoEPacked, Rejections) {
  const Call call(types()[4], types()[4], types()[4], DType::kF16, 2, false, false, 5);
  GuardedTensor output(DType::kF16, {2, 256});
  Workspace workspace(moe_packed_workspace_bytes(call.args, 2));
  const auto rejected = [&](std::string_view part, const auto& change, ErrorCode code = ErrorCode::kInvalidArgument) {
    MoEPackedArgs args = call.args;
    args.output = output.view();
    change(args);
    SCOPED_TRACE(part);
    expect_error(code, concat("moe_packed: ", part),
                 [&] { moe_packed(args, {.pool = &pool(), .workspace = &workspace}); });
  };
  rejected("k is 0, expected 1 to 3", [](auto& a) { a.k = 0; });
  rejected("k is 4, expected 1 to 3", [](auto& a) { a.k = 4; });
  rejected("activation_type is 'gelu'", [](auto& a) { a.activation_type = "gelu"; });
  rejected("up_experts_weights must be absent", [](auto& a) { a.activation_type = "relu2"; });
  rejected("up_experts_weights is required", [](auto& a) { a.up_experts_weights = TensorView(); });
  rejected("gate_experts_weights is required", [](auto& a) { a.gate_experts_weights = TensorView(); });
  rejected("down_experts_weights has shape", [](auto& a) { a.down_type = 2; });
  rejected("up_type is -1", [](auto& a) { a.up_type = -1; });
  rejected(
      "gate_type 19", [](auto& a) { a.gate_type = 19; }, ErrorCode::kUnsupported);
  rejected(
      "gate_type 1 (f16)", [](auto& a) { a.gate_type = 1; }, ErrorCode::kUnsupported);
  rejected(
      "down_type 999", [](auto& a) { a.down_type = 999; }, ErrorCode::kUnsupported);
  rejected("routing_epsilon is 0.5, which needs router_weights", [](auto& a) { a.routing_epsilon = 0.5f; });
  rejected("routed_scaling_factor is 2, which needs router_weights", [](auto& a) { a.routed_scaling_factor = 2.0f; });
  rejected("normalize_routing_weights is 3", [](auto& a) { a.normalize_routing_weights = 3; });
  rejected("router_probs has shape", [](auto& a) { a.router_probs = a.router_probs.rows(0, 1); });
  rejected("router_weights has type", [](auto& a) {
    a.router_weights = a.router_probs;
    a.router_weights.dtype = DType::kF16;
  });
  rejected("input has type uint8", [](auto& a) { a.input.dtype = DType::kU8; });
  rejected("gate_experts_weights has rows of 255 values", [](auto& a) { a.input.shape[1] = 255; });
  rejected("output has shape", [](auto& a) { a.output = a.output.rows(0, 1); });
  for (const float value : output.values()) {
    ASSERT_TRUE(std::isnan(value));
  }
}

}  // namespace
}  // namespace shoal
