// Problems of linear attention with their right results: the matrix formulas in f64.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "shoal/cpu/thread_pool.h"
#include "shoal/ops/delta_net/delta_net.h"
#include "testkit/bound_tensors.h"

namespace shoal::delta_cases {

using testkit::BoundTensors;
using testkit::rounded_to;
using Floats = std::vector<float>;
using Doubles = std::vector<double>;

inline cpu::ThreadPool& pool() {
  static cpu::ThreadPool pool(2);
  return pool;
}

inline std::vector<OpContext> contexts() {
  std::vector<OpContext> list = {{.pool = &pool(), .variant = "ref"}};
  for (const cpu::Isa isa : cpu::available_isas()) {
    list.push_back({.pool = &pool(), .isa = isa});
  }
  return list;
}

inline std::string name_of(const OpContext& context) {
  return context.variant.empty() ? std::string(cpu::to_string(context.isa)) : std::string(context.variant);
}

inline float at(const Floats& values, int64_t i) { return values[static_cast<size_t>(i)]; }

inline Floats part(const Floats& values, int64_t begin, int64_t end) {
  return {values.begin() + begin, values.begin() + end};
}

inline Floats random_floats(testkit::Random& random, int64_t count, DType dtype, float deviation = 1.0f) {
  Floats values = random.normals(static_cast<size_t>(count), deviation);
  for (float& value : values) {
    value = rounded_to(dtype, value);
  }
  return values;
}

inline double softplus(double x) { return x > 30 ? x : std::log1p(std::exp(x)); }
inline double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

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

inline bool uses_decay(std::string_view rule) { return rule == "gated" || rule == "gated_delta"; }
inline bool uses_beta(std::string_view rule) { return rule == "delta" || rule == "gated_delta"; }

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

inline Results run(const Net& c, const OpContext& context, bool in_place = false, Form form = Form::kRagged) {
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

inline Doubles key_vector(const Net& c, const Floats& rows, int64_t t, int64_t head) {
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

inline Results expected(const Net& c) {
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
inline void expect_near(const Floats& actual, const Floats& right, double tolerance) {
  float largest = 0;
  for (const float value : right) {
    largest = std::max(largest, std::fabs(value));
  }
  const auto close = testkit::compare(actual, right, 0.0, tolerance * std::max(largest, 1e-3f));
  EXPECT_TRUE(close) << close.text;
}

inline double output_tolerance(DType dtype) { return 4e-6 + testkit::rounding_of(dtype); }

inline void expect_right(const Net& c) {
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

inline Results run(const Linear& c, const OpContext& context, bool in_place = false) {
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

inline Results expected(const Linear& c) {
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

}  // namespace shoal::delta_cases
