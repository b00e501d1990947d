// The convolutions against a brute force in f64 over the joined state and input, onnxruntime's kernels and, for dynamic
// taps, an oracle that rounds operation by operation; every instruction set against the reference.
#include "shoal/ops/causal_conv/causal_conv.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>

#include "shoal/ops/causal_conv/causal_conv_cases.h"
#include "shoal/tensor/matcher.h"
#include "testkit/expect_error.h"
#include "tests/golden/recurrence_golden.h"

namespace shoal {
namespace {

using namespace conv_cases;

TEST(VarlenCausalConv, BruteForce) {
  uint64_t seed = 0;
  for (const DType dtype : kFloats) {
    for (const int64_t num_taps : {1, 2, 3, 4, 9}) {
      for (const int64_t dilation : {1, 3}) {
        const int64_t reach = (num_taps - 1) * dilation;
        const std::vector<int64_t> lengths = {1, 2, std::max<int64_t>(reach - 1, 0), reach, reach + 1, 30};
        for (const int64_t channels : {1, 31, 33, 130}) {
          Packed c{.dtype = dtype, .channels = channels, .num_taps = num_taps, .dilation = dilation};
          c.lengths = lengths;
          c.activation = ++seed % 2 == 0 ? "silu" : "none";
          c.with_bias = seed % 3 != 0;
          c.capacity = seed % 2 == 0 ? 8 : seed % 3 == 0 ? 1 : 0;
          c.capture_count = {0, 1, 8, 9, -3, 100};
          c.fill(seed);
          expect_right(c);
        }
      }
    }
  }
}

TEST(VarlenCausalConv, ManyChannels) {
  for (const int64_t channels : {32, 255, 256, 257, 10240}) {
    Packed c{.dtype = DType::kBF16, .channels = channels, .activation = "swish", .lengths = {1, 1, 5, 0, 2}};
    c.fill(static_cast<uint64_t>(channels));
    expect_right(c);
    c.lengths = {1, 1, 1};
    c.fill(static_cast<uint64_t>(channels) + 1);
    expect_right(c);
  }
}

TEST(VarlenCausalConv, EmptySequencesKeepTheirState) {
  Packed c{.dtype = DType::kF16, .channels = 33, .lengths = {0, 0, 0}, .capacity = 2, .capture_count = {1, 2, 0}};
  c.fill(3);
  expect_right(c);
}

TEST(VarlenCausalConv, StateKeepsEveryBit) {
  // Signalling NaNs, subnormal numbers and zeros of either sign pass through unchanged.
  std::vector<uint16_t> input = {0x7d01, 0x0001, 0x8000, 0xfc00};
  std::vector<uint16_t> state = {0x7c01, 0x8001, 0x7e55, 0x0000};
  std::vector<uint16_t> weight(8), output(4), final_state(4), update(4);
  std::vector<int32_t> offsets = {0, 1, 2}, count = {1, 0};
  for (const OpContext& context : contexts()) {
    VarlenCausalConvWithStateArgs args;
    args.output = TensorView(output.data(), DType::kF16, {2, 2});
    args.final_state = TensorView(final_state.data(), DType::kF16, {2, 2, 1});
    args.state_update = TensorView(update.data(), DType::kF16, {2, 1, 2});
    args.input = TensorView(input.data(), DType::kF16, {2, 2});
    args.weight = TensorView(weight.data(), DType::kF16, {2, 1, 2});
    args.cumulative_sequence_length = TensorView(offsets.data(), DType::kI32, {3});
    args.initial_state = TensorView(state.data(), DType::kF16, {2, 2, 1});
    args.capture_count = TensorView(count.data(), DType::kI32, {2});
    args.state_update_capacity = 1;
    varlen_causal_conv_with_state(args, context);
    EXPECT_EQ(final_state, input);
    EXPECT_EQ(update, (std::vector<uint16_t>{0x7d01, 0x0001, 0, 0}));
  }
}

// The whole call, then the same tokens in two calls with the state carried over in place.
void expect_chunks_agree(Packed c, int64_t first) {
  for (const OpContext& context : contexts()) {
    const Results whole = run(c, context);
    Packed part = c;
    part.lengths = {first};
    part.input.resize(static_cast<size_t>(first * c.channels));
    const Results head = run(part, context, /*in_place=*/true);
    Packed rest = c;
    rest.lengths = {c.num_tokens() - first};
    rest.input.erase(rest.input.begin(), rest.input.begin() + static_cast<int64_t>(part.input.size()));
    if (c.group_size > 0) {
      const int64_t row = c.projected_taps * c.channels / c.group_size;
      part.delta.resize(static_cast<size_t>(first * row));
      rest.delta.erase(rest.delta.begin(), rest.delta.begin() + first * row);
      rest.mask.erase(rest.mask.begin(), rest.mask.begin() + first);
    }
    rest.state = head.state;
    const Results tail = run(rest, context, /*in_place=*/true);
    Floats joined = head.output;
    joined.insert(joined.end(), tail.output.begin(), tail.output.end());
    EXPECT_TRUE(same_bits(joined, whole.output)) << name_of(context) << " " << c.name() << " at " << first;
    EXPECT_TRUE(same_bits(tail.state, whole.state)) << name_of(context) << " " << c.name() << " at " << first;
  }
}

TEST(VarlenCausalConv, ChunksAgreeWithTheWhole) {
  for (const DType dtype : kFloats) {
    for (const int64_t first : {1, 2, 5, 19}) {
      Packed c{.dtype = dtype, .channels = 70, .dilation = 2, .activation = "silu", .lengths = {20}};
      c.fill(5);
      expect_chunks_agree(c, first);
      Packed dynamic{.dtype = dtype, .channels = 48, .num_taps = 2, .lengths = {20}, .with_bias = false};
      dynamic.group_size = 16;
      dynamic.fill(6);
      expect_chunks_agree(dynamic, first);
    }
  }
}

TEST(VarlenCausalConv, NeighboursAndThreadsChangeNothing) {
  Packed c{.dtype = DType::kBF16, .channels = 200, .activation = "silu", .lengths = {7, 300, 2}};
  c.fill(7);
  Packed alone = c;
  alone.lengths = {300};
  alone.input.assign(c.input.begin() + 7 * 200, c.input.begin() + 307 * 200);
  alone.state.assign(c.state.begin() + 200 * 3, c.state.begin() + 2 * 200 * 3);
  cpu::ThreadPool one(1);
  cpu::ThreadPool three(3);
  for (const cpu::Isa isa : cpu::available_isas()) {
    const Results batch = run(c, {.pool = &one, .isa = isa});
    const Results single = run(alone, {.pool = &three, .isa = isa});
    EXPECT_TRUE(same_bits(single.output, {batch.output.begin() + 7 * 200, batch.output.begin() + 307 * 200}));
    EXPECT_TRUE(same_bits(run(c, {.pool = &three, .isa = isa}).output, batch.output));
  }
}

TEST(VarlenCausalConv, DynamicTaps) {
  const float inf = std::numeric_limits<float>::infinity();
  uint64_t seed = 100;
  for (const DType dtype : kFloats) {
    for (const int64_t channels : {16, 80, 272}) {
      for (const int64_t group_size : {int64_t{1}, channels / 16, int64_t{16}, channels}) {
        for (const int mask_kind : {0, 1, 2, 3}) {
          Packed c{
              .dtype = dtype, .channels = channels, .num_taps = 2, .lengths = {1, 4, 0, 17, 33}, .with_bias = false};
          c.group_size = group_size;
          c.projected_taps = 2 + static_cast<int64_t>(seed % 3);
          c.delta_offset = static_cast<int64_t>(seed % 3);
          c.capacity = seed % 2 == 0 ? 3 : 0;
          c.capture_count = {1, 2, 5, 0, 3};
          c.fill(++seed);
          for (size_t t = 0; t < c.mask.size(); ++t) {
            c.mask[t] = mask_kind == 0   ? 1.0f
                        : mask_kind == 1 ? (t % 4 == 0 ? 0.0f : 1.0f)
                        : mask_kind == 2 ? 0.3f
                                         : 0.0f;
            c.mask[t] = rounded_to(dtype, c.mask[t]);
          }
          if (mask_kind == 3) {  // 0 * inf is NaN, 0 * -1 is -0, which shows where the current product is -0
            c.input[0] = inf;
            c.input[1] = -0.0f;
            c.state[0] = inf;
            c.state[1] = -1.0f;
            c.state[2] = std::numeric_limits<float>::quiet_NaN();
          }
          expect_right(c);
        }
      }
    }
  }
}

TEST(VarlenCausalConv, DynamicTapsRoundFourTimes) {
  // By hand, in bf16 (8 bits): 1 + 2^-8 ties to 1; 1.0078125 * 1.0078125 rounds down to 1.015625; each product is
  // rounded before the sum. With one rounding at the end the result would be another.
  Packed c{.dtype = DType::kBF16, .channels = 1, .num_taps = 2, .lengths = {1}, .with_bias = false, .group_size = 1};
  c.input = {1.0078125f};
  c.weight = {1.0f, 1.0f};  // previous, current
  c.state = {1.0f};
  c.delta = {0.0078125f, 0.00390625f};  // current, previous
  c.mask = {0.01171875f};
  // current (1 + 2^-7) * (1 + 2^-7) = 1.01568603515625 -> 1.015625; previous 1 * 1 * 0.01171875; sum 1.02734375, a tie
  // between 1.0234375 (odd) and 1.03125 (even).
  for (const OpContext& context : contexts()) {
    EXPECT_EQ(run(c, context).output, Floats{1.03125f}) << name_of(context);
  }
}

TEST(VarlenCausalConv, MalformedOffsetsTouchNothingElse) {
  Packed c{.dtype = DType::kF16, .channels = 40, .lengths = {3, 4, 5}, .capacity = 2, .capture_count = {1, 1, 1}};
  c.fill(11);
  const int32_t lowest = std::numeric_limits<int32_t>::min();
  const int32_t highest = std::numeric_limits<int32_t>::max();
  for (const OpContext& context : contexts()) {
    const Results right = run(c, context);
    // Offsets, and the sequences that must come out right.
    const std::vector<std::pair<std::vector<int32_t>, std::vector<bool>>> cases = {
        {{0, 3, 7, 12}, {true, true, true}},         {{0, 3, 13, 12}, {true, false, false}},
        {{0, -1, 7, 12}, {false, false, true}},      {{0, lowest, highest, 12}, {false, false, false}},
        {{0, 7, 3, 12}, {false, false, false}},      {{1, 3, 7, 12}, {false, false, false}},
        {{0, 3, 7, 11}, {false, false, false}},      {{0, 3, 7, highest}, {false, false, false}},
        {{lowest, 3, 7, 12}, {false, false, false}}, {{0, 3, highest, 12}, {true, false, false}},
    };
    for (const auto& [offsets, sound] : cases) {
      BoundTensors tensors;
      VarlenCausalConvWithStateArgs args;
      args.output = tensors.output(c.dtype, {12, 40});
      args.final_state = tensors.output(c.dtype, {3, 40, 3});
      args.state_update = tensors.output(c.dtype, {3, 2, 40});
      args.input = tensors.floats(c.dtype, {12, 40}, c.input);
      args.weight = tensors.floats(c.dtype, {40, 1, 4}, c.weight);
      args.bias = tensors.floats(c.dtype, {40}, c.bias);
      args.initial_state = tensors.floats(c.dtype, {3, 40, 3}, c.state);
      args.cumulative_sequence_length = tensors.integers(offsets);
      args.capture_count = tensors.integers(c.capture_count);
      args.state_update_capacity = 2;
      varlen_causal_conv_with_state(args, context);
      EXPECT_TRUE(tensors.intact());
      const Floats state = tensors.values_of(args.final_state);
      const Floats output = tensors.values_of(args.output);
      for (size_t b = 0; b < 3; ++b) {
        if (sound[b]) {
          EXPECT_EQ(Floats(state.begin() + b * 120, state.begin() + (b + 1) * 120),
                    Floats(right.state.begin() + b * 120, right.state.begin() + (b + 1) * 120));
          const int64_t begin = offsets[b] * 40, end = offsets[b + 1] * 40;
          EXPECT_EQ(Floats(output.begin() + begin, output.begin() + end),
                    Floats(right.output.begin() + begin, right.output.begin() + end));
        }
      }
      if (offsets[0] != 0 || offsets[3] != 12) {
        EXPECT_TRUE(std::isnan(output[0]) && std::isnan(state[0])) << "written in spite of wrong end points";
      }
    }
  }
}

TEST(CausalConv, BruteForce) {
  uint64_t seed = 1000;
  for (const DType dtype : kFloats) {
    const double rtol = dtype == DType::kF32 ? 4e-6 : 2.0 * testkit::rounding_of(dtype);
    for (const int64_t num_taps : {1, 2, 3, 4, 10}) {
      for (const int64_t length : {0, 1, 3, 4, 5, 41}) {
        for (const int64_t channels : {5, 70}) {
          Batch c{.dtype = dtype, .channels = channels, .length = length, .num_taps = num_taps};
          c.dilation = ++seed % 3 == 0 ? 3 : 1;
          c.activation = seed % 2 == 0 ? "silu" : "none";
          c.with_bias = seed % 5 != 0;
          c.with_state = seed % 4 != 0;
          c.window = seed % 7 == 0 ? 3 : seed % 7 == 1 ? 8 : 0;
          c.fill(seed);
          const Results right = expected(c);
          for (const OpContext& context : contexts()) {
            SCOPED_TRACE(concat(name_of(context), " ", c.name()));
            c.channels_last = 0;
            const Results first = run(c, context);
            const auto close = testkit::compare(first.output, right.output, rtol, 4e-6);
            EXPECT_TRUE(close) << close.text;
            EXPECT_TRUE(same_bits(first.state, right.state));
            c.channels_last = 1;
            const Results last = run(c, context);
            EXPECT_TRUE(same_bits(last.output, first.output));
            EXPECT_TRUE(same_bits(last.state, right.state));
            if (c.with_state) {
              EXPECT_TRUE(same_bits(run(c, context, /*in_place=*/true).state, right.state));
              c.channels_last = 0;
              EXPECT_TRUE(same_bits(run(c, context, /*in_place=*/true).state, right.state));
            }
          }
        }
      }
    }
  }
}

TEST(CausalConv, TrailingChannelAxesAreOneAxis) {
  Batch c{.channels = 12, .length = 6, .channels_last = 1};
  c.fill(21);
  for (const OpContext& context : contexts()) {
    BoundTensors tensors;
    CausalConvWithStateArgs args;
    args.input = tensors.floats(c.dtype, {2, 6, 3, 4}, swapped(c.input, 2, 12, 6), 5);
    args.weight = tensors.floats(c.dtype, {12, 1, 3}, c.weight);
    args.bias = tensors.floats(c.dtype, {12}, c.bias);
    args.past_state = tensors.floats(c.dtype, {2, 2, 3, 4}, swapped(c.state, 2, 12, 2));
    args.channels_last = 1;
    const CausalConvWithStateShapes shapes = causal_conv_with_state_shapes(args);
    EXPECT_EQ(shapes.output.shape, (std::vector<int64_t>{2, 6, 3, 4}));
    EXPECT_EQ(shapes.present_state.shape, (std::vector<int64_t>{2, 2, 3, 4}));
    EXPECT_FALSE(shapes.state_update.present);
    args.output = tensors.output(c.dtype, shapes.output.shape);
    args.present_state = tensors.output(c.dtype, shapes.present_state.shape);
    causal_conv_with_state(args, context);
    const Results right = expected(c);
    const auto close = testkit::compare(swapped(tensors.values_of(args.output), 2, 6, 12), right.output, 4e-6, 4e-6);
    EXPECT_TRUE(close) << close.text;
    EXPECT_TRUE(same_bits(swapped(tensors.values_of(args.present_state), 2, 2, 12), right.state));
  }
}

TEST(CausalConv, ExtendedAttributes) {
  // Channels 4 to 8 of 11; a state of 6 positions, of which the taps read the last 2, channels first.
  testkit::Random random(31);
  const Floats wide = random_floats(random, 2 * 3 * 11, DType::kF32);
  Batch c{.channels = 5, .length = 3, .with_bias = false};
  c.fill(32);
  const Floats state = random_floats(random, 2 * 5 * 6, DType::kF32);
  for (int64_t row = 0; row < 10; ++row) {
    for (int64_t pos = 0; pos < 3; ++pos) {
      c.input[static_cast<size_t>(row * 3 + pos)] = wide[static_cast<size_t>((row / 5 * 3 + pos) * 11 + 4 + row % 5)];
    }
    for (int64_t pos = 0; pos < 2; ++pos) {
      c.state[static_cast<size_t>(row * 2 + pos)] = state[static_cast<size_t>(row * 6 + 4 + pos)];
    }
  }
  const Results right = expected(c);
  for (const OpContext& context : contexts()) {
    for (const int64_t state_channels_last : {-1, 0, 1}) {
      const bool last = state_channels_last != 0;
      BoundTensors tensors;
      CausalConvWithStateArgs args;
      args.input = tensors.floats(c.dtype, {2, 3, 11}, wide);
      args.weight = tensors.floats(c.dtype, {5, 1, 3}, c.weight);
      const std::vector<int64_t> state_shape = last ? std::vector<int64_t>{2, 6, 5} : std::vector<int64_t>{2, 5, 6};
      args.past_state = tensors.floats(c.dtype, state_shape, last ? swapped(state, 2, 5, 6) : state);
      args.channels_last = 1;
      args.state_channels_last = state_channels_last;
      args.state_length = 6;
      args.input_channel_offset = 4;
      args.input_channels = 5;
      args.state_update_capacity = 4;
      const CausalConvWithStateShapes shapes = causal_conv_with_state_shapes(args);
      EXPECT_EQ(shapes.output.shape, (std::vector<int64_t>{2, 3, 5}));
      EXPECT_EQ(shapes.present_state.shape, state_shape);
      EXPECT_EQ(shapes.state_update.shape, (std::vector<int64_t>{2, 4, 5}));
      args.output = tensors.output(c.dtype, shapes.output.shape);
      args.present_state = tensors.output(c.dtype, shapes.present_state.shape);
      args.state_update = tensors.output(c.dtype, shapes.state_update.shape);
      causal_conv_with_state(args, context);
      EXPECT_TRUE(tensors.intact());
      const auto close = testkit::compare(swapped(tensors.values_of(args.output), 2, 3, 5), right.output, 4e-6, 4e-6);
      EXPECT_TRUE(close) << close.text;
      Floats present = tensors.values_of(args.present_state);
      present = last ? swapped(present, 2, 6, 5) : present;
      const Floats update = tensors.values_of(args.state_update);
      for (size_t row = 0; row < 10; ++row) {
        for (size_t pos = 0; pos < 6; ++pos) {
          EXPECT_EQ(present[row * 6 + pos], pos < 3 ? state[row * 6 + pos + 3] : c.input[row * 3 + pos - 3]);
        }
        for (size_t slot = 0; slot < 4; ++slot) {
          EXPECT_EQ(update[(row / 5 * 4 + slot) * 5 + row % 5], slot < 3 ? c.input[row * 3 + slot] : 0.0f);
        }
      }
    }
  }
}

TEST(CausalConv, AgreesWithOnnxRuntime) {
  const std::vector<golden::Case> cases = golden::read_cases("causal_conv_with_state");
  ASSERT_EQ(cases.size(), 16u);
  for (const golden::Case& c : cases) {
    for (const OpContext& context : contexts()) {
      SCOPED_TRACE(concat(name_of(context), " case ", &c - cases.data()));
      BoundTensors tensors;
      CausalConvWithStateArgs args;
      for (const auto& [name, array] : c.inputs) {
        (name == "input"    ? args.input
         : name == "weight" ? args.weight
         : name == "bias"   ? args.bias
                            : args.past_state) = tensors.floats(array.dtype, array.shape, array.values);
      }
      args.dilation = c.integer("dilation");
      args.channels_last = c.integer("channels_last");
      args.activation = c.text("activation", "none");
      const CausalConvWithStateShapes shapes = causal_conv_with_state_shapes(args);
      EXPECT_EQ(shapes.output.shape, c.output("output").shape);
      EXPECT_EQ(shapes.present_state.shape, c.output("present_state").shape);
      args.output = tensors.output(shapes.output.dtype, shapes.output.shape);
      args.present_state = tensors.output(shapes.present_state.dtype, shapes.present_state.shape);
      causal_conv_with_state(args, context);
      const double tolerance = args.input.dtype == DType::kF32 ? 1e-5 : 2e-3;
      const auto close =
          testkit::compare(tensors.values_of(args.output), c.output("output").values, tolerance, tolerance);
      EXPECT_TRUE(close) << close.text;
      EXPECT_EQ(tensors.values_of(args.present_state), c.output("present_state").values);
    }
  }
}

TEST(VarlenCausalConv, AgreesWithOnnxRuntime) {
  const std::vector<golden::Case> cases = golden::read_cases("varlen_causal_conv_with_state");
  ASSERT_EQ(cases.size(), 5u);
  for (const golden::Case& c : cases) {
    for (const OpContext& context : contexts()) {
      SCOPED_TRACE(concat(name_of(context), " case ", &c - cases.data()));
      BoundTensors tensors;
      VarlenCausalConvWithStateArgs args;
      for (const auto& [name, array] : c.inputs) {
        if (array.dtype == DType::kI32) {
          (name == "capture_count" ? args.capture_count : args.cumulative_sequence_length) =
              tensors.integers(std::vector<int32_t>(array.values.begin(), array.values.end()));
          continue;
        }
        (name == "input"    ? args.input
         : name == "weight" ? args.weight
         : name == "bias"   ? args.bias
                            : args.initial_state) = tensors.floats(array.dtype, array.shape, array.values);
      }
      args.dilation = c.integer("dilation");
      args.activation = c.text("activation", "none");
      args.state_update_capacity = c.integer("state_update_capacity");
      const VarlenCausalConvWithStateShapes shapes = varlen_causal_conv_with_state_shapes(args);
      args.output = tensors.output(shapes.output.dtype, shapes.output.shape);
      args.final_state = tensors.output(shapes.final_state.dtype, shapes.final_state.shape);
      if (shapes.state_update.present) {
        args.state_update = tensors.output(shapes.state_update.dtype, shapes.state_update.shape);
      }
      varlen_causal_conv_with_state(args, context);
      const double tolerance = args.input.dtype == DType::kF32 ? 1e-5 : 2e-3;
      const auto close =
          testkit::compare(tensors.values_of(args.output), c.output("output").values, tolerance, tolerance);
      EXPECT_TRUE(close) << close.text;
      EXPECT_EQ(tensors.values_of(args.final_state), c.output("final_state").values);
      if (shapes.state_update.present) {
        EXPECT_EQ(tensors.values_of(args.state_update), c.output("state_update").values);
      }
    }
  }
}

TEST(CausalConv, AnyStridesOfInputs) {
  // Every second channel of a wider input, a reversed state, weights that are a transposed view.
  Packed c{.channels = 37, .num_taps = 3, .activation = "silu", .lengths = {9, 4}};
  c.fill(41);
  Floats wide(static_cast<size_t>(13 * 80), 7.0f);
  for (int64_t i = 0; i < 13 * 37; ++i) {
    wide[static_cast<size_t>(i / 37 * 80 + i % 37 * 2)] = c.input[static_cast<size_t>(i)];
  }
  const Floats turned = swapped(c.weight, 1, 37, 3);
  for (const OpContext& context : contexts()) {
    const Results right = run(c, context);
    BoundTensors tensors;
    VarlenCausalConvWithStateArgs args;
    args.output = tensors.output(c.dtype, {13, 37});
    args.final_state = tensors.output(c.dtype, {2, 37, 2});
    args.input = tensors.floats(c.dtype, {13, 80}, wide);
    args.input.shape[1] = 37;
    args.input.strides[1] = 2;
    args.weight = tensors.floats(c.dtype, {3, 37}, turned);
    args.weight.rank = 3;
    args.weight.shape = {37, 1, 3};
    args.weight.strides = {1, 1, 37};
    args.bias = tensors.floats(c.dtype, {37}, c.bias);
    args.initial_state = tensors.floats(c.dtype, {2, 37, 2}, c.state);
    args.cumulative_sequence_length = tensors.integers(c.offsets());
    args.activation = "silu";
    varlen_causal_conv_with_state(args, context);
    EXPECT_TRUE(same_bits(tensors.values_of(args.output), right.output)) << name_of(context);
    EXPECT_TRUE(same_bits(tensors.values_of(args.final_state), right.state)) << name_of(context);
  }
}

TEST(CausalConv, Rejections) {
  BoundTensors tensors;
  const Floats zeros(1000);
  const auto floats = [&](std::vector<int64_t> shape, DType dtype = DType::kF32) {
    return tensors.floats(dtype, std::move(shape), zeros);
  };
  CausalConvWithStateArgs good;
  good.input = floats({2, 5, 6});
  good.weight = floats({5, 1, 3});
  good.output = floats({2, 5, 6});
  good.present_state = floats({2, 5, 2});
  const auto error = [&](auto change) {
    CausalConvWithStateArgs args = good;
    change(args);
    return testkit::error_of([&] { causal_conv_with_state(args, {.pool = &pool()}); });
  };
  EXPECT_EQ(error([](auto&) {}), "");
  EXPECT_EQ(error([](auto& a) { a.activation = "relu"; }),
            "causal_conv_with_state: activation is 'relu', expected none, silu or swish");
  EXPECT_EQ(error([](auto& a) { a.dilation = 0; }), "causal_conv_with_state: dilation is 0, expected at least 1");
  EXPECT_EQ(error([](auto& a) { a.dilation = int64_t{1} << 40; }),
            "causal_conv_with_state: dilation is 1099511627776, too large for 3 taps");
  EXPECT_EQ(error([](auto& a) { a.ndim = 4; }), "causal_conv_with_state: ndim is 4, expected 1 to 3");
  testkit::expect_error(ErrorCode::kUnsupported, "causal_conv_with_state: ndim is 2, only 1 is supported", [&] {
    CausalConvWithStateArgs args = good;
    args.ndim = 2;
    causal_conv_with_state(args, {.pool = &pool()});
  });
  EXPECT_EQ(error([](auto& a) { a.channels_last = 2; }), "causal_conv_with_state: channels_last is 2, expected 0 to 1");
  EXPECT_EQ(error([](auto& a) { a.state_window = 9; }), "causal_conv_with_state: state_window is 9, expected 0 to 8");
  EXPECT_EQ(error([](auto& a) { a.state_update_capacity = -1; }),
            "causal_conv_with_state: state_update_capacity is -1, expected 0 to 8");
  EXPECT_EQ(error([](auto& a) { a.state_channels_last = 2; }),
            "causal_conv_with_state: state_channels_last is 2, expected -1 to 1");
  for (const auto& entry : std::vector<std::pair<std::string, std::function<void(CausalConvWithStateArgs&)>>>{
           {"state_update_capacity", [](auto& a) { a.state_update_capacity = 1; }},
           {"state_channels_last", [](auto& a) { a.state_channels_last = 1; }},
           {"state_length", [](auto& a) { a.state_length = 4; }},
           {"input_channel_offset", [](auto& a) { a.input_channel_offset = 1; }},
           {"input_channels", [](auto& a) { a.input_channels = 5; }}}) {
    const std::string& name = entry.first;
    const std::function<void(CausalConvWithStateArgs&)>& change = entry.second;
    EXPECT_EQ(error(change), concat("causal_conv_with_state: ", name, " needs channels_last 1"));
    EXPECT_EQ(error([&](auto& a) { change(a), a.channels_last = 1, a.state_window = 1; }),
              concat("causal_conv_with_state: ", name, " needs state_window 0"));
    EXPECT_EQ(error([&](auto& a) {
                change(a), a.channels_last = 1, a.input = floats({2, 6, 5, 1});
              }),
              "causal_conv_with_state: input has 4 dimensions, expected 3");
  }
  EXPECT_EQ(error([](auto& a) { a.state_length = -1; }),
            "causal_conv_with_state: state_length is -1, expected at least 0");
  const auto slice = [&](auto& a) { a.channels_last = 1, a.input = floats({2, 6, 9}), a.input_channels = 5; };
  EXPECT_EQ(error([&](auto& a) { slice(a), a.state_length = 1; }),
            "causal_conv_with_state: state_length is 1, expected at least the reach of the taps, 2");
  EXPECT_EQ(error([&](auto& a) { slice(a), a.input_channels = 10; }),
            "causal_conv_with_state: input_channels is 10, but input has 9");
  EXPECT_EQ(error([&](auto& a) { slice(a), a.input_channel_offset = 5; }),
            "causal_conv_with_state: input_channel_offset is 5, but input has 9 channels, of which 5 are wanted");
  EXPECT_EQ(error([](auto& a) { a.input = {}; }), "causal_conv_with_state: input is required");
  EXPECT_EQ(error([&](auto& a) {
              a.input = floats({2, 5});
            }),
            "causal_conv_with_state: input has 2 dimensions, expected 3");
  EXPECT_EQ(error([&](auto& a) {
              a.input = floats({2, 5}), a.channels_last = 1;
            }),
            "causal_conv_with_state: input has 2 dimensions, expected at least 3");
  EXPECT_EQ(error([](auto& a) { a.input.dtype = DType::kI32; }),
            "causal_conv_with_state: input has type int32, expected float32 or float16 or bfloat16");
  EXPECT_EQ(error([&](auto& a) {
              a.weight = floats({5, 3});
            }),
            "causal_conv_with_state: weight has shape [5, 3], expected [channels = 5, 1, kernel_size]");
  EXPECT_EQ(error([&](auto& a) {
              a.weight = floats({5, 1, 0});
            }),
            "causal_conv_with_state: weight has shape [5, 1, 0], expected at least one tap");
  EXPECT_EQ(error([&](auto& a) {
              a.weight = floats({5, 1, 3}, DType::kF16);
            }),
            "causal_conv_with_state: weight has type float16, expected float32");
  EXPECT_EQ(error([&](auto& a) { a.bias = floats({4}); }),
            "causal_conv_with_state: bias has shape [4], expected [channels = 5]");
  EXPECT_EQ(error([&](auto& a) {
              a.past_state = floats({2, 2, 5});
            }),
            "causal_conv_with_state: past_state has shape [2, 2, 5], expected [2, 5, 2]");
  EXPECT_EQ(error([&](auto& a) {
              a.present_state = floats({1, 2, 5, 2});
            }),
            "causal_conv_with_state: present_state has shape [1, 2, 5, 2], expected [2, 5, 2]");
  EXPECT_EQ(error([&](auto& a) {
              a.state_update = floats({2, 0, 5});
            }),
            "causal_conv_with_state: state_update is given, but this call has no such output");
  EXPECT_EQ(error([](auto& a) {
              a.output.device = {DeviceType::kCuda, 0};
            }),
            "causal_conv_with_state: output is on another device than the other arguments");
  EXPECT_EQ(
      error([&](auto& a) {
        a.channels_last = 1, a.input = floats({2, 1, 2, 2, 2, 2}), a.state_window = 1, a.weight = floats({16, 1, 3});
      }),
      "causal_conv_with_state: input has 6 dimensions, too many for a state with a window");
  EXPECT_EQ(error([&](auto& a) {
              a.channels_last = 1, a.input = floats({2, 3, 5, 1}), a.input.shape = {2, 3, 5, 2};
              a.weight = floats({10, 1, 3}), a.output = floats({2, 3, 5, 2}), a.present_state = floats({2, 2, 5, 2});
            }),
            "causal_conv_with_state: input must be evenly strided over its channel axes");
  testkit::expect_error(ErrorCode::kInvalidArgument, "causal_conv_with_state: no variant \"fast\"; known are ref, cpu",
                        [&] { causal_conv_with_state(good, {.pool = &pool(), .variant = "fast"}); });
}

TEST(VarlenCausalConv, Rejections) {
  BoundTensors tensors;
  const Floats zeros(40000);
  const auto floats = [&](std::vector<int64_t> shape, DType dtype = DType::kF32) {
    return tensors.floats(dtype, std::move(shape), zeros);
  };
  VarlenCausalConvWithStateArgs good;
  good.output = floats({6, 8});
  good.final_state = floats({2, 8, 1});
  good.input = floats({6, 8});
  good.weight = floats({8, 1, 2});
  good.cumulative_sequence_length = tensors.integers({0, 2, 6});
  good.initial_state = floats({2, 8, 1});
  const auto error = [&](auto change) {
    VarlenCausalConvWithStateArgs args = good;
    change(args);
    return testkit::error_of([&] { varlen_causal_conv_with_state(args, {.pool = &pool()}); });
  };
  const std::string op = "varlen_causal_conv_with_state: ";
  EXPECT_EQ(error([](auto&) {}), "");
  EXPECT_EQ(error([](auto& a) { a.activation = "gelu"; }), op + "activation is 'gelu', expected none, silu or swish");
  EXPECT_EQ(error([](auto& a) { a.dilation = -1; }), op + "dilation is -1, expected at least 1");
  EXPECT_EQ(error([](auto& a) { a.state_update_capacity = 9; }), op + "state_update_capacity is 9, expected 0 to 8");
  EXPECT_EQ(error([&](auto& a) {
              a.input = floats({2, 3, 8});
            }),
            op + "input has shape [2, 3, 8], expected [num_tokens, channels]");
  EXPECT_EQ(error([&](auto& a) {
              a.weight = floats({7, 1, 2});
            }),
            op + "weight has shape [7, 1, 2], expected [channels = 8, 1, kernel_size] (from input)");
  EXPECT_EQ(error([](auto& a) { a.cumulative_sequence_length.dtype = DType::kI64; }),
            op + "cumulative_sequence_length has type int64, expected int32");
  EXPECT_EQ(error([](auto& a) { a.cumulative_sequence_length.shape[0] = 1; }),
            op + "cumulative_sequence_length has shape [1], expected [batch_size + 1] with at least one sequence");
  EXPECT_EQ(error([](auto& a) { a.initial_state = {}; }), op + "initial_state is required");
  EXPECT_EQ(error([&](auto& a) {
              a.initial_state = floats({2, 8, 2});
            }),
            op + "initial_state has shape [2, 8, 2], expected [batch_size = 2, channels = 8, state_length = 1] (from "
                 "input)");
  EXPECT_EQ(error([&](auto& a) {
              a.bias = floats({8, 1});
            }),
            op + "bias has shape [8, 1], expected [channels = 8] (from input)");
  EXPECT_EQ(error([&](auto& a) {
              a.capture_count = tensors.integers({1, 1});
            }),
            op + "capture_count must be absent when state_update_capacity is 0");
  EXPECT_EQ(error([](auto& a) { a.state_update_capacity = 1; }), op + "capture_count is required");
  EXPECT_EQ(error([&](auto& a) { a.state_update_capacity = 1, a.capture_count = tensors.integers({1}); }),
            op + "capture_count has shape [1], expected [batch_size = 2]");
  EXPECT_EQ(error([&](auto& a) { a.dilation = 12289; }),
            op + "weight and dilation need 12289 state positions of 4 bytes for each channel, at most 48 KiB are "
                 "supported");
  EXPECT_EQ(error([&](auto& a) {
              a.dilation = 12288, a.input = floats({6, 1}), a.output = floats({6, 1}), a.weight = floats({1, 1, 2});
              a.initial_state = floats({2, 1, 12288}), a.final_state = floats({2, 1, 12288});
            }),
            "");
  EXPECT_EQ(error([](auto& a) { a.group_size = 2; }), op + "group_size is 2, which needs kernel_delta");
  EXPECT_EQ(error([](auto& a) { a.delta_offset = 1; }), op + "delta_offset is 1, which needs kernel_delta");
  const auto dynamic = [&](auto& a) {
    a.kernel_delta = floats({6, 3, 4});
    a.previous_mask = floats({6, 1});
    a.group_size = 2;
  };
  EXPECT_EQ(error([&](auto& a) { dynamic(a); }), "");
  EXPECT_EQ(error([&](auto& a) { dynamic(a), a.delta_offset = 1; }), "");
  EXPECT_EQ(error([&](auto& a) { dynamic(a), a.previous_mask = {}; }),
            op + "kernel_delta and previous_mask must be given together");
  EXPECT_EQ(error([&](auto& a) { dynamic(a), a.kernel_delta = {}; }),
            op + "kernel_delta and previous_mask must be given together");
  EXPECT_EQ(error([&](auto& a) { dynamic(a), a.delta_offset = 2; }),
            op + "kernel_delta has 3 projected taps, expected at least delta_offset + 2 with delta_offset = 2");
  EXPECT_EQ(error([&](auto& a) { dynamic(a), a.delta_offset = -1; }), op + "delta_offset is -1, expected at least 0");
  EXPECT_EQ(error([&](auto& a) { dynamic(a), a.group_size = 3; }),
            op + "group_size is 3, expected a divisor of channels = 8");
  EXPECT_EQ(error([&](auto& a) { dynamic(a), a.group_size = 4; }),
            op + "kernel_delta has shape [6, 3, 4], expected [6, projected_taps, 2]");
  EXPECT_EQ(error([&](auto& a) { dynamic(a), a.previous_mask = floats({6}); }),
            op + "previous_mask has shape [6], expected [6, 1]");
  EXPECT_EQ(error([&](auto& a) {
              dynamic(a), a.previous_mask = floats({6, 1}, DType::kF16);
            }),
            op + "previous_mask has type float16, expected float32");
  EXPECT_EQ(error([&](auto& a) {
              dynamic(a), a.weight = floats({8, 1, 3}), a.initial_state = floats({2, 8, 2});
            }),
            op + "weight has 3 taps, expected 2 with kernel_delta");
  EXPECT_EQ(error([&](auto& a) {
              dynamic(a), a.dilation = 2, a.initial_state = floats({2, 8, 2});
            }),
            op + "dilation is 2, expected 1 with kernel_delta");
  EXPECT_EQ(error([&](auto& a) { dynamic(a), a.activation = "silu"; }),
            op + "activation is 'silu', expected none with kernel_delta");
  EXPECT_EQ(error([&](auto& a) { dynamic(a), a.bias = floats({8}); }), op + "bias must be absent with kernel_delta");
  EXPECT_EQ(error([&](auto& a) {
              a.final_state = floats({2, 8});
            }),
            op + "final_state has shape [2, 8], expected [2, 8, 1]");
  EXPECT_EQ(error([](auto& a) { a.output = {}; }), op + "output is required");
}

}  // namespace
}  // namespace shoal
