// The routers inside QMoE and MoEPacked.
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <vector>

#include "shoal/cpu/thread_pool.h"
#include "shoal/ops/element.h"
#include "shoal/ops/moe_router/choose.h"
#include "shoal/ops/moe_router/moe_router.h"
#include "shoal/ops/moe_router/route_experts_cuda.h"
#include "shoal/ops/on_cuda.h"
#include "shoal/tensor/matcher.h"

namespace shoal {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kSmallestSum = 1e-6f;  // below it weights are left as they are
constexpr float kJitter = 0.01f;       // of the sparse mixer
constexpr int kLanes = 32;             // of the canonical sum: a warp
constexpr int64_t kTokenGrain = 8;

struct Row {
  const TensorView& view;
  int64_t token;
  float operator[](int64_t e) const {
    return read_element(view.dtype, view.data, token * view.stride(0) + e * view.stride(1));
  }
};

float canonical_sum(const float* values, int64_t count) {
  std::array<float, kLanes> lanes{};
  for (int64_t e = 0; e < count; ++e) {
    lanes[static_cast<size_t>(e % kLanes)] += values[e];
  }
  for (size_t distance = kLanes / 2; distance > 0; distance /= 2) {
    for (size_t i = 0; i < distance; ++i) {  // both ends of a pair get the same sum; one is enough
      lanes[i] += lanes[i + distance];
    }
  }
  return lanes[0];
}

// Turns logits (NaN is -inf already) into probabilities; false if every one is -inf.
bool softmax(const float* logits, int64_t count, float* p) {
  const float largest = *std::max_element(logits, logits + count);
  if (largest == -kInf) {
    std::fill(p, p + count, 0.0f);
    return false;
  }
  for (int64_t e = 0; e < count; ++e) {
    p[e] = logits[e] == largest ? 1.0f : std::exp(logits[e] - largest);  // inf - inf is no number
  }
  const float sum = canonical_sum(p, count);
  for (int64_t e = 0; e < count; ++e) {
    p[e] /= sum;
  }
  return true;
}

float sum_of(const float* weights, int64_t count) {
  float sum = 0.0f;
  for (int64_t j = 0; j < count; ++j) {
    sum += weights[j];
  }
  return sum;
}

// Weight of expert `best` among those that `banned` leaves; the logits are not NaN.
float mixer_weight(const float* logits, int64_t count, int32_t best, int32_t banned) {
  const float l = logits[best];
  if (l == -kInf) {
    return 0.0f;
  }
  float sum = 0.0f;
  for (int32_t e = 0; e < count; ++e) {
    const float distance = logits[e] == l ? 0.0f : l - logits[e];
    if (e != banned && !(distance > 2.0f * kJitter * std::max(std::fabs(logits[e]), l))) {
      sum += std::exp(-distance);
    }
  }
  return 1.0f / sum;
}

// Scratch of one thread.
struct Scratch {
  explicit Scratch(int64_t num_experts)
      : logits(static_cast<size_t>(num_experts)), p(logits.size()), best(logits.size()) {}
  std::vector<float> logits;
  std::vector<float> p;
  std::vector<float> best;
};

void route_row(const RouteExpertsArgs& a, int64_t t, Scratch& scratch) {
  const Row row{a.router_logits, t};
  const int64_t num_routed = a.router_logits.dim(1) - a.num_shared;
  int32_t* ids = a.expert_ids.as<int32_t>() + t * a.expert_ids.stride(0);
  float* weights = a.expert_weights.as<float>() + t * a.expert_weights.stride(0);
  float* logits = scratch.logits.data();
  for (int64_t e = 0; e < num_routed; ++e) {
    logits[e] = row[e];
    if (std::isnan(logits[e])) {
      logits[e] = -kInf;
    }
  }
  router::Chosen chosen(scratch.best.data(), ids, a.top_k);
  for (int64_t e = 0; e < num_routed; ++e) {
    chosen.offer(logits[e], static_cast<int32_t>(e));
  }
  const bool any = softmax(logits, num_routed, scratch.p.data());
  if (!any) {
    std::fill(weights, weights + a.top_k, 0.0f);
  } else if (a.router_weights) {
    const Row values{a.router_weights, t};
    for (int64_t j = 0; j < a.top_k; ++j) {
      weights[j] = std::isnan(row[ids[j]]) ? 0.0f : values[ids[j]];
    }
    if (a.normalize) {
      const float sum = sum_of(weights, a.top_k);
      for (int64_t j = 0; j < a.top_k; ++j) {
        weights[j] = sum == 0.0f ? 0.0f : weights[j] / sum;
      }
    }
  } else if (a.sparse_mixer) {
    weights[0] = mixer_weight(logits, num_routed, ids[0], -1);
    weights[1] = mixer_weight(logits, num_routed, ids[1], ids[0]);
  } else {
    for (int64_t j = 0; j < a.top_k; ++j) {
      weights[j] = scratch.p[static_cast<size_t>(ids[j])];
    }
    const float sum = sum_of(weights, a.top_k);
    if (a.normalize && sum > kSmallestSum) {
      for (int64_t j = 0; j < a.top_k; ++j) {
        weights[j] /= sum;
      }
    }
  }
  if (a.scale != 1.0f) {
    for (int64_t j = 0; j < a.top_k; ++j) {
      weights[j] *= a.scale;
    }
  }
  for (int64_t s = 0; s < a.num_shared; ++s) {
    const float gate = row[num_routed + s];
    ids[a.top_k + s] = static_cast<int32_t>(num_routed + s);
    weights[a.top_k + s] = std::isnan(gate) ? 0.0f : 1.0f / (1.0f + std::exp(-gate));
  }
}

void route_packed_row(const RoutePackedArgs& a, int64_t t, Scratch& scratch) {
  const Row row{a.router_probs, t};
  const Row values{a.router_weights, t};
  const int64_t num_experts = a.router_probs.dim(1);
  int32_t* ids = a.expert_ids.as<int32_t>() + t * a.expert_ids.stride(0);
  float* weights = a.expert_weights.as<float>() + t * a.expert_weights.stride(0);
  router::Chosen chosen(scratch.best.data(), ids, a.top_k);
  for (int64_t e = 0; e < num_experts; ++e) {
    const float logit = row[e];
    chosen.offer(logit, static_cast<int32_t>(e));
    scratch.logits[static_cast<size_t>(e)] = std::isnan(logit) ? -kInf : logit;
  }
  if (!a.router_weights) {
    softmax(scratch.logits.data(), num_experts, scratch.p.data());
  }
  for (int64_t j = 0; j < a.top_k; ++j) {
    weights[j] = a.router_weights ? values[ids[j]] : scratch.p[static_cast<size_t>(ids[j])];
  }
  const float sum = sum_of(weights, a.top_k);
  for (int64_t j = 0; j < a.top_k; ++j) {
    if (!a.router_weights) {
      weights[j] = a.normalize && sum > kSmallestSum ? weights[j] / sum : weights[j];
      continue;
    }
    if (a.normalize) {
      const float divisor = sum + a.epsilon;
      weights[j] = divisor == 0.0f ? 0.0f : a.epsilon > 0.0f ? weights[j] / divisor : weights[j] * (1.0f / divisor);
    }
    weights[j] *= a.scale;
  }
}

// Checks that both routers share. Messages carry the names that the operators' own inputs have.
void check_routing(std::string_view logits_name, const TensorView& logits, const TensorView& values,
                   const TensorView& ids, const TensorView& weights, int64_t columns) {
  const Matcher match("route_experts");
  Dim tokens{"num_tokens"};
  Dim experts{"num_experts"};
  const Device device = logits.device;
  match.tensor(logits_name, logits).types(kFloats).shape({tokens, experts});
  if (values) {
    match.tensor("router_weights", values).type(logits.dtype).shape({tokens, experts}).device(device);
  }
  match.tensor("expert_ids", ids).type(DType::kI32).shape({tokens, columns}).inner_contiguous().device(device);
  match.tensor("expert_weights", weights).type(DType::kF32).shape({tokens, columns}).inner_contiguous().device(device);
}

template <class Body>
void for_each_token(const OpContext& context, int64_t num_tokens, int64_t num_experts, Body&& body) {
  context.pool->parallel_for(num_tokens, kTokenGrain, [&](int64_t begin, int64_t end, int) {
    Scratch scratch(num_experts);
    for (int64_t t = begin; t < end; ++t) {
      body(t, scratch);
    }
  });
}

}  // namespace

void route_experts(const RouteExpertsArgs& a, const OpContext& context) {
  require(a.num_shared >= 0, "route_experts: num_shared is ", a.num_shared, ", expected at least 0");
  check_routing("router_logits", a.router_logits, a.router_weights, a.expert_ids, a.expert_weights,
                a.top_k + a.num_shared);
  const int64_t num_routed = a.router_logits.dim(1) - a.num_shared;
  require(a.top_k >= 1 && a.top_k <= num_routed, "route_experts: top_k is ", a.top_k, ", expected 1 to ", num_routed);
  require(a.num_shared == 0 || (!a.router_weights && !a.sparse_mixer),
          "route_experts: num_shared excludes router_weights and sparse_mixer");
  require(!a.sparse_mixer || (a.top_k == 2 && (num_routed == 8 || num_routed == 16)),
          "route_experts: sparse_mixer needs top_k 2 and 8 or 16 experts");
  if (a.router_logits.device.type == DeviceType::kCuda) {
    SHOAL_ON_CUDA("route_experts", route_experts(a, context));
    return;
  }
  for_each_token(context, a.router_logits.dim(0), a.router_logits.dim(1),
                 [&](int64_t t, Scratch& scratch) { route_row(a, t, scratch); });
}

void route_packed_experts(const RoutePackedArgs& a, const OpContext& context) {
  check_routing("router_probs", a.router_probs, a.router_weights, a.expert_ids, a.expert_weights, a.top_k);
  const int64_t num_experts = a.router_probs.dim(1);
  require(a.top_k >= 1 && a.top_k <= num_experts, "route_experts: top_k is ", a.top_k, ", expected 1 to ", num_experts);
  if (a.router_probs.device.type == DeviceType::kCuda) {
    SHOAL_ON_CUDA("route_experts", route_packed_experts(a, context));
    return;
  }
  for_each_token(context, a.router_probs.dim(0), num_experts,
                 [&](int64_t t, Scratch& scratch) { route_packed_row(a, t, scratch); });
}

}  // namespace shoal
