// The way of a call: route, group rows by expert, phase 1, phase 2, combine; for some tokens at a time.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <vector>

#include "shoal/base/checked.h"
#include "shoal/cpu/thread_pool.h"
#include "shoal/ops/moe/moe_job.h"
#include "shoal/ops/moe/moe_problem.h"
#include "shoal/ops/variant.h"

namespace shoal::moe {
namespace {

// Tokens at a time are bounded by memory, not by speed: from hundreds of rows on, reading weights again costs little.
constexpr int64_t kMaxRowBytes = int64_t{256} << 20;
constexpr int64_t kFewestTokens = 512;
constexpr int64_t kTilesAtOnce = 8;  // neighbours, for the prefetch from one to the next

struct Plan {
  int64_t tokens = 0;  // at a time
  int64_t rows = 0;    // tokens * ranks
  int64_t h_stride = 0;
  int64_t a2_stride = 0;
  bool converts = false;  // x is not f32 rows already

  explicit Plan(const Problem& p) {
    h_stride = round_up(p.inter, 2 * kMaxLanes);
    a2_stride = round_up(p.hidden, 2 * kMaxLanes);
    converts = p.dtype != DType::kF32 || p.input.stride(p.input.rank - 1) != 1;
    const int64_t token_bytes = 4 * (p.num_ranks * (h_stride + a2_stride) + p.hidden);
    const int64_t fitting = std::max(kFewestTokens, kMaxRowBytes / token_bytes);
    tokens = std::min(p.num_tokens, p.row_tile > 0 ? p.row_tile : fitting);
    rows = tokens * p.num_ranks;
  }
};

// The rows of a step, grouped.
struct Groups {
  std::span<int64_t> first_row;  // [num_experts + 1]
  std::span<int32_t> ids;        // [rows], by expert
  std::span<int32_t> active;     // experts that have rows, the busiest first
  int64_t num_active = 0;

  void build(const int32_t* expert_ids, int64_t num_tokens, int64_t num_ranks) {
    std::fill(first_row.begin(), first_row.end(), 0);
    const int64_t rows = num_tokens * num_ranks;
    for (int64_t i = 0; i < rows; ++i) {
      ++first_row[static_cast<size_t>(expert_ids[i]) + 1];
    }
    num_active = 0;
    for (size_t e = 0; e + 1 < first_row.size(); ++e) {
      if (first_row[e + 1] != 0) {
        active[static_cast<size_t>(num_active++)] = static_cast<int32_t>(e);
      }
      first_row[e + 1] += first_row[e];
    }
    for (int64_t j = 0; j < num_ranks; ++j) {  // ascending t + j * num_tokens
      for (int64_t t = 0; t < num_tokens; ++t) {
        const size_t e = static_cast<size_t>(expert_ids[t * num_ranks + j]);
        ids[static_cast<size_t>(first_row[e]++)] = static_cast<int32_t>(t + j * num_tokens);
      }
    }
    for (size_t e = first_row.size() - 1; e > 0; --e) {  // each start has moved to the next one's
      first_row[e] = first_row[e - 1];
    }
    first_row[0] = 0;
    std::sort(active.begin(), active.begin() + num_active, [&](int32_t a, int32_t b) {
      const int64_t rows_a = num_rows(a);
      const int64_t rows_b = num_rows(b);
      return rows_a != rows_b ? rows_a > rows_b : a < b;
    });
  }
  int64_t num_rows(int32_t e) const {
    return first_row[static_cast<size_t>(e) + 1] - first_row[static_cast<size_t>(e)];
  }
};

// One of the two phases over all active experts. Tiles are taken by whoever is free; who takes which changes no bits.
void run_phase(const Job& common, const Groups& groups, std::span<float> scratch, int64_t scratch_size,
               const OpContext& context) {
  const auto tiles = SHOAL_PICK_ISA(context.isa, moe_tiles);
  const int64_t num_tiles = SHOAL_PICK_ISA(context.isa, moe_num_tiles)(*common.problem, common.first);
  const int64_t num_threads = context.pool->num_threads();
  const int64_t step = std::clamp<int64_t>(num_tiles * groups.num_active / (num_threads * 8), 1, kTilesAtOnce);
  const int64_t steps_of_expert = ceil_div(num_tiles, step);
  const int64_t total = steps_of_expert * groups.num_active;
  std::atomic<int64_t> next{0};
  context.pool->parallel_for(num_threads, 1, [&](int64_t, int64_t, int thread_idx) {
    for (int64_t i = next.fetch_add(1); i < total; i = next.fetch_add(1)) {
      const int32_t e = groups.active[static_cast<size_t>(i / steps_of_expert)];
      const int64_t first = groups.first_row[static_cast<size_t>(e)];
      Job job = common;
      job.expert = e;
      job.num_rows = groups.num_rows(e);
      job.ids = groups.ids.data() + first;
      job.h = common.h + first * common.h_stride;
      const int64_t begin = i % steps_of_expert * step;
      tiles(job, begin, std::min(begin + step, num_tiles), scratch.data() + thread_idx * scratch_size);
    }
  });
}

class Step {
 public:
  Step(const Problem& problem, const Plan& plan, const OpContext& context)
      : problem_(problem), context_(context), sizes_(ScratchSizes(problem).total()) {
    Workspace& workspace = *context.workspace;
    const auto take_floats = [&](int64_t count) { return workspace.take<float>(static_cast<size_t>(count)); };
    ids_ = workspace.take<int32_t>(static_cast<size_t>(plan.rows));
    weights_ = take_floats(plan.rows);
    groups_.first_row = workspace.take<int64_t>(static_cast<size_t>(problem.num_experts + 1));
    groups_.ids = workspace.take<int32_t>(static_cast<size_t>(plan.rows));
    groups_.active = workspace.take<int32_t>(static_cast<size_t>(problem.num_experts));
    x_rows_ = workspace.take<const float*>(static_cast<size_t>(plan.tokens));
    x_ = take_floats(plan.converts ? plan.tokens * problem.hidden : 0);
    h_ = take_floats(plan.rows * plan.h_stride);
    a2_ = take_floats(plan.rows * plan.a2_stride);
    scratch_ = take_floats(sizes_ * context.pool->num_threads());
    sums_ = take_floats(plan.a2_stride * context.pool->num_threads());
  }

  static size_t bytes(const Problem& problem, const Plan& plan, int num_threads) {
    const auto floats = [](int64_t count) { return Workspace::bytes_for<float>(static_cast<size_t>(count)); };
    return 2 * Workspace::bytes_for<int32_t>(static_cast<size_t>(plan.rows)) + floats(plan.rows) +
           Workspace::bytes_for<int64_t>(static_cast<size_t>(problem.num_experts + 1)) +
           Workspace::bytes_for<int32_t>(static_cast<size_t>(problem.num_experts)) +
           Workspace::bytes_for<const float*>(static_cast<size_t>(plan.tokens)) +
           floats(plan.converts ? plan.tokens * problem.hidden : 0) + floats(plan.rows * plan.h_stride) +
           floats(plan.rows * plan.a2_stride) + floats(ScratchSizes(problem).total() * num_threads) +
           floats(plan.a2_stride * num_threads);
  }

  void operator()(const Plan& plan, const void* args, RouteTokens route, int64_t begin, int64_t end) {
    route(args, begin, end, ids_.data(), weights_.data(), context_);
    const int64_t num_tokens = end - begin;
    groups_.build(ids_.data(), num_tokens, problem_.num_ranks);
    load_input(plan, begin, num_tokens);
    Job job;
    job.problem = &problem_;
    job.num_tokens = num_tokens;
    job.x_rows = x_rows_.data();
    job.h = h_.data();
    job.h_stride = plan.h_stride;
    job.a2 = a2_.data();
    job.a2_stride = plan.a2_stride;
    run_phase(job, groups_, scratch_, sizes_, context_);
    job.first = false;
    run_phase(job, groups_, scratch_, sizes_, context_);
    combine(plan, begin, num_tokens);
  }

 private:
  void load_input(const Plan& plan, int64_t begin, int64_t num_tokens) {
    const auto load = SHOAL_PICK_ISA(context_.isa, moe_load_row);
    const auto* input = problem_.input.as<const std::byte>();
    const int64_t element_bytes = static_cast<int64_t>(size_of(problem_.dtype));
    context_.pool->parallel_for(num_tokens, 8, [&](int64_t first, int64_t last, int) {
      for (int64_t t = first; t < last; ++t) {
        const std::byte* from = input + row_offset(problem_.input, begin + t) * element_bytes;
        if (!plan.converts) {
          x_rows_[static_cast<size_t>(t)] = reinterpret_cast<const float*>(from);
          continue;
        }
        float* to = x_.data() + t * problem_.hidden;
        load(problem_.dtype, from, problem_.input.stride(problem_.input.rank - 1), problem_.hidden, to);
        x_rows_[static_cast<size_t>(t)] = to;
      }
    });
  }

  void combine(const Plan& plan, int64_t begin, int64_t num_tokens) {
    const auto add = SHOAL_PICK_ISA(context_.isa, moe_combine);
    const auto store = SHOAL_PICK_ISA(context_.isa, moe_store_row);
    const int64_t element_bytes = static_cast<int64_t>(size_of(problem_.dtype));
    context_.pool->parallel_for(num_tokens, 1, [&](int64_t first, int64_t last, int thread_idx) {
      float* acc = sums_.data() + thread_idx * plan.a2_stride;
      for (int64_t t = first; t < last; ++t) {
        std::fill(acc, acc + plan.a2_stride, 0.0f);
        bool lost = false;
        for (int64_t j = 0; j < problem_.num_ranks; ++j) {
          const float weight = weights_[static_cast<size_t>(t * problem_.num_ranks + j)];
          lost = lost || (problem_.poison && !std::isfinite(weight));
          add(weight, a2_.data() + (t + j * num_tokens) * plan.a2_stride, problem_.hidden, acc);
        }
        if (lost) {
          std::fill(acc, acc + plan.a2_stride, std::numeric_limits<float>::quiet_NaN());
        }
        std::byte* to = problem_.output.as<std::byte>() + row_offset(problem_.output, begin + t) * element_bytes;
        store(problem_.dtype, acc, problem_.hidden, to, problem_.output.stride(problem_.output.rank - 1));
      }
    });
  }

  const Problem& problem_;
  const OpContext& context_;
  int64_t sizes_;
  Groups groups_;
  std::span<int32_t> ids_;
  std::span<float> weights_;
  std::span<const float*> x_rows_;
  std::span<float> x_;
  std::span<float> h_;
  std::span<float> a2_;
  std::span<float> scratch_;
  std::span<float> sums_;
};

}  // namespace

size_t workspace_bytes(const Problem& problem, int num_threads) {
  return problem.num_tokens == 0 ? 0 : Step::bytes(problem, Plan(problem), num_threads);
}

void run(const Problem& problem, const void* args, RouteTokens route, const OpContext& context) {
  const bool reference = wants_reference("moe", context.variant);
  if (problem.num_tokens == 0) {
    return;
  }
  if (reference) {
    const size_t rows = static_cast<size_t>(problem.num_tokens * problem.num_ranks);
    std::vector<int32_t> ids(rows);
    std::vector<float> weights(rows);
    route(args, 0, problem.num_tokens, ids.data(), weights.data(), context);
    moe_ref(problem, ids.data(), weights.data());
    return;
  }
  const Plan plan(problem);
  SHOAL_ASSERT(context.workspace != nullptr);
  const Workspace::Scope scope(*context.workspace);
  Step step(problem, plan, context);
  for (int64_t begin = 0; begin < problem.num_tokens; begin += plan.tokens) {
    step(plan, args, route, begin, std::min(begin + plan.tokens, problem.num_tokens));
  }
}

}  // namespace shoal::moe
