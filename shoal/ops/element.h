// Single elements of float tensors as f32: for references and tests, which are plain loops over any type.
#pragma once

#include <cstdint>

#include "shoal/base/error.h"
#include "shoal/base/float_bits.h"
#include "shoal/tensor/dtype.h"

namespace shoal {

inline float read_element(DType dtype, const void* data, int64_t idx) {
  switch (dtype) {
    case DType::kF32: return static_cast<const float*>(data)[idx];
    case DType::kF16: return f16_to_f32(static_cast<const uint16_t*>(data)[idx]);
    case DType::kBF16: return bf16_to_f32(static_cast<const uint16_t*>(data)[idx]);
    default: break;
  }
  fail(ErrorCode::kInternal, "element of type ", to_string(dtype), " read as a float");
}

inline void write_element(DType dtype, void* data, int64_t idx, float value) {
  switch (dtype) {
    case DType::kF32: static_cast<float*>(data)[idx] = value; return;
    case DType::kF16: static_cast<uint16_t*>(data)[idx] = f32_to_f16(value); return;
    case DType::kBF16: static_cast<uint16_t*>(data)[idx] = f32_to_bf16(value); return;
    default: break;
  }
  fail(ErrorCode::kInternal, "element of type ", to_string(dtype), " written as a float");
}

}  // namespace shoal
