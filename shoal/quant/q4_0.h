// Q4_0: 32 values in 18 bytes.
//
//   bytes 0-1    f16 d
//   bytes 2-17   qs: low nibbles are values 0-15, high nibbles values 16-31
//   value        d * (q - 8)
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "shoal/quant/scale_search.h"

namespace shoal {

struct Q4_0 {
  static constexpr std::string_view kName = "q4_0";
  static constexpr int kGgmlType = 2;
  static constexpr int kBlockSize = 32;
  static constexpr int kBlockBytes = 18;
  static constexpr bool kCanEncode = true;

  SHOAL_BLOCK_INLINE static void decode(const std::byte* __restrict block, float* __restrict values) {
    const float d = block::f16(block);
    const std::byte* qs = block + 2;
    for (int i = 0; i < 16; ++i) {
      const int32_t q = static_cast<int32_t>(block::u8(qs + i));
      values[i] = d * static_cast<float>((q & 15) - 8);
      values[i + 16] = d * static_cast<float>((q >> 4) - 8);
    }
  }

  // The value of largest magnitude becomes code 0, so that -8, the longer side of the range, is used.
  static void encode(const float* values, std::byte* block) {
    const float extreme = block::extreme_of(values, kBlockSize);
    const float d = extreme / -8.0f;
    const float inverse = block::inverse(d);
    block::store_f16(block, d);
    for (int i = 0; i < 16; ++i) {
      const int32_t low = block::to_int(values[i] * inverse + 8.5f, 0, 15);
      const int32_t high = block::to_int(values[i + 16] * inverse + 8.5f, 0, 15);
      block[2 + i] = block::to_byte(low | high << 4);
    }
  }
};

}  // namespace shoal
