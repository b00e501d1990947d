// IQ4_NL: 32 values in 18 bytes, 4-bit codes through a table that is finer around zero.
//
//   bytes 0-1   f16 d
//   bytes 2-17  qs: low nibbles are values 0-15, high nibbles values 16-31
//   value       d * table[q]
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "shoal/quant/block.h"

namespace shoal {

namespace block {
SHOAL_BLOCK_INLINE float iq4_value(uint32_t code) {
  constexpr int8_t kTable[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
  return static_cast<float>(kTable[code]);
}
}  // namespace block

struct IQ4_NL {
  static constexpr std::string_view kName = "iq4_nl";
  static constexpr int kGgmlType = 20;
  static constexpr int kBlockSize = 32;
  static constexpr int kBlockBytes = 18;
  static constexpr bool kCanEncode = false;

  SHOAL_BLOCK_INLINE static void decode(const std::byte* __restrict block, float* __restrict values) {
    const float d = block::f16(block);
    for (int i = 0; i < 16; ++i) {
      const uint32_t q = block::u8(block + 2 + i);
      values[i] = d * block::iq4_value(q & 15);
      values[i + 16] = d * block::iq4_value(q >> 4);
    }
  }
};

}  // namespace shoal
