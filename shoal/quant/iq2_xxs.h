// IQ2_XXS: 256 values in 66 bytes, eight sub-blocks of 32, each four points of an 8-dimensional grid.
//
//   bytes 0-1   f16 d
//   bytes 2-65  for each sub-block: four 8-bit grid ids, then u32: four 7-bit sign ids, top 4 bits the scale s
//   value       d * (0.5 + s) / 4 * grid
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "shoal/quant/iq_point.h"

namespace shoal {

struct IQ2_XXS {
  static constexpr std::string_view kName = "iq2_xxs";
  static constexpr int kGgmlType = 16;
  static constexpr int kBlockSize = 256;
  static constexpr int kBlockBytes = 66;
  static constexpr bool kCanEncode = false;  // needs a search over the grid with importance weights

  SHOAL_BLOCK_INLINE static void decode(const std::byte* __restrict block, float* __restrict values) {
    const float d = block::f16(block);
    for (int b = 0; b < 8; ++b) {
      const std::byte* ids = block + 2 + 8 * b;
      const uint32_t rest = block::u32(ids + 4);
      const float scale = d * (0.5f + static_cast<float>(rest >> 28)) * 0.25f;
      for (int i = 0; i < 4; ++i) {
        iq::store_point(iq::kIq2Xxs.points[block::u8(ids + i)], iq::even_signs(rest >> (7 * i) & 127), scale,
                        values + 32 * b + 8 * i);
      }
    }
  }
};

}  // namespace shoal
