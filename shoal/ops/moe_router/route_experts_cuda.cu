// Routers on the device: a warp a token, its logits in registers, expert e in lane e % 32. The softmax's sum has the
// contract's order: a lane's own experts ascending, then the butterfly.
#include <cmath>

#include "shoal/cuda/launch.cuh"
#include "shoal/ops/moe_router/route_experts_cuda.h"

namespace shoal::cuda {
namespace {

constexpr int kMaxPerLane = 32;  // 1,024 experts
constexpr int kWarps = 4;        // tokens of a block
constexpr float kSmallestSum = 1e-6f;

struct Params {
  int32_t* ids;
  int64_t ids_stride;
  float* weights;
  int64_t weights_stride;
  const std::byte* logits;
  int64_t logits_stride, logits_step;  // elements
  const std::byte* values;             // of router_weights; null: the softmax
  int64_t values_stride, values_step;
  int num_tokens, num_experts, top_k;
  bool normalize;
  bool is_packed;  // MoEPacked's rules for values
  float epsilon, scale;
};

// The value that sorts: +inf, finite numbers, -inf, NaN.
__device__ inline bool is_before(float a, int a_id, float b, int b_id) {
  const bool a_nan = isnan(a);
  const bool b_nan = isnan(b);
  if (a_nan != b_nan) {
    return b_nan;
  }
  if (!a_nan && a != b) {
    return a > b;
  }
  return a_id < b_id;
}

template <class T>
__global__ void __launch_bounds__(kWarps* kWarp) route_experts_kernel(Params p) {
  begin_kernel();
  const int lane = threadIdx.x % kWarp;
  const int token = static_cast<int>(blockIdx.x) * kWarps + threadIdx.x / kWarp;
  if (token >= p.num_tokens) {
    return;
  }
  const T* row = reinterpret_cast<const T*>(p.logits) + token * p.logits_stride;
  float logits[kMaxPerLane];
  uint32_t taken = 0;
  float largest = -INFINITY;
#pragma unroll
  for (int i = 0; i < kMaxPerLane; ++i) {
    const int e = i * kWarp + lane;
    logits[i] = e < p.num_experts ? to_float(row[e * p.logits_step]) : -INFINITY;
    if (!p.is_packed && isnan(logits[i])) {
      logits[i] = -INFINITY;  // QMoE: NaN counts as -inf, also in the choice
    }
    taken |= e < p.num_experts ? 0u : 1u << i;
    largest = fmaxf(largest, isnan(logits[i]) ? -INFINITY : logits[i]);
  }
  largest = warp_max(largest);

  float sum = 0.0f;  // of exp
  const bool is_softmax = p.values == nullptr;
  if (is_softmax && largest > -INFINITY) {
#pragma unroll
    for (int i = 0; i < kMaxPerLane; ++i) {
      const float x = isnan(logits[i]) ? -INFINITY : logits[i];
      const int e = i * kWarp + lane;
      if (e < p.num_experts) {
        sum += x == largest ? 1.0f : expf(x - largest);
      }
    }
    sum = warp_sum(sum);
  }

  float chosen_sum = 0.0f;
  int32_t* ids = p.ids + token * p.ids_stride;
  float* weights = p.weights + token * p.weights_stride;
  for (int j = 0; j < p.top_k; ++j) {
    float best = NAN;
    int best_id = INT32_MAX;
#pragma unroll
    for (int i = 0; i < kMaxPerLane; ++i) {
      const int e = i * kWarp + lane;
      if ((taken >> i & 1u) == 0 && is_before(logits[i], e, best, best_id)) {
        best = logits[i];
        best_id = e;
      }
    }
#pragma unroll
    for (int distance = kWarp / 2; distance > 0; distance /= 2) {
      const float other = __shfl_xor_sync(0xffffffffu, best, distance);
      const int other_id = __shfl_xor_sync(0xffffffffu, best_id, distance);
      if (is_before(other, other_id, best, best_id)) {
        best = other;
        best_id = other_id;
      }
    }
    if (best_id % kWarp == lane) {
      taken |= 1u << (best_id / kWarp);
    }
    float weight = 0.0f;
    if (is_softmax) {
      const float x = isnan(best) ? -INFINITY : best;
      weight = largest == -INFINITY ? 0.0f : __fdiv_rn(x == largest ? 1.0f : expf(x - largest), sum);
    } else {
      const T* values = reinterpret_cast<const T*>(p.values) + token * p.values_stride;
      const bool was_nan = isnan(to_float(row[best_id * p.logits_step]));
      weight = !p.is_packed && (was_nan || largest == -INFINITY) ? 0.0f : to_float(values[best_id * p.values_step]);
    }
    chosen_sum += weight;
    if (lane == 0) {
      ids[j] = best_id;
      weights[j] = weight;
    }
  }
  if (lane != 0) {
    return;
  }
  for (int j = 0; j < p.top_k; ++j) {
    float weight = weights[j];
    if (p.normalize) {
      if (is_softmax) {
        weight = chosen_sum > kSmallestSum ? __fdiv_rn(weight, chosen_sum) : weight;
      } else if (!p.is_packed) {
        weight = chosen_sum == 0.0f ? 0.0f : __fdiv_rn(weight, chosen_sum);
      } else {
        const float divisor = chosen_sum + p.epsilon;
        weight = divisor == 0.0f    ? 0.0f
                 : p.epsilon > 0.0f ? __fdiv_rn(weight, divisor)
                                    : weight * __fdiv_rn(1.0f, divisor);
      }
    }
    weights[j] = is_softmax && p.is_packed ? weight : weight * p.scale;
  }
}

void run(const TensorView& ids, const TensorView& weights, const TensorView& logits, const TensorView& values, Params p,
         const OpContext& context) {
  require(logits.dim(1) <= kMaxPerLane * kWarp, "route_experts: on CUDA at most ", kMaxPerLane * kWarp,
          " experts, not ", logits.dim(1));
  p.ids = ids.as<int32_t>();
  p.ids_stride = ids.stride(0);
  p.weights = weights.as<float>();
  p.weights_stride = weights.stride(0);
  p.logits = logits.as<const std::byte>();
  p.logits_stride = logits.stride(0);
  p.logits_step = logits.stride(1);
  if (values) {
    p.values = values.as<const std::byte>();
    p.values_stride = values.stride(0);
    p.values_step = values.stride(1);
  }
  p.num_tokens = static_cast<int>(logits.dim(0));
  p.num_experts = static_cast<int>(logits.dim(1));
  if (p.num_tokens == 0) {
    return;
  }
  visit_float(logits.dtype, [&](auto type) {
    launch(route_experts_kernel<decltype(type)>, dim3(blocks_for(p.num_tokens, kWarps)), dim3(kWarps * kWarp), 0,
           context.stream, p);
  });
}

template <class T>
__global__ void full_scores_kernel(float* selection, float* weights, const T* logits, const float* bias,
                                   int64_t selection_stride, int64_t weights_stride, int64_t logits_stride,
                                   int64_t num_rows, int num_experts) {
  begin_kernel();
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t row = i / num_experts;
  const int64_t e = i % num_experts;
  if (row < num_rows) {
    const float s = __fdiv_rn(1.0f, 1.0f + expf(-to_float(logits[row * logits_stride + e])));
    weights[row * weights_stride + e] = s;
    selection[row * selection_stride + e] = s + bias[e];
  }
}

}  // namespace

void route_experts(const RouteExpertsArgs& args, const OpContext& context) {
  if (args.sparse_mixer || args.num_shared > 0) {
    fail(ErrorCode::kUnsupported, "route_experts: the sparse mixer and shared experts have no CUDA kernel");
  }
  Params p{};
  p.top_k = static_cast<int>(args.top_k);
  p.normalize = args.normalize;
  p.scale = args.scale;
  run(args.expert_ids, args.expert_weights, args.router_logits, args.router_weights, p, context);
}

void route_packed_experts(const RoutePackedArgs& args, const OpContext& context) {
  Params p{};
  p.top_k = static_cast<int>(args.top_k);
  p.normalize = args.normalize;
  p.is_packed = true;
  p.epsilon = args.epsilon;
  p.scale = args.scale;
  run(args.expert_ids, args.expert_weights, args.router_probs, args.router_weights, p, context);
}

void moe_group_router_full(const MoEGroupRouterArgs& args, const OpContext& context) {
  constexpr int kThreads = 256;
  if (args.logits.rank != 2 || args.projection_weight) {
    fail(ErrorCode::kUnsupported, "moe_group_router: on CUDA logits must be a matrix, without a projection");
  }
  const int64_t num_rows = args.logits.dim(0);
  const auto num_experts = static_cast<int>(args.logits.dim(1));
  if (num_rows == 0) {
    return;
  }
  visit_float(args.logits.dtype, [&](auto type) {
    using T = decltype(type);
    launch(full_scores_kernel<T>, dim3(blocks_for(num_rows * num_experts, kThreads)), dim3(kThreads), 0, context.stream,
           args.selection_scores.as<float>(), args.router_weights.as<float>(), args.logits.as<const T>(),
           args.expert_bias.as<const float>(), args.selection_scores.stride(0), args.router_weights.stride(0),
           args.logits.stride(0), num_rows, num_experts);
  });
}

}  // namespace shoal::cuda
