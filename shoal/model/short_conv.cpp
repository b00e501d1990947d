#include "shoal/model/short_conv.h"

#include "shoal/cpu/thread_pool.h"
#include "shoal/model/views.h"
#include "shoal/ops/causal_conv/causal_conv.h"

namespace shoal {
namespace {

// out = a * b, row by row; rows may be strided.
void multiply(const TensorView& a, const TensorView& b, const TensorView& out, const OpContext& context) {
  context.pool->parallel_for(out.dim(0), 4, [&](int64_t begin, int64_t end, int) {
    for (int64_t t = begin; t < end; ++t) {
      const float* x = a.as<float>() + t * a.stride(0);
      const float* y = b.as<float>() + t * b.stride(0);
      float* to = out.as<float>() + t * out.stride(0);
      for (int64_t i = 0; i < out.dim(1); ++i) {
        to[i] = x[i] * y[i];
      }
    }
  });
}

}  // namespace

ShortConv::ShortConv(Loader& loader, const ShortConvNames& names, int64_t layer_idx, int64_t hidden, int64_t num_taps)
    : hidden_(hidden), num_taps_(num_taps) {
  in_ = loader.linear({{layer_name(names.in, layer_idx), 3 * hidden}}, hidden);
  const std::string taps = layer_name(names.taps, layer_idx);
  taps_ = names.is_flat ? loader.vector(taps + ".weight", {hidden, num_taps})
                        : loader.vector(taps + ".weight", {hidden, 1, num_taps});
  if (loader.has(taps + ".bias")) {
    bias_ = loader.vector(taps + ".bias", {hidden});
  }
}

StateLayerShape ShortConv::state_shape() const {
  return {.conv_dtype = DType::kF32, .conv_channels = hidden_, .conv_reach = num_taps_ - 1};
}

size_t ShortConv::workspace_bytes(const StepLimits& limits) const {
  const int64_t num_tokens = limits.max_tokens;
  const auto bytes = [](int64_t count) { return Workspace::bytes_for<float>(static_cast<size_t>(count)); };
  return bytes(num_tokens * 3 * hidden_) + bytes(num_tokens * hidden_) +
         SlotRows::workspace_bytes(limits, hidden_ * (num_taps_ - 1)) + matmul_workspace_bytes(in_.weight, num_tokens);
}

void ShortConv::forward(const TensorView& h, const TensorView& out, const Batch& batch, const StatePool& states,
                        size_t state_idx, const OpContext& context) const {
  Workspace& workspace = *context.workspace;
  const Workspace::Scope scope(workspace);
  const TensorView projected = take({h.dim(0), 3 * hidden_}, workspace);
  const TensorView gated = take({h.dim(0), hidden_}, workspace);
  const SlotRows window(batch, workspace, [&](StateSlot slot) { return states.conv_state(state_idx, slot); });
  const auto third = [&](int64_t i) { return columns(projected, i * hidden_, hidden_); };
  in_(h, projected, context);
  multiply(third(0), third(2), gated, context);
  varlen_causal_conv_with_state({.output = out,
                                 .final_state = window.rows(),
                                 .input = gated,
                                 .weight = TensorView(taps_.view().data, DType::kF32, {hidden_, 1, num_taps_}),
                                 .cumulative_sequence_length = batch.cu_q_lens,
                                 .bias = bias_,
                                 .initial_state = window.rows()},
                                context);
  window.store();
  multiply(third(1), out, out, context);
}

}  // namespace shoal
