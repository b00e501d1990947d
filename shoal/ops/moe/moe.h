// Quantised mixture of experts: each token goes through the experts its router chooses; their outputs are added up.
//
//   a1 = W1[e] x;  h = activation(a1 + b1);  a2 = W2[e] h;  y = sum over ranks j, ascending, of w_j (a2_j + b2)
//
// Two operators: QMoE (integer, fp8 and fp4 weights, scales apart) and MoEPacked (GGUF blocks).
//
// Gate and value: `swiglu` and `geglu` have twice the rows in FC1: rows 2i, 2i + 1 (interleaved) or i, I + i
// (concatenated); with FC3 the gate is FC1 and the value FC3.
//
//   swiglu     g = min(gate, limit), v = clamp(value, -limit, limit): g * (1 / (1 + exp(-alpha g))) * (v + beta);
//              with limit_after_activation min(gate * sigmoid(alpha gate), limit) instead of the clamp of the gate
//   geglu      gelu(gate) * value
//   others     relu, relu2 (its square), silu, gelu (tanh form), identity; times FC3's output where FC3 is given
//
// Numerics. Products and sums in f32, k ascending, one fused multiply-add a term, for every output alike; so a row's
// bits depend on nothing but the row, whatever stands beside it, however rows are tiled, however many threads run.
//
//   codes with scales along k (int blocks, fp4, nvfp4): p = sum over a piece of up to 32 values of x (code - zero),
//       from 0; acc = fma(p, scale, acc), acc from 0: one chain at every width
//   one scale a row or expert (int rows, fp8): scale after the sum
//   fp8 in square blocks, GGUF: the weight's value rounded to the activations' type, then the sum
//
// Rounding, the same for decode and prefill: profile S (FC1 and FC2 sums are rounded to T before their
// bias) for QMoE with a 3-bit projection and for fp8 blocks; profile F (sums stay f32 until activation, FC2 and bias
// are rounded once) for everything else. combine: acc = fma(w_j, a2_j + b2, acc) from 0, one rounding to T.
//
// Permutation: rows are grouped by expert (ascending expert, then ascending t + j * num_tokens); an expert's weights
// are read once for all its rows, and (expert, output tile) pairs are handed to threads as these become free.
//
// Layout    input, router tensors, output, scales, biases: any strides. Weights and zero points: last dimension
//           contiguous. The output may be the input's memory
// Errors    kInvalidArgument names the input or attribute and what was expected; nothing is written then
// Workspace ..._workspace_bytes(args, num_threads); the variant `ref` allocates for itself
// Variants  "cpu" (the default), "ref"
// Source    ONNX Runtime com.microsoft::QMoE, com.microsoft::MoEPacked
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <string_view>

#include "shoal/ops/context.h"
#include "shoal/ops/output_spec.h"
#include "shoal/tensor/tensor.h"

namespace shoal {

// T: f32, f16 or bf16, the type of input. N of fc1 is I, or 2 I where gate and value are fused. Routing: route_experts
// (moe_router.h). Member names are the schema's.
//
// Weights by quant_type:
//   int      u8 [E, N, ceil(bits K / 8)], LSB-first codes; scales T [E, N], or [E, N, K / block_size]; zero points u8
//            [E, N, ceil(K / block_size * bits / 8)], for 4 bits also [E, N, K / block_size]; without: 2^(bits - 1)
//   fp8      e4m3 [E, N, K]; block_size > 0: scales f32, f16 or bf16 [E, ceil(N / bs), ceil(K / bs)]; else global_scale
//            [E], or scales of these types [E, N] or [E, N, 1]
//   fp4      u8 [E, K, N / 2], low nibble = even n; weights_prepacked 1: bytes of [E, N, K / 2], low nibble = even k,
//            in a tensor of either shape; scales e8m0 [E, N, K / 32], global_scale f32 [E]. wfp4afp8: the same
//   nvfp4    as fp4 with scales e4m3 [E, N, K / 16]
struct QMoEArgs {
  TensorView output{};        // as input
  TensorView input{};         // [T, H] or [B, S, H], T
  TensorView router_probs{};  // [T, E] logits, T
  TensorView fc1_experts_weights{};
  TensorView fc1_scales{};
  TensorView fc1_experts_bias{};  // [E, N] T, optional
  TensorView fc2_experts_weights{};
  TensorView fc2_scales{};
  TensorView fc2_experts_bias{};     // [E, H] T, optional
  TensorView fc3_experts_weights{};  // optional; int and block fp8, not with a fused FC1
  TensorView fc3_scales{};
  TensorView fc3_experts_bias{};  // [E, I] T, optional
  TensorView fc1_zero_points{};   // int, block-wise only
  TensorView fc2_zero_points{};
  TensorView fc3_zero_points{};
  TensorView router_weights{};  // [T, E] T, optional: values to mix with, the choice stays with router_probs
  TensorView fc1_global_scale{};
  TensorView fc2_global_scale{};
  TensorView fc1_act_scale{};        // f32 [1] or [E]; wfp4afp8 only; checked, not used
  TensorView fc2_act_scale{};        // the same
  TensorView fc1_act_block_scale{};  // e8m0 [E, rows, H / 32]; wfp4afp8 only; checked, not used
  TensorView fc2_act_block_scale{};  // e8m0 [E, rows, I / 32]

  int64_t k = 1;
  std::string_view activation_type = "relu";  // relu, gelu, silu, swiglu, identity, relu2, geglu (int only)
  int64_t normalize_routing_weights = 0;
  int64_t use_sparse_mixer = 0;
  int64_t num_shared_experts = 0;  // the last experts, always chosen; our extension
  int64_t swiglu_fusion = 0;       // 0: FC3 is the value, or interleaved without FC3; 1: interleaved; 2: concatenated
  float activation_alpha = 1.0f;
  float activation_beta = 0.0f;
  float swiglu_limit = std::numeric_limits<float>::infinity();
  int64_t swiglu_limit_after_activation = 0;
  std::string_view quant_type = "int";  // int, fp4, nvfp4, fp8, wfp4afp8
  int64_t expert_weight_bits = 4;       // int: 2, 3, 4, 8; fp8: 8; the others: 4
  std::optional<int64_t> fc1_expert_weight_bits{};
  std::optional<int64_t> fc2_expert_weight_bits{};
  std::optional<int64_t> fc3_expert_weight_bits{};
  int64_t block_size = -1;         // <= 0: int, fp8: no blocks; fp4 kinds: 32, nvfp4: 16
  int64_t weights_prepacked = -1;  // int: -1 and 0 are raw, 1 is refused; fp4 kinds: see above; fp8: ignored
  int64_t accuracy_level = 0;      // activations are exact at every level
  int64_t row_tile_size = 0;       // tokens at a time, 0: by itself; never changes a result
};

OutputSpec qmoe_shapes(const QMoEArgs& args);  // of output; checks inputs and attributes
size_t qmoe_workspace_bytes(const QMoEArgs& args, int num_threads);
void qmoe(const QMoEArgs& args, const OpContext& context);

// Experts in GGUF blocks. Types are ggml's ids: Q4_0 2, Q4_1 3, Q5_0 6, Q5_1 7, Q8_0 8, Q2_K 10 ... Q6_K 14, IQ2_XXS
// 16, IQ2_XS 17, IQ3_XXS 18, IQ4_NL 20, IQ3_S 21, IQ2_S 22, IQ4_XS 23, MXFP4 39, NVFP4 40; others are kUnsupported by
// name. Routing: route_packed_experts (moe_router.h); a token with a weight that is not finite is NaN in every element.
struct MoEPackedArgs {
  TensorView output{};                // as input
  TensorView input{};                 // [..., H], f32, f16 or bf16
  TensorView router_probs{};          // [num_rows, E], f32, f16 or bf16
  TensorView gate_experts_weights{};  // u8 [E, I, row bytes of H values]
  TensorView up_experts_weights{};    // the same; swiglu only
  TensorView down_experts_weights{};  // u8 [E, H, row bytes of I values]
  TensorView router_weights{};        // as router_probs, optional

  int64_t gate_type = -1;
  int64_t up_type = -1;
  int64_t down_type = -1;
  std::string_view activation_type = "swiglu";  // or relu2, relu_squared
  int64_t k = 1;                                // 1..16; with router_weights 1..32
  int64_t normalize_routing_weights = 1;
  float routing_epsilon = 0.0f;        // other than 0 only with router_weights
  float routed_scaling_factor = 1.0f;  // other than 1 only with router_weights
};

OutputSpec moe_packed_shapes(const MoEPackedArgs& args);
size_t moe_packed_workspace_bytes(const MoEPackedArgs& args, int num_threads);
void moe_packed(const MoEPackedArgs& args, const OpContext& context);

}  // namespace shoal
