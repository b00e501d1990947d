// Reading numbers of a model's configuration, GGUF metadata or config.json, with the checks that every family needs.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "shoal/io/gguf.h"
#include "shoal/io/hf_config.h"
#include "shoal/io/safetensors.h"
#include "shoal/model/decoder.h"

namespace shoal {

using io::hf_bool_or;
using io::hf_double_or;
using io::hf_given;
using io::hf_int;
using io::hf_int_or;
using io::hf_layer_types;
using io::hf_positive_or;
using io::hf_string_or;

// What GGUF keys ("<architecture>.block_count" ...) say about a dense decoder. Ropes has one entry; layers are global.
DecoderConfig read_gguf_config(const io::GgufFile& file);

// What config.json (of the text part) says about a dense decoder. Ropes has one entry; layers are global.
// `config` is the object that holds hidden_size and its kin.
DecoderConfig read_hf_config(const Json& config);

// A number that must be there, finite and above zero.
double gguf_positive(const io::GgufFile& file, const std::string& key);

// The rotary settings in a `rope_parameters` or `rope_scaling` object; `theta` is used where the object has none.
RopeConfig read_hf_rope(const Json& config, const Json* rope, double theta, int64_t rotary_dim);

// "<architecture>.expert_count" and its kin into decoder.experts, and which layers have a router. Where the file does not
// say otherwise: `score`, `normalize`. num_experts stays 0 where there are none.
void read_gguf_experts(const io::GgufFile& file, DecoderConfig& decoder, bool normalize = true,
                       RouterScore score = RouterScore::kSoftmax);

// Routed experts by the keys that config.json has them under; num_experts_per_tok and the activation are the same in
// every family. Softmax scores, normalised; all else is the family's to say.
struct HfExpertKeys {
  std::string_view num_experts = "num_experts";
  std::string_view expert_hidden = "moe_intermediate_size";
};
ExpertsConfig read_hf_experts(const Json& config, const HfExpertKeys& keys, const DecoderConfig& decoder);
// Layers from `first` on have experts.
void set_expert_layers(DecoderConfig& decoder, int64_t first = 0);
// Every decoder_sparse_step-th layer has experts, but for those in mlp_only_layers.
void read_hf_sparse_layers(const Json& config, DecoderConfig& decoder);
// Which layers have experts by mlp_layer_types, if it is given.
void read_hf_mlp_types(const Json& config, DecoderConfig& decoder);
// What sigmoid routing needs: kModelFormat or kUnsupported otherwise.
void check_sigmoid(const ExpertsConfig& experts);
// By the keys of deepseek and glm: experts with sigmoid routing within groups, the shared one, and the dense layers before.
void read_hf_groups(const Json& config, DecoderConfig& decoder);

// config.json's own text part: config["text_config"] of a vision-language model, else config.
const Json& hf_text_config(const Json& config);

// Where the text part's tensors live: the first of the known prefixes that has an embedding.
std::string hf_tensor_prefix(const io::WeightSource& source);

// Sliding windows by `layer_types`, or nothing where the config does not use them.
void read_hf_windows(const Json& config, DecoderConfig& decoder);

}  // namespace shoal
