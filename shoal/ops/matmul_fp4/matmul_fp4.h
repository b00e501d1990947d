// ONNX Runtime's MatMulBlockQuantizedFp4Weight: Y = A * W^T + bias with NVFP4 weights.
//
//   W[n, k] = round_T(e2m1(code[n, k]) * e4m3(weight_scale[n, k / block_size]) * weight_scale_2)
//
// N and K follow from B. The products of W are taken in this order in f32 and rounded to A's type.
//
// Shapes    A [..., K]; B [N, K / 2], low nibble the even k; weight_scale [N, ceil(K / block_size)]; weight_scale_2,
//           input_scale: one value, rank 0 or [1]; bias [N]; Y [..., N]
// Types     A, bias, Y: f16 or bf16, the same; B u8; weight_scale u8, or the same bytes as float8e4m3fn;
//           weight_scale_2, input_scale f32
// Layout    A with any strides; rows of Y evenly spaced, its last dimension contiguous; the others contiguous
// Numerics  sums in f32, in partial sums of 128 columns; one rounding, after the bias. A row has the same bits whatever
//           stands beside it and however many threads run. input_scale is checked and not used
// Errors    kInvalidArgument names the input or attribute
// Workspace matmul_fp4_workspace_bytes(args)
// Source    ONNX Runtime com.microsoft::MatMulBlockQuantizedFp4Weight
#pragma once

#include "shoal/ops/context.h"
#include "shoal/tensor/tensor.h"

namespace shoal {

struct MatMulFp4Args {
  TensorView Y;               // [..., N]
  TensorView A;               // [..., K]
  TensorView B;               // [N, K / 2]
  TensorView weight_scale;    // [N, ceil(K / block_size)]
  TensorView weight_scale_2;  // [] or [1]
  TensorView input_scale{};   // [] or [1], optional
  TensorView bias{};          // [N], optional
  int64_t block_size = 16;
};

size_t matmul_fp4_workspace_bytes(const MatMulFp4Args& args);

void matmul_fp4(const MatMulFp4Args& args, const OpContext& context);

}  // namespace shoal
