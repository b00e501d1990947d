// IQ2_S: 256 values in 82 bytes, 32 points of an 8-dimensional grid.
//
//   bytes 0-1    f16 d
//   bytes 2-33   low 8 bits of each point's grid id
//   bytes 34-65  signs of each point
//   bytes 66-73  high 2 bits of the ids, four points a byte
//   bytes 74-81  4-bit scale s of each 16 values, low nibble first
//   value        d * (0.5 + s) / 4 * grid
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "shoal/quant/iq_point.h"

namespace shoal {

struct IQ2_S {
  static constexpr std::string_view kName = "iq2_s";
  static constexpr int kGgmlType = 22;
  static constexpr int kBlockSize = 256;
  static constexpr int kBlockBytes = 82;
  static constexpr bool kCanEncode = false;  // needs a search over the grid with importance weights

  SHOAL_BLOCK_INLINE static void decode(const std::byte* __restrict block, float* __restrict values) {
    const float d = block::f16(block);
    for (int v = 0; v < 32; ++v) {
      const uint32_t high = block::u8(block + 66 + v / 4) >> (v % 4 * 2) & 3;
      const uint32_t id = block::u8(block + 2 + v) | high << 8;
      const uint32_t s = block::u8(block + 74 + v / 4) >> (v / 2 % 2 * 4) & 15;
      const float scale = d * (0.5f + static_cast<float>(s)) * 0.25f;
      iq::store_point(iq::kIq2S.points[id], block::u8(block + 34 + v), scale, values + 8 * v);
    }
  }
};

}  // namespace shoal
