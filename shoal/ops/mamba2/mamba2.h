// Mamba2Verify: a Mamba-2 mixer for the R consecutive tokens of one sequence: causal convolution, state-space
// recurrence, gated grouped RMS norm. The states after each token are kept, so that a caller that accepts only some of
// the tokens goes on from the snapshot of the last one.
//
//   di = heads * head_dim, channels = di + 2 * n_groups * d_state; a row of projection is [gate di, xBC channels,
//   dt heads]; xBC after the convolution is [x di, B n_groups * d_state, C n_groups * d_state]; head h is of group
//   h / (heads / n_groups)
//
//   xbc     = bf16(silu(conv_bias + sum over the 4 taps, ascending, of conv_weight * xBC))        tap 3: this token
//   dt      = max(softplus(dt + dt_bias), time_step_min)            softplus(r) = r above 20; NaN passes the maximum
//   S[n, p] = exp(A_negative * dt) * S[n, p] + (dt * x[p]) * B[n]
//   readout = D * x + sum over n of C[n] * S[n, p]
//   v       = readout * silu(gate)
//   Y       = bf16(v / sqrt(mean over the group's di / n_groups channels of v^2 + epsilon) * norm_weight)
//
// Layout    any strides in every tensor
// Numerics  f32, products and sums unfused in the convolution and the recurrence. The sum over n is taken in 4
//           partitions
//           (2 if R = slots = 1) of consecutive n, each ascending, added in order, then to D * x.
// Snapshots R <= slots: token t writes row t, the other rows are those of the incoming states. R > slots: the last
//           `slots` tokens write rows 0 to slots - 1.
// Malformed A state_row outside [0, slots) raises nothing: every value that would be written is NaN.
// Aliasing  conv_snapshots may be the memory of conv_state, ssm_snapshots that of ssm_state (the same view)
// Errors    kInvalidArgument names the input or attribute and what was expected; nothing is written then. kUnsupported:
//           a head_dim other than 64, a d_state other than 128
// Workspace mamba2_verify_workspace_bytes(args, num_threads); the variant `ref` allocates for itself
// Source    ONNX Runtime com.microsoft::Mamba2Verify; Dao and Gu 2024, "Transformers are SSMs"
#pragma once

#include <cstdint>

#include "shoal/ops/context.h"
#include "shoal/ops/output_spec.h"
#include "shoal/tensor/tensor.h"

namespace shoal {

struct Mamba2VerifyArgs {
  TensorView Y{};               // [R, di] bf16
  TensorView conv_snapshots{};  // as conv_state
  TensorView ssm_snapshots{};   // as ssm_state
  TensorView xbc{};             // [R, channels] bf16; optional: written if given
  TensorView readout{};         // [R, di] f32; optional: written if given
  TensorView projection{};      // [R, di + channels + heads] bf16, R >= 1
  TensorView conv_state{};      // [slots, channels, 3] bf16: the last inputs, oldest first; slots >= 1
  TensorView ssm_state{};       // [slots, heads, d_state, head_dim] f32
  TensorView conv_weight{};     // [channels, 4] or [channels, 1, 4] bf16
  TensorView conv_bias{};       // [channels] bf16
  TensorView dt_bias{};         // [heads] f32
  TensorView A_negative{};      // [heads] f32
  TensorView D{};               // [heads] f32
  TensorView norm_weight{};     // [di] f32
  TensorView state_row{};       // [1] or 0-d i32: the row of the incoming states to start from

  int64_t heads = 0;
  int64_t n_groups = 0;  // divides heads
  int64_t head_dim = 64;
  int64_t d_state = 128;
  float epsilon = 1e-5f;
  float time_step_min = 1e-3f;
};

struct Mamba2VerifyShapes {
  OutputSpec Y{};
  OutputSpec conv_snapshots{};
  OutputSpec ssm_snapshots{};
  OutputSpec xbc{};      // for debugging: only if wanted
  OutputSpec readout{};  // for debugging: only if wanted
};

// Checks inputs and attributes; outputs are not looked at.
Mamba2VerifyShapes mamba2_verify_shapes(const Mamba2VerifyArgs& args);
size_t mamba2_verify_workspace_bytes(const Mamba2VerifyArgs& args, int num_threads);

// Variants: "cpu" (the default), "ref".
void mamba2_verify(const Mamba2VerifyArgs& args, const OpContext& context);

}  // namespace shoal
