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

// Whether kernels may be brought to the device while the one before still runs (compute capability 9.0).
inline bool starts_early() {
  thread_local int known_device = -1;
  thread_local bool result = false;
  int device = 0;
  check_cuda(cudaGetDevice(&device), "asking for the device");
  if (device != known_device) {
    int major = 0;
    check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "asking for the capability");
    constexpr int kHopper = 9;
    result = major >= kHopper;
    known_device = device;
  }
  return result;
}

// Every launch is checked; what a kernel does wrong while it runs is reported by the next synchronisation.
//
// A kernel may start before the one ahead of it in the stream has ended: its first statement is begin_kernel() (or
// announce(), some reads of what no kernel writes, wait_for_inputs()), without exception.
template <class Kernel, class... Args>
void launch(Kernel kernel, dim3 grid, dim3 block, size_t shared_bytes, Stream stream, Args... args) {
  constexpr size_t kDefaultShared = 48 << 10;
  if (shared_bytes > kDefaultShared) {
    check_cuda(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes)),
        "asking for shared memory");
  }
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = static_cast<cudaStream_t>(stream.handle);
  config.attrs = &early;
  config.numAttrs = starts_early() ? 1 : 0;
  check_cuda(cudaLaunchKernelEx(&config, kernel, args...), "launching a kernel");
}

inline unsigned blocks_for(int64_t count, int64_t each) { return static_cast<unsigned>((count + each - 1) / each); }

constexpr int kWarp = 32;

// The kernel behind this one may be brought to the device.
__device__ inline void announce() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
// Everything that the kernels ahead wrote is there.
__device__ inline void wait_for_inputs() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ inline void begin_kernel() {
  announce();
  wait_for_inputs();
}

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
