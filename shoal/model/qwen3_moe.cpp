// qwen3_moe: qwen3 with a mixture of experts in most layers, softmax routing.
#include <array>

#include "shoal/model/config_reader.h"
#include "shoal/model/decoder.h"
#include "shoal/model/registry.h"

namespace shoal {
namespace {

constexpr std::array<std::string_view, 1> kGgufNames{"qwen3moe"};
constexpr std::array<std::string_view, 1> kHfNames{"qwen3_moe"};

std::unique_ptr<Model> from_gguf(std::unique_ptr<io::GgufFile> file, const LoadOptions& options,
                                 const OpContext& context) {
  DecoderConfig config = read_gguf_config(*file);
  config.qk_norm = QkNorm::kHead;
  read_gguf_experts(*file, config);
  return make_decoder(std::move(config), gguf_decoder_names(), std::move(file), options, context);
}

std::unique_ptr<Model> from_hf(std::unique_ptr<io::ModelFolder> folder, const LoadOptions& options,
                               const OpContext& context) {
  const Json& json = folder->config();
  DecoderConfig config = read_hf_config(json);
  config.qk_norm = QkNorm::kHead;
  config.experts = read_hf_experts(json, {}, config);
  config.experts.normalize = hf_bool_or(json, "norm_topk_prob", false);
  read_hf_sparse_layers(json, config);
  read_hf_windows(json, config);
  const DecoderNames names = hf_decoder_names(hf_tensor_prefix(*folder));
  return make_decoder(std::move(config), names, std::move(folder), options, context);
}

}  // namespace

const Architecture kQwen3Moe{kGgufNames, kHfNames, from_gguf, from_hf};

}  // namespace shoal
