// Problems for the tests of the sparse attention indexers: requests as whole histories of tokens, from which the state
// before a call and the one after it follow; a definition in f64 that knows nothing of buffers or windows that a call
// closes.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "shoal/base/text.h"
#include "shoal/cpu/thread_pool.h"
#include "shoal/ops/packed_sparse_attention_indexer/packed_sparse_attention_indexer.h"
#include "testkit/bound_tensors.h"

namespace shoal::packed_indexer {

using Floats = std::vector<float>;
using Doubles = std::vector<double>;
using Ints = std::vector<int32_t>;
using Longs = std::vector<int64_t>;

inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
inline constexpr float kInf = std::numeric_limits<float>::infinity();

inline size_t at(int64_t i) { return static_cast<size_t>(i); }

// Key state, buffers and lengths of all requests; what means nothing is NaN.
struct States {
  Floats keys{};
  Floats kv{};
  Floats gates{};
  Ints lengths{};
};

struct Case {
  bool csa = false;
  DType dtype = DType::kF32;
  DType key_dtype = DType::kF32;
  int64_t ratio = 4;
  int64_t num_heads = 2;
  int64_t head_dim = 8;
  int64_t rope = 4;        // columns of the tables
  int64_t limit = 8;       // token_budget or index_topk
  int64_t capacity = 16;   // of the state
  int64_t positions = 64;  // rows of the tables
  bool own_tables = false;
  bool packed_key = false;
  float epsilon = 1e-6f;
  Longs past = {0};
  Longs counts = {5};
  int64_t capture_capacity = 0;
  Ints capture_counts{};
  int active = -1;  // -1: absent
  float scale = 0;  // 0: absent

  // Filled: per request the rows of all its tokens, past and new.
  std::vector<Floats> keys{}, gates{};
  Floats queries{}, weights{}, query_norm{}, key_norm{}, cos{}, sin{}, bias{};
  Longs position_ids{};
  Ints cu{};

  int64_t batch() const { return static_cast<int64_t>(past.size()); }
  int64_t num_tokens() const { return std::accumulate(counts.begin(), counts.end(), int64_t{0}); }
  int64_t key_width() const { return csa ? 2 * head_dim : head_dim; }
  int64_t buffer_rows() const { return 2 * ratio - 1; }
  int64_t columns() const { return csa ? limit : limit + ratio - 1; }
  std::string name() const {
    return concat(csa ? "csa " : "qsa ", to_string(dtype), " r", ratio, " N", num_heads, " H", head_dim, " R", rope,
                  " limit", limit, packed_key ? " packed" : "", " past", past[0], " n", counts[0]);
  }

  Floats numbers(testkit::Random& random, int64_t count, float deviation = 1.0f) const {
    Floats values = random.normals(at(count), deviation);
    for (float& value : values) {
      value = testkit::rounded_to(dtype, value);
    }
    return values;
  }

  void fill(uint64_t seed) {
    testkit::Random random(seed);
    keys.clear();
    gates.clear();
    position_ids.clear();
    cu = {0};
    for (int64_t b = 0; b < batch(); ++b) {
      keys.push_back(numbers(random, (past[at(b)] + counts[at(b)]) * key_width()));
      gates.push_back(numbers(random, (past[at(b)] + counts[at(b)]) * key_width()));
      cu.push_back(cu.back() + static_cast<int32_t>(counts[at(b)]));
      for (int64_t i = 0; i < counts[at(b)]; ++i) {
        position_ids.push_back(past[at(b)] + i);
      }
    }
    queries = numbers(random, num_tokens() * num_heads * head_dim);
    weights = numbers(random, num_tokens() * num_heads);
    bias = numbers(random, ratio * key_width(), 0.5f);
    query_norm = numbers(random, head_dim, 0.3f);
    key_norm = numbers(random, head_dim, 0.3f);
    for (Floats* norm : {&query_norm, &key_norm}) {
      for (float& value : *norm) {
        value = testkit::rounded_to(dtype, 1.0f + value);
      }
    }
    const int64_t num_tables = own_tables ? batch() : 1;
    cos.clear();
    sin.clear();
    for (int64_t i = 0; i < num_tables * positions * rope; ++i) {
      const float angle = random.uniform(-3.0f, 3.0f);
      cos.push_back(testkit::rounded_to(dtype, std::cos(angle)));
      sin.push_back(testkit::rounded_to(dtype, std::sin(angle)));
    }
  }

  // Vectors of -1 and 1, the same for all tokens of a block: norms and sums are exact, and ties are many.
  void fill_exact(uint64_t seed) {
    fill(seed);
    testkit::Random random(seed + 1);
    const auto sign = [&] { return random.integer(0, 1) == 0 ? -1.0f : 1.0f; };
    for (Floats& rows : keys) {
      for (size_t i = 0; i < rows.size(); ++i) {
        const auto token = static_cast<int64_t>(i) / key_width();
        rows[i] = token % ratio == 0 ? sign() : rows[i - at(key_width())];
      }
    }
    for (float& value : queries) {
      value = sign();
    }
    std::fill(query_norm.begin(), query_norm.end(), 1.0f);
    std::fill(key_norm.begin(), key_norm.end(), 1.0f);
    std::fill(cos.begin(), cos.end(), 1.0f);
    std::fill(sin.begin(), sin.end(), 0.0f);
    epsilon = 0.0f;
    scale = 0.5f;
  }

  // RMSNorm and rotary at a position.
  Doubles finished(Doubles row, const Floats& norm, int64_t b, int64_t position) const {
    double squares = 0.0;
    for (const double x : row) {
      squares += x * x;
    }
    for (int64_t c = 0; c < head_dim; ++c) {
      row[at(c)] *= norm[at(c)] / std::sqrt(squares / static_cast<double>(head_dim) + epsilon);
    }
    const int64_t angle =
        ((own_tables ? b * positions : 0) + std::min(std::max<int64_t>(position, 0), positions - 1)) * rope;
    const Doubles old = row;
    for (int64_t c = 0; c < (csa ? 2 * rope : rope); ++c) {
      // The partner of a channel, the sign of its sine, and the table's column.
      const int64_t to = csa ? head_dim - 2 * rope + c : c;
      const bool low = csa ? c % 2 == 0 : c < rope / 2;
      const int64_t step = csa ? 1 : rope / 2;
      const int64_t column = angle + (csa ? c / 2 : c);
      row[at(to)] = old[at(to)] * cos[at(column)] +
                    (low ? -old[at(to + step)] : old[at(to - step)]) * static_cast<double>(sin[at(column)]);
    }
    return row;
  }

  Doubles entry(int64_t b, int64_t e) const {
    Doubles pooled(at(head_dim), 0.0);
    for (int64_t c = 0; c < head_dim; ++c) {
      double sum = 0.0;
      double total = 0.0;
      const int64_t first = csa && e > 0 ? (e - 1) * ratio : e * ratio;
      for (int64_t token = first; token < (e + 1) * ratio; ++token) {
        const int64_t column = !csa ? c : token < e * ratio ? c : head_dim + c;
        const auto i = at(token * key_width() + column);
        const double w =
            csa ? std::exp(static_cast<double>(gates[at(b)][i]) + bias[at(token % ratio * key_width() + column)]) : 1.0;
        total += w;
        sum += w * keys[at(b)][i];
      }
      pooled[at(c)] = sum / total;
    }
    return finished(pooled, key_norm, b, e * ratio);
  }

  // The state when the first lengths[b] tokens have been seen.
  States states_at(const Longs& lengths) const {
    States s;
    for (int64_t b = 0; b < batch(); ++b) {
      const int64_t length = lengths[at(b)];
      const int64_t entries = length / ratio;
      for (int64_t e = 0; e < capacity; ++e) {
        const Doubles row = e < entries ? entry(b, e) : Doubles(at(head_dim), static_cast<double>(kNan));
        for (const double x : row) {
          s.keys.push_back(testkit::rounded_to(key_dtype, static_cast<float>(x)));
        }
      }
      const int64_t first = std::max<int64_t>(0, csa ? (entries - 1) * ratio : entries * ratio);
      for (int64_t slot = 0; slot < buffer_rows(); ++slot) {
        for (int64_t c = 0; c < key_width(); ++c) {
          const bool waits = first + slot < length;
          s.kv.push_back(waits ? keys[at(b)][at((first + slot) * key_width() + c)] : kNan);
          s.gates.push_back(waits ? gates[at(b)][at((first + slot) * key_width() + c)] : kNan);
        }
      }
      s.lengths.push_back(static_cast<int32_t>(entries));
      s.lengths.push_back(static_cast<int32_t>(length - first));
    }
    return s;
  }
  States before() const { return states_at(past); }
  States after() const {
    Longs lengths = past;
    for (int64_t b = 0; b < batch(); ++b) {
      lengths[at(b)] += counts[at(b)];
    }
    return states_at(lengths);
  }

  // Scores of the visible entries of a token, with these keys.
  Doubles scores(int64_t b, int64_t token, int64_t position, const Floats& key_state) const {
    Doubles all;
    for (int64_t e = 0; (e + 1) * ratio <= position + 1; ++e) {
      double score = 0.0;
      for (int64_t h = 0; h < num_heads; ++h) {
        Doubles q;
        for (int64_t c = 0; c < head_dim; ++c) {
          q.push_back(queries[at((token * num_heads + h) * head_dim + c)]);
        }
        q = finished(q, query_norm, b, position);
        double product = 0.0;
        for (int64_t c = 0; c < head_dim; ++c) {
          product += q[at(c)] * key_state[at((b * capacity + e) * head_dim + c)];
        }
        score += std::max(0.0, product) * (csa ? weights[at(token * num_heads + h)] : 1.0);
      }
      all.push_back(score);
    }
    return all;
  }

  // The selection of all tokens, without padding.
  std::vector<Ints> selection(const Floats& key_state) const {
    std::vector<Ints> all;
    int64_t token = 0;
    for (int64_t b = 0; b < batch(); ++b) {
      for (int64_t i = 0; i < counts[at(b)]; ++i, ++token) {
        const int64_t position = csa ? position_ids[at(token)] : past[at(b)] + i;
        const Doubles s = scores(b, token, position, key_state);
        Ints order(s.size());
        std::iota(order.begin(), order.end(), 0);
        std::stable_sort(order.begin(), order.end(), [&](int32_t x, int32_t y) { return s[at(x)] > s[at(y)]; });
        order.resize(std::min(order.size(), at(csa ? limit : limit / ratio)));
        if (csa) {
          all.push_back(order);
          continue;
        }
        Ints tokens;
        for (const int32_t block : order) {
          for (int64_t j = 0; j < ratio; ++j) {
            tokens.push_back(static_cast<int32_t>(block * ratio + j));
          }
        }
        for (int64_t t = static_cast<int64_t>(s.size()) * ratio; t <= position; ++t) {
          tokens.push_back(static_cast<int32_t>(t));
        }
        all.push_back(tokens);
      }
    }
    return all;
  }
};

struct Results {
  Ints indices{};
  Ints counts{};
  States states{};
  Floats update{};
  Ints sharing{};
  Ints status{};
};

// Owns what the arguments of a call point to.
struct Bound {
  testkit::BoundTensors tensors{};
  std::deque<Longs> longs{};
  PackedSparseAttentionIndexerArgs args{};
  std::deque<testkit::Guarded<int32_t>> ints{};

  TensorView int_output(std::vector<int64_t> shape) {
    int64_t count = 1;
    for (const int64_t extent : shape) {
      count *= extent;
    }
    return TensorView(ints.emplace_back(at(count)).data(), DType::kI32, shape);
  }
  Ints values_of(const TensorView& view) const {
    const int32_t* data = view.as<const int32_t>();
    return {data, data + view.num_elements()};
  }
  bool intact() {
    return tensors.intact() && std::all_of(ints.begin(), ints.end(), [](auto& i) { return i.guards_intact(); });
  }
};

inline void bind(const Case& c, const States& before, Bound& bound) {
  testkit::BoundTensors& t = bound.tensors;
  PackedSparseAttentionIndexerArgs& a = bound.args;
  const int64_t tokens = static_cast<int64_t>(c.queries.size()) / (c.num_heads * c.head_dim);
  Floats new_keys;
  Floats new_gates;
  for (int64_t b = 0; b < c.batch(); ++b) {
    const auto from = c.past[at(b)] * c.key_width();
    new_keys.insert(new_keys.end(), c.keys[at(b)].begin() + from, c.keys[at(b)].end());
    new_gates.insert(new_gates.end(), c.gates[at(b)].begin() + from, c.gates[at(b)].end());
  }
  const int64_t key_rows = static_cast<int64_t>(new_keys.size()) / c.key_width();
  const int64_t query_width = c.num_heads * c.head_dim;
  if (c.packed_key) {
    Floats rows;
    for (int64_t i = 0; i < tokens; ++i) {
      rows.insert(rows.end(), c.queries.begin() + i * query_width, c.queries.begin() + (i + 1) * query_width);
      rows.insert(rows.end(), new_keys.begin() + i * c.head_dim, new_keys.begin() + (i + 1) * c.head_dim);
    }
    a.query = t.floats(c.dtype, {tokens, query_width + c.head_dim}, rows, 3);
  } else {
    a.query = t.floats(c.dtype, {tokens, query_width}, c.queries, 3);
    a.key = t.floats(c.dtype, {key_rows, c.key_width()}, new_keys, 1);
  }
  a.query_norm_weight = t.floats(c.dtype, {c.head_dim}, c.query_norm);
  a.key_norm_weight = t.floats(c.dtype, {c.head_dim}, c.key_norm);
  std::vector<int64_t> table = {c.positions, c.rope};
  if (c.own_tables) {
    table.insert(table.begin(), c.batch());
  }
  a.cos_cache = t.floats(c.dtype, table, c.cos, 2);
  a.sin_cache = t.floats(c.dtype, table, c.sin);
  a.cumulative_sequence_lengths = t.integers(c.cu);
  a.past_sequence_lengths = t.integers(Ints(c.past.begin(), c.past.end()), {c.batch()});
  a.past_key_state = t.floats(c.key_dtype, {c.batch(), c.capacity, c.head_dim}, before.keys);
  const std::vector<int64_t> buffer = {c.batch(), c.buffer_rows(), c.key_width()};
  a.past_kv_buffer = t.floats(c.dtype, buffer, before.kv);
  a.past_state_lengths = t.integers(before.lengths, {c.batch(), 2});
  a.policy_mode = c.csa ? "csa" : "qsa";
  a.compress_ratio = c.ratio;
  a.state_capacity = c.capacity;
  a.epsilon = c.epsilon;
  if (c.scale != 0.0f) {
    a.scale = c.scale;
  }
  if (c.csa) {
    a.gate = t.floats(c.dtype, {key_rows, c.key_width()}, new_gates);
    a.position_bias = t.floats(c.dtype, {c.ratio, c.key_width()}, c.bias, 5);
    a.head_weights = t.floats(c.dtype, {tokens, c.num_heads}, c.weights, 1);
    const Longs& ids = bound.longs.emplace_back(c.position_ids);
    a.position_ids = TensorView(const_cast<int64_t*>(ids.data()), DType::kI64, {key_rows});
    a.past_gate_buffer = t.floats(c.dtype, buffer, before.gates);
    a.index_topk = c.limit;
  } else {
    a.token_budget = c.limit;
    a.state_update_capacity = c.capture_capacity;
    if (!c.capture_counts.empty()) {
      a.state_update_capture_count = t.integers(c.capture_counts);
    }
    if (c.active >= 0) {
      a.state_update_active = t.integers({c.active});
    }
  }
}

// Gives the call its outputs and runs it.
inline Results run(Bound& bound, int num_threads = 2, bool in_place = false) {
  PackedSparseAttentionIndexerArgs& a = bound.args;
  const PackedSparseAttentionIndexerShapes shapes = packed_sparse_attention_indexer_shapes(a);
  const auto ints = [&](const OutputSpec& spec) { return spec.present ? bound.int_output(spec.shape) : TensorView{}; };
  const auto floats = [&](const OutputSpec& spec) {
    return spec.present ? bound.tensors.output(spec.dtype, spec.shape) : TensorView{};
  };
  a.selected_indices = ints(shapes.selected_indices);
  a.selected_counts = ints(shapes.selected_counts);
  a.present_key_state = in_place ? a.past_key_state : floats(shapes.present_key_state);
  a.present_kv_buffer = in_place && a.policy_mode == "qsa" ? a.past_kv_buffer : floats(shapes.present_kv_buffer);
  a.present_gate_buffer = floats(shapes.present_gate_buffer);
  a.present_state_lengths = in_place ? a.past_state_lengths : ints(shapes.present_state_lengths);
  a.state_update = floats(shapes.state_update);
  a.indexshare_status = ints(shapes.indexshare_status);
  a.state_status = ints(shapes.state_status);
  cpu::ThreadPool pool(num_threads);
  Workspace workspace(packed_sparse_attention_indexer_workspace_bytes(a, num_threads));
  packed_sparse_attention_indexer(a, {.pool = &pool, .workspace = &workspace});
  Results r;
  r.indices = bound.values_of(a.selected_indices);
  r.counts = bound.values_of(a.selected_counts);
  r.states.keys = bound.tensors.values_of(a.present_key_state);
  r.states.kv = bound.tensors.values_of(a.present_kv_buffer);
  r.states.gates = bound.tensors.values_of(a.present_gate_buffer);
  r.states.lengths = bound.values_of(a.present_state_lengths);
  r.update = bound.tensors.values_of(a.state_update);
  r.sharing = a.indexshare_status ? bound.values_of(a.indexshare_status) : Ints{};
  r.status = bound.values_of(a.state_status);
  return r;
}

}  // namespace shoal::packed_indexer
