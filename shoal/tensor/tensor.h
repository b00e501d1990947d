// TensorView: typed, shaped, strided memory that somebody else owns. Tensor: the same with its own memory.
//
// Strides count elements, not bytes. A view with data == nullptr is absent: optional arguments are default-constructed
// views.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <span>

#include "shoal/base/error.h"
#include "shoal/tensor/dtype.h"

namespace shoal {

enum class DeviceType : uint8_t { kCpu, kCuda };

struct Device {
  DeviceType type = DeviceType::kCpu;
  int index = 0;
  bool operator==(const Device&) const = default;
};

constexpr int kMaxRank = 6;

struct TensorView {
  void* data = nullptr;
  DType dtype = DType::kF32;
  Device device{};
  int rank = 0;
  std::array<int64_t, kMaxRank> shape{};
  std::array<int64_t, kMaxRank> strides{};  // in elements

  TensorView() = default;
  // Contiguous, row-major.
  TensorView(void* memory, DType type, std::span<const int64_t> extents, Device where = {});
  TensorView(void* memory, DType type, std::initializer_list<int64_t> extents, Device where = {})
      : TensorView(memory, type, std::span<const int64_t>(extents.begin(), extents.size()), where) {}

  explicit operator bool() const { return data != nullptr || present_; }

  std::span<const int64_t> dims() const { return {shape.data(), static_cast<size_t>(rank)}; }
  int64_t dim(int axis) const {
    SHOAL_ASSERT(axis >= 0 && axis < rank);
    return shape[static_cast<size_t>(axis)];
  }
  int64_t stride(int axis) const {
    SHOAL_ASSERT(axis >= 0 && axis < rank);
    return strides[static_cast<size_t>(axis)];
  }
  int64_t num_elements() const;
  size_t num_bytes() const { return static_cast<size_t>(num_elements()) * size_of(dtype); }  // when contiguous
  bool is_contiguous() const;

  // Typed pointer to the first element. The type is not checked against dtype: kernels have dispatched on it already.
  template <class T>
  T* as() const {
    return static_cast<T*>(data);
  }
  // Rows [begin, end) of the first dimension.
  TensorView rows(int64_t begin, int64_t end) const;

 private:
  bool present_ = false;  // an empty tensor (no elements, no memory) is still given
};

// Where memory comes from. `allocate` returns null where there is none; 64-byte aligned.
struct Allocator {
  void* (*allocate)(size_t num_bytes, Device device) = nullptr;
  void (*release)(void* memory, Device device) = nullptr;
  Device device{};

  void operator()(std::byte* memory) const { release(memory, device); }  // as the deleter of a unique_ptr
};
const Allocator& host_allocator();

// 64-byte aligned bytes for packed weights, caches and workspaces; uninitialised. Throws kOutOfMemory.
class AlignedBuffer {
 public:
  AlignedBuffer() = default;
  explicit AlignedBuffer(size_t num_bytes, const Allocator& allocator = host_allocator());
  std::byte* data() const { return memory_.get(); }
  size_t size() const { return size_; }

 private:
  std::unique_ptr<std::byte, Allocator> memory_;
  size_t size_ = 0;
};

// Owns its memory; uninitialised.
class Tensor {
 public:
  Tensor() = default;
  Tensor(DType dtype, std::span<const int64_t> shape, const Allocator& allocator = host_allocator());
  Tensor(DType dtype, std::initializer_list<int64_t> shape, const Allocator& allocator = host_allocator())
      : Tensor(dtype, std::span<const int64_t>(shape.begin(), shape.size()), allocator) {}

  const TensorView& view() const { return view_; }
  operator const TensorView&() const { return view_; }  // NOLINT: a tensor is usable as its view
  template <class T>
  std::span<T> span() const {
    return {view_.as<T>(), static_cast<size_t>(view_.num_elements())};
  }

 private:
  AlignedBuffer memory_;
  TensorView view_;
};

}  // namespace shoal
