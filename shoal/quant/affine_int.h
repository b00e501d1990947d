// Unsigned affine integers of 2, 3, 4 and 8 bits: value = (code - zero) * scale.
//
//   codes   LSB-first stream (code_stream.h), each row padded to a byte with zero bits
//   scales  f32, f16 or bf16, one for each group of group_size values
//   zeros   optional codes of the same width, one for each group, packed like a row; 3 bits know only the zero 4
// Source: ONNX Runtime com.microsoft::MatMulNBits and QMoE (quant_type int)
#pragma once

#include <string_view>

#include "shoal/quant/scale_types.h"

namespace shoal {

template <int Bits>
struct AffineInt {
  static constexpr int kBits = Bits;
  static constexpr int kScaleGroup = 0;
  static constexpr bool kSharedScales = false;
  static constexpr bool kHasZeros = true;
  static constexpr float kDefaultZero = static_cast<float>(1 << (Bits - 1));
  static float number(uint32_t code) { return static_cast<float>(code); }
  static float scale(DType type, const void* scales, int64_t idx) { return read_float_scale(type, scales, idx); }
};

struct INT2 : AffineInt<2> {
  static constexpr std::string_view kName = "int2";
};
struct INT3 : AffineInt<3> {
  static constexpr std::string_view kName = "int3";
};
struct INT4 : AffineInt<4> {
  static constexpr std::string_view kName = "int4";
};
struct INT8 : AffineInt<8> {
  static constexpr std::string_view kName = "int8";
};

}  // namespace shoal
