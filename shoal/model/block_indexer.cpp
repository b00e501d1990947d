#include "shoal/model/block_indexer.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "shoal/base/checked.h"
#include "shoal/cpu/thread_pool.h"
#include "shoal/model/views.h"
#include "shoal/ops/norm/norm.h"

namespace shoal {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int64_t kLanes = 8;  // sums of a product; they divide the head size

size_t float_bytes(int64_t rows, int64_t width) {
  return Workspace::bytes_for<float>(static_cast<size_t>(rows * width));
}

float dot(const float* a, const float* b, int64_t count) {
  float sums[kLanes] = {};
  for (int64_t i = 0; i < count; i += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      sums[lane] += a[i + lane] * b[i + lane];
    }
  }
  return std::accumulate(sums, sums + kLanes, 0.0f);
}

}  // namespace

BlockIndexer::BlockIndexer(Loader& loader, const BlockIndexerConfig& config, const BlockIndexerNames& names,
                           int64_t layer_idx, int64_t hidden)
    : config_(config) {
  const auto name = [&](const std::string& stem) { return layer_name(stem, layer_idx); };
  qk_ = loader.linear({{name(names.q), config.num_heads * config.head_dim}, {name(names.k), config.head_dim}}, hidden);
  q_norm_ = loader.vector(name(names.q_norm) + ".weight", {config.head_dim}, config.norm_offset);
  k_norm_ = loader.vector(name(names.k_norm) + ".weight", {config.head_dim}, config.norm_offset);
}

size_t BlockIndexer::workspace_bytes(const StepLimits& limits, const RopeTables& rope) const {
  const BlockIndexerConfig& c = config_;
  const int64_t num_tokens = limits.max_tokens;
  const int64_t num_blocks = ceil_div(limits.max_kv_len, c.block_size);
  const int64_t max_selected = std::min(c.top_k, num_blocks) * c.block_size;
  const size_t select = float_bytes(limits.max_kv_len, c.head_dim) + 2 * float_bytes(limits.num_threads, num_blocks);
  const size_t scratch = std::max(
      {matmul_workspace_bytes(qk_.weight, num_tokens),
       append_index_keys_workspace_bytes(c.head_dim, limits, rope) + float_bytes(num_tokens, c.head_dim), select});
  return scratch + float_bytes(num_tokens * c.num_heads, max_selected) + float_bytes(num_tokens, c.num_heads) +
         float_bytes(num_tokens, (c.num_heads + 1) * c.head_dim) + float_bytes(num_tokens, c.num_heads * c.head_dim);
}

Selection BlockIndexer::forward(const TensorView& h, const Batch& batch, const KvLayer& layer,
                                const RopeTables& rope_tables, const OpContext& context) const {
  const BlockIndexerConfig& c = config_;
  Workspace& workspace = *context.workspace;
  const int64_t num_tokens = h.dim(0);
  const int64_t num_blocks = ceil_div(max_kv_len(batch), c.block_size);
  const Selection selection{
      take({num_tokens, c.num_heads, std::min(c.top_k, num_blocks) * c.block_size}, workspace, DType::kI32),
      take({num_tokens, c.num_heads}, workspace, DType::kI32)};
  const Workspace::Scope scope(workspace);
  const TensorView qk = take({num_tokens, (c.num_heads + 1) * c.head_dim}, workspace);
  const TensorView queries = take({num_tokens, c.num_heads, c.head_dim}, workspace);
  qk_(h, qk, context);
  // Heads of one token lie beside each other, tokens do not: a norm a head.
  for (int64_t head = 0; head < c.num_heads; ++head) {
    const TensorView row = columns(qk, head * c.head_dim, c.head_dim);
    rms_norm({.out = row, .x = row, .weight = q_norm_, .eps = c.norm_eps}, context);
  }
  TensorView heads = queries;
  heads.data = qk.data;
  heads.strides[0] = qk.stride(0);
  rope({.out = queries, .x = heads, .positions = batch.positions, .cos = rope_tables.cos, .sin = rope_tables.sin},
       context);
  {
    const Workspace::Scope appended(workspace);
    const TensorView keys = take({num_tokens, c.head_dim}, workspace);
    rms_norm(
        {.out = keys, .x = columns(qk, c.num_heads * c.head_dim, c.head_dim), .weight = k_norm_, .eps = c.norm_eps},
        context);
    append_index_keys(keys, batch, layer, rope_tables, context);
  }
  for (int64_t s = 0; s < batch.past_lens.dim(0); ++s) {
    select(s, queries, batch, layer, selection, context);
  }
  return selection;
}

void BlockIndexer::select(int64_t seq_idx, const TensorView& queries, const Batch& batch, const KvLayer& layer,
                          const Selection& selection, const OpContext& context) const {
  const BlockIndexerConfig& c = config_;
  Workspace& workspace = *context.workspace;
  const Workspace::Scope scope(workspace);
  const int64_t first = batch.cu_q_lens.as<const int32_t>()[seq_idx];
  const int64_t num_tokens = batch.cu_q_lens.as<const int32_t>()[seq_idx + 1] - first;
  const int64_t past = batch.past_lens.as<const int32_t>()[seq_idx];
  const int64_t num_keys = past + num_tokens;
  const auto num_blocks = static_cast<size_t>(ceil_div(num_keys, c.block_size));
  const bool chooses = static_cast<int64_t>(num_blocks) > c.top_k;
  const TensorView keys = take({chooses ? num_keys : 0, c.head_dim}, workspace);
  const auto num_threads = static_cast<size_t>(context.pool->num_threads());
  const std::span<float> all_scores = workspace.take<float>(num_threads * num_blocks);
  const std::span<int32_t> all_blocks = workspace.take<int32_t>(num_threads * num_blocks);
  if (chooses) {
    read_index_keys(keys, seq_idx, batch, layer, context);
  }
  context.pool->parallel_for(num_tokens * c.num_heads, 1, [&](int64_t begin, int64_t end, int thread_idx) {
    const size_t own = static_cast<size_t>(thread_idx) * num_blocks;
    const std::span<float> scores = all_scores.subspan(own, num_blocks);
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t position = past + unit / c.num_heads;
      const int64_t row = first * c.num_heads + unit;  // of tokens and their heads
      const int64_t last_block = position / c.block_size;
      const std::span<int32_t> blocks = all_blocks.subspan(own, static_cast<size_t>(last_block + 1));
      std::iota(blocks.begin(), blocks.end(), 0);
      auto end_of_chosen = blocks.end();
      if (last_block + 1 > c.top_k) {
        const float* query = queries.as<const float>() + row * c.head_dim;
        for (int64_t b = 0; b <= last_block; ++b) {
          float best = b > last_block - c.num_local ? kInfinity : -kInfinity;
          for (int64_t s = b * c.block_size; best < kInfinity && s < (b + 1) * c.block_size; ++s) {
            best = std::max(best, dot(query, keys.as<const float>() + s * c.head_dim, c.head_dim));
          }
          scores[static_cast<size_t>(b)] = best;
        }
        end_of_chosen = blocks.begin() + c.top_k;
        std::partial_sort(blocks.begin(), end_of_chosen, blocks.end(), [&](int32_t a, int32_t b) {
          const float x = scores[static_cast<size_t>(a)];
          const float y = scores[static_cast<size_t>(b)];
          return x > y || (x == y && a < b);
        });
        std::sort(blocks.begin(), end_of_chosen);
      }
      int32_t* out = selection.indices.as<int32_t>() + row * selection.indices.dim(2);
      int32_t count = 0;
      for (auto block = blocks.begin(); block != end_of_chosen; ++block) {
        const int64_t from = *block * c.block_size;
        for (int64_t s = from; s < std::min(from + c.block_size, position + 1); ++s) {
          out[count++] = static_cast<int32_t>(s);
        }
      }
      selection.counts.as<int32_t>()[row] = count;
    }
  });
}

}  // namespace shoal
