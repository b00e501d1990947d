// quantize and dequantize: whole arrays in any format of formats.def, as parts that stand in files and in the operators
// of the contracts.
//
// An array [..., n, k] is a stack of matrices; each row of k values is encoded as the format says:
//
//   format                    codes                              scales [..., n, groups]   zeros, global_scale
//   f32, f16, bf16            [..., n, k] of that type           -                         -
//   GGUF blocks               u8 [..., n, row_bytes]             -                         -
//   int2, int3, int4, int8    u8 [..., n, ceil(k * bits / 8)]    the array's type          zeros u8 [..., n,
//                                                                                          ceil(groups * bits / 8)]
//   fp8_e4m3                  fp8_e4m3 [..., n, k]               f32, see below            -
//   mxfp4                     u8 [..., n, ceil(k / 2)]           e8m0, groups of 32        -
//   nvfp4                     u8 [..., n, ceil(k / 2)]           e4m3, groups of 16        global_scale f32, one a
//                                                                                          matrix: [...], [1] if one
// groups = ceil(k / block_size). Values are decoded as quant_matrix.h says.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "shoal/quant/format.h"
#include "shoal/tensor/tensor.h"

namespace shoal {

struct QuantizeOptions {
  // int formats: a power of two >= 16, or <= 0 for one group a row; absent: 32.
  // fp8_e4m3: 128 for scales of 128 x 128 blocks [..., ceil(n / 128), ceil(k / 128)], 0 for one scale an array [1];
  // absent or -1: one a row [..., n, 1].
  // Other formats have their own: absent, <= 0, or exactly that.
  std::optional<int64_t> block_size{};
  // int formats: without zeros (the zero is the middle of the codes). False adds zeros: better for one-sided values;
  // not for int3, which knows only its default.
  bool symmetric = true;
};

struct QuantParts {
  Tensor codes;
  Tensor scales{};        // without data where the format has none
  Tensor zeros{};         // the same
  Tensor global_scale{};  // the same
};

// Encodes f32, f16 or bf16 values; any strides. Errors of a value: int formats half a step of the (positive) scale
// where symmetric, one step otherwise; the scale is the one of least squared error within that bound. nvfp4 by the
// scale rule of its two levels, mxfp4 by OCP MX 1.0; blocks as encode_row.
//
// kInvalidArgument: rank 0, types, values that are not finite (except f32, f16, bf16), a block_size that does not fit,
// k not a whole number of blocks. kUnsupported: a format that can be read but not made.
QuantParts quantize(Format format, const TensorView& array, const QuantizeOptions& options = {});

struct QuantPartViews {
  TensorView codes;
  TensorView scales{};
  TensorView zeros{};
  TensorView global_scale{};
};

// The array of `shape` as f32. The block size of int formats and of fp8_e4m3 follows from the last dimension of the
// scales: the power of two that gives as many groups, one column being one a row; fp8_e4m3 takes [1], one a row, or 128
// x 128 blocks. Codes may have any shape with the right number of bytes (the blocks of MatMulNBits, where they are
// whole). Contiguous parts only. zeros may also be floats, one a group.
//
// kInvalidArgument names the part that is missing or does not fit, or that has bits where no code is.
Tensor dequantize(Format format, const QuantPartViews& parts, std::span<const int64_t> shape);

}  // namespace shoal
