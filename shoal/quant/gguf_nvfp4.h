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
  static constexpr bool kCanEncode = true;

  SHOAL_BLOCK_INLINE static void decode(const std::byte* __restrict block, float* __restrict values) {
    for (int b = 0; b < 4; ++b) {
      const float scale = half_scale(block::u8(block + b));
      const std::byte* qs = block + 4 + 8 * b;
      float* out = values + 16 * b;
      for (int i = 0; i < 8; ++i) {
        const uint32_t q = block::u8(qs + i);
        out[i] = scale * block::e2m1_doubled(q & 15);
        out[i + 8] = scale * block::e2m1_doubled(q >> 4);
      }
    }
  }

  // The scale that puts amax on the largest code, or a neighbour of it if its squared error is smaller.
  static void encode(const float* values, std::byte* block) {
    for (int b = 0; b < 4; ++b) {
      const float* x = values + 16 * b;
      const float unit = block::extreme_of(x, 16);
      const int32_t center = f32_to_e4m3(std::fabs(unit) / 6.0f);
      float best_error = INFINITY;
      for (const int32_t candidate : {center, center - 1, center + 1}) {
        if (candidate < 0 || candidate > 0x7e) {
          continue;
        }
        uint32_t codes[16];
        const float error = quantise_group(x, half_scale(candidate), block::inverse(unit), codes);
        if (error < best_error) {
          best_error = error;
          block[b] = block::to_byte(candidate);
          for (int i = 0; i < 8; ++i) {
            block[4 + 8 * b + i] = block::to_byte(codes[i] | codes[i + 8] << 4);
          }
        }
      }
    }
  }

 private:
  // Half of the e4m3 value, for the doubled codes; by selection, not by branches. The value of 0x7f is NaN.
  SHOAL_BLOCK_INLINE static float half_scale(uint32_t code) {
    const uint32_t exponent = code >> 3 & 15;
    const uint32_t mantissa = code & 7;
    const float subnormal = static_cast<float>(static_cast<int32_t>(mantissa)) * 0x1p-10f;
    uint32_t bits = ((exponent + 119) << 23) | (mantissa << 20);
    bits = exponent == 0 ? std::bit_cast<uint32_t>(subnormal) : bits;
    return std::bit_cast<float>((code & 0x7f) == 0x7f ? 0x7fc00000u : bits);
  }

  static float quantise_group(const float* x, float scale, float unit_inverse, uint32_t* codes) {
    float error = 0.0f;
    for (int i = 0; i < 16; ++i) {
      codes[i] = scale > 0.0f ? block::e2m1_nearest(x[i], scale) : 0;
      const float difference = (scale * block::e2m1_doubled(codes[i]) - x[i]) * unit_inverse;
      error += difference * difference;
    }
    return error;
  }
};

}  // namespace shoal
