// ONNX Runtime's MatMulBlockQuantizedFp8Weight: Y = A' * W^T + bias with FP8 weights.
//
//   W[n, k] = e4m3(B[n, k]) * b_scale[n, k / block_size]
//   A' = A, or with a_scale round_T(e4m3(A / a_scale) * a_scale): quotient in f32, to nearest even, saturating at 448
//
// N and K follow from B.
//
// Shapes    A [..., K]; B [N, K]; b_scale [N, ceil(K / block_size)]; a_scale: one value, rank 0 or [1]; bias [N];
//           Y [..., N]
// Types     A, bias, Y: f16 or bf16, the same; B float8e4m3fn; b_scale, a_scale f32
// Layout    A with any strides; rows of Y evenly spaced, its last dimension contiguous; the others contiguous
// Numerics  weights stay f32; sums in f32, in partial sums of 128 columns; one rounding, after the bias. A row has the
//           same bits whatever stands beside it and however many threads run
// Errors    kInvalidArgument names the input or attribute
// Workspace matmul_fp8_workspace_bytes(args)
// Source    ONNX Runtime com.microsoft::MatMulBlockQuantizedFp8Weight
#pragma once

#include "shoal/ops/context.h"
#include "shoal/tensor/tensor.h"

namespace shoal {

struct MatMulFp8Args {
  TensorView Y;          // [..., N]
  TensorView A;          // [..., K]
  TensorView B;          // [N, K]
  TensorView b_scale;    // [N, ceil(K / block_size)]
  TensorView a_scale{};  // [] or [1], optional
  TensorView bias{};     // [N], optional
  int64_t block_size = 128;
};

size_t matmul_fp8_workspace_bytes(const MatMulFp8Args& args);

void matmul_fp8(const MatMulFp8Args& args, const OpContext& context);

}  // namespace shoal
