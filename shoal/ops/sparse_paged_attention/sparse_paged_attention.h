// Attention over selected positions of a paged KV cache, a local window, and selected rows of a second cache.
//
// The step's keys and values are appended first, exactly as paged_attention does (unpack, QK-norm, rotary, quantise,
// write). Then token t of sequence b, at position pos = past[b] + t - cu[b] of len = past[b] + q_len(b), attends to
//
//   local     with attention_mode local_plus_selected: positions max(0, pos - local_window_size + 1) (0 if that is not
//             positive) to pos (len - 1 if not causal) of the main cache
//   selected  the first selected_counts[t] (clamped to 0 ... M) entries of selected_indices[t]: positions of the main
//             cache, or rows of the auxiliary one with selected_kv_source auxiliary
//
// in that order, in one softmax:
//
//   x      = scale * q . K      or      softcap * tanh(scale * q . K / softcap)
//   output = sum of exp(x) V / (exp(sink) + sum of exp(x)); without a valid candidate 0, also with a sink
//
// Who is valid: a position p of the main cache if 0 <= p < len, p <= pos when causal, and its page is mapped; a
// selected one in the local window counts once, as local; entries of selected_indices that are equal each carry weight.
// A row p of the auxiliary cache if 0 <= p < min(auxiliary_lengths[b], capacity), whatever pos and len are.
//
// What is read for a position p of the main cache, whose page must be mapped in every case:
//
//   p < past[b]                       its row of the cache
//   of this step, written             the step's own K (normed and turned) and V; as its slot holds them, if the cache
//                                     is int8 or narrower than T
//   of this step, slot negative       its row of the cache: K and V of this step are not used
//   of this step, slot past the pool  nothing: the position is not valid
//
// With kv_cache_layout LATENT there is one KV head and no V: it is the first Hv channels of the K row.
//
// Shapes    N query heads, G KV heads (query head h reads KV head h / (N / G)), H head_dim (a multiple of 8),
//           Hv v_head_size (H, less only in LATENT),
//           S page_size (a power of two, at least 16), P pages, C columns of the page table, M selected entries,
//           A rows of the auxiliary cache, B sequences: see each member below
// Types     T, the type of query: f16, bf16; on the CPU also f32. Cache: T, int8, f32 under any T, f16 and bf16 under f32;
//           K and V alike
// Layout    caches contiguous; rows of output may be strided; every other tensor any strides
// Numerics  scores, softmax and sums in f32, one rounding to T. Cached bytes are those of paged_attention. A row's
//           bits depend on its query and its valid candidates in their order only: not on neighbours, chunks,
//           pages, invalid entries or the number of threads
// Malformed a sequence with a negative past or with offsets outside 0 <= start <= end <= num_tokens writes nothing
//           and outputs zeros, as do rows of no sequence. Indices, counts, lengths, page ids and slots may hold
//           anything
// Errors    kInvalidArgument names the input or attribute and what was expected; nothing is written then
// Workspace sparse_paged_attention_workspace_bytes(args, num_threads)
// Source    ONNX Runtime com.microsoft::SparsePagedAttention
#pragma once

#include <cstdint>
#include <string_view>

#include "shoal/ops/context.h"
#include "shoal/ops/output_spec.h"
#include "shoal/tensor/tensor.h"

namespace shoal {

// Member names are the schema's, so that messages and the Python function match it.
struct SparsePagedAttentionArgs {
  TensorView output{};                      // [num_tokens, N * Hv], T
  TensorView key_cache_out{};               // optional: must be key_cache itself
  TensorView value_cache_out{};             // optional: must be value_cache itself
  TensorView query{};                       // [num_tokens, N * H], or packed Q, K, V [num_tokens, (N + 2 G) * H]
  TensorView key{};                         // [num_tokens, G * H], absent if packed
  TensorView value{};                       // [num_tokens, G * H], absent if packed or LATENT
  TensorView key_cache{};                   // [P, S, G, H], changed in place
  TensorView value_cache{};                 // as key_cache; absent in LATENT
  TensorView cumulative_sequence_length{};  // [B + 1] i32, non-decreasing, first 0, last num_tokens
  TensorView past_seqlens{};                // [B] i32, tokens already in the cache
  TensorView block_table{};                 // [B, C] i32, page of positions [i S, (i + 1) S); -1: unmapped
  TensorView slot_mapping{};                // [num_tokens] i32, flat slot to write; negative: do not write; optional
  TensorView selected_indices{};            // [num_tokens, M] i32, or [num_tokens, G, M]: of each KV head
  TensorView selected_counts{};             // [num_tokens] i32, or [num_tokens, G]
  TensorView auxiliary_key{};               // [B, A, 1 or G, H] T, with selected_kv_source auxiliary only
  TensorView auxiliary_value{};             // as auxiliary_key; absent with auxiliary_kv_shared
  TensorView auxiliary_lengths{};           // [B] i32, with selected_kv_source auxiliary only
  TensorView cos_cache{};                   // [max_pos, rotary_dim / 2] T, both or neither
  TensorView sin_cache{};                   // [max_pos, rotary_dim / 2] T
  TensorView head_sink{};                   // [N] T, one extra logit per head; optional
  TensorView q_norm_weight{};               // [H] T, both or neither
  TensorView k_norm_weight{};               // [H] T
  TensorView k_scale{};                     // f32, [1] (PER_TENSOR) or G * H elements (PER_CHANNEL), with an int8 cache
  TensorView v_scale{};                     // the same for V
  TensorView attention_metadata{};          // [5] i32, not negative: bounds; never changes a result; optional

  int64_t num_heads = 0;
  int64_t kv_num_heads = 0;
  float scale = 0.0f;              // 0: 1 / sqrt(H)
  float softcap = 0.0f;            // 0: off
  int64_t local_window_size = -1;  // counts the current token; <= 0: from position 0
  bool is_causal = true;
  std::string_view attention_mode = "selected_only";  // or local_plus_selected
  std::string_view selected_kv_source = "main";       // or auxiliary
  std::string_view auxiliary_cache_layout = "contiguous";
  bool auxiliary_kv_shared = false;  // auxiliary_key is also V
  bool do_rotary = false;
  bool rotary_interleaved = false;
  int64_t rotary_offset = 0;  // first rotated channel, a multiple of 8
  float qk_norm_epsilon = 1e-6f;
  // What ONNX Runtime's operator refuses and models need: LATENT, a selection for each KV head, f16 and bf16 caches under
  // f32.
  bool beyond_schema = false;
  std::string_view k_quant_type = "NONE";  // NONE, PER_TENSOR, PER_CHANNEL
  std::string_view v_quant_type = "NONE";
  std::string_view kv_cache_layout = "SEPARATE";  // or LATENT, as in paged_attention
  int64_t v_head_size = 0;                        // 0: H
};

struct SparsePagedAttentionShapes {
  OutputSpec output{};
  OutputSpec key_cache_out{};
  OutputSpec value_cache_out{};
};

// Checks inputs and attributes; outputs are not looked at.
SparsePagedAttentionShapes sparse_paged_attention_shapes(const SparsePagedAttentionArgs& args);
size_t sparse_paged_attention_workspace_bytes(const SparsePagedAttentionArgs& args, int num_threads);

// One variant, "cpu".
void sparse_paged_attention(const SparsePagedAttentionArgs& args, const OpContext& context);

}  // namespace shoal
