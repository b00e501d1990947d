// gemma3, text part: alternating window and global layers with a rotary base each, four norms a block, norms of the
// heads of q and k, scaled embeddings.
//
// Hugging Face checkpoints store every norm weight minus one; GGUF stores the weight itself.
#include <array>
#include <cmath>

#include "shoal/model/config_reader.h"
#include "shoal/model/decoder.h"
#include "shoal/model/registry.h"

namespace shoal {
namespace {

constexpr std::array<std::string_view, 1> kGgufNames{"gemma3"};
constexpr std::array<std::string_view, 2> kHfNames{"gemma3", "gemma3_text"};

constexpr int64_t kPattern = 6;  // every sixth layer is global, where the file does not say otherwise
constexpr double kLocalTheta = 10000.0;
constexpr int64_t kLayersOf27B = 62;  // the one size whose scale is not 1 / sqrt(head_dim); GGUF has no key for it

// Layer kinds: rope 0 is the global layers', rope 1 the window layers'.
void set_layers(DecoderConfig& config, int64_t window, int64_t pattern) {
  for (int64_t i = 0; i < config.num_layers; ++i) {
    const bool global = (i + 1) % pattern == 0;
    config.layers[static_cast<size_t>(i)] = {.window = global ? 0 : window, .rope_idx = global ? 0u : 1u};
  }
}

void set_family(DecoderConfig& config) {
  config.qk_norm = QkNorm::kHead;
  config.post_norms = true;
  config.gate = Gate::kGeluTanh;
  config.embedding_scale = std::sqrt(static_cast<float>(config.hidden));
}

RopeConfig local_rope(double theta, int64_t rotary_dim) {
  RopeConfig rope;
  rope.rotary_dim = rotary_dim;
  rope.theta = theta;
  return rope;
}

std::unique_ptr<Model> from_gguf(std::unique_ptr<io::GgufFile> file, const LoadOptions& options,
                                 const OpContext& context) {
  DecoderConfig config = read_gguf_config(*file);
  set_family(config);
  if (config.num_layers == kLayersOf27B) {
    config.attention_scale = 1.0f / std::sqrt(static_cast<float>(config.hidden) / static_cast<float>(config.num_heads));
  }
  config.ropes.push_back(local_rope(file->get_double("gemma3.rope.freq_base_swa", kLocalTheta), config.head_dim));
  const int64_t window = file->get_int("gemma3.attention.sliding_window");
  const int64_t pattern = file->get_int("gemma3.attention.sliding_window_pattern", kPattern);
  if (window < 1 || pattern < 1) {
    fail(ErrorCode::kModelFormat, "metadata \"gemma3.attention.sliding_window\" or its pattern is not positive");
  }
  set_layers(config, window, pattern);
  return make_decoder(std::move(config), gguf_decoder_names(), std::move(file), options, context);
}

// `rope_parameters` by layer type (newer configs), or rope_theta, rope_scaling and rope_local_base_freq.
void read_ropes(const Json& text, DecoderConfig& config) {
  const Json* by_type = text.find("rope_parameters");
  const Json* global = by_type != nullptr ? by_type->find("full_attention") : nullptr;
  const Json* local = by_type != nullptr ? by_type->find("sliding_attention") : nullptr;
  if (global != nullptr && local != nullptr) {
    config.ropes = {read_hf_rope(text, global, 1e6, config.head_dim),
                    read_hf_rope(text, local, kLocalTheta, config.head_dim)};
    return;
  }
  config.ropes = {read_hf_rope(text, text.find("rope_scaling"), hf_double_or(text, "rope_theta", 1e6), config.head_dim),
                  local_rope(hf_positive_or(text, "rope_local_base_freq", kLocalTheta), config.head_dim)};
}

std::unique_ptr<Model> from_hf(std::unique_ptr<io::ModelFolder> folder, const LoadOptions& options,
                               const OpContext& context) {
  const Json& text = hf_text_config(folder->config());
  DecoderConfig config = read_hf_config(text);
  set_family(config);
  config.norm_offset = 1.0f;
  const double scalar = hf_positive_or(text, "query_pre_attn_scalar", static_cast<double>(config.head_dim));
  config.attention_scale = static_cast<float>(1.0 / std::sqrt(scalar));
  read_ropes(text, config);
  set_layers(config, hf_int(text, "sliding_window", 1, int64_t{1} << 30),
             hf_int_or(text, "sliding_window_pattern", kPattern, 1, 4096));
  if (text.find("layer_types") != nullptr) {
    read_hf_windows(text, config);
    for (DecoderLayerConfig& layer : config.layers) {
      layer.rope_idx = layer.window > 0 ? 1u : 0u;
    }
  }
  DecoderNames names = hf_decoder_names(hf_tensor_prefix(*folder));
  const std::string layer = names.attn_norm.substr(0, names.attn_norm.rfind("input_layernorm"));
  names.post_attn_norm = layer + "post_attention_layernorm";
  names.ffn_norm = layer + "pre_feedforward_layernorm";
  names.post_ffn_norm = layer + "post_feedforward_layernorm";
  return make_decoder(std::move(config), names, std::move(folder), options, context);
}

}  // namespace

const Architecture kGemma3{kGgufNames, kHfNames, from_gguf, from_hf};

}  // namespace shoal
