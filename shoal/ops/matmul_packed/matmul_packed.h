// ONNX Runtime's MatMulPacked: Y = activation(round_T(A * W^T * global_scale)) with the weights of GGUF blocks.
//
//   W[n, k] = round_T(the value that row n of B holds at k); not rounded if `unrounded` and A has at most 8 rows
//
// Shapes    A [..., K]; B [N, row_bytes]; global_scale: one value, rank 0 or [1]; Y [..., N]
// Types     A, Y: f32, f16 or bf16, the same; B u8; global_scale f32
// Layout    A with any strides; rows of Y evenly spaced, its last dimension contiguous; B contiguous, at any address
// Numerics  sums in f32, in partial sums of 128 columns; global_scale multiplies the sum before the one rounding to T.
//           The activation is computed in f32 from that rounded value and rounded again. A row has the same bits
//           whatever stands beside it and however many threads run
// Errors    kInvalidArgument names the input or attribute: among others global_scale with another type than NVFP4, and
//           K that is no whole number of blocks. kUnsupported: a packed_type of ggml that is not listed here
// Workspace matmul_packed_workspace_bytes(args)
// Source    ONNX Runtime com.microsoft::MatMulPacked
#pragma once

#include <string_view>

#include "shoal/ops/context.h"
#include "shoal/tensor/tensor.h"

namespace shoal {

struct MatMulPackedArgs {
  TensorView Y;               // [..., N]
  TensorView A;               // [..., K]
  TensorView B;               // [N, row_bytes]
  TensorView global_scale{};  // [] or [1], optional, NVFP4 only
  int64_t packed_type =
      -1;         // required; ggml's id: Q4_0 2, Q4_1 3, Q5_0 6, Q5_1 7, Q8_0 8, Q2_K 10 ... Q6_K 14, IQ2_XXS
                  // 16, IQ2_XS 17, IQ3_XXS 18, IQ4_NL 20, IQ3_S 21, IQ2_S 22, IQ4_XS 23, MXFP4 39, NVFP4 40
  int64_t N = 0;  // required
  int64_t K = 0;  // required; whole blocks
  std::string_view activation_type = "none";  // none, relu2 (relu_squared), silu
  bool unrounded = false;
};

// The id of a packed type's name, in any case: "Q4_K", "mxfp4", also "gguf_mxfp4". kInvalidArgument for names that are
// none.
int64_t packed_type_from_name(std::string_view name);

size_t matmul_packed_workspace_bytes(const MatMulPackedArgs& args);

void matmul_packed(const MatMulPackedArgs& args, const OpContext& context);

}  // namespace shoal
