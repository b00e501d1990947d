// granite and granitemoe: llama, with and without a mixture of experts, whose config scales embeddings, attention scores,
// residuals and logits.
//
// A residual that grows by m * f(norm(x)) is m times one that grows by f(norm(x)): the stream is kept divided by m, and
// its norms, which undo any scale, get eps / m^2.
//
// GGUF stores the rows of q and k reordered, as it does for llama.
#include <array>

#include "shoal/model/config_reader.h"
#include "shoal/model/decoder.h"
#include "shoal/model/registry.h"

namespace shoal {
namespace {

constexpr std::array<std::string_view, 2> kNames{"granite", "granitemoe"};

struct Multipliers {
  double embedding = 1.0;
  double residual = 1.0;
  double attention = 1.0;
  double logits = 1.0;  // divides
};

void set_multipliers(const Multipliers& m, DecoderConfig& config) {
  config.embedding_scale = static_cast<float>(m.embedding / m.residual);
  config.norm_eps = static_cast<float>(config.norm_eps / (m.residual * m.residual));
  config.attention_scale = static_cast<float>(m.attention);
  config.logit_scale = static_cast<float>(1.0 / m.logits);
}

std::unique_ptr<Model> from_gguf(std::unique_ptr<io::GgufFile> file, const LoadOptions& options,
                                 const OpContext& context) {
  DecoderConfig config = read_gguf_config(*file);
  const auto multiplier = [&](const char* name) { return gguf_positive(*file, config.architecture + "." + name); };
  set_multipliers({.embedding = multiplier("embedding_scale"),
                   .residual = multiplier("residual_scale"),
                   .attention = multiplier("attention.scale"),
                   .logits = multiplier("logit_scale")},
                  config);
  // llama.cpp's converters switch rotation off by this key.
  if (!file->get_bool(config.architecture + ".rope.scaling.finetuned", true)) {
    fail(ErrorCode::kUnsupported, config.architecture, ": attention without rotary positions is not supported");
  }
  if (file->find("blk.0.ffn_gate_shexp.weight") != nullptr) {
    fail(ErrorCode::kUnsupported, config.architecture, ": a shared expert is not supported");
  }
  read_gguf_experts(*file, config);
  config.rope_interleaved = true;
  return make_decoder(std::move(config), gguf_decoder_names(), std::move(file), options, context);
}

std::unique_ptr<Model> from_hf(std::unique_ptr<io::ModelFolder> folder, const LoadOptions& options,
                               const OpContext& context) {
  const Json& json = folder->config();
  DecoderConfig config = read_hf_config(json);
  set_multipliers({.embedding = hf_positive_or(json, "embedding_multiplier", 1.0),
                   .residual = hf_positive_or(json, "residual_multiplier", 1.0),
                   .attention = hf_positive_or(json, "attention_multiplier", 1.0),
                   .logits = hf_positive_or(json, "logits_scaling", 1.0)},
                  config);
  const std::string prefix = hf_tensor_prefix(*folder);
  DecoderNames names = hf_decoder_names(prefix);
  if (config.architecture == "granitemoe") {
    config.experts =
        read_hf_experts(json, {.num_experts = "num_local_experts", .expert_hidden = "intermediate_size"}, config);
    set_expert_layers(config);
    const std::string block = prefix + "layers.{}.block_sparse_moe.";
    names.experts.router = block + "router.layer";
    names.experts.read = experts_fused(block + "input_linear.weight", block + "output_linear.weight");
  }
  return make_decoder(std::move(config), names, std::move(folder), options, context);
}

}  // namespace

const Architecture kGranite{kNames, kNames, from_gguf, from_hf};

}  // namespace shoal
