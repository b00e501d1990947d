// The gated delta net of qwen3_next and qwen3_5, in the place of attention:
//
//   [q, k, v, z] = W_qkvz h;  [b, a] = W_ba h;  [q, k, v] = silu(conv([q, k, v]))
//   o = delta rule with decay -exp(A_log) softplus(a + dt_bias), beta sigmoid(b), q and k of unit length
//   out = norm(o) * silu(z)                        norm over each value head
//
// qwen3_next keeps the parts of q, k, v, z (and b, a) of a key head and its value heads beside each other, in one tensor
// each; qwen3_5 has tensors of their own for [q, k, v], z, b and a, heads in order.
#pragma once

#include <string>

#include "shoal/model/loader.h"
#include "shoal/model/state_mixer.h"

namespace shoal {

struct DeltaNetConfig {
  int64_t num_key_heads = 0;
  int64_t num_value_heads = 0;  // a multiple of num_key_heads
  int64_t key_dim = 0;
  int64_t value_dim = 0;
  int64_t num_taps = 0;
  float norm_eps = 1e-6f;

  int64_t key_width() const { return num_key_heads * key_dim; }
  int64_t value_width() const { return num_value_heads * value_dim; }
  int64_t conv_width() const { return 2 * key_width() + value_width(); }
};

// Stems; a_log and dt_bias are whole names. Either qkvz and ba, or qkv, z, b and a.
struct DeltaNetNames {
  std::string qkvz{}, ba{};
  std::string qkv{}, z{}, b{}, a{};
  std::string conv{}, norm{}, a_log{}, dt_bias{};
};

class DeltaNet final : public StateMixer {
 public:
  DeltaNet(Loader& loader, const DeltaNetConfig& config, const DeltaNetNames& names, int64_t layer_idx, int64_t hidden);

  int64_t width() const override { return config_.value_width(); }
  StateLayerShape state_shape() const override;
  size_t workspace_bytes(const StepLimits& limits) const override;
  void forward(const TensorView& h, const TensorView& out, const Batch& batch, const StatePool& states,
               size_t state_idx, const OpContext& context) const override;

 private:
  struct Buffers {
    TensorView qkvz, ba;     // as projected
    TensorView qkv, z;       // [T, conv_width], [T, value_width]: heads in order
    TensorView beta, decay;  // [T, num_value_heads]
  };
  Buffers take_buffers(int64_t num_tokens, Workspace& workspace) const;
  void reorder(const Buffers& buffers, const OpContext& context) const;

  DeltaNetConfig config_;
  bool is_by_key_head_;  // the order of the projections' outputs
  Linear qkvz_, ba_;
  Tensor taps_, norm_, a_log_, dt_bias_;
};

}  // namespace shoal
