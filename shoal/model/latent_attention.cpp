#include "shoal/model/latent_attention.h"

#include <algorithm>
#include <cstring>

#include "shoal/base/checked.h"
#include "shoal/cpu/thread_pool.h"
#include "shoal/model/views.h"
#include "shoal/ops/norm/norm.h"
#include "shoal/ops/paged_attention/paged_attention.h"
#include "shoal/ops/sparse_paged_attention/sparse_paged_attention.h"

namespace shoal {
namespace {

// Columns [begin, begin + width) of every head of `from` [num_tokens, heads, from_dim], to `to_begin` of every head of
// `to`; the order of heads and tokens is the caller's: strides count floats.
struct HeadRows {
  float* data;
  int64_t token_stride;
  int64_t head_stride;
};

void copy_heads(const HeadRows& from, const HeadRows& to, int64_t num_tokens, int64_t num_heads, int64_t width,
                const OpContext& context) {
  context.pool->parallel_for(num_tokens, 4, [&](int64_t begin, int64_t end, int) {
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t h = 0; h < num_heads; ++h) {
        std::memcpy(to.data + t * to.token_stride + h * to.head_stride,
                    from.data + t * from.token_stride + h * from.head_stride,
                    static_cast<size_t>(width) * sizeof(float));
      }
    }
  });
}

HeadRows by_token(const TensorView& view, int64_t begin, int64_t head_dim) {
  return {view.as<float>() + begin, view.stride(0), head_dim};
}

HeadRows by_head(const TensorView& view, int64_t num_tokens) {
  return {view.as<float>(), view.stride(0), num_tokens * view.stride(0)};
}

LoadedMatrix matrix_of(std::vector<float> values, int64_t n, int64_t k) {
  auto bytes = std::make_shared<std::vector<float>>(std::move(values));
  const auto* codes = reinterpret_cast<const std::byte*>(bytes->data());
  return {{.format = Format::kF32, .n = n, .k = k, .codes = codes}, nullptr, bytes};
}

// Of paged_attention or sparse_paged_attention.
template <class Args>
Args attention_args(const LatentAttentionConfig& config, const Batch& batch, const KvLayer& layer,
                    const RopeTables& rope) {
  Args args;
  if constexpr (requires { args.beyond_schema; }) {
    args.beyond_schema = true;
  }
  args.key_cache = layer.key;
  args.cumulative_sequence_length = batch.cu_q_lens;
  args.past_seqlens = batch.past_lens;
  args.block_table = batch.page_table;
  args.slot_mapping = batch.slot_mapping;
  args.cos_cache = rope.cos;
  args.sin_cache = rope.sin;
  args.do_rotary = true;
  args.rotary_interleaved = config.rope_interleaved;
  args.rotary_offset = config.kv_rank;
  args.k_scale = layer.k_scale;
  args.k_quant_type = !layer.k_scale ? "NONE" : layer.k_scale.num_elements() == 1 ? "PER_TENSOR" : "PER_CHANNEL";
  args.num_heads = config.num_heads;
  args.kv_num_heads = 1;
  args.scale = config.scale;
  args.kv_cache_layout = "LATENT";
  args.v_head_size = config.kv_rank;
  return args;
}

}  // namespace

LatentAttention::LatentAttention(Loader& loader, const LatentAttentionConfig& config, const LatentAttentionNames& names,
                                 int64_t layer_idx, int64_t hidden)
    : config_(config) {
  const auto name = [&](const std::string& stem) { return layer_name(stem, layer_idx); };
  const Loader::Part kv_a{name(names.kv_a), config.cached_dim()};
  if (config.q_rank > 0) {
    input_ = loader.linear({{name(names.q_a), config.q_rank}, kv_a}, hidden);
    q_norm_ = loader.vector(name(names.q_a_norm) + ".weight", {config.q_rank});
    q_ = loader.linear({{name(names.q_b), query_width()}}, config.q_rank);
  } else {
    input_ = loader.linear({kv_a}, hidden);
    q_ = loader.linear({{name(names.q), query_width()}}, hidden);
  }
  kv_norm_ = loader.vector(name(names.kv_a_norm) + ".weight", {config.kv_rank});
  load_heads(loader, name(names.kv_b));
  if (config.indexer.top_k > 0) {
    indexer_ =
        std::make_unique<LightningIndexer>(loader, config.indexer, names.indexer, layer_idx, hidden, config.q_rank);
  }
}

std::vector<KvLayerShape> LatentAttention::kv_layers() const {
  std::vector<KvLayerShape> layers{{1, config_.cached_dim(), 0}};
  if (indexer_) {
    layers.push_back({1, config_.indexer.head_dim, 0});
  }
  return layers;
}

// Row by row of each head: nope_dim of W_k, then v_dim of W_v. W_k is wanted transposed.
void LatentAttention::load_heads(Loader& loader, const std::string& kv_b) {
  const int64_t rank = config_.kv_rank;
  const int64_t rows = config_.nope_dim + config_.v_dim;
  const LoadedMatrix loaded = loader.matrix(kv_b, config_.num_heads * rows, rank);
  std::vector<LoadedMatrix> to, from;
  std::vector<float> values(static_cast<size_t>(rows * rank));
  for (int64_t h = 0; h < config_.num_heads; ++h) {
    decode_rows(loaded.matrix, h * rows, (h + 1) * rows, values.data());
    std::vector<float> transposed(static_cast<size_t>(rank * config_.nope_dim));
    for (int64_t i = 0; i < config_.nope_dim; ++i) {
      for (int64_t r = 0; r < rank; ++r) {
        transposed[static_cast<size_t>(r * config_.nope_dim + i)] = values[static_cast<size_t>(i * rank + r)];
      }
    }
    to.push_back(matrix_of(std::move(transposed), rank, config_.nope_dim));
    from.push_back(matrix_of({values.begin() + config_.nope_dim * rank, values.end()}, config_.v_dim, rank));
  }
  const std::vector<LoadedMatrix>* to_list[] = {&to};
  const std::vector<LoadedMatrix>* from_list[] = {&from};
  to_latent_ = loader.prepare_each(to_list, owners_);
  from_latent_ = loader.prepare_each(from_list, owners_);
}

size_t LatentAttention::workspace_bytes(const StepLimits& limits, const RopeTables& rope) const {
  constexpr int64_t kPage = 16;  // the smallest page; only the length of the table in tokens counts
  const int64_t num_tokens = limits.max_tokens;
  const int64_t num_rows = num_tokens * config_.num_heads;
  const auto ints = [](std::initializer_list<int64_t> shape) { return TensorView(nullptr, DType::kI32, shape); };
  const auto floats = [](std::initializer_list<int64_t> shape) { return TensorView(nullptr, DType::kF32, shape); };
  Batch batch;
  batch.cu_q_lens = ints({num_tokens + 1});
  batch.past_lens = ints({num_tokens});
  batch.page_table = ints({num_tokens, ceil_div(limits.max_kv_len, kPage)});
  batch.slot_mapping = ints({num_tokens});
  const KvLayer layer{.key = TensorView(nullptr, DType::kI8, {1, kPage, 1, config_.cached_dim()}),
                      .value = {},
                      .k_scale = floats({config_.cached_dim()}),
                      .v_scale = {}};
  const auto with_rows = [&](auto args) {
    args.query = floats({num_tokens, config_.num_heads * config_.cached_dim()});
    args.key = floats({num_tokens, config_.cached_dim()});
    args.output = floats({num_tokens, config_.num_heads * config_.kv_rank});
    return args;
  };
  size_t attention = 0;
  if (indexer_) {
    auto args = with_rows(attention_args<SparsePagedAttentionArgs>(config_, batch, layer, rope));
    args.selected_indices = ints({num_tokens, 1});
    args.selected_counts = ints({num_tokens});
    attention =
        indexer_->workspace_bytes(limits, rope) + sparse_paged_attention_workspace_bytes(args, limits.num_threads);
  } else {
    attention = paged_attention_workspace_bytes(
        with_rows(attention_args<PagedAttentionArgs>(config_, batch, layer, rope)), limits.num_threads);
  }
  const size_t scratch =
      std::max({matmul_workspace_bytes(input_.weight, num_tokens), matmul_workspace_bytes(q_.weight, num_tokens),
                matmul_workspace_bytes(to_latent_.front(), num_rows),
                matmul_workspace_bytes(from_latent_.front(), num_rows), attention});
  size_t total = scratch + Workspace::bytes_for<int32_t>(static_cast<size_t>(config_.num_heads + 1));
  const int64_t widths[] = {input_width(),
                            query_width(),
                            config_.num_heads * config_.cached_dim(),
                            config_.num_heads * config_.kv_rank,
                            config_.num_heads * std::max(config_.nope_dim, config_.kv_rank),
                            config_.num_heads * std::max(config_.v_dim, config_.kv_rank)};
  for (const int64_t width : widths) {
    total += Workspace::bytes_for<float>(static_cast<size_t>(num_tokens * width));
  }
  return total;
}

// [num_tokens, query_width]
TensorView LatentAttention::project_queries(const TensorView& h, const TensorView& input,
                                            const OpContext& context) const {
  const TensorView queries = take({h.dim(0), query_width()}, *context.workspace);
  if (config_.q_rank == 0) {
    q_(h, queries, context);
    return queries;
  }
  const TensorView low = columns(input, 0, config_.q_rank);
  rms_norm({.out = low, .x = low, .weight = q_norm_, .eps = config_.norm_eps}, context);
  q_(low, queries, context);
  return queries;
}

// to[h] = weights[h] from[h]; both [num_heads * num_tokens, width], rows of a head beside each other.
void LatentAttention::per_head(const TensorView& from, const TensorView& to, const std::vector<MatmulWeight>& weights,
                               const OpContext& context) const {
  const Workspace::Scope scope(*context.workspace);
  const std::span<int32_t> row_begin = context.workspace->take<int32_t>(weights.size() + 1);
  const int64_t num_tokens = from.dim(0) / config_.num_heads;
  for (size_t h = 0; h < row_begin.size(); ++h) {
    row_begin[h] = static_cast<int32_t>(static_cast<int64_t>(h) * num_tokens);
  }
  grouped_matmul({.out = to, .a = from, .row_begin = row_begin}, weights, context);
}

void LatentAttention::forward(const TensorView& h, const TensorView& out, const Batch& batch, const KvCache& cache,
                              size_t first_layer, const RopeTables& rope, const OpContext& context) const {
  const LatentAttentionConfig& c = config_;
  Workspace& workspace = *context.workspace;
  const Workspace::Scope scope(workspace);
  const int64_t num_tokens = h.dim(0);
  const int64_t q_dim = c.nope_dim + c.rope_dim;
  const auto copy = [&](const HeadRows& from, const HeadRows& to, int64_t width) {
    copy_heads(from, to, num_tokens, c.num_heads, width, context);
  };
  const TensorView input = take({num_tokens, input_width()}, workspace);
  input_(h, input, context);
  const TensorView latent = columns(input, c.q_rank, c.kv_rank);
  rms_norm({.out = latent, .x = latent, .weight = kv_norm_, .eps = c.norm_eps}, context);
  const TensorView queries = project_queries(h, input, context);
  const TensorView on_latent = take({num_tokens, c.num_heads * c.cached_dim()}, workspace);
  {
    const Workspace::Scope heads(workspace);
    const TensorView nope = take({c.num_heads * num_tokens, c.nope_dim}, workspace);
    const TensorView absorbed = take({c.num_heads * num_tokens, c.kv_rank}, workspace);
    copy(by_token(queries, 0, q_dim), by_head(nope, num_tokens), c.nope_dim);
    per_head(nope, absorbed, to_latent_, context);
    copy(by_head(absorbed, num_tokens), by_token(on_latent, 0, c.cached_dim()), c.kv_rank);
    copy(by_token(queries, c.nope_dim, q_dim), by_token(on_latent, c.kv_rank, c.cached_dim()), c.rope_dim);
  }
  const TensorView attended = take({num_tokens, c.num_heads * c.kv_rank}, workspace);
  const auto with_rows = [&](auto args) {
    args.output = attended;
    args.query = on_latent;
    args.key = columns(input, c.q_rank, c.cached_dim());
    return args;
  };
  const KvLayer layer = cache.layer(first_layer);
  if (indexer_) {
    const Workspace::Scope selected(workspace);
    const Selection selection =
        indexer_->forward(h, columns(input, 0, c.q_rank), batch, cache.layer(first_layer + 1), rope, context);
    auto args = with_rows(attention_args<SparsePagedAttentionArgs>(c, batch, layer, rope));
    args.selected_indices = selection.indices;
    args.selected_counts = selection.counts;
    sparse_paged_attention(args, context);
  } else {
    paged_attention(with_rows(attention_args<PagedAttentionArgs>(c, batch, layer, rope)), context);
  }
  const TensorView rows = take({c.num_heads * num_tokens, c.kv_rank}, workspace);
  const TensorView values = take({c.num_heads * num_tokens, c.v_dim}, workspace);
  copy(by_token(attended, 0, c.kv_rank), by_head(rows, num_tokens), c.kv_rank);
  per_head(rows, values, from_latent_, context);
  copy(by_head(values, num_tokens), by_token(out, 0, c.v_dim), c.v_dim);
}

}  // namespace shoal
