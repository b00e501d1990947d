// IQ4_XS: 256 values in 136 bytes, eight sub-blocks of 32 with the table of IQ4_NL.
//
//   bytes 0-1    f16 d
//   bytes 2-3    u16 sh: top 2 bits of the 6-bit scale of sub-block b at bit 2b
//   bytes 4-7    sl: low 4 bits, two sub-blocks a byte
//   bytes 8-135  qs: 16 bytes a sub-block, low nibbles are its values 0-15, high nibbles 16-31
//   value        d * (scale - 32) * table[q]
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "shoal/quant/iq4_nl.h"

namespace shoal {

struct IQ4_XS {
  static constexpr std::string_view kName = "iq4_xs";
  static constexpr int kGgmlType = 23;
  static constexpr int kBlockSize = 256;
  static constexpr int kBlockBytes = 136;
  static constexpr bool kCanEncode = true;

  SHOAL_BLOCK_INLINE static void decode(const std::byte* __restrict block, float* __restrict values) {
    const float d = block::f16(block);
    const uint32_t sh = block::u16(block + 2);
    for (int b = 0; b < 8; ++b) {
      const uint32_t low = block::u8(block + 4 + b / 2) >> (4 * (b % 2)) & 15;
      const uint32_t high = sh >> (2 * b) & 3;
      const float scale = d * static_cast<float>(static_cast<int32_t>(low | high << 4) - 32);
      const std::byte* qs = block + 8 + 16 * b;
      float* out = values + 32 * b;
      for (int i = 0; i < 16; ++i) {
        const uint32_t q = block::u8(qs + i);
        out[i] = scale * block::iq4_value(q & 15);
        out[i + 16] = scale * block::iq4_value(q >> 4);
      }
    }
  }

  static void encode(const float* values, std::byte* block) {
    float scales[8];
    for (int b = 0; b < 8; ++b) {
      scales[b] = block::iq4_search_scale(values + 32 * b);
    }
    const float d = block::rounded_f16(block::extreme_of(scales, 8) / -32.0f);
    uint32_t sh = 0;
    std::memset(block, 0, kBlockBytes);
    block::store_f16(block, d);
    for (int b = 0; b < 8; ++b) {
      const int32_t scale = block::nearest_code(scales[b], block::inverse(d), -32, 31);
      const uint32_t packed = scale + 32;
      const float inverse = block::inverse(d * static_cast<float>(scale));
      block[4 + b / 2] |= block::to_byte((packed & 15) << (4 * (b % 2)));
      sh |= packed >> 4 << (2 * b);
      for (int i = 0; i < 16; ++i) {
        const uint32_t low = block::iq4_nearest(values[32 * b + i] * inverse);
        const uint32_t high = block::iq4_nearest(values[32 * b + i + 16] * inverse);
        block[8 + 16 * b + i] = block::to_byte(low | high << 4);
      }
    }
    block::store_u16(block + 2, sh);
  }
};

}  // namespace shoal
