// What the fuzzers of weight files expect of the tensors that a reader accepts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>

#include "shoal/io/weights.h"

namespace shoal::fuzz {

inline void expect(bool condition) {
  if (!condition) {
    std::abort();
  }
}

// Every tensor lies inside the bytes, has the size of its shape, and shares nothing: all bytes together fit the file.
inline void read_all(const io::TensorMap& tensors, std::span<const std::byte> bytes) {
  uint64_t sum = 0;
  volatile uint64_t sink = 0;
  for (const auto& [name, tensor] : tensors) {
    expect(!tensor.name.empty() || name.empty());
    expect(tensor.offset <= bytes.size() && tensor.num_bytes <= bytes.size() - tensor.offset);
    expect(tensor.data == bytes.data() + tensor.offset);
    expect(tensor.num_values() >= 0);
    expect(io::tensor_bytes(tensor.format, tensor.shape) == tensor.num_bytes);
    if (tensor.num_bytes > 0) {
      sink = sink + static_cast<uint64_t>(tensor.data[0]) + static_cast<uint64_t>(tensor.data[tensor.num_bytes - 1]);
    }
    sum += tensor.num_bytes;
  }
  expect(sum <= bytes.size());
}

}  // namespace shoal::fuzz
