// QuantMatrix: a weight matrix [n, k] in any format of formats.def. A view: the model's files or a repacked buffer own
// the bytes.
//
// Scaled formats: value = (number - zero) * scale, then * global_scale, each product in f32. Let groups be
// ceil(k / group_size). Scales [n, groups]; one a row is group_size = k (or 0). fp8_e4m3 also takes one scale for the
// whole matrix and, as [ceil(n / group_size), groups], one for each square block. All tensors contiguous, any shape
// with that many elements.
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
  TensorView scales{};               // scaled formats; fp8_e4m3 may have global_scale alone
  TensorView zeros{};                // affine integers, optional: u8 packed [n, ceil(groups * bits / 8)], or float
                                     // [n, groups]; absent: the middle of the codes
  TensorView global_scale{};         // mxfp4, nvfp4, fp8_e4m3, optional: f32, one value
  int64_t group_size = 0;            // values along k that share a scale; 0: the format's own, else whole rows

  int64_t num_bytes() const { return n * row_bytes(format, k); }
  const std::byte* row(int64_t n_idx) const { return codes + n_idx * row_bytes(format, k); }
};

// Decodes rows [begin, end) to f32, row-major [end - begin, k]. Any format. kInvalidArgument if the matrix lacks a row,
// k is not a whole number of blocks, or the scales or zeros do not fit.
void decode_rows(const QuantMatrix& matrix, int64_t begin, int64_t end, float* values);

}  // namespace shoal
