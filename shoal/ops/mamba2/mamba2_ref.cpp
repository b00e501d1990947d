// Reference of the Mamba-2 mixer: the formulas in f32, in the order that the contract fixes.
#include <cmath>
#include <vector>

#include "shoal/ops/element.h"
#include "shoal/ops/mamba2/mamba2_problem.h"

namespace shoal::mamba2 {
namespace {

float read(const TensorView& view, int64_t i, int64_t j) {
  return read_element(view.dtype, view.data, i * view.stride(0) + j * view.stride(1));
}
float read(const TensorView& view, int64_t i) { return read_element(view.dtype, view.data, i * view.stride(0)); }

float silu(float x) { return x / (1.0f + std::exp(-x)); }

float conv_tap(const Problem& p, int64_t pos, int64_t channel) {
  if (pos >= 0) {
    return read(p.args.projection, pos, p.inner_size + channel);
  }
  const TensorView& state = p.args.conv_state;
  return bf16_to_f32(
      state.as<uint16_t>()[p.start * state.stride(0) + channel * state.stride(1) + (3 + pos) * state.stride(2)]);
}

void convolve(const Problem& p) {
  const TensorView& weight = p.args.conv_weight;
  for (int64_t t = 0; t < p.num_rows; ++t) {
    for (int64_t c = 0; c < p.num_channels; ++c) {
      float sum = read(p.args.conv_bias, c);
      for (int64_t tap = 0; tap < kTaps; ++tap) {
        const int64_t at = c * weight.stride(0) + tap * weight.stride(weight.rank - 1);
        sum += read_element(weight.dtype, weight.data, at) * conv_tap(p, t - 3 + tap, c);
      }
      p.xbc[t * p.num_channels + c] = bf16_to_f32(f32_to_bf16(silu(sum)));
    }
  }
}

void recur(const Problem& p, int64_t head) {
  const Mamba2VerifyArgs& a = p.args;
  const TensorView& in = a.ssm_state;
  const TensorView& out = a.ssm_snapshots;
  std::vector<float> state(static_cast<size_t>(kStateSize * kHeadDim));
  for (int64_t n = 0; n < kStateSize; ++n) {
    for (int64_t i = 0; i < kHeadDim; ++i) {
      state[static_cast<size_t>(n * kHeadDim + i)] =
          in.as<float>()[p.start * in.stride(0) + head * in.stride(1) + n * in.stride(2) + i * in.stride(3)];
    }
  }
  const int64_t group = head / p.heads_per_group();
  for (int64_t t = 0; t < p.num_rows; ++t) {
    const float raw = read(a.projection, t, p.inner_size + p.num_channels + head) + read(a.dt_bias, head);
    float dt = raw > 20.0f ? raw : std::log1p(std::exp(raw));
    dt = dt < a.time_step_min ? a.time_step_min : dt;
    const float decay = std::exp(read(a.A_negative, head) * dt);
    const float* x = p.xbc + t * p.num_channels + head * kHeadDim;
    const float* b = p.xbc + t * p.num_channels + p.inner_size + group * kStateSize;
    const float* c = b + a.n_groups * kStateSize;
    for (int64_t i = 0; i < kHeadDim; ++i) {
      float total = 0.0f;
      for (int64_t part = 0; part < p.num_partitions; ++part) {
        float sum = 0.0f;
        const int64_t size = kStateSize / p.num_partitions;
        for (int64_t n = part * size; n < (part + 1) * size; ++n) {
          float& s = state[static_cast<size_t>(n * kHeadDim + i)];
          s = decay * s + (dt * x[i]) * b[n];
          sum += c[n] * s;
        }
        total = part == 0 ? sum : total + sum;
      }
      p.readout[t * p.inner_size + head * kHeadDim + i] = read(a.D, head) * x[i] + total;
    }
    if (const int64_t slot = p.slot_of(t); slot >= 0) {
      for (int64_t n = 0; n < kStateSize; ++n) {
        for (int64_t i = 0; i < kHeadDim; ++i) {
          out.as<float>()[slot * out.stride(0) + head * out.stride(1) + n * out.stride(2) + i * out.stride(3)] =
              state[static_cast<size_t>(n * kHeadDim + i)];
        }
      }
    }
  }
}

void normalise(const Problem& p, int64_t t, int64_t group) {
  const Mamba2VerifyArgs& a = p.args;
  const int64_t size = p.inner_size / a.n_groups;
  double sum_of_squares = 0.0;
  std::vector<float> gated;
  for (int64_t i = group * size; i < (group + 1) * size; ++i) {
    gated.push_back(p.readout[t * p.inner_size + i] * silu(read(a.projection, t, i)));
    sum_of_squares += static_cast<double>(gated.back()) * gated.back();
  }
  const double root = std::sqrt(sum_of_squares / static_cast<double>(size) + a.epsilon);
  for (int64_t i = 0; i < size; ++i) {
    const int64_t channel = group * size + i;
    const auto y = static_cast<float>(gated[static_cast<size_t>(i)] / root * read(a.norm_weight, channel));
    a.Y.as<uint16_t>()[t * a.Y.stride(0) + channel * a.Y.stride(1)] = f32_to_bf16(y);
  }
}

}  // namespace

void verify_ref(const Problem& p) {
  convolve(p);
  for (int64_t head = 0; head < p.args.heads; ++head) {
    recur(p, head);
  }
  for (int64_t t = 0; t < p.num_rows; ++t) {
    for (int64_t group = 0; group < p.args.n_groups; ++group) {
      normalise(p, t, group);
    }
  }
}

}  // namespace shoal::mamba2
