// One grid point of the IQ2 and IQ3 formats with its signs.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

#include "shoal/quant/block.h"
#include "shoal/quant/iq_grids.h"

namespace shoal::iq {

// Bit i of `signs` negates value i.
template <int kValues>
SHOAL_BLOCK_INLINE void store_point(const uint8_t (&point)[kValues], uint32_t signs, float scale,
                                    float* __restrict values) {
  for (int i = 0; i < kValues; ++i) {
    const int32_t sign = -static_cast<int32_t>(signs >> i & 1);
    values[i] = scale * static_cast<float>((point[i] ^ sign) - sign);
  }
}

// Seven stored sign bits; the eighth makes the number of minus signs even.
SHOAL_BLOCK_INLINE uint32_t even_signs(uint32_t id) { return id | (static_cast<uint32_t>(std::popcount(id)) & 1) << 7; }

}  // namespace shoal::iq
