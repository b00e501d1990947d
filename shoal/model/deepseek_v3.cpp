// deepseek_v3 and deepseek_v32: latent attention, the first layers dense, then sigmoid routing within groups with a
// selection bias, and a shared expert. In deepseek_v32 a lightning indexer chooses the positions that a token attends to.
#include <array>
#include <cmath>
#include <string>

#include "shoal/base/text.h"
#include "shoal/model/config_reader.h"
#include "shoal/model/decoder.h"
#include "shoal/model/registry.h"

namespace shoal {
namespace {

constexpr std::array<std::string_view, 2> kHfNames{"deepseek_v3", "deepseek_v32"};

constexpr int64_t kMaxRank = 65536;

LatentAttentionConfig read_latent(const Json& json, const DecoderConfig& decoder) {
  LatentAttentionConfig c;
  c.num_heads = decoder.num_heads;
  c.q_rank = hf_int_or(json, "q_lora_rank", 0, 0, kMaxRank);
  c.kv_rank = hf_int(json, "kv_lora_rank", 1, kMaxRank);
  c.nope_dim = hf_int(json, "qk_nope_head_dim", 1, 4096);
  c.rope_dim = hf_int(json, "qk_rope_head_dim", 2, 4096);
  c.v_dim = hf_int(json, "v_head_dim", 1, 4096);
  c.rope_interleaved = hf_bool_or(json, "rope_interleave", true);
  c.norm_eps = decoder.norm_eps;
  const RopeConfig& rope = decoder.ropes.front();
  // A longer context sharpens the scores twice over, once for each of query and key.
  const double sharper = rope.scaling == RopeScaling::kYarn && rope.mscale_all_dim > 0.0 && rope.factor > 1.0
                             ? 0.1 * rope.mscale_all_dim * std::log(rope.factor) + 1.0
                             : 1.0;
  c.scale = static_cast<float>(sharper * sharper / std::sqrt(static_cast<double>(c.nope_dim + c.rope_dim)));
  return c;
}

LightningIndexerConfig read_indexer(const Json& json, const DecoderConfig& decoder) {
  LightningIndexerConfig c;
  c.num_heads = hf_int(json, "index_n_heads", 1, 4096);
  c.head_dim = hf_int(json, "index_head_dim", 8, 4096);
  c.top_k = hf_int(json, "index_topk", 1, 1 << 20);
  if (c.head_dim % 8 != 0 || c.head_dim < decoder.latent.rope_dim) {
    fail(ErrorCode::kModelFormat, "config.json: index_head_dim ", c.head_dim, " is not a multiple of 8 that holds the ",
         decoder.latent.rope_dim, " rotated channels");
  }
  if (decoder.latent.q_rank == 0) {
    fail(ErrorCode::kUnsupported, "deepseek_v32 without \"q_lora_rank\" is not supported");
  }
  for (const std::string& type : hf_layer_types(json, decoder.layers.size())) {
    if (type != "indexed_attention") {
      fail(ErrorCode::kUnsupported, "config.json: layer type \"", printable(type), "\" is not supported");
    }
  }
  return c;
}

std::unique_ptr<Model> from_hf(std::unique_ptr<io::ModelFolder> folder, const LoadOptions& options,
                               const OpContext& context) {
  const Json& json = folder->config();
  DecoderConfig config = read_hf_config(json);
  const Json* rope = json.find("rope_parameters") != nullptr ? json.find("rope_parameters") : json.find("rope_scaling");
  config.ropes = {
      read_hf_rope(json, rope, hf_double_or(json, "rope_theta", 10000.0), hf_int(json, "qk_rope_head_dim", 2, 4096))};
  config.latent = read_latent(json, config);
  if (config.architecture == "deepseek_v32") {
    config.latent.indexer = read_indexer(json, config);
  }
  read_hf_groups(json, config);
  const DecoderNames names = hf_decoder_names(hf_tensor_prefix(*folder));
  return make_decoder(std::move(config), names, std::move(folder), options, context);
}

}  // namespace

const Architecture kDeepseekV3{{}, kHfNames, nullptr, from_hf};

}  // namespace shoal
