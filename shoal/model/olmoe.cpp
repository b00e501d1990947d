// olmoe: norms over all heads of q and of k, softmax routing whose weights need not add up to one.
#include <array>

#include "shoal/model/config_reader.h"
#include "shoal/model/decoder.h"
#include "shoal/model/registry.h"

namespace shoal {
namespace {

constexpr std::array<std::string_view, 1> kNames{"olmoe"};

std::unique_ptr<Model> from_gguf(std::unique_ptr<io::GgufFile> file, const LoadOptions& options,
                                 const OpContext& context) {
  DecoderConfig config = read_gguf_config(*file);
  config.qk_norm = QkNorm::kWhole;
  read_gguf_experts(*file, config, false);
  return make_decoder(std::move(config), gguf_decoder_names(), std::move(file), options, context);
}

std::unique_ptr<Model> from_hf(std::unique_ptr<io::ModelFolder> folder, const LoadOptions& options,
                               const OpContext& context) {
  const Json& json = folder->config();
  DecoderConfig config = read_hf_config(json);
  config.qk_norm = QkNorm::kWhole;
  set_expert_layers(config);
  if (hf_double_or(json, "clip_qkv", 0.0) != 0.0) {
    fail(ErrorCode::kUnsupported, "config.json: clip_qkv is not supported");
  }
  config.experts = read_hf_experts(json, {.expert_hidden = "intermediate_size"}, config);
  config.experts.normalize = hf_bool_or(json, "norm_topk_prob", false);
  const DecoderNames names = hf_decoder_names(hf_tensor_prefix(*folder));
  return make_decoder(std::move(config), names, std::move(folder), options, context);
}

}  // namespace

const Architecture kOlmoe{kNames, kNames, from_gguf, from_hf};

}  // namespace shoal
