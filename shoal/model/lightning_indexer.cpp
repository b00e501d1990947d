#include "shoal/model/lightning_indexer.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "shoal/cpu/thread_pool.h"
#include "shoal/model/views.h"
#include "shoal/ops/sparse_row_select/sparse_row_select.h"

namespace shoal {
namespace {

constexpr int64_t kTileTokens = 16;    // scored together against the keys of their sequence
constexpr float kNormEpsilon = 1e-6f;  // of the keys, whatever the model's is

size_t float_bytes(int64_t rows, int64_t width) {
  return Workspace::bytes_for<float>(static_cast<size_t>(rows * width));
}

// Keys of a sequence as a cache of which every row is there; `none` is a row that is not taken.
struct SelectCall {
  int64_t past, first_slot, last_slot = 0;
  SparseRowSelectArgs args;

  SelectCall(const LightningIndexerConfig& c, const TensorView& keys, const TensorView& queries,
             const TensorView& weights, const TensorView& selection, int64_t num_past)
      : past(num_past), first_slot(1) {
    const int64_t num_keys = keys.dim(0);
    const TensorView cache(keys.data, DType::kF32, {1, num_keys, c.head_dim});
    args.selection = selection;
    args.present_cache = cache;
    args.past_cache = cache;
    args.query = TensorView(queries.data, DType::kF32, {1, queries.dim(0), c.num_heads * c.head_dim});
    args.weights = weights;
    args.rows = TensorView(keys.data, DType::kF32, {1, 0, c.head_dim});
    args.first_slot = TensorView(&first_slot, DType::kI64, {1, 1});
    args.last_slot = TensorView(&last_slot, DType::kI64, {1, 1});
    args.past_lens = TensorView(&past, DType::kI64, {1});
    args.num_heads = c.num_heads;
    args.head_dim = c.head_dim;
    args.topk = std::min(c.top_k, num_keys);
    args.row_id_offset = 1;
    args.scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(c.head_dim * c.num_heads)));
    args.simulate_rotated_fp4 = false;
  }
  SelectCall(const SelectCall&) = delete;
  SelectCall& operator=(const SelectCall&) = delete;
};

}  // namespace

LightningIndexer::LightningIndexer(Loader& loader, const LightningIndexerConfig& config,
                                   const LightningIndexerNames& names, int64_t layer_idx, int64_t hidden,
                                   int64_t q_rank)
    : config_(config) {
  const auto name = [&](const std::string& stem) { return layer_name(stem, layer_idx); };
  q_ = loader.linear({{name(names.q), config.num_heads * config.head_dim}}, q_rank);
  k_ = loader.linear({{name(names.k), config.head_dim}}, hidden);
  k_norm_ = loader.vector(name(names.k_norm) + ".weight", {config.head_dim});
  k_norm_bias_ = loader.vector(name(names.k_norm) + ".bias", {config.head_dim});
  weights_ = loader.exact_linear({{name(names.weights), config.num_heads}}, hidden);
}

size_t LightningIndexer::workspace_bytes(const StepLimits& limits, const RopeTables& rope) const {
  const LightningIndexerConfig& c = config_;
  const int64_t num_tokens = limits.max_tokens;
  const int64_t max_selected = std::min(c.top_k, limits.max_kv_len);
  const int64_t query_width = c.num_heads * c.head_dim;
  const auto floats = [](std::initializer_list<int64_t> shape) { return TensorView(nullptr, DType::kF32, shape); };
  const SelectCall one(c, floats({limits.max_kv_len, c.head_dim}), floats({1, query_width}), floats({1, c.num_heads}),
                       {}, 0);
  // For more tokens the operator needs no more than a query and scores for each.
  const size_t select = sparse_row_select_workspace_bytes(one.args, limits.num_threads) +
                        float_bytes(kTileTokens, query_width) + float_bytes(kTileTokens, limits.max_kv_len) +
                        float_bytes(limits.max_kv_len, c.head_dim) + 2 * float_bytes(kTileTokens, max_selected);
  const size_t scratch =
      std::max({matmul_workspace_bytes(q_.weight, num_tokens), matmul_workspace_bytes(k_.weight, num_tokens),
                matmul_workspace_bytes(weights_.weight, num_tokens),
                append_index_keys_workspace_bytes(c.head_dim, limits, rope), select});
  return scratch + float_bytes(num_tokens, max_selected) + float_bytes(num_tokens, 1) +
         float_bytes(num_tokens, c.head_dim) + float_bytes(num_tokens, query_width) +
         float_bytes(num_tokens, c.num_heads);
}

Selection LightningIndexer::forward(const TensorView& h, const TensorView& low, const Batch& batch,
                                    const KvLayer& layer, const RopeTables& rope_tables,
                                    const OpContext& context) const {
  const LightningIndexerConfig& c = config_;
  Workspace& workspace = *context.workspace;
  const int64_t num_tokens = h.dim(0);
  const Selection selection{take({num_tokens, std::min(c.top_k, max_kv_len(batch))}, workspace, DType::kI32),
                            take({num_tokens}, workspace, DType::kI32)};
  const Workspace::Scope scope(workspace);
  const TensorView keys = take({num_tokens, c.head_dim}, workspace);
  k_(h, keys, context);
  norm_keys(keys, context);
  append_index_keys(keys, batch, layer, rope_tables, context);
  const TensorView queries = take({num_tokens, c.num_heads * c.head_dim}, workspace);
  q_(low, queries, context);
  const TensorView heads(queries.data, DType::kF32, {num_tokens, c.num_heads, c.head_dim});
  rope({.out = heads, .x = heads, .positions = batch.positions, .cos = rope_tables.cos, .sin = rope_tables.sin},
       context);
  const TensorView weights = take({num_tokens, c.num_heads}, workspace);
  weights_(h, weights, context);
  for (int64_t s = 0; s < batch.past_lens.dim(0); ++s) {
    select(s, queries, weights, batch, layer, selection, context);
  }
  return selection;
}

void LightningIndexer::norm_keys(const TensorView& keys, const OpContext& context) const {
  const auto width = static_cast<double>(config_.head_dim);
  const float* weight = k_norm_.view().as<const float>();
  const float* bias = k_norm_bias_.view().as<const float>();
  context.pool->parallel_for(keys.dim(0), 16, [&](int64_t begin, int64_t end, int) {
    for (int64_t t = begin; t < end; ++t) {
      const std::span<float> row(keys.as<float>() + t * config_.head_dim, static_cast<size_t>(config_.head_dim));
      const double mean = std::accumulate(row.begin(), row.end(), 0.0) / width;
      double squares = 0.0;
      for (const float x : row) {
        squares += (x - mean) * (x - mean);
      }
      const double inverse = 1.0 / std::sqrt(squares / width + kNormEpsilon);
      for (size_t i = 0; i < row.size(); ++i) {
        row[i] = static_cast<float>((row[i] - mean) * inverse) * weight[i] + bias[i];
      }
    }
  });
}

void LightningIndexer::select(int64_t seq_idx, const TensorView& queries, const TensorView& weights, const Batch& batch,
                              const KvLayer& layer, const Selection& selection, const OpContext& context) const {
  const LightningIndexerConfig& c = config_;
  Workspace& workspace = *context.workspace;
  const Workspace::Scope scope(workspace);
  const int64_t first = batch.cu_q_lens.as<const int32_t>()[seq_idx];
  const int64_t end = batch.cu_q_lens.as<const int32_t>()[seq_idx + 1];
  const int64_t past = batch.past_lens.as<const int32_t>()[seq_idx];
  const int64_t num_keys = past + end - first;
  const int64_t stride = selection.indices.stride(0);
  auto* indices = selection.indices.as<int32_t>();
  auto* counts = selection.counts.as<int32_t>();
  for (int64_t t = first; t < end; ++t) {
    counts[t] = static_cast<int32_t>(std::min(c.top_k, past + t - first + 1));
  }
  if (num_keys <= c.top_k) {  // nothing to choose
    for (int64_t t = first; t < end; ++t) {
      std::iota(indices + t * stride, indices + t * stride + counts[t], 0);
    }
    return;
  }
  const TensorView keys = take({num_keys, c.head_dim}, workspace);
  read_index_keys(keys, seq_idx, batch, layer, context);
  for (int64_t t = first; t < end; t += kTileTokens) {
    const Workspace::Scope tile(workspace);
    const int64_t num_tokens = std::min(kTileTokens, end - t);
    const std::span<int64_t> chosen = workspace.take<int64_t>(static_cast<size_t>(num_tokens * c.top_k));
    const SelectCall call(c, keys, queries.rows(t, t + num_tokens), weights.rows(t, t + num_tokens),
                          TensorView(chosen.data(), DType::kI64, {1, num_tokens, c.top_k}), past + t - first);
    sparse_row_select(call.args, context);
    for (int64_t i = 0; i < num_tokens; ++i) {
      for (int64_t j = 0; j < counts[t + i]; ++j) {
        indices[(t + i) * stride + j] = static_cast<int32_t>(chosen[static_cast<size_t>(i * c.top_k + j)] - 1);
      }
    }
  }
}

}  // namespace shoal
