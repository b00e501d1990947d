// Routers: which experts a token goes to and with what weights.
//
// Ties go to the lower expert everywhere. Rows are independent: a row's bits do not depend on its neighbours, on their
// number or on the threads.
//
// Errors    kInvalidArgument names the input or attribute and what was expected; nothing is written then
// Source    ONNX Runtime com.microsoft::QMoE (its router), MoEPacked (its router), MoERouter, MoEGroupRouter
#pragma once

#include <cstdint>
#include <string_view>

#include "shoal/ops/context.h"
#include "shoal/ops/output_spec.h"
#include "shoal/tensor/tensor.h"

namespace shoal {

// The router of QMoE: softmax over all routed experts, then the top_k largest logits, largest first.
//
//   p[e] = exp(l[e] - max l) / sum over e of exp(l[e] - max l)
//
// in f32. The sum has one order: partial sums of experts i, i + 32, ... ascending, for i < 32, joined by a butterfly of
// distance 16, 8, 4, 2, 1. Weights: p of the chosen; with normalize divided by their sum (in rank order) if that is
// above 1e-6. A NaN logit counts as -inf and weighs 0. If m logits are +inf, each has p = 1/m, the others 0. A row of
// nothing but -inf and NaN chooses 0 ... top_k - 1 with weight 0.
//
// router_weights   weights are its values at the chosen experts, of any sign; normalize divides by their sum, a sum of
// 0
//                  gives weights of 0
// sparse_mixer     top_k 2, 8 or 16 experts: the best expert weighs 1 / (sum of exp(l[e] - l1) over the experts with
//                  l1 - l[e] <= 0.02 max(|l[e]|, l1)); the second likewise without the first. normalize does not apply
// num_shared       the last columns are gates g of shared experts: chosen always, after the routed ones, in order, with
//                  weight 1 / (1 + exp(-g)); softmax, choice and normalize are over the other columns
//
// Shapes    expert_ids, expert_weights [num_tokens, top_k + num_shared]; router_logits, router_weights [num_tokens,
//           num_experts]
// Types     router_logits, router_weights: f32, f16 or bf16, the same
struct RouteExpertsArgs {
  TensorView expert_ids{};      // i32
  TensorView expert_weights{};  // f32
  TensorView router_logits{};
  TensorView router_weights{};  // optional
  int64_t top_k = 1;
  bool normalize = false;
  bool sparse_mixer = false;
  int64_t num_shared = 0;
  float scale = 1.0f;  // of all weights but the shared experts'
};
void route_experts(const RouteExpertsArgs& args, const OpContext& context);

// The router of MoEPacked. Choice by router_probs: +inf before finite before -inf before NaN.
//
// Without router_weights: as route_experts. With them: weights are their values at the chosen experts; with normalize
// times 1 / sum, or divided by sum + epsilon if epsilon > 0 (sum in rank order; 0 where the divisor is 0); then times
// scale. A weight that is not finite is left so: the caller's row is lost.
struct RoutePackedArgs {
  TensorView expert_ids{};      // [num_tokens, top_k] i32
  TensorView expert_weights{};  // [num_tokens, top_k] f32
  TensorView router_probs{};    // [num_tokens, num_experts]
  TensorView router_weights{};  // the same, optional
  int64_t top_k = 1;
  bool normalize = true;
  float epsilon = 0.0f;  // the last two only with router_weights
  float scale = 1.0f;
};
void route_packed_experts(const RoutePackedArgs& args, const OpContext& context);

// Router with sqrt(softplus) scores, for the experts [local_expert_start, + local_expert_count) of this device.
//
//   o = sqrt(softplus(scores)),  softplus(a) = a > 0 ? a + log1p(exp(-a)) : log1p(exp(a))
//   chosen: the topk largest o + bias (bias not in the weights), or expert_ids;  w = o / sum of the chosen o
//   router_probs[t, e - start] = log(w) for chosen local experts, else -1e30 (f16: -1e4); the same where w is 0
//   weight_scale[t] = (sum of the local w) * route_scale
//
// All in f32; sums in rank order; one rounding of router_probs. NaN scores are chosen last. Softmax of a row of
// router_probs times weight_scale gives w * route_scale.
struct MoERouterArgs {
  TensorView router_probs{};  // [num_tokens, local_expert_count], dtype
  TensorView weight_scale{};  // [num_tokens, 1] f32
  TensorView scores{};        // [num_tokens, num_experts] f32
  TensorView bias{};          // [num_experts] f32, optional; only with selection noaux_tc
  TensorView expert_ids{};    // [num_tokens, topk] i64, optional: takes the choice's place

  int64_t topk = 1;  // 1..32
  int64_t local_expert_start = 0;
  int64_t local_expert_count = 0;  // at least 1
  float route_scale = 1.0f;
  std::string_view scoring = "sqrt_softplus";
  std::string_view selection = "noaux_tc";  // or topk
  DType dtype = DType::kF32;                // of router_probs: f32, f16, bf16
};

struct MoERouterShapes {
  OutputSpec router_probs;
  OutputSpec weight_scale;
};
MoERouterShapes moe_router_shapes(const MoERouterArgs& args);
void moe_router(const MoERouterArgs& args, const OpContext& context);

// Group-limited router: s = 1 / (1 + exp(-logits)) in f32, c = s + expert_bias.
//
// Default: a group's score is the sum of its group_topk largest c, largest first; the topk_group best groups are kept;
// of their experts the top_k with the largest c are chosen. router_probs = log(max(s, 1e-20)) at the chosen, else
// router_sentinel. A NaN leaves its group's sum while others suffice; a group whose sum is NaN is last, a NaN c too; a
// chosen NaN is written as NaN.
//
// full_scores: selection_scores = c and router_weights = s instead, whole, in f32; needs n_group = topk_group = 1 and
// at most 512 experts. With projection_weight (implies full_scores) the logits are those of a dense layer, logits *
// projection_weight^T, products and sums in f32, not rounded in between.
struct MoEGroupRouterArgs {
  TensorView router_probs{};       // [num_tokens, num_experts], type of logits; without full_scores
  TensorView selection_scores{};   // [num_tokens, num_experts] f32; with full_scores
  TensorView router_weights{};     // [num_tokens, num_experts] f32; with full_scores
  TensorView logits{};             // [..., num_experts], f32, f16 or bf16; with a projection [num_tokens, width]
  TensorView expert_bias{};        // [num_experts] f32
  TensorView projection_weight{};  // [num_experts, width], type of logits, optional; width a multiple of 256

  int64_t top_k = 0;  // at least 1
  int64_t n_group = 1;
  int64_t topk_group = 1;
  int64_t group_topk = 2;  // clamped to the size of a group
  float router_sentinel = -10000.0f;
  bool full_scores = false;
};

struct MoEGroupRouterShapes {
  OutputSpec router_probs;
  OutputSpec selection_scores;
  OutputSpec router_weights;
};
MoEGroupRouterShapes moe_group_router_shapes(const MoEGroupRouterArgs& args);
void moe_group_router(const MoEGroupRouterArgs& args, const OpContext& context);

}  // namespace shoal
