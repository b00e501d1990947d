#include "shoal/state/kv_cache.h"

#include <algorithm>
#include <cmath>

#include "shoal/base/checked.h"
#include "shoal/base/error.h"

namespace shoal {
namespace {

DType dtype_of(KvType type) {
  switch (type) {
    case KvType::kF32: return DType::kF32;
    case KvType::kF16: return DType::kF16;
    case KvType::kBF16: return DType::kBF16;
    case KvType::kI8: return DType::kI8;
  }
  fail(ErrorCode::kInternal, "unknown KV cache type ", static_cast<int>(type));
}

void check_shape(const KvLayerShape& shape, size_t layer_idx) {
  require(shape.num_kv_heads > 0 && shape.head_dim > 0 && shape.v_head_dim >= 0, "KV layer ", layer_idx,
          ": num_kv_heads and head_dim must be positive, v_head_dim not negative, not ", shape.num_kv_heads, ", ",
          shape.head_dim, " and ", shape.v_head_dim);
}

// Overflow of a product means that no machine has the memory.
int64_t product(std::initializer_list<int64_t> factors) {
  int64_t result = 1;
  for (const int64_t factor : factors) {
    const auto next = checked_mul(result, factor);
    if (!next) {
      fail(ErrorCode::kOutOfMemory, "the KV cache does not fit the address space");
    }
    result = *next;
  }
  return result;
}

Tensor scale_tensor(const std::vector<float>& values, int64_t num_channels, const char* name, size_t layer_idx) {
  const auto count = static_cast<int64_t>(values.size());
  require(count == 1 || count == num_channels, "KV layer ", layer_idx, ": ", name, " scales have ", count,
          " values, expected 1 or ", num_channels);
  Tensor tensor(DType::kF32, {count});
  std::ranges::copy(values, tensor.span<float>().begin());
  for (const float value : values) {
    require(std::isfinite(value) && value > 0.0f, "KV layer ", layer_idx, ": ", name,
            " scales must be finite and positive, not ", value);
  }
  return tensor;
}

}  // namespace

KvCache::KvCache(const std::vector<KvLayerShape>& layers, KvType type, int64_t num_pages, int64_t page_size,
                 const std::vector<KvScales>& scales, const Allocator& allocator)
    : shapes_(layers), device_(allocator.device), type_(type), num_pages_(num_pages), page_size_(page_size) {
  require(num_pages > 0 && page_size > 0, "a KV cache needs positive num_pages and page_size, not ", num_pages, " and ",
          page_size);
  require(scales.empty() || type == KvType::kI8, "KV scales belong to an int8 cache only");
  require(scales.empty() || scales.size() == layers.size(), "KV scales are given for ", scales.size(),
          " layers, expected ", layers.size());
  if (device_.type != DeviceType::kCpu && type == KvType::kI8) {
    fail(ErrorCode::kUnsupported, "an int8 KV cache on CUDA: its scales are measured on the CPU only so far");
  }
  const auto element_bytes = static_cast<int64_t>(size_of(dtype_of(type)));
  for (size_t layer_idx = 0; layer_idx < layers.size(); ++layer_idx) {
    const KvLayerShape& shape = layers[layer_idx];
    check_shape(shape, layer_idx);
    const auto bytes_of = [&](int64_t head_dim) {
      return static_cast<size_t>(product({num_pages, page_size, shape.num_kv_heads, head_dim, element_bytes}));
    };
    const size_t key_bytes = bytes_of(shape.head_dim);
    const size_t value_bytes = bytes_of(shape.v_head_dim);  // both are known before anything is allocated
    layers_.emplace_back(AlignedBuffer(key_bytes, allocator), AlignedBuffer(value_bytes, allocator));
    if (type == KvType::kI8) {
      const KvScales given = scales.empty() ? KvScales{{kDefaultScale}, {kDefaultScale}} : scales[layer_idx];
      scales_.push_back(scale_tensor(given.key, shape.num_kv_heads * shape.head_dim, "key", layer_idx));
      scales_.push_back(shape.v_head_dim == 0
                            ? Tensor()
                            : scale_tensor(given.value, shape.num_kv_heads * shape.v_head_dim, "value", layer_idx));
    }
  }
}

KvLayer KvCache::layer(size_t layer_idx) const {
  SHOAL_ASSERT(layer_idx < layers_.size());
  const KvLayerShape& shape = shapes_[layer_idx];
  const auto& [key, value] = layers_[layer_idx];
  KvLayer view;
  view.key =
      TensorView(key.data(), dtype_of(type_), {num_pages_, page_size_, shape.num_kv_heads, shape.head_dim}, device_);
  if (shape.v_head_dim > 0) {
    view.value = TensorView(value.data(), dtype_of(type_),
                            {num_pages_, page_size_, shape.num_kv_heads, shape.v_head_dim}, device_);
  }
  if (type_ == KvType::kI8) {
    view.k_scale = scales_[2 * layer_idx];
    view.v_scale = scales_[2 * layer_idx + 1];
  }
  return view;
}

int64_t KvCache::bytes_per_page(const std::vector<KvLayerShape>& layers, KvType type, int64_t page_size) {
  const auto element_bytes = static_cast<int64_t>(size_of(dtype_of(type)));
  int64_t total = 0;
  for (size_t layer_idx = 0; layer_idx < layers.size(); ++layer_idx) {
    const KvLayerShape& shape = layers[layer_idx];
    check_shape(shape, layer_idx);
    for (const int64_t head_dim : {shape.head_dim, shape.v_head_dim}) {
      const auto sum = checked_add(total, product({page_size, shape.num_kv_heads, head_dim, element_bytes}));
      if (!sum) {
        fail(ErrorCode::kOutOfMemory, "the KV cache does not fit the address space");
      }
      total = *sum;
    }
  }
  return total;
}

}  // namespace shoal
