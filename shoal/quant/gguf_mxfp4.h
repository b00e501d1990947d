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

namespace shoal {

namespace block {
// Twice the e2m1 value, as an integer: -0 is 0.
SHOAL_BLOCK_INLINE float e2m1_doubled(uint32_t code) {
  constexpr int8_t kTable[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
  return static_cast<float>(kTable[code]);
}

// Half of 2^(e - 127); exact, as a subnormal for e < 2.
SHOAL_BLOCK_INLINE float e8m0_halved(uint32_t e) {
  const uint32_t bits = e < 2 ? 0x00200000u << e : (e - 1) << 23;
  return std::bit_cast<float>(e == 255 ? 0x7fc00000u : bits);
}
}  // namespace block

struct GGUF_MXFP4 {
  static constexpr std::string_view kName = "gguf_mxfp4";
  static constexpr int kGgmlType = 39;
  static constexpr int kBlockSize = 32;
  static constexpr int kBlockBytes = 17;
  static constexpr bool kCanEncode = false;

  SHOAL_BLOCK_INLINE static void decode(const std::byte* __restrict block, float* __restrict values) {
    const float scale = block::e8m0_halved(block::u8(block));
    for (int i = 0; i < 16; ++i) {
      const uint32_t q = block::u8(block + 1 + i);
      values[i] = scale * block::e2m1_doubled(q & 15);
      values[i + 16] = scale * block::e2m1_doubled(q >> 4);
    }
  }
};

}  // namespace shoal
