// Stable unions of a cached selection with a range of indices, or with a second selection.
//
// Row i of the result: the first occurrences in base_indices[base_row_indices[i]], in order, then what is new among
//
//   append_range    range_starts[i] ... range_ends[i] - 1, ascending
//   append_indices  additional_indices[i], in order
//
// then -1. Of a selection the first `count` entries belong to it; what stands behind them is not read.
//
// Status    0: done. 1: malformed: a row index outside [0, R), a count outside [0, columns], a negative index in a
//           selection, a negative start, an end before its start. 2: sound, but the union has more than
//           max_output_entries. With 1 and 2 the row is -1 throughout and its count 0; other rows are not affected.
//           The cost of a row does not depend on the length of a range that does not fit
// Types     int32 throughout
// Layout    any strides in the inputs; outputs contiguous, none of them the memory of an input
// Errors    kInvalidArgument names the input or attribute; nothing is written then
// Workspace selection_merge_workspace_bytes(args, num_threads)
// Source    ONNX Runtime com.microsoft::SparseAttentionSelectionMerge, com.microsoft::PackedSparseAttentionIndexerMerge
#pragma once

#include <cstdint>
#include <string_view>

#include "shoal/ops/context.h"
#include "shoal/ops/output_spec.h"
#include "shoal/tensor/tensor.h"

namespace shoal {

struct SelectionMergeArgs {
  TensorView selected_indices{};    // [N, max_output_entries]
  TensorView selected_counts{};     // [N]
  TensorView status{};              // [N]
  TensorView base_indices{};        // [R, C]
  TensorView base_counts{};         // [R]
  TensorView base_row_indices{};    // [N]
  TensorView range_starts{};        // [N], with append_range only
  TensorView range_ends{};          // [N], with append_range only
  TensorView additional_indices{};  // [N, A], with append_indices only
  TensorView additional_counts{};   // [N], with append_indices only

  int64_t max_output_entries = 0;                 // 1 to 2^30
  std::string_view policy_mode = "append_range";  // or append_indices
};

struct SelectionMergeShapes {
  OutputSpec selected_indices{};
  OutputSpec selected_counts{};
  OutputSpec status{};
};

// Check inputs and attributes; outputs are not looked at.
SelectionMergeShapes packed_sparse_attention_indexer_merge_shapes(const SelectionMergeArgs& args);
SelectionMergeShapes sparse_attention_selection_merge_shapes(const SelectionMergeArgs& args);
size_t selection_merge_workspace_bytes(const SelectionMergeArgs& args, int num_threads);

// Both policies. One variant, "cpu".
void packed_sparse_attention_indexer_merge(const SelectionMergeArgs& args, const OpContext& context);
// The same, append_range only.
void sparse_attention_selection_merge(const SelectionMergeArgs& args, const OpContext& context);

}  // namespace shoal
