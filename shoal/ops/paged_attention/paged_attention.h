// Attention over a paged KV cache: appends this step's keys and values, then attends from every token of the step.
//
// A step is ragged: sequence b has q_len(b) = cu[b+1] - cu[b] tokens (0 is legal) at positions past[b], past[b] + 1,
// ... Prefill chunk, decode and verification of drafted tokens are the same call with other lengths. Order of work:
// unpack, QK-norm, rotary, quantise and write K and V to the cache, attend reading the cache only, sink, one rounding
// to T.
//
//   admitted(t, k) = 0 <= k <= pos(t) (k < past + q_len if not causal), k > pos(t) - window, page of k mapped
//   x(t, k)        = scale * q(t) . K(k)      or      softcap * tanh(scale * q(t) . K(k) / softcap)
//   output(t)      = sum over admitted k of exp(x) V(k) / (exp(sink) + sum over admitted k of exp(x)); none admitted: 0
//
// Shapes    N query heads, Nk KV heads (query head h reads KV head h / (N / Nk)), H head_dim (a multiple of 8), Hv
//           value
//           head_dim (H, less only in LATENT), S page_size (a power of two, at least 16), P pages, M columns of the
//           page table, B sequences: see each member below
// Types     T, the type of query: f16, bf16; on the CPU also f32. Cache: f32, f16 or bf16 under any T (rounded to
//           nearest even), int8, f8e4m3, or int4 packed in u8. K and V caches may differ.
//           int4: byte i of a head holds channel 2i in the low and 2i + 1 in the high nibble, each code + 8
// Layout    caches contiguous; query, key, value, tables and index tensors may be strided; rows of output may be
//           strided
// Numerics  scores, softmax and sums in f32. A row's bits depend on its own query, its admitted keys and their
//           positions
//           only: not on its neighbours, the chunk it came in, the order of pages or the number of threads.
//           Codes: v = s == 0 ? 0 : x / s in f32, clamped, rounded half to even. Bytes of other slots stay as they are.
// Malformed A sequence with a negative past or with offsets outside 0 <= start <= end <= num_tokens writes nothing and
// contents  outputs zeros, as do rows of no sequence. Page ids outside [0, P), slots outside [0, P S) and positions
//           from
//           M S on are not written and not read. Positions past the rotary tables use their last row.
// Errors    kInvalidArgument names the input or attribute and what was expected; nothing is written then
// Workspace paged_attention_workspace_bytes(args, num_threads); the variant `ref` allocates for itself
// Source    ONNX Runtime com.microsoft::PagedAttention
#pragma once

#include <cstdint>
#include <string_view>

#include "shoal/ops/context.h"
#include "shoal/tensor/tensor.h"

namespace shoal {

// Member names are the schema's, so that messages and the Python function match it.
struct PagedAttentionArgs {
  TensorView output;                      // [num_tokens, N * Hv], T
  TensorView query;                       // [num_tokens, N * H], or packed Q, K, V [num_tokens, (N + 2 Nk) * H]
  TensorView key;                         // [num_tokens, Nk * H], absent if packed
  TensorView value;                       // [num_tokens, Nk * H], absent if packed or LATENT
  TensorView key_cache;                   // [P, S, Nk, H], changed in place; int4: [P, S, Nk, H / 2] u8
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
  TensorView key_cache_out;               // optional: must be key_cache itself
  TensorView value_cache_out;             // optional, both or neither: must be value_cache itself

  int64_t num_heads = 0;
  int64_t kv_num_heads = 0;
  float scale = 0.0f;              // 0: 1 / sqrt(H)
  float softcap = 0.0f;            // 0: off
  int64_t local_window_size = -1;  // counts the current token; <= 0: no window
  bool is_causal = true;
  bool do_rotary = false;
  bool rotary_interleaved = false;
  int64_t rotary_offset = 0;  // first rotated channel, a multiple of 8
  float qk_norm_epsilon = 1e-6f;
  std::string_view k_quant_type = "NONE";  // NONE, PER_TENSOR, PER_CHANNEL
  std::string_view v_quant_type = "NONE";
  std::string_view k_cache_dtype = "";  // "": the tensor's own; int4 is spelled out for u8
  std::string_view v_cache_dtype = "";
  std::string_view kv_cache_layout = "SEPARATE";  // or LATENT: V is the first v_head_size channels of the K row
  int64_t v_head_size = 0;                        // 0: H
};

// Scratch bytes of a call with these shapes, types and attributes (contents are not read, memory may be absent). Never
// less for more tokens, sequences or pages, so that the largest step's figure serves every step.
size_t paged_attention_workspace_bytes(const PagedAttentionArgs& args, int num_threads);

// Variants: "cpu" (the default), "ref".
void paged_attention(const PagedAttentionArgs& args, const OpContext& context);

}  // namespace shoal
