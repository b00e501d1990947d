// QMoE and MoEGroupRouter against ONNX Runtime 1.32 on the CPU (tests/golden/make_moe_golden.py).
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <map>

#include "shoal/cpu/thread_pool.h"
#include "shoal/ops/moe/moe.h"
#include "shoal/ops/moe_router/moe_router.h"
#include "testkit/guarded_tensor.h"

namespace shoal {
namespace {

using testkit::GuardedTensor;

cpu::ThreadPool& pool() {
  static cpu::ThreadPool pool(2);
  return pool;
}

class Golden {
 public:
  explicit Golden(const std::string& name) : file_(concat(SHOAL_TEST_DATA, "/moe/", name, ".bin"), std::ios::binary) {
    if (!file_) {
      ADD_FAILURE() << "no golden file " << name;
      return;
    }
    for (uint32_t left = next<uint32_t>(); left > 0; --left) {
      std::string key(next<uint32_t>(), '\0');
      file_.read(key.data(), static_cast<std::streamsize>(key.size()));
      const DType dtype = dtype_of(next<uint32_t>());
      std::vector<int64_t> shape(next<uint32_t>());
      for (int64_t& extent : shape) {
        extent = next<int64_t>();
      }
      Tensor tensor(dtype, shape);
      EXPECT_EQ(next<uint64_t>(), tensor.view().num_bytes());
      file_.read(tensor.view().as<char>(), static_cast<std::streamsize>(tensor.view().num_bytes()));
      tensors_.emplace(key, std::move(tensor));
    }
  }
  // Absent if the file has none.
  TensorView operator[](const std::string& name) const {
    const auto found = tensors_.find(name);
    return found == tensors_.end() ? TensorView() : found->second.view();
  }
  std::vector<float> values(const std::string& name) const {
    const TensorView view = (*this)[name];
    std::vector<float> values;
    for (int64_t i = 0; i < view.num_elements(); ++i) {
      values.push_back(read_element(view.dtype, view.data, i));
    }
    return values;
  }

 private:
  template <class T>
  T next() {
    T value{};
    file_.read(reinterpret_cast<char*>(&value), sizeof(value));
    return value;
  }
  static DType dtype_of(uint32_t onnx_type) {
    const std::map<uint32_t, DType> types = {
        {1, DType::kF32}, {2, DType::kU8}, {10, DType::kF16}, {16, DType::kBF16}, {24, DType::kF8E8M0}};
    return types.at(onnx_type);
  }
  std::ifstream file_;
  std::map<std::string, Tensor> tensors_;
};

struct Expected {
  std::string name;
  double tolerance;
  QMoEArgs attributes;
};

TEST(Golden, QMoE) {
  const float limit = 0.8f;
  // Tolerances: the roundings of T; for int8 and int3 what ONNX Runtime rounds besides. Its fp4 is 0.05 away from the
  // f64 result here, whichever roundings are put into that (outputs reach 4.6).
  for (const Expected& c : {
           Expected{"int4_f32_swiglu", 1e-5, {.activation_type = "swiglu", .swiglu_fusion = 1, .block_size = 32}},
           {"int4_f16_rows_silu", 2e-3, {.activation_type = "silu"}},
           {"int4_f32_gelu", 1e-5, {.activation_type = "gelu", .block_size = 32}},
           {"int8_f32_relu", 2e-2, {.activation_type = "relu", .expert_weight_bits = 8, .block_size = 32}},
           {"int8_f16_limited",
            2e-2,
            {.activation_type = "swiglu",
            .swiglu_fusion = 1,
            .activation_alpha = 1.702f,
            .activation_beta = 1.0f,
            .swiglu_limit = limit,
            .expert_weight_bits = 8,
            .block_size = 32}},
           {"int3_bf16_swiglu",
            2e-2,
            {.activation_type = "swiglu", .swiglu_fusion = 1, .expert_weight_bits = 3, .block_size = 32}},
           {"fp4_bf16_rows",
            6e-2,
            {.activation_type = "swiglu", .swiglu_fusion = 1, .quant_type = "fp4", .weights_prepacked = 1}},
       }) {
    SCOPED_TRACE(c.name);
    const Golden golden(c.name);
    QMoEArgs args = c.attributes;
    args.k = 2;
    args.normalize_routing_weights = 1;
    args.input = golden["input"];
    args.router_probs = golden["router_probs"];
    args.fc1_experts_weights = golden["fc1_experts_weights"];
    args.fc1_scales = golden["fc1_scales"];
    args.fc1_experts_bias = golden["fc1_experts_bias"];
    args.fc1_zero_points = golden["fc1_zero_points"];
    args.fc1_global_scale = golden["fc1_global_scale"];
    args.fc2_experts_weights = golden["fc2_experts_weights"];
    args.fc2_scales = golden["fc2_scales"];
    args.fc2_experts_bias = golden["fc2_experts_bias"];
    args.fc2_zero_points = golden["fc2_zero_points"];
    args.fc2_global_scale = golden["fc2_global_scale"];
    const std::vector<float> expected = golden.values("output");
    float largest = 0.0f;
    for (const float value : expected) {
      largest = std::max(largest, std::fabs(value));
    }
    EXPECT_GT(largest, 20 * c.tolerance) << "too small to tell anything";
    for (const cpu::Isa isa : cpu::available_isas()) {
      GuardedTensor output(args.input.dtype, {args.input.dims().begin(), args.input.dims().end()});
      args.output = output.view();
      Workspace workspace(qmoe_workspace_bytes(args, 2));
      qmoe(args, {.pool = &pool(), .workspace = &workspace, .isa = isa});
      const testkit::Comparison result = testkit::compare(output.values(), expected, 0.0, c.tolerance);
      EXPECT_TRUE(result.ok) << cpu::to_string(isa) << ": " << result.text;
    }
  }
}

TEST(Golden, MoEGroupRouter) {
  struct Router {
    std::string name;
    double tolerance;
    MoEGroupRouterArgs attributes;
  };
  for (const Router& c : {Router{"group_f32", 1e-6, {.top_k = 4, .n_group = 4, .topk_group = 2}},
                          {"group_f16",
                           1e-2,  // an ulp of T at -6
                           {.top_k = 5, .n_group = 8, .topk_group = 3, .group_topk = 3, .router_sentinel = -77.0f}},
                          {"group_full", 1e-6, {.top_k = 4, .full_scores = true}},
                          {"group_projected", 1e-6, {.top_k = 2, .full_scores = true}}}) {
    SCOPED_TRACE(c.name);
    const Golden golden(c.name);
    MoEGroupRouterArgs args = c.attributes;
    args.logits = golden["logits"];
    args.expert_bias = golden["expert_bias"];
    args.projection_weight = golden["projection_weight"];
    const MoEGroupRouterShapes shapes = moe_group_router_shapes(args);
    for (const cpu::Isa isa : cpu::available_isas()) {
      const auto check = [&](const char* name, const OutputSpec& spec, TensorView MoEGroupRouterArgs::*member) {
        if (!spec.present) {
          EXPECT_FALSE(golden[name]);
          return;
        }
        GuardedTensor output(spec.dtype, spec.shape);
        MoEGroupRouterArgs call = args;
        GuardedTensor other(DType::kF32, spec.shape);
        call.selection_scores = shapes.selection_scores.present ? other.view() : TensorView();
        call.router_weights = call.selection_scores;
        call.*member = output.view();
        moe_group_router(call, {.pool = &pool(), .isa = isa});
        const testkit::Comparison result = testkit::compare(output.values(), golden.values(name), 0.0, c.tolerance);
        EXPECT_TRUE(result.ok) << name << " " << cpu::to_string(isa) << ": " << result.text;
      };
      check("router_probs", shapes.router_probs, &MoEGroupRouterArgs::router_probs);
      check("selection_scores", shapes.selection_scores, &MoEGroupRouterArgs::selection_scores);
      check("router_weights", shapes.router_weights, &MoEGroupRouterArgs::router_weights);
    }
  }
}

}  // namespace
}  // namespace shoal
