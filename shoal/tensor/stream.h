// A queue of device work in the order of its launches. Opaque, so that contracts need no CUDA headers.
#pragma once

namespace shoal {

struct Stream {
  void* handle = nullptr;  // cudaStream_t; null: the device's default stream
};

}  // namespace shoal
