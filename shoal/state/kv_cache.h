// The memory of the KV pages: for every attention layer one pool for K and one for V, [num_pages, page_size,
// num_kv_heads, head_dim].
#pragma once

#include <cstdint>
#include <vector>

#include "shoal/tensor/tensor.h"

namespace shoal {

struct KvLayerShape {
  int64_t num_kv_heads = 0;
  int64_t head_dim = 0;
  int64_t v_head_dim = 0;  // 0: the values are channels of the keys (latent attention)
  bool operator==(const KvLayerShape&) const = default;
};

enum class KvType : uint8_t { kF32, kF16, kBF16, kI8 };

// What int8 codes are multiplied with, for one layer: one value (per tensor) or one per channel.
struct KvScales {
  std::vector<float> key;    // 1 or num_kv_heads * head_dim values, finite and positive
  std::vector<float> value;  // 1 or num_kv_heads * v_head_dim; none for a layer without values
};

struct KvLayer {
  TensorView key;      // [num_pages, page_size, num_kv_heads, head_dim]
  TensorView value;    // [num_pages, page_size, num_kv_heads, v_head_dim]; absent without values of its own
  TensorView k_scale;  // int8: [num_kv_heads * head_dim] f32 or [1]; absent otherwise
  TensorView v_scale;  // int8: [num_kv_heads * v_head_dim] f32 or [1]; absent otherwise
};

class KvCache {
 public:
  // Memory is 64-byte aligned and uninitialised: a slot must be written before it is read. `scales` has one entry a
  // layer and belongs to int8 only; without it every layer has kDefaultScale, per tensor. kInvalidArgument names what
  // is out of range, kOutOfMemory what could not be allocated.
  KvCache(const std::vector<KvLayerShape>& layers, KvType type, int64_t num_pages, int64_t page_size,
          const std::vector<KvScales>& scales = {}, const Allocator& allocator = host_allocator());

  static constexpr float kDefaultScale = 0.0625f;  // codes to 127 reach 7.9: normed models rarely exceed 8

  KvLayer layer(size_t layer_idx) const;
  size_t num_layers() const { return layers_.size(); }
  int64_t num_pages() const { return num_pages_; }
  int64_t page_size() const { return page_size_; }
  KvType type() const { return type_; }

  // Bytes of all layers for one page.
  static int64_t bytes_per_page(const std::vector<KvLayerShape>& layers, KvType type, int64_t page_size);

 private:
  std::vector<KvLayerShape> shapes_;
  Device device_;
  KvType type_;
  int64_t num_pages_;
  int64_t page_size_;
  std::vector<std::pair<AlignedBuffer, AlignedBuffer>> layers_;  // K, V
  std::vector<Tensor> scales_;                                   // K, V of each layer, int8 only
};

}  // namespace shoal
