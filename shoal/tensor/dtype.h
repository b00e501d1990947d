// Element types of tensors. Block formats of weights are not element types: see quant/format.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace shoal {

enum class DType : uint8_t { kF32, kF16, kBF16, kF8E4M3, kF8E8M0, kI8, kU8, kI32, kI64, kBool };

constexpr size_t size_of(DType type) {
  switch (type) {
    case DType::kF32:
    case DType::kI32: return 4;
    case DType::kF16:
    case DType::kBF16: return 2;
    case DType::kI64: return 8;
    case DType::kF8E4M3:
    case DType::kF8E8M0:
    case DType::kI8:
    case DType::kU8:
    case DType::kBool: return 1;
  }
  return 0;
}

constexpr std::string_view to_string(DType type) {
  switch (type) {
    case DType::kF32: return "float32";
    case DType::kF16: return "float16";
    case DType::kBF16: return "bfloat16";
    case DType::kF8E4M3: return "float8e4m3fn";
    case DType::kF8E8M0: return "float8e8m0";
    case DType::kI8: return "int8";
    case DType::kU8: return "uint8";
    case DType::kI32: return "int32";
    case DType::kI64: return "int64";
    case DType::kBool: return "bool";
  }
  return "unknown";
}

}  // namespace shoal
