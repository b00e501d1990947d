// MXFP4 as a GGUF block: 32 values in 17 bytes.
//
//   byte 0      e8m0 scale: 2^(e - 127), 255 is NaN
//   bytes 1-16  e2m1 codes: low nibbles are values 0-15, high nibbles values 16-31
//   value       scale * m; the code of minus zero reads as plus zero
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "shoal/quant/block.h"
#include "shoal/quant/scale_search.h"

namespace shoal {

namespace block {
// Twice the e2m1 value, as an integer: -0 is 0.
SHOAL_BLOCK_INLINE float e2m1_doubled(uint32_t code) {
  constexpr int8_t kTable[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
  return static_cast<float>(kTable[code]);
}

// Code nearest to value / (2 * half_scale). A tie goes to the smaller magnitude; what rounds to zero is plus zero.
inline uint32_t e2m1_nearest(float value, float half_scale) {
  constexpr float kMiddles[7] = {0.5f, 1.5f, 2.5f, 3.5f, 5.0f, 7.0f, 10.0f};
  uint32_t code = 0;
  for (const float middle : kMiddles) {
    code += std::fabs(value) > middle * half_scale ? 1 : 0;
  }
  return value < 0.0f && code != 0 ? code | 8 : code;
}

// Half of 2^(e - 127); exact, as a subnormal for e < 2.
SHOAL_BLOCK_INLINE float e8m0_halved(uint32_t e) {
  const uint32_t bits = e < 2 ? 0x00200000u << e : (e - 1) << 23;
  return std::bit_cast<float>(e == 255 ? 0x7fc00000u : bits);
}

// The e8m0 scale of values up to amax, by OCP MX 1.0, section 6.3: the largest power of two not above amax, over that
// of the largest code. Values between 6 and 8 times the scale saturate.
inline uint32_t e8m0_for(float amax) {
  const int exponent = amax > 0.0f ? std::ilogb(amax) - 2 + 127 : 0;
  return exponent > 0 ? exponent : 0;
}
}  // namespace block

struct GGUF_MXFP4 {
  static constexpr std::string_view kName = "gguf_mxfp4";
  static constexpr int kGgmlType = 39;
  static constexpr int kBlockSize = 32;
  static constexpr int kBlockBytes = 17;
  static constexpr bool kCanEncode = true;

  SHOAL_BLOCK_INLINE static void decode(const std::byte* __restrict block, float* __restrict values) {
    const float scale = block::e8m0_halved(block::u8(block));
    for (int i = 0; i < 16; ++i) {
      const uint32_t q = block::u8(block + 1 + i);
      values[i] = scale * block::e2m1_doubled(q & 15);
      values[i + 16] = scale * block::e2m1_doubled(q >> 4);
    }
  }

  static void encode(const float* values, std::byte* block) {
    const uint32_t e = block::e8m0_for(std::fabs(block::extreme_of(values, kBlockSize)));
    const float half_scale = block::e8m0_halved(e);
    block[0] = block::to_byte(e);
    for (int i = 0; i < 16; ++i) {
      const uint32_t low = block::e2m1_nearest(values[i], half_scale);
      const uint32_t high = block::e2m1_nearest(values[i + 16], half_scale);
      block[1 + i] = block::to_byte(low | high << 4);
    }
  }
};

}  // namespace shoal
