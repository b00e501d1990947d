// Launching kernels, and the few device functions that every kernel uses.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "shoal/cuda/check.h"
#include "shoal/tensor/dtype.h"
#include "shoal/tensor/stream.h"

namespace shoal::cuda {

// Every launch is checked; what a kernel does wrong while it runs is reported by the next synchronisation.
template <class Kernel, class... Args>
void launch(Kernel kernel, dim3 grid, dim3 block, size_t shared_bytes, Stream stream, Args... args) {
  constexpr size_t kDefaultShared = 48 << 10;
  if (shared_bytes > kDefaultShared) {
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes)),
               "asking for shared memory");
  }
  kernel<<<grid, block, shared_bytes, static_cast<cudaStream_t>(stream.handle)>>>(args...);
  check_cuda(cudaGetLastError(), "launching a kernel");
}

inline unsigned blocks_for(int64_t count, int64_t each) { return static_cast<unsigned>((count + each - 1) / each); }

constexpr int kWarp = 32;

__device__ inline float warp_sum(float value) {
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(0xffffffffu, value, distance);
  }
  return value;
}

__device__ inline float warp_max(float value) {
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, distance));
  }
  return value;
}

// Sum over a block of whole warps, in one order; every thread gets it. `scratch`: 32 floats of shared memory.
__device__ inline float block_sum(float value, float* scratch) {
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int num_warps = static_cast<int>(blockDim.x) / kWarp;
  value = warp_sum(value);
  __syncthreads();  // the scratch may still be read
  if (lane == 0) {
    scratch[warp] = value;
  }
  __syncthreads();
  return warp_sum(lane < num_warps ? scratch[lane] : 0.0f);
}

// Elements of float tensors as f32, rounded to nearest even at the store.
__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(__half x) { return __half2float(x); }
__device__ inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
template <class T>
__device__ inline T from_float(float x);
template <>
__device__ inline float from_float<float>(float x) {
  return x;
}
template <>
__device__ inline __half from_float<__half>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ inline __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}

// Calls body(T{}) with the CUDA type of a float DType.
template <class Body>
void visit_float(DType dtype, Body&& body) {
  switch (dtype) {
    case DType::kF32: body(float{}); return;
    case DType::kF16: body(__half{}); return;
    case DType::kBF16: body(__nv_bfloat16{}); return;
    default: fail(ErrorCode::kInternal, "element type ", to_string(dtype), " is not a float");
  }
}

}  // namespace shoal::cuda
