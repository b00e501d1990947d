// The short convolution of lfm2, in the place of attention:
//
//   [B, C, x] = W_in h;  y = C * conv(B * x);  out = y                  (W_out is the caller's, as attention's is)
//
// conv is causal, depthwise, K taps, without activation; it remembers the K - 1 inputs before a step in a state slot.
#pragma once

#include <string>

#include "shoal/model/loader.h"
#include "shoal/model/state_mixer.h"

namespace shoal {

struct ShortConvNames {
  std::string in{};      // stem
  std::string taps{};    // stem of the weight [hidden, 1, K], optionally with a bias
  bool is_flat = false;  // the weight is [hidden, K]
};

class ShortConv final : public StateMixer {
 public:
  ShortConv(Loader& loader, const ShortConvNames& names, int64_t layer_idx, int64_t hidden, int64_t num_taps);

  int64_t width() const override { return hidden_; }
  StateLayerShape state_shape() const override;
  size_t workspace_bytes(const StepLimits& limits) const override;
  void forward(const TensorView& h, const TensorView& out, const Batch& batch, const StatePool& states,
               size_t state_idx, const OpContext& context) const override;

 private:
  int64_t hidden_, num_taps_;
  Linear in_;
  Tensor taps_, bias_;
};

}  // namespace shoal
