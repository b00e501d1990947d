// The decoder that llama, qwen, gemma, gpt-oss and their kin share: pre-norm blocks of attention and a feed-forward, dense
// or a mixture of experts.
//
//   x = scale * embedding[ids]
//   each layer:  x += [norm] attention(norm(x));  x += [norm] feed_forward(norm(x))
//   feed_forward(h) = W_down (gate(W_gate h) * W_up h), or experts.h
//   logits = [softcap] W_out norm(x)
//
// A family's file turns its config into a DecoderConfig and its tensor names into DecoderNames; nothing here asks for a
// family.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "shoal/io/weights.h"
#include "shoal/model/block_indexer.h"
#include "shoal/model/delta_net.h"
#include "shoal/model/experts.h"
#include "shoal/model/latent_attention.h"
#include "shoal/model/model.h"
#include "shoal/model/short_conv.h"
#include "shoal/ops/rope/rope.h"

namespace shoal {

enum class Mixer : uint8_t { kAttention, kShortConv, kDeltaNet };

struct DecoderLayerConfig {
  int64_t window = 0;   // sliding window in tokens, the current one included; 0: global
  size_t rope_idx = 0;  // which of DecoderConfig::ropes
  Mixer mixer = Mixer::kAttention;
  bool has_experts = false;
  bool has_indexer = false;  // attention reads what DecoderConfig::indexer chooses
};

// Norms of q and k before they are rotated: none, of each head, or of all heads of a token together.
enum class QkNorm : uint8_t { kNone, kHead, kWhole };

struct DecoderConfig {
  std::string architecture;
  std::string name;
  int64_t num_layers = 0;
  int64_t hidden = 0;
  int64_t ffn_hidden = 0;
  int64_t vocab_size = 0;
  int64_t max_positions = 0;
  int64_t num_heads = 0;
  int64_t num_kv_heads = 0;
  int64_t head_dim = 0;
  float norm_eps = 1e-5f;
  float norm_offset = 0.0f;  // added to every norm weight: 1 for checkpoints that store weight - 1
  float embedding_scale = 1.0f;
  float attention_scale = 0.0f;    // 0: 1 / sqrt(head_dim)
  float attention_softcap = 0.0f;  // 0: off
  float logit_scale = 1.0f;        // of what the last norm gives
  float logit_softcap = 0.0f;      // 0: off
  QkNorm qk_norm = QkNorm::kNone;
  bool qkv_bias = false;    // the checkpoint must have q, k and v biases; otherwise they are used where present
  bool post_norms = false;  // norms after attention and after the feed-forward
  bool rope_interleaved = false;
  Gate gate = Gate::kSilu;
  float gate_alpha = 1.702f;  // Gate::kClamped: as gpt-oss
  float gate_limit = 7.0f;
  std::vector<RopeConfig> ropes;  // by DecoderLayerConfig::rope_idx
  std::vector<DecoderLayerConfig> layers;
  bool attention_gate = false;  // q's rows are [q, gate] of each head; attention times the gate's sigmoid
  int64_t conv_taps = 0;        // of Mixer::kShortConv
  DeltaNetConfig delta_net;
  LatentAttentionConfig latent;  // in the place of heads with keys and values of their own
  BlockIndexerConfig indexer;
  ExpertsConfig experts;  // of the layers that have them
  io::CheckpointScheme scheme;
};

// Stems of tensor names ("<stem>.weight", "<stem>.bias"); "{}" stands for the layer's number.
struct DecoderNames {
  std::string embedding, output_norm, output;  // output is optional: absent means tied to the embedding
  std::string attn_norm, q, k, v, o, q_norm, k_norm, post_attn_norm;
  std::string ffn_norm, gate, up, down, post_ffn_norm;
  std::string sinks{};  // a whole name; empty: the family has none
  LatentAttentionNames latent{};
  BlockIndexerNames indexer{};
  ShortConvNames conv{};
  DeltaNetNames delta_net{};
  std::string mixer_out{};  // of layers without attention
  ExpertsNames experts{};
};

// Checks every tensor against the config (kModelFormat names the first that does not fit) and prepares the weights.
std::unique_ptr<Model> make_decoder(DecoderConfig config, const DecoderNames& names,
                                    std::unique_ptr<io::WeightSource> source, const LoadOptions& options,
                                    const OpContext& context);

// The names that GGUF files use for all these families.
DecoderNames gguf_decoder_names();
// The names of Hugging Face checkpoints of llama and its kin. `prefix` is "model." or where a text part hides in a
// larger model.
DecoderNames hf_decoder_names(const std::string& prefix);

}  // namespace shoal
