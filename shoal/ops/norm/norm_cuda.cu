// Normalisation on the device: a block a row, which stays in registers between the sum and the store.
#include "shoal/cuda/launch.cuh"
#include "shoal/ops/norm/norm_cuda.h"

namespace shoal::cuda {
namespace {

constexpr int kThreads = 256;

template <class T, class W>
__global__ void __launch_bounds__(kThreads)
    rms_norm_kernel(T* out, int64_t out_stride, const T* x, int64_t x_stride, const W* weight, const T* residual,
                    int64_t residual_stride, T* residual_out, int64_t residual_out_stride, int hidden, float eps) {
  begin_kernel();
  __shared__ float scratch[kWarp];
  const int64_t row = blockIdx.x;
  float sum = 0.0f;
  for (int i = threadIdx.x; i < hidden; i += blockDim.x) {
    float value = to_float(x[row * x_stride + i]);
    if (residual != nullptr) {
      value += to_float(residual[row * residual_stride + i]);
    }
    sum += value * value;
  }
  const float mean = block_sum(sum, scratch) / static_cast<float>(hidden);
  const float factor = 1.0f / sqrtf(mean + eps);
  for (int i = threadIdx.x; i < hidden; i += blockDim.x) {
    float value = to_float(x[row * x_stride + i]);
    if (residual != nullptr) {
      value += to_float(residual[row * residual_stride + i]);
      residual_out[row * residual_out_stride + i] = from_float<T>(value);
    }
    out[row * out_stride + i] = from_float<T>(value * factor * to_float(weight[i]));
  }
}

constexpr int kMaxVectors = 8;  // of four values, of a thread: rows of 8,192

// Rows of f32 whose parts of four are aligned: read once, kept in registers.
__global__ void __launch_bounds__(kThreads)
    rms_norm_vectors_kernel(float* out, int64_t out_stride, const float* x, int64_t x_stride, const float* weight,
                            const float* residual, int64_t residual_stride, float* residual_out,
                            int64_t residual_out_stride, int hidden, float eps) {
  begin_kernel();
  __shared__ float scratch[kWarp];
  const int64_t row = blockIdx.x;
  float4 values[kMaxVectors];
  float sum = 0.0f;
#pragma unroll
  for (int j = 0; j < kMaxVectors; ++j) {
    const int i = 4 * (j * kThreads + static_cast<int>(threadIdx.x));
    if (i < hidden) {
      float4 v = *reinterpret_cast<const float4*>(x + row * x_stride + i);
      if (residual != nullptr) {
        const float4 r = *reinterpret_cast<const float4*>(residual + row * residual_stride + i);
        v = make_float4(v.x + r.x, v.y + r.y, v.z + r.z, v.w + r.w);
        *reinterpret_cast<float4*>(residual_out + row * residual_out_stride + i) = v;
      }
      values[j] = v;
      sum += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
    }
  }
  const float mean = block_sum(sum, scratch) / static_cast<float>(hidden);
  const float factor = 1.0f / sqrtf(mean + eps);
#pragma unroll
  for (int j = 0; j < kMaxVectors; ++j) {
    const int i = 4 * (j * kThreads + static_cast<int>(threadIdx.x));
    if (i < hidden) {
      const float4 v = values[j];
      const float4 w = *reinterpret_cast<const float4*>(weight + i);
      *reinterpret_cast<float4*>(out + row * out_stride + i) =
          make_float4(v.x * factor * w.x, v.y * factor * w.y, v.z * factor * w.z, v.w * factor * w.w);
    }
  }
}

bool takes_vectors(const RmsNormArgs& args) {
  const auto is_aligned = [](const TensorView& view) {
    return !view || (reinterpret_cast<uintptr_t>(view.data) % 16 == 0 && (view.rank < 2 || view.stride(0) % 4 == 0));
  };
  return args.x.dtype == DType::kF32 && args.x.dim(1) % 4 == 0 && args.x.dim(1) <= 4 * kMaxVectors * kThreads &&
         is_aligned(args.x) && is_aligned(args.out) && is_aligned(args.weight) && is_aligned(args.residual) &&
         is_aligned(args.residual_out);
}

}  // namespace

void rms_norm(const RmsNormArgs& args, const OpContext& context) {
  const auto num_rows = static_cast<unsigned>(args.x.dim(0));
  const auto hidden = static_cast<int>(args.x.dim(1));
  if (num_rows == 0 || hidden == 0) {
    return;
  }
  if (takes_vectors(args)) {
    launch(rms_norm_vectors_kernel, dim3(num_rows), dim3(kThreads), 0, context.stream, args.out.as<float>(),
           args.out.stride(0), args.x.as<const float>(), args.x.stride(0), args.weight.as<const float>(),
           args.residual ? args.residual.as<const float>() : nullptr, args.residual ? args.residual.stride(0) : 0,
           args.residual ? args.residual_out.as<float>() : nullptr, args.residual ? args.residual_out.stride(0) : 0,
           hidden, args.eps);
    return;
  }
  const int threads = hidden <= 64 ? 64 : kThreads;
  visit_float(args.x.dtype, [&](auto type) {
    using T = decltype(type);
    const auto run = [&](auto weight_type) {
      using W = decltype(weight_type);
      launch(rms_norm_kernel<T, W>, dim3(num_rows), dim3(static_cast<unsigned>(threads)), 0, context.stream,
             args.out.as<T>(), args.out.stride(0), args.x.as<const T>(), args.x.stride(0), args.weight.as<const W>(),
             args.residual ? args.residual.as<const T>() : nullptr, args.residual ? args.residual.stride(0) : 0,
             args.residual ? args.residual_out.as<T>() : nullptr, args.residual ? args.residual_out.stride(0) : 0,
             hidden, args.eps);
    };
    if (args.weight.dtype == DType::kF32) {
      run(float{});
    } else {
      run(T{});
    }
  });
}

}  // namespace shoal::cuda
