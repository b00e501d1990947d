// Errors of the CUDA runtime as shoal::Error. Only for sources that are built with CUDA.
#pragma once

#include <cuda_runtime_api.h>

#include "shoal/base/error.h"

namespace shoal::cuda {

inline void check_cuda(cudaError_t status, const char* what) {
  if (status == cudaSuccess) {
    return;
  }
  cudaGetLastError();  // what can be cleared is
  fail(status == cudaErrorMemoryAllocation ? ErrorCode::kOutOfMemory : ErrorCode::kInternal, "CUDA: ", what, ": ",
       cudaGetErrorString(status));
}

}  // namespace shoal::cuda
