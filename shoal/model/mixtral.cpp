// mixtral and minimax_m2: in Hugging Face folders the experts are under "block_sparse_moe". (A GGUF file calls Mixtral
// "llama".)
//
//   mixtral     llama with softmax routing
//   minimax_m2  sigmoid routing with a selection bias, norms over all heads of q and of k, partly rotated heads
#include <array>

#include "shoal/model/config_reader.h"
#include "shoal/model/decoder.h"
#include "shoal/model/registry.h"

namespace shoal {
namespace {

constexpr std::array<std::string_view, 1> kGgufNames{"minimax-m2"};
constexpr std::array<std::string_view, 2> kHfNames{"mixtral", "minimax_m2"};

DecoderNames names_of(const io::ModelFolder& folder) {
  const std::string prefix = hf_tensor_prefix(folder);
  const std::string block = prefix + "layers.{}.block_sparse_moe.";
  DecoderNames names = hf_decoder_names(prefix);
  names.experts.router = block + "gate";
  names.experts.selection_bias = block + "e_score_correction_bias";
  names.experts.read = experts_apart(block + "experts.[].w1", block + "experts.[].w3", block + "experts.[].w2");
  return names;
}

std::unique_ptr<Model> from_gguf(std::unique_ptr<io::GgufFile> file, const LoadOptions& options,
                                 const OpContext& context) {
  DecoderConfig config = read_gguf_config(*file);
  config.qk_norm = QkNorm::kWhole;
  read_gguf_experts(*file, config, true, RouterScore::kSigmoid);
  return make_decoder(std::move(config), gguf_decoder_names(), std::move(file), options, context);
}

std::unique_ptr<Model> from_hf(std::unique_ptr<io::ModelFolder> folder, const LoadOptions& options,
                               const OpContext& context) {
  const Json& json = folder->config();
  DecoderConfig config = read_hf_config(json);
  config.experts =
      read_hf_experts(json, {.num_experts = "num_local_experts", .expert_hidden = "intermediate_size"}, config);
  if (config.architecture == "minimax_m2") {
    config.qk_norm = QkNorm::kWhole;
    config.experts.score = RouterScore::kSigmoid;
    check_sigmoid(config.experts);
  }
  set_expert_layers(config);
  read_hf_windows(json, config);
  const DecoderNames names = names_of(*folder);
  return make_decoder(std::move(config), names, std::move(folder), options, context);
}

}  // namespace

const Architecture kMixtral{kGgufNames, kHfNames, from_gguf, from_hf};

}  // namespace shoal
