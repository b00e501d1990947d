// Selects, for every token of a batch of equal lengths, what sparse attention may read.
//
// The scores and the order are those of packed_sparse_attention_indexer. Other than there:
//
// policy_mode "qsa": the state holds raw keys, one a token; blocks of r = compress_ratio tokens are formed among the
// visible ones, those with mask != 0 at positions up to the query's own, in order, and pooled anew in every call. A
// block's key is not rounded; its rotary position is that of its first token, a query's is past length + own offset.
//
// policy_mode "csa": the state holds finished keys, and raw projections of the tokens that wait, as many as the buffer
// has rows. Entries that close in this call are scored as they are stored, so that call boundaries do not matter.
//
// State     Without past_sequence_length, present_key has as many rows more as this call adds. With it, past_key has
//           room, present_key is of its shape and may be its memory; what lies behind is carried over
// Types     f32, f16 or bf16, one for all floats; mask and position_ids int64
// Layout    any strides in the inputs; outputs contiguous, none but present_key the memory of an input
// Numerics  f32, unfused, independent of the rest of the batch; one rounding where a key is stored
// Errors    kInvalidArgument names the input or attribute; nothing is written then
// Workspace sparse_attention_indexer_workspace_bytes(args, num_threads)
// Source    ONNX Runtime com.microsoft::SparseAttentionIndexer
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "shoal/ops/context.h"
#include "shoal/ops/output_spec.h"
#include "shoal/tensor/tensor.h"

namespace shoal {

struct SparseAttentionIndexerArgs {
  // B sequences of S tokens, N heads of H channels; M columns: token_budget + r - 1 (qsa) or index_topk (csa)
  TensorView selected_indices{};     // [B, S, M] int32: tokens (qsa) or entries (csa), then -1
  TensorView present_key{};          // [B, past + new, H], or as past_key
  TensorView present_proj_buffer{};  // [2, B, waiting, 2 * H]; csa only

  TensorView query{};                 // [B, S, N * H]; qsa without key: [B, S, (N + 1) * H], the key last
  TensorView key{};                   // [B, S, H] (qsa), [B, S, 2 * H] (csa)
  TensorView query_norm_weight{};     // [H]
  TensorView key_norm_weight{};       // [H]
  TensorView cos_cache{};             // [P, R] or [B, P, R]; qsa: R even, <= H; csa: 2 * R <= H
  TensorView sin_cache{};             // as cos_cache
  TensorView mask{};                  // [B, past + S] int64, qsa only; absent: all visible
  TensorView past_key{};              // [B, past, H], or [B, capacity, H] with past_sequence_length
  TensorView gate{};                  // [B, S, 2 * H], csa only
  TensorView position_bias{};         // [r, 2 * H], csa only
  TensorView head_weights{};          // [B, S, N], csa only
  TensorView position_ids{};          // [B, S] int64, csa only
  TensorView past_sequence_length{};  // [1] int32, host; optional: rows of past_key that count
  TensorView past_proj_buffer{};      // [2, B, less than 2 * r, 2 * H]: keys, gates; csa only

  std::string_view policy_mode{};            // qsa or csa
  int64_t compress_ratio = 0;                // r > 0
  std::optional<int64_t> token_budget{};     // qsa only, > 0, a multiple of r
  std::optional<int64_t> index_topk{};       // csa only, > 0
  float epsilon = 1e-6f;                     // >= 0
  std::optional<float> scale{};              // 1 / sqrt(H)
  std::optional<float> head_weight_scale{};  // csa only, 1 / sqrt(N)
};

struct SparseAttentionIndexerShapes {
  OutputSpec selected_indices{};
  OutputSpec present_key{};
  OutputSpec present_proj_buffer{};
};

// Checks inputs and attributes; outputs are not looked at.
SparseAttentionIndexerShapes sparse_attention_indexer_shapes(const SparseAttentionIndexerArgs& args);
size_t sparse_attention_indexer_workspace_bytes(const SparseAttentionIndexerArgs& args, int num_threads);

// Variants: "cpu" (the default) and "ref" are one path.
void sparse_attention_indexer(const SparseAttentionIndexerArgs& args, const OpContext& context);

}  // namespace shoal
