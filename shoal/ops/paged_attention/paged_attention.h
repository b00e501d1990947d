// Attention over a paged KV cache: appends this step's keys and values, then attends from every token of the step.
//
// A step is ragged: sequence b has q_len(b) = cu[b+1] - cu[b] tokens (0 is legal) at positions past[b] ... Prefill
// chunk, decode and verification of drafted tokens are the same call with other lengths. Order of work: unpack,
// QK-norm, rotary, quantise and write K and V to the cache, attend reading the cache only, sink, one rounding to T.
//
// Shapes    N query heads, Nk KV heads, H head_dim, S page_size, P pages, M columns of the page table, B sequences:
//           see each member below. T is the type of query.
// Types     T: f16, bf16; on the CPU also f32. Cache: T, and on the CPU also f32, f16 or bf16 under any T; int8;
// f8e4m3;
//           int4 packed in u8. K and V caches may differ.
// Numerics  scores, softmax and sums in f32. A row's bits depend on its own query, its admitted keys and their
// positions only:
//           not on its neighbours, on the chunk it came in, on the order of pages or on the number of threads.
// Errors    kInvalidArgument names the input or attribute and what was expected; nothing is written then.
// Workspace paged_attention_workspace_bytes(args)
// Source    ONNX Runtime com.microsoft::PagedAttention; full contract in docs/decisions.md where it was silent
#pragma once

#include <cstdint>
#include <string_view>

#include "shoal/ops/context.h"
#include "shoal/tensor/tensor.h"

namespace shoal {

// Member names are the schema's, so that messages and the Python function match it.
struct PagedAttentionArgs {
  TensorView output;                      // [num_tokens, N * Hv], T
  TensorView query;                       // [num_tokens, N * H], or packed [num_tokens, (N + 2 Nk) * H]
  TensorView key;                         // [num_tokens, Nk * H], absent if packed
  TensorView value;                       // [num_tokens, Nk * H], absent if packed or LATENT
  TensorView key_cache;                   // [P, S, Nk, H], changed in place; int4: [P, S, Nk, ceil(H / 2)] u8
  TensorView value_cache;                 // as key_cache; absent in LATENT
  TensorView cumulative_sequence_length;  // [B + 1] i32, non-decreasing, first 0, last num_tokens
  TensorView past_seqlens;                // [B] i32, tokens already in the cache
  TensorView block_table;                 // [B, M] i32, page of positions [i S, (i + 1) S); -1: unmapped
  TensorView cos_cache;                   // [max_pos, rotary_dim / 2] T, both or neither
  TensorView sin_cache;                   // [max_pos, rotary_dim / 2] T
  TensorView slot_mapping;                // [num_tokens] i32, flat slot to write; negative: do not write; optional
  TensorView head_sink;                   // [N] T, one extra logit per head; optional
  TensorView q_norm_weight;               // [H] T, both or neither
  TensorView k_norm_weight;               // [H] T
  TensorView k_scale;                     // [1] or Nk * H elements f32, with a quantised cache
  TensorView v_scale;                     // the same for V
  TensorView attention_metadata;          // [2] or [3] i32: bounds; never changes a result on the CPU; optional

  int64_t num_heads = 0;
  int64_t kv_num_heads = 0;
  float scale = 0.0f;              // 0: 1 / sqrt(H)
  float softcap = 0.0f;            // 0: off
  int64_t local_window_size = -1;  // counts the current token; <= 0: no window
  bool is_causal = true;
  bool do_rotary = false;
  bool rotary_interleaved = false;
  int64_t rotary_offset = 0;
  float qk_norm_epsilon = 1e-6f;
  std::string_view k_quant_type = "NONE";  // NONE, PER_TENSOR, PER_CHANNEL
  std::string_view v_quant_type = "NONE";
  std::string_view k_cache_dtype = "";  // "": the tensor's own; int4 is spelled out for u8
  std::string_view v_cache_dtype = "";
  std::string_view kv_cache_layout = "SEPARATE";  // or LATENT
  int64_t v_head_size = 0;                        // 0: H
};

size_t paged_attention_workspace_bytes(const PagedAttentionArgs& args, int num_threads);
void paged_attention(const PagedAttentionArgs& args, const OpContext& context);

}  // namespace shoal
