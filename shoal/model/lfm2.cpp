// lfm2 and lfm2_moe: short convolutions in most layers, attention with norms of the heads in the others; feed-forwards
// dense, or behind the first layers experts with sigmoid routing and a selection bias. From GGUF: lfm2.
#include <algorithm>
#include <array>
#include <string>
#include <vector>

#include "shoal/base/text.h"
#include "shoal/model/config_reader.h"
#include "shoal/model/decoder.h"
#include "shoal/model/registry.h"

namespace shoal {
namespace {

constexpr std::array<std::string_view, 1> kGgufNames{"lfm2"};
constexpr std::array<std::string_view, 2> kHfNames{"lfm2", "lfm2_moe"};

std::unique_ptr<Model> from_gguf(std::unique_ptr<io::GgufFile> file, const LoadOptions& options,
                                 const OpContext& context) {
  DecoderConfig config = read_gguf_config(*file);
  config.qk_norm = QkNorm::kHead;
  config.conv_taps = file->get_int("lfm2.shortconv.l_cache");
  if (config.conv_taps < 2 || config.conv_taps > 64) {
    fail(ErrorCode::kModelFormat, "metadata \"lfm2.shortconv.l_cache\" is ", config.conv_taps, ", expected 2 to 64");
  }
  for (size_t i = 0; i < config.layers.size(); ++i) {
    const bool has_conv = file->find("blk." + std::to_string(i) + ".shortconv.conv.weight") != nullptr;
    config.layers[i].mixer = has_conv ? Mixer::kShortConv : Mixer::kAttention;
  }
  DecoderNames names = gguf_decoder_names();
  names.output_norm = "token_embd_norm";
  names.conv = {.in = "blk.{}.shortconv.in_proj", .taps = "blk.{}.shortconv.conv", .is_flat = true};
  names.mixer_out = "blk.{}.shortconv.out_proj";
  return make_decoder(std::move(config), names, std::move(file), options, context);
}

void read_layers(const Json& json, DecoderConfig& config) {
  config.conv_taps = hf_int(json, "conv_L_cache", 2, 64);
  const std::vector<std::string> types = hf_layer_types(json, config.layers.size());
  if (types.empty()) {
    fail(ErrorCode::kModelFormat, "config.json: \"layer_types\" is missing");
  }
  for (size_t i = 0; i < types.size(); ++i) {
    if (types[i] != "conv" && types[i] != "full_attention") {
      fail(ErrorCode::kUnsupported, "config.json: layer type \"", printable(types[i]), "\" is not supported");
    }
    config.layers[i].mixer = types[i] == "conv" ? Mixer::kShortConv : Mixer::kAttention;
  }
}

// The width that a checkpoint has, from the one that its config gives.
int64_t adjusted_width(const Json& json, int64_t width) {
  if (!hf_bool_or(json, "block_auto_adjust_ff_dim", false)) {
    return width;
  }
  width = 2 * width / 3;
  if (hf_given(json, "block_ffn_dim_multiplier")) {
    const double factor = std::min(hf_positive_or(json, "block_ffn_dim_multiplier", 1.0), 64.0);  // no overflow
    const int64_t multiple = hf_int_or(json, "block_multiple_of", 256, 1, 65536);
    width = static_cast<int64_t>(factor * static_cast<double>(width));
    width = (width + multiple - 1) / multiple * multiple;
  }
  return width;
}

void read_experts(const Json& json, DecoderConfig& config) {
  config.experts = read_hf_experts(json, {}, config);
  config.experts.score = RouterScore::kSigmoid;
  config.experts.normalize = hf_bool_or(json, "norm_topk_prob", true);
  config.experts.scale = static_cast<float>(hf_positive_or(json, "routed_scaling_factor", 1.0));
  check_sigmoid(config.experts);
  set_expert_layers(config, hf_int_or(json, "num_dense_layers", 0, 0, config.num_layers));
}

DecoderNames names_of(const std::string& prefix) {
  DecoderNames names = hf_decoder_names(prefix);
  const std::string layer = prefix + "layers.{}.";
  const std::string forward = layer + "feed_forward.";
  names.output_norm = prefix + "embedding_norm";
  names.attn_norm = layer + "operator_norm";
  names.ffn_norm = layer + "ffn_norm";
  names.o = layer + "self_attn.out_proj";
  names.q_norm = layer + "self_attn.q_layernorm";
  names.k_norm = layer + "self_attn.k_layernorm";
  names.conv = {.in = layer + "conv.in_proj", .taps = layer + "conv.conv", .is_flat = false};
  names.mixer_out = layer + "conv.out_proj";
  names.gate = forward + "w1";
  names.up = forward + "w3";
  names.down = forward + "w2";
  names.experts.router = forward + "gate";
  names.experts.selection_bias = forward + "expert_bias";
  names.experts.read = experts_apart(forward + "experts.[].w1", forward + "experts.[].w3", forward + "experts.[].w2");
  return names;
}

std::unique_ptr<Model> from_hf(std::unique_ptr<io::ModelFolder> folder, const LoadOptions& options,
                               const OpContext& context) {
  const Json& json = folder->config();
  DecoderConfig config = read_hf_config(json);
  config.norm_eps = static_cast<float>(hf_positive_or(json, "norm_eps", 1e-5));
  config.qk_norm = QkNorm::kHead;
  read_layers(json, config);
  if (config.architecture == "lfm2_moe") {
    read_experts(json, config);
  } else {
    config.ffn_hidden = adjusted_width(json, config.ffn_hidden);
  }
  const DecoderNames names = names_of(hf_tensor_prefix(*folder));
  return make_decoder(std::move(config), names, std::move(folder), options, context);
}

}  // namespace

const Architecture kLfm2{kGgufNames, kHfNames, from_gguf, from_hf};

}  // namespace shoal
