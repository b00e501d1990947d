// NVFP4 as codes and scales: value = e2m1(code) * e4m3(c) * global_scale, groups of 16.
//
//   codes   4 bits, even column in the low nibble (row-packed)
//   scales  e4m3 bytes c
// Source: ONNX Runtime com.microsoft::MatMulBlockQuantizedFp4Weight
#pragma once

#include <string_view>

#include "shoal/quant/mxfp4.h"

namespace shoal {

struct NVFP4 : E2M1Codes {
  static constexpr std::string_view kName = "nvfp4";
  static constexpr int kScaleGroup = 16;
  static float scale(DType type, const void* scales, int64_t idx) {
    require(type == DType::kF8E4M3 || type == DType::kU8, "nvfp4: scales have type ", to_string(type),
            ", expected float8e4m3fn or its bytes");
    return e4m3_to_f32(static_cast<const uint8_t*>(scales)[idx]);
  }
};

}  // namespace shoal
