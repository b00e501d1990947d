// What an indexer keeps: one key a token, in a layer of the KV cache that has no values. So the keys live in the pages of
// their sequence, are shared with its prefix and go with it.
#pragma once

#include "shoal/model/model.h"
#include "shoal/ops/rope/rope.h"

namespace shoal {

// What the tokens of a step read: of each the first `counts` positions, ascending.
struct Selection {
  TensorView indices;  // [num_tokens, max_selected] i32, or [num_tokens, num_kv_heads, max_selected]
  TensorView counts;   // [num_tokens] i32, or [num_tokens, num_kv_heads]
};

// Tokens of the longest sequence of a step, this step's included.
int64_t max_kv_len(const Batch& batch);

// Rotates the leading channels (halves against each other) of every token's key and writes it to its slot.
// keys [num_tokens, head_dim] f32, head_dim a multiple of 8.
void append_index_keys(const TensorView& keys, const Batch& batch, const KvLayer& layer, const RopeTables& rope,
                       const OpContext& context);
size_t append_index_keys_workspace_bytes(int64_t head_dim, const StepLimits& limits, const RopeTables& rope);

// The first out.dim(0) keys of one sequence; out [num_keys, head_dim] f32, contiguous.
void read_index_keys(const TensorView& out, int64_t seq_idx, const Batch& batch, const KvLayer& layer,
                     const OpContext& context);

}  // namespace shoal
