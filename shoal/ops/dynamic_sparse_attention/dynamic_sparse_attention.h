// Attention over selected positions of a contiguous KV cache, or over a local window and selected rows of a second one.
//
// The batch is dense: B sequences of S new tokens each. Sequence b has total(b) = seqlens_k[b] + 1 tokens with the new
// ones, which stand at positions total(b) - S and on. Order of work: unpack, QK-norm, rotary, write K and V to the
// cache (int8: divided by their scales, rounded half to even, saturated), attend reading the cache only, one rounding.
//
//   x      = scale * q . K
//   output = sum of exp(x) V / (exp(sink) + sum of exp(x)); without a valid entry 0, also with a sink
//
// over the entries of a token at position pos, in this order:
//
//   selected_only, main             the first selected_counts (clamped to 0 ... M) entries of the token's row of
//                                   selected_indices, those that are positions in 0 ... pos
//   local_plus_selected, auxiliary  positions max(0, pos - local_window_size + 1) to pos of the main cache, then the
//                                   selected entries that are rows in 0 ... L - 1 of the auxiliary cache
//
// Other combinations of attention_mode and selected_kv_source are errors. Entries that are equal each carry weight.
//
// Caches: with room for total_sequence_length, past_key and past_value are changed in place and present_key and
// present_value must be they themselves. Otherwise present_key and present_value are new arrays of that capacity: what
// past_key and past_value hold, then zeros, then the step's rows.
//
// Rotary positions are total(b) - S + s, or position_ids; outside the tables a head is not turned.
//
// Shapes    N query heads, G KV heads (query head h reads KV head h / (N / G)), H head_dim, C capacity of the cache,
//           L rows of the auxiliary cache, M selected entries: see each member below
// Types     query and key: f32, f16 or bf16, the same (norms and rotary round to it); value: any of these, T its type
//           (packed: that of query), or bf16 with output_bf16, which needs f16 query, key and value. Inputs of type T
//           may also have query's. Cache: query's type, f16 or int8; K and V alike
// Layout    caches contiguous; rows of output may be strided; every other tensor any strides
// Numerics  scores, softmax and sums in f32, one rounding to T. A row's bits depend on its query and its valid entries
//           in their order only
// Malformed a sequence with total(b) outside S ... C reads nothing of the main cache and writes only rows that land
// contents  inside it; auxiliary entries are read. Indices and counts may hold anything
// Status    validation_status, never an error: the first that holds of
//             10  a scale that is not positive and finite
//              9  committed_length[b] + S != total(b), or total(b) does not fit, for some b
//           and then, of the first row (b, s) that has one,
//              7  total(b) outside S ... total_sequence_length or above C
//              8  a rotary position outside the tables
//              1  a count outside 0 ... M
//           and of its first such entry
//              2  not -1 after the count     3  negative     4  beyond its source     6  after pos     5  seen before
// Errors    kInvalidArgument names the input or attribute and what was expected; nothing is written then
// Workspace dynamic_sparse_attention_workspace_bytes(args, num_threads)
// Source    ONNX Runtime com.microsoft::DynamicSparseAttention
#pragma once

#include <cstdint>
#include <string_view>

#include "shoal/ops/context.h"
#include "shoal/ops/output_spec.h"
#include "shoal/tensor/tensor.h"

namespace shoal {

// Member names are the schema's, so that messages and the Python function match it.
struct DynamicSparseAttentionArgs {
  TensorView output{};                 // [B, S, N * H], T
  TensorView present_key{};            // [B, G, C, H]: past_key itself, or new
  TensorView present_value{};          // [B, G, C, H]
  TensorView validation_status{};      // [1] i32, optional
  TensorView query{};                  // [B, S, N * H], or packed Q, K, V [B, S, (N + 2 G) * H]
  TensorView key{};                    // [B, S, G * H], absent if packed
  TensorView value{};                  // [B, S, G * H], absent if packed
  TensorView past_key{};               // [B, G, C', H], both or neither; changed in place if C' has room
  TensorView past_value{};             // [B, G, C', H]
  TensorView auxiliary_key{};          // [B, G, L, H] T, with selected_kv_source auxiliary only
  TensorView auxiliary_value{};        // [B, G, L, H] T; may be absent with auxiliary_kv_shared: the key then
  TensorView selected_indices{};       // [B * S, M] i32
  TensorView selected_counts{};        // [B * S] i32
  TensorView seqlens_k{};              // [B] i32, total length minus one
  TensorView total_sequence_length{};  // one i32 on the host: the largest total length
  TensorView cos_cache{};              // [max_pos, rotary_dim / 2] T, both or neither
  TensorView sin_cache{};              // [max_pos, rotary_dim / 2] T
  TensorView position_ids{};           // [B, S] i64, optional
  TensorView q_norm_weight{};          // [H] T, both or neither
  TensorView k_norm_weight{};          // [H] T
  TensorView head_sink{};              // [N] T, one extra logit per head; optional
  TensorView committed_length{};       // [1] or [B] i32, optional: tokens before this step, for validation_status only
  TensorView key_scale{};              // G * H elements f32, with an int8 cache
  TensorView value_scale{};            // the same for V

  int64_t num_heads = 0;
  int64_t kv_num_heads = 0;
  float scale = 0.0f;                                 // 0: 1 / sqrt(H)
  int64_t is_causal = 1;                              // nothing else
  std::string_view attention_mode = "selected_only";  // or local_plus_selected
  std::string_view selected_kv_source = "main";       // or auxiliary
  int64_t local_window_size = -1;                     // counts the current token; positive with local_plus_selected
  bool auxiliary_kv_shared = false;
  bool smooth_softmax = false;  // a sink of 0 where head_sink is absent
  bool output_bf16 = false;
  bool do_rotary = false;
  bool rotary_interleaved = false;
  int64_t rotary_offset = 0;  // first rotated channel, a multiple of 8
  float qk_norm_epsilon = 1e-6f;
};

struct DynamicSparseAttentionShapes {
  OutputSpec output{};
  OutputSpec present_key{};
  OutputSpec present_value{};
  OutputSpec validation_status{};
};

// Checks inputs and attributes; outputs are not looked at.
DynamicSparseAttentionShapes dynamic_sparse_attention_shapes(const DynamicSparseAttentionArgs& args);
size_t dynamic_sparse_attention_workspace_bytes(const DynamicSparseAttentionArgs& args, int num_threads);

// One variant, "cpu".
void dynamic_sparse_attention(const DynamicSparseAttentionArgs& args, const OpContext& context);

}  // namespace shoal
