// QuantMatrix: a weight matrix [n, k] in any format of formats.def. A view: the model's files or a repacked buffer own
// the bytes.
#pragma once

#include <cstdint>

#include "shoal/quant/format.h"
#include "shoal/tensor/tensor.h"

namespace shoal {

struct QuantMatrix {
  Format format = Format::kF32;
  int64_t n = 0;                     // rows: outputs
  int64_t k = 0;                     // columns: inputs, the reduction
  const std::byte* codes = nullptr;  // n rows of row_bytes(format, k), contiguous; any alignment
  TensorView scales{};               // formats whose scales stand apart; absent for plain and block formats
  TensorView zeros{};                // affine integer formats, optional
  TensorView global_scale{};         // nvfp4 and kin, optional
  int64_t group_size = 0;  // values that share a scale, for formats whose scales stand apart; 0: not applicable

  int64_t num_bytes() const { return n * row_bytes(format, k); }
  const std::byte* row(int64_t n_idx) const { return codes + n_idx * row_bytes(format, k); }
};

// Decodes rows [begin, end) to f32, row-major [end - begin, k]. Any format. kInvalidArgument if the matrix lacks a row
// or k is not a whole number of blocks.
void decode_rows(const QuantMatrix& matrix, int64_t begin, int64_t end, float* values);

}  // namespace shoal
