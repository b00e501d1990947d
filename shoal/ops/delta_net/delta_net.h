// Linear attention with a recurrent state: GatedDeltaNet (packed tokens), LinearAttention (batches), their gates.
//
// Per state head, with S the state of head_size_qk rows and head_size_v columns, for each token in order:
//
//   S = exp(g) * S + k (beta * (v - (exp(g) S)^T k))^T          o = scale * S^T q
//
//   update_rule   linear: neither decay nor retrieval (S += k v^T); gated: decay only (S = exp(g) S + k v^T);
//                 delta: retrieval only (g = 0); gated_delta: both
//
// The decay g is one number for a head, or one for each key channel (a row of S).
//
// Types     T, the type of query: f32, f16 or bf16
// Layout    any strides in every tensor
// Numerics  state, sums and gates in f32, one rounding to T at the output; the update is exp(g) * S, then + k * delta,
//           each rounded to f32, so that replaying captured transitions gives the same bits. Sums run in one fixed
//           order: whole and chunked calls agree bit for bit (with an f32 state), in any batch, on any number of
//           threads.
// Aliasing  an outgoing state may be the memory of the incoming one (the same view); other overlaps are not allowed
// Errors    kInvalidArgument names the input or attribute and what was expected; nothing is written then
// Workspace <operator>_workspace_bytes(args, num_threads); the variant `ref` allocates for itself
// Source    ONNX Runtime com.microsoft::GatedDeltaNet, com.microsoft::LinearAttention,
//           com.microsoft::LinearAttentionGate; Yang et al. 2024, "Gated Delta Networks"
#pragma once

#include <cstdint>
#include <string_view>

#include "shoal/ops/context.h"
#include "shoal/ops/output_spec.h"
#include "shoal/tensor/tensor.h"

namespace shoal {

// Packed sequences. Hq = Hk query and key heads, Hv value heads (a multiple of Hq: value head h reads query and key
// head h / (Hv / Hq)), Dk = head_size_qk, Dv = head_size_v. The token axis may be spelled [batch, tokens] in every
// tensor that has it (without cu_seqlens); below it is written [T].
//
// Malformed cu_seqlens never raise: values are clamped to [0, T], an end before its start makes an empty sequence.
// Tokens of no sequence stay as they were, tokens of several hold the result of the last.
struct GatedDeltaNetArgs {
  TensorView output{};         // [T, Hv, Dv]
  TensorView final_state{};    // [B, Hv, Dv, Dk] f32; an empty sequence's is its initial state. May be absent
  TensorView state_update{};   // [B, C * (decay_width + Hk * Dk + Hv * Dv)] f32, C = state_update_capacity: for the
                               // first min(capture_count, C, length) tokens exp(g) [C, Hv] (or [C, Hv, Dk] with a decay
                               // per key), then k [C, Hk, Dk] (normalised), then delta [C, Hv, Dv]; the rest is zero.
                               // Exists iff C > 0; may be absent then
  TensorView query{};          // [T, Hq, Dk]; packed, without key and value: [T, 2 * Hq * Dk + Hv * Dv]
  TensorView key{};            // [T, Hq, Dk]
  TensorView value{};          // [T, Hv, Dv]
  TensorView cu_seqlens{};     // [B + 1] i32; absent: B equal sequences, B from the batch axis or else initial_state
  TensorView decay{};          // [T, Hv] or [T, Hv, Dk], f32 or T; given iff the rule uses it
  TensorView beta{};           // [T, Hv], the type of decay (alone: f32 or T); given iff the rule uses it
  TensorView initial_state{};  // [B, Hv, Dv, Dk] f32; absent: zeros (not when packed, or when nothing else tells B)
  TensorView a_log{};          // [Hv] f32, with dt_bias iff gate_activation is not none
  TensorView dt_bias{};        // [Hv] f32, with a decay per key also [Hv, Dk] or [Hv * Dk]
  TensorView capture_count{};  // [B] i32, clamped to 0..min(C, length); given iff C > 0
  TensorView state_update_active{};  // [1] or 0-d i32, on the host; 0: state_update is all zero. Optional

  std::string_view update_rule = "gated_delta";
  float scale = 0.0f;  // 0: 1 / sqrt(Dk)
  // none: g = decay; softplus (also "qwen"): g = -exp(a_log) * softplus(decay + dt_bias);
  // sigmoid (also "kda"): g = gate_lower_bound * sigmoid(exp(a_log) * (decay + dt_bias))
  std::string_view gate_activation = "none";
  std::string_view beta_activation = "none";  // or sigmoid
  int64_t qk_l2_norm = 0;                     // 1: q and k times rsqrt(sum of squares + 1e-12)
  int64_t chunk_size = 64;                    // a hint, > 0
  float gate_lower_bound = -5.0f;             // finite, < 0
  int64_t state_update_capacity = 0;          // in 0..8
};

struct GatedDeltaNetShapes {
  OutputSpec output{};
  OutputSpec final_state{};
  OutputSpec state_update{};  // not present when state_update_capacity is 0
};

// Checks inputs and attributes; outputs are not looked at.
GatedDeltaNetShapes gated_delta_net_shapes(const GatedDeltaNetArgs& args);
size_t gated_delta_net_workspace_bytes(const GatedDeltaNetArgs& args, int num_threads);

// Variants: "cpu" (the default), "ref".
void gated_delta_net(const GatedDeltaNetArgs& args, const OpContext& context);

// Batches of B sequences of T tokens (0 is legal: the state is copied). Hq = q_num_heads, Hkv = kv_num_heads; either is
// a multiple of the other. Query head h reads state h / (Hq / Hkv); with Hkv > Hq there is an output per state head h,
// read with query head h / (Hkv / Hq). The state is K-major, in a type of its own.
struct LinearAttentionArgs {
  TensorView output{};         // [B, T, max(Hq, Hkv) * Dv]
  TensorView present_state{};  // [B, Hkv, Dk, Dv], or [W, B, Hkv, Dk, Dv] with a window; the type of past_state, else T
  TensorView query{};          // [B, T, Hq * Dk]
  TensorView key{};            // [B, T, Hkv * Dk]
  TensorView value{};          // [B, T, Hkv * Dv]
  TensorView past_state{};     // as present_state, f32, f16 or bf16; optional (zeros); of a window slot W - 1 is read
  TensorView decay{};          // [B, T, Hkv] or [B, T, Hkv * Dk], T; required by gated and gated_delta, else ignored
  TensorView beta{};           // [B, T, Hkv] or [B, T, 1], T; required by delta and gated_delta, else ignored

  int64_t q_num_heads = 0;
  int64_t kv_num_heads = 0;
  std::string_view update_rule = "gated_delta";
  float scale = 0.0f;       // 0: 1 / sqrt(Dk)
  int64_t chunk_size = 64;  // a hint
  // W > 0: slot j holds the state after token T - W + j, slots before the first token of the call are zero. In 0..8.
  int64_t state_window = 0;
};

struct LinearAttentionShapes {
  OutputSpec output{};
  OutputSpec present_state{};
};

LinearAttentionShapes linear_attention_shapes(const LinearAttentionArgs& args);
size_t linear_attention_workspace_bytes(const LinearAttentionArgs& args, int num_threads);

// Variants: "cpu" (the default), "ref".
void linear_attention(const LinearAttentionArgs& args, const OpContext& context);

// Gates of linear attention, f32 inside, one rounding to T. No workspace.
//
//   decay = decay_scale * softplus(a + dt_bias)          beta = sigmoid(b)
struct LinearAttentionGateArgs {
  TensorView decay{};        // [B, T, H] T
  TensorView beta{};         // [B, T, H] T; exists iff b is given; may be absent then
  TensorView a{};            // [B, T, H] T
  TensorView dt_bias{};      // [H] f32
  TensorView decay_scale{};  // [H] f32
  TensorView b{};            // [B, T, H] T, optional
};

struct LinearAttentionGateShapes {
  OutputSpec decay{};
  OutputSpec beta{};  // not present without b
};

LinearAttentionGateShapes linear_attention_gate_shapes(const LinearAttentionGateArgs& args);
// Variants: "cpu" (the default), "ref".
void linear_attention_gate(const LinearAttentionGateArgs& args, const OpContext& context);

}  // namespace shoal
