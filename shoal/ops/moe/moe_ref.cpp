// Reference: loops that look like the formulas, in f32, every rounding where the contract has it.
#include <algorithm>
#include <cmath>
#include <vector>

#include "shoal/ops/element.h"
#include "shoal/ops/moe/moe_problem.h"
#include "shoal/quant/code_stream.h"
#include "shoal/quant/gguf_mxfp4.h"
#include "shoal/quant/scale_types.h"

namespace shoal::moe {
namespace {

float round_to(DType dtype, float value) {
  switch (dtype) {
    case DType::kF16: return f16_to_f32(f32_to_f16(value));
    case DType::kBF16: return bf16_to_f32(f32_to_bf16(value));
    default: return value;
  }
}

// What the code of (n, k) stands for, without zero and scale.
float number_at(const Projection& p, int64_t e, int64_t n, int64_t k) {
  const std::byte* expert = p.data + e * p.expert_bytes;
  switch (p.codes) {
    case Codes::kAffine: return static_cast<float>(read_code(expert + n * p.row_bytes, p.bits, k));
    case Codes::kE4M3: return e4m3_to_f32(static_cast<uint8_t>(expert[n * p.row_bytes + k]));
    case Codes::kE2M1: return 0.5f * block::e2m1_doubled(read_code(expert + n * p.row_bytes, 4, k));
    case Codes::kE2M1Columns: return 0.5f * block::e2m1_doubled(read_code(expert + k * p.row_bytes, 4, n));
    case Codes::kBlocks: break;
  }
  fail(ErrorCode::kInternal, "moe: blocks have no codes");
}

// One output of a projection, before bias.
float product(const Problem& problem, const Projection& p, int64_t e, int64_t n, const float* x) {
  float acc = 0.0f;
  if (p.codes == Codes::kBlocks) {
    std::vector<float> row(static_cast<size_t>(p.k));
    decode_row(p.format, p.data + e * p.expert_bytes + n * p.row_bytes, p.k, row.data());
    for (int64_t k = 0; k < p.k; ++k) {
      acc = std::fma(x[k], round_to(problem.dtype, row[static_cast<size_t>(k)]), acc);
    }
    return acc;
  }
  if (p.scaling == Scaling::kValues) {
    for (int64_t k = 0; k < p.k; ++k) {
      const float weight = round_to(problem.dtype, number_at(p, e, n, k) * scale_at(p, e, n, k / p.group));
      acc = std::fma(x[k], weight, acc);
    }
    return acc;
  }
  if (p.scaling == Scaling::kAfter) {
    const float zero = zero_at(p, e, n, 0);
    for (int64_t k = 0; k < p.k; ++k) {
      acc = std::fma(x[k], number_at(p, e, n, k) - zero, acc);
    }
    return acc * scale_at(p, e, n, 0);
  }
  for (int64_t begin = 0; begin < p.k; begin += p.piece()) {
    const int64_t group = begin / p.group;
    const float zero = zero_at(p, e, n, group);
    float sum = 0.0f;
    for (int64_t k = begin; k < std::min(begin + p.piece(), p.k); ++k) {
      sum = std::fma(x[k], number_at(p, e, n, k) - zero, sum);
    }
    acc = std::fma(sum, scale_at(p, e, n, group), acc);
  }
  return acc;
}

float bias_at(const Projection& p, int64_t e, int64_t n) {
  return p.bias ? read_element(p.bias.dtype, p.bias.data, e * p.bias.stride(0) + n * p.bias.stride(1)) : 0.0f;
}

float projected(const Problem& problem, const Projection& p, int64_t e, int64_t n, const float* x) {
  const float sum = product(problem, p, e, n, x);
  return (problem.staged ? round_to(problem.dtype, sum) : sum) + bias_at(p, e, n);
}

float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

float clamped_low_nan(float x, float limit) { return x > limit ? limit : x; }  // NaN stays

float activate(const Problem& p, float x) {
  switch (p.activation) {
    case Activation::kRelu: return x < 0.0f ? 0.0f : x;
    case Activation::kRelu2: {
      const float r = x < 0.0f ? 0.0f : x;
      return r * r;
    }
    case Activation::kSilu: return x / (1.0f + std::exp(-x));
    case Activation::kGelu: return 0.5f * x * (1.0f + std::tanh(0.7978845608f * (x + 0.044715f * x * x * x)));
    default: return x;
  }
}

float gated(const Problem& p, float gate, float value) {
  if (p.activation != Activation::kSwiglu) {
    return activate(p, gate) * value;
  }
  const float v = -clamped_low_nan(-clamped_low_nan(value, p.limit), p.limit);
  if (p.limit_after) {
    return clamped_low_nan(gate * sigmoid(p.alpha * gate), p.limit) * (v + p.beta);
  }
  const float g = clamped_low_nan(gate, p.limit);
  return g * sigmoid(p.alpha * g) * (v + p.beta);
}

}  // namespace

float scale_at(const Projection& p, int64_t e, int64_t n, int64_t g) {
  float scale = 1.0f;
  if (p.scales != nullptr) {
    const int64_t idx = e * p.scale_strides[0] + n / p.row_group * p.scale_strides[1] + g * p.scale_strides[2];
    switch (p.scale_type) {
      case DType::kF8E8M0: scale = e8m0_to_f32(static_cast<const uint8_t*>(p.scales)[idx]); break;
      case DType::kF8E4M3: scale = e4m3_to_f32(static_cast<const uint8_t*>(p.scales)[idx]); break;
      default: scale = read_float_scale(p.scale_type, p.scales, idx); break;
    }
  }
  return p.global != nullptr ? scale * p.global[e * p.global_stride] : scale;
}

float zero_at(const Projection& p, int64_t e, int64_t n, int64_t g) {
  if (p.codes != Codes::kAffine) {
    return 0.0f;
  }
  if (p.zeros == nullptr) {
    return static_cast<float>(1 << (p.bits - 1));
  }
  const auto* row = reinterpret_cast<const std::byte*>(p.zeros + e * p.zero_expert_bytes + n * p.zero_row_bytes);
  return static_cast<float>(read_code(row, p.zero_bits, g));
}

void moe_ref(const Problem& problem, const int32_t* ids, const float* weights) {
  std::vector<float> x(static_cast<size_t>(problem.num_tokens * problem.hidden));
  for (int64_t t = 0; t < problem.num_tokens; ++t) {  // all of it: the output may be the input
    for (int64_t i = 0; i < problem.hidden; ++i) {
      const int64_t place = row_offset(problem.input, t) + i * problem.input.stride(problem.input.rank - 1);
      x[static_cast<size_t>(t * problem.hidden + i)] = read_element(problem.dtype, problem.input.data, place);
    }
  }
  std::vector<float> h(static_cast<size_t>(problem.inter));
  std::vector<float> y(static_cast<size_t>(problem.hidden));
  for (int64_t t = 0; t < problem.num_tokens; ++t) {
    std::fill(y.begin(), y.end(), 0.0f);
    bool lost = false;
    for (int64_t j = 0; j < problem.num_ranks; ++j) {
      const int64_t e = ids[t * problem.num_ranks + j];
      const float weight = weights[t * problem.num_ranks + j];
      const float* row = x.data() + t * problem.hidden;
      lost = lost || (problem.poison && !std::isfinite(weight));
      for (int64_t i = 0; i < problem.inter; ++i) {
        float& value = h[static_cast<size_t>(i)];
        switch (problem.gate) {
          case Gate::kNone: value = activate(problem, projected(problem, problem.fc1, e, i, row)); break;
          case Gate::kInterleaved:
            value = gated(problem, projected(problem, problem.fc1, e, 2 * i, row),
                          projected(problem, problem.fc1, e, 2 * i + 1, row));
            break;
          case Gate::kConcatenated:
            value = gated(problem, projected(problem, problem.fc1, e, i, row),
                          projected(problem, problem.fc1, e, problem.inter + i, row));
            break;
          case Gate::kSeparate:
            value =
                gated(problem, projected(problem, problem.fc1, e, i, row), projected(problem, problem.fc3, e, i, row));
            break;
        }
        value = round_to(problem.dtype, value);
      }
      for (int64_t n = 0; n < problem.hidden; ++n) {
        float a2 = projected(problem, problem.fc2, e, n, h.data());
        if (!problem.staged) {
          a2 = round_to(problem.dtype, a2);
        }
        y[static_cast<size_t>(n)] = std::fma(weight, a2, y[static_cast<size_t>(n)]);
      }
    }
    for (int64_t n = 0; n < problem.hidden; ++n) {
      const int64_t place = row_offset(problem.output, t) + n * problem.output.stride(problem.output.rank - 1);
      write_element(problem.dtype, problem.output.data, place,
                    lost ? std::numeric_limits<float>::quiet_NaN() : y[static_cast<size_t>(n)]);
    }
  }
}

}  // namespace shoal::moe
