#include "shoal/io/weights.h"

#include <algorithm>
#include <system_error>

#include "shoal/base/checked.h"
#include "shoal/base/error.h"
#include "shoal/base/text.h"

namespace shoal::io {

int64_t WeightTensor::num_values() const {
  int64_t count = 1;
  for (const int64_t extent : shape) {
    count *= extent;
  }
  return count;
}

const WeightTensor* WeightSource::find(std::string_view name) const {
  const auto found = tensors_.find(name);
  return found == tensors_.end() ? nullptr : &found->second;
}

const WeightTensor& WeightSource::get(std::string_view name, std::span<const int64_t> shape) const {
  const WeightTensor* tensor = find(name);
  if (tensor == nullptr) {
    const auto other = raw_.find(name);
    if (other != raw_.end()) {
      fail(ErrorCode::kUnsupported, "tensor \"", printable(name), "\" has type ", other->second.type,
           ", which is not supported");
    }
    fail(ErrorCode::kModelFormat, "tensor \"", printable(name), "\" is missing");
  }
  if (!std::equal(tensor->shape.begin(), tensor->shape.end(), shape.begin(), shape.end())) {
    fail(ErrorCode::kModelFormat, "tensor \"", printable(name), "\" has shape ", shape_text(tensor->shape),
         ", expected ", shape_text(shape));
  }
  return *tensor;
}

const RawTensor* WeightSource::find_raw(std::string_view name, std::string_view type,
                                        std::span<const int64_t> shape) const {
  const auto found = raw_.find(name);
  if (found == raw_.end()) {
    return nullptr;
  }
  const RawTensor& tensor = found->second;
  if (tensor.type != type || !std::equal(tensor.shape.begin(), tensor.shape.end(), shape.begin(), shape.end())) {
    fail(ErrorCode::kModelFormat, "tensor \"", printable(name), "\" is ", tensor.type, " ", shape_text(tensor.shape),
         ", expected ", type, " ", shape_text(shape));
  }
  return &tensor;
}

void WeightSource::drop(const WeightTensor& tensor) const {
  drop_bytes(tensor.file_idx, tensor.offset, tensor.num_bytes);
}

void WeightSource::drop(const RawTensor& tensor) const { drop_bytes(tensor.file_idx, tensor.offset, tensor.num_bytes); }

void WeightSource::drop_bytes(size_t file_idx, uint64_t offset, uint64_t num_bytes) const {
  if (!files_.empty()) {
    SHOAL_ASSERT(file_idx < files_.size());
    files_[file_idx].drop(offset, num_bytes);
  }
}

uint64_t WeightSource::total_bytes() const {
  uint64_t sum = 0;  // cannot overflow: the tensors of a file do not overlap
  for (const auto& [name, tensor] : tensors_) {
    sum += tensor.num_bytes;
  }
  for (const auto& [name, tensor] : raw_) {
    sum += tensor.num_bytes;
  }
  return sum;
}

QuantMatrix as_matrix(const WeightTensor& tensor, int64_t n, int64_t k) {
  if (tensor.shape.size() != 2 || tensor.shape[0] != n || tensor.shape[1] != k) {
    const int64_t expected[] = {n, k};
    fail(ErrorCode::kModelFormat, "tensor \"", printable(tensor.name), "\" has shape ", shape_text(tensor.shape),
         ", expected ", shape_text(expected));
  }
  QuantMatrix matrix;
  matrix.format = tensor.format;
  matrix.n = n;
  matrix.k = k;
  matrix.codes = tensor.data;
  return matrix;
}

bool is_model_folder(const std::filesystem::path& path) {
  std::error_code error;
  const std::filesystem::file_status status = std::filesystem::status(path, error);
  require(!path.empty() && status.type() != std::filesystem::file_type::not_found, "model \"", printable(path.string()),
          "\" does not exist");
  if (error) {
    fail(ErrorCode::kIo, "cannot look at model \"", printable(path.string()), "\": ", error.message());
  }
  return std::filesystem::is_directory(status);
}

std::optional<int64_t> checked_product(std::span<const int64_t> shape) {
  int64_t product = 1;
  bool empty = false;
  for (const int64_t extent : shape) {
    empty = empty || extent == 0;
    const auto next = checked_mul(product, std::max<int64_t>(extent, 1));
    if (!next) {
      return std::nullopt;
    }
    product = *next;
  }
  return empty ? 0 : product;
}

std::optional<uint64_t> tensor_bytes(Format format, std::span<const int64_t> shape) {
  const FormatInfo& layout = info(format);
  const int64_t k = shape.empty() ? 1 : shape.back();
  if (k % layout.block_size != 0) {
    return std::nullopt;
  }
  std::vector<int64_t> extents(shape.begin(), shape.end());
  if (!checked_product(extents)) {
    return std::nullopt;
  }
  if (!extents.empty()) {
    extents.back() = k / layout.block_size;
  }
  extents.push_back(layout.block_bytes);
  const auto num_bytes = checked_product(extents);
  return num_bytes ? std::optional<uint64_t>(static_cast<uint64_t>(*num_bytes)) : std::nullopt;
}

void reject_overlaps(const TensorMap& tensors, size_t file_idx, std::string_view file_name) {
  std::vector<const WeightTensor*> order;
  for (const auto& [name, tensor] : tensors) {
    if (tensor.file_idx == file_idx && tensor.num_bytes > 0) {
      order.push_back(&tensor);
    }
  }
  std::sort(order.begin(), order.end(),
            [](const WeightTensor* a, const WeightTensor* b) { return a->offset < b->offset; });
  for (size_t i = 1; i < order.size(); ++i) {
    if (order[i]->offset - order[i - 1]->offset < order[i - 1]->num_bytes) {
      fail(ErrorCode::kModelFormat, "\"", printable(file_name), "\": tensors \"", printable(order[i - 1]->name),
           "\" and \"", printable(order[i]->name), "\" overlap");
    }
  }
}

}  // namespace shoal::io
