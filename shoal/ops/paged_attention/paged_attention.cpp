// Entry: checks, variant, run.
#include "shoal/ops/paged_attention/paged_attention.h"

#include <algorithm>
#include <atomic>

#include "shoal/base/text.h"
#include "shoal/cpu/thread_pool.h"
#include "shoal/ops/on_cuda.h"
#include "shoal/ops/paged_attention/paged_attention_cuda.h"
#include "shoal/ops/paged_attention/paged_attention_plan.h"

namespace shoal {
namespace paged {
namespace {

// Hands out [0, count) one by one, largest first, to whichever thread is free. The order does not show in the result.
template <class Body>
void for_each_free(cpu::ThreadPool& pool, int64_t count, Body&& body) {
  std::atomic<int64_t> next{count};
  pool.parallel_for(std::min<int64_t>(count, pool.num_threads()), 1, [&](int64_t, int64_t, int thread_idx) {
    for (int64_t i = next.fetch_sub(1) - 1; i >= 0; i = next.fetch_sub(1) - 1) {
      body(i, thread_idx);
    }
  });
}

void run_cpu(const Problem& problem, const OpContext& context) {
  cpu::ThreadPool& pool = *context.pool;
  require(context.workspace != nullptr, "paged_attention: a workspace is required by the variant cpu");
  const Workspace::Scope scope(*context.workspace);
  Plan plan = make_plan(problem, pool.num_threads());
  take_arrays(plan, *context.workspace);
  fill_plan(plan);
  const int64_t num_parts = std::min<int64_t>(plan.num_threads, problem.num_tokens);
  const auto prepare = SHOAL_PICK_ISA(context.isa, prepare);
  pool.parallel_for(num_parts, 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t part = begin; part < end; ++part) {
      prepare(plan, part, num_parts);
    }
  });
  if (!plan.split) {
    const auto attend = SHOAL_PICK_ISA(context.isa, attend_unit);
    for_each_free(pool, plan.num_units,
                  [&](int64_t i, int thread_idx) { attend(plan, plan.units[i], plan.threads[thread_idx]); });
    return;
  }
  const auto attend = SHOAL_PICK_ISA(context.isa, attend_span);
  for_each_free(pool, plan.num_units * plan.num_spans, [&](int64_t i, int thread_idx) {
    attend(plan, plan.units[i / plan.num_spans], i % plan.num_spans, plan.threads[thread_idx]);
  });
  const auto merge = SHOAL_PICK_ISA(context.isa, merge_unit);
  for_each_free(pool, plan.num_units,
                [&](int64_t i, int thread_idx) { merge(plan, plan.units[i], plan.threads[thread_idx]); });
}

}  // namespace
}  // namespace paged

size_t paged_attention_workspace_bytes(const PagedAttentionArgs& args, int num_threads) {
  require(num_threads > 0, "paged_attention: num_threads is ", num_threads, ", expected more than 0");
  const paged::Problem problem = paged::check(args, /*shapes_only=*/true, "paged_attention", /*runs_on_devices=*/true);
  if (args.query.device.type == DeviceType::kCuda) {
    return SHOAL_ON_CUDA("paged_attention", paged_attention_workspace_bytes(problem));
  }
  return paged::plan_bytes(paged::make_plan(problem, num_threads));
}

void paged_attention(const PagedAttentionArgs& args, const OpContext& context) {
  require(context.variant.empty() || context.variant == "cpu" || context.variant == "ref", "paged_attention: variant '",
          printable(context.variant), "' is unknown, expected cpu or ref");
  const paged::Problem problem = paged::check(args, /*shapes_only=*/false, "paged_attention", /*runs_on_devices=*/true);
  if (problem.num_tokens == 0) {
    return;
  }
  if (args.query.device.type == DeviceType::kCuda) {
    require(context.variant.empty(), "paged_attention: on CUDA there is one variant, not '", printable(context.variant),
            "'");
    require(context.workspace != nullptr, "paged_attention: a workspace is required on CUDA");
    SHOAL_ON_CUDA("paged_attention", paged_attention(problem, context));
    return;
  }
  paged::check_page_ids(args, problem);
  if (context.variant == "ref") {
    paged::run_ref(problem);
  } else {
    paged::run_cpu(problem, context);
  }
}

}  // namespace shoal
