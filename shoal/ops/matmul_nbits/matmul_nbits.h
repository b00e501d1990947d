// ONNX Runtime's MatMulNBits: Y = A * dequantised(B)^T + bias, weights of 2, 3, 4 or 8 bits.
//
//   W[n, k] = (code[n, k] - zero[n, g]) * scales[n, g]     g = k / block_size, or g_idx[k]
//   Y[..., n] = sum over k of A[..., k] * W[n, k] + bias[n]
//
// Shapes    A [..., K]; B [N, k_blocks, block_size * bits / 8], k_blocks = ceil(K / block_size); scales [N, k_blocks]
//           or
//           [N * k_blocks]; zero_points packed [N, ceil(k_blocks * bits / 8)] or of A's type [N, k_blocks] (flat too);
//           g_idx [K]; bias [N]; Y [..., N]
// Types     A, scales, bias, Y: f32, f16 or bf16, all the same; B u8; zero_points u8 or A's type; g_idx i32
// Layout    codes are an LSB-first stream; those behind K in the last block are ignored. A with any strides; rows of Y
//           evenly spaced, its last dimension contiguous; the others contiguous at any address
// Zeros     without zero_points 2^(bits - 1); with 3 bits every one must be 4
// Empty     no rows: nothing is done. B with one or more dimensions 0, the others as above: Y is the bias, or 0; the
//           contents of the others are not read and scales, zero_points and g_idx may be empty too
// Numerics  accuracy_level 0 to 3: weights and activations in f32, exact products' sums in f32, in partial sums of 128
//           columns. accuracy_level 4: A is rounded to int8 in blocks of block_size (scale amax / 127, half to even),
//           sums of up to 128 products in int32, those in f32; g_idx takes the path of level 0. One rounding to the
//           type of Y, after the bias. A row has the same bits whatever stands beside it and however many threads run
// Errors    kInvalidArgument names the input or attribute. kUnsupported: bits 5 to 7, weight_prepacked 1 and 2 (layouts
//           of the CUDA kernels)
// Workspace matmul_nbits_workspace_bytes(args)
// Source    ONNX Runtime com.microsoft::MatMulNBits
#pragma once

#include "shoal/ops/context.h"
#include "shoal/tensor/tensor.h"

namespace shoal {

struct MatMulNBitsArgs {
  TensorView Y;              // [..., N]
  TensorView A;              // [..., K]
  TensorView B;              // [N, k_blocks, block_size * bits / 8]
  TensorView scales;         // [N, k_blocks]
  TensorView zero_points{};  // [N, ceil(k_blocks * bits / 8)] or [N, k_blocks], optional
  TensorView g_idx{};        // [K], optional
  TensorView bias{};         // [N], optional
  int64_t K = 0;             // required
  int64_t N = 0;             // required
  int64_t block_size = 0;    // required; a power of two >= 16
  int64_t bits = 4;
  int64_t accuracy_level = 0;
  int64_t weight_prepacked = 0;
};

// Of checked arguments or not: kInvalidArgument as matmul_nbits.
size_t matmul_nbits_workspace_bytes(const MatMulNBitsArgs& args);

void matmul_nbits(const MatMulNBitsArgs& args, const OpContext& context);

}  // namespace shoal
