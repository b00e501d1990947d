// Q2_K: 256 values in 84 bytes, sixteen sub-blocks of 16.
//
//   bytes 0-15   low nibble scale, high nibble minimum of each sub-block
//   bytes 16-79  qs: value 128n + 32j + l (j < 4) is bits 2j and 2j + 1 of byte 32n + l
//   bytes 80-81  f16 d
//   bytes 82-83  f16 dmin
//   value        d * sc * q - dmin * mn
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "shoal/quant/block.h"
#include "shoal/quant/scale_search.h"

namespace shoal {

struct Q2_K {
  static constexpr std::string_view kName = "q2_k";
  static constexpr int kGgmlType = 10;
  static constexpr int kBlockSize = 256;
  static constexpr int kBlockBytes = 84;
  static constexpr bool kCanEncode = true;

  SHOAL_BLOCK_INLINE static void decode(const std::byte* __restrict block, float* __restrict values) {
    const float d = block::f16(block + 80);
    const float dmin = block::f16(block + 82);
    for (int i = 0; i < 16; ++i) {
      const uint32_t packed = block::u8(block + i);
      const float scale = d * static_cast<float>(packed & 15);
      const float min = dmin * static_cast<float>(packed >> 4);
      const std::byte* qs = block + 16 + 32 * (i / 8) + 16 * (i % 2);
      const int shift = i / 2 % 4 * 2;
      float* out = values + 16 * i;
      for (int l = 0; l < 16; ++l) {
        const int32_t q = static_cast<int32_t>(block::u8(qs + l)) >> shift & 3;
        out[l] = scale * static_cast<float>(q) - min;
      }
    }
  }

  static void encode(const float* values, std::byte* block) {
    block::ScaleMin groups[16];
    float max_scale = 0.0f;
    float max_min = 0.0f;
    for (int i = 0; i < 16; ++i) {
      groups[i] = block::search_scale_min<16>(values + 16 * i, 3);
      max_scale = std::fmax(max_scale, groups[i].scale);
      max_min = std::fmax(max_min, groups[i].min);
    }
    const float d = block::rounded_f16(max_scale / 15.0f);
    const float dmin = block::rounded_f16(max_min / 15.0f);
    std::memset(block, 0, kBlockBytes);
    block::store_f16(block + 80, d);
    block::store_f16(block + 82, dmin);
    for (int i = 0; i < 16; ++i) {
      const int32_t mn = block::nearest_code(groups[i].min, block::inverse(dmin), 0, 15);
      const float min = dmin * static_cast<float>(mn);
      int32_t codes[16];
      const int32_t sc = block::quantise_group_scale<16>(values + 16 * i, groups[i].scale, d, min, 0, 15, 0, 3, codes);
      block[i] = block::to_byte(sc | mn << 4);
      std::byte* qs = block + 16 + 32 * (i / 8) + 16 * (i % 2);
      for (int l = 0; l < 16; ++l) {
        qs[l] |= block::to_byte(codes[l] << (i / 2 % 4 * 2));
      }
    }
  }
};

}  // namespace shoal
