// A step of sparse_paged_attention in memory, and its result in f64 straight from the contract.
//
// Everything that no row may read is poisoned: NaN where the type has one, the largest code otherwise; entries of
// selected_indices past the count are positions that would change the result.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "shoal/base/float_bits.h"
#include "shoal/cpu/thread_pool.h"
#include "shoal/ops/element.h"
#include "shoal/ops/sparse_paged_attention/sparse_paged_attention.h"
#include "testkit/guarded_tensor.h"

namespace shoal::sparse_paged_cases {

struct Case {
  std::string name = {};
  DType type = DType::kF16;
  DType cache = DType::kF16;
  std::string quant = "NONE";  // of K; V has the other quantised kind
  int64_t num_heads = 4;
  int64_t num_kv_heads = 2;
  int64_t head_dim = 16;
  int64_t v_head_dim = 0;  // above 0: LATENT
  int64_t page_size = 16;
  int64_t num_pages = 6;
  std::vector<std::vector<int32_t>> table = {{2, 0, 4, 1, 3, -1}};
  std::vector<int32_t> past = {15};
  std::vector<int32_t> lens = {3};
  std::vector<int32_t> slots = {};                  // empty: no slot_mapping
  std::vector<std::vector<int32_t>> selected = {};  // per token, the first counts[t]; then garbage up to the widest
  bool by_head = false;                             // `selected` is per token and KV head
  bool local = false;
  bool auxiliary = false;
  bool shared = false;
  int64_t auxiliary_heads = 1;
  std::vector<int32_t> auxiliary_lengths = {5};
  int64_t auxiliary_capacity = 7;
  bool causal = true;
  int64_t window = -1;
  float scale = 0.0f;
  float softcap = 0.0f;
  bool sink = false;
  bool norm = false;
  int rotary = 0;  // 1: halves, 2: interleaved pairs
  int64_t rotary_dim = 16;
  int64_t rotary_offset = 0;
  bool packed = false;
  int64_t padding = 0;     // elements between rows
  int64_t misaligned = 0;  // elements that every buffer is moved by
  uint64_t seed = 1;
};

inline std::ostream& operator<<(std::ostream& stream, const Case& c) { return stream << c.name << " seed " << c.seed; }

using Values = std::vector<double>;

inline double rounded(DType type, double x) { return testkit::rounded_to(type, static_cast<float>(x)); }

class Step {
 public:
  explicit Step(const Case& problem) : c(problem), random_(problem.seed) {
    cu = {0};
    for (const int32_t len : c.lens) {
      cu.push_back(cu.back() + len);
    }
    num_tokens = cu.back();
    num_seqs = static_cast<int64_t>(c.lens.size());
    width = c.num_heads * c.head_dim;
    kv_width = c.num_kv_heads * c.head_dim;
    if (c.packed) {
      query = floats({num_tokens, width + 2 * kv_width});
    } else {
      query = floats({num_tokens, width});
      key = floats({num_tokens, kv_width});
      value = floats({num_tokens, kv_width});
    }
    sink = floats({c.num_heads});
    q_norm = floats({c.head_dim});
    k_norm = floats({c.head_dim});
    const int64_t max_pos = 200;
    cos = floats({max_pos, c.rotary_dim / 2});
    sin = floats({max_pos, c.rotary_dim / 2});
    for (const auto& row : c.table) {
      table.insert(table.end(), row.begin(), row.end());
    }
    for (int64_t i = 0; i < kv_width; ++i) {
      channel_scales.push_back(random_.uniform(0.01f, 0.05f) * (i % 5 == 0 ? -1.0f : 1.0f));
    }
    k_cache = poisoned_cache();
    v_cache = poisoned_cache();
    fill_history();
    make_selection();
    auxiliary_key = floats({num_seqs, c.auxiliary_capacity, c.auxiliary_heads, c.head_dim});
    auxiliary_value = floats({num_seqs, c.auxiliary_capacity, c.auxiliary_heads, c.head_dim});
    for (int64_t b = 0; b < num_seqs; ++b) {
      for (int64_t row = std::max(0, c.auxiliary_lengths[static_cast<size_t>(b)]); row < c.auxiliary_capacity; ++row) {
        poison(auxiliary_key, b, row);
        poison(auxiliary_value, b, row);
      }
    }
    output = memory(c.type, {num_tokens, c.num_heads * v_dim()});
  }

  SparsePagedAttentionArgs args() {
    SparsePagedAttentionArgs a;
    a.beyond_schema =
        c.by_head || c.v_head_dim > 0 || (c.type == DType::kF32 && c.cache != DType::kF32 && c.cache != DType::kI8);
    a.output = output;
    a.query = query;
    a.key = key;
    a.key_cache = k_cache;
    if (c.v_head_dim == 0) {
      a.value = value;
      a.value_cache = v_cache;
    } else {
      a.kv_cache_layout = "LATENT";
      a.v_head_size = c.v_head_dim;
    }
    a.cumulative_sequence_length = ints(cu, {num_seqs + 1});
    a.past_seqlens = ints(c.past, {num_seqs});
    a.block_table = ints(table, {num_seqs, static_cast<int64_t>(c.table[0].size())});
    if (!c.slots.empty()) {
      a.slot_mapping = ints(c.slots, {num_tokens});
    }
    if (c.by_head) {
      a.selected_indices = ints(indices, {num_tokens, c.num_kv_heads, max_selected});
      a.selected_counts = ints(counts, {num_tokens, c.num_kv_heads});
    } else {
      a.selected_indices = ints(indices, {num_tokens, max_selected});
      a.selected_counts = ints(counts, {num_tokens});
    }
    if (c.auxiliary) {
      a.auxiliary_key = auxiliary_key;
      a.auxiliary_value = c.shared ? TensorView() : auxiliary_value;
      a.auxiliary_lengths = ints(c.auxiliary_lengths, {num_seqs});
    }
    if (c.rotary != 0) {
      a.cos_cache = cos;
      a.sin_cache = sin;
    }
    a.head_sink = c.sink ? sink : TensorView();
    if (c.norm) {
      a.q_norm_weight = q_norm;
      a.k_norm_weight = k_norm;
    }
    if (c.cache == DType::kI8) {
      const bool k_per_channel = c.quant == "PER_CHANNEL";
      a.k_quant_type = k_per_channel ? "PER_CHANNEL" : "PER_TENSOR";
      a.k_scale = TensorView(channel_scales.data(), DType::kF32, {k_per_channel ? kv_width : 1});
      if (c.v_head_dim == 0) {
        a.v_quant_type = k_per_channel ? "PER_TENSOR" : "PER_CHANNEL";
        a.v_scale = TensorView(channel_scales.data(), DType::kF32, {k_per_channel ? 1 : kv_width});
      }
    }
    a.num_heads = c.num_heads;
    a.kv_num_heads = c.num_kv_heads;
    a.scale = c.scale;
    a.softcap = c.softcap;
    a.local_window_size = c.window;
    a.is_causal = c.causal;
    a.attention_mode = c.local ? "local_plus_selected" : "selected_only";
    a.selected_kv_source = c.auxiliary ? "auxiliary" : "main";
    a.auxiliary_kv_shared = c.shared;
    a.do_rotary = c.rotary != 0;
    a.rotary_interleaved = c.rotary == 2;
    a.rotary_offset = c.rotary_offset;
    return a;
  }

  // The caches after the append and the output, from the formulas. To be called before the step is run.
  struct Expected {
    Values k_cache;  // [P * S, G, H] values, after dequantisation
    Values v_cache;
    std::vector<float> output;
  };
  Expected expected() const {
    Expected e;
    e.k_cache = cache_values(k_cache, true);
    e.v_cache = cache_values(v_cache, false);
    std::vector<Values> keys;
    std::vector<Values> values;
    for (int64_t t = 0; t < num_tokens; ++t) {
      const int64_t b = seq_of(t);
      keys.emplace_back();
      values.emplace_back();
      for (int64_t g = 0; g < c.num_kv_heads; ++g) {
        const Values k = prepared(c.packed ? query : key, t, (c.packed ? width : 0) + g * c.head_dim, &k_norm);
        const Values v =
            prepared(c.packed ? query : value, t, (c.packed ? width + kv_width : 0) + g * c.head_dim, nullptr);
        keys.back().insert(keys.back().end(), k.begin(), k.end());
        values.back().insert(values.back().end(), v.begin(), v.end());
      }
      const int64_t pos = c.past[static_cast<size_t>(b)] + t - cu[static_cast<size_t>(b)];
      const int64_t slot = c.slots.empty() ? mapped(b, pos) : c.slots[static_cast<size_t>(t)];
      if (slot >= 0 && slot < c.num_pages * c.page_size) {
        for (int64_t i = 0; i < kv_width; ++i) {
          const auto n = static_cast<size_t>(i);
          e.k_cache[static_cast<size_t>(slot * kv_width + i)] = stored(keys.back()[n], true, i);
          if (c.v_head_dim == 0) {
            e.v_cache[static_cast<size_t>(slot * kv_width + i)] = stored(values.back()[n], false, i);
          }
        }
      }
    }
    for (int64_t t = 0; t < num_tokens; ++t) {
      for (int64_t h = 0; h < c.num_heads; ++h) {
        attend(e, keys, values, t, h);
      }
    }
    return e;
  }

  int64_t v_dim() const { return c.v_head_dim > 0 ? c.v_head_dim : c.head_dim; }
  int64_t seq_of(int64_t t) const {
    int64_t b = 0;
    while (t >= cu[static_cast<size_t>(b + 1)]) {
      ++b;
    }
    return b;
  }
  int64_t mapped(int64_t b, int64_t pos) const {
    const auto& row = c.table[static_cast<size_t>(b)];
    const int64_t column = pos / c.page_size;
    if (column >= static_cast<int64_t>(row.size())) {
      return -1;
    }
    const int32_t page = row[static_cast<size_t>(column)];
    return page < 0 || page >= c.num_pages ? -1 : page * c.page_size + pos % c.page_size;
  }
  std::vector<float> result() const {
    std::vector<float> values;
    for (int64_t t = 0; t < num_tokens; ++t) {
      for (int64_t i = 0; i < output.dim(1); ++i) {
        values.push_back(read_element(c.type, output.data, t * output.stride(0) + i));
      }
    }
    return values;
  }
  std::vector<uint8_t> cache_bytes() const {
    std::vector<uint8_t> bytes(k_cache.as<uint8_t>(), k_cache.as<uint8_t>() + k_cache.num_bytes());
    bytes.insert(bytes.end(), v_cache.as<uint8_t>(), v_cache.as<uint8_t>() + v_cache.num_bytes());
    return bytes;
  }
  Values cache_values(const TensorView& cache, bool is_key) const {
    Values values;
    for (int64_t i = 0; i < cache.num_elements(); ++i) {
      values.push_back(c.cache == DType::kI8 ? cache.as<int8_t>()[i] * scale_of(is_key, i % kv_width)
                                             : static_cast<double>(read_element(c.cache, cache.data, i)));
    }
    return values;
  }
  bool intact() const {
    return std::all_of(buffers_.begin(), buffers_.end(), [](const auto& buffer) { return buffer->guards_intact(); });
  }

  Case c;
  int64_t num_tokens = 0;
  int64_t num_seqs = 0;
  int64_t width = 0;
  int64_t kv_width = 0;
  int64_t max_selected = 0;
  std::vector<int32_t> cu, table, indices, counts;
  std::vector<float> channel_scales;
  TensorView query, key, value, k_cache, v_cache, auxiliary_key, auxiliary_value, cos, sin, sink, q_norm, k_norm,
      output;

 private:
  TensorView memory(DType type, std::vector<int64_t> shape) {
    int64_t count = shape[0];
    int64_t row = 1;
    for (size_t i = 1; i < shape.size(); ++i) {
      row *= shape[i];
    }
    const int64_t padding = shape.size() == 2 ? c.padding : 0;
    count *= row + padding;
    buffers_.push_back(
        std::make_unique<testkit::Guarded<uint8_t>>(static_cast<size_t>(count + c.misaligned) * size_of(type)));
    TensorView view(buffers_.back()->data() + static_cast<size_t>(c.misaligned) * size_of(type), type, shape);
    view.strides[0] = row + padding;
    return view;
  }
  TensorView floats(std::vector<int64_t> shape) {
    const TensorView view = memory(c.type, shape);
    const int64_t row = view.num_elements() / std::max<int64_t>(shape[0], 1);
    for (int64_t i = 0; i < shape[0]; ++i) {
      for (int64_t j = 0; j < row; ++j) {
        write_element(c.type, view.data, i * view.stride(0) + j, random_.normal());
      }
    }
    return view;
  }
  static TensorView ints(const std::vector<int32_t>& values, std::vector<int64_t> shape) {
    static int32_t none = 0;
    return TensorView(values.empty() ? &none : const_cast<int32_t*>(values.data()), DType::kI32, shape);
  }
  TensorView poisoned_cache() {
    const TensorView view = memory(c.cache, {c.num_pages, c.page_size, c.num_kv_heads, c.head_dim});
    std::memset(view.data, c.cache == DType::kI8 ? 0x7f : 0xff, view.num_bytes());
    return view;
  }
  void poison(const TensorView& cache, int64_t b, int64_t row) const {
    for (int64_t i = 0; i < cache.dim(2) * cache.dim(3); ++i) {
      write_element(c.type, cache.data, b * cache.stride(0) + row * cache.stride(1) + i,
                    std::numeric_limits<float>::quiet_NaN());
    }
  }
  void fill_history() {
    for (int64_t b = 0; b < num_seqs; ++b) {
      // Also the places of this step: a suppressed write leaves what an earlier step wrote.
      for (int64_t pos = 0;
           pos < c.past[static_cast<size_t>(b)] + (c.slots.empty() ? 0 : c.lens[static_cast<size_t>(b)]); ++pos) {
        const int64_t slot = mapped(b, pos);
        for (int64_t i = 0; slot >= 0 && i < kv_width; ++i) {
          for (const TensorView& cache : {k_cache, v_cache}) {
            if (c.cache == DType::kI8) {
              cache.as<int8_t>()[slot * kv_width + i] = static_cast<int8_t>(random_.integer(-128, 127));
            } else {
              write_element(c.cache, cache.data, slot * kv_width + i, testkit::rounded_to(c.type, random_.normal()));
            }
          }
        }
      }
    }
  }
  void make_selection() {
    for (const auto& row : c.selected) {
      max_selected = std::max(max_selected, static_cast<int64_t>(row.size()));
    }
    const int64_t num_rows = num_tokens * (c.by_head ? c.num_kv_heads : 1);
    for (int64_t t = 0; t < num_rows; ++t) {
      const auto& row = c.selected.empty() ? indices : c.selected[static_cast<size_t>(t) % c.selected.size()];
      counts.push_back(c.selected.empty() ? 0 : static_cast<int32_t>(row.size()));
      if (!c.selected.empty()) {
        indices.insert(indices.end(), row.begin(), row.end());
        indices.resize(static_cast<size_t>((t + 1) * max_selected), 0);
      }
    }
  }
  double scale_of(bool is_key, int64_t channel) const {
    const bool per_channel = (c.quant == "PER_CHANNEL") == is_key;
    return channel_scales[static_cast<size_t>(per_channel ? channel : 0)];
  }
  double stored(double x, bool is_key, int64_t channel) const {
    if (c.cache != DType::kI8) {
      return rounded(c.cache, x);
    }
    const double scale = scale_of(is_key, channel);
    const auto quotient = static_cast<double>(static_cast<float>(x) / static_cast<float>(scale));
    return std::nearbyint(std::clamp(quotient, -128.0, 127.0)) * scale;
  }
  // A head after QK-norm and rotary, each rounded to T; without a norm weight (V) as it is.
  Values prepared(const TensorView& rows, int64_t t, int64_t first, const TensorView* norm) const {
    Values x;
    double sum = 0.0;
    for (int64_t i = 0; i < c.head_dim; ++i) {
      x.push_back(read_element(c.type, rows.data, t * rows.stride(0) + first + i));
      sum += x.back() * x.back();
    }
    if (norm == nullptr) {
      return x;
    }
    for (int64_t i = 0; c.norm && i < c.head_dim; ++i) {
      double& v = x[static_cast<size_t>(i)];
      v = rounded(c.type,
                  v / std::sqrt(sum / static_cast<double>(c.head_dim) + 1e-6) * read_element(c.type, norm->data, i));
    }
    const int64_t b = seq_of(t);
    const int64_t pos = c.past[static_cast<size_t>(b)] + t - cu[static_cast<size_t>(b)];
    const int64_t half = c.rotary_dim / 2;
    for (int64_t i = 0; c.rotary != 0 && i < half; ++i) {
      double& a = x[static_cast<size_t>(c.rotary_offset + (c.rotary == 2 ? 2 * i : i))];
      double& d = x[static_cast<size_t>(c.rotary_offset + (c.rotary == 2 ? 2 * i + 1 : half + i))];
      const double cosine = read_element(c.type, cos.data, pos * cos.stride(0) + i);
      const double sine = read_element(c.type, sin.data, pos * sin.stride(0) + i);
      const double turned = rounded(c.type, a * cosine - d * sine);
      d = rounded(c.type, d * cosine + a * sine);
      a = turned;
    }
    return x;
  }

  struct Row {
    const double* k;
    const double* v;
  };
  void attend(Expected& e, const std::vector<Values>& keys, const std::vector<Values>& values, int64_t t,
              int64_t h) const {
    const auto b = static_cast<size_t>(seq_of(t));
    const int64_t past = c.past[b];
    const int64_t pos = past + t - cu[b];
    const int64_t len = past + c.lens[b];
    const int64_t g = h / (c.num_heads / c.num_kv_heads);
    const int64_t begin = c.window > 0 ? std::max<int64_t>(0, pos - c.window + 1) : 0;
    const int64_t end = c.causal ? pos : len - 1;
    std::vector<Row> rows;
    const auto main = [&](int64_t p) {
      if (p < 0 || p >= len || (c.causal && p > pos) || mapped(static_cast<int64_t>(b), p) < 0) {
        return;
      }
      int64_t slot = mapped(static_cast<int64_t>(b), p);
      if (p >= past) {
        const auto own = static_cast<size_t>(cu[b] + p - past);
        const int64_t asked = c.slots.empty() ? slot : c.slots[own];
        if (asked >= c.num_pages * c.page_size) {
          return;
        }
        if (asked >= 0 && (c.cache == c.type || c.cache == DType::kF32)) {
          const auto first = static_cast<size_t>(g * c.head_dim);
          rows.push_back({&keys[own][first], c.v_head_dim > 0 ? &keys[own][first] : &values[own][first]});
          return;
        }
        slot = asked >= 0 ? asked : slot;
      }
      const auto offset = static_cast<size_t>(slot * kv_width + g * c.head_dim);
      rows.push_back({&e.k_cache[offset], c.v_head_dim > 0 ? &e.k_cache[offset] : &e.v_cache[offset]});
    };
    for (int64_t p = begin; c.local && p <= end; ++p) {
      main(p);
    }
    std::vector<Values> kept;
    const int64_t choice = c.by_head ? t * c.num_kv_heads + g : t;
    const int64_t count = std::clamp<int64_t>(counts[static_cast<size_t>(choice)], 0, max_selected);
    kept.reserve(static_cast<size_t>(2 * count));
    for (int64_t i = 0; i < count; ++i) {
      const int64_t p = indices[static_cast<size_t>(choice * max_selected + i)];
      if (!c.auxiliary) {
        if (!c.local || p < begin || p > end) {
          main(p);
        }
      } else if (p >= 0 && p < std::min<int64_t>(c.auxiliary_lengths[b], c.auxiliary_capacity)) {
        for (const TensorView& cache : {auxiliary_key, c.shared ? auxiliary_key : auxiliary_value}) {
          kept.emplace_back();
          for (int64_t channel = 0; channel < c.head_dim; ++channel) {
            const int64_t head = c.auxiliary_heads == 1 ? 0 : g;
            kept.back().push_back(read_element(
                c.type, cache.data,
                static_cast<int64_t>(b) * cache.stride(0) + p * cache.stride(1) + head * c.head_dim + channel));
          }
        }
        rows.push_back({kept[kept.size() - 2].data(), kept.back().data()});
      }
    }
    const Values q = prepared(query, t, h * c.head_dim, &q_norm);
    const double scale = c.scale != 0.0f ? c.scale : 1.0 / std::sqrt(static_cast<double>(c.head_dim));
    Values logits;
    double max = c.sink ? static_cast<double>(read_element(c.type, sink.data, h)) : -1e300;
    for (const Row& row : rows) {
      double dot = 0.0;
      for (size_t i = 0; i < q.size(); ++i) {
        dot += q[i] * row.k[i];
      }
      logits.push_back(c.softcap > 0.0f ? c.softcap * std::tanh(scale * dot / c.softcap) : scale * dot);
      max = std::max(max, logits.back());
    }
    double sum = c.sink ? std::exp(read_element(c.type, sink.data, h) - max) : 0.0;
    Values acc(static_cast<size_t>(v_dim()), 0.0);
    for (size_t j = 0; j < rows.size(); ++j) {
      const double weight = std::exp(logits[j] - max);
      sum += weight;
      for (size_t i = 0; i < acc.size(); ++i) {
        acc[i] += weight * rows[j].v[i];
      }
    }
    for (const double a : acc) {
      e.output.push_back(rows.empty() ? 0.0f : static_cast<float>(a / sum));
    }
  }

  testkit::Random random_;
  std::vector<std::unique_ptr<testkit::Guarded<uint8_t>>> buffers_;
};

inline void run(Step& step, const SparsePagedAttentionArgs& args, cpu::Isa isa, cpu::ThreadPool& pool) {
  static_cast<void>(step);
  Workspace workspace(sparse_paged_attention_workspace_bytes(args, pool.num_threads()));
  sparse_paged_attention(args, {&pool, &workspace, isa, "cpu"});
}

}  // namespace shoal::sparse_paged_cases
