// The 12 bytes of Q4_K and Q5_K that hold eight 6-bit scales and eight 6-bit minima.
//
//   sub-block i < 4:  sc = byte[i] & 63, mn = byte[i + 4] & 63
//   sub-block i >= 4: low 4 bits in byte[i + 4] (sc low nibble, mn high), high 2 bits on top of byte[i - 4] and byte[i]
#pragma once

#include <cstddef>
#include <cstdint>

#include "shoal/quant/block.h"

namespace shoal::block {

SHOAL_BLOCK_INLINE uint32_t k_scale(const std::byte* packed, int i) {
  return i < 4 ? u8(packed + i) & 63 : (u8(packed + i + 4) & 15) | (u8(packed + i - 4) >> 6) << 4;
}

SHOAL_BLOCK_INLINE uint32_t k_min(const std::byte* packed, int i) {
  return i < 4 ? u8(packed + i + 4) & 63 : u8(packed + i + 4) >> 4 | (u8(packed + i) >> 6) << 4;
}

inline void store_k_scales(const uint32_t* scales, const uint32_t* mins, std::byte* packed) {
  for (int i = 0; i < 4; ++i) {
    packed[i] = to_byte(scales[i] | scales[i + 4] >> 4 << 6);
    packed[i + 4] = to_byte(mins[i] | mins[i + 4] >> 4 << 6);
    packed[i + 8] = to_byte((scales[i + 4] & 15) | (mins[i + 4] & 15) << 4);
  }
}

}  // namespace shoal::block
