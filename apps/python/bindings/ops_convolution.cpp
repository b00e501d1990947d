// Convolutions for shoal.ops.
#include "apps/python/bindings/ops_call.h"
#include "shoal/ops/causal_conv/causal_conv.h"

namespace shoal::python {
namespace {

using Batched = CausalConvWithStateArgs;
using Varlen = VarlenCausalConvWithStateArgs;

const OperatorTraits<Batched> kBatched{
    .name = "causal_conv_with_state",
    .fields =
        [](Batched& a, Fields& f) {
          f.input("input", a.input);
          f.input("weight", a.weight);
          f.input("bias", a.bias);
          f.input("past_state", a.past_state);
          f.attribute("ndim", a.ndim);
          f.attribute("dilation", a.dilation);
          f.attribute("activation", a.activation);
          f.attribute("channels_last", a.channels_last);
          f.attribute("state_window", a.state_window);
          f.attribute("state_update_capacity", a.state_update_capacity);
          f.attribute("state_channels_last", a.state_channels_last);
          f.attribute("state_length", a.state_length);
          f.attribute("input_channel_offset", a.input_channel_offset);
          f.attribute("input_channels", a.input_channels);
        },
    .specs = [](Batched& a) -> std::vector<OutputSpec> {
      const CausalConvWithStateShapes shapes = causal_conv_with_state_shapes(a);
      return {shapes.output, shapes.present_state, shapes.state_update};
    },
    .workspace = no_workspace<Batched>,
    .run = causal_conv_with_state,
    .outputs = {{{"output"}, &Batched::output},
                {{"present_state", "past_state"}, &Batched::present_state},
                {{"state_update"}, &Batched::state_update}},
    .strided_outputs = true,
};

const OperatorTraits<Varlen> kVarlen{
    .name = "varlen_causal_conv_with_state",
    .fields =
        [](Varlen& a, Fields& f) {
          f.input("input", a.input);
          f.input("weight", a.weight);
          f.input("cumulative_sequence_length", a.cumulative_sequence_length);
          f.input("bias", a.bias);
          f.input("initial_state", a.initial_state);
          f.input("capture_count", a.capture_count);
          f.input("kernel_delta", a.kernel_delta);
          f.input("previous_mask", a.previous_mask);
          f.attribute("activation", a.activation);
          f.attribute("dilation", a.dilation);
          f.attribute("state_update_capacity", a.state_update_capacity);
          f.attribute("group_size", a.group_size);
          f.attribute("delta_offset", a.delta_offset);
        },
    .specs = [](Varlen& a) -> std::vector<OutputSpec> {
      const VarlenCausalConvWithStateShapes shapes = varlen_causal_conv_with_state_shapes(a);
      return {shapes.output, shapes.final_state, shapes.state_update};
    },
    .workspace = no_workspace<Varlen>,
    .run = varlen_causal_conv_with_state,
    .outputs = {{{"output"}, &Varlen::output},
                {{"final_state", "initial_state"}, &Varlen::final_state},
                {{"state_update"}, &Varlen::state_update}},
    .strided_outputs = true,
};

}  // namespace

void add_convolutions() {
  add_operator(kBatched);
  add_operator(kVarlen);
}

}  // namespace shoal::python
