// dynamic_sparse_attention against f64 by the formulas, its caches, its status codes, what must not matter, every
// rejection.
#include "shoal/ops/dynamic_sparse_attention/dynamic_sparse_attention.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>

#include "shoal/cpu/thread_pool.h"
#include "shoal/ops/element.h"
#include "testkit/expect_error.h"
#include "testkit/guarded_tensor.h"

namespace shoal {
namespace {

using testkit::expect_error;
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

bool same(double a, double b, double step) { return std::abs(a - b) <= step || (std::isnan(a) && std::isnan(b)); }

void check(const Case& c) {
  SCOPED_TRACE(testing::Message() << c);
  for (const cpu::Isa isa : cpu::available_isas()) {
    Step step(c);
    const Step::Expected expected = step.expected();
    step.run(isa);
    const bool narrow = step.type == DType::kBF16 || c.type == DType::kBF16;
    const bool half = step.type == DType::kF16 || c.type == DType::kF16;
    const double rtol = narrow ? 5e-3 : half ? 2e-3 : 2e-5;
    const double atol = narrow ? 6e-3 : half ? 2e-3 : 1e-5;
    const auto result = testkit::compare(step.result(), expected.output, rtol, atol);
    EXPECT_TRUE(result) << cpu::to_string(isa) << ": " << result.text;
    EXPECT_TRUE(step.intact());
    // After a norm or a rotation an ulp of T, or one code.
    const bool exact = !c.norm && c.rotary == 0;
    const Values keys = step.cache_values(step.present_key, 0);
    const Values values = step.cache_values(step.present_value, 1);
    for (size_t i = 0; i < keys.size(); ++i) {
      const double ulp = exact ? 0.0 : std::abs(expected.keys[i]) / 100 + (c.cache == DType::kI8 ? 0.041 : 2e-5);
      ASSERT_TRUE(same(keys[i], expected.keys[i], ulp)) << "key " << i << " " << keys[i] << " " << expected.keys[i];
      ASSERT_TRUE(same(values[i], expected.values[i], 0.0)) << "value " << i;
    }
  }
}

std::vector<Case> feature_cases() {
  std::vector<Case> cases;
  const auto add = [&](Case c, const std::string& name) {
    c.name = name;
    c.seed = cases.size() + 1;
    cases.push_back(c);
  };
  const auto typed = [](Case c, DType type) {
    c.type = c.value = c.cache = type;
    return c;
  };
  Case base;
  base.selected = {{0, 3, 9, 10, 3, -1, 1000000, kMin, kMax, 11, 12}, {2}, {}, {6, 5, 4, 0, 7}};
  for (const DType type : {DType::kF32, DType::kF16, DType::kBF16}) {
    for (const bool local : {false, true}) {
      Case c = typed(base, type);
      c.local = local;
      const std::string name = concat(to_string(type), local ? "_local" : "_selected");
      add(c, name);
      c.sink = true;
      c.shared = local;
      c.scale = 0.4f;
      add(c, name + "_sink");
      c.smooth = true;
      c.sink = type == DType::kF16;
      c.both = true;
      add(c, name + "_smooth");
      c.cache = DType::kI8;
      add(c, name + "_int8");
      c.cache = DType::kF16;
      add(c, name + "_cache16");
      c = typed(base, type);
      c.local = local;
      c.packed = true;
      c.norm = true;
      c.padding = 5;
      add(c, name + "_packed_norm");
      c.rotary = local ? 2 : 1;
      c.packed = false;
      add(c, name + "_rotary");
      c.rotary_offset = 8;
      c.positions = {3, 19, 0, 7};
      c.cache = DType::kI8;
      add(c, name + "_positions_int8");
      c.cache = type;
      c.positions = {-1, 20, 5, int64_t{1} << 40};
      add(c, name + "_bad_positions");
      c = typed(base, type);
      c.local = local;
      c.past_capacity = -1;
      add(c, name + "_no_past");
      c.past_capacity = 9;
      add(c, name + "_growing");
      c.past_capacity = 0;
      c.seqlens_k = {1, 1};
      add(c, name + "_empty_past");
    }
  }
  for (const int64_t head_dim : {1, 3, 7, 12, 20, 64, 256}) {
    Case c = typed(base, head_dim % 2 ? DType::kF16 : DType::kF32);
    c.head_dim = head_dim;
    c.num_heads = 6;
    c.norm = true;
    add(c, concat("head_dim_", head_dim));
    c.cache = DType::kI8;
    add(c, concat("head_dim_", head_dim, "_int8"));
  }
  Case bf16 = typed(base, DType::kF16);
  bf16.output_bf16 = true;
  bf16.sink = bf16.norm = bf16.local = true;
  bf16.rotary = 1;
  add(bf16, "output_bf16");
  bf16.packed = true;
  add(bf16, "output_bf16_packed");
  Case mixed = base;
  mixed.value = DType::kF16;
  mixed.cache = DType::kF16;
  mixed.local = mixed.sink = true;
  add(mixed, "value16");
  // Sequences that do not fit: nothing of the main cache is read, rows that land inside are written.
  for (const bool local : {false, true}) {
    Case c = base;
    c.local = local;
    c.seqlens_k = {0, 13};
    add(c, concat("inconsistent_", local));
    c.seqlens_k = {-1, 12};
    add(c, concat("inconsistent_edge_", local));
    c.seqlens_k = {kMin, kMax};
    add(c, concat("inconsistent_far_", local));
  }
  Case wide = base;
  wide.seqlens_k = {299};
  wide.seq_len = 3;
  wide.total = wide.past_capacity = 300;
  for (const int32_t count : {63, 64, 65, 128, 257}) {
    Ints entries;
    for (int32_t i = 0; i < count; ++i) {
      entries.push_back(i * 11 % 297);
    }
    wide.selected = {entries};
    add(wide, concat("entries_", count));
  }
  wide.local = true;
  wide.window = 100;
  wide.auxiliary_length = 297;
  add(wide, "long_window");
  return cases;
}

class DynamicSparseAttention : public testing::TestWithParam<Case> {};

TEST_P(DynamicSparseAttention, MatchesTheFormulas) { check(GetParam()); }

INSTANTIATE_TEST_SUITE_P(Features, DynamicSparseAttention, testing::ValuesIn(feature_cases()),
                         [](const auto& test) { return test.param.name; });

// ---- validation_status ----

TEST(DynamicSparseAttentionStatus, Codes) {
  using A = DynamicSparseAttentionArgs;
  static Ints committed;
  static std::vector<int64_t> positions;
  const struct {
    int32_t code;
    const char* what;
    bool local;
    DType cache;
    void (*change)(Step&, A&);
  } cases[] = {
      {0, "sound", false, DType::kF32, [](Step&, A&) {}},
      {0, "sound auxiliary", true, DType::kF32, [](Step&, A&) {}},
      {0, "sound int8", false, DType::kI8, [](Step&, A&) {}},
      {1, "negative count", false, DType::kF32, [](Step& s, A&) { s.counts[1] = -1; }},
      {1, "count past the columns", false, DType::kF32, [](Step& s, A&) { s.counts[3] = 5; }},
      {2, "padding", false, DType::kF32, [](Step& s, A&) { s.indices[3] = 0; }},
      {2, "padding below -1", false, DType::kF32, [](Step& s, A&) { s.indices[3] = -2; }},
      {3, "negative entry", false, DType::kF32, [](Step& s, A&) { s.indices[1] = -1; }},
      {4, "beyond the sequence", false, DType::kF32, [](Step& s, A&) { s.indices[8] = 7; }},
      {4, "beyond the auxiliary cache", true, DType::kF32, [](Step& s, A&) { s.indices[1] = 6; }},
      {0, "an auxiliary row after the position", true, DType::kF32, [](Step& s, A&) { s.indices[9] = 5; }},
      {5, "seen before", false, DType::kF32, [](Step& s, A&) { s.indices[2] = 0; }},
      {5, "seen before, then another", false, DType::kF32,
       [](Step& s, A&) {
         s.indices[1] = 0;
         s.indices[2] = -1;
       }},
      {3, "another, then seen before", false, DType::kF32,
       [](Step& s, A&) {
         s.indices[1] = -1;
         s.indices[2] = 0;
       }},
      {6, "after the position", false, DType::kF32, [](Step& s, A&) { s.indices[0] = 10; }},
      {7, "shorter than the step", false, DType::kF32, [](Step& s, A&) { s.c.seqlens_k[1] = 0; }},
      {7, "longer than the cache", false, DType::kF32, [](Step& s, A&) { s.c.seqlens_k[1] = 12; }},
      {7, "longer than total_sequence_length", false, DType::kF32, [](Step& s, A&) { s.c.seqlens_k[1] = 11; }},
      {8, "position", false, DType::kF32,
       [](Step& s, A& a) {
         a.cos_cache = s.cos;
         a.sin_cache = s.sin;
         a.do_rotary = true;
         positions = {0, 1, 2, 20};
         a.position_ids = TensorView(positions.data(), DType::kI64, {2, 2});
       }},
      {0, "position without rotary", false, DType::kF32,
       [](Step&, A& a) {
         positions = {0, 1, 2, 20};
         a.position_ids = TensorView(positions.data(), DType::kI64, {2, 2});
       }},
      {0, "cursors", false, DType::kF32,
       [](Step&, A& a) {
         committed = {9, 5};
         a.committed_length = TensorView(committed.data(), DType::kI32, {2});
       }},
      {9, "cursor", false, DType::kF32,
       [](Step&, A& a) {
         committed = {9, 4};
         a.committed_length = TensorView(committed.data(), DType::kI32, {2});
       }},
      {9, "one cursor without a dimension", false, DType::kF32,
       [](Step&, A& a) {
         committed = {9};
         a.committed_length = TensorView(committed.data(), DType::kI32, std::span<const int64_t>());
       }},
      {9, "one cursor for two lengths", false, DType::kF32,
       [](Step&, A& a) {
         committed = {9};
         a.committed_length = TensorView(committed.data(), DType::kI32, {1});
       }},
      {9, "cursor beyond the cache", false, DType::kF32,
       [](Step& s, A& a) {
         committed = {11, 5};
         s.c.seqlens_k[0] = 12;
         a.committed_length = TensorView(committed.data(), DType::kI32, {2});
       }},
      {10, "scale of 0", false, DType::kI8, [](Step& s, A&) { s.scales[4] = 0.0f; }},
      {10, "negative scale", false, DType::kI8, [](Step& s, A&) { s.scales[32] = -0.1f; }},
      {10, "infinite scale", false, DType::kI8,
       [](Step& s, A&) { s.scales[0] = std::numeric_limits<float>::infinity(); }},
      {10, "scale of NaN", false, DType::kI8,
       [](Step& s, A&) { s.scales[7] = std::numeric_limits<float>::quiet_NaN(); }},
      {1, "of the first row that has one", false, DType::kF32,
       [](Step& s, A&) {
         s.counts[1] = 9;
         s.indices[8] = -1;
       }},
  };
  for (const auto& entry : cases) {
    SCOPED_TRACE(entry.what);
    Case c;
    c.local = entry.local;
    c.cache = entry.cache;
    c.selected = {{0, 3, 5}, {1}, {4, 2, 3}, {0, 5}};
    Step step(c);
    // A fourth column of padding.
    step.indices = {0, 3, 5, -1, 1, -1, -1, -1, 4, 2, 3, -1, 0, 5, -1, -1};
    step.max_selected = 4;
    DynamicSparseAttentionArgs a = step.args();
    entry.change(step, a);
    step.run(a, cpu::default_isa());
    EXPECT_EQ(step.status, entry.code);
    DynamicSparseAttentionArgs without = a;
    without.validation_status = {};
    const std::vector<float> result = step.result();
    Step again(c);
    step.run(without, cpu::default_isa());
    EXPECT_TRUE(testkit::compare(step.result(), result, 0.0, 0.0).num_bad == 0) << "the status changed the result";
  }
}

// ---- what must not matter ----

TEST(DynamicSparseAttentionSame, ThreadsInvalidEntriesNeighboursAndChunks) {
  for (const bool local : {false, true}) {
    for (const cpu::Isa isa : cpu::available_isas()) {
      Case c;
      c.local = local;
      c.seqlens_k = {80};
      c.seq_len = 5;
      c.total = c.past_capacity = 90;
      c.window = 70;
      c.auxiliary_length = 80;
      c.rotary = 1;
      Ints entries;
      for (int32_t i = 0; i < 79; ++i) {
        entries.push_back(i * 7 % 80);
      }
      c.selected = {entries, {3, 1}};
      Step one(c);
      one.run(isa, 1);
      Step three(c);
      three.run(isa, 3);
      EXPECT_EQ(one.result(), three.result());
      Case holes = c;
      for (Ints& row : holes.selected) {
        Ints more;
        for (const int32_t entry : row) {
          more.insert(more.end(), {-3, entry, 500});
        }
        row = more;
      }
      Step with_holes(holes);
      with_holes.run(isa);
      EXPECT_EQ(one.result(), with_holes.result());
      // Token by token.
      Step step(c);
      const DynamicSparseAttentionArgs all = step.args();
      std::vector<float> result;
      for (int64_t s = 0; s < 5; ++s) {
        DynamicSparseAttentionArgs a = all;
        Ints length = {static_cast<int32_t>(76 + s)};
        const auto token = [&](const TensorView& view) {
          TensorView part = view;
          part.shape[1] = 1;
          part.data = view.as<std::byte>() + s * view.stride(1) * static_cast<int64_t>(size_of(view.dtype));
          return part;
        };
        a.query = token(all.query);
        a.key = token(all.key);
        a.value = token(all.value);
        a.output = token(all.output);
        a.selected_indices = all.selected_indices.rows(s, s + 1);
        a.selected_counts = all.selected_counts.rows(s, s + 1);
        a.seqlens_k = TensorView(length.data(), DType::kI32, {1});
        step.run(a, isa);
      }
      EXPECT_EQ(one.result(), step.result());
      EXPECT_TRUE(std::memcmp(one.past_key.data, step.past_key.data, one.past_key.num_bytes()) == 0);
    }
  }
}

TEST(DynamicSparseAttentionSame, NoTokens) {
  for (const int64_t seq_len : {0, 1}) {
    Case c;
    c.seq_len = seq_len;
    c.seqlens_k = seq_len == 0 ? Ints{4} : Ints{};
    c.past_capacity = seq_len == 0 ? -1 : 12;
    c.total = 5;
    check(c);
  }
}

// ---- rejections ----

TensorView shaped(const TensorView& view, std::initializer_list<int64_t> shape) {
  return TensorView(view.data, view.dtype, shape);
}

TensorView typed(const TensorView& view, DType type) { return TensorView(view.data, type, view.dims()); }

struct Rejection {
  const char* expected;
  void (*change)(Step&, DynamicSparseAttentionArgs&);
  const Case* c = nullptr;  // null: the plain one
};

TEST(DynamicSparseAttentionRejects, ByNameAndWritesNothing) {
  using A = DynamicSparseAttentionArgs;
  Case local;
  local.local = true;
  Case int8;
  int8.cache = DType::kI8;
  Case rotary;
  rotary.rotary = 1;
  Case growing;
  growing.past_capacity = 9;
  const Rejection rejections[] = {
      {"dynamic_sparse_attention: num_heads is 0", [](Step&, A& a) { a.num_heads = 0; }},
      {"kv_num_heads is -2", [](Step&, A& a) { a.kv_num_heads = -2; }},
      {"num_heads is 4, expected a multiple of kv_num_heads = 3", [](Step&, A& a) { a.kv_num_heads = 3; }},
      {"is_causal is 0, expected 1", [](Step&, A& a) { a.is_causal = 0; }},
      {"scale is -1", [](Step&, A& a) { a.scale = -1.0f; }},
      {"scale is nan", [](Step&, A& a) { a.scale = std::numeric_limits<float>::quiet_NaN(); }},
      {"qk_norm_epsilon is 0", [](Step&, A& a) { a.qk_norm_epsilon = 0.0f; }},
      {"rotary_offset is 4, expected a multiple of 8", [](Step&, A& a) { a.rotary_offset = 4; }},
      {"rotary_offset is -8", [](Step&, A& a) { a.rotary_offset = -8; }},
      {"attention_mode is 'dense'", [](Step&, A& a) { a.attention_mode = "dense"; }},
      {"selected_kv_source is 'both'", [](Step&, A& a) { a.selected_kv_source = "both"; }},
      {"attention_mode selected_only with selected_kv_source auxiliary is not supported",
       [](Step&, A& a) { a.selected_kv_source = "auxiliary"; }},
      {"attention_mode local_plus_selected with selected_kv_source main is not supported",
       [](Step&, A& a) { a.attention_mode = "local_plus_selected"; }},
      {"local_window_size is 0, expected -1 or more than 0", [](Step&, A& a) { a.local_window_size = 0; }},
      {"local_window_size is -1, expected more than 0", [](Step&, A& a) { a.local_window_size = -1; }, &local},
      {"query is required", [](Step&, A& a) { a.query = {}; }},
      {"query has 2 dimensions, expected 3", [](Step&, A& a) { a.query = shaped(a.query, {4, 64}); }},
      {"query has type int32", [](Step&, A& a) { a.query = typed(a.query, DType::kI32); }},
      {"query dimension 2 is 63, expected a multiple of num_heads = 4",
       [](Step&, A& a) {
         a.query = shaped(a.query, {2, 2, 63});
       }},
      {"query dimension 2 is 64, expected a multiple of num_heads + 2 * kv_num_heads = 12",
       [](Step&, A& a) {
         a.num_heads = 8;
         a.key = a.value = {};
       }},
      {"key is required when value is given", [](Step&, A& a) { a.key = {}; }},
      {"value is required when key is given", [](Step&, A& a) { a.value = {}; }},
      {"key has shape [2, 2, 16]",
       [](Step&, A& a) {
         a.key = shaped(a.key, {2, 2, 16});
       }},
      {"key has type float16, expected float32", [](Step&, A& a) { a.key = typed(a.key, DType::kF16); }},
      {"value has shape [1, 2, 32]",
       [](Step&, A& a) {
         a.value = shaped(a.value, {1, 2, 32});
       }},
      {"value has type int8", [](Step&, A& a) { a.value = typed(a.value, DType::kI8); }},
      {"output_bf16 is 1, expected 0 unless query, key and value are float16",
       [](Step&, A& a) { a.output_bf16 = true; }},
      {"past_key is required when past_value is given", [](Step&, A& a) { a.past_key = {}; }},
      {"past_value is required when past_key is given", [](Step&, A& a) { a.past_value = {}; }},
      {"past_key has shape [2, 1, 12, 16]",
       [](Step&, A& a) {
         a.past_key = shaped(a.past_key, {2, 1, 12, 16});
       }},
      {"past_key has type bfloat16, expected float32 or float16 or int8",
       [](Step&, A& a) { a.past_key = typed(a.past_key, DType::kBF16); }},
      {"past_key has type uint8", [](Step&, A& a) { a.past_key = typed(a.past_key, DType::kU8); }},
      {"past_key must be contiguous", [](Step&, A& a) { a.past_key.strides[0] += 1; }},
      {"past_value has shape [2, 2, 11, 16]",
       [](Step&, A& a) {
         a.past_value = shaped(a.past_value, {2, 2, 11, 16});
       }},
      {"past_value has type float16, expected float32",
       [](Step&, A& a) { a.past_value = typed(a.past_value, DType::kF16); }},
      {"total_sequence_length is required", [](Step&, A& a) { a.total_sequence_length = {}; }},
      {"total_sequence_length has shape [2], expected one element",
       [](Step&, A& a) { a.total_sequence_length = shaped(a.seqlens_k, {2}); }},
      {"total_sequence_length has type int64",
       [](Step&, A& a) { a.total_sequence_length = typed(a.total_sequence_length, DType::kI64); }},
      {"total_sequence_length is 1, expected at least the sequence length = 2", [](Step& s, A&) { s.total = 1; }},
      {"total_sequence_length is -3", [](Step& s, A&) { s.total = -3; }},
      {"key_scale must be absent: the cache is not int8", [](Step& s, A& a) { a.key_scale = s.sink; }},
      {"key_scale is required with an int8 cache", [](Step&, A& a) { a.key_scale = {}; }, &int8},
      {"value_scale is required with an int8 cache", [](Step&, A& a) { a.value_scale = {}; }, &int8},
      {"value_scale has shape [31], expected 32 elements",
       [](Step&, A& a) { a.value_scale = shaped(a.value_scale, {31}); }, &int8},
      {"key_scale has type float16", [](Step&, A& a) { a.key_scale = typed(a.key_scale, DType::kF16); }, &int8},
      {"auxiliary_value must be absent without auxiliary_key", [](Step& s, A& a) { a.auxiliary_value = s.past_key; }},
      {"auxiliary_key must be absent with selected_kv_source main",
       [](Step& s, A& a) { a.auxiliary_key = s.auxiliary_key; }},
      {"auxiliary_key is required with selected_kv_source auxiliary",
       [](Step&, A& a) { a.auxiliary_key = a.auxiliary_value = {}; }, &local},
      {"auxiliary_value is required with auxiliary_kv_shared = 0", [](Step&, A& a) { a.auxiliary_value = {}; }, &local},
      {"auxiliary_key has shape [2, 1, 12, 16]",
       [](Step&, A& a) {
         a.auxiliary_key = shaped(a.auxiliary_key, {2, 1, 12, 16});
       },
       &local},
      {"auxiliary_value has shape [2, 2, 5, 16]",
       [](Step&, A& a) {
         a.auxiliary_value = shaped(a.auxiliary_value, {2, 2, 5, 16});
       },
       &local},
      {"auxiliary_key has type int8", [](Step&, A& a) { a.auxiliary_key = typed(a.auxiliary_key, DType::kI8); }, &local},
      {"selected_indices is required", [](Step&, A& a) { a.selected_indices = {}; }},
      {"selected_indices has shape [2, 2, 3]",
       [](Step&, A& a) {
         a.selected_indices = shaped(a.selected_indices, {2, 2, 3});
       }},
      {"selected_indices has shape [3, 3], expected [batch_size * sequence_length = 4",
       [](Step&, A& a) {
         a.selected_indices = shaped(a.selected_indices, {3, 3});
       }},
      {"selected_counts has shape [2, 2]",
       [](Step&, A& a) {
         a.selected_counts = shaped(a.selected_counts, {2, 2});
       }},
      {"selected_counts has type int64", [](Step&, A& a) { a.selected_counts = typed(a.selected_counts, DType::kI64); }},
      {"seqlens_k is required", [](Step&, A& a) { a.seqlens_k = {}; }},
      {"seqlens_k has shape [1]", [](Step&, A& a) { a.seqlens_k = shaped(a.seqlens_k, {1}); }},
      {"committed_length has 3 elements, expected 1 or batch_size = 2",
       [](Step&, A& a) { a.committed_length = shaped(a.selected_counts, {3}); }},
      {"committed_length has 2 dimensions, expected 1",
       [](Step&, A& a) {
         a.committed_length = shaped(a.seqlens_k, {2, 1});
       }},
      {"cos_cache is required when sin_cache", [](Step& s, A& a) { a.sin_cache = s.sin; }},
      {"sin_cache is required when cos_cache", [](Step& s, A& a) { a.cos_cache = s.cos; }},
      {"cos_cache and sin_cache are required with do_rotary = 1", [](Step&, A& a) { a.do_rotary = true; }},
      {"sin_cache has shape [19, 4]",
       [](Step&, A& a) {
         a.sin_cache = shaped(a.sin_cache, {19, 4});
       },
       &rotary},
      {"rotary_offset + rotary_dim is 24, expected at most head_size = 16", [](Step&, A& a) { a.rotary_offset = 16; },
       &rotary},
      {"position_ids has shape [4]", [](Step& s, A& a) { a.position_ids = TensorView(s.past_key.data, DType::kI64, {4}); }},
      {"position_ids has type int32",
       [](Step& s, A& a) {
         a.position_ids = TensorView(s.past_key.data, DType::kI32, {2, 2});
       }},
      {"q_norm_weight is required when k_norm_weight", [](Step& s, A& a) { a.k_norm_weight = s.k_norm; }},
      {"k_norm_weight is required when q_norm_weight", [](Step& s, A& a) { a.q_norm_weight = s.q_norm; }},
      {"k_norm_weight has shape [4]",
       [](Step& s, A& a) {
         a.q_norm_weight = s.q_norm;
         a.k_norm_weight = s.sink;
       }},
      {"head_sink has shape [16], expected [num_heads = 4", [](Step& s, A& a) { a.head_sink = s.q_norm; }},
      {"output is required", [](Step&, A& a) { a.output = {}; }},
      {"output has shape [2, 2, 32]",
       [](Step&, A& a) {
         a.output = shaped(a.output, {2, 2, 32});
       }},
      {"output has type float16", [](Step&, A& a) { a.output = typed(a.output, DType::kF16); }},
      {"present_key is required", [](Step&, A& a) { a.present_key = {}; }},
      {"present_value has shape [2, 2, 11, 16]",
       [](Step&, A& a) {
         a.present_value = shaped(a.present_value, {2, 2, 11, 16});
       }},
      {"present_key must be past_key itself", [](Step&, A& a) { a.present_key = a.past_value; }},
      {"present_value must not be past_value", [](Step&, A& a) { a.present_value.data = a.past_value.data; }, &growing},
      {"validation_status has shape [2]",
       [](Step&, A& a) { a.validation_status = TensorView(a.validation_status.data, DType::kI32, {2}); }},
      {"seqlens_k is on another device", [](Step&, A& a) { a.seqlens_k.device.type = DeviceType::kCuda; }},
  };
  cpu::ThreadPool pool(1);
  for (const Rejection& rejection : rejections) {
    SCOPED_TRACE(rejection.expected);
    Step step(rejection.c == nullptr ? Case{} : *rejection.c);
    DynamicSparseAttentionArgs a = step.args();
    Workspace workspace(dynamic_sparse_attention_workspace_bytes(a, 1));
    const auto bytes_of = [](const TensorView& view) {
      return std::vector<uint8_t>(view.as<uint8_t>(), view.as<uint8_t>() + view.num_bytes());
    };
    const auto before = bytes_of(step.past_key);
    rejection.change(step, a);
    expect_error(ErrorCode::kInvalidArgument, rejection.expected, [&] {
      dynamic_sparse_attention(a, {&pool, &workspace, cpu::default_isa(), ""});
    });
    EXPECT_TRUE(bytes_of(step.past_key) == before);
    const auto output = bytes_of(step.output);
    EXPECT_TRUE(std::all_of(output.begin(), output.end(), [](uint8_t x) { return x == 0xff; }));
    EXPECT_EQ(step.status, -1);
  }
}

TEST(DynamicSparseAttentionRejects, UnknownVariant) {
  Step step(Case{});
  cpu::ThreadPool pool(1);
  Workspace workspace(dynamic_sparse_attention_workspace_bytes(step.args(), 1));
  expect_error(ErrorCode::kInvalidArgument, "fast", [&] {
    dynamic_sparse_attention(step.args(), {&pool, &workspace, cpu::default_isa(), "fast"});
  });
}

}  // namespace
}  // namespace shoal
