// Q5_K: 256 values in 176 bytes, eight sub-blocks of 32.
//
//   bytes 0-1     f16 d
//   bytes 2-3     f16 dmin
//   bytes 4-15    eight 6-bit scales and minima (k_scales.h)
//   bytes 16-47   qh: bit i of byte l is the fifth bit of value l of sub-block i
//   bytes 48-175  qs: 32 bytes for each pair of sub-blocks, low nibbles the even one
//   value         d * sc * q - dmin * mn
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "shoal/quant/k_scales.h"

namespace shoal {

struct Q5_K {
  static constexpr std::string_view kName = "q5_k";
  static constexpr int kGgmlType = 13;
  static constexpr int kBlockSize = 256;
  static constexpr int kBlockBytes = 176;
  static constexpr bool kCanEncode = true;

  SHOAL_BLOCK_INLINE static void decode(const std::byte* __restrict block, float* __restrict values) {
    const float d = block::f16(block);
    const float dmin = block::f16(block + 2);
    const std::byte* packed = block + 4;
    const std::byte* qh = block + 16;
    for (int j = 0; j < 4; ++j) {
      const std::byte* qs = block + 48 + 32 * j;
      const float scale_low = d * static_cast<float>(block::k_scale(packed, 2 * j));
      const float scale_high = d * static_cast<float>(block::k_scale(packed, 2 * j + 1));
      const float min_low = dmin * static_cast<float>(block::k_min(packed, 2 * j));
      const float min_high = dmin * static_cast<float>(block::k_min(packed, 2 * j + 1));
      float* out = values + 64 * j;
      for (int l = 0; l < 32; ++l) {
        const int32_t q = static_cast<int32_t>(block::u8(qs + l));
        const int32_t h = static_cast<int32_t>(block::u8(qh + l) >> (2 * j));
        out[l] = scale_low * static_cast<float>((q & 15) | (h & 1) << 4) - min_low;
        out[l + 32] = scale_high * static_cast<float>(q >> 4 | (h & 2) << 3) - min_high;
      }
    }
  }

  static void encode(const float* values, std::byte* block) {
    block::KGroups groups(values, 31);
    std::memset(block, 0, kBlockBytes);
    groups.store(block);
    for (int i = 0; i < 8; ++i) {
      std::byte* qs = block + 48 + 32 * (i / 2);
      for (int l = 0; l < 32; ++l) {
        const uint32_t code = groups.codes[i][l];
        qs[l] |= block::to_byte((code & 15) << (4 * (i % 2)));
        block[16 + l] |= block::to_byte(code >> 4 << i);
      }
    }
  }
};

}  // namespace shoal
