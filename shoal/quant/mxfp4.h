// MXFP4 as codes and scales: value = e2m1(code) * 2^(c - 127) * global_scale, groups of 32.
//
//   codes   4 bits, even column in the low nibble (row-packed)
//   scales  e8m0 bytes c: 0 is 2^-127, 255 is NaN
// Source: OCP Microscaling Formats 1.0
#pragma once

#include <string_view>

#include "shoal/quant/gguf_mxfp4.h"
#include "shoal/quant/scale_types.h"

namespace shoal {

struct E2M1Codes {
  static constexpr int kBits = 4;
  static constexpr bool kSharedScales = false;
  static constexpr bool kHasZeros = false;
  static constexpr float kDefaultZero = 0.0f;
  static float number(uint32_t code) { return 0.5f * block::e2m1_doubled(code); }
};

struct MXFP4 : E2M1Codes {
  static constexpr std::string_view kName = "mxfp4";
  static constexpr int kScaleGroup = 32;
  static float scale(DType type, const void* scales, int64_t idx) {
    require(type == DType::kF8E8M0 || type == DType::kU8, "mxfp4: scales have type ", to_string(type),
            ", expected float8e8m0 or its bytes");
    return e8m0_to_f32(static_cast<const uint8_t*>(scales)[idx]);
  }
};

}  // namespace shoal
