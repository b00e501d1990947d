// The CUDA paths of the small operators against the CPU's.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "shoal/ops/activation/activation.h"
#include "shoal/ops/element.h"
#include "shoal/ops/embedding/embedding.h"
#include "shoal/ops/moe_router/moe_router.h"
#include "shoal/ops/norm/norm.h"
#include "shoal/quant/quantize.h"
#include "testkit/on_device.h"
#include "testkit/testkit.h"

namespace shoal {
namespace {

Tensor random_tensor(DType dtype, std::initializer_list<int64_t> shape, uint64_t seed) {
  testkit::Random random(seed);
  Tensor tensor(dtype, shape);
  for (int64_t i = 0; i < tensor.view().num_elements(); ++i) {
    write_element(dtype, tensor.view().data, i, random.normal());
  }
  return tensor;
}

Tensor poisoned(DType dtype, std::initializer_list<int64_t> shape) {
  Tensor tensor(dtype, shape);
  for (int64_t i = 0; i < tensor.view().num_elements(); ++i) {
    write_element(dtype, tensor.view().data, i, std::numeric_limits<float>::quiet_NaN());
  }
  return tensor;
}

void expect_close(const Tensor& actual, const Tensor& expected, double tolerance) {
  std::vector<float> values[2];
  for (int i = 0; i < 2; ++i) {
    const TensorView& view = i == 0 ? actual.view() : expected.view();
    for (int64_t j = 0; j < view.num_elements(); ++j) {
      values[i].push_back(read_element(view.dtype, view.data, j));
    }
  }
  const auto result = testkit::compare(values[0], values[1], tolerance, tolerance);
  EXPECT_TRUE(result.ok) << result.text;
}

OpContext host_context() {
  static cpu::ThreadPool pool(2);
  OpContext context;
  context.pool = &pool;
  context.isa = cpu::default_isa();
  return context;
}

constexpr DType kTypes[] = {DType::kF32, DType::kF16, DType::kBF16};
double tolerance_of(DType dtype) { return dtype == DType::kF32 ? 2e-6 : dtype == DType::kF16 ? 1e-3 : 8e-3; }

TEST(DeviceNorm, RowsAndResiduals) {
  SHOAL_NEEDS_DEVICE();
  testkit::OnDevice device;
  for (const DType dtype : kTypes) {
    for (const int64_t hidden : {1, 64, 333, 4096}) {
      const Tensor x = random_tensor(dtype, {5, hidden}, 1);
      const Tensor weight = random_tensor(DType::kF32, {hidden}, 2);
      const Tensor residual = random_tensor(dtype, {5, hidden}, 3);
      for (const bool has_residual : {false, true}) {
        const Tensor out = poisoned(dtype, {5, hidden});
        const Tensor sum = poisoned(dtype, {5, hidden});
        const Tensor want = poisoned(dtype, {5, hidden});
        const Tensor want_sum = poisoned(dtype, {5, hidden});
        RmsNormArgs args{.out = device.copy(out), .x = device.copy(x), .weight = device.copy(weight)};
        RmsNormArgs host{.out = want, .x = x, .weight = weight};
        if (has_residual) {
          args.residual = device.copy(residual);
          args.residual_out = device.copy(sum);
          host.residual = residual;
          host.residual_out = want_sum;
        }
        rms_norm(args, device.context());
        rms_norm(host, host_context());
        device.fetch();
        expect_close(out, want, tolerance_of(dtype));
        if (has_residual) {
          expect_close(sum, want_sum, 0.0);
        }
      }
    }
  }
}

TEST(DeviceActivation, EveryGate) {
  SHOAL_NEEDS_DEVICE();
  testkit::OnDevice device;
  for (const DType dtype : kTypes) {
    const Tensor both = random_tensor(dtype, {3, 700}, 4);
    const auto half = [](const TensorView& view, int64_t begin) {
      TensorView part = view;
      part.data = view.as<std::byte>() + begin * static_cast<int64_t>(size_of(view.dtype));
      part.shape[1] = 350;
      return part;
    };
    const TensorView device_both = device.copy(both);
    for (const Gate kind : {Gate::kSilu, Gate::kGeluTanh, Gate::kGelu, Gate::kRelu, Gate::kSigmoid, Gate::kClamped}) {
      const Tensor out = poisoned(dtype, {3, 350});
      const Tensor want = poisoned(dtype, {3, 350});
      const auto run = [&](const TensorView& to, const TensorView& from, const OpContext& context) {
        gated_activation(
            {.out = to, .gate = half(from, 0), .value = half(from, 350), .kind = kind, .alpha = 1.702f, .limit = 1.5f},
            context);
      };
      run(device.copy(out), device_both, device.context());
      run(want, both, host_context());
      device.fetch();
      expect_close(out, want, tolerance_of(dtype));
    }
  }
  const Tensor x = random_tensor(DType::kF32, {2, 500}, 5);
  const Tensor want = random_tensor(DType::kF32, {2, 500}, 5);
  softcap(device.copy(x), 0.7f, device.context());
  softcap(want, 0.7f, host_context());
  device.fetch();
  expect_close(x, want, 2e-6);
}

TEST(DeviceEmbedding, EveryFormat) {
  SHOAL_NEEDS_DEVICE();
  const Tensor values = random_tensor(DType::kF32, {20, 512}, 6);
  Tensor ids(DType::kI32, {4});
  std::ranges::copy(std::vector<int32_t>{3, 19, 0, 3}, ids.span<int32_t>().begin());
  for (const Format format : {Format::kF32, Format::kF16, Format::kBF16, Format::kQ4_0, Format::kQ4_1, Format::kQ5_0,
                              Format::kQ5_1, Format::kQ8_0, Format::kQ2_K, Format::kQ3_K, Format::kQ4_K, Format::kQ5_K,
                              Format::kQ6_K, Format::kGGUF_MXFP4, Format::kGGUF_NVFP4}) {
    SCOPED_TRACE(info(format).name);
    testkit::OnDevice device;
    const QuantParts parts = quantize(format, values);
    QuantMatrix table{.format = format, .n = 20, .k = 512, .codes = parts.codes.view().as<const std::byte>()};
    const Tensor out = poisoned(DType::kF32, {4, 512});
    const Tensor want = poisoned(DType::kF32, {4, 512});
    embedding({.out = want, .ids = ids, .table = table, .scale = 3.0f}, host_context());
    table.codes = device.copy(parts.codes).as<const std::byte>();
    embedding({.out = device.copy(out), .ids = device.copy(ids), .table = table, .scale = 3.0f}, device.context());
    device.fetch();
    expect_close(out, want, 1e-7);
  }
}

TEST(DeviceRouter, SoftmaxAndSigmoid) {
  SHOAL_NEEDS_DEVICE();
  testkit::OnDevice device;
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  constexpr float kInf = std::numeric_limits<float>::infinity();
  for (const int64_t num_experts : {3, 32, 60, 128, 513}) {
    const Tensor logits = random_tensor(DType::kF32, {37, num_experts}, 8);
    // Ties, infinities and NaN.
    float* rows = logits.span<float>().data();
    std::fill_n(rows, num_experts, 0.5f);
    rows[num_experts + 1] = kInf;
    rows[2 * num_experts + 2] = kNan;
    std::fill_n(rows + 3 * num_experts, num_experts, -kInf);
    const Tensor bias = random_tensor(DType::kF32, {num_experts}, 9);
    const int64_t top_k = std::min<int64_t>(8, num_experts);
    for (const bool normalize : {false, true}) {
      SCOPED_TRACE(testing::Message() << num_experts << " experts, normalize " << normalize);
      const Tensor ids(DType::kI32, {37, top_k});
      const Tensor want_ids(DType::kI32, {37, top_k});
      const Tensor weights = poisoned(DType::kF32, {37, top_k});
      const Tensor want = poisoned(DType::kF32, {37, top_k});
      route_experts({.expert_ids = device.copy(ids),
                     .expert_weights = device.copy(weights),
                     .router_logits = device.copy(logits),
                     .top_k = top_k,
                     .normalize = normalize,
                     .scale = 2.5f},
                    device.context());
      device.fetch();
      route_experts({.expert_ids = want_ids,
                     .expert_weights = want,
                     .router_logits = logits,
                     .top_k = top_k,
                     .normalize = normalize,
                     .scale = 2.5f},
                    host_context());
      EXPECT_TRUE(std::ranges::equal(ids.span<int32_t>(), want_ids.span<int32_t>()));
      expect_close(weights, want, 2e-6);
    }
    if (num_experts > 512) {
      continue;
    }
    const auto scores = [&] { return poisoned(DType::kF32, {37, num_experts}); };
    const Tensor selection = scores();
    const Tensor values = scores();
    const Tensor want_selection = scores();
    const Tensor want_values = scores();
    MoEGroupRouterArgs args{.selection_scores = device.copy(selection),
                            .router_weights = device.copy(values),
                            .logits = device.copy(logits),
                            .expert_bias = device.copy(bias),
                            .top_k = top_k,
                            .full_scores = true};
    moe_group_router(args, device.context());
    const Tensor ids(DType::kI32, {37, top_k});
    const Tensor want_ids(DType::kI32, {37, top_k});
    const Tensor weights = poisoned(DType::kF32, {37, top_k});
    const Tensor want = poisoned(DType::kF32, {37, top_k});
    RoutePackedArgs packed{.expert_ids = device.copy(ids),
                           .expert_weights = device.copy(weights),
                           .router_probs = args.selection_scores,
                           .router_weights = args.router_weights,
                           .top_k = top_k,
                           .epsilon = 1e-20f,
                           .scale = 1.5f};
    route_packed_experts(packed, device.context());
    device.fetch();
    moe_group_router({.selection_scores = want_selection,
                      .router_weights = want_values,
                      .logits = logits,
                      .expert_bias = bias,
                      .top_k = top_k,
                      .full_scores = true},
                     host_context());
    expect_close(selection, want_selection, 1e-6);
    expect_close(values, want_values, 1e-6);
    // The choice from the device's own scores: a last bit may decide a tie of the CPU's differently.
    route_packed_experts({.expert_ids = want_ids,
                          .expert_weights = want,
                          .router_probs = selection,
                          .router_weights = values,
                          .top_k = top_k,
                          .epsilon = 1e-20f,
                          .scale = 1.5f},
                         host_context());
    EXPECT_TRUE(std::ranges::equal(ids.span<int32_t>(), want_ids.span<int32_t>()));
    expect_close(weights, want, 1e-6);
  }
}

}  // namespace
}  // namespace shoal
