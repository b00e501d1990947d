// Q3_K: 256 values in 110 bytes, sixteen sub-blocks of 16.
//
//   bytes 0-31     hmask: value 128n + 32j + l (j < 4): bit 4n + j of byte l; a clear bit subtracts 4
//   bytes 32-95    qs: the same value: bits 2j and 2j + 1 of byte 32n + l
//   bytes 96-107   6-bit scales: low nibbles of sub-blocks 0-7, high nibbles 8-15 in bytes 0-7; bits 2(i / 4), 2(i / 4)
//   + 1
//                  of byte 8 + i % 4 are the top two
//   bytes 108-109  f16 d
//   value          d * (sc - 32) * q, q in [-4, 3]
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "shoal/quant/block.h"
#include "shoal/quant/scale_search.h"

namespace shoal {

struct Q3_K {
  static constexpr std::string_view kName = "q3_k";
  static constexpr int kGgmlType = 11;
  static constexpr int kBlockSize = 256;
  static constexpr int kBlockBytes = 110;
  static constexpr bool kCanEncode = true;

  SHOAL_BLOCK_INLINE static void decode(const std::byte* __restrict block, float* __restrict values) {
    const float d = block::f16(block + 108);
    for (int i = 0; i < 16; ++i) {
      const uint32_t low = block::u8(block + 96 + i % 8) >> (i < 8 ? 0 : 4) & 15;
      const uint32_t high = block::u8(block + 104 + i % 4) >> (2 * (i / 4)) & 3;
      const float scale = d * static_cast<float>(static_cast<int32_t>(low | high << 4) - 32);
      const std::byte* qs = block + 32 + 32 * (i / 8) + 16 * (i % 2);
      const std::byte* hmask = block + 16 * (i % 2);
      const int shift = i / 2 % 4 * 2;
      const int bit = i / 2;
      float* out = values + 16 * i;
      for (int l = 0; l < 16; ++l) {
        const int32_t q = static_cast<int32_t>(block::u8(qs + l)) >> shift & 3;
        const int32_t h = static_cast<int32_t>(block::u8(hmask + l)) >> bit & 1;
        out[l] = scale * static_cast<float>(q + 4 * h - 4);
      }
    }
  }

  static void encode(const float* values, std::byte* block) {
    float scales[16];
    for (int i = 0; i < 16; ++i) {
      scales[i] = block::search_scale<16>(values + 16 * i, -4, 3);
    }
    const float d = block::rounded_f16(block::extreme_of(scales, 16) / -32.0f);
    std::memset(block, 0, kBlockBytes);
    block::store_f16(block + 108, d);
    for (int i = 0; i < 16; ++i) {
      int32_t codes[16];
      const uint32_t sc =
          32 + block::quantise_group_scale<16>(values + 16 * i, scales[i], d, 0.0f, -32, 31, -4, 3, codes);
      block[96 + i % 8] |= block::to_byte((sc & 15) << (i < 8 ? 0 : 4));
      block[104 + i % 4] |= block::to_byte(sc >> 4 << (2 * (i / 4)));
      std::byte* qs = block + 32 + 32 * (i / 8) + 16 * (i % 2);
      std::byte* hmask = block + 16 * (i % 2);
      for (int l = 0; l < 16; ++l) {
        const uint32_t code = codes[l] + 4;
        qs[l] |= block::to_byte((code & 3) << (i / 2 % 4 * 2));
        hmask[l] |= block::to_byte(code >> 2 << (i / 2));
      }
    }
  }
};

}  // namespace shoal
