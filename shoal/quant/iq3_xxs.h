// IQ3_XXS: 256 values in 98 bytes, 64 points of a 4-dimensional grid.
//
//   bytes 0-1    f16 d
//   bytes 2-65   grid id of each point
//   bytes 66-97  u32 for each 32 values: four 7-bit sign ids, top 4 bits the scale s
//   value        d * (0.5 + s) / 2 * grid
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "shoal/quant/iq_point.h"

namespace shoal {

struct IQ3_XXS {
  static constexpr std::string_view kName = "iq3_xxs";
  static constexpr int kGgmlType = 18;
  static constexpr int kBlockSize = 256;
  static constexpr int kBlockBytes = 98;
  static constexpr bool kCanEncode = false;  // needs a search over the grid with importance weights

  SHOAL_BLOCK_INLINE static void decode(const std::byte* __restrict block, float* __restrict values) {
    const float d = block::f16(block);
    for (int b = 0; b < 8; ++b) {
      const uint32_t rest = block::u32(block + 66 + 4 * b);
      const float scale = d * (0.5f + static_cast<float>(rest >> 28)) * 0.5f;
      for (int i = 0; i < 4; ++i) {
        const std::byte* ids = block + 2 + 8 * b + 2 * i;
        const uint32_t signs = iq::even_signs(rest >> (7 * i) & 127);
        float* out = values + 32 * b + 8 * i;
        iq::store_point(iq::kIq3Xxs.points[block::u8(ids)], signs, scale, out);
        iq::store_point(iq::kIq3Xxs.points[block::u8(ids + 1)], signs >> 4, scale, out + 4);
      }
    }
  }
};

}  // namespace shoal
