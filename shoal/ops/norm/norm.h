// Root-mean-square normalisation over the last dimension, optionally of a sum.
//
//   x'[t, h]  = x[t, h] + residual[t, h]                 (if residual is given; residual_out receives x')
//   out[t, h] = weight[h] * x'[t, h] / sqrt(mean over h of x'[t, h]^2 + eps)
//
// Shapes    out, x, residual, residual_out [num_tokens, hidden]; weight [hidden]
//           (per-head norms pass [num_tokens * num_heads, head_dim])
// Types     out, x, residual, residual_out: f32, f16 or bf16, the same; weight: f32 or that type
// Layout    last dimension contiguous; rows may be strided; out may be x; residual_out may be residual
// Numerics  sums in f32, each row by itself in one fixed order; one rounding, at the store (residual_out: its own)
// Errors    kInvalidArgument if any of the above does not hold
// Source    Zhang and Sennrich 2019, equation 4
// Gemma's (1 + weight) is folded into the weight when a model is loaded.
#pragma once

#include "shoal/ops/context.h"
#include "shoal/tensor/tensor.h"

namespace shoal {

struct RmsNormArgs {
  TensorView out;             // [num_tokens, hidden]
  TensorView x;               // [num_tokens, hidden]
  TensorView weight;          // [hidden]
  TensorView residual{};      // [num_tokens, hidden], optional
  TensorView residual_out{};  // [num_tokens, hidden]; required with residual
  float eps = 1e-5f;
};

void rms_norm(const RmsNormArgs& args, const OpContext& context);

}  // namespace shoal
