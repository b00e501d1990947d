// MoEGroupRouter: sigmoid scores, choice limited to the best groups.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "shoal/base/checked.h"
#include "shoal/base/text.h"
#include "shoal/cpu/thread_pool.h"
#include "shoal/ops/element.h"
#include "shoal/ops/moe_router/choose.h"
#include "shoal/ops/moe_router/moe_router.h"
#include "shoal/ops/moe_router/route_experts_cuda.h"
#include "shoal/ops/on_cuda.h"
#include "shoal/ops/variant.h"
#include "shoal/tensor/matcher.h"

namespace shoal {

// out[r, e] = sum over k of a[r, k] * weight[e, k] for experts [begin, end); rows of `width` f32 values, contiguous.
SHOAL_DECLARE_FOR_EACH_ISA(void project_rows(const float* a, const TensorView& weight, int64_t num_rows, int64_t begin,
                                             int64_t end, float* out, int64_t out_stride))

namespace {

constexpr std::string_view kName = "moe_group_router";
constexpr int64_t kMaxFullExperts = 512;
constexpr int64_t kWidthMultiple = 256;
constexpr int64_t kTokenGrain = 8;
constexpr int64_t kExpertGrain = 8;
constexpr float kSmallestScore = 1e-20f;  // keeps the logarithm finite

bool is_full(const MoEGroupRouterArgs& a) { return a.full_scores || static_cast<bool>(a.projection_weight); }

float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

float bias_of(const MoEGroupRouterArgs& a, int64_t e) {
  return a.expert_bias.as<const float>()[e * a.expert_bias.stride(0)];
}

// Element offsets of rows of a tensor whose leading dimensions are flattened.
int64_t row_offset(const TensorView& view, int64_t row) {
  int64_t offset = 0;
  for (int axis = view.rank - 2; axis >= 0; --axis) {
    offset += row % view.dim(axis) * view.stride(axis);
    row /= view.dim(axis);
  }
  return offset;
}

int64_t num_rows_of(const MoEGroupRouterArgs& a) {
  int64_t rows = 1;
  for (int axis = 0; axis < a.logits.rank - 1; ++axis) {
    rows *= a.logits.dim(axis);
  }
  return rows;
}

struct Scratch {
  explicit Scratch(int64_t num_experts)
      : s(static_cast<size_t>(num_experts)), c(s), best(s), ids(s.size()), groups(s.size()) {}
  std::vector<float> s;
  std::vector<float> c;
  std::vector<float> best;
  std::vector<int32_t> ids;
  std::vector<int32_t> groups;
};

// Sum of the largest `count` of a group's c; NaN only if there are not as many numbers.
float group_score(const float* c, int64_t group_size, int64_t count, Scratch& scratch) {
  router::Chosen chosen(scratch.best.data(), scratch.ids.data(), count);
  for (int64_t i = 0; i < group_size; ++i) {
    chosen.offer(c[i], static_cast<int32_t>(i));
  }
  float sum = 0.0f;
  for (int64_t i = 0; i < count; ++i) {
    sum += scratch.best[static_cast<size_t>(i)];
  }
  return sum;
}

void choose_row(const MoEGroupRouterArgs& a, int64_t t, Scratch& scratch) {
  const int64_t num_experts = a.expert_bias.dim(0);
  const int64_t group_size = num_experts / a.n_group;
  const int64_t offset = row_offset(a.logits, t);
  for (int64_t e = 0; e < num_experts; ++e) {
    const size_t i = static_cast<size_t>(e);
    scratch.s[i] =
        sigmoid(read_element(a.logits.dtype, a.logits.data, offset + e * a.logits.stride(a.logits.rank - 1)));
    scratch.c[i] = scratch.s[i] + bias_of(a, e);
  }
  std::vector<float>& group_scores = scratch.best;
  std::fill(scratch.groups.begin(), scratch.groups.end(), 0);
  {
    std::vector<float> best(static_cast<size_t>(a.topk_group));
    std::vector<int32_t> kept(best.size());
    router::Chosen chosen(best.data(), kept.data(), a.topk_group);
    for (int64_t g = 0; g < a.n_group; ++g) {
      const float score =
          group_score(scratch.c.data() + g * group_size, group_size, std::min(a.group_topk, group_size), scratch);
      chosen.offer(score, static_cast<int32_t>(g));
    }
    for (const int32_t g : kept) {
      scratch.groups[static_cast<size_t>(g)] = 1;
    }
  }
  router::Chosen chosen(group_scores.data(), scratch.ids.data(), a.top_k);
  for (int64_t e = 0; e < num_experts; ++e) {
    if (scratch.groups[static_cast<size_t>(e / group_size)] != 0) {
      chosen.offer(scratch.c[static_cast<size_t>(e)], static_cast<int32_t>(e));
    }
  }
  const auto write = [&](int64_t e, float value) {
    write_element(a.router_probs.dtype, a.router_probs.data,
                  t * a.router_probs.stride(0) + e * a.router_probs.stride(1), value);
  };
  for (int64_t e = 0; e < num_experts; ++e) {
    write(e, a.router_sentinel);
  }
  for (int64_t j = 0; j < a.top_k; ++j) {
    const int64_t e = scratch.ids[static_cast<size_t>(j)];
    const float s = scratch.s[static_cast<size_t>(e)];
    write(e, std::isnan(scratch.c[static_cast<size_t>(e)]) ? std::numeric_limits<float>::quiet_NaN()
                                                           : std::log(std::max(s, kSmallestScore)));
  }
}

void write_full(const MoEGroupRouterArgs& a, int64_t t, int64_t e, float logit) {
  const float s = sigmoid(logit);
  if (a.router_weights) {
    a.router_weights.as<float>()[t * a.router_weights.stride(0) + e * a.router_weights.stride(1)] = s;
  }
  if (a.selection_scores) {
    a.selection_scores.as<float>()[t * a.selection_scores.stride(0) + e * a.selection_scores.stride(1)] =
        s + bias_of(a, e);
  }
}

void full_rows(const MoEGroupRouterArgs& a, const OpContext& context, int64_t num_rows) {
  const int64_t num_experts = a.expert_bias.dim(0);
  if (!a.projection_weight) {
    context.pool->parallel_for(num_rows, kTokenGrain, [&](int64_t begin, int64_t end, int) {
      for (int64_t t = begin; t < end; ++t) {
        const int64_t offset = row_offset(a.logits, t);
        for (int64_t e = 0; e < num_experts; ++e) {
          write_full(a, t, e,
                     read_element(a.logits.dtype, a.logits.data, offset + e * a.logits.stride(a.logits.rank - 1)));
        }
      }
    });
    return;
  }
  const bool reference = wants_reference(kName, context.variant);
  const auto project = SHOAL_PICK_ISA(context.isa, project_rows);
  const int64_t width = a.logits.dim(1);
  constexpr int64_t kRows = 32;  // of a pass over the weight
  std::vector<float> rows(static_cast<size_t>(kRows * width));
  std::vector<float> sums(static_cast<size_t>(kRows * num_experts));
  for (int64_t first = 0; first < num_rows; first += kRows) {
    const int64_t count = std::min(kRows, num_rows - first);
    for (int64_t r = 0; r < count; ++r) {
      for (int64_t i = 0; i < width; ++i) {
        rows[static_cast<size_t>(r * width + i)] =
            read_element(a.logits.dtype, a.logits.data, (first + r) * a.logits.stride(0) + i * a.logits.stride(1));
      }
    }
    context.pool->parallel_for(num_experts, kExpertGrain, [&](int64_t begin, int64_t end, int) {
      if (!reference) {
        project(rows.data(), a.projection_weight, count, begin, end, sums.data(), num_experts);
      }
      for (int64_t e = begin; e < end; ++e) {
        for (int64_t r = 0; r < count; ++r) {
          float sum = sums[static_cast<size_t>(r * num_experts + e)];
          if (reference) {
            sum = 0.0f;
            for (int64_t i = 0; i < width; ++i) {
              const int64_t place = e * a.projection_weight.stride(0) + i * a.projection_weight.stride(1);
              sum = std::fma(rows[static_cast<size_t>(r * width + i)],
                             read_element(a.projection_weight.dtype, a.projection_weight.data, place), sum);
            }
          }
          write_full(a, first + r, e, sum);
        }
      }
    });
  }
}

void check_full(const MoEGroupRouterArgs& a, int64_t num_experts, int64_t num_rows) {
  require(a.n_group == 1, kName, ": n_group is ", a.n_group, ", expected 1 with full_scores");
  require(a.topk_group == 1, kName, ": topk_group is ", a.topk_group, ", expected 1 with full_scores");
  require(num_experts <= kMaxFullExperts, kName, ": expert_bias has ", num_experts, " experts, at most ",
          kMaxFullExperts, " are possible with full_scores");
  require(num_rows <= INT32_MAX, kName, ": logits has ", num_rows, " rows, at most ", INT32_MAX,
          " are possible with full_scores");
}

}  // namespace

MoEGroupRouterShapes moe_group_router_shapes(const MoEGroupRouterArgs& a) {
  const Matcher match(kName);
  match.tensor("logits", a.logits).types(kFloats);
  require(a.logits.rank >= 1, kName, ": logits has no dimension, expected [..., num_experts]");
  const Device device = a.logits.device;
  Dim experts{"num_experts"};
  match.tensor("expert_bias", a.expert_bias).type(DType::kF32).shape({experts}).device(device);
  require(experts >= 1, kName, ": expert_bias has no experts");
  require(a.top_k >= 1, kName, ": top_k is ", a.top_k, ", expected at least 1");
  require(a.group_topk >= 1, kName, ": group_topk is ", a.group_topk, ", expected at least 1");
  require(a.n_group >= 1 && experts % a.n_group == 0, kName, ": n_group is ", a.n_group,
          ", expected a divisor of num_experts = ", experts.value());
  require(a.topk_group >= 1 && a.topk_group <= a.n_group, kName, ": topk_group is ", a.topk_group, ", expected 1 to ",
          a.n_group);
  require(a.top_k <= a.topk_group * (experts / a.n_group), kName, ": top_k is ", a.top_k, ", but the kept groups have ",
          a.topk_group * (experts / a.n_group), " experts");
  if (a.projection_weight) {
    Dim tokens{"num_tokens"};
    Dim width{"width"};
    match.tensor("logits", a.logits).shape({tokens, width});
    require(width >= 1 && width % kWidthMultiple == 0, kName, ": logits has width ", width.value(),
            ", expected a positive multiple of ", kWidthMultiple, " with projection_weight");
    match.tensor("projection_weight", a.projection_weight).type(a.logits.dtype).shape({experts, width}).device(device);
  } else {
    require(a.logits.dim(a.logits.rank - 1) == experts, kName, ": logits has shape ", shape_text(a.logits.dims()),
            ", expected [..., num_experts = ", experts.value(), "] (from expert_bias)");
  }
  const int64_t num_rows = num_rows_of(a);
  const bool full = is_full(a);
  if (full) {
    check_full(a, experts, num_rows);
  }
  return {.router_probs = {a.logits.dtype, {num_rows, experts}, !full},
          .selection_scores = {DType::kF32, {num_rows, experts}, full},
          .router_weights = {DType::kF32, {num_rows, experts}, full}};
}

void moe_group_router(const MoEGroupRouterArgs& a, const OpContext& context) {
  const MoEGroupRouterShapes shapes = moe_group_router_shapes(a);
  const Device device = a.logits.device;
  check_output(kName, "router_probs", a.router_probs, shapes.router_probs, device);
  check_output(kName, "selection_scores", a.selection_scores, shapes.selection_scores, device);
  check_output(kName, "router_weights", a.router_weights, shapes.router_weights, device);
  wants_reference(kName, context.variant);
  const int64_t num_rows = num_rows_of(a);
  if (device.type == DeviceType::kCuda) {
    if (!is_full(a)) {
      fail(ErrorCode::kUnsupported, kName, ": the choice within groups has no CUDA kernel, only full_scores has");
    }
    SHOAL_ON_CUDA(kName, moe_group_router_full(a, context));
    return;
  }
  if (is_full(a)) {
    full_rows(a, context, num_rows);
    return;
  }
  context.pool->parallel_for(num_rows, kTokenGrain, [&](int64_t begin, int64_t end, int) {
    Scratch scratch(a.expert_bias.dim(0));
    for (int64_t t = begin; t < end; ++t) {
      choose_row(a, t, scratch);
    }
  });
}

}  // namespace shoal
