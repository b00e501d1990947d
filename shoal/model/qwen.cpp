// qwen2 (biases on q, k and v) and qwen3 (norms of the heads of q and k instead).
#include <array>

#include "shoal/model/config_reader.h"
#include "shoal/model/decoder.h"
#include "shoal/model/registry.h"

namespace shoal {
namespace {

constexpr std::array<std::string_view, 2> kNames{"qwen2", "qwen3"};

void set_version(DecoderConfig& config) {
  config.qk_norm = config.architecture == "qwen3" ? QkNorm::kHead : QkNorm::kNone;
  config.qkv_bias = config.architecture == "qwen2";
}

std::unique_ptr<Model> from_gguf(std::unique_ptr<io::GgufFile> file, const LoadOptions& options,
                                 const OpContext& context) {
  DecoderConfig config = read_gguf_config(*file);
  set_version(config);
  return make_decoder(std::move(config), gguf_decoder_names(), std::move(file), options, context);
}

std::unique_ptr<Model> from_hf(std::unique_ptr<io::ModelFolder> folder, const LoadOptions& options,
                               const OpContext& context) {
  DecoderConfig config = read_hf_config(folder->config());
  set_version(config);
  if (hf_bool_or(folder->config(), "use_sliding_window", false)) {
    read_hf_windows(folder->config(), config);
  }
  const DecoderNames names = hf_decoder_names(hf_tensor_prefix(*folder));
  return make_decoder(std::move(config), names, std::move(folder), options, context);
}

}  // namespace

const Architecture kQwen{kNames, kNames, from_gguf, from_hf};

}  // namespace shoal
