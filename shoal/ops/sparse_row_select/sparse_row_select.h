// Which compressed rows a query may attend to: the rows of this step enter a dense cache of scoring keys, every visible
// row is scored against every head, the best `topk` are kept.
//
//   score[c] = sum over heads h, ascending, of max(0, q[h] . cache[c]) * (weights[h] * scale)
//   visible  = (past + s + 1) / ratio rows for token s, at most the cache's capacity
//
// q is the query with the last rope_head_dim channels of each head rotated in pairs and, with simulate_rotated_fp4,
// each head times Hadamard / sqrt(d), rounded to T, to FP4 and back (the grid of GatedLatentPool; no norm). If no more
// than topk rows are visible they are all kept and nothing is scored; else the topk largest scores, of equal ones the
// lower rows. The kept rows stand in ascending order, each plus row_id_offset; the rest is -1.
//
// Order of scores: +0 above -0, NaN below everything; max(0, NaN) is 0.
// The cache: rows first_slot ... last_slot are rows[0], rows[1], ...; the others are those of past_cache. Only visible
// rows are read.
//
// Sizes     N = num_heads, d = head_dim, rd = rope_head_dim
// Types     T, the type of rows: f32, f16 or bf16; rotary values f32; slots, lengths and the selection i64
// Layout    any strides in query, rows, past_cache and the i64 inputs; cos, sin, weights and outputs contiguous
// Numerics  f32. A token's selection depends on nothing but its sequence: whole and chunked calls agree, in any batch,
//           on any number of threads
// Malformed slots without a source in `rows` or a place in the cache are left out; a past length counts as it stands,
//           fewer than 0 visible rows are none
// Aliasing  present_cache may be the memory of past_cache (the same view); other overlaps are not allowed
// Errors    kInvalidArgument names the input or attribute; nothing is written then
// Workspace sparse_row_select_workspace_bytes(args, num_threads)
// Source    ONNX Runtime com.microsoft::SparseRowSelect
#pragma once

#include <cstdint>

#include "shoal/ops/context.h"
#include "shoal/ops/output_spec.h"
#include "shoal/tensor/tensor.h"

namespace shoal {

struct SparseRowSelectArgs {
  TensorView selection{};      // [B, S, topk] i64
  TensorView present_cache{};  // [B, capacity, d] T
  TensorView query{};          // [B, S, N * d] T
  TensorView cos{};            // B * S * rd values in any shape, f32, every angle twice; not looked at if rd is 0
  TensorView sin{};            // as cos
  TensorView rows{};           // [B, J, d] T
  TensorView first_slot{};     // [B, 1] i64
  TensorView last_slot{};      // [B, 1] i64
  TensorView past_cache{};     // [B, capacity, d] T
  TensorView weights{};        // B * S * N values in any shape, T
  TensorView past_lens{};      // [B] i64

  int64_t num_heads = 0;
  int64_t head_dim = 0;
  int64_t rope_head_dim = 0;  // even, 0 to head_dim
  int64_t ratio = 1;          // at least 1
  int64_t topk = 0;           // 1 to the cache's capacity
  int64_t row_id_offset = 0;  // at least 1
  float scale = 1.0f;
  bool simulate_rotated_fp4 = true;  // head_dim must be a power of two, at least 32
};

struct SparseRowSelectShapes {
  OutputSpec selection{};
  OutputSpec present_cache{};
};

// Checks inputs and attributes; outputs are not looked at.
SparseRowSelectShapes sparse_row_select_shapes(const SparseRowSelectArgs& args);
size_t sparse_row_select_workspace_bytes(const SparseRowSelectArgs& args, int num_threads);

// One variant, "cpu".
void sparse_row_select(const SparseRowSelectArgs& args, const OpContext& context);

}  // namespace shoal
