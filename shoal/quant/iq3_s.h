// IQ3_S: 256 values in 110 bytes, 64 points of a 4-dimensional grid.
//
//   bytes 0-1      f16 d
//   bytes 2-65     low 8 bits of each point's grid id
//   bytes 66-73    ninth bit of the ids, eight points a byte
//   bytes 74-105   sign bit of each value
//   bytes 106-109  4-bit scale s of each 32 values, low nibble first
//   value          d * (1 + 2 s) * grid
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "shoal/quant/iq_point.h"

namespace shoal {

struct IQ3_S {
  static constexpr std::string_view kName = "iq3_s";
  static constexpr int kGgmlType = 21;
  static constexpr int kBlockSize = 256;
  static constexpr int kBlockBytes = 110;
  static constexpr bool kCanEncode = false;  // needs a search over the grid with importance weights

  SHOAL_BLOCK_INLINE static void decode(const std::byte* __restrict block, float* __restrict values) {
    const float d = block::f16(block);
    for (int v = 0; v < 64; ++v) {
      const uint32_t id = block::u8(block + 2 + v) | (block::u8(block + 66 + v / 8) >> (v % 8) & 1) << 8;
      const uint32_t signs = block::u8(block + 74 + v / 2) >> (v % 2 * 4);
      const uint32_t s = block::u8(block + 106 + v / 16) >> (v / 8 % 2 * 4) & 15;
      iq::store_point(iq::kIq3S.points[id], signs, d * static_cast<float>(1 + 2 * s), values + 4 * v);
    }
  }
};

}  // namespace shoal
