// Linear attention against a brute force in f64 (the matrix formulas) and onnxruntime's kernels, every instruction set;
// bit for bit where calls are cut differently.
#include "shoal/ops/delta_net/delta_net.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>

#include "shoal/cpu/thread_pool.h"
#include "shoal/tensor/matcher.h"
#include "testkit/bound_tensors.h"
#include "testkit/expect_error.h"
#include "tests/golden/recurrence_golden.h"

namespace shoal {
namespace {

using testkit::BoundTensors;
using testkit::rounded_to;
using Floats = std::vector<float>;
using Doubles = std::vector<double>;

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

Floats random_floats(testkit::Random& random, int64_t count, DType dtype, float deviation = 1.0f) {
  Floats values = random.normals(static_cast<size_t>(count), deviation);
  for (float& value : values) {
    value = rounded_to(dtype, value);
  }
  return values;
}

double softplus(double x) { return x > 30 ? x : std::log1p(std::exp(x)); }
double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

// The formulas with S as a matrix of keys by values.
struct Recurrence {
  int64_t k_size, v_size;
  Doubles state;  // [k_size, v_size]

  Recurrence(int64_t keys, int64_t values) : k_size(keys), v_size(values), state(static_cast<size_t>(keys * values)) {}
  double& s(int64_t k, int64_t v) { return state[static_cast<size_t>(k * v_size + v)]; }

  void update(const Doubles& key, const Doubles& value, const Doubles& log_decay, const double* beta) {
    for (int64_t v = 0; v < v_size; ++v) {
      double retrieved = 0;
      for (int64_t k = 0; k < k_size; ++k) {
        s(k, v) *= std::exp(log_decay[static_cast<size_t>(k)]);
        retrieved += s(k, v) * key[static_cast<size_t>(k)];
      }
      const double target = value[static_cast<size_t>(v)];
      for (int64_t k = 0; k < k_size; ++k) {
        s(k, v) += key[static_cast<size_t>(k)] * (beta == nullptr ? target : *beta * (target - retrieved));
      }
    }
  }
  double read(const Doubles& query, int64_t v) {
    double sum = 0;
    for (int64_t k = 0; k < k_size; ++k) {
      sum += s(k, v) * query[static_cast<size_t>(k)];
    }
    return sum;
  }
};

bool uses_decay(std::string_view rule) { return rule == "gated" || rule == "gated_delta"; }
bool uses_beta(std::string_view rule) { return rule == "delta" || rule == "gated_delta"; }

struct Net {
  DType dtype = DType::kF32;
  DType gate_dtype = DType::kF32;
  std::string_view rule = "gated_delta";
  std::string_view gate = "none";
  std::string_view beta_activation = "none";
  std::vector<int64_t> lengths{};
  int64_t q_heads = 1, v_heads = 1, k_size = 8, v_size = 8;
  bool per_key = false, bias_per_key = false, normalise = true;
  float scale = 0.0f;
  int64_t capacity = 0;
  std::vector<int32_t> capture_count{};
  int32_t active = 1;
  bool with_state = true;
  Floats query{}, key{}, value{}, decay{}, beta{}, state{}, a_log{}, dt_bias{};

  int64_t num_seqs() const { return static_cast<int64_t>(lengths.size()); }
  int64_t num_tokens() const {
    int64_t sum = 0;
    for (const int64_t length : lengths) {
      sum += length;
    }
    return sum;
  }
  std::vector<int32_t> offsets() const {
    std::vector<int32_t> offsets = {0};
    for (const int64_t length : lengths) {
      offsets.push_back(offsets.back() + static_cast<int32_t>(length));
    }
    return offsets;
  }
  int64_t decay_size() const { return per_key ? k_size : 1; }
  void fill(uint64_t seed) {
    testkit::Random random(seed);
    query = random_floats(random, num_tokens() * q_heads * k_size, dtype);
    key = random_floats(random, num_tokens() * q_heads * k_size, dtype);
    value = random_floats(random, num_tokens() * v_heads * v_size, dtype);
    decay = random_floats(random, num_tokens() * v_heads * decay_size(), gate_dtype, 0.5f);
    beta = random_floats(random, num_tokens() * v_heads, gate_dtype);
    for (float& x : decay) {
      x = gate == "none" ? -std::fabs(x) : x;
    }
    for (float& x : beta) {
      x = beta_activation == "none" ? rounded_to(gate_dtype, 0.5f + 0.1f * x) : x;
    }
    state = random_floats(random, num_seqs() * v_heads * v_size * k_size, DType::kF32, 0.3f);
    a_log = random_floats(random, v_heads, DType::kF32, 0.5f);
    dt_bias = random_floats(random, v_heads * (bias_per_key ? k_size : 1), DType::kF32);
  }
  std::string name() const {
    return concat(to_string(dtype), " ", rule, " gate ", gate, " tokens ", num_tokens(), " heads ", q_heads, "/",
                  v_heads, " sizes ", k_size, "x", v_size, per_key ? " per key" : "");
  }
};

struct Results {
  Floats output, state, update;
};

enum class Form { kRagged, kEqual, kRank4, kPacked, kPackedBatch };

Results run(const Net& c, const OpContext& context, bool in_place = false, Form form = Form::kRagged) {
  BoundTensors tensors;
  const int64_t tokens = c.num_tokens();
  const bool rank4 = form == Form::kRank4 || form == Form::kPackedBatch;
  const bool packed = form == Form::kPacked || form == Form::kPackedBatch;
  const auto shape = [&](std::vector<int64_t> inner) {
    std::vector<int64_t> extents = {tokens};
    if (rank4) {
      extents = {c.num_seqs(), c.lengths[0]};
    }
    extents.insert(extents.end(), inner.begin(), inner.end());
    return extents;
  };
  const int64_t padding = rank4 ? 0 : 5;
  GatedDeltaNetArgs args;
  if (packed) {
    Floats joined;
    for (int64_t t = 0; t < tokens; ++t) {
      const int64_t q_row = c.q_heads * c.k_size, v_row = c.v_heads * c.v_size;
      for (const Floats* rows : {&c.query, &c.key}) {
        joined.insert(joined.end(), rows->begin() + t * q_row, rows->begin() + (t + 1) * q_row);
      }
      joined.insert(joined.end(), c.value.begin() + t * v_row, c.value.begin() + (t + 1) * v_row);
    }
    args.query = tensors.floats(c.dtype, shape({2 * c.q_heads * c.k_size + c.v_heads * c.v_size}), joined, padding);
  } else {
    args.query = tensors.floats(c.dtype, shape({c.q_heads, c.k_size}), c.query, padding);
    args.key = tensors.floats(c.dtype, shape({c.q_heads, c.k_size}), c.key, padding);
    args.value = tensors.floats(c.dtype, shape({c.v_heads, c.v_size}), c.value, padding);
  }
  if (form == Form::kRagged) {
    args.cu_seqlens = tensors.integers(c.offsets());
  }
  if (uses_decay(c.rule)) {
    args.decay = tensors.floats(
        c.gate_dtype, shape(c.per_key ? std::vector<int64_t>{c.v_heads, c.k_size} : std::vector<int64_t>{c.v_heads}),
        c.decay, padding);
  }
  if (uses_beta(c.rule)) {
    args.beta = tensors.floats(c.gate_dtype, shape({c.v_heads}), c.beta, padding);
  }
  const std::vector<int64_t> state_shape = {c.num_seqs(), c.v_heads, c.v_size, c.k_size};
  if (c.with_state) {
    args.initial_state = tensors.floats(DType::kF32, state_shape, c.state, in_place ? 0 : 3);
  }
  if (c.gate != "none") {
    args.a_log = tensors.floats(DType::kF32, {c.v_heads}, c.a_log);
    args.dt_bias = tensors.floats(
        DType::kF32, c.bias_per_key ? std::vector<int64_t>{c.v_heads, c.k_size} : std::vector<int64_t>{c.v_heads},
        c.dt_bias);
  }
  args.update_rule = c.rule;
  args.gate_activation = c.gate;
  args.beta_activation = c.beta_activation;
  args.qk_l2_norm = c.normalise ? 1 : 0;
  args.gate_lower_bound = -3.0f;
  args.scale = c.scale;
  args.state_update_capacity = c.capacity;
  if (c.capacity > 0) {
    args.capture_count = tensors.integers(c.capture_count);
    args.state_update_active = tensors.integers({c.active});
  }
  const GatedDeltaNetShapes shapes = gated_delta_net_shapes(args);
  args.output = tensors.output(shapes.output.dtype, shapes.output.shape, padding);
  args.final_state = in_place ? args.initial_state : tensors.output(DType::kF32, shapes.final_state.shape, 3);
  if (c.capacity > 0) {
    args.state_update = tensors.output(DType::kF32, shapes.state_update.shape, 1);
  }
  Workspace workspace(gated_delta_net_workspace_bytes(args, context.pool->num_threads()));
  OpContext with_workspace = context;
  with_workspace.workspace = &workspace;
  gated_delta_net(args, with_workspace);
  EXPECT_TRUE(tensors.intact()) << c.name();
  return {tensors.values_of(args.output), tensors.values_of(args.final_state),
          c.capacity > 0 ? tensors.values_of(args.state_update) : Floats{}};
}

Doubles key_vector(const Net& c, const Floats& rows, int64_t t, int64_t head) {
  Doubles x;
  double sum = 0;
  for (int64_t k = 0; k < c.k_size; ++k) {
    x.push_back(at(rows, (t * c.q_heads + head) * c.k_size + k));
    sum += x.back() * x.back();
  }
  for (double& value : x) {
    value /= c.normalise ? std::sqrt(sum + 1e-12) : 1.0;
  }
  return x;
}

Results expected(const Net& c) {
  Results r;
  r.output.resize(static_cast<size_t>(c.num_tokens() * c.v_heads * c.v_size));
  const int64_t group = c.v_heads / c.q_heads;
  const double scale = c.scale == 0.0f ? 1.0 / std::sqrt(static_cast<double>(c.k_size)) : c.scale;
  int64_t begin = 0;
  for (int64_t b = 0; b < c.num_seqs(); ++b) {
    const int64_t length = c.lengths[static_cast<size_t>(b)];
    for (int64_t h = 0; h < c.v_heads; ++h) {
      Recurrence net(c.k_size, c.v_size);
      for (int64_t v = 0; c.with_state && v < c.v_size; ++v) {
        for (int64_t k = 0; k < c.k_size; ++k) {
          net.s(k, v) = at(c.state, ((b * c.v_heads + h) * c.v_size + v) * c.k_size + k);
        }
      }
      for (int64_t t = begin; t < begin + length; ++t) {
        Doubles log_decay(static_cast<size_t>(c.k_size), 0.0);
        for (int64_t k = 0; uses_decay(c.rule) && k < c.k_size; ++k) {
          double g = at(c.decay, (t * c.v_heads + h) * c.decay_size() + (c.per_key ? k : 0));
          if (c.gate != "none") {
            const double x = g + at(c.dt_bias, c.bias_per_key ? h * c.k_size + k : h);
            const double a = std::exp(static_cast<double>(at(c.a_log, h)));
            g = c.gate == "qwen" || c.gate == "softplus" ? -a * softplus(x) : -3.0 * sigmoid(a * x);
          }
          log_decay[static_cast<size_t>(k)] = g;
        }
        double beta = uses_beta(c.rule) ? at(c.beta, t * c.v_heads + h) : 0;
        beta = c.beta_activation == "sigmoid" ? sigmoid(beta) : beta;
        Doubles value;
        for (int64_t v = 0; v < c.v_size; ++v) {
          value.push_back(at(c.value, (t * c.v_heads + h) * c.v_size + v));
        }
        net.update(key_vector(c, c.key, t, h / group), value, log_decay, uses_beta(c.rule) ? &beta : nullptr);
        const Doubles query = key_vector(c, c.query, t, h / group);
        for (int64_t v = 0; v < c.v_size; ++v) {
          r.output[static_cast<size_t>((t * c.v_heads + h) * c.v_size + v)] =
              rounded_to(c.dtype, static_cast<float>(scale * net.read(query, v)));
        }
      }
      for (int64_t v = 0; v < c.v_size; ++v) {
        for (int64_t k = 0; k < c.k_size; ++k) {
          r.state.push_back(static_cast<float>(net.s(k, v)));
        }
      }
    }
    begin += length;
  }
  return r;
}

// Relative to the largest value, as the contract's anchors are.
void expect_near(const Floats& actual, const Floats& right, double tolerance) {
  float largest = 0;
  for (const float value : right) {
    largest = std::max(largest, std::fabs(value));
  }
  const auto close = testkit::compare(actual, right, 0.0, tolerance * std::max(largest, 1e-3f));
  EXPECT_TRUE(close) << close.text;
}

double output_tolerance(DType dtype) { return 4e-6 + testkit::rounding_of(dtype); }

void expect_right(const Net& c) {
  const Results right = expected(c);
  for (const OpContext& context : contexts()) {
    SCOPED_TRACE(concat(name_of(context), " ", c.name()));
    const Results actual = run(c, context);
    expect_near(actual.output, right.output, output_tolerance(c.dtype));
    expect_near(actual.state, right.state, 4e-6);
    if (c.with_state) {
      const Results in_place = run(c, context, /*in_place=*/true);
      EXPECT_EQ(in_place.output, actual.output);
      EXPECT_EQ(in_place.state, actual.state);
    }
  }
}

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

struct Linear {
  DType dtype = DType::kF32;
  DType state_dtype = DType::kF32;
  std::string_view rule = "gated_delta";
  int64_t batch = 2, num_tokens = 5, q_heads = 2, kv_heads = 2, k_size = 4, v_size = 5;
  bool per_key = false, shared_beta = false, with_past = true;
  int64_t window = 0;
  Floats query{}, key{}, value{}, past{}, decay{}, beta{};

  int64_t out_heads() const { return std::max(q_heads, kv_heads); }
  void fill(uint64_t seed) {
    testkit::Random random(seed);
    const int64_t rows = batch * num_tokens;
    query = random_floats(random, rows * q_heads * k_size, dtype);
    key = random_floats(random, rows * kv_heads * k_size, dtype, 0.4f);
    value = random_floats(random, rows * kv_heads * v_size, dtype);
    past = random_floats(random, batch * kv_heads * k_size * v_size, state_dtype);
    decay = random_floats(random, rows * kv_heads * (per_key ? k_size : 1), dtype, 0.5f);
    for (float& x : decay) {
      x = -std::fabs(x);
    }
    beta = random_floats(random, rows * (shared_beta ? 1 : kv_heads), dtype, 0.3f);
  }
};

Results run(const Linear& c, const OpContext& context, bool in_place = false) {
  BoundTensors tensors;
  LinearAttentionArgs args;
  args.query = tensors.floats(c.dtype, {c.batch, c.num_tokens, c.q_heads * c.k_size}, c.query, 3);
  args.key = tensors.floats(c.dtype, {c.batch, c.num_tokens, c.kv_heads * c.k_size}, c.key, 3);
  args.value = tensors.floats(c.dtype, {c.batch, c.num_tokens, c.kv_heads * c.v_size}, c.value, 3);
  if (uses_decay(c.rule)) {
    args.decay = tensors.floats(c.dtype, {c.batch, c.num_tokens, c.kv_heads * (c.per_key ? c.k_size : 1)}, c.decay, 3);
  } else {
    args.decay = tensors.floats(DType::kF16, {1, 7}, Floats(7));  // ignored
  }
  if (uses_beta(c.rule)) {
    args.beta = tensors.floats(c.dtype, {c.batch, c.num_tokens, c.shared_beta ? 1 : c.kv_heads}, c.beta, 3);
  } else {
    args.beta = tensors.floats(DType::kF16, {3}, Floats(3));
  }
  args.q_num_heads = c.q_heads;
  args.kv_num_heads = c.kv_heads;
  args.update_rule = c.rule;
  args.state_window = c.window;
  if (c.with_past) {
    std::vector<int64_t> shape = {c.batch, c.kv_heads, c.k_size, c.v_size};
    Floats past = c.past;
    if (c.window > 0) {
      shape.insert(shape.begin(), c.window);
      past.insert(past.begin(), c.past.size() * static_cast<size_t>(c.window - 1), NAN);  // never read
    }
    args.past_state = tensors.floats(c.state_dtype, shape, past);
  }
  const LinearAttentionShapes shapes = linear_attention_shapes(args);
  EXPECT_EQ(shapes.present_state.dtype, c.with_past ? c.state_dtype : c.dtype);
  args.output = tensors.output(shapes.output.dtype, shapes.output.shape, 3);
  args.present_state =
      in_place ? args.past_state : tensors.output(shapes.present_state.dtype, shapes.present_state.shape);
  Workspace workspace(linear_attention_workspace_bytes(args, context.pool->num_threads()));
  OpContext with_workspace = context;
  with_workspace.workspace = &workspace;
  linear_attention(args, with_workspace);
  EXPECT_TRUE(tensors.intact());
  return {tensors.values_of(args.output), tensors.values_of(args.present_state), {}};
}

Results expected(const Linear& c) {
  Results r;
  const int64_t window = std::max<int64_t>(c.window, 1);
  const int64_t state_size = c.k_size * c.v_size;
  r.output.resize(static_cast<size_t>(c.batch * c.num_tokens * c.out_heads() * c.v_size));
  r.state.assign(static_cast<size_t>(window * c.batch * c.kv_heads * state_size), 0.0f);
  for (int64_t b = 0; b < c.batch; ++b) {
    for (int64_t h = 0; h < c.kv_heads; ++h) {
      Recurrence net(c.k_size, c.v_size);
      const auto keep = [&](int64_t slot) {
        for (int64_t i = 0; slot >= 0 && i < state_size; ++i) {
          r.state[static_cast<size_t>(((slot * c.batch + b) * c.kv_heads + h) * state_size + i)] =
              rounded_to(c.with_past ? c.state_dtype : c.dtype, static_cast<float>(net.state[static_cast<size_t>(i)]));
        }
      };
      for (int64_t i = 0; c.with_past && i < state_size; ++i) {
        net.state[static_cast<size_t>(i)] = at(c.past, (b * c.kv_heads + h) * state_size + i);
      }
      if (c.num_tokens == 0) {
        keep(window - 1);
      }
      for (int64_t t = 0; t < c.num_tokens; ++t) {
        const int64_t row = b * c.num_tokens + t;
        Doubles key, value, log_decay(static_cast<size_t>(c.k_size), 0.0);
        for (int64_t k = 0; k < c.k_size; ++k) {
          key.push_back(at(c.key, (row * c.kv_heads + h) * c.k_size + k));
          if (uses_decay(c.rule)) {
            log_decay[static_cast<size_t>(k)] =
                at(c.decay, c.per_key ? (row * c.kv_heads + h) * c.k_size + k : row * c.kv_heads + h);
          }
        }
        for (int64_t v = 0; v < c.v_size; ++v) {
          value.push_back(at(c.value, (row * c.kv_heads + h) * c.v_size + v));
        }
        const double beta = uses_beta(c.rule) ? at(c.beta, c.shared_beta ? row : row * c.kv_heads + h) : 0;
        net.update(key, value, log_decay, uses_beta(c.rule) ? &beta : nullptr);
        for (int64_t out = 0; out < c.out_heads(); ++out) {
          const bool inverse = c.kv_heads > c.q_heads;
          if ((inverse ? out : out / (c.q_heads / c.kv_heads)) != h) {
            continue;
          }
          const int64_t query_head = inverse ? out / (c.kv_heads / c.q_heads) : out;
          Doubles query;
          for (int64_t k = 0; k < c.k_size; ++k) {
            query.push_back(at(c.query, (row * c.q_heads + query_head) * c.k_size + k));
          }
          for (int64_t v = 0; v < c.v_size; ++v) {
            r.output[static_cast<size_t>((row * c.out_heads() + out) * c.v_size + v)] =
                rounded_to(c.dtype, static_cast<float>(net.read(query, v) / std::sqrt(static_cast<double>(c.k_size))));
          }
        }
        keep(window - 1 - (c.num_tokens - 1 - t));
      }
    }
  }
  return r;
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
