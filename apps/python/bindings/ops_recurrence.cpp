// Recurrences for shoal.ops.
#include "apps/python/bindings/ops_call.h"
#include "shoal/ops/delta_net/delta_net.h"
#include "shoal/ops/mamba2/mamba2.h"

namespace shoal::python {
namespace {

using Delta = GatedDeltaNetArgs;
using Linear = LinearAttentionArgs;
using Gate = LinearAttentionGateArgs;
using Mamba = Mamba2VerifyArgs;

const OperatorTraits<Delta> kDelta{
    .name = "gated_delta_net",
    .fields =
        [](Delta& a, Fields& f) {
          f.input("query", a.query);
          f.input("key", a.key);
          f.input("value", a.value);
          f.input("cu_seqlens", a.cu_seqlens);
          f.input("decay", a.decay);
          f.input("beta", a.beta);
          f.input("initial_state", a.initial_state);
          f.input("a_log", a.a_log);
          f.input("dt_bias", a.dt_bias);
          f.input("capture_count", a.capture_count);
          f.input("state_update_active", a.state_update_active, Layout::kHost);
          f.attribute("update_rule", a.update_rule);
          f.attribute("scale", a.scale);
          f.attribute("gate_activation", a.gate_activation);
          f.attribute("beta_activation", a.beta_activation);
          f.attribute("qk_l2_norm", a.qk_l2_norm);
          f.attribute("chunk_size", a.chunk_size);
          f.attribute("gate_lower_bound", a.gate_lower_bound);
          f.attribute("state_update_capacity", a.state_update_capacity);
        },
    .specs = [](Delta& a) -> std::vector<OutputSpec> {
      const GatedDeltaNetShapes shapes = gated_delta_net_shapes(a);
      return {shapes.output, shapes.final_state, shapes.state_update};
    },
    .workspace = gated_delta_net_workspace_bytes,
    .run = gated_delta_net,
    .outputs = {{{"output"}, &Delta::output},
                {{"final_state", "initial_state"}, &Delta::final_state},
                {{"state_update"}, &Delta::state_update}},
    .strided_outputs = true,
};

const OperatorTraits<Linear> kLinear{
    .name = "linear_attention",
    .fields =
        [](Linear& a, Fields& f) {
          f.input("query", a.query);
          f.input("key", a.key);
          f.input("value", a.value);
          f.input("past_state", a.past_state);
          f.input("decay", a.decay);
          f.input("beta", a.beta);
          f.attribute("q_num_heads", a.q_num_heads);
          f.attribute("kv_num_heads", a.kv_num_heads);
          f.attribute("update_rule", a.update_rule);
          f.attribute("scale", a.scale);
          f.attribute("chunk_size", a.chunk_size);
          f.attribute("state_window", a.state_window);
        },
    .specs = [](Linear& a) -> std::vector<OutputSpec> {
      const LinearAttentionShapes shapes = linear_attention_shapes(a);
      return {shapes.output, shapes.present_state};
    },
    .workspace = linear_attention_workspace_bytes,
    .run = linear_attention,
    .outputs = {{{"output"}, &Linear::output}, {{"present_state", "past_state"}, &Linear::present_state}},
    .strided_outputs = true,
};

const OperatorTraits<Gate> kGate{
    .name = "linear_attention_gate",
    .fields =
        [](Gate& a, Fields& f) {
          f.input("a", a.a);
          f.input("dt_bias", a.dt_bias);
          f.input("decay_scale", a.decay_scale);
          f.input("b", a.b);
        },
    .specs = [](Gate& a) -> std::vector<OutputSpec> {
      const LinearAttentionGateShapes shapes = linear_attention_gate_shapes(a);
      return {shapes.decay, shapes.beta};
    },
    .workspace = no_workspace<Gate>,
    .run = linear_attention_gate,
    .outputs = {{{"decay"}, &Gate::decay}, {{"beta"}, &Gate::beta}},
    .strided_outputs = true,
};

const OperatorTraits<Mamba> kMamba{
    .name = "mamba2_verify",
    .fields =
        [](Mamba& a, Fields& f) {
          f.input("projection", a.projection);
          f.input("conv_state", a.conv_state);
          f.input("ssm_state", a.ssm_state);
          f.input("conv_weight", a.conv_weight);
          f.input("conv_bias", a.conv_bias);
          f.input("dt_bias", a.dt_bias);
          f.input("A_negative", a.A_negative);
          f.input("D", a.D);
          f.input("norm_weight", a.norm_weight);
          f.input("state_row", a.state_row, Layout::kHost);
          f.attribute("heads", a.heads);
          f.attribute("n_groups", a.n_groups);
          f.attribute("head_dim", a.head_dim);
          f.attribute("d_state", a.d_state);
          f.attribute("epsilon", a.epsilon);
          f.attribute("time_step_min", a.time_step_min);
        },
    .specs = [](Mamba& a) -> std::vector<OutputSpec> {
      const Mamba2VerifyShapes shapes = mamba2_verify_shapes(a);
      return {shapes.Y, shapes.conv_snapshots, shapes.ssm_snapshots, shapes.xbc, shapes.readout};
    },
    .workspace = mamba2_verify_workspace_bytes,
    .run = mamba2_verify,
    .outputs = {{{"Y"}, &Mamba::Y},
                {{"conv_snapshots", "conv_state"}, &Mamba::conv_snapshots},
                {{"ssm_snapshots", "ssm_state"}, &Mamba::ssm_snapshots},
                {{.name = "xbc", .on_request = true}, &Mamba::xbc},
                {{.name = "readout", .on_request = true}, &Mamba::readout}},
    .strided_outputs = true,
};

}  // namespace

void add_recurrences() {
  add_operator(kDelta);
  add_operator(kLinear);
  add_operator(kGate);
  add_operator(kMamba);
}

}  // namespace shoal::python
