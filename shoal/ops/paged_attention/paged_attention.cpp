// Entry: checks, variant, run.
#include "shoal/ops/paged_attention/paged_attention.h"

#include "shoal/base/text.h"
#include "shoal/ops/paged_attention/paged_attention_problem.h"

namespace shoal {

size_t paged_attention_workspace_bytes(const PagedAttentionArgs& args, int num_threads) {
  static_cast<void>(num_threads);
  paged::check(args, /*shapes_only=*/true);
  return 0;
}

void paged_attention(const PagedAttentionArgs& args, const OpContext& context) {
  require(context.variant.empty() || context.variant == "cpu" || context.variant == "ref", "paged_attention: variant '",
          printable(context.variant), "' is unknown, expected cpu or ref");
  const paged::Problem problem = paged::check(args, /*shapes_only=*/false);
  if (problem.num_tokens == 0) {
    return;
  }
  paged::run_ref(problem);
}

}  // namespace shoal
