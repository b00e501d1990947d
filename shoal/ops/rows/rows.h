// Rows on their way between products: the rows that are wanted, and the rows of a sparse mixture sorted by expert.
//
// Types     all floats f32; last dimension contiguous, rows may be strided
// Errors    kInvalidArgument: shapes, types, an index outside its range (on CUDA indices are not read: gather_rows gives
//           zeros there)
#pragma once

#include <cstdint>

#include "shoal/ops/context.h"
#include "shoal/tensor/tensor.h"

namespace shoal {

// out[i] = x[rows[i]]; out may not overlap x.
struct GatherRowsArgs {
  TensorView out;   // [num_rows, width]
  TensorView x;     // [num_tokens, width]
  TensorView rows;  // [num_rows] i32
};
void gather_rows(const GatherRowsArgs& args, const OpContext& context);

// The (token, choice) pairs in the order of their experts; within one expert in their own.
struct SortRowsArgs {
  TensorView row_of;     // [num_tokens, top_k] i32: place of a pair in that order
  TensorView source;     // [num_tokens * top_k] i32: token of the pair at a place
  TensorView row_begin;  // [num_experts + 1] i32: first place of each expert
  // CUDA only: the places as tiles of at most tile_rows of one expert, {expert, first place, count, 0}; those that are
  // not needed have count 0.
  TensorView tiles{};     // [num_tiles, 4] i32
  TensorView expert_ids;  // [num_tokens, top_k] i32, in [0, num_experts), contiguous
  int64_t num_experts = 0;
  int64_t tile_rows = 0;
};
void sort_rows(const SortRowsArgs& args, const OpContext& context);

// out[t] = sum over j, ascending, of weights[t, j] * rows[row_of[t, j]]
struct CombineRowsArgs {
  TensorView out;      // [num_tokens, width]
  TensorView rows;     // [num_tokens * top_k, width]
  TensorView row_of;   // [num_tokens, top_k] i32, contiguous
  TensorView weights;  // [num_tokens, top_k] contiguous
};
void combine_rows(const CombineRowsArgs& args, const OpContext& context);

// out[t] += share[t] * rows[t],  share[t] = 1 / (1 + exp(-gates[t])), or 1 without gates
struct AddGatedRowsArgs {
  TensorView out;      // [num_tokens, width]
  TensorView rows;     // [num_tokens, width]
  TensorView gates{};  // [num_tokens, 1], optional
};
void add_gated_rows(const AddGatedRowsArgs& args, const OpContext& context);

}  // namespace shoal
