#include "shoal/model/delta_net.h"

#include <algorithm>
#include <initializer_list>

#include "shoal/cpu/thread_pool.h"
#include "shoal/model/views.h"
#include "shoal/ops/activation/activation.h"
#include "shoal/ops/causal_conv/causal_conv.h"
#include "shoal/ops/delta_net/delta_net.h"
#include "shoal/ops/norm/norm.h"

namespace shoal {
DeltaNet::DeltaNet(Loader& loader, const DeltaNetConfig& config, const DeltaNetNames& names, int64_t layer_idx,
                   int64_t hidden)
    : config_(config), is_by_key_head_(!names.qkvz.empty()) {
  const auto name = [&](const std::string& pattern) { return layer_name(pattern, layer_idx); };
  if (is_by_key_head_) {
    qkvz_ = loader.linear({{name(names.qkvz), config.conv_width() + config.value_width()}}, hidden);
    ba_ = loader.exact_linear({{name(names.ba), 2 * config.num_value_heads}}, hidden);
  } else {
    qkvz_ = loader.linear({{name(names.qkv), config.conv_width()}, {name(names.z), config.value_width()}}, hidden);
    ba_ =
        loader.exact_linear({{name(names.b), config.num_value_heads}, {name(names.a), config.num_value_heads}}, hidden);
  }
  taps_ = loader.vector(name(names.conv) + ".weight", {config.conv_width(), 1, config.num_taps});
  norm_ = loader.vector(name(names.norm) + ".weight", {config.value_dim});
  a_log_ = loader.vector(name(names.a_log), {config.num_value_heads});
  dt_bias_ = loader.vector(name(names.dt_bias), {config.num_value_heads});
}

StateLayerShape DeltaNet::state_shape() const {
  return {.conv_dtype = DType::kF32,
          .conv_channels = config_.conv_width(),
          .conv_reach = config_.num_taps - 1,
          .num_heads = config_.num_value_heads,
          .num_key_heads = config_.num_key_heads,
          .value_size = config_.value_dim,
          .key_size = config_.key_dim};
}

DeltaNet::Buffers DeltaNet::take_buffers(int64_t num_tokens, Workspace& workspace) const {
  const auto rows = [&](int64_t width) { return take({num_tokens, width}, workspace); };
  Buffers buffers;
  buffers.qkvz = rows(config_.conv_width() + config_.value_width());
  buffers.ba = rows(2 * config_.num_value_heads);
  buffers.qkv = rows(config_.conv_width());
  buffers.z = rows(config_.value_width());
  buffers.beta = rows(config_.num_value_heads);
  buffers.decay = rows(config_.num_value_heads);
  return buffers;
}

size_t DeltaNet::workspace_bytes(const StepLimits& limits) const {
  const DeltaNetConfig& c = config_;
  const int64_t num_tokens = limits.max_tokens;
  size_t total = 0;
  const int64_t widths[] = {c.conv_width() + c.value_width(),
                            2 * c.num_value_heads,
                            c.conv_width(),
                            c.value_width(),
                            c.num_value_heads,
                            c.num_value_heads};
  for (const int64_t width : widths) {
    total += Workspace::bytes_for<float>(static_cast<size_t>(num_tokens * width));
  }
  const auto floats = [](std::initializer_list<int64_t> shape) { return TensorView(nullptr, DType::kF32, shape); };
  const int64_t state_size = c.num_value_heads * c.value_dim * c.key_dim;
  GatedDeltaNetArgs args;
  args.output = floats({num_tokens, c.num_value_heads, c.value_dim});
  args.final_state = args.initial_state = floats({num_tokens, c.num_value_heads, c.value_dim, c.key_dim});
  args.query = floats({num_tokens, c.conv_width()});
  args.cu_seqlens = TensorView(nullptr, DType::kI32, {num_tokens + 1});
  args.decay = args.beta = floats({num_tokens, c.num_value_heads});
  args.a_log = args.dt_bias = floats({c.num_value_heads});
  args.gate_activation = "softplus";
  args.beta_activation = "sigmoid";
  args.qk_l2_norm = 1;
  total += SlotRows::workspace_bytes(limits, c.conv_width() * (c.num_taps - 1));
  total += SlotRows::workspace_bytes(limits, state_size);
  return total +
         std::max({matmul_workspace_bytes(qkvz_.weight, num_tokens), matmul_workspace_bytes(ba_.weight, num_tokens),
                   gated_delta_net_workspace_bytes(args, limits.num_threads)});
}

// To all heads of q, k, v, of z, of b and of a; from a key head's [q, k, v, z] and [b, a] where they stand so.
void DeltaNet::reorder(const Buffers& buffers, const OpContext& context) const {
  const DeltaNetConfig& c = config_;
  // Heads in order are one group as wide as all.
  const int64_t num_groups = is_by_key_head_ ? c.num_key_heads : 1;
  const int64_t key_size = c.key_width() / num_groups;
  const int64_t per_key = c.num_value_heads / num_groups;
  const int64_t value_size = per_key * c.value_dim;
  context.pool->parallel_for(buffers.qkvz.dim(0), 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t t = begin; t < end; ++t) {
      const float* from = buffers.qkvz.as<float>() + t * buffers.qkvz.stride(0);
      const float* ba = buffers.ba.as<float>() + t * buffers.ba.stride(0);
      float* qkv = buffers.qkv.as<float>() + t * buffers.qkv.stride(0);
      float* z = buffers.z.as<float>() + t * buffers.z.stride(0);
      for (int64_t h = 0; h < num_groups; ++h) {
        const auto move = [&](int64_t count, float* to) {
          std::copy_n(from, count, to);
          from += count;
        };
        move(key_size, qkv + h * key_size);
        move(key_size, qkv + c.key_width() + h * key_size);
        move(value_size, qkv + 2 * c.key_width() + h * value_size);
        move(value_size, z + h * value_size);
        std::copy_n(ba + 2 * h * per_key, per_key, buffers.beta.as<float>() + t * c.num_value_heads + h * per_key);
        std::copy_n(ba + (2 * h + 1) * per_key, per_key,
                    buffers.decay.as<float>() + t * c.num_value_heads + h * per_key);
      }
    }
  });
}

void DeltaNet::forward(const TensorView& h, const TensorView& out, const Batch& batch, const StatePool& states,
                       size_t state_idx, const OpContext& context) const {
  const DeltaNetConfig& c = config_;
  Workspace& workspace = *context.workspace;
  const Workspace::Scope scope(workspace);
  const int64_t num_tokens = h.dim(0);
  const Buffers buffers = take_buffers(num_tokens, workspace);
  qkvz_(h, buffers.qkvz, context);
  ba_(h, buffers.ba, context);
  reorder(buffers, context);
  const SlotRows window(batch, workspace, [&](StateSlot slot) { return states.conv_state(state_idx, slot); });
  varlen_causal_conv_with_state({.output = columns(buffers.qkvz, 0, c.conv_width()),
                                 .final_state = window.rows(),
                                 .input = buffers.qkv,
                                 .weight = taps_,
                                 .cumulative_sequence_length = batch.cu_q_lens,
                                 .initial_state = window.rows(),
                                 .activation = "silu"},
                                context);
  window.store();
  const SlotRows state(batch, workspace, [&](StateSlot slot) { return states.recurrent_state(state_idx, slot); });
  // In the memory of the convolution's input, which is done with: all heads' rows beside each other.
  const auto attended = [&](std::initializer_list<int64_t> shape) {
    return TensorView(buffers.qkv.data, DType::kF32, shape);
  };
  gated_delta_net({.output = attended({num_tokens, c.num_value_heads, c.value_dim}),
                   .final_state = state.rows(),
                   .query = columns(buffers.qkvz, 0, c.conv_width()),
                   .cu_seqlens = batch.cu_q_lens,
                   .decay = buffers.decay,
                   .beta = buffers.beta,
                   .initial_state = state.rows(),
                   .a_log = a_log_,
                   .dt_bias = dt_bias_,
                   .gate_activation = "softplus",
                   .beta_activation = "sigmoid",
                   .qk_l2_norm = 1},
                  context);
  state.store();
  const TensorView rows = attended({num_tokens * c.num_value_heads, c.value_dim});
  rms_norm({.out = rows, .x = rows, .weight = norm_, .eps = c.norm_eps}, context);
  gated_activation(
      {.out = out, .gate = buffers.z, .value = attended({num_tokens, c.value_width()}), .kind = Gate::kSilu}, context);
}

}  // namespace shoal
