// glm4_moe: the first layers dense, then sigmoid routing within groups with a selection bias, and a shared expert; heads
// partly rotated.
#include <array>

#include "shoal/model/config_reader.h"
#include "shoal/model/decoder.h"
#include "shoal/model/registry.h"

namespace shoal {
namespace {

constexpr std::array<std::string_view, 1> kHfNames{"glm4_moe"};

std::unique_ptr<Model> from_hf(std::unique_ptr<io::ModelFolder> folder, const LoadOptions& options,
                               const OpContext& context) {
  const Json& json = folder->config();
  DecoderConfig config = read_hf_config(json);
  config.qk_norm = hf_bool_or(json, "use_qk_norm", false) ? QkNorm::kHead : QkNorm::kNone;
  config.qkv_bias = hf_bool_or(json, "attention_bias", false);
  config.experts = read_hf_experts(json, {.num_experts = "n_routed_experts"}, config);
  read_hf_groups(json, config.experts);
  const int64_t num_dense = hf_int_or(json, "first_k_dense_replace", 0, 0, config.num_layers);
  for (int64_t i = num_dense; i < config.num_layers; ++i) {
    config.layers[static_cast<size_t>(i)].has_experts = true;
  }
  const DecoderNames names = hf_decoder_names(hf_tensor_prefix(*folder));
  return make_decoder(std::move(config), names, std::move(folder), options, context);
}

}  // namespace

const Architecture kGlm4Moe{{}, kHfNames, nullptr, from_hf};

}  // namespace shoal
