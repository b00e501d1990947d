// Weights of a model as named tensors inside mapped files, whatever the container is.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "shoal/base/file.h"
#include "shoal/quant/quant_matrix.h"

namespace shoal::io {

struct WeightTensor {
  std::string name;
  Format format = Format::kF32;
  std::vector<int64_t> shape;       // row-major, outermost first: a linear layer is [out, in]
  const std::byte* data = nullptr;  // inside a mapped file; any alignment
  uint64_t num_bytes = 0;
  size_t file_idx = 0;
  uint64_t offset = 0;  // of data inside that file

  int64_t num_values() const;
};

class WeightSource {
 public:
  virtual ~WeightSource() = default;

  const std::map<std::string, WeightTensor, std::less<>>& tensors() const { return tensors_; }
  // nullptr if absent.
  const WeightTensor* find(std::string_view name) const;
  // kModelFormat "tensor "x" is missing" / "tensor "x" has shape [..], expected [..]".
  const WeightTensor& get(std::string_view name, std::span<const int64_t> shape) const;

  // The bytes were copied elsewhere: their pages may leave memory.
  void drop(const WeightTensor& tensor) const;

  uint64_t total_bytes() const;

 protected:
  std::vector<MappedFile> files_;  // empty when the bytes were given in memory
  std::map<std::string, WeightTensor, std::less<>> tensors_;
};

// A 2-d tensor as a weight matrix, any format; kModelFormat if its shape is not [n, k].
QuantMatrix as_matrix(const WeightTensor& tensor, int64_t n, int64_t k);

}  // namespace shoal::io
