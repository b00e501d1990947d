// Calls of QMoE with random weights, and what they give in f64, straight from the formulas of the contract. Values are
// made first (codes, scales, zeros) and packed by code of this file, so that nothing here reads weights as the operator
// does.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <deque>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "shoal/ops/element.h"
#include "shoal/ops/moe/moe.h"
#include "testkit/guarded_tensor.h"
#include "testkit/testkit.h"

namespace shoal::moe_cases {

constexpr float kInf = std::numeric_limits<float>::infinity();

struct Case {
  std::string name;
  DType dtype = DType::kF32;
  int64_t t = 5, h = 64, i = 64, e = 4, k = 2;
  std::string quant = "int";
  int bits1 = 4, bits2 = 4;
  int64_t block = 32;
  bool zeros = false;
  bool wide_zeros = false;  // a byte for each zero point
  bool bias = false;
  std::string activation = "swiglu";
  int64_t fusion = 1;
  bool fc3 = false;
  bool normalize = true;
  bool router_weights = false;
  bool mixer = false;
  int64_t shared = 0;
  float alpha = 1.0f, beta = 0.0f, limit = kInf;
  bool limit_after = false;
  int64_t prepacked = -1;
  DType scale_type = DType::kF32;  // fp8
  bool row_scales = false;         // fp8
  bool batched = false;            // input [1, T, H]
  uint64_t seed = 1;
};

// A tensor that owns exactly its bytes, so that the address sanitizer sees a read beyond them.
class Memory {
 public:
  TensorView make(DType dtype, std::vector<int64_t> shape) {
    const TensorView sizes(nullptr, dtype, shape);
    // One element more in front of odd sizes would not be seen; the end is what matters.
    store_.emplace_back(sizes.num_bytes());
    return TensorView(store_.back().data(), dtype, shape);
  }
  TensorView floats(DType dtype, std::vector<int64_t> shape, const std::vector<float>& values) {
    TensorView view = make(dtype, std::move(shape));
    for (size_t i = 0; i < values.size(); ++i) {
      write_element(dtype, view.data, static_cast<int64_t>(i), values[i]);
    }
    return view;
  }
  TensorView bytes(DType dtype, std::vector<int64_t> shape, const std::vector<uint8_t>& values) {
    TensorView view = make(dtype, std::move(shape));
    std::memcpy(view.data, values.data(), values.size());
    return view;
  }

 private:
  std::deque<std::vector<uint8_t>> store_;
};

inline size_t at(int64_t i) { return static_cast<size_t>(i); }

// Rows of codes as LSB-first bit streams.
inline std::vector<uint8_t> pack_rows(const std::vector<int>& codes, int64_t columns, int bits) {
  const int64_t rows = static_cast<int64_t>(codes.size()) / columns;
  const int64_t row_bytes = (columns * bits + 7) / 8;
  std::vector<uint8_t> bytes(at(rows * row_bytes));
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < columns; ++c) {
      for (int b = 0; b < bits; ++b) {
        const int64_t bit = c * bits + b;
        if ((codes[at(r * columns + c)] >> b & 1) != 0) {
          bytes[at(r * row_bytes + bit / 8)] |= static_cast<uint8_t>(1 << (bit % 8));
        }
      }
    }
  }
  return bytes;
}

inline double e2m1(int code) {
  const double values[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  return code < 8 ? values[code] : -values[code - 8];
}

inline double e4m3(int code) {
  const int exponent = code >> 3 & 15;
  const int mantissa = code & 7;
  const double magnitude =
      exponent == 0 ? mantissa * std::pow(2.0, -9) : (1 + mantissa / 8.0) * std::pow(2.0, exponent - 7);
  return code < 128 ? magnitude : -magnitude;
}

// One projection: what the operator gets, and the weights as the contract's product of f32 numbers, in f64.
struct Projection {
  TensorView weights, scales, bias, zeros, global;
  std::vector<int> codes;           // [e, n, k]
  std::vector<float> scale_values;  // [e, n, group]
  std::vector<int> zero_values;     // [e, n, group]
  std::vector<double> values;       // [e, n, k]
  std::vector<float> bias_values;   // [e, n]
  int64_t n = 0, k = 0, group = 1;
};

inline Projection make_projection(const Case& c, Memory& memory, testkit::Random& random, int64_t n, int64_t k,
                                  int bits) {
  Projection p;
  p.n = n;
  p.k = k;
  const int64_t rows = c.e * n;
  const double size = 1.0 / std::sqrt(static_cast<double>(k));  // of a weight
  p.codes.resize(at(rows * k));
  p.values.resize(at(rows * k));
  std::vector<float> global(at(c.e), 1.0f);
  if (c.quant == "int") {
    p.group = c.block > 0 ? c.block : k;
    const int64_t groups = k / p.group;
    for (int& code : p.codes) {
      code = static_cast<int>(random.integer(0, (1 << bits) - 1));
    }
    p.zero_values.assign(at(rows * groups), 1 << (bits - 1));
    for (int64_t i = 0; i < rows * groups; ++i) {
      const float scale = static_cast<float>(size * 3 / (1 << bits)) * random.uniform(0.5f, 1.5f);
      p.scale_values.push_back(testkit::rounded_to(c.dtype, c.zeros && i % 5 == 0 && bits == 4 ? -scale : scale));
      if (c.zeros && bits != 3) {
        p.zero_values[at(i)] = static_cast<int>(random.integer(0, (1 << bits) - 1));
      }
    }
    p.weights = memory.bytes(DType::kU8, {c.e, n, (k * bits + 7) / 8}, pack_rows(p.codes, k, bits));
    p.scales = c.block > 0 ? memory.floats(c.dtype, {c.e, n, groups}, p.scale_values)
                           : memory.floats(c.dtype, {c.e, n}, p.scale_values);
    if (c.zeros) {
      const int zero_bits = c.wide_zeros ? 8 : bits;
      p.zeros =
          memory.bytes(DType::kU8, {c.e, n, (groups * zero_bits + 7) / 8}, pack_rows(p.zero_values, groups, zero_bits));
    }
    for (int64_t i = 0; i < rows * k; ++i) {
      const int64_t g = i / k * groups + i % k / p.group;
      p.values[at(i)] = (p.codes[at(i)] - p.zero_values[at(g)]) * static_cast<double>(p.scale_values[at(g)]);
    }
  } else if (c.quant == "fp8") {
    std::vector<uint8_t> bytes;
    for (int& code : p.codes) {
      do {
        code = static_cast<int>(random.integer(0, 255));
      } while ((code & 0x7f) == 0x7f);
      bytes.push_back(static_cast<uint8_t>(code));
    }
    p.weights = memory.bytes(DType::kF8E4M3, {c.e, n, k}, bytes);
    const int64_t block_rows = c.block > 0 ? c.block : 1;
    p.group = c.block > 0 ? c.block : k;
    const int64_t groups = (k + p.group - 1) / p.group;
    const int64_t scale_rows = (n + block_rows - 1) / block_rows;
    const float base = static_cast<float>(size / 120);
    if (c.block > 0 || c.row_scales) {
      for (int64_t i = 0; i < c.e * scale_rows * groups; ++i) {
        p.scale_values.push_back(testkit::rounded_to(c.scale_type, base * random.uniform(0.5f, 1.5f)));
      }
      p.scales = c.block > 0 || c.seed % 2 == 0 ? memory.floats(c.scale_type, {c.e, scale_rows, groups}, p.scale_values)
                                                : memory.floats(c.scale_type, {c.e, n}, p.scale_values);
    } else {
      for (float& g : global) {
        g = base * random.uniform(0.5f, 1.5f);
      }
      p.global = memory.floats(DType::kF32, {c.e}, global);
    }
    for (int64_t e = 0; e < c.e; ++e) {
      for (int64_t row = 0; row < n; ++row) {
        for (int64_t col = 0; col < k; ++col) {
          const int64_t i = (e * n + row) * k + col;
          const double scale =
              p.scale_values.empty()
                  ? static_cast<double>(global[at(e)])
                  : static_cast<double>(
                        p.scale_values[at((e * scale_rows + row / block_rows) * groups + col / p.group)]);
          const double value = e4m3(p.codes[at(i)]) * scale;
          p.values[at(i)] =
              c.block > 0 ? static_cast<double>(testkit::rounded_to(c.dtype, static_cast<float>(value))) : value;
        }
      }
    }
  } else {
    const bool nv = c.quant == "nvfp4";
    p.group = nv ? 16 : 32;
    const int64_t groups = k / p.group;
    std::vector<uint8_t> scale_bytes;
    for (int& code : p.codes) {
      code = static_cast<int>(random.integer(0, 15));
    }
    for (float& g : global) {
      g = static_cast<float>(size / 3) * random.uniform(0.5f, 1.5f);
    }
    for (int64_t i = 0; i < rows * groups; ++i) {
      const int byte = static_cast<int>(nv ? random.integer(0x30, 0x3c) : random.integer(125, 128));
      scale_bytes.push_back(static_cast<uint8_t>(byte));
      p.scale_values.push_back(static_cast<float>(nv ? e4m3(byte) : std::pow(2.0, byte - 127)));
    }
    p.scales = memory.bytes(nv ? DType::kF8E4M3 : DType::kF8E8M0, {c.e, n, groups}, scale_bytes);
    p.global = memory.floats(DType::kF32, {c.e}, global);
    if (c.prepacked == 1) {
      const std::vector<uint8_t> bytes = pack_rows(p.codes, k, 4);
      p.weights = c.seed % 2 == 0 ? memory.bytes(DType::kU8, {c.e, k, n / 2}, bytes)
                                  : memory.bytes(DType::kU8, {c.e, n, k / 2}, bytes);
    } else {
      std::vector<int> columns(p.codes.size());
      for (int64_t i = 0; i < rows * k; ++i) {
        const int64_t e = i / (n * k);
        columns[at((e * k + i % k) * n + i / k % n)] = p.codes[at(i)];
      }
      p.weights = memory.bytes(DType::kU8, {c.e, k, n / 2}, pack_rows(columns, n, 4));
    }
    for (int64_t i = 0; i < rows * k; ++i) {
      const int64_t g = i / k * groups + i % k / p.group;
      p.values[at(i)] = e2m1(p.codes[at(i)]) * static_cast<double>(p.scale_values[at(g)]) *
                        static_cast<double>(global[at(i / (n * k))]);
    }
  }
  p.bias_values.assign(at(rows), 0.0f);
  if (c.bias) {
    for (float& b : p.bias_values) {
      b = testkit::rounded_to(c.dtype, 0.3f * random.normal());
    }
    p.bias = memory.floats(c.dtype, {c.e, n}, p.bias_values);
  }
  return p;
}

class Call {
 public:
  explicit Call(const Case& what) : c(what) {
    testkit::Random random(c.seed);
    const bool fused = !c.fc3 && (c.activation == "swiglu" || c.activation == "geglu");
    fc1 = make_projection(c, memory_, random, fused ? 2 * c.i : c.i, c.h, c.bits1);
    fc2 = make_projection(c, memory_, random, c.h, c.i, c.bits2);
    if (c.fc3) {
      fc3 = make_projection(c, memory_, random, c.i, c.h, c.bits1);
    }
    x = random.normals(at(c.t * c.h));
    logits.resize(at(c.t * c.e));
    for (int64_t t = 0; t < c.t; ++t) {  // far from ties: steps of 0.25 in random order
      std::vector<int> order(at(c.e));
      std::iota(order.begin(), order.end(), 0);
      for (int64_t e = c.e - 1; e > 0; --e) {
        std::swap(order[at(e)], order[at(random.integer(0, e))]);
      }
      for (int64_t e = 0; e < c.e; ++e) {
        logits[at(t * c.e + e)] = 0.25f * static_cast<float>(order[at(e)]) - 1.0f;
      }
    }
    mixing = random.normals(at(c.t * c.e));
    for (std::vector<float>* values : {&x, &mixing}) {
      for (float& value : *values) {
        value = testkit::rounded_to(c.dtype, value);
      }
    }
    const std::vector<int64_t> shape = c.batched ? std::vector<int64_t>{1, c.t, c.h} : std::vector<int64_t>{c.t, c.h};
    args.input = memory_.floats(c.dtype, shape, x);
    args.router_probs = memory_.floats(c.dtype, {c.t, c.e}, logits);
    if (c.router_weights) {
      args.router_weights = memory_.floats(c.dtype, {c.t, c.e}, mixing);
    }
    args.fc1_experts_weights = fc1.weights;
    args.fc1_scales = fc1.scales;
    args.fc1_experts_bias = fc1.bias;
    args.fc1_zero_points = fc1.zeros;
    args.fc1_global_scale = fc1.global;
    args.fc2_experts_weights = fc2.weights;
    args.fc2_scales = fc2.scales;
    args.fc2_experts_bias = fc2.bias;
    args.fc2_zero_points = fc2.zeros;
    args.fc2_global_scale = fc2.global;
    args.fc3_experts_weights = fc3.weights;
    args.fc3_scales = fc3.scales;
    args.fc3_experts_bias = fc3.bias;
    args.fc3_zero_points = fc3.zeros;
    args.k = c.k;
    args.activation_type = c.activation;
    args.normalize_routing_weights = c.normalize ? 1 : 0;
    args.use_sparse_mixer = c.mixer ? 1 : 0;
    args.num_shared_experts = c.shared;
    args.swiglu_fusion = c.fc3 ? 0 : c.fusion;
    args.activation_alpha = c.alpha;
    args.activation_beta = c.beta;
    args.swiglu_limit = c.limit;
    args.swiglu_limit_after_activation = c.limit_after ? 1 : 0;
    args.quant_type = c.quant;
    args.expert_weight_bits = c.quant == "fp8" ? 8 : c.quant == "int" ? c.bits1 : 4;
    if (c.bits2 != c.bits1) {
      args.fc2_expert_weight_bits = c.bits2;
    }
    args.block_size = c.block;
    args.weights_prepacked = c.prepacked;
  }

  // The output in f64, without any rounding but that of the inputs.
  std::vector<double> expected() const {
    std::vector<double> y(at(c.t * c.h));
    for (int64_t t = 0; t < c.t; ++t) {
      for (const auto& [expert, weight] : routes(t)) {
        const std::vector<double> h = hidden(t, expert);
        for (int64_t n = 0; n < c.h; ++n) {
          y[at(t * c.h + n)] += weight * dot(fc2, expert, n, h);
        }
      }
    }
    return y;
  }

  std::vector<std::pair<int64_t, double>> routes(int64_t t) const {
    const float* l = logits.data() + t * c.e;
    const int64_t routed = c.e - c.shared;
    std::vector<int64_t> order(at(routed));
    std::iota(order.begin(), order.end(), 0);
    std::sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return l[a] > l[b]; });
    double total = 0;
    for (int64_t e = 0; e < routed; ++e) {
      total += std::exp(static_cast<double>(l[e]));
    }
    std::vector<std::pair<int64_t, double>> result;
    double sum = 0;
    for (int64_t j = 0; j < c.k; ++j) {
      const int64_t e = order[at(j)];
      const double weight = c.router_weights ? static_cast<double>(mixing[at(t * c.e + e)])
                            : c.mixer        ? 1.0  // logits are further apart than the mask allows
                                             : std::exp(static_cast<double>(l[e])) / total;
      result.emplace_back(e, weight);
      sum += weight;
    }
    if (c.normalize && !c.mixer) {
      for (auto& [e, weight] : result) {
        weight /= sum;
      }
    }
    for (int64_t s = 0; s < c.shared; ++s) {
      result.emplace_back(routed + s, 1 / (1 + std::exp(-static_cast<double>(l[routed + s]))));
    }
    return result;
  }

  const Case c;
  QMoEArgs args;
  Projection fc1, fc2, fc3;
  std::vector<float> x, logits, mixing;

 private:
  template <class X>
  static double dot(const Projection& p, int64_t e, int64_t n, const std::vector<X>& input, int64_t offset = 0) {
    double sum = static_cast<double>(p.bias_values[at(e * p.n + n)]);
    for (int64_t k = 0; k < p.k; ++k) {
      sum += static_cast<double>(input[at(offset + k)]) * p.values[at((e * p.n + n) * p.k + k)];
    }
    return sum;
  }

  std::vector<double> hidden(int64_t t, int64_t e) const {
    std::vector<double> h(at(c.i));
    const bool fused = fc1.n == 2 * c.i;
    for (int64_t i = 0; i < c.i; ++i) {
      const int64_t gate_row = fused && c.fusion != 2 ? 2 * i : i;
      const int64_t value_row = c.fusion == 2 ? c.i + i : 2 * i + 1;
      const double g = dot(fc1, e, gate_row, x, t * c.h);
      const double v = c.fc3 ? dot(fc3, e, i, x, t * c.h) : fused ? dot(fc1, e, value_row, x, t * c.h) : 1.0;
      h[at(i)] = activated(g, v);
    }
    return h;
  }

  double activated(double g, double v) const {
    const double limit = static_cast<double>(c.limit);
    if (c.activation == "swiglu") {
      const double value = std::max(std::min(v, limit), -limit) + static_cast<double>(c.beta);
      const double alpha = static_cast<double>(c.alpha);
      if (c.limit_after) {
        return std::min(g / (1 + std::exp(-alpha * g)), limit) * value;
      }
      g = std::min(g, limit);
      return g / (1 + std::exp(-alpha * g)) * value;
    }
    if (c.activation == "relu") return std::max(g, 0.0) * v;
    if (c.activation == "relu2") return std::max(g, 0.0) * std::max(g, 0.0) * v;
    if (c.activation == "silu") return g / (1 + std::exp(-g)) * v;
    if (c.activation == "identity") return g * v;
    return 0.5 * g * (1 + std::tanh(std::sqrt(2 / 3.14159265358979323846) * (g + 0.044715 * g * g * g))) * v;
  }

  Memory memory_;
};

}  // namespace shoal::moe_cases
