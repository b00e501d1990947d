// The 12 bytes of Q4_K and Q5_K that hold eight 6-bit scales and eight 6-bit minima.
//
//   sub-block i < 4:  sc = byte[i] & 63, mn = byte[i + 4] & 63
//   sub-block i >= 4: low 4 bits in byte[i + 4] (sc low nibble, mn high), high 2 bits on top of byte[i - 4] and byte[i]
#pragma once

#include <cstddef>
#include <cstdint>

#include "shoal/quant/scale_search.h"

namespace shoal::block {

SHOAL_BLOCK_INLINE uint32_t k_scale(const std::byte* packed, int i) {
  return i < 4 ? u8(packed + i) & 63 : (u8(packed + i + 4) & 15) | (u8(packed + i - 4) >> 6) << 4;
}

SHOAL_BLOCK_INLINE uint32_t k_min(const std::byte* packed, int i) {
  return i < 4 ? u8(packed + i + 4) & 63 : u8(packed + i + 4) >> 4 | (u8(packed + i) >> 6) << 4;
}

// What `encode` of Q4_K and Q5_K share: 256 values as eight groups of codes in [0, high].
struct KGroups {
  float d = 0.0f;
  float dmin = 0.0f;
  uint32_t scales[8];
  uint32_t mins[8];
  int32_t codes[8][32];

  KGroups(const float* values, int32_t high) {
    ScaleMin wanted[8];
    float max_scale = 0.0f;
    float max_min = 0.0f;
    for (int i = 0; i < 8; ++i) {
      wanted[i] = search_scale_min<32>(values + 32 * i, high);
      max_scale = std::fmax(max_scale, wanted[i].scale);
      max_min = std::fmax(max_min, wanted[i].min);
    }
    d = rounded_f16(max_scale / 63.0f);
    dmin = rounded_f16(max_min / 63.0f);
    for (int i = 0; i < 8; ++i) {
      mins[i] = nearest_code(wanted[i].min, inverse(dmin), 0, 63);
      const float min = dmin * static_cast<float>(mins[i]);
      scales[i] = quantise_group_scale<32>(values + 32 * i, wanted[i].scale, d, min, 0, 63, 0, high, codes[i]);
    }
  }

  // The first 16 bytes of the block.
  void store(std::byte* block) const {
    store_f16(block, d);
    store_f16(block + 2, dmin);
    std::byte* packed = block + 4;
    for (int i = 0; i < 4; ++i) {
      packed[i] = to_byte(scales[i] | scales[i + 4] >> 4 << 6);
      packed[i + 4] = to_byte(mins[i] | mins[i + 4] >> 4 << 6);
      packed[i + 8] = to_byte((scales[i + 4] & 15) | (mins[i + 4] & 15) << 4);
    }
  }
};

}  // namespace shoal::block
