// Calls of dynamic_sparse_attention with their right results: f64 by the formulas.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>

#include "shoal/cpu/thread_pool.h"
#include "shoal/ops/dynamic_sparse_attention/dynamic_sparse_attention.h"
#include "shoal/ops/element.h"
#include "testkit/guarded_tensor.h"

namespace shoal::dynamic_sparse_cases {

using Ints = std::vector<int32_t>;
using Values = std::vector<double>;

constexpr int32_t kMin = std::numeric_limits<int32_t>::min();
constexpr int32_t kMax = std::numeric_limits<int32_t>::max();

struct Case {
  std::string name = {};
  DType type = DType::kF32;   // of query and key
  DType value = DType::kF32;  // of value and, without output_bf16, T
  DType cache = DType::kF32;
  bool output_bf16 = false;
  int64_t num_heads = 4;
  int64_t num_kv_heads = 2;
  int64_t head_dim = 16;
  int64_t seq_len = 2;
  Ints seqlens_k = {10, 6};
  int64_t total = 11;
  int64_t past_capacity = 12;  // -1: no past
  std::vector<Ints> selected = {{0, 3, 9}};
  bool local = false;  // with the auxiliary cache
  int64_t window = 3;
  int64_t auxiliary_length = 6;
  bool shared = false;
  bool both = false;  // shared, but auxiliary_value is given
  float scale = 0.0f;
  bool sink = false;
  bool smooth = false;
  bool norm = false;
  int rotary = 0;  // 1: halves, 2: interleaved pairs
  int64_t rotary_dim = 8;
  int64_t rotary_offset = 0;
  std::vector<int64_t> positions = {};
  bool packed = false;
  int64_t padding = 0;
  uint64_t seed = 1;
};

std::ostream& operator<<(std::ostream& stream, const Case& c) { return stream << c.name << " seed " << c.seed; }

class Step {
 public:
  explicit Step(const Case& problem) : c(problem), random_(problem.seed) {
    batch = static_cast<int64_t>(c.seqlens_k.size());
    type = c.output_bf16 ? DType::kBF16 : c.packed ? c.type : c.value;
    q_width = c.num_heads * c.head_dim;
    kv_width = c.num_kv_heads * c.head_dim;
    if (c.packed) {
      query = floats(c.type, {batch, c.seq_len, q_width + 2 * kv_width});
    } else {
      query = floats(c.type, {batch, c.seq_len, q_width});
      key = floats(c.type, {batch, c.seq_len, kv_width});
      value = floats(c.value, {batch, c.seq_len, kv_width});
    }
    for (float& scale : scales) {
      scale = random_.uniform(0.01f, 0.04f);
    }
    capacity = c.past_capacity >= c.total ? c.past_capacity : c.total;
    if (c.past_capacity >= 0) {
      past_key = past();
      past_value = past();
    }
    const bool in_place = c.past_capacity >= c.total;
    present_key = in_place ? past_key : memory(c.cache, {batch, c.num_kv_heads, capacity, c.head_dim});
    present_value = in_place ? past_value : memory(c.cache, {batch, c.num_kv_heads, capacity, c.head_dim});
    auxiliary_key = floats(type, {batch, c.num_kv_heads, c.auxiliary_length, c.head_dim});
    auxiliary_value = floats(type, {batch, c.num_kv_heads, c.auxiliary_length, c.head_dim});
    for (const Ints& row : c.selected) {
      max_selected = std::max(max_selected, static_cast<int64_t>(row.size()));
    }
    for (int64_t row = 0; row < batch * c.seq_len; ++row) {
      const Ints& entries = c.selected[static_cast<size_t>(row) % c.selected.size()];
      counts.push_back(static_cast<int32_t>(entries.size()));
      indices.insert(indices.end(), entries.begin(), entries.end());
      indices.resize(static_cast<size_t>((row + 1) * max_selected), -1);
    }
    cos = floats(type, {20, c.rotary_dim / 2});
    sin = floats(type, {20, c.rotary_dim / 2});
    q_norm = floats(type, {c.head_dim});
    k_norm = floats(type, {c.head_dim});
    sink = floats(type, {c.num_heads});
    output = memory(type, {batch, c.seq_len, q_width});
    total = static_cast<int32_t>(c.total);
  }

  DynamicSparseAttentionArgs args() {
    DynamicSparseAttentionArgs a;
    a.output = output;
    a.present_key = present_key;
    a.present_value = present_value;
    a.validation_status = TensorView(&status, DType::kI32, {1});
    a.query = query;
    a.key = key;
    a.value = value;
    a.past_key = past_key;
    a.past_value = past_value;
    if (c.local) {
      a.auxiliary_key = auxiliary_key;
      a.auxiliary_value = c.shared && !c.both ? TensorView() : auxiliary_value;
      a.attention_mode = "local_plus_selected";
      a.selected_kv_source = "auxiliary";
      a.local_window_size = c.window;
    }
    static int32_t none = 0;
    a.selected_indices =
        TensorView(indices.empty() ? &none : indices.data(), DType::kI32, {batch * c.seq_len, max_selected});
    a.selected_counts = TensorView(counts.data(), DType::kI32, {batch * c.seq_len});
    a.seqlens_k = TensorView(c.seqlens_k.data(), DType::kI32, {batch});
    a.total_sequence_length = TensorView(&total, DType::kI32, std::span<const int64_t>());
    if (c.rotary != 0) {
      a.cos_cache = cos;
      a.sin_cache = sin;
    }
    if (!c.positions.empty()) {
      a.position_ids = TensorView(c.positions.data(), DType::kI64, {batch, c.seq_len});
    }
    if (c.norm) {
      a.q_norm_weight = q_norm;
      a.k_norm_weight = k_norm;
    }
    a.head_sink = c.sink ? sink : TensorView();
    if (c.cache == DType::kI8) {
      a.key_scale = TensorView(scales.data(), DType::kF32, {kv_width});
      a.value_scale = TensorView(scales.data() + 1, DType::kF32, {kv_width});
    }
    a.num_heads = c.num_heads;
    a.kv_num_heads = c.num_kv_heads;
    a.scale = c.scale;
    a.auxiliary_kv_shared = c.shared;
    a.smooth_softmax = c.smooth;
    a.output_bf16 = c.output_bf16;
    a.do_rotary = c.rotary != 0;
    a.rotary_interleaved = c.rotary == 2;
    a.rotary_offset = c.rotary_offset;
    return a;
  }

  struct Expected {
    Values keys;  // [B, G, C, H], the values of the outgoing caches
    Values values;
    std::vector<float> output;
  };
  // To be called before the step is run.
  Expected expected() const {
    Expected e;
    const int64_t past_rows = std::max<int64_t>(0, c.past_capacity);
    for (int64_t head = 0; head < batch * c.num_kv_heads; ++head) {
      for (int64_t i = 0; i < capacity * c.head_dim; ++i) {
        const bool kept = i < past_rows * c.head_dim;
        const int64_t from = head * past_rows * c.head_dim + i;
        const int64_t channel = head % c.num_kv_heads * c.head_dim + i % c.head_dim;
        e.keys.push_back(kept ? cached(past_key, from, 0, channel) : 0.0);
        e.values.push_back(kept ? cached(past_value, from, 1, channel) : 0.0);
      }
    }
    for (int64_t b = 0; b < batch; ++b) {
      for (int64_t s = 0; s < c.seq_len; ++s) {
        const int64_t pos = int64_t{c.seqlens_k[static_cast<size_t>(b)]} + 1 - c.seq_len + s;
        for (int64_t g = 0; pos >= 0 && pos < capacity && g < c.num_kv_heads; ++g) {
          const Values k = prepared(c.packed ? query : key, b, s, (c.packed ? q_width : 0) + g * c.head_dim, &k_norm);
          const Values v =
              prepared(c.packed ? query : value, b, s, (c.packed ? q_width + kv_width : 0) + g * c.head_dim, nullptr);
          for (int64_t i = 0; i < c.head_dim; ++i) {
            const auto to = static_cast<size_t>(((b * c.num_kv_heads + g) * capacity + pos) * c.head_dim + i);
            e.keys[to] = stored(k[static_cast<size_t>(i)], 0, g * c.head_dim + i);
            e.values[to] = stored(v[static_cast<size_t>(i)], 1, g * c.head_dim + i);
          }
        }
      }
    }
    for (int64_t row = 0; row < batch * c.seq_len; ++row) {
      for (int64_t h = 0; h < c.num_heads; ++h) {
        attend(e, row, h);
      }
    }
    return e;
  }

  double cached(const TensorView& cache, int64_t i, int side, int64_t channel) const {
    return c.cache == DType::kI8
               ? cache.as<int8_t>()[i] * static_cast<double>(scales[static_cast<size_t>(channel + side)])
               : static_cast<double>(read_element(c.cache, cache.data, i));
  }
  Values cache_values(const TensorView& cache, int side) const {
    Values values;
    for (int64_t i = 0; i < cache.num_elements(); ++i) {
      values.push_back(
          cached(cache, i, side, i / (capacity * c.head_dim) % c.num_kv_heads * c.head_dim + i % c.head_dim));
    }
    return values;
  }
  std::vector<float> result() const {
    std::vector<float> values;
    for (int64_t row = 0; row < batch * c.seq_len; ++row) {
      for (int64_t i = 0; i < q_width; ++i) {
        values.push_back(read_element(type, output.data,
                                      row / c.seq_len * output.stride(0) + row % c.seq_len * output.stride(1) + i));
      }
    }
    return values;
  }
  bool intact() const {
    return std::all_of(buffers_.begin(), buffers_.end(), [](const auto& buffer) { return buffer->guards_intact(); });
  }
  void run(cpu::Isa isa, int num_threads = 2) { run(args(), isa, num_threads); }
  void run(const DynamicSparseAttentionArgs& a, cpu::Isa isa, int num_threads = 2) {
    cpu::ThreadPool pool(num_threads);
    Workspace workspace(dynamic_sparse_attention_workspace_bytes(a, num_threads));
    dynamic_sparse_attention(a, {&pool, &workspace, isa, "cpu"});
  }

  Case c;
  int64_t batch = 0;
  int64_t q_width = 0;
  int64_t kv_width = 0;
  int64_t capacity = 0;
  int64_t max_selected = 0;
  DType type = DType::kF32;
  Ints indices, counts;
  std::vector<float> scales = std::vector<float>(520);
  int32_t status = -1;
  int32_t total = 0;
  TensorView query, key, value, past_key, past_value, present_key, present_value, auxiliary_key, auxiliary_value;
  TensorView cos, sin, q_norm, k_norm, sink, output;

 private:
  TensorView memory(DType dtype, std::vector<int64_t> shape) {
    const bool padded = shape.size() == 3;  // rows of tokens
    const int64_t row = shape.back() + (padded ? c.padding : 0);
    int64_t count = row;
    for (size_t i = 0; i + 1 < shape.size(); ++i) {
      count *= shape[i];
    }
    buffers_.push_back(std::make_unique<testkit::Guarded<uint8_t>>(static_cast<size_t>(count) * size_of(dtype)));
    TensorView view(buffers_.back()->data(), dtype, shape);
    if (padded) {
      view.strides[1] = row;
      view.strides[0] = row * shape[1];
    }
    return view;
  }
  TensorView floats(DType dtype, std::vector<int64_t> shape) {
    const TensorView view = memory(dtype, shape);
    const int64_t width = shape.back();
    const int64_t row = view.rank > 1 ? view.stride(view.rank - 2) : width;
    for (int64_t i = 0; i < view.num_elements(); ++i) {
      write_element(dtype, view.data, i / width * row + i % width, random_.normal());
    }
    return view;
  }
  // Rows that belong to a sequence; the others are poisoned.
  TensorView past() {
    const TensorView view = memory(c.cache, {batch, c.num_kv_heads, c.past_capacity, c.head_dim});
    for (int64_t i = 0; i < view.num_elements(); ++i) {
      const int64_t b = i / (c.num_kv_heads * c.past_capacity * c.head_dim);
      const int64_t row = i / c.head_dim % c.past_capacity;
      const bool used = row < int64_t{c.seqlens_k[static_cast<size_t>(b)]} + 1 - c.seq_len;
      if (c.cache == DType::kI8) {
        view.as<int8_t>()[i] = static_cast<int8_t>(used ? random_.integer(-128, 127) : 127);
      } else if (used) {
        write_element(c.cache, view.data, i, random_.normal());
      }
    }
    return view;
  }
  double stored(double x, int side, int64_t channel) const {
    if (c.cache != DType::kI8) {
      return testkit::rounded_to(c.cache, static_cast<float>(x));
    }
    const float scale = scales[static_cast<size_t>(channel + side)];
    const auto quotient = static_cast<double>(scale == 0.0f ? 0.0f : static_cast<float>(x) / scale);
    return std::nearbyint(std::clamp(quotient, -128.0, 127.0)) * scale;
  }
  Values prepared(const TensorView& rows, int64_t b, int64_t s, int64_t first, const TensorView* norm) const {
    Values x;
    double sum = 0.0;
    for (int64_t i = 0; i < c.head_dim; ++i) {
      x.push_back(read_element(rows.dtype, rows.data, b * rows.stride(0) + s * rows.stride(1) + first + i));
      sum += x.back() * x.back();
    }
    if (norm == nullptr) {
      return x;
    }
    const auto round = [&](double v) { return testkit::rounded_to(c.type, static_cast<float>(v)); };
    for (int64_t i = 0; c.norm && i < c.head_dim; ++i) {
      double& v = x[static_cast<size_t>(i)];
      v = round(v / std::sqrt(sum / static_cast<double>(c.head_dim) + 1e-6) * read_element(type, norm->data, i));
    }
    int64_t pos = int64_t{c.seqlens_k[static_cast<size_t>(b)]} + 1 - c.seq_len + s;
    if (!c.positions.empty()) {
      pos = c.positions[static_cast<size_t>(b * c.seq_len + s)];
    }
    const int64_t half = c.rotary_dim / 2;
    for (int64_t i = 0; c.rotary != 0 && pos >= 0 && pos < cos.dim(0) && i < half; ++i) {
      double& a = x[static_cast<size_t>(c.rotary_offset + (c.rotary == 2 ? 2 * i : i))];
      double& d = x[static_cast<size_t>(c.rotary_offset + (c.rotary == 2 ? 2 * i + 1 : half + i))];
      const double cosine = read_element(type, cos.data, pos * half + i);
      const double sine = read_element(type, sin.data, pos * half + i);
      const double turned = round(a * cosine - d * sine);
      d = round(d * cosine + a * sine);
      a = turned;
    }
    return x;
  }
  void attend(Expected& e, int64_t row, int64_t h) const {
    const int64_t b = row / c.seq_len;
    const int64_t s = row % c.seq_len;
    const int64_t g = h / (c.num_heads / c.num_kv_heads);
    const int64_t length = int64_t{c.seqlens_k[static_cast<size_t>(b)]} + 1;
    const int64_t pos = length - c.seq_len + s;
    const bool sound = length >= c.seq_len && length <= capacity;
    std::vector<Values> keys;
    std::vector<Values> values;
    const auto main = [&](int64_t p) {
      const auto from = static_cast<std::ptrdiff_t>(((b * c.num_kv_heads + g) * capacity + p) * c.head_dim);
      keys.emplace_back(e.keys.begin() + from, e.keys.begin() + from + c.head_dim);
      values.emplace_back(e.values.begin() + from, e.values.begin() + from + c.head_dim);
    };
    for (int64_t p = std::max<int64_t>(0, pos - c.window + 1); c.local && sound && p <= pos; ++p) {
      main(p);
    }
    const int64_t count = std::clamp<int64_t>(counts[static_cast<size_t>(row)], 0, max_selected);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t p = indices[static_cast<size_t>(row * max_selected + i)];
      if (!c.local && sound && p >= 0 && p <= pos) {
        main(p);
      } else if (c.local && p >= 0 && p < c.auxiliary_length) {
        const bool shared = c.shared && !c.both;
        for (auto& [to, cache] :
             {std::pair{&keys, auxiliary_key}, {&values, shared ? auxiliary_key : auxiliary_value}}) {
          to->emplace_back();
          for (int64_t channel = 0; channel < c.head_dim; ++channel) {
            to->back().push_back(read_element(
                type, cache.data, ((b * c.num_kv_heads + g) * c.auxiliary_length + p) * c.head_dim + channel));
          }
        }
      }
    }
    const Values q = prepared(query, b, s, h * c.head_dim, &q_norm);
    const double scale = c.scale != 0.0f ? c.scale : 1.0 / std::sqrt(static_cast<double>(c.head_dim));
    const bool has_sink = c.sink || c.smooth;
    const double sink_logit = c.sink ? read_element(type, sink.data, h) : 0.0;
    Values logits;
    double max = has_sink ? sink_logit : -1e300;
    for (const Values& k : keys) {
      double dot = 0.0;
      for (size_t i = 0; i < q.size(); ++i) {
        dot += q[i] * k[i];
      }
      logits.push_back(scale * dot);
      max = std::max(max, logits.back());
    }
    double sum = has_sink ? std::exp(sink_logit - max) : 0.0;
    Values acc(q.size(), 0.0);
    for (size_t j = 0; j < keys.size(); ++j) {
      const double weight = std::exp(logits[j] - max);
      sum += weight;
      for (size_t i = 0; i < acc.size(); ++i) {
        acc[i] += weight * values[j][i];
      }
    }
    for (const double a : acc) {
      e.output.push_back(keys.empty() ? 0.0f : static_cast<float>(a / sum));
    }
  }

  testkit::Random random_;
  std::vector<std::unique_ptr<testkit::Guarded<uint8_t>>> buffers_;
};

}  // namespace shoal::dynamic_sparse_cases
