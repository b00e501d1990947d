// The Mamba-2 mixer with vectors: over channels in the convolution and the norm, over the channels of a head in the
// recurrence, whose sums over the state then run in the reference's order.
#include "shoal/cpu/simd.h"
#include "shoal/ops/mamba2/mamba2_problem.h"

namespace shoal::SHOAL_ISA {
namespace {

using mamba2::kHeadDim;
using mamba2::kStateSize;
using mamba2::kTaps;
using mamba2::Problem;

constexpr int kVectors = static_cast<int>(kHeadDim) / kLanes;

SHOAL_INLINE float scalar_at(const bf16* p) {
  float lanes[kLanes];
  store(lanes, load_partial(p, 1));
  return lanes[0];
}

SHOAL_INLINE Floats silu(Floats a) { return a / (splat(1.0f) + exp(zero() - a)); }
SHOAL_INLINE float number(const TensorView& view, int64_t i) {
  return static_cast<const float*>(view.data)[i * view.strides[0]];
}

}  // namespace

void mamba2_convolve(const Problem& p, int64_t begin, int64_t end) {
  const TensorView& projection = p.args.projection;
  const TensorView& state = p.args.conv_state;
  const TensorView& weight = p.args.conv_weight;
  const TensorView& bias = p.args.conv_bias;
  const auto* rows = static_cast<const bf16*>(projection.data) + p.inner_size * projection.strides[1];
  const auto* past = static_cast<const bf16*>(state.data) + p.start * state.strides[0];
  for (int64_t c = begin; c < end; c += kLanes) {
    const int64_t n = least(kLanes, end - c);
    Floats taps[kTaps];
    for (int64_t tap = 0; tap < kTaps; ++tap) {
      taps[tap] = load_lanes(static_cast<const bf16*>(weight.data) + c * weight.strides[0] +
                                 tap * weight.strides[static_cast<size_t>(weight.rank - 1)],
                             weight.strides[0], n);
    }
    const Floats start = load_lanes(static_cast<const bf16*>(bias.data) + c * bias.strides[0], bias.strides[0], n);
    for (int64_t t = 0; t < p.num_rows; ++t) {
      Floats sums = start;
      for (int64_t tap = 0; tap < kTaps; ++tap) {
        const int64_t pos = t - 3 + tap;
        const Floats x =
            pos >= 0
                ? load_lanes(rows + pos * projection.strides[0] + c * projection.strides[1], projection.strides[1], n)
                : load_lanes(past + c * state.strides[1] + (3 + pos) * state.strides[2], state.strides[1], n);
        sums = sums + taps[tap] * x;
      }
      bf16 rounded[kLanes];
      store(rounded, silu(sums));
      store_lanes(p.xbc + t * p.num_channels + c, 1, n, load(rounded));
    }
  }
}

void mamba2_recur(const Problem& p, int64_t head, float* scratch) {
  const Mamba2VerifyArgs& a = p.args;
  const TensorView& in = a.ssm_state;
  const TensorView& out = a.ssm_snapshots;
  // Each token reads what the one before wrote: a snapshot, or the scratch memory when none is kept.
  const float* from = static_cast<const float*>(in.data) + p.start * in.strides[0] + head * in.strides[1];
  int64_t from_row = in.strides[2];
  int64_t from_inner = in.strides[3];
  const int64_t group = head / p.heads_per_group();
  for (int64_t t = 0; t < p.num_rows; ++t) {
    const auto* dt_at = static_cast<const bf16*>(a.projection.data) + t * a.projection.strides[0] +
                        (p.inner_size + p.num_channels + head) * a.projection.strides[1];
    const float raw = scalar_at(dt_at) + number(a.dt_bias, head);
    float dt = raw > 20.0f ? raw : __builtin_log1pf(__builtin_expf(raw));
    dt = dt < a.time_step_min ? a.time_step_min : dt;  // NaN stays
    const Floats decay = splat(__builtin_expf(number(a.A_negative, head) * dt));
    const float* x = p.xbc + t * p.num_channels + head * kHeadDim;
    const float* b = p.xbc + t * p.num_channels + p.inner_size + group * kStateSize;
    const float* c = b + a.n_groups * kStateSize;
    const int64_t slot = p.slot_of(t);
    float* to = slot < 0 ? scratch : static_cast<float*>(out.data) + slot * out.strides[0] + head * out.strides[1];
    const int64_t to_row = slot < 0 ? kHeadDim : out.strides[2];
    const int64_t to_inner = slot < 0 ? 1 : out.strides[3];
    Floats driven[kVectors];
    Floats totals[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      driven[v] = splat(dt) * load(x + v * kLanes);
      totals[v] = zero();
    }
    const int64_t size = kStateSize / p.num_partitions;
    for (int64_t part = 0; part < p.num_partitions; ++part) {
      Floats sums[kVectors];
      for (int v = 0; v < kVectors; ++v) {
        sums[v] = zero();
      }
      for (int64_t n = part * size; n < (part + 1) * size; ++n) {
        const Floats b_n = splat(b[n]);
        const Floats c_n = splat(c[n]);
        for (int v = 0; v < kVectors; ++v) {
          const Floats old = load_lanes(from + n * from_row + v * kLanes * from_inner, from_inner, kLanes);
          const Floats s = decay * old + driven[v] * b_n;
          store_lanes(to + n * to_row + v * kLanes * to_inner, to_inner, kLanes, s);
          sums[v] = sums[v] + c_n * s;
        }
      }
      for (int v = 0; v < kVectors; ++v) {
        totals[v] = part == 0 ? sums[v] : totals[v] + sums[v];
      }
    }
    const Floats skip = splat(number(a.D, head));
    for (int v = 0; v < kVectors; ++v) {
      store(p.readout + t * p.inner_size + head * kHeadDim + v * kLanes, skip * load(x + v * kLanes) + totals[v]);
    }
    from = to;
    from_row = to_row;
    from_inner = to_inner;
  }
}

void mamba2_normalise(const Problem& p, int64_t t, int64_t group) {
  const Mamba2VerifyArgs& a = p.args;
  const int64_t size = p.inner_size / a.n_groups;  // whole vectors: a multiple of kHeadDim
  const auto* gate = static_cast<const bf16*>(a.projection.data) + t * a.projection.strides[0];
  float* readout = p.readout + t * p.inner_size;
  const auto gated = [&](int64_t i) {
    return load(readout + i) * silu(load_lanes(gate + i * a.projection.strides[1], a.projection.strides[1], kLanes));
  };
  Floats squares = zero();
  for (int64_t i = group * size; i < (group + 1) * size; i += kLanes) {
    const Floats v = gated(i);
    squares = fma(v, v, squares);
  }
  const Floats inverse = splat(1.0f / __builtin_sqrtf(sum(squares) / static_cast<float>(size) + a.epsilon));
  bf16* y = static_cast<bf16*>(a.Y.data) + t * a.Y.strides[0];
  const auto* weight = static_cast<const float*>(a.norm_weight.data);
  for (int64_t i = group * size; i < (group + 1) * size; i += kLanes) {
    const Floats w = load_lanes(weight + i * a.norm_weight.strides[0], a.norm_weight.strides[0], kLanes);
    store_lanes(y + i * a.Y.strides[1], a.Y.strides[1], kLanes, gated(i) * inverse * w);
  }
}

}  // namespace shoal::SHOAL_ISA
