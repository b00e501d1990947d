// Gates of feed-forward layers, element by element.
//
//   silu       h = g / (1 + exp(-g)) * v            (SwiGLU with alpha 1, beta 0)
//   gelu_tanh  h = 0.5 g (1 + tanh(sqrt(2/pi) (g + 0.044715 g^3))) * v
//   gelu       h = 0.5 g (1 + erf(g / sqrt 2)) * v
//   relu       h = max(0, g) * v
//   sigmoid    h = v / (1 + exp(-g))
//   clamped    h = g' / (1 + exp(-alpha g')) * (v' + 1),  g' = min(g, limit), v' = v clamped to -limit ... limit
//
// Shapes    out, gate, value [num_tokens, width]; gate and value may be the two halves of one [num_tokens, 2 width]
// Types     out, gate, value: f32, f16 or bf16, the same
// Layout    last dimension contiguous; rows may be strided; out may be gate or value
// Numerics  f32, one rounding at the store; exp and tanh within 4 ulp of f32
// Errors    kInvalidArgument if any of the above does not hold
// Source    Shazeer 2020; clamped: gpt-oss
#pragma once

#include <limits>

#include "shoal/ops/context.h"
#include "shoal/tensor/tensor.h"

namespace shoal {

enum class Gate : uint8_t { kSilu, kGeluTanh, kGelu, kRelu, kSigmoid, kClamped };

struct GatedActivationArgs {
  TensorView out;    // [num_tokens, width]
  TensorView gate;   // [num_tokens, width]
  TensorView value;  // [num_tokens, width]
  Gate kind = Gate::kSilu;
  float alpha = 1.0f;  // clamped only, as limit
  float limit = std::numeric_limits<float>::infinity();
};

void gated_activation(const GatedActivationArgs& args, const OpContext& context);

// x = cap * tanh(x / cap), in place; x of any shape, f32, contiguous; cap above 0.
void softcap(const TensorView& x, float cap, const OpContext& context);

}  // namespace shoal
