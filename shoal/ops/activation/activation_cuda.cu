// Gates on the device, element by element.
#include <algorithm>

#include "shoal/cuda/launch.cuh"
#include "shoal/ops/activation/activation_cuda.h"

namespace shoal::cuda {
namespace {

constexpr int kThreads = 256;

struct Params {
  int64_t out_stride, gate_stride, value_stride;
  int width;
  Gate kind;
  float alpha, limit;
};

__device__ float gated(float g, float v, const Params& p) {
  switch (p.kind) {
    case Gate::kSilu: return g / (1.0f + expf(-g)) * v;
    case Gate::kGeluTanh: return 0.5f * g * (1.0f + tanhf(0.7978845608028654f * (g + 0.044715f * g * g * g))) * v;
    case Gate::kGelu: return 0.5f * g * (1.0f + erff(g * 0.7071067811865476f)) * v;
    case Gate::kRelu: return (g > 0.0f || isnan(g) ? g : 0.0f) * v;
    case Gate::kSigmoid: return v / (1.0f + expf(-g));
    case Gate::kClamped: {
      const float gate = g > p.limit ? p.limit : g;
      const float value = v > p.limit ? p.limit : v < -p.limit ? -p.limit : v;
      return gate / (1.0f + expf(-p.alpha * gate)) * (value + 1.0f);
    }
  }
  return 0.0f;
}

template <class T>
__global__ void __launch_bounds__(kThreads) gated_activation_kernel(T* out, const T* gate, const T* value, Params p) {
  begin_kernel();
  const int64_t row = blockIdx.y;
  const int i = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x);
  if (i < p.width) {
    out[row * p.out_stride + i] =
        from_float<T>(gated(to_float(gate[row * p.gate_stride + i]), to_float(value[row * p.value_stride + i]), p));
  }
}

__global__ void __launch_bounds__(kThreads) softcap_kernel(float* x, int64_t count, float cap) {
  begin_kernel();
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i < count) {
    x[i] = cap * tanhf(x[i] / cap);
  }
}

}  // namespace

void softcap(const TensorView& x, float cap, const OpContext& context) {
  if (x.num_elements() > 0) {
    launch(softcap_kernel, dim3(blocks_for(x.num_elements(), kThreads)), dim3(kThreads), 0, context.stream,
           x.as<float>(), x.num_elements(), cap);
  }
}

void gated_activation(const GatedActivationArgs& args, const OpContext& context) {
  constexpr int64_t kMaxRows = 65535;  // of a grid
  const Params params{
      args.out.stride(0), args.gate.stride(0), args.value.stride(0), static_cast<int>(args.out.dim(1)), args.kind,
      args.alpha,         args.limit};
  if (params.width == 0) {
    return;
  }
  visit_float(args.out.dtype, [&](auto type) {
    using T = decltype(type);
    for (int64_t row = 0; row < args.out.dim(0); row += kMaxRows) {
      const auto num_rows = static_cast<unsigned>(std::min(kMaxRows, args.out.dim(0) - row));
      launch(gated_activation_kernel<T>, dim3(blocks_for(params.width, kThreads), num_rows), dim3(kThreads), 0,
             context.stream, args.out.as<T>() + row * params.out_stride,
             args.gate.as<const T>() + row * params.gate_stride, args.value.as<const T>() + row * params.value_stride,
             params);
    }
  });
}

}  // namespace shoal::cuda
