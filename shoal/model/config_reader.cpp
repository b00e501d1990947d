#include "shoal/model/config_reader.h"

#include <algorithm>
#include <cmath>
#include <set>
#include <variant>
#include <vector>

#include "shoal/base/text.h"

namespace shoal {
namespace {

// Larger than any published model by far, small enough that no product of two of them overflows.
constexpr int64_t kMaxWidth = 1 << 24;
constexpr int64_t kMaxLayers = 4096;
constexpr int64_t kMaxPositions = int64_t{1} << 30;

void check_heads(const DecoderConfig& c) {
  if (c.num_heads % c.num_kv_heads != 0) {
    fail(ErrorCode::kModelFormat, c.architecture, ": ", c.num_heads, " attention heads are not a multiple of ",
         c.num_kv_heads, " key-value heads");
  }
  if (c.head_dim % 2 != 0 || c.head_dim > 4096) {
    fail(ErrorCode::kModelFormat, c.architecture, ": head size ", c.head_dim, " is not an even number up to 4096");
  }
}

int64_t gguf_int(const io::GgufFile& file, const std::string& key, int64_t low, int64_t high) {
  const int64_t value = file.get_int(key);
  if (value < low || value > high) {
    fail(ErrorCode::kModelFormat, "metadata \"", printable(key), "\" is ", value, ", expected ", low, " to ", high);
  }
  return value;
}

int64_t gguf_int_or(const io::GgufFile& file, const std::string& key, int64_t fallback, int64_t low, int64_t high) {
  return file.find_value(key) == nullptr ? fallback : gguf_int(file, key, low, high);
}

double positive(double value, std::string_view what) {
  if (!(value > 0.0) || !std::isfinite(value)) {
    fail(ErrorCode::kModelFormat, what, " is ", value, ", expected a positive number");
  }
  return value;
}

// One number, or one a layer, of which those without attention have 0.
int64_t read_gguf_kv_heads(const io::GgufFile& file, const std::string& key, int64_t num_heads) {
  const io::GgufValue* value = file.find_value(key);
  if (value == nullptr || !std::holds_alternative<std::vector<int64_t>>(*value)) {
    return gguf_int_or(file, key, num_heads, 1, num_heads);
  }
  int64_t num_kv_heads = 0;
  for (const int64_t count : std::get<std::vector<int64_t>>(*value)) {
    if (count < 0 || count > num_heads || (count > 0 && num_kv_heads > 0 && count != num_kv_heads)) {
      fail(ErrorCode::kUnsupported, "metadata \"", printable(key), "\" holds ", count,
           "; layers of different numbers of heads are not supported");
    }
    num_kv_heads = std::max(num_kv_heads, count);
  }
  if (num_kv_heads == 0) {
    fail(ErrorCode::kModelFormat, "metadata \"", printable(key), "\" has no layer with heads");
  }
  return num_kv_heads;
}

RopeConfig read_gguf_rope(const io::GgufFile& file, const std::string& arch, int64_t head_dim) {
  const auto key = [&](std::string_view name) { return arch + "." + std::string(name); };
  RopeConfig rope;
  rope.rotary_dim = gguf_int_or(file, key("rope.dimension_count"), head_dim, 2, head_dim);
  rope.theta = positive(file.get_double(key("rope.freq_base"), 10000.0), key("rope.freq_base"));
  const std::string type = file.find_value(key("rope.scaling.type")) == nullptr
                               ? (file.find_value(key("rope.scale_linear")) == nullptr ? "none" : "linear")
                               : file.get_string(key("rope.scaling.type"));
  rope.factor = positive(file.get_double(key("rope.scaling.factor"), file.get_double(key("rope.scale_linear"), 1.0)),
                         key("rope.scaling.factor"));
  rope.original_max_positions = static_cast<double>(gguf_int_or(file, key("rope.scaling.original_context_length"),
                                                                file.get_int(key("context_length")), 1, kMaxPositions));
  if (type == "linear") {
    rope.scaling = RopeScaling::kLinear;
  } else if (type == "yarn") {
    rope.scaling = RopeScaling::kYarn;
    rope.attention_factor = file.get_double(key("rope.scaling.attn_factor"), 0.0);
    rope.beta_fast = positive(file.get_double(key("rope.scaling.yarn_beta_fast"), 32.0), "yarn_beta_fast");
    rope.beta_slow = positive(file.get_double(key("rope.scaling.yarn_beta_slow"), 1.0), "yarn_beta_slow");
  } else if (type != "none") {
    fail(ErrorCode::kUnsupported, "rope scaling \"", printable(type), "\" is not supported (none, linear, yarn)");
  }
  // llama3's scaling comes as factors, one a frequency, computed when the file was made.
  if (file.find("rope_freqs.weight") != nullptr) {
    const int64_t shape[] = {rope.rotary_dim / 2};
    const io::WeightTensor& tensor = file.get("rope_freqs.weight", shape);
    rope.freq_factors.resize(static_cast<size_t>(shape[0]));
    decode_row(tensor.format, tensor.data, shape[0], rope.freq_factors.data());
    for (const float factor : rope.freq_factors) {
      positive(factor, "tensor \"rope_freqs.weight\"");
    }
  }
  return rope;
}

Gate read_gate(const Json& config) {
  const std::string name = hf_string_or(config, "hidden_activation", hf_string_or(config, "hidden_act", "silu"));
  if (name == "silu" || name == "swish") {
    return Gate::kSilu;
  }
  if (name == "gelu_pytorch_tanh" || name == "gelu_new") {
    return Gate::kGeluTanh;
  }
  if (name == "gelu") {
    return Gate::kGelu;
  }
  if (name == "swigluoai") {
    return Gate::kClamped;
  }
  if (name == "relu") {
    return Gate::kRelu;
  }
  fail(ErrorCode::kUnsupported, "config.json: activation \"", printable(name), "\" is not supported");
}

}  // namespace

double gguf_positive(const io::GgufFile& file, const std::string& key) {
  return positive(file.get_double(key), concat("metadata \"", key, "\""));
}

DecoderConfig read_gguf_config(const io::GgufFile& file) {
  DecoderConfig c;
  c.architecture = file.get_string("general.architecture");
  const auto key = [&](std::string_view name) { return c.architecture + "." + std::string(name); };
  c.name = file.find_value("general.name") == nullptr ? "" : file.get_string("general.name");
  c.num_layers = gguf_int(file, key("block_count"), 1, kMaxLayers);
  c.hidden = gguf_int(file, key("embedding_length"), 1, kMaxWidth);
  c.ffn_hidden = gguf_int(file, key("feed_forward_length"), 1, kMaxWidth);
  c.max_positions = gguf_int(file, key("context_length"), 1, kMaxPositions);
  c.num_heads = gguf_int(file, key("attention.head_count"), 1, 65536);
  c.num_kv_heads = read_gguf_kv_heads(file, key("attention.head_count_kv"), c.num_heads);
  c.head_dim = gguf_int_or(file, key("attention.key_length"), c.hidden / c.num_heads, 1, 4096);
  if (gguf_int_or(file, key("attention.value_length"), c.head_dim, 1, 4096) != c.head_dim) {
    fail(ErrorCode::kUnsupported, c.architecture, ": keys and values of different size are not supported");
  }
  check_heads(c);
  c.norm_eps = static_cast<float>(
      positive(file.get_double(key("attention.layer_norm_rms_epsilon")), key("attention.layer_norm_rms_epsilon")));
  c.attention_softcap = static_cast<float>(file.get_double(key("attn_logit_softcapping"), 0.0));
  c.logit_softcap = static_cast<float>(file.get_double(key("final_logit_softcapping"), 0.0));
  const io::WeightTensor* embedding = file.find("token_embd.weight");
  if (embedding == nullptr || embedding->shape.size() != 2) {
    fail(ErrorCode::kModelFormat, "tensor \"token_embd.weight\" is missing or not a matrix");
  }
  c.vocab_size = embedding->shape[0];
  c.ropes = {read_gguf_rope(file, c.architecture, c.head_dim)};
  c.layers.assign(static_cast<size_t>(c.num_layers), {});
  return c;
}

DecoderConfig read_hf_config(const Json& config) {
  DecoderConfig c;
  c.architecture = hf_string_or(config, "model_type", "");
  c.scheme = io::CheckpointScheme(config);
  c.num_layers = hf_int(config, "num_hidden_layers", 1, kMaxLayers);
  c.hidden = hf_int(config, "hidden_size", 1, kMaxWidth);
  c.ffn_hidden = hf_int_or(config, "intermediate_size", 0, 1, kMaxWidth);  // mixtures may have no dense layer
  c.vocab_size = hf_int(config, "vocab_size", 1, kMaxWidth);
  c.max_positions = hf_int_or(config, "max_position_embeddings", 2048, 1, kMaxPositions);
  c.num_heads = hf_int(config, "num_attention_heads", 1, 65536);
  c.num_kv_heads = hf_int_or(config, "num_key_value_heads", c.num_heads, 1, c.num_heads);
  c.head_dim = hf_int_or(config, "head_dim", c.hidden / c.num_heads, 1, 4096);
  check_heads(c);
  c.norm_eps = static_cast<float>(hf_positive_or(config, "rms_norm_eps", 1e-6));
  c.attention_softcap = static_cast<float>(hf_double_or(config, "attn_logit_softcapping", 0.0));
  c.logit_softcap = static_cast<float>(hf_double_or(config, "final_logit_softcapping", 0.0));
  c.gate = read_gate(config);
  const Json* rope = hf_given(config, "rope_parameters") ? config.find("rope_parameters") : config.find("rope_scaling");
  c.ropes = {read_hf_rope(config, rope, hf_double_or(config, "rope_theta", 10000.0), c.head_dim)};
  c.layers.assign(static_cast<size_t>(c.num_layers), {});
  return c;
}

namespace {

// The share of a head's channels that is rotated: in the rope object, in the config, or as a number of channels.
int64_t read_hf_rotary_dim(const Json& config, const Json* rope, int64_t head_dim) {
  constexpr std::string_view kPartial = "partial_rotary_factor";
  const bool in_rope = rope != nullptr && rope->is_object() && hf_given(*rope, kPartial);
  const double partial = hf_double_or(in_rope ? *rope : config, kPartial, 1.0);
  if (!(partial > 0.0 && partial <= 1.0)) {
    fail(ErrorCode::kModelFormat, "config.json: ", kPartial, " is ", partial, ", expected a part of 1");
  }
  const auto share = static_cast<int64_t>(static_cast<double>(head_dim) * partial);
  const int64_t rotary_dim = partial == 1.0 ? hf_int_or(config, "rotary_dim", head_dim, 2, head_dim) : share;
  if (rotary_dim < 2 || rotary_dim > head_dim || rotary_dim % 2 != 0) {
    fail(ErrorCode::kModelFormat, "config.json: ", kPartial, " ", partial, " does not fit heads of ", head_dim);
  }
  return rotary_dim;
}

void check_experts(const ExpertsConfig& experts) {
  if (experts.top_k > experts.num_experts || experts.top_k > 32) {
    fail(ErrorCode::kModelFormat, "each token goes to ", experts.top_k,
         " experts, expected at most 32 and no more than the ", experts.num_experts, " there are");
  }
}

}  // namespace

void read_gguf_experts(const io::GgufFile& file, DecoderConfig& decoder, bool normalize, RouterScore score) {
  const auto key = [&](std::string_view name) { return decoder.architecture + "." + std::string(name); };
  ExpertsConfig& experts = decoder.experts;
  experts.num_experts = gguf_int_or(file, key("expert_count"), 0, 0, 65536);
  if (experts.num_experts == 0) {
    return;
  }
  experts.top_k = gguf_int(file, key("expert_used_count"), 1, 65536);
  experts.expert_hidden = gguf_int_or(file, key("expert_feed_forward_length"), decoder.ffn_hidden, 1, kMaxWidth);
  experts.normalize = file.get_bool(key("expert_weights_norm"), normalize);
  experts.scale =
      static_cast<float>(positive(file.get_double(key("expert_weights_scale"), 1.0), key("expert_weights_scale")));
  constexpr int64_t kSoftmax = 1;
  constexpr int64_t kSigmoid = 2;
  constexpr int64_t kSoftmaxOfChosen = 3;  // the same as softmax, normalised
  const int64_t gating = file.get_int(key("expert_gating_func"), score == RouterScore::kSigmoid ? kSigmoid : kSoftmax);
  if (gating != kSoftmax && gating != kSigmoid && gating != kSoftmaxOfChosen) {
    fail(ErrorCode::kUnsupported, "metadata \"", key("expert_gating_func"), "\": gating function ", gating,
         " is not supported (softmax, sigmoid)");
  }
  experts.normalize = experts.normalize || gating == kSoftmaxOfChosen;
  check_experts(experts);
  if (gating == kSigmoid) {
    experts.score = RouterScore::kSigmoid;
    experts.num_groups = gguf_int_or(file, key("expert_group_count"), 1, 1, experts.num_experts);
    experts.top_groups = gguf_int_or(file, key("expert_group_used_count"), 1, 1, experts.num_groups);
    check_sigmoid(experts);
  }
  experts.shared_hidden = gguf_int_or(file, key("expert_shared_count"), 0, 0, 64) * experts.expert_hidden;
  for (size_t i = 0; i < decoder.layers.size(); ++i) {
    decoder.layers[i].has_experts = file.find("blk." + std::to_string(i) + ".ffn_gate_inp.weight") != nullptr;
  }
}

ExpertsConfig read_hf_experts(const Json& config, const HfExpertKeys& keys, const DecoderConfig& decoder) {
  ExpertsConfig experts;
  // Newer configs call it so in every family.
  const bool is_new = !hf_given(config, keys.num_experts) && hf_given(config, "num_local_experts");
  experts.num_experts = hf_int(config, is_new ? "num_local_experts" : keys.num_experts, 1, 65536);
  experts.top_k = hf_int(config, "num_experts_per_tok", 1, 65536);
  experts.expert_hidden = hf_int(config, keys.expert_hidden, 1, kMaxWidth);
  experts.gate = decoder.gate;
  experts.gate_alpha = decoder.gate_alpha;
  experts.gate_limit = decoder.gate_limit;
  check_experts(experts);
  return experts;
}

void set_expert_layers(DecoderConfig& decoder, int64_t first) {
  for (int64_t i = first; i < decoder.num_layers; ++i) {
    decoder.layers[static_cast<size_t>(i)].has_experts = true;
  }
}

void read_hf_sparse_layers(const Json& json, DecoderConfig& config) {
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

void check_sigmoid(const ExpertsConfig& experts) {
  constexpr int64_t kMaxExperts = 512;  // of the router
  if (experts.num_experts > kMaxExperts) {
    fail(ErrorCode::kUnsupported, "config.json: sigmoid routing to ", experts.num_experts,
         " experts is not supported (at most ", kMaxExperts, ")");
  }
  if (experts.num_experts % experts.num_groups != 0) {
    fail(ErrorCode::kModelFormat, "config.json: ", experts.num_experts, " experts are not a multiple of ",
         experts.num_groups, " groups");
  }
  const int64_t num_choices = experts.num_experts / experts.num_groups * experts.top_groups;
  if (experts.top_k > num_choices) {
    fail(ErrorCode::kModelFormat, "config.json: each token goes to ", experts.top_k, " experts, the best ",
         experts.top_groups, " groups have ", num_choices);
  }
}

void read_hf_groups(const Json& config, DecoderConfig& decoder) {
  decoder.experts = read_hf_experts(config, {.num_experts = "n_routed_experts"}, decoder);
  ExpertsConfig& experts = decoder.experts;
  experts.score = RouterScore::kSigmoid;
  experts.normalize = hf_bool_or(config, "norm_topk_prob", true);
  experts.scale = static_cast<float>(hf_positive_or(config, "routed_scaling_factor", 1.0));
  experts.num_groups = hf_int_or(config, "n_group", 1, 1, experts.num_experts);
  experts.top_groups = hf_int_or(config, "topk_group", 1, 1, experts.num_groups);
  check_sigmoid(experts);
  experts.shared_hidden = hf_int_or(config, "n_shared_experts", 0, 0, 64) * experts.expert_hidden;
  set_expert_layers(decoder, hf_int_or(config, "first_k_dense_replace", 0, 0, decoder.num_layers));
  read_hf_mlp_types(config, decoder);
}

void read_hf_mlp_types(const Json& config, DecoderConfig& decoder) {
  const std::vector<std::string> types = hf_layer_types(config, decoder.layers.size(), "mlp_layer_types");
  for (size_t i = 0; i < types.size(); ++i) {
    if (types[i] != "dense" && types[i] != "sparse") {
      fail(ErrorCode::kUnsupported, "config.json: MLP type \"", printable(types[i]), "\" is not supported");
    }
    decoder.layers[i].has_experts = types[i] == "sparse";
  }
}

RopeConfig read_hf_rope(const Json& config, const Json* rope, double theta, int64_t rotary_dim) {
  RopeConfig r;
  r.theta = positive(theta, "config.json: rope_theta");
  r.rotary_dim = read_hf_rotary_dim(config, rope, rotary_dim);
  if (rope == nullptr || rope->is_null()) {
    return r;
  }
  r.theta = hf_positive_or(*rope, "rope_theta", r.theta);
  const std::string type = hf_string_or(*rope, "rope_type", hf_string_or(*rope, "type", "default"));
  if (type == "default") {
    return r;
  }
  r.factor = hf_positive_or(*rope, "factor", 1.0);
  r.original_max_positions = static_cast<double>(
      hf_int_or(*rope, "original_max_position_embeddings",
                hf_int_or(config, "max_position_embeddings", 2048, 1, kMaxPositions), 1, kMaxPositions));
  if (type == "linear") {
    r.scaling = RopeScaling::kLinear;
  } else if (type == "llama3") {
    r.scaling = RopeScaling::kLlama3;
    r.low_freq_factor = hf_positive_or(*rope, "low_freq_factor", 1.0);
    r.high_freq_factor = hf_positive_or(*rope, "high_freq_factor", 4.0);
  } else if (type == "yarn") {
    r.scaling = RopeScaling::kYarn;
    r.attention_factor = hf_double_or(*rope, "attention_factor", 0.0);
    r.mscale = hf_double_or(*rope, "mscale", 0.0);
    r.mscale_all_dim = hf_double_or(*rope, "mscale_all_dim", 0.0);
    r.beta_fast = hf_positive_or(*rope, "beta_fast", 32.0);
    r.beta_slow = hf_positive_or(*rope, "beta_slow", 1.0);
    r.truncate = hf_bool_or(*rope, "truncate", true);
  } else {
    fail(ErrorCode::kUnsupported, "config.json: rope type \"", printable(type),
         "\" is not supported (default, linear, llama3, yarn)");
  }
  return r;
}

const Json& hf_text_config(const Json& config) {
  const Json* text = config.find("text_config");
  return text != nullptr && text->is_object() ? *text : config;
}

std::string hf_tensor_prefix(const io::WeightSource& source) {
  for (const char* prefix : {"model.", "language_model.model.", "model.language_model."}) {
    // Of a quantised embedding the tensors have other names than "weight".
    const std::string stem = std::string(prefix) + "embed_tokens.";
    const auto has_stem = [&](const auto& tensors) {
      const auto found = tensors.lower_bound(stem);
      return found != tensors.end() && found->first.starts_with(stem);
    };
    if (has_stem(source.tensors()) || has_stem(source.raw_tensors())) {
      return prefix;
    }
  }
  fail(ErrorCode::kModelFormat, "tensor \"model.embed_tokens.weight\" is missing");
}

void read_hf_windows(const Json& config, DecoderConfig& decoder) {
  if (!hf_given(config, "sliding_window") || !hf_bool_or(config, "use_sliding_window", true)) {
    return;
  }
  const int64_t window = hf_int(config, "sliding_window", 1, kMaxPositions);
  const std::vector<std::string> types = hf_layer_types(config, decoder.layers.size());
  for (size_t i = 0; i < types.size(); ++i) {
    if (types[i] != "sliding_attention" && types[i] != "full_attention") {
      fail(ErrorCode::kUnsupported, "config.json: layer type \"", printable(types[i]), "\" is not supported");
    }
    decoder.layers[i].window = types[i] == "sliding_attention" ? window : 0;
  }
  if (!types.empty()) {
    return;
  }
  // Older configs: layers from max_window_layers on have the window; without that number all do.
  const int64_t first = hf_int_or(config, "max_window_layers", 0, 0, kMaxLayers);
  for (int64_t i = first; i < decoder.num_layers; ++i) {
    decoder.layers[static_cast<size_t>(i)].window = window;
  }
}

}  // namespace shoal
