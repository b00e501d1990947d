#include "shoal/model/decoder.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "shoal/base/checked.h"
#include "shoal/base/text.h"
#include "shoal/cpu/thread_pool.h"
#include "shoal/model/experts.h"
#include "shoal/model/latent_attention.h"
#include "shoal/model/loader.h"
#include "shoal/model/short_conv.h"
#include "shoal/model/views.h"
#include "shoal/ops/embedding/embedding.h"
#include "shoal/ops/norm/norm.h"
#include "shoal/ops/paged_attention/paged_attention.h"
#include "shoal/ops/rows/rows.h"
#include "shoal/ops/sparse_paged_attention/sparse_paged_attention.h"

namespace shoal {
namespace {

struct Block {
  Tensor attn_norm, q_norm, k_norm, post_attn_norm;  // f32
  Tensor ffn_norm, post_ffn_norm;
  Tensor sinks;  // [num_heads], or absent
  Linear qkv, o;
  std::unique_ptr<BlockIndexer> indexer;
  std::unique_ptr<LatentAttention> latent;  // in place of qkv
  std::unique_ptr<StateMixer> states;       // in place of attention
  size_t cache_idx = 0;                     // which of the KV layers, or of the states
  Linear gate_up, down;                     // a dense feed-forward,
  std::unique_ptr<Experts> experts;         // or a mixture
};

// Buffers of a step that live in the workspace.
struct StepBuffers {
  TensorView x, h, qkv, mixed, projected, gate_up, activated;
  TensorView kept_x, kept_mixed;  // [max_logit_rows, .] of x and mixed, the rows that matter after the last attention
};

class Decoder final : public Model {
 public:
  Decoder(DecoderConfig config, const DecoderNames& names, std::unique_ptr<io::WeightSource> source,
          const LoadOptions& options, const OpContext& context)
      : config_(std::move(config)), source_(std::move(source)), device_(context.device) {
    check_device();
    load(names, options, context);
  }

  const ModelInfo& info() const override { return info_; }

  size_t workspace_bytes(const StepLimits& limits) const override {
    const int64_t rows = std::max(limits.max_tokens, limits.max_logit_rows);
    size_t scratch = matmul_workspace_bytes(output_.weight, limits.max_logit_rows);
    for (const Block& block : blocks_) {
      if (block.states) {
        scratch = std::max(scratch, block.states->workspace_bytes(limits));
      } else if (!block.latent) {
        scratch = std::max(scratch, matmul_workspace_bytes(block.qkv.weight, rows));
      }
      scratch = std::max(scratch, matmul_workspace_bytes(block.o.weight, rows));
      scratch = std::max(scratch, feed_forward_workspace_bytes(block, rows));
    }
    const int64_t num_gates = config_.attention_gate ? rows * q_width() : 0;
    scratch = std::max(scratch,
                       attention_workspace_bytes(limits) + Workspace::bytes_for<float>(static_cast<size_t>(num_gates)));
    const int64_t widths[] = {config_.hidden, config_.hidden,    qkv_width(),  max_mixed_width(),
                              config_.hidden, 2 * dense_hidden_, dense_hidden_};
    size_t total = scratch;
    for (const int64_t width : widths) {
      total += Workspace::bytes_for<float>(static_cast<size_t>(rows * width));
    }
    for (const int64_t width : {config_.hidden, max_mixed_width()}) {
      total += Workspace::bytes_for<float>(static_cast<size_t>(limits.max_logit_rows * width));
    }
    return total;
  }

  void forward(const Batch& batch, const ModelMemory& memory, const TensorView& logits,
               const OpContext& context) override {
    const Workspace::Scope scope(*context.workspace);
    const int64_t num_tokens = batch.token_ids.dim(0);
    StepBuffers buffers = take_buffers(num_tokens, batch.logit_rows.dim(0), *context.workspace);
    embedding({.out = buffers.x, .ids = batch.token_ids, .table = embedding_.matrix, .scale = config_.embedding_scale},
              context);
    for (size_t i = 0; i < blocks_.size(); ++i) {
      mix(i, batch, memory, buffers, context);
      if (i + 1 == blocks_.size()) {
        keep_rows(batch.logit_rows, buffers, context);  // nothing after the last attention looks at other rows
      }
      finish_block(blocks_[i], buffers, context);
    }
    if (batch.logit_rows.dim(0) > 0) {
      add_and_norm(output_norm_, buffers, context);
      output_(buffers.h, logits, context);
      if (config_.logit_softcap > 0.0f) {
        softcap(logits, config_.logit_softcap, context);
      }
    }
  }

 private:
  void check_device() const {
    if (device_.type == DeviceType::kCpu) {
      return;
    }
    const auto refuse = [&](const char* what) {
      fail(ErrorCode::kUnsupported, config_.architecture, ": ", what, " has no CUDA path yet; use --device cpu");
    };
    if (config_.latent.kv_rank > 0) {
      refuse("latent attention");
    }
    if (config_.attention_gate) {
      refuse("gated attention");
    }
    for (const DecoderLayerConfig& layer : config_.layers) {
      if (layer.has_indexer) {
        refuse("attention to chosen blocks");
      }
      if (layer.mixer != Mixer::kAttention) {
        refuse("a convolution or recurrence");
      }
      if (layer.has_experts && config_.experts.num_groups > 1) {
        refuse("the choice among groups of experts");
      }
    }
  }

  void load(const DecoderNames& names, const LoadOptions& options, const OpContext& context) {
    const DecoderConfig& c = config_;
    Loader loader(*source_, c.scheme, options, context);
    embedding_ = loader.matrix(names.embedding, c.vocab_size, c.hidden);
    if (shoal::info(embedding_.matrix.format).is_scaled) {
      fail(ErrorCode::kUnsupported, "tensors \"", names.embedding, "\": an embedding of ",
           shoal::info(embedding_.matrix.format).name, " with scales apart is not supported");
    }
    make_ropes(options, loader);
    for (int64_t i = 0; i < c.num_layers; ++i) {
      blocks_.push_back(load_block(loader, names, i));
      if (options.progress) {
        options.progress(static_cast<double>(i + 1) / static_cast<double>(c.num_layers + 1));
      }
    }
    Tensor output_norm = loader.vector(names.output_norm + ".weight", {c.hidden}, c.norm_offset);
    for (float& weight : output_norm.span<float>()) {
      weight *= c.logit_scale;
    }
    output_norm_ = loader.place(std::move(output_norm));
    const bool tied = !loader.has_matrix(names.output);
    info_.num_parameters = tied ? -c.vocab_size * c.hidden : 0;  // the shared table is counted once
    output_ = loader.linear({{tied ? names.embedding : names.output, c.vocab_size}}, c.hidden);
    loader.place(embedding_);
    info_.num_parameters += loader.num_parameters();
    info_.weight_bytes = loader.weight_bytes() + embedding_.matrix.num_bytes();
    info_.weights = loader.weights();
    describe_layers();
    info_.device = device_;
    info_.architecture = c.architecture;
    info_.name = c.name;
    info_.num_layers = c.num_layers;
    info_.hidden = c.hidden;
    info_.vocab_size = c.vocab_size;
    info_.max_positions = c.max_positions;
    if (options.progress) {
      options.progress(1.0);
    }
  }

  void describe_layers() {
    for (size_t i = 0; i < blocks_.size(); ++i) {
      const DecoderLayerConfig& layer = config_.layers[i];
      std::string text;
      switch (layer.mixer) {
        case Mixer::kAttention: text = config_.latent.kv_rank > 0 ? "latent attention" : "attention"; break;
        case Mixer::kShortConv: text = "short convolution"; break;
        case Mixer::kDeltaNet: text = "gated delta net"; break;
      }
      if (layer.window > 0) {
        text += concat(", window ", layer.window);
      }
      if (layer.has_indexer) {
        text += concat(", chosen ", config_.indexer.top_k, " blocks of ", config_.indexer.block_size);
      }
      if (config_.latent.indexer.top_k > 0) {
        text += concat(", chosen ", config_.latent.indexer.top_k);
      }
      const ExpertsConfig& experts = config_.experts;
      text += layer.has_experts ? concat("; experts ", experts.top_k, " of ", experts.num_experts,
                                         experts.shared_hidden > 0 ? ", one shared" : "")
                                : "; dense";
      info_.layers.push_back(std::move(text));
    }
  }

  Block load_block(Loader& loader, const DecoderNames& names, int64_t layer_idx) {
    const DecoderConfig& c = config_;
    const auto norm = [&](const std::string& pattern) {
      return loader.place(loader.vector(layer_name(pattern, layer_idx) + ".weight", {c.hidden}, c.norm_offset));
    };
    Block block;
    block.attn_norm = norm(names.attn_norm);
    block.ffn_norm = norm(names.ffn_norm);
    if (c.post_norms) {
      block.post_attn_norm = norm(names.post_attn_norm);
      block.post_ffn_norm = norm(names.post_ffn_norm);
    }
    if (c.layers[static_cast<size_t>(layer_idx)].mixer == Mixer::kAttention) {
      load_attention(loader, names, layer_idx, block);
    } else {
      load_state_mixer(loader, names, layer_idx, block);
    }
    load_feed_forward(loader, names, layer_idx, block);
    return block;
  }

  void load_state_mixer(Loader& loader, const DecoderNames& names, int64_t layer_idx, Block& block) {
    const DecoderConfig& c = config_;
    if (c.layers[static_cast<size_t>(layer_idx)].mixer == Mixer::kShortConv) {
      block.states = std::make_unique<ShortConv>(loader, names.conv, layer_idx, c.hidden, c.conv_taps);
    } else {
      block.states = std::make_unique<DeltaNet>(loader, c.delta_net, names.delta_net, layer_idx, c.hidden);
    }
    block.o = loader.linear({{layer_name(names.mixer_out, layer_idx), c.hidden}}, block.states->width());
    block.cache_idx = info_.state_layers.size();
    info_.state_layers.push_back(block.states->state_shape());
  }

  void load_attention(Loader& loader, const DecoderNames& names, int64_t layer_idx, Block& block) {
    const DecoderConfig& c = config_;
    const auto name = [&](const std::string& pattern) { return layer_name(pattern, layer_idx); };
    const auto norm = [&](const std::string& pattern, int64_t size) {
      return loader.place(loader.vector(name(pattern) + ".weight", {size}, c.norm_offset));
    };
    if (c.qk_norm != QkNorm::kNone) {
      const bool by_head = c.qk_norm == QkNorm::kHead;
      block.q_norm = norm(names.q_norm, by_head ? c.head_dim : q_width());
      block.k_norm = norm(names.k_norm, by_head ? c.head_dim : kv_width());
    }
    if (!names.sinks.empty()) {
      block.sinks = loader.place(loader.vector(name(names.sinks), {c.num_heads}));
    }
    block.cache_idx = info_.kv_layers.size();
    if (c.latent.kv_rank > 0) {
      block.latent = std::make_unique<LatentAttention>(loader, c.latent, names.latent, layer_idx, c.hidden);
      const std::vector<KvLayerShape> layers = block.latent->kv_layers();
      info_.kv_layers.insert(info_.kv_layers.end(), layers.begin(), layers.end());
    } else {
      const int64_t q_rows = c.attention_gate ? 2 * q_width() : q_width();
      block.qkv = loader.linear({{name(names.q), q_rows}, {name(names.k), kv_width()}, {name(names.v), kv_width()}},
                                c.hidden, c.qkv_bias ? Loader::Bias::kRequired : Loader::Bias::kOptional);
      info_.kv_layers.push_back({c.num_kv_heads, c.head_dim, c.head_dim});
      if (c.layers[static_cast<size_t>(layer_idx)].has_indexer) {
        block.indexer = std::make_unique<BlockIndexer>(loader, c.indexer, names.indexer, layer_idx, c.hidden);
        info_.kv_layers.push_back(block.indexer->kv_layer());
      }
    }
    block.o = loader.linear({{name(names.o), c.hidden}}, attention_width());
  }

  void load_feed_forward(Loader& loader, const DecoderNames& names, int64_t layer_idx, Block& block) {
    const DecoderConfig& c = config_;
    const auto name = [&](const std::string& pattern) { return layer_name(pattern, layer_idx); };
    if (c.layers[static_cast<size_t>(layer_idx)].has_experts) {
      block.experts = std::make_unique<Experts>(loader, c.experts, names.experts, layer_idx, c.hidden);
      return;
    }
    if (c.ffn_hidden == 0) {
      fail(ErrorCode::kModelFormat, "config.json: \"intermediate_size\" is missing");
    }
    block.gate_up = loader.linear({{name(names.gate), c.ffn_hidden}, {name(names.up), c.ffn_hidden}}, c.hidden);
    block.down = loader.linear({{name(names.down), c.hidden}}, c.ffn_hidden);
    dense_hidden_ = c.ffn_hidden;
  }

  void make_ropes(const LoadOptions& options, const Loader& loader) {
    // More positions than the model was trained for are refused later, by name; tables of that length could fill
    // memory.
    const int64_t max_pos =
        options.max_positions > 0 ? std::min(options.max_positions, config_.max_positions) : config_.max_positions;
    for (const RopeConfig& rope_config : config_.ropes) {
      RopeTables tables = make_rope_tables(rope_config, max_pos);
      info_.position_bytes +=
          (tables.cos.view().num_bytes() + tables.sin.view().num_bytes()) / std::max<int64_t>(max_pos, 1);
      ropes_.push_back({loader.place(std::move(tables.cos)), loader.place(std::move(tables.sin))});
    }
  }

  int64_t q_width() const { return config_.num_heads * config_.head_dim; }
  int64_t kv_width() const { return config_.num_kv_heads * config_.head_dim; }
  int64_t qkv_width() const {
    return config_.latent.kv_rank > 0 ? 0 : (config_.attention_gate ? 2 : 1) * q_width() + 2 * kv_width();
  }
  int64_t attention_width() const { return config_.latent.kv_rank > 0 ? config_.latent.output_width() : q_width(); }

  int64_t mixed_width(const Block& block) const { return block.states ? block.states->width() : attention_width(); }
  int64_t max_mixed_width() const {
    int64_t width = 0;
    for (const Block& block : blocks_) {
      width = std::max(width, mixed_width(block));
    }
    return width;
  }

  static size_t feed_forward_workspace_bytes(const Block& block, int64_t rows) {
    if (block.experts) {
      return block.experts->workspace_bytes(rows);
    }
    return std::max(matmul_workspace_bytes(block.gate_up.weight, rows),
                    matmul_workspace_bytes(block.down.weight, rows));
  }

  // The worst step of every layer: as many sequences as tokens, the longest page table. Shapes only: nothing is read.
  size_t attention_workspace_bytes(const StepLimits& limits) const {
    if (config_.latent.kv_rank > 0) {
      return blocks_.front().latent->workspace_bytes(limits, ropes_.front());
    }
    constexpr int64_t kPage = 16;  // the smallest page; only the length of the table in tokens counts
    const int64_t num_tokens = limits.max_tokens;
    Batch batch;
    const auto view = [&](DType dtype, std::initializer_list<int64_t> shape) {
      return TensorView(nullptr, dtype, shape, device_);
    };
    const auto ints = [&](std::initializer_list<int64_t> shape) { return view(DType::kI32, shape); };
    batch.cu_q_lens = ints({num_tokens + 1});
    batch.past_lens = ints({num_tokens});
    batch.page_table = ints({num_tokens, ceil_div(limits.max_kv_len, kPage)});
    batch.slot_mapping = ints({num_tokens});
    StepBuffers buffers;
    buffers.qkv = view(DType::kF32, {num_tokens, qkv_width()});
    buffers.mixed = view(DType::kF32, {num_tokens, q_width()});
    // The quantised cache needs most: its scales are unpacked into scratch memory.
    const TensorView scales = view(DType::kF32, {config_.num_kv_heads * config_.head_dim});
    const TensorView pages = view(DType::kI8, {1, kPage, config_.num_kv_heads, config_.head_dim});
    const KvLayer layer{.key = pages, .value = pages, .k_scale = scales, .v_scale = scales};
    size_t num_bytes = 0;
    for (size_t i = 0; i < blocks_.size(); ++i) {
      if (blocks_[i].states) {
        continue;
      }
      if (blocks_[i].indexer) {
        auto args = attention_args<SparsePagedAttentionArgs>(i, batch, layer, buffers);
        args.selected_indices = ints({num_tokens, 1});
        args.selected_counts = ints({num_tokens});
        num_bytes = std::max(num_bytes, blocks_[i].indexer->workspace_bytes(limits, rope_of(i)) +
                                            sparse_paged_attention_workspace_bytes(args, limits.num_threads));
        continue;
      }
      num_bytes =
          std::max(num_bytes, paged_attention_workspace_bytes(
                                  attention_args<PagedAttentionArgs>(i, batch, layer, buffers), limits.num_threads));
    }
    return num_bytes;
  }

  StepBuffers take_buffers(int64_t num_tokens, int64_t num_logit_rows, Workspace& workspace) const {
    const auto rows = [&](int64_t width) { return take({num_tokens, width}, workspace); };
    StepBuffers buffers;
    buffers.x = rows(config_.hidden);
    buffers.h = rows(config_.hidden);
    buffers.qkv = rows(qkv_width());
    buffers.mixed = rows(max_mixed_width());
    buffers.projected = rows(config_.hidden);
    buffers.gate_up = rows(2 * dense_hidden_);
    buffers.activated = rows(dense_hidden_);
    buffers.kept_x = take({num_logit_rows, config_.hidden}, workspace);
    buffers.kept_mixed = take({num_logit_rows, max_mixed_width()}, workspace);
    return buffers;
  }

  const RopeTables& rope_of(size_t layer_idx) const { return ropes_[config_.layers[layer_idx].rope_idx]; }

  // Of paged_attention or sparse_paged_attention.
  template <class Args>
  Args attention_args(size_t layer_idx, const Batch& batch, const KvLayer& layer, const StepBuffers& buffers) const {
    const Block& block = blocks_[layer_idx];
    const DecoderLayerConfig& layer_config = config_.layers[layer_idx];
    Args args;
    if constexpr (requires { args.beyond_schema; }) {
      args.beyond_schema = true;
    }
    args.output = columns(buffers.mixed, 0, q_width());
    args.query = buffers.qkv;
    if (config_.attention_gate) {
      args.query = columns(buffers.qkv, 0, q_width());
      args.key = columns(buffers.qkv, 2 * q_width(), kv_width());
      args.value = columns(buffers.qkv, 2 * q_width() + kv_width(), kv_width());
    }
    args.key_cache = layer.key;
    args.value_cache = layer.value;
    args.cumulative_sequence_length = batch.cu_q_lens;
    args.past_seqlens = batch.past_lens;
    args.block_table = batch.page_table;
    args.slot_mapping = batch.slot_mapping;
    if (layer_config.rope_idx < ropes_.size()) {
      args.cos_cache = ropes_[layer_config.rope_idx].cos;
      args.sin_cache = ropes_[layer_config.rope_idx].sin;
      args.do_rotary = true;
    }
    if (config_.qk_norm == QkNorm::kHead) {
      args.q_norm_weight = block.q_norm;
      args.k_norm_weight = block.k_norm;
    }
    args.head_sink = block.sinks;
    args.k_scale = layer.k_scale;
    args.v_scale = layer.v_scale;
    args.num_heads = config_.num_heads;
    args.kv_num_heads = config_.num_kv_heads;
    args.scale = config_.attention_scale;
    args.softcap = config_.attention_softcap;
    args.local_window_size = layer_config.window > 0 ? layer_config.window : -1;
    args.rotary_interleaved = config_.rope_interleaved;
    args.qk_norm_epsilon = config_.norm_eps;
    const auto quant_type = [](const TensorView& scale) {
      return !scale ? "NONE" : scale.num_elements() == 1 ? "PER_TENSOR" : "PER_CHANNEL";
    };
    args.k_quant_type = quant_type(layer.k_scale);
    args.v_quant_type = quant_type(layer.v_scale);
    return args;
  }

  // buffers.mixed = attention(norm(x)), or what stands in its place
  void mix(size_t layer_idx, const Batch& batch, const ModelMemory& memory, const StepBuffers& buffers,
           const OpContext& context) const {
    const Block& block = blocks_[layer_idx];
    if (layer_idx == 0) {
      rms_norm({.out = buffers.h, .x = buffers.x, .weight = block.attn_norm, .eps = config_.norm_eps}, context);
    } else {
      add_and_norm(block.attn_norm, buffers, context);
    }
    if (block.states) {
      block.states->forward(buffers.h, columns(buffers.mixed, 0, block.states->width()), batch, *memory.states,
                            block.cache_idx, context);
      return;
    }
    if (block.latent) {
      block.latent->forward(buffers.h, columns(buffers.mixed, 0, attention_width()), batch, memory.kv, block.cache_idx,
                            ropes_.front(), context);
      return;
    }
    const KvLayer cached = memory.kv.layer(block.cache_idx);
    block.qkv(buffers.h, buffers.qkv, context);
    if (config_.qk_norm == QkNorm::kWhole) {
      norm_in_place(columns(buffers.qkv, 0, q_width()), block.q_norm, context);
      norm_in_place(columns(buffers.qkv, q_width(), kv_width()), block.k_norm, context);
    }
    const Workspace::Scope scope(*context.workspace);
    TensorView gates;
    if (config_.attention_gate) {
      gates = take_gates(buffers.qkv, context);
    }
    if (block.indexer) {
      auto args = attention_args<SparsePagedAttentionArgs>(layer_idx, batch, cached, buffers);
      const Selection selection =
          block.indexer->forward(buffers.h, batch, memory.kv.layer(block.cache_idx + 1), rope_of(layer_idx), context);
      args.selected_indices = selection.indices;
      args.selected_counts = selection.counts;
      sparse_paged_attention(args, context);
    } else {
      paged_attention(attention_args<PagedAttentionArgs>(layer_idx, batch, cached, buffers), context);
    }
    if (config_.attention_gate) {
      const TensorView output = columns(buffers.mixed, 0, q_width());
      gated_activation({.out = output, .gate = gates, .value = output, .kind = Gate::kSigmoid}, context);
    }
  }

  // The gates that stand between the heads of q; the heads close up.
  TensorView take_gates(const TensorView& qkv, const OpContext& context) const {
    const int64_t num_tokens = qkv.dim(0);
    const auto head_dim = static_cast<size_t>(config_.head_dim);
    const TensorView gates = take({num_tokens, q_width()}, *context.workspace);
    context.pool->parallel_for(num_tokens, 4, [&](int64_t begin, int64_t end, int) {
      for (int64_t t = begin; t < end; ++t) {
        float* row = qkv.as<float>() + t * qkv.stride(0);
        float* gate = gates.as<float>() + t * q_width();
        for (size_t h = 0; h < static_cast<size_t>(config_.num_heads); ++h) {
          std::memcpy(gate + h * head_dim, row + (2 * h + 1) * head_dim, head_dim * sizeof(float));
          std::memmove(row + h * head_dim, row + 2 * h * head_dim, head_dim * sizeof(float));
        }
      }
    });
    return gates;
  }

  // x += [norm] W_o mixed; projected = [norm] feed-forward(norm(x))
  void finish_block(const Block& block, const StepBuffers& buffers, const OpContext& context) const {
    block.o(columns(buffers.mixed, 0, mixed_width(block)), buffers.projected, context);
    norm_in_place(buffers.projected, block.post_attn_norm, context);
    add_and_norm(block.ffn_norm, buffers, context);
    if (block.experts) {
      block.experts->forward(buffers.h, buffers.projected, context);
    } else {
      feed_forward(block, buffers, context);
    }
    norm_in_place(buffers.projected, block.post_ffn_norm, context);
  }

  // projected = W_down (gate(W_gate h) * W_up h)
  void feed_forward(const Block& block, const StepBuffers& buffers, const OpContext& context) const {
    block.gate_up(buffers.h, buffers.gate_up, context);
    gated_activation({.out = buffers.activated,
                      .gate = columns(buffers.gate_up, 0, dense_hidden_),
                      .value = columns(buffers.gate_up, dense_hidden_, dense_hidden_),
                      .kind = config_.gate,
                      .alpha = config_.gate_alpha,
                      .limit = config_.gate_limit},
                     context);
    block.down(buffers.activated, buffers.projected, context);
  }

  // Without a weight: nothing.
  void norm_in_place(const TensorView& x, const TensorView& weight, const OpContext& context) const {
    if (weight) {
      rms_norm({.out = x, .x = x, .weight = weight, .eps = config_.norm_eps}, context);
    }
  }

  // h = norm(x + projected), x += projected: the sum that a block leaves open is taken by the norm that follows it.
  void add_and_norm(const Tensor& weight, const StepBuffers& buffers, const OpContext& context) const {
    rms_norm({.out = buffers.h,
              .x = buffers.projected,
              .weight = weight,
              .residual = buffers.x,
              .residual_out = buffers.x,
              .eps = config_.norm_eps},
             context);
  }

  // Only the rows whose logits are wanted; every buffer then has that many.
  static void keep_rows(const TensorView& rows, StepBuffers& buffers, const OpContext& context) {
    const int64_t num_rows = rows.dim(0);
    if (num_rows < buffers.x.dim(0)) {  // rows ascend: as many as tokens are all of them
      gather_rows({.out = buffers.kept_x, .x = buffers.x, .rows = rows}, context);
      gather_rows({.out = buffers.kept_mixed, .x = buffers.mixed, .rows = rows}, context);
      buffers.x = buffers.kept_x;
      buffers.mixed = buffers.kept_mixed;
    }
    for (TensorView* buffer : {&buffers.h, &buffers.projected, &buffers.gate_up, &buffers.activated}) {
      *buffer = buffer->rows(0, num_rows);
    }
  }

  DecoderConfig config_;
  std::unique_ptr<io::WeightSource> source_;
  Device device_;
  ModelInfo info_;
  LoadedMatrix embedding_;
  std::vector<Block> blocks_;
  Tensor output_norm_;
  Linear output_;
  std::vector<RopeTables> ropes_;
  int64_t dense_hidden_ = 0;  // of the layers that have a dense feed-forward; 0: none has
};

}  // namespace

std::unique_ptr<Model> make_decoder(DecoderConfig config, const DecoderNames& names,
                                    std::unique_ptr<io::WeightSource> source, const LoadOptions& options,
                                    const OpContext& context) {
  return std::make_unique<Decoder>(std::move(config), names, std::move(source), options, context);
}

DecoderNames gguf_decoder_names() {
  return {.embedding = "token_embd",
          .output_norm = "output_norm",
          .output = "output",
          .attn_norm = "blk.{}.attn_norm",
          .q = "blk.{}.attn_q",
          .k = "blk.{}.attn_k",
          .v = "blk.{}.attn_v",
          .o = "blk.{}.attn_output",
          .q_norm = "blk.{}.attn_q_norm",
          .k_norm = "blk.{}.attn_k_norm",
          .post_attn_norm = "blk.{}.post_attention_norm",
          .ffn_norm = "blk.{}.ffn_norm",
          .gate = "blk.{}.ffn_gate",
          .up = "blk.{}.ffn_up",
          .down = "blk.{}.ffn_down",
          .post_ffn_norm = "blk.{}.post_ffw_norm",
          .experts = {
              .router = "blk.{}.ffn_gate_inp",
              .selection_bias = "blk.{}.exp_probs_b.bias",
              .shared_gate_proj = "blk.{}.ffn_gate_shexp",
              .shared_up = "blk.{}.ffn_up_shexp",
              .shared_down = "blk.{}.ffn_down_shexp",
              .read = experts_stacked("blk.{}.ffn_gate_exps", "blk.{}.ffn_up_exps", "blk.{}.ffn_down_exps", ".bias")}};
}

DecoderNames hf_decoder_names(const std::string& prefix) {
  const std::string layer = prefix + "layers.{}.";
  return {.embedding = prefix + "embed_tokens",
          .output_norm = prefix + "norm",
          .output = "lm_head",
          .attn_norm = layer + "input_layernorm",
          .q = layer + "self_attn.q_proj",
          .k = layer + "self_attn.k_proj",
          .v = layer + "self_attn.v_proj",
          .o = layer + "self_attn.o_proj",
          .q_norm = layer + "self_attn.q_norm",
          .k_norm = layer + "self_attn.k_norm",
          .post_attn_norm = {},
          .ffn_norm = layer + "post_attention_layernorm",
          .gate = layer + "mlp.gate_proj",
          .up = layer + "mlp.up_proj",
          .down = layer + "mlp.down_proj",
          .post_ffn_norm = {},
          .latent = {.q = layer + "self_attn.q_proj",
                     .q_a = layer + "self_attn.q_a_proj",
                     .q_a_norm = layer + "self_attn.q_a_layernorm",
                     .q_b = layer + "self_attn.q_b_proj",
                     .kv_a = layer + "self_attn.kv_a_proj_with_mqa",
                     .kv_a_norm = layer + "self_attn.kv_a_layernorm",
                     .kv_b = layer + "self_attn.kv_b_proj",
                     .indexer = {.q = layer + "self_attn.indexer.wq_b",
                                 .k = layer + "self_attn.indexer.wk",
                                 .k_norm = layer + "self_attn.indexer.k_norm",
                                 .weights = layer + "self_attn.indexer.weights_proj"}},
          .experts = {.router = layer + "mlp.gate",
                      .selection_bias = layer + "mlp.gate.e_score_correction_bias",
                      .shared_gate_proj = layer + "mlp.shared_experts.gate_proj",
                      .shared_up = layer + "mlp.shared_experts.up_proj",
                      .shared_down = layer + "mlp.shared_experts.down_proj",
                      .read = experts_apart(layer + "mlp.experts.[].gate_proj", layer + "mlp.experts.[].up_proj",
                                            layer + "mlp.experts.[].down_proj")}};
}

}  // namespace shoal
