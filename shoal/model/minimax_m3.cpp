// minimax_m3, text part: norms stored less one and of each head, heads partly rotated, clamped gates, sigmoid routing with
// a selection bias and a shared expert. In layers of type "minimax_m3_sparse" every head of keys and values attends to the
// blocks of positions that its indexer chooses.
#include <array>
#include <string>
#include <vector>

#include "shoal/base/text.h"
#include "shoal/model/config_reader.h"
#include "shoal/model/decoder.h"
#include "shoal/model/registry.h"

namespace shoal {
namespace {

constexpr std::array<std::string_view, 1> kHfNames{"minimax_m3_vl"};

constexpr int64_t kMaxWidth = 1 << 24;

// A number a layer, not 0 for those that have what `key` is about; empty where it is absent.
std::vector<bool> read_flags(const Json& json, std::string_view key, size_t num_layers) {
  std::vector<bool> flags;
  if (hf_given(json, key)) {
    const std::string what = "config.json: " + std::string(key);
    for (const Json& flag : json.find(key)->as_array(what)) {
      flags.push_back(flag.as_int(what) != 0);
    }
    if (flags.size() != num_layers) {
      fail(ErrorCode::kModelFormat, what, " has ", flags.size(), " entries for ", num_layers, " layers");
    }
  }
  return flags;
}

// Published configs have what concerns the indexer in an object of its own, which goes before the newer keys.
const Json* sparse_config(const Json& json) {
  const Json* sparse = json.find("sparse_attention_config");
  return sparse != nullptr && sparse->is_object() ? sparse : nullptr;
}

void read_layers(const Json& json, DecoderConfig& config) {
  const size_t num_layers = config.layers.size();
  const std::vector<std::string> types = hf_layer_types(json, num_layers);
  for (size_t i = 0; i < types.size(); ++i) {
    if (types[i] != "full_attention" && types[i] != "minimax_m3_sparse") {
      fail(ErrorCode::kUnsupported, "config.json: layer type \"", printable(types[i]), "\" is not supported");
    }
    config.layers[i].has_indexer = types[i] == "minimax_m3_sparse";
  }
  if (const Json* sparse = sparse_config(json); sparse != nullptr && types.empty()) {
    const std::vector<bool> flags = read_flags(*sparse, "sparse_attention_freq", num_layers);
    for (size_t i = 0; i < flags.size(); ++i) {
      config.layers[i].has_indexer = flags[i];
    }
  }
  set_expert_layers(config);
  const std::vector<bool> flags = read_flags(json, "moe_layer_freq", num_layers);
  for (size_t i = 0; i < flags.size(); ++i) {
    config.layers[i].has_experts = flags[i];
  }
  read_hf_mlp_types(json, config);
}

BlockIndexerConfig read_indexer(const Json& json, const DecoderConfig& decoder) {
  const Json* sparse = sparse_config(json);
  const auto read = [&](std::string_view key, std::string_view published, int64_t low, int64_t high) {
    const bool is_published = sparse != nullptr && hf_given(*sparse, published);
    return is_published ? hf_int(*sparse, published, low, high) : hf_int(json, key, low, high);
  };
  BlockIndexerConfig c;
  c.num_heads = read("index_n_heads", "sparse_num_index_heads", 1, 4096);
  c.head_dim = read("index_head_dim", "sparse_index_dim", 8, 4096);
  c.block_size = read("index_block_size", "sparse_block_size", 1, 1 << 20);
  c.top_k = read("index_topk_blocks", "sparse_topk_blocks", 1, 1 << 20);
  c.num_local = read("index_local_blocks", "sparse_local_block", 0, c.top_k);
  c.norm_eps = decoder.norm_eps;
  c.norm_offset = decoder.norm_offset;
  if (c.num_heads != decoder.num_kv_heads) {
    fail(ErrorCode::kUnsupported, "config.json: ", c.num_heads, " index heads for ", decoder.num_kv_heads,
         " key-value heads are not supported (as many)");
  }
  if (c.head_dim % 8 != 0 || c.head_dim < decoder.ropes.front().rotary_dim) {
    fail(ErrorCode::kModelFormat, "config.json: index_head_dim ", c.head_dim, " is not a multiple of 8 that holds the ",
         decoder.ropes.front().rotary_dim, " rotated channels");
  }
  return c;
}

DecoderNames names_of(const std::string& prefix) {
  DecoderNames names = hf_decoder_names(prefix);
  const std::string layer = prefix + "layers.{}.";
  const std::string block = layer + "block_sparse_moe.";
  names.output = "language_model.lm_head";
  names.indexer = {.q = layer + "self_attn.index_q_proj",
                   .k = layer + "self_attn.index_k_proj",
                   .q_norm = layer + "self_attn.index_q_norm",
                   .k_norm = layer + "self_attn.index_k_norm"};
  names.experts.router = block + "gate";
  names.experts.selection_bias = block + "e_score_correction_bias";
  names.experts.shared_gate_proj = block + "shared_experts.gate_proj";
  names.experts.shared_up = block + "shared_experts.up_proj";
  names.experts.shared_down = block + "shared_experts.down_proj";
  names.experts.read = experts_apart(block + "experts.[].w1", block + "experts.[].w3", block + "experts.[].w2");
  return names;
}

std::unique_ptr<Model> from_hf(std::unique_ptr<io::ModelFolder> folder, const LoadOptions& options,
                               const OpContext& context) {
  const Json& json = hf_text_config(folder->config());
  DecoderConfig config = read_hf_config(json);
  config.norm_offset = 1.0f;
  config.qk_norm = QkNorm::kHead;
  config.gate = Gate::kClamped;
  config.gate_alpha = static_cast<float>(hf_positive_or(json, "swiglu_alpha", 1.702));
  config.gate_limit = static_cast<float>(hf_positive_or(json, "swiglu_limit", 7.0));
  config.experts =
      read_hf_experts(json, {.num_experts = "num_local_experts", .expert_hidden = "intermediate_size"}, config);
  config.experts.score = RouterScore::kSigmoid;
  config.experts.scale = static_cast<float>(hf_positive_or(json, "routed_scaling_factor", 1.0));
  config.experts.shared_hidden = hf_int(json, "shared_intermediate_size", 1, kMaxWidth);
  check_sigmoid(config.experts);
  config.ffn_hidden = hf_int_or(json, "dense_intermediate_size", 0, 1, kMaxWidth);
  read_layers(json, config);
  config.indexer = read_indexer(json, config);
  const DecoderNames names = names_of(hf_tensor_prefix(*folder));
  return make_decoder(std::move(config), names, std::move(folder), options, context);
}

}  // namespace

const Architecture kMinimaxM3{{}, kHfNames, nullptr, from_hf};

}  // namespace shoal
