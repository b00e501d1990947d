#include "shoal/tensor/tensor.h"

#include <cstdlib>
#include <new>

#include "shoal/base/checked.h"
#include "shoal/base/text.h"

namespace shoal {
namespace {

constexpr size_t kAlignment = 64;  // one cache line, one AVX-512 register

std::byte* allocate(size_t num_bytes, const Allocator& allocator) {
  const size_t rounded = round_up(num_bytes == 0 ? size_t{1} : num_bytes, kAlignment);
  void* memory = rounded < num_bytes ? nullptr : allocator.allocate(rounded, allocator.device);
  if (memory == nullptr) {
    fail(ErrorCode::kOutOfMemory, "cannot allocate ", bytes_text(num_bytes),
         allocator.device.type == DeviceType::kCpu ? " of host memory" : " of device memory");
  }
  return static_cast<std::byte*>(memory);
}

size_t checked_bytes(DType dtype, std::span<const int64_t> shape) {
  size_t num_bytes = size_of(dtype);
  for (const int64_t extent : shape) {
    require(extent >= 0, "a tensor of shape ", shape_text(shape), " has a negative dimension");
    const auto product = checked_mul(num_bytes, static_cast<size_t>(extent));
    require(product.has_value(), "a tensor of shape ", shape_text(shape), " does not fit the address space");
    num_bytes = *product;
  }
  return num_bytes;
}

}  // namespace

TensorView::TensorView(void* memory, DType type, std::span<const int64_t> extents, Device where)
    : data(memory), dtype(type), device(where), rank(static_cast<int>(extents.size())), present_(true) {
  require(extents.size() <= kMaxRank, "a tensor has ", extents.size(), " dimensions, at most ", kMaxRank,
          " are supported");
  int64_t stride = 1;
  for (size_t axis = extents.size(); axis-- > 0;) {
    shape[axis] = extents[axis];
    strides[axis] = stride;
    stride *= extents[axis];
  }
}

int64_t TensorView::num_elements() const {
  int64_t count = 1;
  for (const int64_t extent : dims()) {
    count *= extent;
  }
  return count;
}

bool TensorView::is_contiguous() const {
  int64_t expected = 1;
  for (size_t axis = static_cast<size_t>(rank); axis-- > 0;) {
    if (shape[axis] != 1 && strides[axis] != expected) {
      return num_elements() == 0;
    }
    expected *= shape[axis];
  }
  return true;
}

TensorView TensorView::rows(int64_t begin, int64_t end) const {
  SHOAL_ASSERT(rank >= 1 && begin >= 0 && begin <= end && end <= shape[0]);
  TensorView view = *this;
  view.shape[0] = end - begin;
  const int64_t offset_bytes = begin * strides[0] * static_cast<int64_t>(size_of(dtype));
  view.data = data == nullptr ? nullptr : static_cast<std::byte*>(data) + offset_bytes;
  return view;
}

const Allocator& host_allocator() {
  static constexpr Allocator kHost{[](size_t num_bytes, Device) { return std::aligned_alloc(kAlignment, num_bytes); },
                                   [](void* memory, Device) { std::free(memory); }, Device{}};
  return kHost;
}

AlignedBuffer::AlignedBuffer(size_t num_bytes, const Allocator& allocator)
    : memory_(allocate(num_bytes, allocator), allocator), size_(num_bytes) {}

Tensor::Tensor(DType dtype, std::span<const int64_t> shape, const Allocator& allocator)
    : memory_(checked_bytes(dtype, shape), allocator), view_(memory_.data(), dtype, shape, allocator.device) {}

}  // namespace shoal
