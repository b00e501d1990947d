// FP8 E4M3FN codes, one byte each: value = e4m3(code) * scale.
//
//   scales  f32, f16 or bf16: one for the matrix, one a row, one for each group along a row, or one for each square
//           block of group_size x group_size values
// Source: OCP 8-bit Floating Point 1.0; ONNX Runtime com.microsoft::QMoE (quant_type fp8)
#pragma once

#include <string_view>

#include "shoal/quant/scale_types.h"

namespace shoal {

struct FP8_E4M3 {
  static constexpr std::string_view kName = "fp8_e4m3";
  static constexpr int kBits = 8;
  static constexpr int kScaleGroup = 0;
  static constexpr bool kSharedScales = true;
  static constexpr bool kHasZeros = false;
  static constexpr float kDefaultZero = 0.0f;
  static float number(uint32_t code) { return e4m3_to_f32(static_cast<uint8_t>(code)); }
  static float scale(DType type, const void* scales, int64_t idx) { return read_float_scale(type, scales, idx); }
};

}  // namespace shoal
