// Weights of a model as named tensors inside mapped files, whatever the container is.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
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
  std::vector<int64_t> shape;       // row-major, outermost first: a linear layer is [out, in]; may be empty (one value)
  const std::byte* data = nullptr;  // inside a mapped file; any alignment
  uint64_t num_bytes = 0;
  size_t file_idx = 0;
  uint64_t offset = 0;  // of data inside that file

  int64_t num_values() const;  // fits: the readers have checked the product
};

using TensorMap = std::map<std::string, WeightTensor, std::less<>>;

// A tensor of a type that is not a weight format by itself (packed codes, indices): its bytes for who knows what they
// mean.
struct RawTensor {
  std::string type;  // as the file calls it: "I64"
  std::vector<int64_t> shape;
  const std::byte* data = nullptr;  // inside a mapped file; any alignment
  uint64_t num_bytes = 0;
  size_t file_idx = 0;
  uint64_t offset = 0;
};
using RawMap = std::map<std::string, RawTensor, std::less<>>;

class WeightSource {
 public:
  virtual ~WeightSource() = default;

  const TensorMap& tensors() const { return tensors_; }
  const RawMap& raw_tensors() const { return raw_; }
  // nullptr if absent (or of an unsupported type).
  const WeightTensor* find(std::string_view name) const;
  // kModelFormat: tensor "x" is missing / tensor "x" has shape [..], expected [..].
  // kUnsupported: tensor "x" has type I64, which is not supported.
  const WeightTensor& get(std::string_view name, std::span<const int64_t> shape) const;

  // A tensor of another type. nullptr if absent; kModelFormat if there is one of another type or shape.
  const RawTensor* find_raw(std::string_view name, std::string_view type, std::span<const int64_t> shape) const;
  bool has_raw(std::string_view name) const { return raw_.contains(name); }

  // The bytes were copied elsewhere: their pages may leave memory. They stay readable.
  void drop(const WeightTensor& tensor) const;
  void drop(const RawTensor& tensor) const;

  // Sum over all tensors.
  uint64_t total_bytes() const;

 protected:
  void drop_bytes(size_t file_idx, uint64_t offset, uint64_t num_bytes) const;

  WeightSource() = default;
  WeightSource(WeightSource&&) = default;  // maps stay where they are: tensors remain valid
  WeightSource& operator=(WeightSource&&) = default;

  std::vector<MappedFile> files_;  // empty when the bytes were given in memory
  TensorMap tensors_;
  RawMap raw_;
};

// A 2-d tensor as a weight matrix, any format; kModelFormat if its shape is not [n, k].
QuantMatrix as_matrix(const WeightTensor& tensor, int64_t n, int64_t k);

// True for a folder, false for a file; kInvalidArgument with one sentence if there is neither at `path`.
bool is_model_folder(const std::filesystem::path& path);

// Bytes of a tensor whose rows (last dimension) are whole blocks of `format`; nothing if they are not, or if the bytes
// or the product of the dimensions (zeros left out, so that strides fit too) pass 2^63 - 1. Dimensions are >= 0.
std::optional<uint64_t> tensor_bytes(Format format, std::span<const int64_t> shape);

// The product of `shape`, under the same conditions.
std::optional<int64_t> checked_product(std::span<const int64_t> shape);

// Throws kModelFormat, naming two of the tensors, if any of file `file_idx` share bytes. `file_name` names the file.
void reject_overlaps(const TensorMap& tensors, size_t file_idx, std::string_view file_name);

}  // namespace shoal::io
