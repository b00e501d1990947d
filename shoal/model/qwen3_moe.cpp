// qwen3_moe: qwen3 with a mixture of experts in most layers, softmax routing.
#include <array>
#include <set>

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

// Every decoder_sparse_step-th layer has experts, but for those in mlp_only_layers.
void read_sparse_layers(const Json& json, DecoderConfig& config) {
  std::set<int64_t> dense;
  if (const Json* only = json.find("mlp_only_layers"); only != nullptr && !only->is_null()) {
    for (const Json& layer : only->as_array("config.json: mlp_only_layers")) {
      dense.insert(layer.as_int("config.json: mlp_only_layers"));
    }
  }
  const int64_t step = hf_int_or(json, "decoder_sparse_step", 1, 1, 65536);
  for (int64_t i = 0; i < config.num_layers; ++i) {
    config.layers[static_cast<size_t>(i)].has_experts = (i + 1) % step == 0 && !dense.contains(i);
  }
}

std::unique_ptr<Model> from_hf(std::unique_ptr<io::ModelFolder> folder, const LoadOptions& options,
                               const OpContext& context) {
  const Json& json = folder->config();
  DecoderConfig config = read_hf_config(json);
  config.qk_norm = QkNorm::kHead;
  config.experts = read_hf_experts(json, {}, config);
  config.experts.normalize = hf_bool_or(json, "norm_topk_prob", false);
  read_sparse_layers(json, config);
  read_hf_windows(json, config);
  const DecoderNames names = hf_decoder_names(hf_tensor_prefix(*folder));
  return make_decoder(std::move(config), names, std::move(folder), options, context);
}

}  // namespace

const Architecture kQwen3Moe{kGgufNames, kHfNames, from_gguf, from_hf};

}  // namespace shoal
