// Calls of an operator's CUDA path, which builds without CUDA lack: there the call is kUnsupported, by name.
//
//   if (args.x.device.type == DeviceType::kCuda) {
//     return SHOAL_ON_CUDA("rms_norm", rms_norm(args, context));   // shoal::cuda::rms_norm
//   }
#pragma once

#include <string_view>

#include "shoal/base/error.h"

namespace shoal {

template <class T>
[[noreturn]] T no_cuda(std::string_view op) {
  fail(ErrorCode::kUnsupported, op, ": a CUDA tensor, but this build of shoal has no CUDA");
}

}  // namespace shoal

#if SHOAL_HAVE_CUDA
#define SHOAL_ON_CUDA(op, call) ::shoal::cuda::call
#else
#define SHOAL_ON_CUDA(op, call) ::shoal::no_cuda<decltype(::shoal::cuda::call)>(op)
#endif
