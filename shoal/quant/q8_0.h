// Q8_0: 32 values in 34 bytes.
//
//   bytes 0-1    f16 d
//   bytes 2-33   int8 q
//   value        d * q
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "shoal/quant/block.h"

namespace shoal {

struct Q8_0 {
  static constexpr std::string_view kName = "q8_0";
  static constexpr int kGgmlType = 8;
  static constexpr int kBlockSize = 32;
  static constexpr int kBlockBytes = 34;
  static constexpr bool kCanEncode = true;

  SHOAL_BLOCK_INLINE static void decode(const std::byte* __restrict block, float* __restrict values) {
    const float d = block::f16(block);
    for (int i = 0; i < kBlockSize; ++i) {
      values[i] = d * static_cast<float>(block::i8(block + 2 + i));
    }
  }

  static void encode(const float* values, std::byte* block) {
    float amax = 0.0f;
    for (int i = 0; i < kBlockSize; ++i) {
      amax = std::fmax(amax, std::fabs(values[i]));
    }
    const float d = amax / 127.0f;
    const float inverse = block::inverse(d);
    block::store_f16(block, d);
    for (int i = 0; i < kBlockSize; ++i) {
      block[2 + i] = block::to_byte(block::to_int(std::round(values[i] * inverse), -127, 127));
    }
  }
};

}  // namespace shoal
