// Scales that stand apart from their codes: one element of a tensor of scales as f32.
#pragma once

#include <cstdint>

#include "shoal/base/error.h"
#include "shoal/base/float_bits.h"
#include "shoal/tensor/dtype.h"

namespace shoal {

inline float read_float_scale(DType type, const void* scales, int64_t idx) {
  switch (type) {
    case DType::kF32: return static_cast<const float*>(scales)[idx];
    case DType::kF16: return f16_to_f32(static_cast<const uint16_t*>(scales)[idx]);
    case DType::kBF16: return bf16_to_f32(static_cast<const uint16_t*>(scales)[idx]);
    default: fail(ErrorCode::kInvalidArgument, "scales have type ", to_string(type), ", expected a float type");
  }
}

}  // namespace shoal
