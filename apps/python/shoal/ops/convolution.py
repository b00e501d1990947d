"""Causal depthwise convolutions that carry their last inputs from call to call."""

from __future__ import annotations

from typing import Any

from shoal.ops._call import call


def causal_conv_with_state(
    *,
    input: Any,
    weight: Any,
    bias: Any = None,
    past_state: Any = None,
    ndim: int = 1,
    dilation: int = 1,
    activation: str = "none",
    channels_last: int = 0,
    state_window: int = 0,
    state_update_capacity: int = 0,
    state_channels_last: int = -1,
    state_length: int = 0,
    input_channel_offset: int = 0,
    input_channels: int = 0,
    out: Any = None,
) -> tuple[Any, Any, Any]:
    """Causal depthwise convolution of B sequences of equal length L (0 is legal: the state is copied).

    Sizes: C channels, K taps, reach = (K - 1) * dilation, T float32, float16 or bfloat16, the type of all arrays.

    Args:
        input: [B, C, L], or with channels_last [B, L, d1, ..., dn], C = d1 * ... * dn. Any strides.
        weight: [C, 1, K], the oldest tap first.
        bias: [C].
        past_state: [B, C, S] (or [B, S, d1, ..., dn]), the last S inputs, oldest first; S = state_length or reach.
            None: zeros. With state_window W: [W, ...], of which slot W - 1 is read.
        ndim: only 1.
        activation: none, silu or swish.
        state_window: W > 0 keeps the states after the last W tokens. 0 to 8.
        state_update_capacity: 0 to 8: how many of the first inputs to return as `state_update`.
        state_channels_last: -1 as channels_last, 0 [B, C, S], 1 [B, S, C].
        state_length: 0 is reach, otherwise at least reach.
        input_channel_offset, input_channels: the slice of channels that takes part; 0 is all.
        out: (output, present_state, state_update), None for new arrays. present_state may be past_state itself.

    Returns:
        (output, present_state, state_update or None if the capacity is 0). `state_update` is [B, capacity, C].

    Raises:
        InvalidArgument: names the input or attribute; nothing has been written.
        Unsupported: ndim 2 and 3.

    Source: ONNX Runtime com.microsoft::CausalConvWithState.
    """
    return call("causal_conv_with_state", locals())


def varlen_causal_conv_with_state(
    *,
    input: Any,
    weight: Any,
    cumulative_sequence_length: Any,
    bias: Any = None,
    initial_state: Any,
    capture_count: Any = None,
    kernel_delta: Any = None,
    previous_mask: Any = None,
    activation: str = "none",
    dilation: int = 1,
    state_update_capacity: int = 0,
    group_size: int = 1,
    delta_offset: int = 0,
    out: Any = None,
) -> tuple[Any, Any, Any]:
    """Causal depthwise convolution of packed sequences of any lengths (0 is legal: the state is copied).

    Sizes: C channels, K taps, reach = (K - 1) * dilation, T float32, float16 or bfloat16, the type of all arrays.

    Args:
        input: [num_tokens, C]. Any strides.
        weight: [C, 1, K], the oldest tap first.
        cumulative_sequence_length: [B + 1] int32.
        bias: [C].
        initial_state: [B, C, reach], the inputs before each sequence, oldest first.
        capture_count: [B] int32, how many first inputs of a sequence to return; with state_update_capacity only.
        kernel_delta, previous_mask: [num_tokens, projected_taps, C / group_size] and [num_tokens, 1], both or neither:
            two taps that change from token to token, each step rounded to T (needs K = 2, dilation 1, no activation,
            no bias).
        activation: none, silu or swish.
        state_update_capacity: 0 to 8.
        group_size, delta_offset: channels that share a delta; which of the projected taps is the current one.
        out: (output, final_state, state_update), None for new arrays. final_state may be initial_state itself.

    Returns:
        (output [num_tokens, C], final_state [B, C, reach], state_update [B, capacity, C] or None).

    Raises:
        InvalidArgument: names the input or attribute; nothing has been written. Malformed offsets raise nothing.

    Source: ONNX Runtime com.microsoft::VarlenCausalConvWithState.
    """
    return call("varlen_causal_conv_with_state", locals())
