// The block indexer (minimax_m3): for every token and every head of keys and values, the blocks of positions that its
// attention reads.
//
//   key[s]         = rotate(norm(W_k x[s])), one for all heads; kept in the cache (index_keys.h)
//   score[t, h, b] = max over the positions s <= t of block b of q[t, h] . key[s],  q = rotate(norm(W_q x[t]))
//
// The token's own block and the num_local - 1 before it are always chosen, then those of the largest scores, of equal ones
// the lower block, top_k in all; NaN is below everything.
#pragma once

#include "shoal/model/index_keys.h"
#include "shoal/model/loader.h"

namespace shoal {

struct BlockIndexerConfig {
  int64_t num_heads = 0;  // those of keys and values
  int64_t head_dim = 0;
  int64_t block_size = 0;
  int64_t top_k = 0;      // blocks
  int64_t num_local = 0;  // at most top_k
  float norm_eps = 1e-6f;
  float norm_offset = 0.0f;
};

// Stems of tensor names; "{}" stands for the layer's number.
struct BlockIndexerNames {
  std::string q{}, k{}, q_norm{}, k_norm{};
};

class BlockIndexer {
 public:
  BlockIndexer(Loader& loader, const BlockIndexerConfig& config, const BlockIndexerNames& names, int64_t layer_idx,
               int64_t hidden);

  KvLayerShape kv_layer() const { return {1, config_.head_dim, 0}; }
  // Also of the selection.
  size_t workspace_bytes(const StepLimits& limits, const RopeTables& rope) const;

  // Appends the tokens' keys to `layer`; h [num_tokens, hidden] f32. The selection, of each head, lives in the workspace
  // until the enclosing Scope ends.
  Selection forward(const TensorView& h, const Batch& batch, const KvLayer& layer, const RopeTables& rope,
                    const OpContext& context) const;

 private:
  void select(int64_t seq_idx, const TensorView& queries, const Batch& batch, const KvLayer& layer,
              const Selection& selection, const OpContext& context) const;

  BlockIndexerConfig config_;
  Linear qk_;
  Tensor q_norm_, k_norm_;  // [head_dim]
};

}  // namespace shoal
