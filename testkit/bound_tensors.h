// Named tensors of a test, owned together: float ones guarded and poisoned, integer ones plain.
#pragma once

#include <deque>
#include <string>
#include <utility>
#include <vector>

#include "testkit/guarded_tensor.h"

namespace shoal::testkit {

class BoundTensors {
 public:
  // `padding` elements stand between the rows of the first dimension.
  TensorView floats(DType dtype, std::vector<int64_t> shape, std::span<const float> values, int64_t padding = 0) {
    return floats_.emplace_back(dtype, std::move(shape), values, padding).view();
  }
  TensorView integers(std::vector<int32_t> values, std::vector<int64_t> shape = {}) {
    if (shape.empty()) {
      shape = {static_cast<int64_t>(values.size())};
    }
    std::vector<int32_t>& kept = integers_.emplace_back(std::move(values));
    return TensorView(kept.data(), DType::kI32, shape);
  }
  // Poisoned: read it back with values_of.
  TensorView output(DType dtype, std::vector<int64_t> shape, int64_t padding = 0) {
    return floats_.emplace_back(dtype, std::move(shape), padding).view();
  }
  std::vector<float> values_of(const TensorView& view) {
    for (GuardedTensor& tensor : floats_) {
      if (tensor.view().data == view.data) {
        return tensor.values();
      }
    }
    return {};
  }
  bool intact() {
    for (GuardedTensor& tensor : floats_) {
      if (!tensor.intact()) {
        return false;
      }
    }
    return true;
  }

 private:
  std::deque<GuardedTensor> floats_;  // stable addresses
  std::deque<std::vector<int32_t>> integers_;
};

}  // namespace shoal::testkit
