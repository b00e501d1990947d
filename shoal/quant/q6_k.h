// Q6_K: 256 values in 210 bytes, sixteen sub-blocks of 16.
//
//   bytes 0-127    ql: low 4 bits. Values 128n + 32g + l (g < 4): byte 64n + 32(g % 2) + l, low nibble for g < 2
//   bytes 128-191  qh: high 2 bits. The same value: byte 32n + l, bits 2g and 2g + 1
//   bytes 192-207  int8 scale of each sub-block
//   bytes 208-209  f16 d
//   value          (d * scale) * (q - 32), in this order: the product needs 25 bits
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "shoal/quant/block.h"
#include "shoal/quant/scale_search.h"

namespace shoal {

struct Q6_K {
  static constexpr std::string_view kName = "q6_k";
  static constexpr int kGgmlType = 14;
  static constexpr int kBlockSize = 256;
  static constexpr int kBlockBytes = 210;
  static constexpr bool kCanEncode = true;

  SHOAL_BLOCK_INLINE static void decode(const std::byte* __restrict block, float* __restrict values) {
    const float d = block::f16(block + 208);
    for (int n = 0; n < 2; ++n) {
      for (int half = 0; half < 2; ++half) {  // the 16 values of one sub-block in each of the four groups
        const std::byte* ql = block + 64 * n + 16 * half;
        const std::byte* qh = block + 128 + 32 * n + 16 * half;
        const std::byte* scales = block + 192 + 8 * n + half;
        const float scale_0 = d * static_cast<float>(block::i8(scales));
        const float scale_1 = d * static_cast<float>(block::i8(scales + 2));
        const float scale_2 = d * static_cast<float>(block::i8(scales + 4));
        const float scale_3 = d * static_cast<float>(block::i8(scales + 6));
        float* out = values + 128 * n + 16 * half;
        for (int l = 0; l < 16; ++l) {
          const int32_t a = static_cast<int32_t>(block::u8(ql + l));
          const int32_t b = static_cast<int32_t>(block::u8(ql + l + 32));
          const int32_t h = static_cast<int32_t>(block::u8(qh + l));
          out[l] = scale_0 * static_cast<float>(((a & 15) | (h & 3) << 4) - 32);
          out[l + 32] = scale_1 * static_cast<float>(((b & 15) | (h >> 2 & 3) << 4) - 32);
          out[l + 64] = scale_2 * static_cast<float>((a >> 4 | (h >> 4 & 3) << 4) - 32);
          out[l + 96] = scale_3 * static_cast<float>((b >> 4 | (h >> 6) << 4) - 32);
        }
      }
    }
  }

  static void encode(const float* values, std::byte* block) {
    float scales[16];
    for (int i = 0; i < 16; ++i) {
      scales[i] = block::search_scale<16>(values + 16 * i, -32, 31);
    }
    const float d = block::rounded_f16(block::extreme_of(scales, 16) / -128.0f);
    std::memset(block, 0, kBlockBytes);
    block::store_f16(block + 208, d);
    for (int i = 0; i < 16; ++i) {
      int32_t codes[16];
      const int32_t sc =
          block::quantise_group_scale<16>(values + 16 * i, scales[i], d, 0.0f, -128, 127, -32, 31, codes);
      block[192 + i] = block::to_byte(sc);
      const int n = i / 8;
      const int g = i / 2 % 4;
      std::byte* ql = block + 64 * n + 32 * (g % 2) + 16 * (i % 2);
      std::byte* qh = block + 128 + 32 * n + 16 * (i % 2);
      for (int l = 0; l < 16; ++l) {
        const uint32_t code = codes[l] + 32;
        ql[l] |= block::to_byte((code & 15) << (g < 2 ? 0 : 4));
        qh[l] |= block::to_byte(code >> 4 << (2 * g));
      }
    }
  }
};

}  // namespace shoal
