// llama, and with it Mistral and SmolLM: the plain decoder. From GGUF also Mixtral.
//
// GGUF stores the rows of q and k of this family reordered, so that neighbouring channels form the rotary pairs;
// Hugging Face checkpoints pair channel i with i + head_dim / 2.
#include <array>

#include "shoal/model/config_reader.h"
#include "shoal/model/decoder.h"
#include "shoal/model/registry.h"

namespace shoal {
namespace {

constexpr std::array<std::string_view, 1> kGgufNames{"llama"};
constexpr std::array<std::string_view, 2> kHfNames{"llama", "mistral"};

std::unique_ptr<Model> from_gguf(std::unique_ptr<io::GgufFile> file, const LoadOptions& options,
                                 const OpContext& context) {
  DecoderConfig config = read_gguf_config(*file);
  read_gguf_experts(*file, config);  // Mixtral's files are called "llama"
  config.rope_interleaved = true;
  return make_decoder(std::move(config), gguf_decoder_names(), std::move(file), options, context);
}

std::unique_ptr<Model> from_hf(std::unique_ptr<io::ModelFolder> folder, const LoadOptions& options,
                               const OpContext& context) {
  DecoderConfig config = read_hf_config(folder->config());
  read_hf_windows(folder->config(), config);
  const DecoderNames names = hf_decoder_names(hf_tensor_prefix(*folder));
  return make_decoder(std::move(config), names, std::move(folder), options, context);
}

}  // namespace

const Architecture kLlama{kGgufNames, kHfNames, from_gguf, from_hf};

}  // namespace shoal
