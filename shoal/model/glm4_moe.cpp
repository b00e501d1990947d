// glm4_moe: the first layers dense, then sigmoid routing within groups with a selection bias, and a shared expert; heads
// partly rotated.
#include <array>

#include "shoal/model/config_reader.h"
#include "shoal/model/decoder.h"
#include "shoal/model/loader.h"
#include "shoal/model/registry.h"

namespace shoal {
namespace {

constexpr std::array<std::string_view, 1> kGgufNames{"glm4moe"};
constexpr std::array<std::string_view, 1> kHfNames{"glm4_moe"};

std::unique_ptr<Model> from_gguf(std::unique_ptr<io::GgufFile> file, const LoadOptions& options,
                                 const OpContext& context) {
  DecoderConfig config = read_gguf_config(*file);
  // The last blocks predict further tokens; they are no part of the decoder.
  const int64_t num_predicting = file->get_int("glm4moe.nextn_predict_layers", 0);
  if (num_predicting < 0 || num_predicting >= config.num_layers) {
    fail(ErrorCode::kModelFormat, "metadata \"glm4moe.nextn_predict_layers\" is ", num_predicting, " of ",
         config.num_layers, " layers");
  }
  config.num_layers -= num_predicting;
  config.layers.resize(static_cast<size_t>(config.num_layers));
  DecoderNames names = gguf_decoder_names();
  names.ffn_norm = "blk.{}.post_attention_norm";
  config.qk_norm = file->find(layer_name(names.q_norm, 0) + ".weight") != nullptr ? QkNorm::kHead : QkNorm::kNone;
  read_gguf_experts(*file, config, true, RouterScore::kSigmoid);
  return make_decoder(std::move(config), names, std::move(file), options, context);
}

std::unique_ptr<Model> from_hf(std::unique_ptr<io::ModelFolder> folder, const LoadOptions& options,
                               const OpContext& context) {
  const Json& json = folder->config();
  DecoderConfig config = read_hf_config(json);
  config.qk_norm = hf_bool_or(json, "use_qk_norm", false) ? QkNorm::kHead : QkNorm::kNone;
  config.qkv_bias = hf_bool_or(json, "attention_bias", false);
  read_hf_groups(json, config);
  const DecoderNames names = hf_decoder_names(hf_tensor_prefix(*folder));
  return make_decoder(std::move(config), names, std::move(folder), options, context);
}

}  // namespace

const Architecture kGlm4Moe{kGgufNames, kHfNames, from_gguf, from_hf};

}  // namespace shoal
