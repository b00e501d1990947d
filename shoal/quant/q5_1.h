// Q5_1: 32 values in 24 bytes.
//
//   bytes 0-1    f16 d
//   bytes 2-3    f16 m
//   bytes 4-7    qh: bit e is the fifth bit of value e
//   bytes 8-23   qs: low nibbles are values 0-15, high nibbles values 16-31
//   value        d * q + m
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "shoal/quant/block.h"

namespace shoal {

struct Q5_1 {
  static constexpr std::string_view kName = "q5_1";
  static constexpr int kGgmlType = 7;
  static constexpr int kBlockSize = 32;
  static constexpr int kBlockBytes = 24;
  static constexpr bool kCanEncode = true;

  SHOAL_BLOCK_INLINE static void decode(const std::byte* __restrict block, float* __restrict values) {
    const float d = block::f16(block);
    const float m = block::f16(block + 2);
    const uint32_t qh = block::u32(block + 4);
    const std::byte* qs = block + 8;
    for (int i = 0; i < 16; ++i) {
      const uint32_t q = block::u8(qs + i);
      const uint32_t low = (q & 15) | ((qh >> i) & 1) << 4;
      const uint32_t high = (q >> 4) | ((qh >> (i + 16)) & 1) << 4;
      values[i] = d * static_cast<float>(static_cast<int32_t>(low)) + m;
      values[i + 16] = d * static_cast<float>(static_cast<int32_t>(high)) + m;
    }
  }

  static void encode(const float* values, std::byte* block) {
    const auto [low_value, high_value] = std::minmax_element(values, values + kBlockSize);
    const float m = *low_value;
    const float d = (*high_value - m) / 31.0f;
    const float inverse = block::inverse(d);
    block::store_f16(block, d);
    block::store_f16(block + 2, m);
    uint32_t qh = 0;
    for (int i = 0; i < 16; ++i) {
      const uint32_t low = block::to_int((values[i] - m) * inverse + 0.5f, 0, 31);
      const uint32_t high = block::to_int((values[i + 16] - m) * inverse + 0.5f, 0, 31);
      qh |= low >> 4 << i | high >> 4 << (i + 16);
      block[8 + i] = block::to_byte((low & 15) | (high & 15) << 4);
    }
    block::store_u32(block + 4, qh);
  }
};

}  // namespace shoal
