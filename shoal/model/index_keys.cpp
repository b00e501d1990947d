#include "shoal/model/index_keys.h"

#include <algorithm>

#include "shoal/base/checked.h"
#include "shoal/cpu/thread_pool.h"
#include "shoal/model/views.h"
#include "shoal/ops/element.h"
#include "shoal/ops/sparse_paged_attention/sparse_paged_attention.h"

namespace shoal {
namespace {

constexpr int64_t kGrain = 64;  // keys that a thread reads at least

// Attention of which only the append is wanted: nothing is selected, and an output of one channel becomes zero.
SparsePagedAttentionArgs append_args(const TensorView& keys, const Batch& batch, const KvLayer& layer,
                                     const RopeTables& rope) {
  SparsePagedAttentionArgs args;
  args.beyond_schema = true;
  args.query = keys;
  args.key = keys;
  args.key_cache = layer.key;
  args.cumulative_sequence_length = batch.cu_q_lens;
  args.past_seqlens = batch.past_lens;
  args.block_table = batch.page_table;
  args.slot_mapping = batch.slot_mapping;
  args.cos_cache = rope.cos;
  args.sin_cache = rope.sin;
  args.do_rotary = true;
  args.k_scale = layer.k_scale;
  args.k_quant_type = !layer.k_scale ? "NONE" : layer.k_scale.num_elements() == 1 ? "PER_TENSOR" : "PER_CHANNEL";
  args.num_heads = 1;
  args.kv_num_heads = 1;
  args.scale = 1.0f;
  args.kv_cache_layout = "LATENT";
  args.v_head_size = 1;
  return args;
}

}  // namespace

int64_t max_kv_len(const Batch& batch) {
  int64_t result = 1;
  for (int64_t s = 0; s < batch.past_lens.dim(0); ++s) {
    const auto* begin = batch.cu_q_lens.as<const int32_t>() + s;
    result = std::max<int64_t>(result, batch.past_lens.as<const int32_t>()[s] + begin[1] - begin[0]);
  }
  return result;
}

void append_index_keys(const TensorView& keys, const Batch& batch, const KvLayer& layer, const RopeTables& rope,
                       const OpContext& context) {
  const Workspace::Scope scope(*context.workspace);
  const int64_t num_tokens = keys.dim(0);
  SparsePagedAttentionArgs args = append_args(keys, batch, layer, rope);
  args.output = take({num_tokens, 1}, *context.workspace);
  args.selected_counts = take({num_tokens}, *context.workspace, DType::kI32);
  std::fill_n(args.selected_counts.as<int32_t>(), num_tokens, 0);
  args.selected_indices = TensorView(args.selected_counts.data, DType::kI32, {num_tokens, 1});
  sparse_paged_attention(args, context);
}

size_t append_index_keys_workspace_bytes(int64_t head_dim, const StepLimits& limits, const RopeTables& rope) {
  constexpr int64_t kPage = 16;  // the smallest page; only the length of the table in tokens counts
  const int64_t num_tokens = limits.max_tokens;
  const auto ints = [](std::initializer_list<int64_t> shape) { return TensorView(nullptr, DType::kI32, shape); };
  const auto floats = [](std::initializer_list<int64_t> shape) { return TensorView(nullptr, DType::kF32, shape); };
  Batch batch;
  batch.cu_q_lens = ints({num_tokens + 1});
  batch.past_lens = ints({num_tokens});
  batch.page_table = ints({num_tokens, ceil_div(limits.max_kv_len, kPage)});
  batch.slot_mapping = ints({num_tokens});
  const KvLayer layer{.key = TensorView(nullptr, DType::kI8, {1, kPage, 1, head_dim}),
                      .value = {},
                      .k_scale = floats({head_dim}),
                      .v_scale = {}};
  SparsePagedAttentionArgs args = append_args(floats({num_tokens, head_dim}), batch, layer, rope);
  args.output = floats({num_tokens, 1});
  args.selected_counts = ints({num_tokens});
  args.selected_indices = ints({num_tokens, 1});
  return sparse_paged_attention_workspace_bytes(args, limits.num_threads) +
         2 * Workspace::bytes_for<float>(static_cast<size_t>(num_tokens));
}

void read_index_keys(const TensorView& out, int64_t seq_idx, const Batch& batch, const KvLayer& layer,
                     const OpContext& context) {
  const int64_t head_dim = out.dim(1);
  const int64_t page_size = layer.key.dim(1);
  const auto* pages = batch.page_table.as<const int32_t>() + seq_idx * batch.page_table.stride(0);
  const auto* scales = layer.k_scale ? layer.k_scale.as<const float>() : nullptr;
  const int64_t scale_step = layer.k_scale && layer.k_scale.num_elements() > 1 ? 1 : 0;
  context.pool->parallel_for(out.dim(0), kGrain, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t first = (pages[i / page_size] * page_size + i % page_size) * head_dim;
      float* row = out.as<float>() + i * head_dim;
      for (int64_t c = 0; c < head_dim; ++c) {
        row[c] = scales != nullptr
                     ? static_cast<float>(layer.key.as<const int8_t>()[first + c]) * scales[c * scale_step]
                     : read_element(layer.key.dtype, layer.key.data, first + c);
      }
    }
  });
}

}  // namespace shoal
