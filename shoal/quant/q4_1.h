// Q4_1: 32 values in 20 bytes.
//
//   bytes 0-1    f16 d
//   bytes 2-3    f16 m
//   bytes 4-19   qs: low nibbles are values 0-15, high nibbles values 16-31
//   value        d * q + m
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "shoal/quant/block.h"

namespace shoal {

struct Q4_1 {
  static constexpr std::string_view kName = "q4_1";
  static constexpr int kGgmlType = 3;
  static constexpr int kBlockSize = 32;
  static constexpr int kBlockBytes = 20;
  static constexpr bool kCanEncode = true;

  SHOAL_BLOCK_INLINE static void decode(const std::byte* __restrict block, float* __restrict values) {
    const float d = block::f16(block);
    const float m = block::f16(block + 2);
    const std::byte* qs = block + 4;
    for (int i = 0; i < 16; ++i) {
      const int32_t q = static_cast<int32_t>(block::u8(qs + i));
      values[i] = d * static_cast<float>(q & 15) + m;
      values[i + 16] = d * static_cast<float>(q >> 4) + m;
    }
  }

  static void encode(const float* values, std::byte* block) {
    const auto [low_value, high_value] = std::minmax_element(values, values + kBlockSize);
    const float m = *low_value;
    const float d = (*high_value - m) / 15.0f;
    const float inverse = block::inverse(d);
    block::store_f16(block, d);
    block::store_f16(block + 2, m);
    for (int i = 0; i < 16; ++i) {
      const int32_t low = block::to_int((values[i] - m) * inverse + 0.5f, 0, 15);
      const int32_t high = block::to_int((values[i + 16] - m) * inverse + 0.5f, 0, 15);
      block[4 + i] = block::to_byte(low | high << 4);
    }
  }
};

}  // namespace shoal
