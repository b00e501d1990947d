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
  read_hf_groups(json, config);
  const DecoderNames names = hf_decoder_names(hf_tensor_prefix(*folder));
  return make_decoder(std::move(config), names, std::move(folder), options, context);
}

}  // namespace

const Architecture kGlm4Moe{{}, kHfNames, nullptr, from_hf};

}  // namespace shoal
