// MoERouter: sqrt(softplus) scores for the experts of one device.
#include "shoal/ops/moe_router/moe_router.h"

#include <array>
#include <cmath>

#include "shoal/base/text.h"
#include "shoal/cpu/thread_pool.h"
#include "shoal/ops/element.h"
#include "shoal/ops/moe_router/choose.h"
#include "shoal/ops/variant.h"
#include "shoal/tensor/matcher.h"

namespace shoal {
namespace {

constexpr std::string_view kName = "moe_router";
constexpr int64_t kMaxChosen = 32;
constexpr int64_t kTokenGrain = 8;

float sqrt_softplus(float a) { return std::sqrt(a > 0.0f ? a + std::log1p(std::exp(-a)) : std::log1p(std::exp(a))); }

// Written where an expert has no part: its softmax is 0, and it is finite in the output's type.
float fill_value(DType dtype) { return dtype == DType::kF16 ? -1e4f : -1e30f; }

float at(const TensorView& view, int64_t row, int64_t column) {
  return view.as<const float>()[row * view.stride(0) + column * view.stride(1)];
}

int64_t given_id(const TensorView& ids, int64_t t, int64_t j) {
  return ids.as<const int64_t>()[t * ids.stride(0) + j * ids.stride(1)];
}

void check_ids(const MoERouterArgs& a) {
  const int64_t num_experts = a.scores.dim(1);
  for (int64_t t = 0; t < a.scores.dim(0); ++t) {
    for (int64_t j = 0; j < a.topk; ++j) {
      const int64_t id = given_id(a.expert_ids, t, j);
      require(id >= 0 && id < num_experts, kName, ": expert_ids[", t, ", ", j, "] is ", id, ", expected 0 to ",
              num_experts - 1);
    }
  }
}

void route_row(const MoERouterArgs& a, int64_t t) {
  const int64_t num_experts = a.scores.dim(1);
  std::array<int32_t, kMaxChosen> ids{};
  std::array<float, kMaxChosen> weights{};
  if (a.expert_ids) {
    for (int64_t j = 0; j < a.topk; ++j) {
      ids[static_cast<size_t>(j)] = static_cast<int32_t>(given_id(a.expert_ids, t, j));
    }
  } else {
    router::Chosen chosen(weights.data(), ids.data(), a.topk);
    for (int64_t e = 0; e < num_experts; ++e) {
      const float bias = a.bias ? a.bias.as<const float>()[e * a.bias.stride(0)] : 0.0f;
      chosen.offer(sqrt_softplus(at(a.scores, t, e)) + bias, static_cast<int32_t>(e));
    }
  }
  float sum = 0.0f;
  for (size_t j = 0; j < static_cast<size_t>(a.topk); ++j) {
    weights[j] = sqrt_softplus(at(a.scores, t, ids[j]));
    sum += weights[j];
  }
  const auto write = [&](int64_t column, float value) {
    write_element(a.dtype, a.router_probs.data, t * a.router_probs.stride(0) + column * a.router_probs.stride(1),
                  value);
  };
  for (int64_t column = 0; column < a.local_expert_count; ++column) {
    write(column, fill_value(a.dtype));
  }
  float local_sum = 0.0f;
  for (size_t j = 0; j < static_cast<size_t>(a.topk); ++j) {
    const int64_t column = ids[j] - a.local_expert_start;
    const float weight = sum == 0.0f ? 0.0f : weights[j] / sum;
    if (column >= 0 && column < a.local_expert_count && weight != 0.0f) {
      local_sum += weight;
      write(column, std::log(weight));
    }
  }
  a.weight_scale.as<float>()[t * a.weight_scale.stride(0)] = local_sum * a.route_scale;
}

}  // namespace

MoERouterShapes moe_router_shapes(const MoERouterArgs& a) {
  require(a.topk >= 1 && a.topk <= kMaxChosen, kName, ": topk is ", a.topk, ", expected 1 to ", kMaxChosen);
  require(a.local_expert_start >= 0, kName, ": local_expert_start is ", a.local_expert_start, ", expected at least 0");
  require(a.local_expert_count >= 1, kName, ": local_expert_count is ", a.local_expert_count, ", expected at least 1");
  require(a.scoring == "sqrt_softplus", kName, ": scoring is '", printable(a.scoring), "', expected sqrt_softplus");
  require(a.selection == "noaux_tc" || a.selection == "topk", kName, ": selection is '", printable(a.selection),
          "', expected noaux_tc or topk");
  require(a.dtype == DType::kF32 || a.dtype == DType::kF16 || a.dtype == DType::kBF16, kName, ": dtype is ",
          to_string(a.dtype), ", expected float32, float16 or bfloat16");
  const Matcher match(kName);
  Dim tokens{"num_tokens"};
  Dim experts{"num_experts"};
  match.tensor("scores", a.scores).type(DType::kF32).shape({tokens, experts});
  const Device device = a.scores.device;
  require(a.topk <= experts, kName, ": topk is ", a.topk, ", but scores has ", experts.value(), " experts");
  require(a.local_expert_start <= experts && a.local_expert_count <= experts - a.local_expert_start, kName,
          ": local_expert_start ", a.local_expert_start, " and local_expert_count ", a.local_expert_count,
          " run past the ", experts.value(), " experts of scores");
  if (a.bias) {
    require(a.selection == "noaux_tc", kName, ": bias needs selection noaux_tc");
    match.tensor("bias", a.bias).type(DType::kF32).shape({experts}).device(device);
  }
  if (a.expert_ids) {
    match.tensor("expert_ids", a.expert_ids).type(DType::kI64).shape({tokens, a.topk}).device(device);
    check_ids(a);
  }
  return {.router_probs = {a.dtype, {tokens, a.local_expert_count}}, .weight_scale = {DType::kF32, {tokens, 1}}};
}

void moe_router(const MoERouterArgs& a, const OpContext& context) {
  const MoERouterShapes shapes = moe_router_shapes(a);
  check_output(kName, "router_probs", a.router_probs, shapes.router_probs, a.scores.device);
  check_output(kName, "weight_scale", a.weight_scale, shapes.weight_scale, a.scores.device);
  wants_reference(kName, context.variant);  // one path for both
  context.pool->parallel_for(a.scores.dim(0), kTokenGrain, [&](int64_t begin, int64_t end, int) {
    for (int64_t t = begin; t < end; ++t) {
      route_row(a, t);
    }
  });
}

}  // namespace shoal
