// A checked call, resolved. Internal to the operator.
#pragma once

#include "shoal/ops/paged_problem.h"
#include "shoal/ops/sparse_attend.h"
#include "shoal/ops/sparse_paged_attention/sparse_paged_attention.h"

namespace shoal::sparse_paged {

constexpr std::string_view kOp = "sparse_paged_attention";

struct Problem {
  // What the call has in common with paged_attention. `paged` refers to `paged_args`: not to be copied.
  PagedAttentionArgs paged_args{};
  paged::Problem paged{};

  bool local = false;      // local_plus_selected
  bool auxiliary = false;  // where selected_indices point
  paged::Matrix selected{};
  paged::Matrix counts{};
  paged::Matrix lengths{};
  int64_t max_selected = 0;
  bool by_head = false;              // rows of `selected` and `counts` are tokens' KV heads, not tokens
  int64_t capacity = 0;              // of the auxiliary cache
  sparse::Source auxiliary_rows{};   // of sequence 0
  int64_t auxiliary_key_stride = 0;  // bytes from one sequence to the next
  int64_t auxiliary_value_stride = 0;

  Problem() = default;
  Problem(const Problem&) = delete;
  Problem& operator=(const Problem&) = delete;
};

// Checks everything that the contract names. `shapes_only`: outputs need not be there.
void check(const SparsePagedAttentionArgs& args, bool shapes_only, Problem& problem);

}  // namespace shoal::sparse_paged
