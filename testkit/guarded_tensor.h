// A float tensor in guarded, poisoned memory whose first dimension may be strided: for tests of operators.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "shoal/ops/element.h"
#include "shoal/tensor/tensor.h"
#include "testkit/testkit.h"

namespace shoal::testkit {

// Rounds to `dtype` and back.
inline float rounded_to(DType dtype, float value) {
  uint32_t storage = 0;
  write_element(dtype, &storage, 0, value);
  return read_element(dtype, &storage, 0);
}

// Half a unit in the last place, relative: the error of one rounding to `dtype`.
inline double rounding_of(DType dtype) {
  return dtype == DType::kF32 ? 0x1p-24 : dtype == DType::kF16 ? 0x1p-11 : 0x1p-8;
}

class GuardedTensor {
 public:
  // `padding` elements stand between the rows of the first dimension.
  GuardedTensor(DType dtype, std::vector<int64_t> shape, int64_t padding = 0)
      : dtype_(dtype),
        shape_(std::move(shape)),
        row_size_(elements_of_row(shape_)),
        stride_(row_size_ + padding),
        memory_(static_cast<size_t>(shape_[0] * stride_) * size_of(dtype)) {}

  GuardedTensor(DType dtype, std::vector<int64_t> shape, std::span<const float> values, int64_t padding = 0)
      : GuardedTensor(dtype, std::move(shape), padding) {
    for (int64_t i = 0; i < shape_[0] * row_size_; ++i) {
      write_element(dtype_, memory_.data(), position(i), values[static_cast<size_t>(i)]);
    }
  }

  TensorView view() {
    TensorView view(memory_.data(), dtype_, shape_);
    view.strides[0] = stride_;
    return view;
  }
  std::vector<float> values() {
    std::vector<float> values(static_cast<size_t>(shape_[0] * row_size_));
    for (size_t i = 0; i < values.size(); ++i) {
      values[i] = read_element(dtype_, memory_.data(), position(static_cast<int64_t>(i)));
    }
    return values;
  }
  // Neither the guards nor the padding between rows were written.
  bool intact() {
    const int64_t element_bytes = static_cast<int64_t>(size_of(dtype_));
    for (int64_t row = 0; row < shape_[0]; ++row) {
      for (int64_t i = (row * stride_ + row_size_) * element_bytes; i < (row + 1) * stride_ * element_bytes; ++i) {
        if (memory_.data()[i] != 0xff) {
          return false;
        }
      }
    }
    return memory_.guards_intact();
  }

 private:
  static int64_t elements_of_row(const std::vector<int64_t>& shape) {
    int64_t count = 1;
    for (size_t axis = 1; axis < shape.size(); ++axis) {
      count *= shape[axis];
    }
    return count;
  }
  int64_t position(int64_t i) const { return i / row_size_ * stride_ + i % row_size_; }

  DType dtype_;
  std::vector<int64_t> shape_;
  int64_t row_size_;
  int64_t stride_;
  Guarded<uint8_t> memory_;
};

// The message of the shoal::Error that body() throws; empty if it throws none.
template <class Body>
std::string error_of(Body&& body) {
  try {
    body();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

}  // namespace shoal::testkit
