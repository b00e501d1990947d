// Element types as weight formats: a block is one value. Encoding rounds to nearest even.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string_view>

#include "shoal/quant/block.h"

namespace shoal {

struct F32 {
  static constexpr std::string_view kName = "f32";
  static constexpr int kGgmlType = 0;
  static constexpr int kBlockSize = 1;
  static constexpr int kBlockBytes = 4;
  static constexpr bool kCanEncode = true;

  SHOAL_BLOCK_INLINE static void decode(const std::byte* __restrict block, float* __restrict values) {
    *values = std::bit_cast<float>(block::u32(block));
  }
  static void encode(const float* values, std::byte* block) { std::memcpy(block, values, sizeof(float)); }
};

struct F16 {
  static constexpr std::string_view kName = "f16";
  static constexpr int kGgmlType = 1;
  static constexpr int kBlockSize = 1;
  static constexpr int kBlockBytes = 2;
  static constexpr bool kCanEncode = true;

  SHOAL_BLOCK_INLINE static void decode(const std::byte* __restrict block, float* __restrict values) {
    *values = block::f16(block);
  }
  static void encode(const float* values, std::byte* block) { block::store_u16(block, f32_to_f16(*values)); }
};

struct BF16 {
  static constexpr std::string_view kName = "bf16";
  static constexpr int kGgmlType = 30;
  static constexpr int kBlockSize = 1;
  static constexpr int kBlockBytes = 2;
  static constexpr bool kCanEncode = true;

  SHOAL_BLOCK_INLINE static void decode(const std::byte* __restrict block, float* __restrict values) {
    *values = std::bit_cast<float>(block::u16(block) << 16);
  }
  static void encode(const float* values, std::byte* block) { block::store_u16(block, f32_to_bf16(*values)); }
};

}  // namespace shoal
