// Selects, for every token of a packed batch, what sparse attention may read of the token's request, and keeps the keys
// that make the choice.
//
// policy_mode "qsa", tokens in blocks of r = compress_ratio: block e is represented by the mean of its r keys, RMSNorm
// times key_norm_weight, rotary at position e * r. A token at position p sees n = (p + 1) / r blocks; the best
// min(token_budget / r, n) are chosen and their tokens emitted, r for each, then the tokens n * r ... p.
//
//   score[e] = scale * sum over heads h of max(0, q[h] . key_state[e])         position p = past length + own offset
//
// policy_mode "csa", entries of r tokens that overlap: channel c of entry e is a mean, weighted by a softmax over
// gate + position_bias, of the second half of the channels of window e and the first half of window e - 1 (if there is
// one), then as above. A token with position_ids p sees (p + 1) / r entries; the best index_topk are emitted.
//
//   score[e] = scale * head_weight_scale * sum over h of head_weights[h] * max(0, q[h] . key_state[e])
//
// with q the query after RMSNorm, times query_norm_weight, and rotary at p, not rounded; max(0, NaN) is 0. The order is
// that of shoal/ops/top_indices.h: descending scores, of equal ones the lower index, NaN last.
//
// State     key_state: finished keys. kv_buffer (and gate_buffer): raw projections of tokens that still wait: of less
//           than r tokens (qsa), or of the last whole window, if any, and less than r tokens (csa). state_lengths: how
//           many there are of each. What lies behind the lengths is carried over and means nothing
// Requests  Request b owns tokens [cu[b], cu[b + 1]). One is rejected as a whole if cu[0] is not 0 or cu[B] not T, its
//           range is not 0 <= begin <= end <= T, its past length is negative, its state lengths are outside
//           [0, state_capacity] and [0, r) (csa: [0, 2 r)), for qsa differ from past / r and past % r or lead to
//           positions beyond int32 (status 1), or if its new entries do not fit (status 2): its state stays, its
//           lengths are clamped into range, its tokens select nothing. So do tokens of no request
// Capture   state_update[b, i] is what token i of request b did, for the first clamp(capture_count[b], 0, its number of
//           tokens) of them: the finished key rounded to T if it completed a block, else its raw key; zeros elsewhere
// Sharing   With max_output_entries > 0 the selection has that many columns, and indexshare_mode says where it is from.
//           0, refresh: from the above; merged_* have no rows. 1, reuse: query (and head_weights) have no rows; row b
//           of merged_* is handed on for request b. The state is held (key, gate, position_ids have no rows), or
//           advanced by one token a request (B rows). A request whose range is not [b, b + 1), or whose update is
//           rejected, selects nothing and has indexshare_status 1 unless it is another non-zero one
// Types     T: f32, f16 or bf16, one for all floats; past_key_state may be f32 with T bf16. int32 metadata
// Layout    any strides in the inputs; outputs contiguous. present_x may be the memory of past_x, except the buffers of
//           csa; selected_indices and selected_counts, indexshare_status may be that of merged_*
// Numerics  f32, unfused, independent of the rest of the batch; one rounding where a key is stored
// Errors    kInvalidArgument names the input or attribute; nothing is written then
// Workspace packed_sparse_attention_indexer_workspace_bytes(args, num_threads)
// Source    ONNX Runtime com.microsoft::PackedSparseAttentionIndexer
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "shoal/ops/context.h"
#include "shoal/ops/output_spec.h"
#include "shoal/tensor/tensor.h"

namespace shoal {

struct PackedSparseAttentionIndexerArgs {
  // T tokens, B requests, N heads of H channels; M columns: token_budget + r - 1 (qsa), index_topk (csa), or
  // max_output_entries
  TensorView selected_indices{};       // [T, M] int32 (with reuse: [B, M])
  TensorView selected_counts{};        // [T] int32 (with reuse: [B])
  TensorView present_key_state{};      // as past_key_state
  TensorView present_kv_buffer{};      // as past_kv_buffer
  TensorView present_gate_buffer{};    // as past_gate_buffer; csa only
  TensorView present_state_lengths{};  // as past_state_lengths
  TensorView state_update{};           // [B, state_update_capacity, H]; optional, with a capacity only
  TensorView indexshare_status{};      // as selected_counts; with index sharing only
  TensorView state_status{};           // [B] int32; optional

  TensorView query{};                        // [T, N * H]; qsa without key: [T, (N + 1) * H], the key last
  TensorView key{};                          // [T, H] (qsa), [T, 2 * H] (csa)
  TensorView query_norm_weight{};            // [H]
  TensorView key_norm_weight{};              // [H]
  TensorView cos_cache{};                    // [P, R] or [B, P, R]; qsa: R even, <= H; csa: 2 * R <= H
  TensorView sin_cache{};                    // as cos_cache
  TensorView cumulative_sequence_lengths{};  // [B + 1] int32
  TensorView past_sequence_lengths{};        // [B] int32
  TensorView gate{};                         // [T, 2 * H], csa only
  TensorView position_bias{};                // [r, 2 * H], csa only
  TensorView head_weights{};                 // [T, N], csa only
  TensorView position_ids{};                 // [T] int64, csa only
  TensorView past_key_state{};               // [B, state_capacity, H]
  TensorView past_kv_buffer{};               // [B, 2 * r - 1, H] (qsa), [B, 2 * r - 1, 2 * H] (csa)
  TensorView past_gate_buffer{};             // as past_kv_buffer, csa only
  TensorView past_state_lengths{};           // [B, 2] int32: entries, waiting tokens
  TensorView state_update_capture_count{};   // [B] int32, qsa only; required with a capacity
  TensorView state_update_active{};          // [1] int32, host; qsa only; 0: nothing is captured
  TensorView indexshare_mode{};              // [1] int32, host
  TensorView merged_indices{};               // [B, M] int32 (refresh: [0, M])
  TensorView merged_counts{};                // [B] int32
  TensorView merged_status{};                // [B] int32

  std::string_view policy_mode{};                        // qsa or csa
  int64_t compress_ratio = 0;                            // r > 0
  int64_t state_capacity = 0;                            // > 0
  std::optional<int64_t> token_budget{};                 // qsa only, > 0, a multiple of r
  std::optional<int64_t> index_topk{};                   // csa only, > 0
  float epsilon = 1e-6f;                                 // >= 0
  std::optional<float> scale{};                          // 1 / sqrt(H)
  std::optional<float> head_weight_scale{};              // csa only, 1 / sqrt(N)
  int64_t state_update_capacity = 0;                     // qsa only, 0 to 8
  int64_t max_output_entries = 0;                        // > 0: index sharing
  std::string_view indexshare_state_policy = "default";  // qsa: hold; csa: advance. Or hold, advance (csa only)
};

struct PackedSparseAttentionIndexerShapes {
  OutputSpec selected_indices{};
  OutputSpec selected_counts{};
  OutputSpec present_key_state{};
  OutputSpec present_kv_buffer{};
  OutputSpec present_gate_buffer{};
  OutputSpec present_state_lengths{};
  OutputSpec state_update{};
  OutputSpec indexshare_status{};
  OutputSpec state_status{};
};

// Checks inputs and attributes; outputs are not looked at.
PackedSparseAttentionIndexerShapes packed_sparse_attention_indexer_shapes(const PackedSparseAttentionIndexerArgs& args);
size_t packed_sparse_attention_indexer_workspace_bytes(const PackedSparseAttentionIndexerArgs& args, int num_threads);

// Variants: "cpu" (the default) and "ref" are one path.
void packed_sparse_attention_indexer(const PackedSparseAttentionIndexerArgs& args, const OpContext& context);

}  // namespace shoal
