#include "shoal/model/synthetic.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <map>

#include "shoal/base/checked.h"
#include "shoal/base/float_bits.h"
#include "shoal/base/text.h"
#include "shoal/model/decoder.h"
#include "shoal/quant/block.h"

namespace shoal {
namespace {

struct Geometry {
  std::string_view name;
  int64_t num_layers, hidden, num_heads, num_kv_heads, head_dim;
  int64_t num_experts, top_k, expert_hidden;
  int64_t vocab_size;
  int64_t window;  // of even layers; 0: none
  bool is_gpt_oss;
  Format experts, rest;
};

constexpr int64_t kMaxPositions = 1 << 18;

constexpr std::array<Geometry, 3> kGeometries{{
    {"qwen3-30b-a3b", 48, 2048, 32, 4, 128, 128, 8, 768, 151936, 0, false, Format::kQ4_K, Format::kQ4_K},
    {"gpt-oss-120b", 36, 2880, 64, 8, 64, 128, 4, 2880, 201088, 128, true, Format::kGGUF_MXFP4, Format::kQ8_0},
    {"qwen3-tiny", 2, 2048, 32, 4, 128, 8, 2, 768, 512, 0, false, Format::kQ4_K, Format::kQ4_K},
}};

// Deterministic bytes (splitmix64).
class Bytes {
 public:
  void fill(std::byte* to, size_t count) {
    for (size_t i = 0; i < count; i += sizeof(uint64_t)) {
      const uint64_t word = next();
      std::memcpy(to + i, &word, std::min(sizeof(word), count - i));
    }
  }
  float uniform() { return static_cast<float>(next() >> 40) * 0x1p-24f * 2.0f - 1.0f; }

 private:
  uint64_t next() {
    state_ += 0x9e3779b97f4a7c15ull;
    uint64_t z = state_;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
  }
  uint64_t state_ = 1;
};

// Values of about 0.02, as weights of such models have: random codes with fixed scales.
void fill_format(Format format, Bytes& bytes, std::vector<std::byte>& to) {
  const auto block_bytes = static_cast<size_t>(info(format).block_bytes);
  bytes.fill(to.data(), to.size());
  for (size_t at = 0; at + block_bytes <= to.size(); at += block_bytes) {
    std::byte* block = to.data() + at;
    switch (format) {
      case Format::kF32: {
        const float value = 0.05f * bytes.uniform();
        std::memcpy(block, &value, sizeof(value));
        break;
      }
      case Format::kQ4_K:  // scales and minima of 0 to 63 times these
        block::store_f16(block, 1.0f / 16384.0f);
        block::store_f16(block + 2, 1.0f / 2048.0f);
        break;
      case Format::kQ8_0: block::store_f16(block, 1.0f / 4096.0f); break;
      case Format::kGGUF_MXFP4: block[0] = std::byte{121}; break;  // 2^-6
      default: fail(ErrorCode::kInternal, "no synthetic weights in ", info(format).name);
    }
  }
}

class SyntheticSource final : public io::WeightSource {
 public:
  void add(const std::string& name, Format format, std::vector<int64_t> shape) {
    io::WeightTensor tensor;
    tensor.name = name;
    tensor.format = format;
    tensor.num_bytes = io::tensor_bytes(format, shape).value();
    tensor.shape = std::move(shape);
    sizes_[format] = std::max(sizes_[format], static_cast<size_t>(tensor.num_bytes));
    tensors_.emplace(name, std::move(tensor));
  }

  void finish() {
    Bytes bytes;
    for (const auto& [format, size] : sizes_) {
      pools_[format].resize(size);
      fill_format(format, bytes, pools_[format]);
    }
    for (auto& [name, tensor] : tensors_) {
      tensor.data = pools_[tensor.format].data();
    }
  }

 private:
  std::map<Format, size_t> sizes_;
  std::map<Format, std::vector<std::byte>> pools_;
};

DecoderConfig config_of(const Geometry& g) {
  DecoderConfig c;
  c.architecture = g.is_gpt_oss ? "gpt_oss" : "qwen3_moe";
  c.name = concat(kSyntheticPrefix, g.name);
  c.num_layers = g.num_layers;
  c.hidden = g.hidden;
  c.vocab_size = g.vocab_size;
  c.max_positions = kMaxPositions;
  c.num_heads = g.num_heads;
  c.num_kv_heads = g.num_kv_heads;
  c.head_dim = g.head_dim;
  c.qk_norm = g.is_gpt_oss ? QkNorm::kNone : QkNorm::kHead;
  c.ropes = {{.rotary_dim = g.head_dim, .theta = 1e6}};
  c.experts = {.num_experts = g.num_experts, .top_k = g.top_k, .expert_hidden = g.expert_hidden};
  if (g.is_gpt_oss) {
    c.experts.gate = Gate::kClamped;
    c.experts.gate_alpha = 1.702f;
    c.experts.gate_limit = 7.0f;
  }
  for (int64_t i = 0; i < g.num_layers; ++i) {
    c.layers.push_back({.window = i % 2 == 0 ? g.window : 0, .has_experts = true});
  }
  return c;
}

std::unique_ptr<SyntheticSource> source_of(const Geometry& g) {
  auto source = std::make_unique<SyntheticSource>();
  source->add("token_embd.weight", g.rest, {g.vocab_size, g.hidden});
  source->add("output.weight", g.rest, {g.vocab_size, g.hidden});
  source->add("output_norm.weight", Format::kF32, {g.hidden});
  for (int64_t i = 0; i < g.num_layers; ++i) {
    const std::string layer = concat("blk.", i, ".");
    const auto add = [&](const char* name, Format format, std::vector<int64_t> shape) {
      source->add(layer + name, format, std::move(shape));
    };
    add("attn_norm.weight", Format::kF32, {g.hidden});
    add("ffn_norm.weight", Format::kF32, {g.hidden});
    add("attn_q.weight", g.rest, {g.num_heads * g.head_dim, g.hidden});
    add("attn_k.weight", g.rest, {g.num_kv_heads * g.head_dim, g.hidden});
    add("attn_v.weight", g.rest, {g.num_kv_heads * g.head_dim, g.hidden});
    add("attn_output.weight", g.rest, {g.hidden, g.num_heads * g.head_dim});
    if (g.is_gpt_oss) {
      add("attn_sinks.weight", Format::kF32, {g.num_heads});
    } else {
      add("attn_q_norm.weight", Format::kF32, {g.head_dim});
      add("attn_k_norm.weight", Format::kF32, {g.head_dim});
    }
    add("ffn_gate_inp.weight", Format::kF32, {g.num_experts, g.hidden});
    add("ffn_gate_exps.weight", g.experts, {g.num_experts, g.expert_hidden, g.hidden});
    add("ffn_up_exps.weight", g.experts, {g.num_experts, g.expert_hidden, g.hidden});
    add("ffn_down_exps.weight", g.experts, {g.num_experts, g.hidden, g.expert_hidden});
  }
  source->finish();
  return source;
}

}  // namespace

std::vector<std::string> synthetic_names() {
  std::vector<std::string> names;
  names.reserve(std::size(kGeometries));
  for (const Geometry& geometry : kGeometries) {
    names.emplace_back(geometry.name);
  }
  return names;
}

std::unique_ptr<Model> make_synthetic(std::string_view name, const LoadOptions& options, const OpContext& context) {
  for (const Geometry& geometry : kGeometries) {
    if (geometry.name == name) {
      DecoderConfig config = config_of(geometry);
      config.norm_offset = 1.0f;  // random norms about one
      DecoderNames names = gguf_decoder_names();
      if (geometry.is_gpt_oss) {
        names.sinks = "blk.{}.attn_sinks.weight";
      }
      return make_decoder(std::move(config), names, source_of(geometry), options, context);
    }
  }
  std::string known;
  for (const std::string& other : synthetic_names()) {
    known += (known.empty() ? "" : ", ") + other;
  }
  fail(ErrorCode::kInvalidArgument, "no synthetic model \"", printable(name), "\"; there are ", known);
}

}  // namespace shoal
