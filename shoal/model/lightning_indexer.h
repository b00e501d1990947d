// The lightning indexer (deepseek): for every token the positions that its attention reads.
//
//   key[s]      = rotate(layer_norm(W_k x[s])), one for all heads; kept in the cache (index_keys.h)
//   score[t, s] = sum over heads h of w[t, h] max(0, q[t, h] . key[s]),  q = rotate(W_q c[t]),  w = W_w x[t]
//
// with c the low-rank queries of latent attention. The top_k positions s <= t of the largest scores are chosen; all, if
// there are no more. The rotated channels lead, halves against each other.
#pragma once

#include "shoal/model/index_keys.h"
#include "shoal/model/loader.h"
#include "shoal/ops/rope/rope.h"

namespace shoal {

struct LightningIndexerConfig {
  int64_t num_heads = 0;
  int64_t head_dim = 0;
  int64_t top_k = 0;  // 0: attention reads every position
};

// Stems of tensor names; "{}" stands for the layer's number.
struct LightningIndexerNames {
  std::string q{}, k{}, k_norm{}, weights{};
};

class LightningIndexer {
 public:
  LightningIndexer(Loader& loader, const LightningIndexerConfig& config, const LightningIndexerNames& names,
                   int64_t layer_idx, int64_t hidden, int64_t q_rank);

  // Also of the selection.
  size_t workspace_bytes(const StepLimits& limits, const RopeTables& rope) const;

  // Appends the tokens' keys to `layer`. h [num_tokens, hidden], low [num_tokens, q_rank], both f32; the selection lives
  // in the workspace until the enclosing Scope ends.
  Selection forward(const TensorView& h, const TensorView& low, const Batch& batch, const KvLayer& layer,
                    const RopeTables& rope, const OpContext& context) const;

 private:
  void norm_keys(const TensorView& keys, const OpContext& context) const;
  void select(int64_t seq_idx, const TensorView& queries, const TensorView& weights, const Batch& batch,
              const KvLayer& layer, const Selection& selection, const OpContext& context) const;

  LightningIndexerConfig config_;
  Linear q_, k_, weights_;
  Tensor k_norm_, k_norm_bias_;  // [head_dim]
};

}  // namespace shoal
