// Causal depthwise convolutions that carry their last inputs from call to call.
//
//   y[t, c] = activation(bias[c] + sum over j < K, ascending, of weight[c, 0, j] * x[t - (K - 1 - j) * dilation, c])
//
// Positions before the first token are read from the state, which holds the last inputs as they came (bits of T, never
// convolved values), oldest first. C channels, K taps, reach = (K - 1) * dilation; activation: none, silu or swish
// (x / (1 + exp(-x)), both names).
//
// Types     T, the type of input: f32, f16 or bf16; every other tensor has type T but for the int32 ones
// Layout    any strides, in every tensor; an axis that stands for several (trailing channel axes) must be evenly
//           strided
// Numerics  static taps: products and sums in f32, unfused, from the bias on; the activation in f32; one
//           rounding to T.
//           Dynamic taps: see VarlenCausalConvWithStateArgs. An element's bits depend on nothing but its own taps:
//           whole and chunked calls agree, in any batch, on any number of threads.
// Aliasing  an outgoing state may be the memory of the incoming one (the same view); other overlaps are not allowed
// Errors    kInvalidArgument names the input or attribute and what was expected; nothing is written then
// Source    ONNX Runtime com.microsoft::CausalConvWithState, com.microsoft::VarlenCausalConvWithState
#pragma once

#include <cstdint>
#include <string_view>

#include "shoal/ops/context.h"
#include "shoal/ops/output_spec.h"
#include "shoal/tensor/tensor.h"

namespace shoal {

// A batch of B sequences of equal length L (0 is legal: the state is copied).
//
// Extended attributes (state_update_capacity, state_channels_last, state_length, input_channel_offset, input_channels)
// need channels_last 1, an input of rank 3 and state_window 0.
struct CausalConvWithStateArgs {
  TensorView output{};         // as input; the last dimension is C
  TensorView present_state{};  // S = state_length or reach: [B, C, S], or [B, S, d1 ... dn] with channels_last;
                               // [W, ...] before that with state_window W
  TensorView state_update{};  // [B, state_update_capacity, C]: the first inputs, the rest zero. Exists iff the capacity
                              // is positive; may be absent then
  TensorView input{};         // [B, C, L], or [B, L, d1 ... dn] with channels_last, C = d1 * ... * dn
  TensorView weight{};        // [C, 1, K], oldest tap first
  TensorView bias{};          // [C], optional
  TensorView past_state{};    // as present_state, optional (zeros); with a window only slot W - 1 is read

  int64_t ndim = 1;  // 2 and 3 are kUnsupported
  int64_t dilation = 1;
  std::string_view activation = "none";
  int64_t channels_last = 0;
  // W > 0: slot j holds the state after token L - W + j, slots before the first token of the call are zero. In 0..8.
  int64_t state_window = 0;
  int64_t state_update_capacity = 0;  // in 0..8
  int64_t state_channels_last = -1;   // -1: as channels_last; 0: [B, C, S]; 1: [B, S, C]
  int64_t state_length = 0;           // 0: reach; otherwise at least reach, of which the convolution reads the end
  int64_t input_channel_offset = 0;   // first channel of the input that takes part
  int64_t input_channels = 0;         // how many take part, C; 0: all
};

struct CausalConvWithStateShapes {
  OutputSpec output{};
  OutputSpec present_state{};
  OutputSpec state_update{};  // not present when state_update_capacity is 0
};

// Checks inputs and attributes; outputs are not looked at.
CausalConvWithStateShapes causal_conv_with_state_shapes(const CausalConvWithStateArgs& args);

// Variants: "cpu" (the default), "ref".
void causal_conv_with_state(const CausalConvWithStateArgs& args, const OpContext& context);

// Packed sequences of any lengths (0 is legal: the state is copied). Sequence b has the tokens [cu[b], cu[b + 1]).
//
// Dynamic grouped two-tap mode, with kernel_delta and previous_mask (needs K = 2, dilation 1, no activation, no bias).
// For token t, channel c of group g = c / group_size, d = kernel_delta[t, :, g], x' the previous input or the state:
//
//   y = r(r(r(weight[c, 0, 1] + d[delta_offset]) * x)
//         + r(r(r(weight[c, 0, 0] + d[delta_offset + 1]) * x') * previous_mask[t]))        r rounds to T
//
// The mask is a number: it multiplies also at a sequence's first token, and 0 * inf is NaN.
//
// Malformed offsets never raise. Wrong end points: nothing is read or written. Otherwise sequences with a range outside
// 0 <= start <= end <= num_tokens are left out: their tokens, states and updates stay as they were; tokens in several
// ranges hold the result of one of them.
struct VarlenCausalConvWithStateArgs {
  TensorView output{};        // [num_tokens, C]
  TensorView final_state{};   // [B, C, reach]
  TensorView state_update{};  // [B, state_update_capacity, C]: the first capture_count inputs of a sequence,
                              // the rest zero. Exists iff the capacity is positive; may be absent then
  TensorView input{};         // [num_tokens, C]
  TensorView weight{};        // [C, 1, K], oldest tap first
  TensorView cumulative_sequence_length{};  // [B + 1] i32, B >= 1
  TensorView bias{};                        // [C], optional
  TensorView initial_state{};               // [B, C, reach]; a channel's state is at most 48 KiB
  TensorView capture_count{};  // [B] i32, clamped to 0..min(capacity, length); given iff the capacity is positive
  TensorView kernel_delta{};   // [num_tokens, projected_taps >= delta_offset + 2, C / group_size], both or neither
  TensorView previous_mask{};  // [num_tokens, 1]

  std::string_view activation = "none";
  int64_t dilation = 1;
  int64_t state_update_capacity = 0;  // in 0..8
  int64_t group_size = 1;             // channels per group; other than 1 only with kernel_delta
  int64_t delta_offset = 0;           // other than 0 only with kernel_delta
};

struct VarlenCausalConvWithStateShapes {
  OutputSpec output{};
  OutputSpec final_state{};
  OutputSpec state_update{};  // not present when state_update_capacity is 0
};

VarlenCausalConvWithStateShapes varlen_causal_conv_with_state_shapes(const VarlenCausalConvWithStateArgs& args);

// Variants: "cpu" (the default), "ref".
void varlen_causal_conv_with_state(const VarlenCausalConvWithStateArgs& args, const OpContext& context);

}  // namespace shoal
