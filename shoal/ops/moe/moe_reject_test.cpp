// QMoE and MoEPacked: every rejection by its message; the output stays as it was.
#include <gtest/gtest.h>

#include <functional>

#include "shoal/cpu/thread_pool.h"
#include "shoal/ops/moe/moe_cases.h"
#include "testkit/expect_error.h"

namespace shoal {
namespace {

using moe_cases::Call;
using moe_cases::Case;
using testkit::expect_error;

cpu::ThreadPool& pool() {
  static cpu::ThreadPool pool(1);
  return pool;
}

struct Rejection {
  std::string_view part;  // of the message
  std::function<void(QMoEArgs&)> change;
};

TensorView cut(TensorView view, int axis, int64_t extent) {
  view.shape[static_cast<size_t>(axis)] = extent;
  return view;
}
TensorView typed(TensorView view, DType dtype) {
  view.dtype = dtype;
  return view;
}

void check(const Case& c, const std::vector<Rejection>& rejections) {
  const Call call(c);
  testkit::GuardedTensor output(c.dtype, {c.t, c.h});
  Workspace workspace(qmoe_workspace_bytes(call.args, 1));
  const OpContext context{.pool = &pool(), .workspace = &workspace};
  for (const Rejection& rejection : rejections) {
    QMoEArgs args = call.args;
    args.output = output.view();
    rejection.change(args);
    SCOPED_TRACE(concat(c.name, ": ", rejection.part));
    expect_error(ErrorCode::kInvalidArgument, concat("qmoe: ", rejection.part), [&] { qmoe(args, context); });
  }
  for (const float value : output.values()) {
    ASSERT_TRUE(std::isnan(value)) << "written";
  }
  EXPECT_TRUE(output.intact());
}

TEST(QMoERejects, Attributes) {
  check({.name = "int4", .e = 4},
        {{"k is 0, expected 1 to 4", [](QMoEArgs& a) { a.k = 0; }},
         {"k is 5, expected 1 to 4", [](QMoEArgs& a) { a.k = 5; }},
         {"activation_type is 'tanh'", [](QMoEArgs& a) { a.activation_type = "tanh"; }},
         {"quant_type is 'fp6'", [](QMoEArgs& a) { a.quant_type = "fp6"; }},
         {"expert_weight_bits is 5", [](QMoEArgs& a) { a.expert_weight_bits = 5; }},
         {"fc1_expert_weight_bits is 1", [](QMoEArgs& a) { a.fc1_expert_weight_bits = 1; }},
         {"fc2_expert_weight_bits is 16", [](QMoEArgs& a) { a.fc2_expert_weight_bits = 16; }},
         {"fc3_expert_weight_bits is 8, expected 4", [](QMoEArgs& a) { a.fc3_expert_weight_bits = 8; }},
         {"expert_weight_bits is 4, expected 8 with quant_type fp8", [](QMoEArgs& a) { a.quant_type = "fp8"; }},
         {"block_size is 24", [](QMoEArgs& a) { a.block_size = 24; }},
         {"block_size is 8", [](QMoEArgs& a) { a.block_size = 8; }},
         {"block_size is 128, which does not divide 64", [](QMoEArgs& a) { a.block_size = 128; }},
         {"swiglu_fusion is 3", [](QMoEArgs& a) { a.swiglu_fusion = 3; }},
         {"weights_prepacked is 2", [](QMoEArgs& a) { a.weights_prepacked = 2; }},
         {"weights_prepacked 1", [](QMoEArgs& a) { a.weights_prepacked = 1; }},
         {"normalize_routing_weights is 2", [](QMoEArgs& a) { a.normalize_routing_weights = 2; }},
         {"use_sparse_mixer is -1", [](QMoEArgs& a) { a.use_sparse_mixer = -1; }},
         {"use_sparse_mixer needs 8 or 16 experts", [](QMoEArgs& a) { a.use_sparse_mixer = 1; }},
         {"use_sparse_mixer needs k = 2", [](QMoEArgs& a) { a.use_sparse_mixer = 1, a.k = 1; }},
         {"num_shared_experts is 4", [](QMoEArgs& a) { a.num_shared_experts = 4; }},
         {"num_shared_experts excludes use_sparse_mixer",
          [](QMoEArgs& a) { a.num_shared_experts = 1, a.use_sparse_mixer = 1; }},
         {"num_shared_experts excludes router_weights",
          [](QMoEArgs& a) { a.num_shared_experts = 1, a.router_weights = a.router_probs; }},
         {"k is 4, expected 1 to 3", [](QMoEArgs& a) { a.num_shared_experts = 1, a.k = 4; }},
         {"swiglu_limit is not a number", [](QMoEArgs& a) { a.swiglu_limit = std::nanf(""); }},
         {"swiglu_limit_after_activation needs activation_type swiglu",
          [](QMoEArgs& a) { a.swiglu_limit_after_activation = 1, a.activation_type = "geglu"; }},
         {"swiglu_fusion is 0, expected 1 or 2 with activation_type geglu",
          [](QMoEArgs& a) { a.activation_type = "geglu", a.swiglu_fusion = 0; }},
         {"row_tile_size is -1", [](QMoEArgs& a) { a.row_tile_size = -1; }}});
}

TEST(QMoERejects, Tensors) {
  check(
      {.name = "int4", .e = 4, .zeros = true, .bias = true},
      {{"input", [](QMoEArgs& a) { a.input = TensorView(); }},
       {"input has type int8", [](QMoEArgs& a) { a.input.dtype = DType::kI8; }},
       {"input has 1 dimensions, expected 2 or 3",
        [](QMoEArgs& a) { a.input = TensorView(a.input.data, DType::kF32, {64}); }},
       {"router_probs", [](QMoEArgs& a) { a.router_probs = cut(a.router_probs, 0, 4); }},
       {"router_probs has type float16", [](QMoEArgs& a) { a.router_probs = typed(a.router_probs, DType::kF16); }},
       {"router_weights", [](QMoEArgs& a) { a.router_weights = cut(a.router_probs, 1, 3); }},
       {"fc1_experts_weights", [](QMoEArgs& a) { a.fc1_experts_weights = TensorView(); }},
       {"fc1_experts_weights", [](QMoEArgs& a) { a.fc1_experts_weights = cut(a.fc1_experts_weights, 0, 3); }},
       {"fc1_experts_weights", [](QMoEArgs& a) { a.fc1_experts_weights = cut(a.fc1_experts_weights, 2, 31); }},
       {"fc1_experts_weights has 127 outputs",
        [](QMoEArgs& a) { a.fc1_experts_weights = cut(a.fc1_experts_weights, 1, 127); }},
       {"fc1_experts_weights has type float8e4m3fn",
        [](QMoEArgs& a) { a.fc1_experts_weights = typed(a.fc1_experts_weights, DType::kF8E4M3); }},
       {"fc1_experts_weights must be contiguous in its last dimension",
        [](QMoEArgs& a) { a.fc1_experts_weights.strides[2] = 2; }},
       {"fc1_scales is required", [](QMoEArgs& a) { a.fc1_scales = TensorView(); }},
       {"fc1_scales has type float16; scales must match the activation type",
        [](QMoEArgs& a) { a.fc1_scales = typed(a.fc1_scales, DType::kF16); }},
       {"fc2_scales has shape", [](QMoEArgs& a) { a.fc2_scales = cut(a.fc2_scales, 2, 1); }},
       {"fc1_experts_bias", [](QMoEArgs& a) { a.fc1_experts_bias = cut(a.fc1_experts_bias, 1, 64); }},
       {"fc2_experts_bias has type bfloat16",
        [](QMoEArgs& a) { a.fc2_experts_bias = typed(a.fc2_experts_bias, DType::kBF16); }},
       {"fc2_experts_weights", [](QMoEArgs& a) { a.fc2_experts_weights = cut(a.fc2_experts_weights, 1, 63); }},
       {"fc2_experts_weights", [](QMoEArgs& a) { a.fc2_experts_weights = TensorView(); }},
       {"fc1_zero_points has shape", [](QMoEArgs& a) { a.fc1_zero_points = cut(a.fc1_zero_points, 1, 2); }},
       {"fc2_zero_points has type int8", [](QMoEArgs& a) { a.fc2_zero_points = typed(a.fc2_zero_points, DType::kI8); }},
       {"fc1_global_scale must be absent", [](QMoEArgs& a) { a.fc1_global_scale = cut(a.fc1_scales, 1, 1); }},
       {"fc1_act_scale must be absent", [](QMoEArgs& a) { a.fc1_act_scale = a.router_probs; }},
       {"fc3_scales is given without fc3_experts_weights", [](QMoEArgs& a) { a.fc3_scales = a.fc1_scales; }},
       {"fc3_zero_points is given without", [](QMoEArgs& a) { a.fc3_zero_points = a.fc1_zero_points; }},
       {"fc3_experts_weights must be absent with swiglu_fusion 1",
        [](QMoEArgs& a) { a.fc3_experts_weights = a.fc1_experts_weights; }},
       {"fc3_experts_weights must be absent with activation_type geglu",
        [](QMoEArgs& a) { a.fc3_experts_weights = a.fc1_experts_weights, a.activation_type = "geglu"; }},
       {"output has shape", [](QMoEArgs& a) { a.output = cut(a.output, 0, 2); }},
       {"output has type", [](QMoEArgs& a) { a.output = typed(a.output, DType::kBF16); }}});
  check({.name = "small", .t = 1, .h = 32, .i = 32, .e = 2, .block = 16},
        {{"input has 8 columns, expected at least 16", [](QMoEArgs& a) { a.input = cut(a.input, 1, 8); }},
         {"fc1_experts_weights gives an inter_size of 8",
          [](QMoEArgs& a) { a.fc1_experts_weights = cut(a.fc1_experts_weights, 1, 16); }},
         {"fc1_zero_points needs a block_size of at least 32",
          [](QMoEArgs& a) { a.fc1_zero_points = a.fc1_experts_weights; }}});
  check({.name = "rows", .t = 1, .block = -1},
        {{"fc1_zero_points must be absent without block_size",
          [](QMoEArgs& a) { a.fc1_zero_points = a.fc1_experts_weights; }},
         {"fc1_scales has shape", [](QMoEArgs& a) { a.fc1_scales = cut(a.fc1_scales, 1, 5); }}});
}

TEST(QMoERejects, PadBits) {
  check({.name = "pad", .t = 1, .h = 21, .i = 19, .bits1 = 2, .bits2 = 4, .block = -1, .activation = "relu"},
        {{"fc1_experts_weights[0, 1] has bits set beyond its last code",
          [](QMoEArgs& a) { a.fc1_experts_weights.as<uint8_t>()[6 + 5] |= 0x80; }}});
  check({.name = "pad", .t = 1, .h = 96, .bits1 = 4, .zeros = true},
        {{"fc1_zero_points[0, 0] has bits set", [](QMoEArgs& a) { a.fc1_zero_points.as<uint8_t>()[1] |= 0x10; }}});
}

TEST(QMoERejects, Int3) {
  check({.name = "int3", .dtype = DType::kBF16, .t = 1, .bits1 = 3, .zeros = true},
        {{"activation_type is geglu, expected swiglu with 3-bit weights",
          [](QMoEArgs& a) { a.activation_type = "geglu"; }},
         {"swiglu_fusion is 2, expected 1 with 3-bit", [](QMoEArgs& a) { a.swiglu_fusion = 2; }},
         {"block_size is 16, expected 32, 64 or 128", [](QMoEArgs& a) { a.block_size = 16; }},
         {"block_size is -1, expected 32, 64 or 128", [](QMoEArgs& a) { a.block_size = -1; }},
         {"fc1_zero_points[0, 0] has the zero point 5, expected 4",
          [](QMoEArgs& a) { a.fc1_zero_points.as<uint8_t>()[0] = 0x25; }}});
  check({.name = "int3 tail", .dtype = DType::kBF16, .t = 1, .bits1 = 3, .zeros = true},
        {{"fc1_zero_points[0, 0] has bits set", [](QMoEArgs& a) { a.fc1_zero_points.as<uint8_t>()[0] |= 0x80; }}});
  Call call({.name = "int3", .t = 1, .bits1 = 3});
  expect_error(ErrorCode::kInvalidArgument, "qmoe: input has type float32, expected float16 or bfloat16",
               [&] { qmoe_shapes(call.args); });
}

TEST(QMoERejects, Fp8) {
  check({.name = "fp8 blocks", .quant = "fp8", .block = 32},
        {{"fc1_scales is required", [](QMoEArgs& a) { a.fc1_scales = TensorView(); }},
         {"fc1_scales has type int8", [](QMoEArgs& a) { a.fc1_scales = typed(a.fc1_scales, DType::kI8); }},
         {"fc1_scales has shape", [](QMoEArgs& a) { a.fc1_scales = cut(a.fc1_scales, 1, 2); }},
         {"fc1_global_scale must be absent", [](QMoEArgs& a) { a.fc1_global_scale = a.router_probs; }},
         {"fc2_zero_points must be absent with quant_type fp8",
          [](QMoEArgs& a) { a.fc2_zero_points = a.fc1_experts_weights; }},
         {"fc2_experts_weights has shape [4, 64, 32], expected row-major",
          [](QMoEArgs& a) { a.fc2_experts_weights = cut(a.fc2_experts_weights, 2, 32); }},
         {"fc1_experts_weights has type uint8",
          [](QMoEArgs& a) { a.fc1_experts_weights = typed(a.fc1_experts_weights, DType::kU8); }},
         {"fc2_expert_weight_bits is 4", [](QMoEArgs& a) { a.fc2_expert_weight_bits = 4; }},
         {"activation_type geglu needs quant_type int", [](QMoEArgs& a) { a.activation_type = "geglu"; }}});
  check({.name = "fp8 experts", .quant = "fp8", .block = -1},
        {{"fc1_global_scale is required", [](QMoEArgs& a) { a.fc1_global_scale = TensorView(); }},
         {"fc1_global_scale must be absent with fc1_scales", [](QMoEArgs& a) { a.fc1_scales = a.router_probs; }},
         {"fc2_global_scale has shape", [](QMoEArgs& a) { a.fc2_global_scale = cut(a.fc2_global_scale, 0, 3); }},
         {"fc3_experts_weights with quant_type fp8 needs a block_size",
          [](QMoEArgs& a) { a.fc3_experts_weights = a.fc1_experts_weights, a.swiglu_fusion = 0; }}});
}

TEST(QMoERejects, Fp4) {
  for (const char* quant : {"fp4", "nvfp4", "wfp4afp8"}) {
    const bool nv = quant[0] == 'n';
    check({.name = quant, .quant = quant, .block = -1},
          {{"fc1_scales is required", [](QMoEArgs& a) { a.fc1_scales = TensorView(); }},
           {"fc1_scales has type float32", [](QMoEArgs& a) { a.fc1_scales = typed(a.fc1_scales, DType::kF32); }},
           {"fc1_scales has shape", [](QMoEArgs& a) { a.fc1_scales = cut(a.fc1_scales, 2, 1); }},
           {"fc2_global_scale is required", [](QMoEArgs& a) { a.fc2_global_scale = TensorView(); }},
           {"fc2_global_scale has type",
            [](QMoEArgs& a) { a.fc2_global_scale = typed(a.fc2_global_scale, DType::kF16); }},
           {"fc1_zero_points must be absent", [](QMoEArgs& a) { a.fc1_zero_points = a.fc1_experts_weights; }},
           {"expert_weight_bits is 8", [](QMoEArgs& a) { a.expert_weight_bits = 8; }},
           {nv ? "block_size is 32, expected -1 or 16" : "block_size is 16, expected -1 or 32",
            [nv](QMoEArgs& a) { a.block_size = nv ? 32 : 16; }},
           {"fc3_experts_weights with quant_type",
            [](QMoEArgs& a) { a.fc3_experts_weights = a.fc1_experts_weights, a.swiglu_fusion = 0; }},
           {"fc2_experts_weights", [](QMoEArgs& a) { a.fc2_experts_weights = cut(a.fc2_experts_weights, 2, 31); }},
           {"weights_prepacked is 3", [](QMoEArgs& a) { a.weights_prepacked = 3; }}});
  }
  check(
      {.name = "fp8 activations", .quant = "wfp4afp8", .block = -1},
      {{"fc1_act_scale has type float16",
        [](QMoEArgs& a) { a.fc1_act_scale = typed(a.fc1_global_scale, DType::kF16); }},
       {"fc2_act_scale has shape", [](QMoEArgs& a) { a.fc2_act_scale = cut(a.fc1_global_scale, 0, 3); }},
       {"fc1_act_block_scale has type", [](QMoEArgs& a) { a.fc1_act_block_scale = typed(a.fc1_scales, DType::kU8); }}});
  check(
      {.name = "fp4 with activation scales", .quant = "fp4", .block = -1},
      {{"fc2_act_scale must be absent with quant_type fp4", [](QMoEArgs& a) { a.fc2_act_scale = a.fc1_global_scale; }},
       {"fc2_act_block_scale must be absent", [](QMoEArgs& a) { a.fc2_act_block_scale = a.fc1_scales; }}});
  // H = 64 columns in blocks of 32, but I = 40 has none.
  Case c{.name = "blocks", .t = 1, .i = 64, .quant = "fp4", .block = -1, .activation = "relu"};
  check(c, {{"block_size is 32, which does not divide 40, the inputs of fc2_experts_weights", [](QMoEArgs& a) {
               a.fc1_experts_weights = cut(a.fc1_experts_weights, 2, 20);
               a.fc1_scales = cut(a.fc1_scales, 1, 40);
               a.fc2_experts_weights = cut(a.fc2_experts_weights, 1, 40);
             }}});
}

TEST(QMoERejects, UnknownVariant) {
  Call call({.name = "variant"});
  testkit::GuardedTensor output(DType::kF32, {call.c.t, call.c.h});
  call.args.output = output.view();
  expect_error(ErrorCode::kInvalidArgument, "known are ref, cpu",
               [&] { qmoe(call.args, {.pool = &pool(), .variant = "gpu"}); });
}

}  // namespace
}  // namespace shoal
