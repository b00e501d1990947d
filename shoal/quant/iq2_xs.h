// IQ2_XS: 256 values in 74 bytes, 32 points of an 8-dimensional grid.
//
//   bytes 0-1    f16 d
//   bytes 2-65   u16 a point: 9 bits grid id, 7 bits sign id
//   bytes 66-73  4-bit scale s of each 16 values, low nibble first
//   value        d * (0.5 + s) / 4 * grid
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "shoal/quant/iq_point.h"

namespace shoal {

struct IQ2_XS {
  static constexpr std::string_view kName = "iq2_xs";
  static constexpr int kGgmlType = 17;
  static constexpr int kBlockSize = 256;
  static constexpr int kBlockBytes = 74;
  static constexpr bool kCanEncode = false;  // needs a search over the grid with importance weights

  SHOAL_BLOCK_INLINE static void decode(const std::byte* __restrict block, float* __restrict values) {
    const float d = block::f16(block);
    for (int v = 0; v < 32; ++v) {
      const uint32_t code = block::u16(block + 2 + 2 * v);
      const uint32_t s = block::u8(block + 66 + v / 4) >> (v / 2 % 2 * 4) & 15;
      const float scale = d * (0.5f + static_cast<float>(s)) * 0.25f;
      iq::store_point(iq::kIq2Xs.points[code & 511], iq::even_signs(code >> 9), scale, values + 8 * v);
    }
  }
};

}  // namespace shoal
