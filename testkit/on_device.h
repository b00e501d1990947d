// Tests of CUDA paths: a device's context, and copies of host tensors there and back. Without a device the tests skip.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <list>
#include <utility>
#include <vector>

#include "shoal/cpu/thread_pool.h"
#include "shoal/cuda/device.h"
#include "shoal/ops/context.h"

#define SHOAL_NEEDS_DEVICE()                      \
  if (shoal::cuda::device_count() == 0) {         \
    GTEST_SKIP() << shoal::cuda::why_no_device(); \
  }                                               \
  static_assert(true, "a semicolon follows")

namespace shoal::testkit {

class OnDevice {
 public:
  explicit OnDevice(size_t workspace_bytes = size_t{64} << 20)
      : pool_(2), allocator_(cuda::allocator(0)), workspace_(allocator_) {
    cuda::use_device(0);
    workspace_.reserve(workspace_bytes);
    context_.pool = &pool_;
    context_.workspace = &workspace_;
    context_.isa = cpu::default_isa();
    context_.device = allocator_.device;
    context_.stream = stream_.get();
  }

  const OpContext& context() const { return context_; }
  const Allocator& allocator() const { return allocator_; }

  // A copy with the same strides; the gaps between rows too.
  TensorView copy(const TensorView& host) {
    if (!host) {
      return {};
    }
    const size_t num_bytes = extent_bytes(host);
    Pair& pair = pairs_.emplace_back(host, AlignedBuffer(num_bytes, allocator_));
    if (num_bytes > 0) {
      cuda::copy(pair.second.data(), host.data, num_bytes, context_.stream);
    }
    TensorView placed = host;
    placed.data = pair.second.data();
    placed.device = allocator_.device;
    return placed;
  }
  // Everything copied since the last time back to where it came from, after all work is done. The copies stay.
  void fetch() {
    for (Pair& pair : pairs_) {
      if (pair.first && extent_bytes(pair.first) > 0) {
        cuda::copy(pair.first.data, pair.second.data(), extent_bytes(pair.first), context_.stream);
      }
      pair.first = {};
    }
    cuda::synchronize(context_.stream);
  }

 private:
  using Pair = std::pair<TensorView, AlignedBuffer>;

  static size_t extent_bytes(const TensorView& view) {
    int64_t last = 0;
    for (int axis = 0; axis < view.rank; ++axis) {
      if (view.dim(axis) == 0) {
        return 0;
      }
      last += (view.dim(axis) - 1) * view.stride(axis);
    }
    return static_cast<size_t>(last + 1) * size_of(view.dtype);
  }

  cpu::ThreadPool pool_;
  Allocator allocator_;
  cuda::OwnedStream stream_;
  Workspace workspace_;
  OpContext context_;
  std::list<Pair> pairs_;
};

}  // namespace shoal::testkit
