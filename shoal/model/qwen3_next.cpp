// qwen3_next and qwen3_5: gated delta nets in three layers of four, attention with an output gate in the fourth; norms
// stored less one, heads partly rotated. qwen3_next and qwen3_5_moe have experts with a gated shared one, qwen3_5 a dense
// feed-forward. Of qwen3_5's vision-language checkpoints the text part is read.
#include <array>
#include <string>
#include <vector>

#include "shoal/base/text.h"
#include "shoal/model/config_reader.h"
#include "shoal/model/decoder.h"
#include "shoal/model/registry.h"

namespace shoal {
namespace {

constexpr std::array<std::string_view, 5> kHfNames{"qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe",
                                                   "qwen3_5_moe_text"};

// By layer_types, or every full_attention_interval-th has attention.
void read_layers(const Json& json, DecoderConfig& config) {
  const int64_t interval = hf_int_or(json, "full_attention_interval", 4, 1, 4096);
  const std::vector<std::string> types = hf_layer_types(json, config.layers.size());
  for (size_t i = 0; i < config.layers.size(); ++i) {
    bool is_full = static_cast<int64_t>(i + 1) % interval == 0;
    if (!types.empty()) {
      is_full = types[i] == "full_attention";
      if (!is_full && types[i] != "linear_attention") {
        fail(ErrorCode::kUnsupported, "config.json: layer type \"", printable(types[i]), "\" is not supported");
      }
    }
    config.layers[i].mixer = is_full ? Mixer::kAttention : Mixer::kDeltaNet;
  }
}

DeltaNetConfig read_delta_net(const Json& json, const DecoderConfig& decoder) {
  DeltaNetConfig c;
  c.num_key_heads = hf_int(json, "linear_num_key_heads", 1, 4096);
  c.num_value_heads = hf_int(json, "linear_num_value_heads", 1, 4096);
  c.key_dim = hf_int(json, "linear_key_head_dim", 1, 4096);
  c.value_dim = hf_int(json, "linear_value_head_dim", 1, 4096);
  c.num_taps = hf_int(json, "linear_conv_kernel_dim", 2, 64);
  c.norm_eps = decoder.norm_eps;
  if (c.num_value_heads % c.num_key_heads != 0) {
    fail(ErrorCode::kModelFormat, "config.json: ", c.num_value_heads, " value heads are not a multiple of ",
         c.num_key_heads, " key heads");
  }
  return c;
}

// Published files of qwen3_5_moe have an expert's tensors apart or all experts' together.
ReadExperts experts_of(const std::string& experts) {
  const std::string gate_up = experts + "gate_up_proj";
  const ReadExperts fused = experts_fused(gate_up, experts + "down_proj");
  const ReadExperts apart = experts_apart(experts + "[].gate_proj", experts + "[].up_proj", experts + "[].down_proj");
  return [=](Loader& loader, int64_t layer_idx, const ExpertsConfig& config, int64_t hidden) {
    return (loader.has(layer_name(gate_up, layer_idx)) ? fused : apart)(loader, layer_idx, config, hidden);
  };
}

DecoderNames names_of(const std::string& prefix, bool is_next) {
  DecoderNames names = hf_decoder_names(prefix);
  const std::string mixer = prefix + "layers.{}.linear_attn.";
  const std::string mlp = prefix + "layers.{}.mlp.";
  names.delta_net = {
      .conv = mixer + "conv1d", .norm = mixer + "norm", .a_log = mixer + "A_log", .dt_bias = mixer + "dt_bias"};
  if (is_next) {
    names.delta_net.qkvz = mixer + "in_proj_qkvz";
    names.delta_net.ba = mixer + "in_proj_ba";
  } else {
    names.delta_net.qkv = mixer + "in_proj_qkv";
    names.delta_net.z = mixer + "in_proj_z";
    names.delta_net.b = mixer + "in_proj_b";
    names.delta_net.a = mixer + "in_proj_a";
  }
  names.mixer_out = mixer + "out_proj";
  names.experts.shared_gate_proj = mlp + "shared_expert.gate_proj";
  names.experts.shared_up = mlp + "shared_expert.up_proj";
  names.experts.shared_down = mlp + "shared_expert.down_proj";
  names.experts.shared_gate = mlp + "shared_expert_gate";
  names.experts.read = experts_of(mlp + "experts.");
  return names;
}

std::unique_ptr<Model> from_hf(std::unique_ptr<io::ModelFolder> folder, const LoadOptions& options,
                               const OpContext& context) {
  const Json& json = hf_text_config(folder->config());
  DecoderConfig config = read_hf_config(json);
  const bool is_next = config.architecture == "qwen3_next";
  config.norm_offset = 1.0f;
  config.qk_norm = QkNorm::kHead;
  config.attention_gate = true;
  read_layers(json, config);
  config.delta_net = read_delta_net(json, config);
  if (is_next || config.architecture.starts_with("qwen3_5_moe")) {
    config.experts = read_hf_experts(json, {}, config);
    config.experts.normalize = hf_bool_or(json, "norm_topk_prob", true);
    config.experts.shared_hidden = hf_int(json, "shared_expert_intermediate_size", 1, 1 << 24);
    read_hf_sparse_layers(json, config);
  }
  const DecoderNames names = names_of(hf_tensor_prefix(*folder), is_next);
  return make_decoder(std::move(config), names, std::move(folder), options, context);
}

}  // namespace

const Architecture kQwen3Next{{}, kHfNames, nullptr, from_hf};

}  // namespace shoal
