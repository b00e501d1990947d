// Quantised mixtures of experts and their routers for shoal.ops.
#include "apps/python/bindings/ops_call.h"
#include "shoal/ops/moe/moe.h"
#include "shoal/ops/moe_router/moe_router.h"

namespace shoal::python {
namespace {

using QMoE = QMoEArgs;
using Packed = MoEPackedArgs;
using Router = MoERouterArgs;
using GroupRouter = MoEGroupRouterArgs;

const OperatorTraits<QMoE> kQMoE{
    .name = "qmoe",
    .fields =
        [](QMoE& a, Fields& f) {
          f.input("input", a.input);
          f.input("router_probs", a.router_probs);
          f.input("fc1_experts_weights", a.fc1_experts_weights, Layout::kInner);
          f.input("fc1_scales", a.fc1_scales);
          f.input("fc1_experts_bias", a.fc1_experts_bias);
          f.input("fc2_experts_weights", a.fc2_experts_weights, Layout::kInner);
          f.input("fc2_scales", a.fc2_scales);
          f.input("fc2_experts_bias", a.fc2_experts_bias);
          f.input("fc3_experts_weights", a.fc3_experts_weights, Layout::kInner);
          f.input("fc3_scales", a.fc3_scales);
          f.input("fc3_experts_bias", a.fc3_experts_bias);
          f.input("fc1_zero_points", a.fc1_zero_points, Layout::kInner);
          f.input("fc2_zero_points", a.fc2_zero_points, Layout::kInner);
          f.input("fc3_zero_points", a.fc3_zero_points, Layout::kInner);
          f.input("router_weights", a.router_weights);
          f.input("fc1_global_scale", a.fc1_global_scale);
          f.input("fc2_global_scale", a.fc2_global_scale);
          f.input("fc1_act_scale", a.fc1_act_scale);
          f.input("fc2_act_scale", a.fc2_act_scale);
          f.input("fc1_act_block_scale", a.fc1_act_block_scale);
          f.input("fc2_act_block_scale", a.fc2_act_block_scale);
          f.attribute("k", a.k);
          f.attribute("activation_type", a.activation_type);
          f.attribute("normalize_routing_weights", a.normalize_routing_weights);
          f.attribute("use_sparse_mixer", a.use_sparse_mixer);
          f.attribute("num_shared_experts", a.num_shared_experts);
          f.attribute("swiglu_fusion", a.swiglu_fusion);
          f.attribute("activation_alpha", a.activation_alpha);
          f.attribute("activation_beta", a.activation_beta);
          f.attribute("swiglu_limit", a.swiglu_limit);
          f.attribute("swiglu_limit_after_activation", a.swiglu_limit_after_activation);
          f.attribute("quant_type", a.quant_type);
          f.attribute("expert_weight_bits", a.expert_weight_bits);
          f.attribute("fc1_expert_weight_bits", a.fc1_expert_weight_bits);
          f.attribute("fc2_expert_weight_bits", a.fc2_expert_weight_bits);
          f.attribute("fc3_expert_weight_bits", a.fc3_expert_weight_bits);
          f.attribute("block_size", a.block_size);
          f.attribute("weights_prepacked", a.weights_prepacked);
          f.attribute("accuracy_level", a.accuracy_level);
          f.attribute("row_tile_size", a.row_tile_size);
        },
    .specs = [](QMoE& a) -> std::vector<OutputSpec> { return {qmoe_shapes(a)}; },
    .workspace = qmoe_workspace_bytes,
    .run = qmoe,
    .outputs = {{{.name = "output", .alias = "input"}, &QMoE::output}},
};

const OperatorTraits<Packed> kPacked{
    .name = "moe_packed",
    .fields =
        [](Packed& a, Fields& f) {
          f.input("input", a.input);
          f.input("router_probs", a.router_probs);
          f.input("gate_experts_weights", a.gate_experts_weights, Layout::kInner);
          f.input("up_experts_weights", a.up_experts_weights, Layout::kInner);
          f.input("down_experts_weights", a.down_experts_weights, Layout::kInner);
          f.input("router_weights", a.router_weights);
          f.packed_type("gate_type", a.gate_type);
          f.packed_type("up_type", a.up_type);
          f.packed_type("down_type", a.down_type);
          f.attribute("activation_type", a.activation_type);
          f.attribute("k", a.k);
          f.attribute("normalize_routing_weights", a.normalize_routing_weights);
          f.attribute("routing_epsilon", a.routing_epsilon);
          f.attribute("routed_scaling_factor", a.routed_scaling_factor);
        },
    .specs = [](Packed& a) -> std::vector<OutputSpec> { return {moe_packed_shapes(a)}; },
    .workspace = moe_packed_workspace_bytes,
    .run = moe_packed,
    .outputs = {{{.name = "output", .alias = "input"}, &Packed::output}},
};

const OperatorTraits<Router> kRouter{
    .name = "moe_router",
    .fields =
        [](Router& a, Fields& f) {
          f.input("scores", a.scores);
          f.input("bias", a.bias);
          f.input("expert_ids", a.expert_ids);
          f.attribute("topk", a.topk);
          f.attribute("local_expert_start", a.local_expert_start);
          f.attribute("local_expert_count", a.local_expert_count);
          f.attribute("route_scale", a.route_scale);
          f.attribute("scoring", a.scoring);
          f.attribute("selection", a.selection);
          f.attribute("dtype", a.dtype);
        },
    .specs = [](Router& a) -> std::vector<OutputSpec> {
      const MoERouterShapes shapes = moe_router_shapes(a);
      return {shapes.router_probs, shapes.weight_scale};
    },
    .workspace = no_workspace<Router>,
    .run = moe_router,
    .outputs = {{{"router_probs"}, &Router::router_probs}, {{"weight_scale"}, &Router::weight_scale}},
};

const OperatorTraits<GroupRouter> kGroupRouter{
    .name = "moe_group_router",
    .fields =
        [](GroupRouter& a, Fields& f) {
          f.input("logits", a.logits);
          f.input("expert_bias", a.expert_bias);
          f.input("projection_weight", a.projection_weight);
          f.attribute("top_k", a.top_k);
          f.attribute("n_group", a.n_group);
          f.attribute("topk_group", a.topk_group);
          f.attribute("group_topk", a.group_topk);
          f.attribute("router_sentinel", a.router_sentinel);
          f.attribute("full_scores", a.full_scores);
        },
    .specs = [](GroupRouter& a) -> std::vector<OutputSpec> {
      const MoEGroupRouterShapes shapes = moe_group_router_shapes(a);
      return {shapes.router_probs, shapes.selection_scores, shapes.router_weights};
    },
    .workspace = no_workspace<GroupRouter>,
    .run = moe_group_router,
    .outputs = {{{"router_probs"}, &GroupRouter::router_probs},
                {{"selection_scores"}, &GroupRouter::selection_scores},
                {{"router_weights"}, &GroupRouter::router_weights}},
};

}  // namespace

void add_experts() {
  add_operator(kQMoE);
  add_operator(kPacked);
  add_operator(kRouter);
  add_operator(kGroupRouter);
}

}  // namespace shoal::python
