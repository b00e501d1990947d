// NVFP4 as a GGUF block: 64 values in 36 bytes, four sub-blocks of 16. A scale for the whole matrix stands apart.
//
//   bytes 0-3   e4m3 scale of each sub-block; bit 7 is ignored, 0x7f is NaN
//   bytes 4-35  e2m1 codes: 8 bytes a sub-block, low nibbles are its values 0-7, high nibbles 8-15
//   value       scale * m; the code of minus zero reads as zero
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "shoal/quant/gguf_mxfp4.h"

namespace shoal {

struct GGUF_NVFP4 {
  static constexpr std::string_view kName = "gguf_nvfp4";
  static constexpr int kGgmlType = 40;
  static constexpr int kBlockSize = 64;
  static constexpr int kBlockBytes = 36;
  static constexpr bool kCanEncode = false;

  SHOAL_BLOCK_INLINE static void decode(const std::byte* __restrict block, float* __restrict values) {
    for (int b = 0; b < 4; ++b) {
      const float scale = 0.5f * e4m3_to_f32(static_cast<uint8_t>(block::u8(block + b) & 0x7f));
      const std::byte* qs = block + 4 + 8 * b;
      float* out = values + 16 * b;
      for (int i = 0; i < 8; ++i) {
        const uint32_t q = block::u8(qs + i);
        out[i] = scale * block::e2m1_doubled(q & 15);
        out[i + 8] = scale * block::e2m1_doubled(q >> 4);
      }
    }
  }
};

}  // namespace shoal
