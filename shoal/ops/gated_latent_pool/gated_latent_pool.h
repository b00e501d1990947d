// Gated pooling of consecutive tokens into latent rows, with a rolling state: what compresses a sparse-attention cache.
//
// Sizes: d = head_dim, rd = rope_head_dim, m = window_multiplier, span = m * ratio, F = m * d, S tokens a sequence.
// Row j of a sequence covers the tokens p0 ... p0 + ratio - 1, p0 = (first_slot + j) * ratio:
//
//   m = 1   its own tokens, channels [0, d)
//   m = 2   the ratio tokens before them, channels [0, d), then its own, channels [d, 2d)
//   row     = sum over these tokens of softmax(score + ape[token % ratio]) * kv       per channel, rounded to T
//           then RMSNorm with norm_weight; the last rd channels rotated in pairs at p0, at most max_seq_len - 1
//           then, if wanted: the first d - rd channels to FP8 and back (blocks of 64); the whole row times Hadamard /
//           sqrt(d), rounded to T, to FP4 and back (blocks of 32, ties toward zero)
//
// Scales of the simulated grids are powers of two, 2^ceil(log2(max(amax / limit, floor))) with limit 448 and 6, floor
// 1e-30 and 1e-38; 1 for a block of zeros. Tokens before the sequence or not there yet have the logit -1e30 and are not
// read. A row without any token repeats the last token there is (zeros if there is none): finite, to be ignored; such
// rows are those above last_slot.
//
// Types     T, the type of kv: f32, f16 or bf16; states, ape, norm_weight and rotary tables f32; lengths and slots i64
// Layout    any strides in the inputs; outputs contiguous
// Numerics  f32, one rounding where "rounded to T" stands and one at the store. A row's bits depend on nothing but its
//           tokens: whole and chunked calls agree, in any batch, on any number of threads
// Malformed a past length outside [0, 2^62): the sequence's rows are zero, its slots 0 and -1; its state rolls on
// Aliasing  a present state may be the memory of its past state (the same view); other overlaps are not allowed
// Errors    kInvalidArgument names the input or attribute; nothing is written then
// Workspace gated_latent_pool_workspace_bytes(args, num_threads)
// Source    ONNX Runtime com.microsoft::GatedLatentPool
#pragma once

#include <cstdint>

#include "shoal/ops/context.h"
#include "shoal/ops/output_spec.h"
#include "shoal/tensor/tensor.h"

namespace shoal {

struct GatedLatentPoolArgs {
  TensorView rows{};                 // [B, J, d] T, J = ceil(S / ratio) + 1
  TensorView first_slot{};           // [B, 1] i64: past / ratio, the row that rows[:, 0] is
  TensorView last_slot{};            // [B, 1] i64: (past + S - 1) / ratio, rounded down
  TensorView row_count{};            // [] i64: J
  TensorView present_state_kv{};     // [B, span, F] f32: the last span rows of the past state and kv
  TensorView present_state_score{};  // [B, span, F] f32
  TensorView kv{};                   // [B, S, F] T; without score [B, S, 2F], kv then score in every row
  TensorView score{};                // [B, S, F] T, optional
  TensorView past_state_kv{};        // [B, span, F] f32: the tokens past - span ... past - 1
  TensorView past_state_score{};     // [B, span, F] f32
  TensorView ape{};                  // [ratio, F] f32
  TensorView norm_weight{};          // [d] f32
  TensorView cos{};                  // [max_seq_len, rd] f32, every angle twice; not looked at if rd is 0
  TensorView sin{};                  // [max_seq_len, rd] f32
  TensorView past_lens{};            // [B] i64

  int64_t ratio = 4;              // at least 1
  int64_t window_multiplier = 1;  // 1 or 2
  int64_t head_dim = 0;
  int64_t rope_head_dim = 0;  // even, 0 to head_dim
  int64_t max_seq_len = 0;
  float epsilon = 1e-6f;              // finite, not negative
  bool simulate_fp8 = false;          // head_dim - rope_head_dim must be a multiple of 64
  bool simulate_rotated_fp4 = false;  // head_dim must be a power of two, at least 32
};

struct GatedLatentPoolShapes {
  OutputSpec rows{};
  OutputSpec first_slot{};
  OutputSpec last_slot{};
  OutputSpec row_count{};
  OutputSpec present_state_kv{};
  OutputSpec present_state_score{};
};

// Checks inputs and attributes; outputs are not looked at.
GatedLatentPoolShapes gated_latent_pool_shapes(const GatedLatentPoolArgs& args);
size_t gated_latent_pool_workspace_bytes(const GatedLatentPoolArgs& args, int num_threads);

// One variant, "cpu".
void gated_latent_pool(const GatedLatentPoolArgs& args, const OpContext& context);

}  // namespace shoal
