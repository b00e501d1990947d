// Problems of the convolutions with their right results: brute force in f64 over the joined state and input; for
// dynamic taps operation by operation.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <string>
#include <vector>

#include "shoal/cpu/thread_pool.h"
#include "shoal/ops/causal_conv/causal_conv.h"
#include "testkit/bound_tensors.h"

namespace shoal::conv_cases {

using testkit::BoundTensors;
using testkit::rounded_to;
using Floats = std::vector<float>;

inline cpu::ThreadPool& pool() {
  static cpu::ThreadPool pool(2);
  return pool;
}

inline std::vector<OpContext> contexts() {
  std::vector<OpContext> list = {{.pool = &pool(), .variant = "ref"}};
  for (const cpu::Isa isa : cpu::available_isas()) {
    list.push_back({.pool = &pool(), .isa = isa});
  }
  return list;
}

inline std::string name_of(const OpContext& context) {
  return context.variant.empty() ? std::string(cpu::to_string(context.isa)) : std::string(context.variant);
}

// The same bits; a NaN is like any other.
inline ::testing::AssertionResult same_bits(const Floats& actual, const Floats& expected) {
  if (actual.size() != expected.size()) {
    return ::testing::AssertionFailure() << actual.size() << " values, expected " << expected.size();
  }
  for (size_t i = 0; i < actual.size(); ++i) {
    const bool both_nan = std::isnan(actual[i]) && std::isnan(expected[i]);
    if (!both_nan && std::bit_cast<uint32_t>(actual[i]) != std::bit_cast<uint32_t>(expected[i])) {
      return ::testing::AssertionFailure() << "value " << i << " is " << actual[i] << ", expected " << expected[i];
    }
  }
  return ::testing::AssertionSuccess();
}

inline Floats random_floats(testkit::Random& random, int64_t count, DType dtype) {
  Floats values = random.normals(static_cast<size_t>(count));
  for (float& value : values) {
    value = rounded_to(dtype, value);
  }
  return values;
}

// One sequence and channel in f64: the formula over state and input joined.
inline double brute_force(const std::vector<double>& joined, int64_t state_length, int64_t pos,
                          const std::vector<double>& taps, double bias, int64_t dilation, bool silu) {
  double sum = bias;
  const auto num_taps = static_cast<int64_t>(taps.size());
  for (int64_t tap = 0; tap < num_taps; ++tap) {
    sum += taps[static_cast<size_t>(tap)] *
           joined[static_cast<size_t>(state_length + pos - (num_taps - 1 - tap) * dilation)];
  }
  return silu ? sum / (1.0 + std::exp(-sum)) : sum;
}

// A packed call with its expected results.
struct Packed {
  DType dtype = DType::kF32;
  int64_t channels = 1;
  int64_t num_taps = 4;
  int64_t dilation = 1;
  std::string_view activation = "none";
  std::vector<int64_t> lengths{};
  bool with_bias = true;
  int64_t capacity = 0;
  std::vector<int32_t> capture_count{};
  // Dynamic taps if not 0.
  int64_t group_size = 0;
  int64_t projected_taps = 2;
  int64_t delta_offset = 0;

  Floats input{}, weight{}, bias{}, state{}, delta{}, mask{};

  int64_t num_seqs() const { return static_cast<int64_t>(lengths.size()); }
  int64_t reach() const { return (num_taps - 1) * dilation; }
  int64_t num_tokens() const {
    int64_t sum = 0;
    for (const int64_t length : lengths) {
      sum += length;
    }
    return sum;
  }
  std::vector<int32_t> offsets() const {
    std::vector<int32_t> offsets = {0};
    for (const int64_t length : lengths) {
      offsets.push_back(offsets.back() + static_cast<int32_t>(length));
    }
    return offsets;
  }
  void fill(uint64_t seed) {
    testkit::Random random(seed);
    input = random_floats(random, num_tokens() * channels, dtype);
    weight = random_floats(random, channels * num_taps, dtype);
    bias = random_floats(random, channels, dtype);
    state = random_floats(random, num_seqs() * channels * reach(), dtype);
    if (group_size > 0) {
      delta = random_floats(random, num_tokens() * projected_taps * channels / group_size, dtype);
      mask.assign(static_cast<size_t>(num_tokens()), 1.0f);
    }
  }
  std::string name() const {
    return concat(to_string(dtype), " C ", channels, " K ", num_taps, " dilation ", dilation, " ", activation,
                  " tokens ", num_tokens(), " group ", group_size);
  }
};

struct Results {
  Floats output, state, update;
};

inline Results run(const Packed& c, const OpContext& context, bool in_place = false, bool strided = true) {
  BoundTensors tensors;
  const int64_t padding = strided ? 3 : 0;
  const int64_t tokens = c.num_tokens();
  VarlenCausalConvWithStateArgs args;
  args.output = tensors.output(c.dtype, {tokens, c.channels}, padding);
  args.input = tensors.floats(c.dtype, {tokens, c.channels}, c.input, padding);
  args.weight = tensors.floats(c.dtype, {c.channels, 1, c.num_taps}, c.weight, padding);
  args.cumulative_sequence_length = tensors.integers(c.offsets());
  if (c.with_bias) {
    args.bias = tensors.floats(c.dtype, {c.channels}, c.bias);
  }
  args.initial_state = tensors.floats(c.dtype, {c.num_seqs(), c.channels, c.reach()}, c.state, padding);
  args.final_state =
      in_place ? args.initial_state : tensors.output(c.dtype, {c.num_seqs(), c.channels, c.reach()}, padding);
  if (c.capacity > 0) {
    args.state_update = tensors.output(c.dtype, {c.num_seqs(), c.capacity, c.channels}, padding);
    args.capture_count = tensors.integers(c.capture_count);
  }
  if (c.group_size > 0) {
    args.kernel_delta =
        tensors.floats(c.dtype, {tokens, c.projected_taps, c.channels / c.group_size}, c.delta, padding);
    args.previous_mask = tensors.floats(c.dtype, {tokens, 1}, c.mask, padding);
    args.group_size = c.group_size;
    args.delta_offset = c.delta_offset;
  }
  args.activation = c.activation;
  args.dilation = c.dilation;
  args.state_update_capacity = c.capacity;
  varlen_causal_conv_with_state(args, context);
  EXPECT_TRUE(tensors.intact()) << c.name();
  return {tensors.values_of(args.output), tensors.values_of(args.final_state),
          c.capacity > 0 ? tensors.values_of(args.state_update) : Floats{}};
}

// Expected results of a packed call, sequence by sequence; dynamic taps by the four roundings.
inline Results expected(const Packed& c) {
  Results r;
  r.output.resize(c.input.size());
  r.state.resize(c.state.size());
  r.update.assign(static_cast<size_t>(c.num_seqs() * c.capacity * c.channels), 0.0f);
  const auto at = [](const Floats& values, int64_t i) { return values[static_cast<size_t>(i)]; };
  int64_t begin = 0;
  for (int64_t b = 0; b < c.num_seqs(); ++b) {
    const int64_t length = c.lengths[static_cast<size_t>(b)];
    for (int64_t channel = 0; channel < c.channels; ++channel) {
      std::vector<double> joined;
      for (int64_t pos = 0; pos < c.reach(); ++pos) {
        joined.push_back(at(c.state, (b * c.channels + channel) * c.reach() + pos));
      }
      for (int64_t pos = 0; pos < length; ++pos) {
        joined.push_back(at(c.input, (begin + pos) * c.channels + channel));
      }
      std::vector<double> taps;
      for (int64_t tap = 0; tap < c.num_taps; ++tap) {
        taps.push_back(at(c.weight, channel * c.num_taps + tap));
      }
      for (int64_t pos = 0; pos < length; ++pos) {
        float& y = r.output[static_cast<size_t>((begin + pos) * c.channels + channel)];
        if (c.group_size == 0) {
          y = rounded_to(c.dtype, static_cast<float>(brute_force(joined, c.reach(), pos, taps,
                                                                 c.with_bias ? at(c.bias, channel) : 0.0, c.dilation,
                                                                 c.activation != "none")));
          continue;
        }
        const auto round = [&](float value) { return rounded_to(c.dtype, value); };
        const int64_t num_groups = c.channels / c.group_size;
        const int64_t row = (begin + pos) * c.projected_taps + c.delta_offset;
        const float d_cur = at(c.delta, row * num_groups + channel / c.group_size);
        const float d_prev = at(c.delta, (row + 1) * num_groups + channel / c.group_size);
        const auto x = static_cast<float>(joined[static_cast<size_t>(pos + 1)]);
        const auto x_prev = static_cast<float>(joined[static_cast<size_t>(pos)]);
        const float a_cur = round(round(static_cast<float>(taps[1]) + d_cur) * x);
        const float a_prev = round(round(static_cast<float>(taps[0]) + d_prev) * x_prev);
        y = round(a_cur + round(a_prev * at(c.mask, begin + pos)));
      }
      for (int64_t pos = 0; pos < c.reach(); ++pos) {
        r.state[static_cast<size_t>((b * c.channels + channel) * c.reach() + pos)] =
            static_cast<float>(joined[static_cast<size_t>(length + pos)]);
      }
      for (int64_t slot = 0; slot < c.capacity; ++slot) {
        if (slot < std::min<int64_t>(c.capture_count[static_cast<size_t>(b)], length)) {
          r.update[static_cast<size_t>((b * c.capacity + slot) * c.channels + channel)] =
              at(c.input, (begin + slot) * c.channels + channel);
        }
      }
    }
    begin += length;
  }
  return r;
}

inline void expect_right(const Packed& c) {
  const Results right = expected(c);
  // One rounding to T may fall on either side where the f32 sum differs from the f64 one.
  const double rtol = c.dtype == DType::kF32 ? 4e-6 : 2.0 * testkit::rounding_of(c.dtype);
  for (const OpContext& context : contexts()) {
    SCOPED_TRACE(concat(name_of(context), " ", c.name()));
    const Results actual = run(c, context);
    if (c.group_size > 0) {
      EXPECT_TRUE(same_bits(actual.output, right.output));
    } else {
      const auto close = testkit::compare(actual.output, right.output, rtol, 4e-6);
      EXPECT_TRUE(close) << close.text;
    }
    EXPECT_TRUE(same_bits(actual.state, right.state));
    EXPECT_TRUE(same_bits(actual.update, right.update));
    const Results in_place = run(c, context, /*in_place=*/true, /*strided=*/false);
    EXPECT_TRUE(same_bits(in_place.output, actual.output));
    EXPECT_TRUE(same_bits(in_place.state, actual.state));
    EXPECT_TRUE(same_bits(in_place.update, actual.update));
  }
}

// CausalConvWithState over a batch, in any layout.
struct Batch {
  DType dtype = DType::kF32;
  int64_t batch = 2;
  int64_t channels = 5;
  int64_t length = 4;
  int64_t num_taps = 3;
  int64_t dilation = 1;
  std::string_view activation = "none";
  int64_t channels_last = 0;
  int64_t window = 0;
  bool with_bias = true;
  bool with_state = true;
  Floats input{}, weight{}, bias{}, state{};  // input [B, C, L], state [B, C, S]

  int64_t reach() const { return (num_taps - 1) * dilation; }
  void fill(uint64_t seed) {
    testkit::Random random(seed);
    input = random_floats(random, batch * channels * length, dtype);
    weight = random_floats(random, channels * num_taps, dtype);
    bias = random_floats(random, channels, dtype);
    state = random_floats(random, batch * channels * reach(), dtype);
  }
  std::string name() const {
    return concat(to_string(dtype), " [", batch, ", ", channels, ", ", length, "] K ", num_taps, " dilation ", dilation,
                  " ", activation, channels_last ? " channels last" : "", " window ", window);
  }
};

inline Floats swapped(const Floats& values, int64_t outer, int64_t rows, int64_t columns) {
  Floats result(values.size());
  for (int64_t o = 0; o < outer; ++o) {
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < columns; ++c) {
        result[static_cast<size_t>((o * columns + c) * rows + r)] =
            values[static_cast<size_t>((o * rows + r) * columns + c)];
      }
    }
  }
  return result;
}

// Outputs in the channels-first layout; the state has the window axis if there is one.
inline Results run(const Batch& c, const OpContext& context, bool in_place = false) {
  BoundTensors tensors;
  const bool last = c.channels_last == 1;
  const auto shape = [&](int64_t length) {
    return last ? std::vector<int64_t>{c.batch, length, c.channels} : std::vector<int64_t>{c.batch, c.channels, length};
  };
  const auto lay = [&](const Floats& values, int64_t length) {
    return last ? swapped(values, c.batch, c.channels, length) : values;
  };
  CausalConvWithStateArgs args;
  args.output = tensors.output(c.dtype, shape(c.length), 7);
  args.input = tensors.floats(c.dtype, shape(c.length), lay(c.input, c.length), 7);
  args.weight = tensors.floats(c.dtype, {c.channels, 1, c.num_taps}, c.weight);
  if (c.with_bias) {
    args.bias = tensors.floats(c.dtype, {c.channels}, c.bias);
  }
  std::vector<int64_t> state_shape = shape(c.reach());
  Floats state = lay(c.state, c.reach());
  if (c.window > 0) {
    state_shape.insert(state_shape.begin(), c.window);
    Floats slots(state.size() * static_cast<size_t>(c.window - 1), 99.0f);  // never read
    state.insert(state.begin(), slots.begin(), slots.end());
  }
  if (c.with_state) {
    args.past_state = tensors.floats(c.dtype, state_shape, state);
  }
  args.present_state = in_place ? args.past_state : tensors.output(c.dtype, state_shape);
  args.dilation = c.dilation;
  args.activation = c.activation;
  args.channels_last = c.channels_last;
  args.state_window = c.window;
  causal_conv_with_state(args, context);
  EXPECT_TRUE(tensors.intact());
  Results r{tensors.values_of(args.output), tensors.values_of(args.present_state), {}};
  if (last) {
    r.output = swapped(r.output, c.batch, c.length, c.channels);
    r.state = swapped(r.state, c.batch * std::max<int64_t>(c.window, 1), c.reach(), c.channels);
  }
  return r;
}

inline Results expected(const Batch& c) {
  Results r;
  const int64_t window = std::max<int64_t>(c.window, 1);
  r.state.assign(static_cast<size_t>(window * c.batch * c.channels * c.reach()), 0.0f);
  for (int64_t row = 0; row < c.batch * c.channels; ++row) {
    std::vector<double> joined(static_cast<size_t>(c.reach()), 0.0);
    for (int64_t pos = 0; c.with_state && pos < c.reach(); ++pos) {
      joined[static_cast<size_t>(pos)] = c.state[static_cast<size_t>(row * c.reach() + pos)];
    }
    for (int64_t pos = 0; pos < c.length; ++pos) {
      joined.push_back(c.input[static_cast<size_t>(row * c.length + pos)]);
    }
    const int64_t channel = row % c.channels;
    std::vector<double> taps;
    for (int64_t tap = 0; tap < c.num_taps; ++tap) {
      taps.push_back(c.weight[static_cast<size_t>(channel * c.num_taps + tap)]);
    }
    for (int64_t pos = 0; pos < c.length; ++pos) {
      const double y =
          brute_force(joined, c.reach(), pos, taps, c.with_bias ? c.bias[static_cast<size_t>(channel)] : 0.0,
                      c.dilation, c.activation != "none");
      r.output.push_back(rounded_to(c.dtype, static_cast<float>(y)));
    }
    for (int64_t slot = 0; slot < window; ++slot) {
      const int64_t consumed = c.length - window + slot + 1;
      for (int64_t pos = 0; pos < c.reach() && (consumed > 0 || slot + 1 == window); ++pos) {
        r.state[static_cast<size_t>((slot * c.batch * c.channels + row) * c.reach() + pos)] =
            static_cast<float>(joined[static_cast<size_t>(consumed + pos)]);
      }
    }
  }
  return r;
}

}  // namespace shoal::conv_cases
