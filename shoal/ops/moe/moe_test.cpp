// QMoE: every weight format, activation and layout against f64, for the reference and every instruction set; equal bits
// where the contract demands them.
#include "shoal/ops/moe/moe.h"

#include <gtest/gtest.h>

#include <cstdlib>

#include "shoal/cpu/thread_pool.h"
#include "shoal/ops/moe/moe_cases.h"

namespace shoal {
namespace {

using moe_cases::at;
using moe_cases::Call;
using moe_cases::Case;
using testkit::GuardedTensor;

cpu::ThreadPool& pool() {
  static cpu::ThreadPool pool(2);
  return pool;
}

std::vector<float> run(QMoEArgs args, cpu::Isa isa, std::string_view variant = "", cpu::ThreadPool& threads = pool()) {
  GuardedTensor output(args.input.dtype, {args.input.dims().begin(), args.input.dims().end()});
  args.output = output.view();
  Workspace workspace(qmoe_workspace_bytes(args, threads.num_threads()));
  qmoe(args, {.pool = &threads, .workspace = &workspace, .isa = isa, .variant = variant});
  EXPECT_TRUE(output.intact());
  return output.values();
}

// Weights and activations are about 1, sums of k terms of 1 / sqrt(k): the error is that of the roundings to T.
double tolerance(DType dtype) { return dtype == DType::kF32 ? 2e-5 : dtype == DType::kF16 ? 0.01 : 0.06; }

std::vector<Case> cases() {
  std::vector<Case> list;
  const auto add = [&](Case c) {
    c.seed = list.size() + 1;
    list.push_back(std::move(c));
  };
  const DType f32 = DType::kF32, f16 = DType::kF16, bf16 = DType::kBF16;
  // Integers: widths, blocks, zero points, rows.
  for (const int bits : {2, 4, 8}) {
    const std::string width = concat("int", bits);
    add({.name = width + " block 16", .bits1 = bits, .bits2 = bits, .block = 16, .bias = true});
    add({.name = width + " block 32 zeros",
         .dtype = f16,
         .h = 96,
         .i = 160,
         .bits1 = bits,
         .bits2 = bits,
         .zeros = true});
    add({.name = width + " block 64", .dtype = bf16, .i = 128, .bits1 = bits, .bits2 = bits, .block = 64});
    add({.name = width + " block 128",
         .t = 9,
         .h = 256,
         .i = 128,
         .bits1 = bits,
         .bits2 = bits,
         .block = 128,
         .zeros = true});
    add({.name = width + " rows",
         .h = 72,
         .i = 40,
         .bits1 = bits,
         .bits2 = bits,
         .block = -1,
         .bias = true,
         .activation = "silu"});
    add({.name = width + " odd rows",
         .dtype = f16,
         .h = 21,
         .i = 19,
         .bits1 = bits,
         .bits2 = bits,
         .block = -1,
         .activation = "relu"});
  }
  add({.name = "int4 byte zeros", .h = 128, .i = 96, .zeros = true, .wide_zeros = true});
  add({.name = "int2/4", .dtype = f16, .bits1 = 2, .bits2 = 4, .block = 64});
  add({.name = "int4/2", .bits1 = 4, .bits2 = 2, .zeros = true});
  add({.name = "int8/4", .t = 33, .bits1 = 8, .bits2 = 4});
  for (const auto& [b1, b2] : {std::pair{3, 4}, {3, 3}, {4, 3}, {3, 8}, {2, 3}}) {
    add({.name = concat("int", b1, "/", b2),
         .dtype = b1 == 3 ? bf16 : f16,
         .t = 6,
         .h = 128,
         .i = 96,
         .bits1 = b1,
         .bits2 = b2,
         .zeros = b2 == 4});
  }
  // Activations and gates.
  for (const char* activation : {"relu", "gelu", "silu", "identity", "relu2"}) {
    add({.name = activation, .bias = true, .activation = activation});
    add({.name = concat(activation, " with fc3"), .bias = true, .activation = activation, .fc3 = true});
  }
  for (const int64_t fusion : {1, 2}) {
    add({.name = concat("geglu ", fusion), .bias = true, .activation = "geglu", .fusion = fusion});
    add({.name = concat("swiglu limited ", fusion),
         .bias = true,
         .fusion = fusion,
         .alpha = 1.702f,
         .beta = 1.0f,
         .limit = 0.7f});
    add({.name = concat("swiglu limited after ", fusion),
         .bias = true,
         .fusion = fusion,
         .limit = 0.3f,
         .limit_after = true});
  }
  add({.name = "swiglu fusion 0", .fusion = 0});
  add({.name = "swiglu fc3", .zeros = true, .bias = true, .fc3 = true});
  add({.name = "swiglu 2, odd tile", .i = 80, .block = 16, .fusion = 2});
  // Routing.
  add({.name = "plain softmax", .e = 8, .k = 3, .normalize = false});
  add({.name = "router_weights", .e = 8, .k = 3, .normalize = false, .router_weights = true});
  add({.name = "sparse mixer", .e = 8, .k = 2, .mixer = true});
  add({.name = "shared", .e = 6, .k = 2, .shared = 2});
  add({.name = "shared, plain", .e = 5, .k = 4, .normalize = false, .shared = 1});
  add({.name = "one expert", .t = 70, .e = 1, .k = 1});
  add({.name = "many experts", .t = 3, .h = 32, .i = 32, .e = 64, .k = 10});
  add({.name = "batched", .dtype = f16, .batched = true});
  add({.name = "empty", .t = 0});
  add({.name = "300 rows", .t = 300, .h = 32, .i = 32, .e = 2, .k = 2, .activation = "relu"});
  // fp8.
  for (const DType dtype : {f32, f16, bf16}) {
    add({.name = "fp8 experts", .dtype = dtype, .h = 72, .i = 40, .quant = "fp8", .block = -1, .bias = true});
    add({.name = "fp8 rows",
         .dtype = dtype,
         .h = 64,
         .i = 48,
         .quant = "fp8",
         .block = 0,
         .scale_type = f32,
         .row_scales = true});
    for (const DType scale_type : {f32, f16, bf16}) {
      add({.name = concat("fp8 blocks ", to_string(scale_type)),
           .dtype = dtype,
           .h = 72,
           .i = 40,
           .e = 8,
           .k = 3,
           .quant = "fp8",
           .block = 32,
           .scale_type = scale_type});
    }
  }
  for (const int64_t fusion : {0, 1, 2}) {
    add({.name = concat("fp8 blocks fusion ", fusion),
         .dtype = f16,
         .t = 7,
         .h = 160,
         .i = 80,
         .quant = "fp8",
         .block = 128,
         .bias = true,
         .fusion = fusion,
         .fc3 = fusion == 0});
  }
  add({.name = "fp8 rows f16",
       .dtype = f16,
       .quant = "fp8",
       .block = 0,
       .activation = "relu",
       .scale_type = f16,
       .row_scales = true});
  // fp4.
  for (const char* quant : {"fp4", "wfp4afp8", "nvfp4"}) {
    for (const int64_t prepacked : {-1, 0, 1}) {
      add({.name = concat(quant, " ", prepacked),
           .dtype = prepacked == 0 ? bf16 : f16,
           .h = 96,
           .i = 64,
           .quant = quant,
           .block = -1,
           .bias = true,
           .prepacked = prepacked});
      add({.name = concat(quant, " concatenated ", prepacked),
           .h = 64,
           .i = 96,
           .quant = quant,
           .block = quant[0] == 'n' ? 16 : 32,
           .fusion = 2,
           .prepacked = prepacked});
    }
    add({.name = concat(quant, " relu"), .t = 2, .h = 32, .i = 160, .quant = quant, .block = -1, .activation = "relu"});
  }
  add({.name = "nvfp4 row-packed, other shape", .h = 48, .i = 80, .quant = "nvfp4", .block = -1, .prepacked = 1});
  return list;
}

TEST(QMoE, AgreesWithF64) {
  for (const Case& c : cases()) {
    SCOPED_TRACE(concat(c.name, " ", to_string(c.dtype), " T ", c.t, " seed ", c.seed));
    const Call call(c);
    const std::vector<double> wanted = call.expected();
    std::vector<float> expected(wanted.begin(), wanted.end());
    for (const cpu::Isa isa : cpu::available_isas()) {
      const testkit::Comparison result = testkit::compare(run(call.args, isa), expected, 0.0, tolerance(c.dtype));
      EXPECT_TRUE(result.ok) << cpu::to_string(isa) << ": " << result.text;
    }
    const testkit::Comparison result =
        testkit::compare(run(call.args, cpu::Isa::kScalar, "ref"), expected, 0.0, tolerance(c.dtype));
    EXPECT_TRUE(result.ok) << "ref: " << result.text;
  }
}

// The order of the sums is part of the contract: without exponentials every path gives the reference's bits.
TEST(QMoE, BitsOfTheReference) {
  int compared = 0;
  for (Case c : cases()) {
    if (c.activation == "swiglu" && !c.fc3) {  // the same weights with an activation that rounds alike everywhere
      c.activation = c.bits1 == 3 || c.bits2 == 3 ? "swiglu" : "identity";
    }
    if (c.activation == "gelu" || c.activation == "geglu" || c.activation == "silu" || c.activation == "swiglu") {
      continue;
    }
    c.limit_after = false;
    SCOPED_TRACE(concat(c.name, " ", to_string(c.dtype), " seed ", c.seed));
    const Call call(c);
    const std::vector<float> expected = run(call.args, cpu::Isa::kScalar, "ref");
    for (const cpu::Isa isa : cpu::available_isas()) {
      EXPECT_EQ(run(call.args, isa), expected) << cpu::to_string(isa);
    }
    ++compared;
  }
  EXPECT_GT(compared, 60);
}

// One token at a time, tiles of tokens, one thread or three: the same bits.
TEST(QMoE, RowsDoNotDependOnEachOther) {
  cpu::ThreadPool one(1), three(3);
  for (Case c : cases()) {
    if (c.t == 0 || c.t > 70) {
      continue;
    }
    c.t = 19;
    SCOPED_TRACE(concat(c.name, " ", to_string(c.dtype), " seed ", c.seed));
    const Call call(c);
    const cpu::Isa isa = cpu::available_isas().back();
    const std::vector<float> together = run(call.args, isa);
    EXPECT_EQ(run(call.args, isa, "", one), together);
    EXPECT_EQ(run(call.args, isa, "cpu", three), together);
    for (const int64_t tile : {1, 2, 17}) {
      QMoEArgs args = call.args;
      args.row_tile_size = tile;
      EXPECT_EQ(run(args, isa), together) << "row tile " << tile;
    }
    if (!c.batched) {
      QMoEArgs args = call.args;
      args.input = args.input.rows(11, 12);
      args.router_probs = args.router_probs.rows(11, 12);
      args.router_weights = args.router_weights ? args.router_weights.rows(11, 12) : TensorView();
      EXPECT_EQ(run(args, isa), std::vector<float>(together.begin() + 11 * c.h, together.begin() + 12 * c.h));
    }
  }
}

// Few and many rows of an expert, balanced or not, empty experts between.
TEST(QMoE, SkewedRouting) {
  for (const std::vector<int64_t>& rows :
       {std::vector<int64_t>{40, 0, 0, 0}, {1, 31, 0, 8}, {0, 2, 3, 35}, {10, 10, 10, 10}}) {
    Case c{.name = "skewed", .dtype = DType::kF16, .t = 40, .h = 128, .i = 64, .k = 1, .bits1 = 2, .bits2 = 4};
    c.normalize = false;
    Call call(c);
    int64_t t = 0;
    for (int64_t e = 0; e < 4; ++e) {
      for (int64_t i = 0; i < rows[at(e)]; ++i, ++t) {
        for (int64_t other = 0; other < 4; ++other) {
          call.logits[at(t * 4 + other)] = other == e ? 3.0f : -1.0f;
          write_element(c.dtype, call.args.router_probs.data, t * 4 + other, call.logits[at(t * 4 + other)]);
        }
      }
    }
    const std::vector<double> wanted = call.expected();
    const std::vector<float> expected(wanted.begin(), wanted.end());
    for (const cpu::Isa isa : cpu::available_isas()) {
      const testkit::Comparison result = testkit::compare(run(call.args, isa), expected, 0.0, tolerance(c.dtype));
      EXPECT_TRUE(result.ok) << cpu::to_string(isa) << ": " << result.text;
    }
  }
}

// Weights of one code have a closed form: every a1 is (code - zero) scale sum(x).
TEST(QMoE, ConstantCodes) {
  for (const auto& [b1, b2] : {std::pair{2, 2}, {2, 4}, {4, 2}, {8, 8}}) {
    Case c{.name = "constant", .t = 2, .e = 2, .k = 1, .bits1 = b1, .bits2 = b2, .activation = "identity"};
    Call call(c);
    const auto fill = [](const TensorView& view, int byte) { std::memset(view.data, byte, view.num_bytes()); };
    fill(call.args.fc1_experts_weights, 0xff);  // the largest code
    fill(call.args.fc2_experts_weights, 0xff);
    for (const TensorView* scales : {&call.args.fc1_scales, &call.args.fc2_scales}) {
      std::fill(scales->as<float>(), scales->as<float>() + scales->num_elements(), 0x1p-6f);
    }
    std::fill(call.args.input.as<float>(), call.args.input.as<float>() + 2 * c.h, 1.0f);
    const float a1 = static_cast<float>((1 << (b1 - 1)) - 1) * 0x1p-6f * 64;
    const float y = static_cast<float>((1 << (b2 - 1)) - 1) * 0x1p-6f * 64 * a1;
    for (const cpu::Isa isa : cpu::available_isas()) {
      EXPECT_EQ(run(call.args, isa), std::vector<float>(at(2 * c.h), y)) << b1 << " " << b2;
    }
  }
}

// Strided inputs, biases and scales, an output over the input.
TEST(QMoE, ViewsAndAliasing) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    Case c{.name = "views", .dtype = dtype, .t = 4, .bias = true};
    const Call call(c);
    const cpu::Isa isa = cpu::available_isas().back();
    const std::vector<float> expected = run(call.args, isa);

    QMoEArgs args = call.args;
    moe_cases::Memory memory;
    const TensorView wide = memory.make(dtype, {c.t, c.h, 2});
    for (int64_t i = 0; i < c.t * c.h; ++i) {
      write_element(dtype, wide.data, 2 * i, call.x[at(i)]);
      write_element(dtype, wide.data, 2 * i + 1, 1e9f);
    }
    args.input = TensorView(wide.data, dtype, {c.t, c.h});
    args.input.strides = {2 * c.h, 2};
    const TensorView bias = memory.make(dtype, {c.h, c.e});  // transposed
    for (int64_t e = 0; e < c.e; ++e) {
      for (int64_t n = 0; n < c.h; ++n) {
        write_element(dtype, bias.data, n * c.e + e, call.fc2.bias_values[at(e * c.h + n)]);
      }
    }
    args.fc2_experts_bias = TensorView(bias.data, dtype, {c.e, c.h});
    args.fc2_experts_bias.strides = {1, c.e};
    EXPECT_EQ(run(args, isa), expected);

    args.output = args.input;  // over the input, with its strides
    Workspace workspace(qmoe_workspace_bytes(args, 2));
    qmoe(args, {.pool = &pool(), .workspace = &workspace, .isa = isa});
    for (int64_t i = 0; i < c.t * c.h; ++i) {
      ASSERT_EQ(read_element(dtype, wide.data, 2 * i), expected[at(i)]);
      ASSERT_EQ(read_element(dtype, wide.data, 2 * i + 1), testkit::rounded_to(dtype, 1e9f));
    }
  }
}

// E4M3 and E8M0 codes that are NaN, and the smallest E8M0, reach the output as such.
TEST(QMoE, SpecialCodes) {
  const cpu::Isa isa = cpu::available_isas().back();
  for (const int64_t block : {-1, 32}) {
    Call call({.name = "nan", .t = 3, .e = 1, .k = 1, .quant = "fp8", .block = block, .activation = "relu"});
    call.args.fc2_experts_weights.as<uint8_t>()[5 * 64 + 3] = block > 0 ? 0xff : 0x7f;
    for (const std::vector<float>& y : {run(call.args, isa), run(call.args, isa, "ref")}) {
      for (int64_t n = 0; n < 64; ++n) {
        EXPECT_EQ(std::isnan(y[at(n)]), n == 5);
      }
    }
  }
  Call call({.name = "e8m0", .t = 1, .e = 1, .k = 1, .quant = "fp4", .block = -1, .activation = "relu"});
  call.args.fc2_scales.as<uint8_t>()[2 * 7] = 255;
  std::memset(call.args.fc2_scales.as<uint8_t>() + 2 * 9, 0, 2);  // 2^-127, not 0
  call.args.fc2_global_scale.as<float>()[0] = 0x1p100f;
  const std::vector<float> y = run(call.args, isa);
  EXPECT_TRUE(std::isnan(y[7]));
  EXPECT_NE(y[9], 0.0f);
  EXPECT_LT(std::fabs(y[9]), 0x1p-15f);
}

// Calibration capture is a matter of CUDA runs: a CPU run writes nothing.
TEST(QMoE, NoCaptureOnTheCpu) {
  const std::string folder = testing::TempDir() + "no_such_folder_for_capture";
  ASSERT_EQ(setenv("ORT_QMOE_CALIBRATION_CAPTURE_DIR", folder.c_str(), 1), 0);
  Call call({.name = "capture", .t = 16, .quant = "nvfp4", .block = -1});
  EXPECT_NO_THROW(run(call.args, cpu::available_isas().back()));
  unsetenv("ORT_QMOE_CALIBRATION_CAPTURE_DIR");
}

}  // namespace
}  // namespace shoal
