// Entries of the convolutions: checks, one common problem, then the reference or the kernel over ranges of channels.
#include "shoal/ops/causal_conv/causal_conv.h"

#include <algorithm>

#include "shoal/base/checked.h"
#include "shoal/base/text.h"
#include "shoal/cpu/thread_pool.h"
#include "shoal/ops/causal_conv/causal_conv_problem.h"
#include "shoal/ops/variant.h"
#include "shoal/tensor/matcher.h"

namespace shoal {

SHOAL_DECLARE_FOR_EACH_ISA(void conv_channels(const conv::Problem& problem, int64_t b, int64_t begin, int64_t end))
namespace conv {
void conv_ref(const Problem& problem);
}

namespace {

constexpr std::string_view kConv = "causal_conv_with_state";
constexpr std::string_view kVarlen = "varlen_causal_conv_with_state";
constexpr int64_t kMaxSlots = 8;                       // of a window or a capture
constexpr int64_t kMaxStateBytes = int64_t{48} << 10;  // of one channel: what a CUDA block keeps in shared memory

constexpr int64_t kChannelGrain = 64;  // whole vectors and cache lines, whatever the instruction set
constexpr int64_t kWorkGrain = 16384;  // outputs and state values; fewer are not worth waking a thread for

void check_range(std::string_view op, std::string_view name, int64_t value, int64_t low, int64_t high) {
  require(value >= low && value <= high, op, ": ", name, " is ", value, ", expected ", low, " to ", high);
}

void check_common(std::string_view op, std::string_view activation, int64_t dilation, int64_t capacity) {
  require(activation == "none" || activation == "silu" || activation == "swish", op, ": activation is '",
          printable(activation), "', expected none, silu or swish");
  require(dilation >= 1, op, ": dilation is ", dilation, ", expected at least 1");
  check_range(op, "state_update_capacity", capacity, 0, kMaxSlots);
}

// Taps of the weight, whose shape is checked.
int64_t check_weight(std::string_view op, const TensorView& weight, Dim& channels, DType dtype, Device device) {
  Dim kernel_size{"kernel_size"};
  Matcher(op).tensor("weight", weight).shape({channels, 1, kernel_size}).type(dtype).device(device);
  require(kernel_size >= 1, op, ": weight has shape ", shape_text(weight.dims()), ", expected at least one tap");
  return kernel_size;
}

int64_t reach_of(std::string_view op, int64_t kernel_size, int64_t dilation) {
  const auto reach = checked_mul(kernel_size - 1, dilation);
  require(reach.has_value() && *reach <= INT32_MAX, op, ": dilation is ", dilation, ", too large for ", kernel_size,
          " taps");
  return *reach;
}

// Stride of the axes from `first_axis` on, taken as one.
int64_t stride_of_trailing(std::string_view op, std::string_view name, const TensorView& view, int first_axis) {
  int64_t stride = 1;
  int64_t expected = 0;  // of the next axis towards the front; 0: not known yet
  for (int axis = view.rank - 1; axis >= first_axis; --axis) {
    if (view.dim(axis) == 1) {
      continue;
    }
    if (expected == 0) {
      stride = view.stride(axis);
    } else {
      require(view.stride(axis) == expected, op, ": ", name, " must be evenly strided over its channel axes");
    }
    expected = view.stride(axis) * view.dim(axis);
  }
  return stride;
}

bool is_extended(const CausalConvWithStateArgs& a) {
  return a.state_update_capacity != 0 || a.state_channels_last != -1 || a.state_length != 0 ||
         a.input_channel_offset != 0 || a.input_channels != 0;
}

std::string_view extended_name(const CausalConvWithStateArgs& a) {
  return a.state_update_capacity != 0  ? "state_update_capacity"
         : a.state_channels_last != -1 ? "state_channels_last"
         : a.state_length != 0         ? "state_length"
         : a.input_channel_offset != 0 ? "input_channel_offset"
                                       : "input_channels";
}

void check_attributes(const CausalConvWithStateArgs& a) {
  check_common(kConv, a.activation, a.dilation, a.state_update_capacity);
  check_range(kConv, "ndim", a.ndim, 1, 3);
  if (a.ndim != 1) {
    fail(ErrorCode::kUnsupported, kConv, ": ndim is ", a.ndim, ", only 1 is supported");
  }
  check_range(kConv, "channels_last", a.channels_last, 0, 1);
  check_range(kConv, "state_window", a.state_window, 0, kMaxSlots);
  check_range(kConv, "state_channels_last", a.state_channels_last, -1, 1);
  for (const auto& [name, value] : {std::pair{"state_length", a.state_length},
                                    {"input_channel_offset", a.input_channel_offset},
                                    {"input_channels", a.input_channels}}) {
    require(value >= 0, kConv, ": ", name, " is ", value, ", expected at least 0");
  }
  if (is_extended(a)) {
    require(a.channels_last == 1, kConv, ": ", extended_name(a), " needs channels_last 1");
    require(a.state_window == 0, kConv, ": ", extended_name(a), " needs state_window 0");
  }
}

// Where the sizes of a call stand: batch, tokens, channels.
struct ConvSizes {
  int64_t batch = 0;
  int64_t num_tokens = 0;
  int64_t channels = 0;
  int64_t kernel_size = 0;
  int64_t state_length = 0;
  bool state_channels_last = false;
};

ConvSizes check_inputs(const CausalConvWithStateArgs& a, OutputSpec& present) {
  check_attributes(a);
  const Matcher match(kConv);
  match.tensor("input", a.input).types(kFloats);
  const DType dtype = a.input.dtype;
  const Device device = a.input.device;
  if (a.channels_last == 0 || is_extended(a)) {
    match.tensor("input", a.input).rank(3);
  } else {
    require(a.input.rank >= 3, kConv, ": input has ", a.input.rank, " dimensions, expected at least 3");
  }
  ConvSizes sizes;
  sizes.batch = a.input.dim(0);
  sizes.num_tokens = a.input.dim(a.channels_last == 1 ? 1 : 2);
  sizes.channels = a.channels_last == 1 ? 1 : a.input.dim(1);
  std::vector<int64_t> channel_shape;
  for (int axis = 2; a.channels_last == 1 && axis < a.input.rank; ++axis) {
    sizes.channels *= a.input.dim(axis);
    channel_shape.push_back(a.input.dim(axis));
  }
  if (is_extended(a)) {
    const int64_t width = sizes.channels;
    sizes.channels = a.input_channels == 0 ? width : a.input_channels;
    require(sizes.channels <= width, kConv, ": input_channels is ", a.input_channels, ", but input has ", width);
    require(a.input_channel_offset <= width - sizes.channels, kConv, ": input_channel_offset is ",
            a.input_channel_offset, ", but input has ", width, " channels, of which ", sizes.channels, " are wanted");
    channel_shape = {sizes.channels};
  }
  Dim channels{"channels", sizes.channels};
  sizes.kernel_size = check_weight(kConv, a.weight, channels, dtype, device);
  if (a.bias) {
    match.tensor("bias", a.bias).shape({channels}).type(dtype).device(device);
  }
  const int64_t reach = reach_of(kConv, sizes.kernel_size, a.dilation);
  require(a.state_length == 0 || a.state_length >= reach, kConv, ": state_length is ", a.state_length,
          ", expected at least the reach of the taps, ", reach);
  sizes.state_length = a.state_length == 0 ? reach : a.state_length;
  sizes.state_channels_last = (a.state_channels_last == -1 ? a.channels_last : a.state_channels_last) == 1;

  present.dtype = dtype;
  if (a.state_window > 0) {
    present.shape.push_back(a.state_window);
  }
  present.shape.push_back(sizes.batch);
  if (sizes.state_channels_last) {
    present.shape.push_back(sizes.state_length);
    present.shape.insert(present.shape.end(), channel_shape.begin(), channel_shape.end());
  } else {
    present.shape.insert(present.shape.end(), {sizes.channels, sizes.state_length});
  }
  require(present.shape.size() <= kMaxRank, kConv, ": input has ", a.input.rank,
          " dimensions, too many for a state with a window");
  check_output(kConv, "past_state", a.past_state, present, device, /*optional=*/true);
  return sizes;
}

CausalConvWithStateShapes shapes_of(const CausalConvWithStateArgs& a, const ConvSizes& sizes, OutputSpec present) {
  CausalConvWithStateShapes shapes;
  shapes.output.dtype = a.input.dtype;
  shapes.output.shape.assign(a.input.dims().begin(), a.input.dims().end());
  if (is_extended(a)) {
    shapes.output.shape[2] = sizes.channels;
  }
  shapes.present_state = std::move(present);
  shapes.state_update = {
      a.input.dtype, {sizes.batch, a.state_update_capacity, sizes.channels}, a.state_update_capacity > 0};
  return shapes;
}

conv::Samples samples_of(std::string_view name, const TensorView& view, bool channels_last, int first_axis = 0) {
  if (channels_last) {
    return {view.data, view.stride(first_axis), view.stride(first_axis + 1),
            stride_of_trailing(kConv, name, view, first_axis + 2)};
  }
  return {view.data, view.stride(first_axis), view.stride(first_axis + 2), view.stride(first_axis + 1)};
}

void run(const conv::Problem& problem, std::string_view op, const OpContext& context) {
  const bool reference = wants_reference(op, context.variant);
  if (!problem.end_points_sound()) {
    return;
  }
  if (reference) {
    conv::conv_ref(problem);
    return;
  }
  const auto kernel = SHOAL_PICK_ISA(context.isa, conv_channels);
  const int64_t all_tokens = problem.num_tokens * (problem.offsets == nullptr ? problem.num_seqs : 1);
  const int64_t work = std::max<int64_t>(1, all_tokens + problem.num_seqs * problem.state_length);  // of a channel
  const int64_t grain = round_up(std::max<int64_t>(1, kWorkGrain / work), kChannelGrain);
  // A thread has its channels in every sequence, so that even overlapping ranges meet no other thread.
  context.pool->parallel_for(problem.channels, grain, [&](int64_t begin, int64_t end, int) {
    for (int64_t b = 0; b < problem.num_seqs; ++b) {
      if (problem.span(b).sound) {
        kernel(problem, b, begin, end);
        conv::write_states(problem, b, begin, end);
      }
    }
  });
}

void check_dynamic(const VarlenCausalConvWithStateArgs& a, int64_t num_tokens, int64_t channels, int64_t kernel_size) {
  require(static_cast<bool>(a.kernel_delta) == static_cast<bool>(a.previous_mask), kVarlen,
          ": kernel_delta and previous_mask must be given together");
  if (!a.kernel_delta) {
    require(a.group_size == 1, kVarlen, ": group_size is ", a.group_size, ", which needs kernel_delta");
    require(a.delta_offset == 0, kVarlen, ": delta_offset is ", a.delta_offset, ", which needs kernel_delta");
    return;
  }
  require(kernel_size == 2, kVarlen, ": weight has ", kernel_size, " taps, expected 2 with kernel_delta");
  require(a.dilation == 1, kVarlen, ": dilation is ", a.dilation, ", expected 1 with kernel_delta");
  require(a.activation == "none", kVarlen, ": activation is '", a.activation, "', expected none with kernel_delta");
  require(!a.bias, kVarlen, ": bias must be absent with kernel_delta");
  require(a.group_size >= 1 && channels % a.group_size == 0, kVarlen, ": group_size is ", a.group_size,
          ", expected a divisor of channels = ", channels);
  require(a.delta_offset >= 0, kVarlen, ": delta_offset is ", a.delta_offset, ", expected at least 0");
  const Matcher match(kVarlen);
  Dim projected_taps{"projected_taps"};
  match.tensor("kernel_delta", a.kernel_delta)
      .shape({num_tokens, projected_taps, channels / a.group_size})
      .type(a.input.dtype)
      .device(a.input.device);
  require(a.delta_offset <= projected_taps - 2, kVarlen, ": kernel_delta has ", projected_taps.value(),
          " projected taps, expected at least delta_offset + 2 with delta_offset = ", a.delta_offset);
  match.tensor("previous_mask", a.previous_mask).shape({num_tokens, 1}).type(a.input.dtype).device(a.input.device);
}

}  // namespace

CausalConvWithStateShapes causal_conv_with_state_shapes(const CausalConvWithStateArgs& args) {
  OutputSpec present;
  const ConvSizes sizes = check_inputs(args, present);
  return shapes_of(args, sizes, std::move(present));
}

void causal_conv_with_state(const CausalConvWithStateArgs& a, const OpContext& context) {
  OutputSpec present;
  const ConvSizes sizes = check_inputs(a, present);
  const CausalConvWithStateShapes shapes = shapes_of(a, sizes, std::move(present));
  check_output(kConv, "output", a.output, shapes.output, a.input.device);
  check_output(kConv, "present_state", a.present_state, shapes.present_state, a.input.device);
  check_output(kConv, "state_update", a.state_update, shapes.state_update, a.input.device, /*optional=*/true);

  conv::Problem p;
  p.dtype = a.input.dtype;
  p.num_seqs = sizes.batch;
  p.num_tokens = sizes.num_tokens;
  p.channels = sizes.channels;
  p.kernel_size = sizes.kernel_size;
  p.dilation = a.dilation;
  p.state_length = sizes.state_length;
  p.silu = a.activation != "none";
  p.output = samples_of("output", a.output, a.channels_last == 1);
  p.input = samples_of("input", a.input, a.channels_last == 1);
  p.input.data =
      a.input.as<std::byte>() + a.input_channel_offset * p.input.channel * static_cast<int64_t>(size_of(a.input.dtype));
  const int window_axes = a.state_window > 0 ? 1 : 0;
  p.present = samples_of("present_state", a.present_state, sizes.state_channels_last, window_axes);
  if (a.state_window > 0) {
    p.num_windows = a.state_window;
    p.window_stride = a.present_state.stride(0);
  }
  if (a.past_state) {
    p.past = samples_of("past_state", a.past_state, sizes.state_channels_last, window_axes);
    if (a.state_window > 0) {
      p.past.data = a.past_state.as<std::byte>() +
                    (a.state_window - 1) * a.past_state.stride(0) * static_cast<int64_t>(size_of(a.input.dtype));
    }
  }
  if (a.state_update) {
    p.capture = samples_of("state_update", a.state_update, /*channels_last=*/true);
    p.capture_capacity = a.state_update_capacity;
  }
  p.weight = a.weight.data;
  p.weight_channel = a.weight.stride(0);
  p.weight_tap = a.weight.stride(2);
  if (a.bias) {
    p.bias = a.bias.data;
    p.bias_channel = a.bias.stride(0);
  }
  run(p, kConv, context);
}

VarlenCausalConvWithStateShapes varlen_causal_conv_with_state_shapes(const VarlenCausalConvWithStateArgs& a) {
  check_common(kVarlen, a.activation, a.dilation, a.state_update_capacity);
  const Matcher match(kVarlen);
  Dim tokens{"num_tokens"};
  Dim channels{"channels"};
  match.tensor("input", a.input).types(kFloats).shape({tokens, channels});
  const DType dtype = a.input.dtype;
  const Device device = a.input.device;
  const int64_t kernel_size = check_weight(kVarlen, a.weight, channels, dtype, device);
  match.tensor("cumulative_sequence_length", a.cumulative_sequence_length).type(DType::kI32).rank(1).device(device);
  const int64_t num_seqs = a.cumulative_sequence_length.dim(0) - 1;
  require(num_seqs >= 1, kVarlen, ": cumulative_sequence_length has shape ",
          shape_text(a.cumulative_sequence_length.dims()), ", expected [batch_size + 1] with at least one sequence");
  if (a.bias) {
    match.tensor("bias", a.bias).shape({channels}).type(dtype).device(device);
  }
  const int64_t reach = reach_of(kVarlen, kernel_size, a.dilation);
  require(reach * static_cast<int64_t>(size_of(dtype)) <= kMaxStateBytes, kVarlen, ": weight and dilation need ", reach,
          " state positions of ", size_of(dtype), " bytes for each channel, at most 48 KiB are supported");
  Dim batch{"batch_size", num_seqs};
  Dim state{"state_length", reach};
  match.tensor("initial_state", a.initial_state).shape({batch, channels, state}).type(dtype).device(device);
  if (a.state_update_capacity > 0) {
    match.tensor("capture_count", a.capture_count).shape({batch}).type(DType::kI32).device(device);
  } else {
    require(!a.capture_count, kVarlen, ": capture_count must be absent when state_update_capacity is 0");
  }
  check_dynamic(a, tokens, channels, kernel_size);
  return {{dtype, {tokens, channels}},
          {dtype, {num_seqs, channels, reach}},
          {dtype, {num_seqs, a.state_update_capacity, channels}, a.state_update_capacity > 0}};
}

void varlen_causal_conv_with_state(const VarlenCausalConvWithStateArgs& a, const OpContext& context) {
  const VarlenCausalConvWithStateShapes shapes = varlen_causal_conv_with_state_shapes(a);
  check_output(kVarlen, "output", a.output, shapes.output, a.input.device);
  check_output(kVarlen, "final_state", a.final_state, shapes.final_state, a.input.device);
  check_output(kVarlen, "state_update", a.state_update, shapes.state_update, a.input.device, /*optional=*/true);

  conv::Problem p;
  p.dtype = a.input.dtype;
  p.num_seqs = shapes.final_state.shape[0];
  p.num_tokens = a.input.dim(0);
  p.channels = a.input.dim(1);
  p.kernel_size = a.weight.dim(2);
  p.dilation = a.dilation;
  p.state_length = shapes.final_state.shape[2];
  p.silu = a.activation != "none";
  p.output = {a.output.data, 0, a.output.stride(0), a.output.stride(1)};
  p.input = {a.input.data, 0, a.input.stride(0), a.input.stride(1)};
  p.past = samples_of("initial_state", a.initial_state, /*channels_last=*/false);
  p.present = samples_of("final_state", a.final_state, /*channels_last=*/false);
  if (a.state_update) {
    p.capture = samples_of("state_update", a.state_update, /*channels_last=*/true);
    p.capture_capacity = a.state_update_capacity;
    p.capture_count = a.capture_count.as<int32_t>();
    p.capture_count_stride = a.capture_count.stride(0);
  }
  p.offsets = a.cumulative_sequence_length.as<int32_t>();
  p.offsets_stride = a.cumulative_sequence_length.stride(0);
  p.weight = a.weight.data;
  p.weight_channel = a.weight.stride(0);
  p.weight_tap = a.weight.stride(2);
  if (a.bias) {
    p.bias = a.bias.data;
    p.bias_channel = a.bias.stride(0);
  }
  if (a.kernel_delta) {
    p.delta_token = a.kernel_delta.stride(0);
    p.delta_tap = a.kernel_delta.stride(1);
    p.delta_group = a.kernel_delta.stride(2);
    p.delta =
        a.kernel_delta.as<std::byte>() + a.delta_offset * p.delta_tap * static_cast<int64_t>(size_of(a.input.dtype));
    p.group_size = a.group_size;
    p.mask = a.previous_mask.data;
    p.mask_token = a.previous_mask.stride(0);
  }
  run(p, kVarlen, context);
}

}  // namespace shoal
