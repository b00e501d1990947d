// Q5_0: 32 values in 22 bytes.
//
//   bytes 0-1    f16 d
//   bytes 2-5    qh: bit e is the fifth bit of value e
//   bytes 6-21   qs: low nibbles are values 0-15, high nibbles values 16-31
//   value        d * (q - 16)
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "shoal/quant/scale_search.h"

namespace shoal {

struct Q5_0 {
  static constexpr std::string_view kName = "q5_0";
  static constexpr int kGgmlType = 6;
  static constexpr int kBlockSize = 32;
  static constexpr int kBlockBytes = 22;
  static constexpr bool kCanEncode = true;

  SHOAL_BLOCK_INLINE static void decode(const std::byte* __restrict block, float* __restrict values) {
    const float d = block::f16(block);
    const uint32_t qh = block::u32(block + 2);
    const std::byte* qs = block + 6;
    for (int i = 0; i < 16; ++i) {
      const uint32_t q = block::u8(qs + i);
      const uint32_t low = (q & 15) | ((qh >> i) & 1) << 4;
      const uint32_t high = (q >> 4) | ((qh >> (i + 16)) & 1) << 4;
      values[i] = d * static_cast<float>(static_cast<int32_t>(low) - 16);
      values[i + 16] = d * static_cast<float>(static_cast<int32_t>(high) - 16);
    }
  }

  // The value of largest magnitude becomes code 0, so that -16, the longer side of the range, is used.
  static void encode(const float* values, std::byte* block) {
    const float extreme = block::extreme_of(values, kBlockSize);
    const float d = extreme / -16.0f;
    const float inverse = block::inverse(d);
    block::store_f16(block, d);
    uint32_t qh = 0;
    for (int i = 0; i < 16; ++i) {
      const uint32_t low = block::to_int(values[i] * inverse + 16.5f, 0, 31);
      const uint32_t high = block::to_int(values[i + 16] * inverse + 16.5f, 0, 31);
      qh |= low >> 4 << i | high >> 4 << (i + 16);
      block[6 + i] = block::to_byte((low & 15) | (high & 15) << 4);
    }
    block::store_u32(block + 2, qh);
  }
};

}  // namespace shoal
