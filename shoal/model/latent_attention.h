// Multi-head latent attention (deepseek): the cache holds one row a token, from which every head's keys and values follow.
//
//   q[h] = [q_nope[h], rotate(q_rope[h])];  c = norm(W_kv_a x), k_rope = rotate(...)      cached: [c, k_rope]
//   k[h] = [W_k[h] c, k_rope];  v[h] = W_v[h] c
//
// Computed on the cached rows themselves: q_nope[h]^T W_k[h] takes the query to them, W_v[h] the result from them. With an
// indexer each token reads the rows that it chose, else all.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "shoal/model/lightning_indexer.h"
#include "shoal/model/loader.h"
#include "shoal/ops/rope/rope.h"
#include "shoal/state/kv_cache.h"

namespace shoal {

struct LatentAttentionConfig {
  int64_t num_heads = 0;
  int64_t q_rank = 0;   // 0: queries come from the input without a detour
  int64_t kv_rank = 0;  // width of c; 0: the model has no latent attention
  int64_t nope_dim = 0;
  int64_t rope_dim = 0;
  int64_t v_dim = 0;
  bool rope_interleaved = true;
  float scale = 0.0f;
  float norm_eps = 1e-6f;
  LightningIndexerConfig indexer{};  // needs a q_rank

  int64_t cached_dim() const { return kv_rank + rope_dim; }
  int64_t output_width() const { return num_heads * v_dim; }
};

// Stems of tensor names; "{}" stands for the layer's number.
struct LatentAttentionNames {
  std::string q{};  // without a rank
  std::string q_a{}, q_a_norm{}, q_b{};
  std::string kv_a{}, kv_a_norm{}, kv_b{};
  LightningIndexerNames indexer{};
};

class LatentAttention {
 public:
  LatentAttention(Loader& loader, const LatentAttentionConfig& config, const LatentAttentionNames& names,
                  int64_t layer_idx, int64_t hidden);

  size_t workspace_bytes(const StepLimits& limits, const RopeTables& rope) const;

  // The layers of the cache that it uses: the rows, then the indexer's keys.
  std::vector<KvLayerShape> kv_layers() const;

  // Appends the tokens' rows to the cache's layers from `first_layer` on; out [num_tokens, output_width], h [num_tokens,
  // hidden], both f32.
  void forward(const TensorView& h, const TensorView& out, const Batch& batch, const KvCache& cache, size_t first_layer,
               const RopeTables& rope, const OpContext& context) const;

 private:
  void load_heads(Loader& loader, const std::string& kv_b);
  int64_t query_width() const { return config_.num_heads * (config_.nope_dim + config_.rope_dim); }
  int64_t input_width() const { return config_.q_rank + config_.cached_dim(); }
  TensorView project_queries(const TensorView& h, const TensorView& input, const OpContext& context) const;
  void per_head(const TensorView& from, const TensorView& to, const std::vector<MatmulWeight>& weights,
                const OpContext& context) const;

  LatentAttentionConfig config_;
  Linear input_;  // q_a, if there is one, and kv_a, joined
  Linear q_;      // q or q_b
  Tensor q_norm_, kv_norm_;
  std::vector<MatmulWeight> to_latent_;    // of each head: [kv_rank, nope_dim]
  std::vector<MatmulWeight> from_latent_;  // [v_dim, kv_rank]
  std::vector<std::shared_ptr<const void>> owners_;
  std::unique_ptr<LightningIndexer> indexer_;
};

}  // namespace shoal
