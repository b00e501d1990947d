#include "shoal/engine/kv_calibration.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>

#include "shoal/base/checked.h"
#include "shoal/cpu/thread_pool.h"
#include "shoal/engine/batch.h"

namespace shoal {
namespace {

constexpr int64_t kNumTokens = 256;
constexpr int64_t kPageSize = 32;
constexpr float kMargin = 1.25f;
constexpr float kMaxCode = 127.0f;
constexpr float kSmallestShare = 1.0f / 64.0f;

// Largest magnitude of each channel over the first `num_tokens` slots of a cache [pages, page_size, heads, dim].
std::vector<float> channel_amax(const TensorView& cache, int64_t num_tokens, size_t layer_idx, const char* name) {
  const auto num_channels = static_cast<size_t>(cache.dim(2) * cache.dim(3));
  const float* values = cache.as<float>();
  std::vector<float> amax(num_channels, 0.0f);
  for (int64_t token = 0; token < num_tokens; ++token) {
    for (size_t channel = 0; channel < num_channels; ++channel) {
      const float value = *values++;
      if (!std::isfinite(value)) {
        fail(ErrorCode::kModelFormat, "calibration of the int8 KV cache: layer ", layer_idx, " stores a ", name,
             " that is not finite");
      }
      amax[channel] = std::max(amax[channel], std::abs(value));
    }
  }
  return amax;
}

float largest(const std::vector<float>& values) {
  const float amax = *std::ranges::max_element(values);
  return amax > 0.0f ? amax : 1.0f;
}

KvScales scales_of(const KvLayer& layer, int64_t num_tokens, size_t layer_idx) {
  const std::vector<float> key = channel_amax(layer.key, num_tokens, layer_idx, "key");
  const auto head_dim = static_cast<size_t>(layer.key.dim(3));
  const float floor = largest(key) * kSmallestShare;
  KvScales scales;
  scales.key.resize(key.size());
  for (size_t channel = 0; channel < key.size(); ++channel) {
    const size_t head = channel / head_dim * head_dim;
    const size_t i = channel % head_dim;
    const size_t neighbour = std::min(i ^ 1, head_dim - 1);
    const size_t opposite = (i + head_dim / 2) % head_dim;
    const float amax = std::max({key[channel], key[head + neighbour], key[head + opposite], floor});
    scales.key[channel] = amax * kMargin / kMaxCode;
  }
  if (layer.value) {
    const std::vector<float> value = channel_amax(layer.value, num_tokens, layer_idx, "value");
    scales.value = {largest(value) * kMargin / kMaxCode};
  }
  return scales;
}

}  // namespace

std::vector<KvScales> calibrate_kv(Model& model, int64_t max_tokens, const OpContext& context) {
  const ModelInfo& info = model.info();
  const int64_t num_tokens = std::min(kNumTokens, max_tokens);
  const int64_t num_pages = ceil_div(num_tokens, kPageSize);
  KvCache cache(info.kv_layers, KvType::kF32, num_pages, kPageSize);
  std::vector<PageId> pages(static_cast<size_t>(num_pages));
  std::iota(pages.begin(), pages.end(), 0);
  std::vector<int32_t> tokens(static_cast<size_t>(num_tokens));
  for (size_t i = 0; i < tokens.size(); ++i) {
    // Multiples of the golden ratio, modulo 1: any number of them is spread evenly.
    const uint64_t fraction = (i * 0x9e3779b97f4a7c15ull) >> 32;
    tokens[i] = static_cast<int32_t>((fraction * static_cast<uint64_t>(info.vocab_size)) >> 32);
  }
  BatchBuilder builder(num_tokens, 1, num_pages, 0, kPageSize);
  std::unique_ptr<StatePool> states;
  std::optional<StateSlot> slot;
  if (!info.state_layers.empty()) {
    states = std::make_unique<StatePool>(info.state_layers, 1, 0);
    slot = states->acquire();
  }
  builder.add(tokens, 0, pages, 0, slot);
  context.workspace->reserve(model.workspace_bytes({.max_tokens = num_tokens,
                                                    .max_logit_rows = 0,
                                                    .max_kv_len = num_pages * kPageSize,
                                                    .num_threads = context.pool->num_threads()}));
  float no_logits = 0.0f;
  model.forward(builder.batch(), {cache, states.get()}, TensorView(&no_logits, DType::kF32, {0, info.vocab_size}),
                context);
  std::vector<KvScales> scales;
  for (size_t layer_idx = 0; layer_idx < cache.num_layers(); ++layer_idx) {
    scales.push_back(scales_of(cache.layer(layer_idx), num_tokens, layer_idx));
  }
  return scales;
}

}  // namespace shoal
