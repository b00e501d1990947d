// Linear attention against a brute force in f64 (the matrix formulas) and onnxruntime's kernels, every instruction set;
// bit for bit where calls are cut differently.
#include "shoal/ops/delta_net/delta_net.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <limits>

#include "shoal/ops/delta_net/delta_net_cases.h"
#include "shoal/tensor/matcher.h"
#include "testkit/expect_error.h"
#include "tests/golden/recurrence_golden.h"

namespace shoal {
namespace {

using namespace delta_cases;

TEST(GatedDeltaNet, BruteForce) {
  uint64_t seed = 0;
  for (const std::string_view rule : {"linear", "gated", "delta", "gated_delta"}) {
    for (const int64_t length : {1, 4, 15, 17, 63, 65, 130}) {
      for (const int64_t group : {1, 3}) {
        Net c{.rule = rule, .lengths = {length}};
        c.dtype = std::array{DType::kF32, DType::kF16, DType::kBF16}[++seed % 3];
        c.q_heads = 1 + static_cast<int64_t>(seed % 2);
        c.v_heads = c.q_heads * group;
        c.k_size = std::array{8, 16, 17, 5, 1}[seed % 5];
        c.v_size = std::array{8, 7, 3, 1}[seed % 4];
        c.with_state = seed % 4 != 0;
        c.scale = seed % 3 == 0 ? 0.7f : 0.0f;
        c.normalise = rule != "linear" || seed % 2 == 0;
        c.fill(seed);
        expect_right(c);
      }
    }
  }
}

TEST(GatedDeltaNet, RealHeads) {
  for (const DType dtype : {DType::kF32, DType::kF16}) {
    Net c{.dtype = dtype, .gate = "qwen", .beta_activation = "sigmoid", .lengths = {256}};
    c.q_heads = 1;
    c.v_heads = 2;
    c.k_size = c.v_size = 128;
    c.fill(9);
    expect_right(c);
  }
}

TEST(GatedDeltaNet, GatesOfEveryKind) {
  uint64_t seed = 100;
  for (const std::string_view gate : {"none", "qwen", "softplus", "kda", "sigmoid"}) {
    for (const int kind : {0, 1, 2}) {
      for (const DType dtype : kFloats) {
        Net c{.dtype = dtype, .gate_dtype = ++seed % 2 == 0 ? dtype : DType::kF32, .gate = gate};
        c.beta_activation = seed % 2 == 0 ? "sigmoid" : "none";
        c.lengths = {9, 0, 20};
        c.q_heads = c.v_heads = 2;
        c.k_size = 19;
        c.v_size = 6;
        c.per_key = kind > 0;
        c.bias_per_key = kind > 1 && gate != "none";
        c.fill(seed);
        expect_right(c);
      }
    }
  }
}

TEST(GatedDeltaNet, FormsOfTheTokenAxisAgree) {
  for (const bool per_key : {false, true}) {
    Net c{.dtype = DType::kBF16, .lengths = {6, 6, 6}, .q_heads = 2, .v_heads = 4, .k_size = 10, .v_size = 9};
    c.per_key = per_key;
    c.fill(21);
    for (const OpContext& context : contexts()) {
      const Results ragged = run(c, context);
      for (const Form form : {Form::kEqual, Form::kRank4, Form::kPacked, Form::kPackedBatch}) {
        const Results other = run(c, context, false, form);
        EXPECT_EQ(other.output, ragged.output) << name_of(context) << " form " << static_cast<int>(form);
        EXPECT_EQ(other.state, ragged.state) << name_of(context) << " form " << static_cast<int>(form);
      }
    }
  }
}

// Tokens [begin, end) of a single sequence.
Net cut(const Net& c, int64_t begin, int64_t end, const Floats& state) {
  Net part_of = c;
  part_of.lengths = {end - begin};
  for (const auto& [member, row] : {std::pair{&Net::query, c.q_heads * c.k_size},
                                    {&Net::key, c.q_heads * c.k_size},
                                    {&Net::value, c.v_heads * c.v_size},
                                    {&Net::decay, c.v_heads * c.decay_size()},
                                    {&Net::beta, c.v_heads}}) {
    part_of.*member = part(c.*member, begin * row, end * row);
  }
  part_of.state = state;
  return part_of;
}

TEST(GatedDeltaNet, ChunksAgreeWithTheWhole) {
  for (const bool per_key : {false, true}) {
    Net c{.lengths = {50}, .q_heads = 1, .v_heads = 2, .k_size = 24, .v_size = 10, .per_key = per_key};
    c.fill(31);
    for (const OpContext& context : contexts()) {
      const Results whole = run(c, context);
      for (const int64_t first : {1, 15, 16, 17, 49}) {
        const Results head = run(cut(c, 0, first, c.state), context, /*in_place=*/true);
        const Results tail = run(cut(c, first, 50, head.state), context, /*in_place=*/true);
        Floats joined = head.output;
        joined.insert(joined.end(), tail.output.begin(), tail.output.end());
        EXPECT_EQ(joined, whole.output) << name_of(context) << " at " << first;
        EXPECT_EQ(tail.state, whole.state) << name_of(context) << " at " << first;
      }
    }
  }
}

TEST(GatedDeltaNet, NeighboursAndThreadsChangeNothing) {
  Net c{.lengths = {3, 40, 1}, .q_heads = 1, .v_heads = 3, .k_size = 16, .v_size = 70};
  c.fill(41);
  cpu::ThreadPool one(1);
  cpu::ThreadPool four(4);
  for (const cpu::Isa isa : cpu::available_isas()) {
    const Results batch = run(c, {.pool = &one, .isa = isa});
    EXPECT_EQ(run(c, {.pool = &four, .isa = isa}).output, batch.output);
    EXPECT_EQ(run(c, {.pool = &four, .isa = isa}).state, batch.state);
    const int64_t size = 3 * 70 * 16;
    Net packed_as_one = c;
    packed_as_one.lengths = {44};
    const Net alone = cut(packed_as_one, 3, 43, part(c.state, size, 2 * size));
    const Results single = run(alone, {.pool = &pool(), .isa = isa});
    EXPECT_EQ(single.output, part(batch.output, 3 * 210, 43 * 210));
    EXPECT_EQ(single.state, part(batch.state, size, 2 * size));
  }
}

// Replays the first `count` captured transitions of sequence b, in plain f32.
Floats replay(const Net& c, const Results& r, int64_t b, int64_t count) {
  const int64_t decay_width = c.v_heads * c.decay_size();
  const int64_t width = decay_width + c.q_heads * c.k_size + c.v_heads * c.v_size;
  const int64_t size = c.v_heads * c.v_size * c.k_size;
  Floats state = part(c.state, b * size, (b + 1) * size);
  const Floats row = part(r.update, b * c.capacity * width, (b + 1) * c.capacity * width);
  for (int64_t slot = 0; slot < count; ++slot) {
    for (int64_t h = 0; h < c.v_heads; ++h) {
      const int64_t key_head = h / (c.v_heads / c.q_heads);
      for (int64_t v = 0; v < c.v_size; ++v) {
        const float delta =
            at(row, c.capacity * (decay_width + c.q_heads * c.k_size) + (slot * c.v_heads + h) * c.v_size + v);
        for (int64_t k = 0; k < c.k_size; ++k) {
          const float decay = at(row, (slot * c.v_heads + h) * c.decay_size() + (c.per_key ? k : 0));
          const float key = at(row, c.capacity * decay_width + (slot * c.q_heads + key_head) * c.k_size + k);
          float& s = state[static_cast<size_t>((h * c.v_size + v) * c.k_size + k)];
          s *= decay;
          const float product = key * delta;
          s += product;
        }
      }
    }
  }
  return state;
}

TEST(GatedDeltaNet, CaptureReplaysToTheBitsOfSingleTokens) {
  for (const std::string_view rule : {"linear", "gated", "delta", "gated_delta"}) {
    for (const bool per_key : {false, true}) {
      if (per_key && !uses_decay(rule)) {
        continue;
      }
      Net c{.rule = rule, .lengths = {8, 3, 0}, .q_heads = 2, .v_heads = 4, .k_size = 12, .v_size = 5};
      c.per_key = per_key;
      c.capacity = 6;
      c.capture_count = {9, 2, 5};
      c.fill(51);
      const int64_t width = c.v_heads * c.decay_size() + c.q_heads * c.k_size + c.v_heads * c.v_size;
      for (const OpContext& context : contexts()) {
        SCOPED_TRACE(concat(name_of(context), " ", c.name()));
        const Results r = run(c, context);
        Net joined = c;
        joined.capacity = 0;
        joined.lengths = {11};
        const Results whole = run(c, context);
        for (int64_t b = 0; b < 2; ++b) {
          const int64_t begin = b == 0 ? 0 : 8;
          const int64_t size = c.v_heads * c.v_size * c.k_size;
          Floats state = part(c.state, b * size, (b + 1) * size);
          for (int64_t t = 0; t < (b == 0 ? 6 : 2); ++t) {
            state = run(cut(joined, begin + t, begin + t + 1, state), context).state;
            if (context.variant == "ref") {  // sums in f64: the same but for the last bit
              expect_near(replay(c, r, b, t + 1), state, 1e-6);
            } else {
              EXPECT_EQ(replay(c, r, b, t + 1), state) << "sequence " << b << " token " << t;
            }
          }
        }
        // Nothing is captured beyond the count, nor of an empty sequence.
        const int64_t keys = c.capacity * c.v_heads * c.decay_size();
        EXPECT_NE(at(r.update, c.capacity * width + keys + c.q_heads * c.k_size), 0.0f);
        EXPECT_EQ(at(r.update, c.capacity * width + keys + 2 * c.q_heads * c.k_size), 0.0f);
        EXPECT_EQ(part(r.update, 2 * c.capacity * width, 3 * c.capacity * width),
                  Floats(static_cast<size_t>(c.capacity * width)));
        EXPECT_EQ(part(r.state, 2 * 4 * 5 * 12, 3 * 4 * 5 * 12), part(c.state, 2 * 4 * 5 * 12, 3 * 4 * 5 * 12));
        Net inactive = c;
        inactive.active = 0;
        const Results off = run(inactive, context);
        EXPECT_EQ(off.update, Floats(r.update.size()));
        EXPECT_EQ(off.output, whole.output);
      }
    }
  }
}

TEST(GatedDeltaNet, MalformedOffsetsTouchNothingElse) {
  const int32_t lowest = std::numeric_limits<int32_t>::min();
  const int32_t highest = std::numeric_limits<int32_t>::max();
  Net c{.lengths = {5, 4, 3}, .q_heads = 1, .v_heads = 2, .k_size = 6, .v_size = 5, .capacity = 3};
  c.capture_count = {3, highest, lowest};
  c.fill(61);
  for (const OpContext& context : contexts()) {
    const Results right = run(c, context);
    for (const std::vector<int32_t>& offsets : std::vector<std::vector<int32_t>>{{0, 5, 9, highest},
                                                                                 {lowest, 5, 9, 12},
                                                                                 {0, 9, 5, 12},
                                                                                 {0, 0, highest, lowest},
                                                                                 {highest, highest, 3, 4},
                                                                                 {0, 12, 0, 12}}) {
      BoundTensors tensors;
      GatedDeltaNetArgs args;
      args.query = tensors.floats(c.dtype, {12, 1, 6}, c.query);
      args.key = tensors.floats(c.dtype, {12, 1, 6}, c.key);
      args.value = tensors.floats(c.dtype, {12, 2, 5}, c.value);
      args.decay = tensors.floats(c.dtype, {12, 2}, c.decay);
      args.beta = tensors.floats(c.dtype, {12, 2}, c.beta);
      args.initial_state = tensors.floats(c.dtype, {3, 2, 5, 6}, c.state);
      args.cu_seqlens = tensors.integers(offsets);
      args.capture_count = tensors.integers(c.capture_count);
      args.state_update_capacity = 3;
      args.qk_l2_norm = 1;
      const GatedDeltaNetShapes shapes = gated_delta_net_shapes(args);
      args.output = tensors.output(c.dtype, shapes.output.shape);
      args.final_state = tensors.output(c.dtype, shapes.final_state.shape);
      args.state_update = tensors.output(c.dtype, shapes.state_update.shape);
      Workspace workspace(gated_delta_net_workspace_bytes(args, 2));
      OpContext with_workspace = context;
      with_workspace.workspace = &workspace;
      gated_delta_net(args, with_workspace);
      EXPECT_TRUE(tensors.intact());
      if (offsets[1] == 5 && offsets[2] == 9) {  // what is clamped back into place is right
        EXPECT_EQ(tensors.values_of(args.output), right.output);
        EXPECT_EQ(tensors.values_of(args.final_state), right.state);
      }
    }
  }
}

TEST(GatedDeltaNet, AgreesWithOnnxRuntime) {
  const std::vector<golden::Case> cases = golden::read_cases("gated_delta_net");
  ASSERT_EQ(cases.size(), 14u);
  for (const golden::Case& c : cases) {
    for (const OpContext& context : contexts()) {
      SCOPED_TRACE(concat(name_of(context), " case ", &c - cases.data()));
      BoundTensors tensors;
      GatedDeltaNetArgs args;
      for (const auto& [name, array] : c.inputs) {
        if (array.dtype == DType::kI32) {
          (name == "cu_seqlens" ? args.cu_seqlens : args.capture_count) =
              tensors.integers(std::vector<int32_t>(array.values.begin(), array.values.end()));
          continue;
        }
        (name == "query"           ? args.query
         : name == "key"           ? args.key
         : name == "value"         ? args.value
         : name == "decay"         ? args.decay
         : name == "beta"          ? args.beta
         : name == "initial_state" ? args.initial_state
         : name == "a_log"         ? args.a_log
                                   : args.dt_bias) = tensors.floats(array.dtype, array.shape, array.values);
      }
      args.update_rule = c.text("update_rule", "");
      args.gate_activation = c.text("gate_activation", "none");
      args.beta_activation = c.text("beta_activation", "none");
      args.qk_l2_norm = c.integer("qk_l2_norm");
      args.gate_lower_bound = c.number("gate_lower_bound", -5.0f);
      args.state_update_capacity = c.integer("state_update_capacity");
      const GatedDeltaNetShapes shapes = gated_delta_net_shapes(args);
      EXPECT_EQ(shapes.output.shape, c.output("output").shape);
      args.output = tensors.output(shapes.output.dtype, shapes.output.shape);
      args.final_state = tensors.output(shapes.final_state.dtype, shapes.final_state.shape);
      if (shapes.state_update.present) {
        EXPECT_EQ(shapes.state_update.shape, c.output("state_update").shape);
        args.state_update = tensors.output(shapes.state_update.dtype, shapes.state_update.shape);
      }
      Workspace workspace(gated_delta_net_workspace_bytes(args, 2));
      OpContext with_workspace = context;
      with_workspace.workspace = &workspace;
      gated_delta_net(args, with_workspace);
      expect_near(tensors.values_of(args.output), c.output("output").values,
                  args.query.dtype == DType::kF32 ? 2e-5 : 1e-3);
      expect_near(tensors.values_of(args.final_state), c.output("final_state").values, 2e-5);
      if (shapes.state_update.present) {
        // Counts 5, 2, 1 of lengths 1, 3, 3: beyond, onnxruntime leaves what it likes.
        const int64_t capacity = args.state_update_capacity;
        const int64_t num_slots[] = {1, std::min<int64_t>(2, capacity), 1};
        const bool per_key = args.decay && args.decay.rank == 4 - 1;
        const int64_t widths[] = {per_key ? 4 * 6 : 4, 2 * 6, 4 * 5};
        const Floats actual = tensors.values_of(args.state_update);
        const Floats& right = c.output("state_update").values;
        for (int64_t b = 0, from = 0; b < 3; ++b) {
          for (const int64_t width : widths) {
            expect_near(part(actual, from, from + num_slots[b] * width), part(right, from, from + num_slots[b] * width),
                        2e-5);
            from += capacity * width;
          }
        }
      }
    }
  }
}

TEST(GatedDeltaNet, Rejections) {
  BoundTensors tensors;
  const Floats zeros(4000);
  const auto floats = [&](std::vector<int64_t> shape, DType dtype = DType::kF32) {
    return tensors.floats(dtype, std::move(shape), zeros);
  };
  GatedDeltaNetArgs good;
  good.query = floats({6, 2, 4});
  good.key = floats({6, 2, 4});
  good.value = floats({6, 4, 3});
  good.decay = floats({6, 4});
  good.beta = floats({6, 4});
  good.initial_state = floats({2, 4, 3, 4});
  good.output = floats({6, 4, 3});
  good.final_state = floats({2, 4, 3, 4});
  const auto error = [&](auto change) {
    GatedDeltaNetArgs args = good;
    change(args);
    Workspace workspace(1 << 20);
    return testkit::error_of([&] { gated_delta_net(args, {.pool = &pool(), .workspace = &workspace}); });
  };
  const std::string op = "gated_delta_net: ";
  EXPECT_EQ(error([](auto&) {}), "");
  EXPECT_EQ(error([](auto& a) { a.final_state = {}; }), "");
  EXPECT_EQ(error([](auto& a) { a.update_rule = "plain"; }),
            op + "update_rule is 'plain', expected linear, gated, delta or gated_delta");
  EXPECT_EQ(error([](auto& a) { a.gate_activation = "tanh"; }),
            op + "gate_activation is 'tanh', expected none, softplus (qwen) or sigmoid (kda)");
  EXPECT_EQ(error([](auto& a) { a.beta_activation = "tanh"; }),
            op + "beta_activation is 'tanh', expected none or sigmoid");
  EXPECT_EQ(error([](auto& a) { a.qk_l2_norm = 2; }), op + "qk_l2_norm is 2, expected 0 or 1");
  EXPECT_EQ(error([](auto& a) { a.chunk_size = 0; }), op + "chunk_size is 0, expected more than 0");
  EXPECT_EQ(error([](auto& a) { a.gate_lower_bound = 0.0f; }),
            op + "gate_lower_bound is 0, expected a finite value below 0");
  EXPECT_EQ(error([](auto& a) { a.gate_lower_bound = -INFINITY; }),
            op + "gate_lower_bound is -inf, expected a finite value below 0");
  EXPECT_EQ(error([](auto& a) { a.scale = NAN; }),
            op + "scale is nan, expected a finite value (0: 1 / sqrt(head_size_qk))");
  EXPECT_EQ(error([](auto& a) { a.state_update_capacity = 9; }), op + "state_update_capacity is 9, expected 0 to 8");
  EXPECT_EQ(error([](auto& a) { a.query = {}; }), op + "query is required");
  EXPECT_EQ(error([](auto& a) { a.query.dtype = DType::kI32; }),
            op + "query has type int32, expected float32 or float16 or bfloat16");
  EXPECT_EQ(error([](auto& a) { a.key = {}; }), op + "key is required (both absent: packed QKV)");
  EXPECT_EQ(error([](auto& a) { a.value = {}; }), op + "value is required (both absent: packed QKV)");
  EXPECT_EQ(error([&](auto& a) { a.query = floats({6, 8}); }), op + "query has 2 dimensions, expected 3 or 4");
  EXPECT_EQ(error([&](auto& a) { a.key = floats({6, 1, 4}); }), op + "key has shape [6, 1, 4], expected [6, 2, 4]");
  EXPECT_EQ(error([&](auto& a) {
              a.value = floats({5, 4, 3});
            }),
            op + "value has shape [5, 4, 3], expected the tokens of query, whose shape is [6, 2, 4]");
  EXPECT_EQ(error([&](auto& a) {
              a.value = floats({6, 3, 3});
            }),
            op + "value has 3 heads, expected a multiple of the 2 of query");
  EXPECT_EQ(error([&](auto& a) {
              a.value = floats({6, 4, 3}, DType::kF16);
            }),
            op + "value has type float16, expected float32");
  EXPECT_EQ(error([&](auto& a) {
              a.query = floats({0, 2, 4}), a.key = floats({0, 2, 4}), a.value = floats({0, 4, 3});
            }),
            op + "query has shape [0, 2, 4], expected at least one token");
  EXPECT_EQ(error([](auto& a) { a.initial_state = {}; }),
            op + "initial_state is required: without cu_seqlens and without a batch axis only it tells the batch size");
  EXPECT_EQ(error([&](auto& a) {
              a.initial_state = floats({4, 4, 3, 4});
            }),
            op + "query has 6 tokens, expected a multiple of the batch size 4 (from initial_state)");
  EXPECT_EQ(error([&](auto& a) {
              a.initial_state = floats({2, 4, 4, 3});
            }),
            op + "initial_state has shape [2, 4, 4, 3], expected [2, 4, 3, 4]");
  EXPECT_EQ(error([&](auto& a) {
              a.initial_state = floats({2, 4, 3, 4}, DType::kF16);
            }),
            op + "initial_state has type float16, expected float32");
  EXPECT_EQ(error([&](auto& a) { a.cu_seqlens = tensors.integers({0}); }),
            op + "cu_seqlens has shape [1], expected [batch_size + 1] with at least one sequence");
  EXPECT_EQ(error([&](auto& a) { a.cu_seqlens = floats({3}); }), op + "cu_seqlens has type float32, expected int32");
  EXPECT_EQ(error([&](auto& a) {
              a.cu_seqlens = tensors.integers({0, 1, 2, 6});
            }),
            op + "initial_state has shape [2, 4, 3, 4], expected [3, 4, 3, 4]");
  EXPECT_EQ(error([&](auto& a) {
              a.query = floats({2, 3, 2, 4}), a.key = floats({2, 3, 2, 4}), a.value = floats({2, 3, 4, 3});
              a.cu_seqlens = tensors.integers({0, 3, 6});
            }),
            op + "cu_seqlens needs query without a batch axis, but it has 4 dimensions");
  EXPECT_EQ(error([](auto& a) { a.decay = {}; }), op + "decay is required with update_rule gated_delta");
  EXPECT_EQ(error([](auto& a) { a.beta = {}; }), op + "beta is required with update_rule gated_delta");
  EXPECT_EQ(error([](auto& a) { a.update_rule = "delta"; }), op + "decay must be absent with update_rule delta");
  EXPECT_EQ(error([](auto& a) { a.update_rule = "gated"; }), op + "beta must be absent with update_rule gated");
  EXPECT_EQ(error([&](auto& a) {
              a.decay = floats({6, 4}, DType::kF16);
            }),
            op + "decay has type float16, expected float32 or the type of query, float32");
  EXPECT_EQ(error([&](auto& a) { a.decay = floats({6, 2}); }), op + "decay has shape [6, 2], expected [6, 4]");
  EXPECT_EQ(error([&](auto& a) { a.decay = floats({6, 4, 3}); }), op + "decay has shape [6, 4, 3], expected [6, 4, 4]");
  EXPECT_EQ(error([&](auto& a) { a.beta = floats({6, 4, 1}); }), op + "beta has shape [6, 4, 1], expected [6, 4]");
  EXPECT_EQ(error([&](auto& a) {
              a.query = floats({6, 2, 4}, DType::kF16), a.key = floats({6, 2, 4}, DType::kF16);
              a.value = floats({6, 4, 3}, DType::kF16), a.beta = floats({6, 4}, DType::kF16);
            }),
            op + "beta has type float16, expected float32");
  EXPECT_EQ(error([&](auto& a) { a.a_log = floats({4}); }), op + "a_log must be absent with gate_activation none");
  EXPECT_EQ(error([&](auto& a) { a.dt_bias = floats({4}); }), op + "dt_bias must be absent with gate_activation none");
  EXPECT_EQ(error([](auto& a) { a.gate_activation = "qwen"; }), op + "a_log is required");
  const auto gated = [&](auto& a) { a.gate_activation = "kda", a.a_log = floats({4}), a.dt_bias = floats({4}); };
  EXPECT_EQ(error([&](auto& a) { gated(a); }), "");
  EXPECT_EQ(error([&](auto& a) { gated(a), a.update_rule = "linear", a.decay = {}, a.beta = {}; }), "");
  EXPECT_EQ(error([&](auto& a) { gated(a), a.a_log = floats({2}); }), op + "a_log has shape [2], expected [4]");
  EXPECT_EQ(error([&](auto& a) { gated(a), a.dt_bias = {}; }), op + "dt_bias is required with gate_activation kda");
  EXPECT_EQ(error([&](auto& a) {
              gated(a), a.dt_bias = floats({4, 4});
            }),
            op + "dt_bias has shape [4, 4], expected [4] (per key only with a decay per key)");
  EXPECT_EQ(error([&](auto& a) { gated(a), a.decay = floats({6, 4, 4}), a.dt_bias = floats({4, 4}); }), "");
  EXPECT_EQ(error([&](auto& a) { gated(a), a.decay = floats({6, 4, 4}), a.dt_bias = floats({16}); }), "");
  EXPECT_EQ(error([&](auto& a) {
              gated(a), a.decay = floats({6, 4, 4}), a.dt_bias = floats({4, 3});
            }),
            op + "dt_bias has shape [4, 3], expected [4], [4, 4] or [16]");
  EXPECT_EQ(error([&](auto& a) {
              a.capture_count = tensors.integers({1, 1});
            }),
            op + "capture_count must be absent when state_update_capacity is 0");
  EXPECT_EQ(error([](auto& a) { a.state_update_capacity = 2; }),
            op + "capture_count is required with state_update_capacity 2");
  EXPECT_EQ(error([&](auto& a) { a.state_update_capacity = 2, a.capture_count = tensors.integers({1}); }),
            op + "capture_count has shape [1], expected [2]");
  EXPECT_EQ(error([&](auto& a) {
              a.state_update_active = tensors.integers({1, 1});
            }),
            op + "state_update_active has shape [2], expected [1]");
  EXPECT_EQ(error([&](auto& a) { a.state_update_active = floats({1}); }),
            op + "state_update_active has type float32, expected int32");
  EXPECT_EQ(error([&](auto& a) {
              a.state_update = floats({2, 0});
            }),
            op + "state_update is given, but this call has no such output");
  EXPECT_EQ(error([&](auto& a) {
              a.output = floats({6, 2, 3});
            }),
            op + "output has shape [6, 2, 3], expected [6, 4, 3]");
  EXPECT_EQ(error([&](auto& a) {
              a.final_state = floats({2, 4, 4, 3});
            }),
            op + "final_state has shape [2, 4, 4, 3], expected [2, 4, 3, 4]");
  const auto packed = [&](auto& a, int64_t width) { a.key = {}, a.value = {}, a.query = floats({6, width}); };
  EXPECT_EQ(error([&](auto& a) { packed(a, 28); }), "");
  EXPECT_EQ(
      error([&](auto& a) { packed(a, 27); }),
      op + "query has 27 packed channels, expected 2 * num_heads_q * head_size_qk + num_heads_v * head_size_v with "
           "head_size_qk = 4, num_heads_v = 4, head_size_v = 3 (from initial_state)");
  EXPECT_EQ(error([&](auto& a) { packed(a, 36); }),
            op + "initial_state has 4 heads, expected a multiple of the 3 of query");
  EXPECT_EQ(error([&](auto& a) { packed(a, 28), a.initial_state = {}; }), op + "initial_state is required");
  testkit::expect_error(ErrorCode::kInvalidArgument, op + "workspace is required",
                        [&] { gated_delta_net(good, {.pool = &pool()}); });
}

TEST(LinearAttention, BruteForce) {
  uint64_t seed = 200;
  for (const std::string_view rule : {"linear", "gated", "delta", "gated_delta"}) {
    for (const auto& [q_heads, kv_heads] : {std::pair{2, 2}, {4, 2}, {3, 1}, {2, 4}}) {
      for (const int64_t num_tokens : {0, 1, 5, 40}) {
        for (const int64_t window : {0, 1, 4, 8}) {
          Linear c{.rule = rule, .num_tokens = num_tokens, .q_heads = q_heads, .kv_heads = kv_heads, .window = window};
          c.dtype = std::array{DType::kF32, DType::kF16, DType::kBF16}[++seed % 3];
          c.state_dtype = std::array{DType::kF32, DType::kF32, DType::kF16, DType::kBF16}[seed % 4];
          c.k_size = std::array{4, 9, 16}[seed % 3];
          c.v_size = std::array{5, 33, 8, 1}[seed / 2 % 4];
          c.per_key = seed % 2 == 0;
          c.shared_beta = seed % 5 == 0;
          c.with_past = seed % 3 != 0;
          c.fill(seed);
          const Results right = expected(c);
          for (const OpContext& context : contexts()) {
            SCOPED_TRACE(concat(name_of(context), " seed ", seed, " ", rule, " heads ", q_heads, "/", kv_heads,
                                " tokens ", num_tokens, " window ", window));
            const Results actual = run(c, context);
            expect_near(actual.output, right.output, output_tolerance(c.dtype));
            expect_near(actual.state, right.state, output_tolerance(c.with_past ? c.state_dtype : c.dtype));
            if (c.with_past) {
              const Results in_place = run(c, context, /*in_place=*/true);
              EXPECT_EQ(in_place.output, actual.output);
              EXPECT_EQ(in_place.state, actual.state);
            }
          }
        }
      }
    }
  }
}

TEST(LinearAttention, AgreesWithOnnxRuntime) {
  const std::vector<golden::Case> cases = golden::read_cases("linear_attention");
  ASSERT_EQ(cases.size(), 7u);
  for (const golden::Case& c : cases) {
    for (const OpContext& context : contexts()) {
      SCOPED_TRACE(concat(name_of(context), " case ", &c - cases.data()));
      BoundTensors tensors;
      LinearAttentionArgs args;
      for (const auto& [name, array] : c.inputs) {
        (name == "query"        ? args.query
         : name == "key"        ? args.key
         : name == "value"      ? args.value
         : name == "past_state" ? args.past_state
         : name == "decay"      ? args.decay
                                : args.beta) = tensors.floats(array.dtype, array.shape, array.values);
      }
      args.update_rule = c.text("update_rule", "");
      args.q_num_heads = c.integer("q_num_heads");
      args.kv_num_heads = c.integer("kv_num_heads");
      args.scale = c.number("scale");
      const LinearAttentionShapes shapes = linear_attention_shapes(args);
      EXPECT_EQ(shapes.output.shape, c.output("output").shape);
      EXPECT_EQ(shapes.present_state.shape, c.output("present_state").shape);
      args.output = tensors.output(shapes.output.dtype, shapes.output.shape);
      args.present_state = tensors.output(shapes.present_state.dtype, shapes.present_state.shape);
      Workspace workspace(linear_attention_workspace_bytes(args, 2));
      OpContext with_workspace = context;
      with_workspace.workspace = &workspace;
      linear_attention(args, with_workspace);
      const double tolerance = args.query.dtype == DType::kF32 ? 2e-5 : 1e-3;
      expect_near(tensors.values_of(args.output), c.output("output").values, tolerance);
      expect_near(tensors.values_of(args.present_state), c.output("present_state").values, tolerance);
    }
  }
}

TEST(LinearAttention, Rejections) {
  BoundTensors tensors;
  const Floats zeros(4000);
  const auto floats = [&](std::vector<int64_t> shape, DType dtype = DType::kF32) {
    return tensors.floats(dtype, std::move(shape), zeros);
  };
  LinearAttentionArgs good;
  good.query = floats({2, 3, 8});
  good.key = floats({2, 3, 8});
  good.value = floats({2, 3, 10});
  good.decay = floats({2, 3, 2});
  good.beta = floats({2, 3, 2});
  good.q_num_heads = good.kv_num_heads = 2;
  good.output = floats({2, 3, 10});
  good.present_state = floats({2, 2, 4, 5});
  const auto error = [&](auto change) {
    LinearAttentionArgs args = good;
    change(args);
    Workspace workspace(1 << 20);
    return testkit::error_of([&] { linear_attention(args, {.pool = &pool(), .workspace = &workspace}); });
  };
  const std::string op = "linear_attention: ";
  EXPECT_EQ(error([](auto&) {}), "");
  EXPECT_EQ(error([](auto& a) { a.update_rule = ""; }),
            op + "update_rule is '', expected linear, gated, delta or gated_delta");
  EXPECT_EQ(error([](auto& a) { a.q_num_heads = 0; }), op + "q_num_heads is 0, expected more than 0");
  EXPECT_EQ(error([](auto& a) { a.kv_num_heads = -1; }), op + "kv_num_heads is -1, expected more than 0");
  EXPECT_EQ(error([](auto& a) { a.q_num_heads = 3; }),
            op + "q_num_heads is 3, expected a multiple or a divisor of kv_num_heads = 2");
  EXPECT_EQ(error([](auto& a) { a.state_window = 9; }), op + "state_window is 9, expected 0 to 8");
  EXPECT_EQ(error([](auto& a) { a.scale = INFINITY; }),
            op + "scale is inf, expected a finite value (0: 1 / sqrt(head_size_qk))");
  EXPECT_EQ(error([&](auto& a) { a.query = floats({2, 3, 2, 4}); }), op + "query has 4 dimensions, expected 3");
  EXPECT_EQ(error([&](auto& a) {
              a.query = floats({2, 3, 7});
            }),
            op + "query has 7 channels, expected a positive multiple of q_num_heads = 2");
  EXPECT_EQ(error([&](auto& a) { a.key = floats({2, 3, 4}); }), op + "key has shape [2, 3, 4], expected [2, 3, 8]");
  EXPECT_EQ(error([&](auto& a) {
              a.value = floats({2, 2, 10});
            }),
            op + "value has shape [2, 2, 10], expected [2, 3, 10]");
  EXPECT_EQ(error([&](auto& a) {
              a.value = floats({2, 3, 9});
            }),
            op + "value has 9 channels, expected a positive multiple of kv_num_heads = 2");
  EXPECT_EQ(error([&](auto& a) {
              a.past_state = floats({2, 2, 5, 4});
            }),
            op + "past_state has shape [2, 2, 5, 4], expected [2, 2, 4, 5]");
  EXPECT_EQ(error([](auto& a) { a.decay = {}; }), op + "decay is required with update_rule gated_delta");
  EXPECT_EQ(error([&](auto& a) { a.decay = floats({2, 3, 3}); }), op + "decay has shape [2, 3, 3], expected [2, 3, 8]");
  EXPECT_EQ(error([](auto& a) { a.beta = {}; }), op + "beta is required with update_rule gated_delta");
  EXPECT_EQ(error([&](auto& a) { a.beta = floats({2, 3, 4}); }), op + "beta has shape [2, 3, 4], expected [2, 3, 2]");
  EXPECT_EQ(error([&](auto& a) {
              a.beta = floats({2, 3, 2}, DType::kF16);
            }),
            op + "beta has type float16, expected float32");
  EXPECT_EQ(error([&](auto& a) {
              a.present_state = floats({2, 2, 4, 5}, DType::kF16);
            }),
            op + "present_state has type float16, expected float32");
  EXPECT_EQ(error([&](auto& a) {
              a.output = floats({2, 3, 8});
            }),
            op + "output has shape [2, 3, 8], expected [2, 3, 10]");
}

TEST(LinearAttentionGate, AgreesWithOnnxRuntime) {
  const std::vector<golden::Case> cases = golden::read_cases("linear_attention_gate");
  ASSERT_EQ(cases.size(), 3u);
  for (const golden::Case& c : cases) {
    for (const OpContext& context : contexts()) {
      SCOPED_TRACE(concat(name_of(context), " case ", &c - cases.data()));
      BoundTensors tensors;
      LinearAttentionGateArgs args;
      for (const auto& [name, array] : c.inputs) {
        (name == "a"         ? args.a
         : name == "b"       ? args.b
         : name == "dt_bias" ? args.dt_bias
                             : args.decay_scale) =
            tensors.floats(array.dtype, array.shape, array.values, array.shape.size() == 3 ? 2 : 0);
      }
      const LinearAttentionGateShapes shapes = linear_attention_gate_shapes(args);
      EXPECT_EQ(shapes.beta.present, static_cast<bool>(args.b));
      args.decay = tensors.output(shapes.decay.dtype, shapes.decay.shape, 1);
      if (args.b) {
        args.beta = tensors.output(shapes.beta.dtype, shapes.beta.shape, 1);
      }
      linear_attention_gate(args, context);
      EXPECT_TRUE(tensors.intact());
      const double rtol = args.a.dtype == DType::kF32 ? 2e-6 : 1e-3;
      const auto decay = testkit::compare(tensors.values_of(args.decay), c.output("decay").values, rtol, 1e-7);
      EXPECT_TRUE(decay) << decay.text;
      if (args.b) {
        const auto beta = testkit::compare(tensors.values_of(args.beta), c.output("beta").values, rtol, 1e-7);
        EXPECT_TRUE(beta) << beta.text;
      }
    }
  }
}

TEST(LinearAttentionGate, BruteForceAndExtremes) {
  for (const DType dtype : kFloats) {
    testkit::Random random(71);
    Floats a = random_floats(random, 3 * 37, dtype, 10.0f);
    Floats b = random_floats(random, 3 * 37, dtype, 10.0f);
    const Floats bias = random_floats(random, 37, DType::kF32), scale = random_floats(random, 37, DType::kF32);
    a[0] = INFINITY, a[1] = -INFINITY, a[2] = 1000.0f, a[3] = -1000.0f, a[4] = NAN;
    b[0] = INFINITY, b[1] = -INFINITY, b[2] = 1000.0f, b[3] = -1000.0f, b[4] = NAN;
    Floats decay, beta;
    for (size_t i = 0; i < a.size(); ++i) {
      const double x = static_cast<double>(a[i]) + bias[i % 37];
      decay.push_back(rounded_to(dtype, static_cast<float>(scale[i % 37] * softplus(x))));
      beta.push_back(rounded_to(dtype, static_cast<float>(sigmoid(b[i]))));
    }
    for (const OpContext& context : contexts()) {
      SCOPED_TRACE(concat(name_of(context), " ", to_string(dtype)));
      BoundTensors tensors;
      LinearAttentionGateArgs args;
      args.a = tensors.floats(dtype, {1, 3, 37}, a);
      args.b = tensors.floats(dtype, {1, 3, 37}, b);
      args.dt_bias = tensors.floats(DType::kF32, {37}, bias);
      args.decay_scale = tensors.floats(DType::kF32, {37}, scale);
      args.decay = tensors.output(dtype, {1, 3, 37});
      args.beta = tensors.output(dtype, {1, 3, 37});
      linear_attention_gate(args, context);
      EXPECT_TRUE(tensors.intact());
      const double rtol = 2e-6 + testkit::rounding_of(dtype) * 2;
      const auto decay_close = testkit::compare(tensors.values_of(args.decay), decay, rtol, 1e-7);
      EXPECT_TRUE(decay_close) << decay_close.text;
      const auto beta_close = testkit::compare(tensors.values_of(args.beta), beta, rtol, 1e-7);
      EXPECT_TRUE(beta_close) << beta_close.text;
    }
  }
}

TEST(LinearAttentionGate, Rejections) {
  BoundTensors tensors;
  const Floats zeros(100);
  const auto floats = [&](std::vector<int64_t> shape, DType dtype = DType::kF32) {
    return tensors.floats(dtype, std::move(shape), zeros);
  };
  LinearAttentionGateArgs good;
  good.a = floats({1, 2, 3});
  good.dt_bias = floats({3});
  good.decay_scale = floats({3});
  good.decay = floats({1, 2, 3});
  const auto error = [&](auto change) {
    LinearAttentionGateArgs args = good;
    change(args);
    return testkit::error_of([&] { linear_attention_gate(args, {.pool = &pool()}); });
  };
  const std::string op = "linear_attention_gate: ";
  EXPECT_EQ(error([](auto&) {}), "");
  EXPECT_EQ(error([&](auto& a) { a.b = floats({1, 2, 3}); }), "");
  EXPECT_EQ(error([&](auto& a) {
              a.a = floats({2, 3});
            }),
            op + "a has shape [2, 3], expected [batch_size, num_tokens, num_heads]");
  EXPECT_EQ(error([](auto& a) { a.a = {}; }), op + "a is required");
  EXPECT_EQ(error([&](auto& a) { a.dt_bias = floats({3}, DType::kF16); }),
            op + "dt_bias has type float16, expected float32");
  EXPECT_EQ(error([&](auto& a) { a.decay_scale = floats({2}); }),
            op + "decay_scale has shape [2], expected [num_heads = 3] (from a)");
  EXPECT_EQ(error([&](auto& a) { a.b = floats({1, 2, 3}, DType::kF16); }), op + "b has type float16, expected float32");
  EXPECT_EQ(error([&](auto& a) { a.beta = floats({1, 2, 3}); }), op + "b is required when beta is wanted");
  EXPECT_EQ(error([](auto& a) { a.decay = {}; }), op + "decay is required");
}

}  // namespace
}  // namespace shoal
