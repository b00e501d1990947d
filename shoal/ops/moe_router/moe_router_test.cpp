// Routers: brute force in f64, ties, infinities and NaN, the canonical sum, rejections.
#include "shoal/ops/moe_router/moe_router.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "shoal/cpu/thread_pool.h"
#include "testkit/expect_error.h"
#include "testkit/guarded_tensor.h"

namespace shoal {
namespace {

using testkit::expect_error;
using testkit::Guarded;
using testkit::GuardedTensor;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

size_t at(int64_t i) { return static_cast<size_t>(i); }

cpu::ThreadPool& pool() {
  static cpu::ThreadPool pool(2);
  return pool;
}
OpContext context() { return {.pool = &pool(), .isa = cpu::available_isas().back()}; }

struct Routes {
  std::vector<int32_t> ids;
  std::vector<float> weights;
};

struct Logits {
  std::vector<float> values;
  int64_t num_experts;
  DType dtype = DType::kF32;
  int64_t rows() const { return static_cast<int64_t>(values.size()) / num_experts; }
};

Routes route(const Logits& logits, RouteExpertsArgs args, const std::vector<float>& mixing = {}) {
  const int64_t columns = std::max<int64_t>(args.top_k + args.num_shared, 0);
  GuardedTensor l(logits.dtype, {logits.rows(), logits.num_experts}, logits.values, 3);
  GuardedTensor m(logits.dtype, {logits.rows(), logits.num_experts}, mixing.empty() ? logits.values : mixing, 1);
  Guarded<int32_t> ids(at(logits.rows() * columns));
  Guarded<float> weights(ids.size());
  args.router_logits = l.view();
  args.router_weights = mixing.empty() ? TensorView() : m.view();
  args.expert_ids = TensorView(ids.data(), DType::kI32, {logits.rows(), columns});
  args.expert_weights = TensorView(weights.data(), DType::kF32, {logits.rows(), columns});
  route_experts(args, context());
  EXPECT_TRUE(ids.guards_intact() && weights.guards_intact());
  return {{ids.span().begin(), ids.span().end()}, {weights.span().begin(), weights.span().end()}};
}

TEST(RouteExperts, AgreesWithF64) {
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    for (const int64_t num_experts : {4, 8, 16, 32, 33, 64, 65, 128, 256, 512, 1024, 2048}) {
      for (const int64_t k : {1, 2, 4, 8, 10}) {
        if (k > num_experts) {
          continue;
        }
        testkit::Random random(static_cast<uint64_t>(num_experts * 100 + k));
        const int64_t rows = 5;
        Logits logits{random.normals(at(rows * num_experts), 2.0f), num_experts, dtype};
        for (float& value : logits.values) {  // f16 and bf16 have many ties
          value = testkit::rounded_to(dtype, value);
        }
        for (const bool normalize : {false, true}) {
          const Routes routes = route(logits, {.top_k = k, .normalize = normalize});
          for (int64_t t = 0; t < rows; ++t) {
            const float* l = logits.values.data() + t * num_experts;
            std::vector<int32_t> order(at(num_experts));
            std::iota(order.begin(), order.end(), 0);
            std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return l[a] > l[b]; });
            double total = 0, chosen = 0;
            for (int64_t e = 0; e < num_experts; ++e) {
              total += std::exp(static_cast<double>(l[e]));
            }
            for (int64_t j = 0; j < k; ++j) {
              chosen += std::exp(static_cast<double>(l[order[at(j)]]));
            }
            for (int64_t j = 0; j < k; ++j) {
              ASSERT_EQ(routes.ids[at(t * k + j)], order[at(j)]) << num_experts << " " << k;
              const double p = std::exp(static_cast<double>(l[order[at(j)]])) / (normalize ? chosen : total);
              ASSERT_NEAR(routes.weights[at(t * k + j)], p, 1e-6);
            }
          }
        }
      }
    }
  }
}

// The order of the sum, written out for a warp of 32 lanes.
TEST(RouteExperts, CanonicalSum) {
  for (const int64_t num_experts : {5, 32, 33, 100, 300}) {
    testkit::Random random(static_cast<uint64_t>(num_experts));
    const Logits logits{random.normals(at(num_experts), 3.0f), num_experts};
    const float largest = *std::max_element(logits.values.begin(), logits.values.end());
    float lanes[32] = {};
    for (int64_t e = 0; e < num_experts; ++e) {
      lanes[e % 32] += std::exp(logits.values[at(e)] - largest);
    }
    for (const int distance : {16, 8, 4, 2, 1}) {
      float next[32];
      for (int lane = 0; lane < 32; ++lane) {
        next[lane] = lanes[lane] + lanes[lane ^ distance];
      }
      std::copy(next, next + 32, lanes);
    }
    const Routes plain = route(logits, {.top_k = 3});
    const Routes normalized = route(logits, {.top_k = 3, .normalize = true});
    const float sum = plain.weights[0] + plain.weights[1] + plain.weights[2];
    for (size_t j = 0; j < 3; ++j) {
      EXPECT_EQ(plain.weights[j], std::exp(logits.values[at(plain.ids[j])] - largest) / lanes[0]);
      EXPECT_EQ(normalized.weights[j], plain.weights[j] / sum);
    }
  }
}

TEST(RouteExperts, TiesInfinitiesAndNan) {
  const auto expect = [](const std::vector<float>& row, int64_t k, const std::vector<int32_t>& ids,
                         const std::vector<float>& weights, bool normalize = false) {
    const Routes routes = route({row, static_cast<int64_t>(row.size())}, {.top_k = k, .normalize = normalize});
    EXPECT_EQ(routes.ids, ids);
    EXPECT_EQ(routes.weights, weights);
  };
  expect({1, 1, 1, 1}, 3, {0, 1, 2}, {0.25f, 0.25f, 0.25f});
  expect({0, 2, 2, -kInf}, 2, {1, 2}, {0.5f, 0.5f}, true);
  expect({-kInf, 5, -kInf, -kInf}, 3, {1, 0, 2}, {1, 0, 0});
  expect({kNan, -kInf, 5, kNan}, 4, {2, 0, 1, 3}, {1, 0, 0, 0});
  expect({kInf, 3, kInf, kNan}, 3, {0, 2, 1}, {0.5f, 0.5f, 0});
  expect({kInf, kInf, kInf, kInf}, 2, {0, 1}, {0.25f, 0.25f});
  expect({kNan, kNan, kNan, kNan}, 2, {0, 1}, {0, 0});
  expect({-kInf, kNan, -kInf, -kInf}, 3, {0, 1, 2}, {0, 0, 0}, true);
  expect({-3e38f, 3e38f, 0, 0}, 2, {1, 2}, {1, 0});
  // Normalisation only where the sum allows it.
  const Routes small = route({{kInf, 1, 2, 3}, 4}, {.top_k = 2, .normalize = true});
  EXPECT_EQ(small.weights, (std::vector<float>{1, 0}));
}

TEST(RouteExperts, RouterWeights) {
  const Logits logits{{3, 1, 2, 0}, 4};
  const auto weights = [&](const std::vector<float>& mixing, bool normalize, const Logits& l) {
    return route(l, {.top_k = 3, .normalize = normalize}, mixing).weights;
  };
  EXPECT_EQ(weights({-2, 1e-9f, 8, 7}, false, logits), (std::vector<float>{-2, 8, 1e-9f}));
  EXPECT_EQ(weights({-2, 2, 8, 7}, true, logits), (std::vector<float>{-0.25f, 1, 0.25f}));
  EXPECT_EQ(weights({-2, -2, 4, 7}, true, logits), (std::vector<float>{0, 0, 0}));  // a sum of 0
  EXPECT_EQ(weights({1e-8f, 1e-8f, 2e-8f, 7}, true, logits), (std::vector<float>{0.25f, 0.5f, 0.25f}));
  EXPECT_EQ(weights({5, 6, 7, 8}, false, {{-kInf, kNan, -kInf, kNan}, 4}), (std::vector<float>{0, 0, 0}));
  EXPECT_EQ(weights({5, 6, 7, 8}, false, {{1, kNan, -kInf, kNan}, 4}), (std::vector<float>{5, 0, 7}));
}

// e1 = 1 (l 2), e2 = 4 (l 1.99): experts within 0.02 max(|l|, l1) of the best share the softmax.
TEST(RouteExperts, SparseMixer) {
  const Logits logits{{0, 2, -5, 1, 1.99f, 1.975f, 1.9f, 0}, 8};
  const Routes routes = route(logits, {.top_k = 2, .sparse_mixer = true});
  EXPECT_EQ(routes.ids, (std::vector<int32_t>{1, 4}));
  const double w1 = 1 / (1 + std::exp(-0.01) + std::exp(-0.025));
  const double w2 = 1 / (1 + std::exp(-0.015));
  EXPECT_NEAR(routes.weights[0], w1, 1e-6);
  EXPECT_NEAR(routes.weights[1], w2, 1e-6);
  // |l| of a negative logit counts: l1 - l = 9.9 <= 0.02 * 500 = 10.
  const Routes negative =
      route({{-490.1f, -500, -1000, -1000, -1000, -1000, -1000, -1000}, 8}, {.top_k = 2, .sparse_mixer = true});
  EXPECT_NEAR(negative.weights[0], 1 / (1 + std::exp(-9.9)), 1e-6);
  EXPECT_NEAR(negative.weights[1], 1.0, 1e-6);
  const Routes tie = route({std::vector<float>(16, 1.0f), 16}, {.top_k = 2, .normalize = true, .sparse_mixer = true});
  EXPECT_EQ(tie.ids, (std::vector<int32_t>{0, 1}));
  EXPECT_NEAR(tie.weights[0], 1.0 / 16, 1e-7);
  EXPECT_NEAR(tie.weights[1], 1.0 / 15, 1e-7);
  const Routes none = route({std::vector<float>(8, kNan), 8}, {.top_k = 2, .sparse_mixer = true});
  EXPECT_EQ(none.weights, (std::vector<float>{0, 0}));
}

TEST(RouteExperts, SharedExperts) {
  const Routes routes = route({{1, 3, 100, -2, 0}, 5}, {.top_k = 1, .num_shared = 3});
  EXPECT_EQ(routes.ids, (std::vector<int32_t>{1, 2, 3, 4}));
  EXPECT_NEAR(routes.weights[0], 1 / (1 + std::exp(-2.0)), 1e-6);
  EXPECT_EQ(routes.weights[1], 1.0f);
  EXPECT_NEAR(routes.weights[2], 1 / (1 + std::exp(2.0)), 1e-6);
  EXPECT_EQ(routes.weights[3], 0.5f);
}

TEST(RouteExperts, Rejections) {
  const Logits logits{std::vector<float>(8, 0.0f), 8};
  const auto rejected = [&](std::string_view part, RouteExpertsArgs args, const std::vector<float>& mixing = {}) {
    expect_error(ErrorCode::kInvalidArgument, part, [&] { route(logits, args, mixing); });
  };
  rejected("top_k is 9, expected 1 to 8", {.top_k = 9});
  rejected("top_k is 8, expected 1 to 7", {.top_k = 8, .num_shared = 1});
  rejected("num_shared is -1", {.top_k = 2, .num_shared = -1});
  rejected("sparse_mixer needs top_k 2", {.top_k = 3, .sparse_mixer = true});
  rejected("num_shared excludes", {.top_k = 2, .num_shared = 1}, std::vector<float>(8, 1.0f));
}

Routes route_packed(const std::vector<float>& scores, RoutePackedArgs args, std::vector<float> mixing = {}) {
  const int64_t num_experts = static_cast<int64_t>(scores.size());
  GuardedTensor s(DType::kF32, {1, num_experts}, scores);
  GuardedTensor m(DType::kF32, {1, num_experts}, mixing.empty() ? scores : mixing);
  Guarded<int32_t> ids(at(args.top_k));
  Guarded<float> weights(ids.size());
  args.router_probs = s.view();
  args.router_weights = mixing.empty() ? TensorView() : m.view();
  args.expert_ids = TensorView(ids.data(), DType::kI32, {1, args.top_k});
  args.expert_weights = TensorView(weights.data(), DType::kF32, {1, args.top_k});
  route_packed_experts(args, context());
  return {{ids.span().begin(), ids.span().end()}, {weights.span().begin(), weights.span().end()}};
}

TEST(RoutePacked, OrderAndWeights) {
  EXPECT_EQ(route_packed({kNan, -kInf, 0, kInf, 0}, {.top_k = 5}, {1, 1, 1, 1, 1}).ids,
            (std::vector<int32_t>{3, 2, 4, 1, 0}));
  EXPECT_EQ(route_packed({0, 3, 2}, {.top_k = 2}, {5, 1, 3}).weights, (std::vector<float>{0.25f, 0.75f}));
  EXPECT_EQ(route_packed({0, 3, 2}, {.top_k = 2, .normalize = false, .scale = 2}, {5, 1, 3}).weights,
            (std::vector<float>{2, 6}));
  EXPECT_EQ(route_packed({0, 3, 2}, {.top_k = 2, .epsilon = 4, .scale = 2}, {5, 1, 3}).weights,
            (std::vector<float>{0.25f, 0.75f}));
  EXPECT_EQ(route_packed({0, 3, 2}, {.top_k = 2, .scale = 2}, {5, -1, 1}).weights, (std::vector<float>{0, 0}));
  EXPECT_FALSE(std::isfinite(route_packed({0, 3, 2}, {.top_k = 2}, {5, kNan, 1}).weights[0]));
  EXPECT_TRUE(std::isfinite(route_packed({0, 3, 2}, {.top_k = 2}, {kNan, 1, 1}).weights[0]));  // not chosen
  const Routes legacy = route_packed({0, 1, 2}, {.top_k = 2, .normalize = false});
  const double sum = 1 + std::exp(1.0) + std::exp(2.0);
  EXPECT_NEAR(legacy.weights[0], std::exp(2.0) / sum, 1e-6);
  EXPECT_NEAR(legacy.weights[1], std::exp(1.0) / sum, 1e-6);
  EXPECT_NEAR(route_packed({0, 1, 2}, {.top_k = 2}).weights[0], 1 / (1 + std::exp(-1.0)), 1e-6);
}

double sqrt_softplus(double a) { return std::sqrt(a > 0 ? a + std::log1p(std::exp(-a)) : std::log1p(std::exp(a))); }

struct RouterCall {
  std::vector<float> scores, bias;
  std::vector<int64_t> ids;
  int64_t rows, num_experts;
  MoERouterArgs args;
  std::vector<float> probs, scale;

  void run() {
    GuardedTensor s(DType::kF32, {rows, num_experts}, scores, 2);
    GuardedTensor b(DType::kF32, {num_experts}, bias.empty() ? scores : bias);
    args.scores = s.view();
    args.bias = bias.empty() ? TensorView() : b.view();
    args.expert_ids = ids.empty() ? TensorView() : TensorView(ids.data(), DType::kI64, {rows, args.topk});
    const MoERouterShapes shapes = moe_router_shapes(args);
    GuardedTensor out(shapes.router_probs.dtype, shapes.router_probs.shape, 3);
    GuardedTensor weight_scale(DType::kF32, shapes.weight_scale.shape);
    args.router_probs = out.view();
    args.weight_scale = weight_scale.view();
    moe_router(args, context());
    EXPECT_TRUE(out.intact() && weight_scale.intact());
    probs = out.values();
    scale = weight_scale.values();
  }
};

TEST(MoERouter, AgreesWithF64) {
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    for (const bool with_bias : {false, true}) {
      testkit::Random random(with_bias ? 2 : 1);
      RouterCall call{
          .scores = random.normals(5 * 24, 3.0f),
          .bias = {},
          .ids = {},
          .rows = 5,
          .num_experts = 24,
          .args = {.topk = 6, .local_expert_start = 8, .local_expert_count = 10, .route_scale = 2.5f, .dtype = dtype},
          .probs = {},
          .scale = {}};
      if (with_bias) {
        call.bias = random.normals(24);
      }
      call.run();
      const double fill = dtype == DType::kF16 ? -1e4 : -1e30;
      for (int64_t t = 0; t < 5; ++t) {
        const auto key = [&](int64_t e) {
          return sqrt_softplus(static_cast<double>(call.scores[at(t * 24 + e)])) +
                 (with_bias ? static_cast<double>(call.bias[at(e)]) : 0);
        };
        std::vector<int64_t> order(24);
        std::iota(order.begin(), order.end(), 0);
        std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return key(a) > key(b); });
        double sum = 0, local = 0;
        for (size_t j = 0; j < 6; ++j) {
          sum += sqrt_softplus(static_cast<double>(call.scores[at(t * 24 + order[j])]));
        }
        for (int64_t column = 0; column < 10; ++column) {
          const int64_t e = 8 + column;
          const bool chosen = std::find(order.begin(), order.begin() + 6, e) != order.begin() + 6;
          const double weight = sqrt_softplus(static_cast<double>(call.scores[at(t * 24 + e)])) / sum;
          local += chosen ? weight : 0;
          const double wanted = chosen ? std::log(weight) : fill;
          EXPECT_NEAR(call.probs[at(t * 10 + column)], wanted, std::fabs(wanted) * testkit::rounding_of(dtype) + 1e-5);
        }
        EXPECT_NEAR(call.scale[at(t)], local * 2.5, 1e-5);
      }
    }
  }
}

TEST(MoERouter, TiesGivenIdsAndZeros) {
  RouterCall ties{.scores = {1, 1, 1, 1},
                  .bias = {},
                  .ids = {},
                  .rows = 1,
                  .num_experts = 4,
                  .args = {.topk = 2, .local_expert_count = 4, .selection = "topk"},
                  .probs = {},
                  .scale = {}};
  ties.run();
  EXPECT_EQ(ties.probs, (std::vector<float>{std::log(0.5f), std::log(0.5f), -1e30f, -1e30f}));
  EXPECT_EQ(ties.scale, (std::vector<float>{1}));
  RouterCall given{.scores = {1, 1, 1, 1, 9, 9, 9, 9},
                   .bias = {},
                   .ids = {3, 0, 2, 1},
                   .rows = 2,
                   .num_experts = 4,
                   .args = {.topk = 2, .local_expert_start = 2, .local_expert_count = 2},
                   .probs = {},
                   .scale = {}};
  given.run();
  EXPECT_EQ(given.probs, (std::vector<float>{-1e30f, std::log(0.5f), std::log(0.5f), -1e30f}));
  EXPECT_EQ(given.scale, (std::vector<float>{0.5f, 0.5f}));
  RouterCall zeros{.scores = {-kInf, -kInf, -1000, 3},
                   .bias = {},
                   .ids = {0, 1},
                   .rows = 1,
                   .num_experts = 4,
                   .args = {.topk = 2, .local_expert_count = 4, .dtype = DType::kF16},
                   .probs = {},
                   .scale = {}};
  zeros.run();
  EXPECT_EQ(zeros.scale, (std::vector<float>{0}));
  EXPECT_EQ(zeros.probs[0], testkit::rounded_to(DType::kF16, -1e4f));
  RouterCall empty{.scores = {},
                   .bias = {},
                   .ids = {},
                   .rows = 0,
                   .num_experts = 4,
                   .args = {.local_expert_count = 4},
                   .probs = {},
                   .scale = {}};
  empty.scores.resize(4);
  EXPECT_NO_THROW(empty.run());
}

TEST(MoERouter, Rejections) {
  const auto rejected = [](std::string_view part, const auto& change) {
    RouterCall call{.scores = std::vector<float>(8, 1.0f),
                    .bias = {},
                    .ids = {},
                    .rows = 2,
                    .num_experts = 4,
                    .args = {.topk = 2, .local_expert_count = 4},
                    .probs = {},
                    .scale = {}};
    change(call);
    expect_error(ErrorCode::kInvalidArgument, concat("moe_router: ", part), [&] { call.run(); });
  };
  rejected("topk is 0", [](RouterCall& c) { c.args.topk = 0; });
  rejected("topk is 33", [](RouterCall& c) { c.args.topk = 33; });
  rejected("topk is 5, but scores has 4 experts", [](RouterCall& c) { c.args.topk = 5; });
  rejected("local_expert_start is -1", [](RouterCall& c) { c.args.local_expert_start = -1; });
  rejected("local_expert_count is 0", [](RouterCall& c) { c.args.local_expert_count = 0; });
  rejected("local_expert_start 1 and local_expert_count 4 run past",
           [](RouterCall& c) { c.args.local_expert_start = 1; });
  rejected("scoring is 'sigmoid'", [](RouterCall& c) { c.args.scoring = "sigmoid"; });
  rejected("selection is 'best'", [](RouterCall& c) { c.args.selection = "best"; });
  rejected("bias needs selection noaux_tc", [](RouterCall& c) { c.args.selection = "topk", c.bias.assign(4, 0.0f); });
  rejected("expert_ids[1, 0] is 4", [](RouterCall& c) { c.ids = {0, 1, 4, 0}; });
  rejected("expert_ids[0, 1] is -1", [](RouterCall& c) { c.ids = {0, -1, 3, 0}; });
  rejected("dtype is int8", [](RouterCall& c) { c.args.dtype = DType::kI8; });
}

struct GroupCall {
  std::vector<float> logits, bias;
  int64_t rows, num_experts;
  MoEGroupRouterArgs args;
  DType dtype = DType::kF32;
  std::vector<float> projection{};
  std::vector<float> probs{}, scores{}, weights{};

  void run(std::string_view variant = "", cpu::Isa isa = cpu::available_isas().back()) {
    const int64_t columns = rows == 0 ? num_experts : static_cast<int64_t>(logits.size()) / rows;
    GuardedTensor l(dtype, {rows, columns}, logits, 1);
    GuardedTensor b(DType::kF32, {num_experts}, bias);
    GuardedTensor p(dtype, {num_experts, columns},
                    projection.empty() ? std::vector<float>(at(num_experts * columns)) : projection);
    args.logits = l.view();
    args.expert_bias = b.view();
    args.projection_weight = projection.empty() ? TensorView() : p.view();
    const MoEGroupRouterShapes shapes = moe_group_router_shapes(args);
    GuardedTensor out(dtype, shapes.router_probs.shape), s(DType::kF32, shapes.router_probs.shape, 2),
        w(DType::kF32, shapes.router_probs.shape);
    args.router_probs = shapes.router_probs.present ? out.view() : TensorView();
    args.selection_scores = shapes.selection_scores.present ? s.view() : TensorView();
    args.router_weights = shapes.router_weights.present ? w.view() : TensorView();
    moe_group_router(args, {.pool = &pool(), .isa = isa, .variant = variant});
    EXPECT_TRUE(out.intact() && s.intact() && w.intact());
    probs = out.values();
    scores = s.values();
    weights = w.values();
  }
};

// Which experts of a row are chosen.
std::vector<int64_t> chosen(const GroupCall& call, int64_t row = 0) {
  std::vector<int64_t> ids;
  for (int64_t e = 0; e < call.num_experts; ++e) {
    if (call.probs[at(row * call.num_experts + e)] != -10000.0f) {
      ids.push_back(e);
    }
  }
  return ids;
}

TEST(MoEGroupRouter, ChoosesAsTheFormulaDoes) {
  testkit::Random random(3);
  GroupCall call{.logits = random.normals(7 * 24),
                 .bias = random.normals(24, 0.2f),
                 .rows = 7,
                 .num_experts = 24,
                 .args = {.top_k = 5, .n_group = 6, .topk_group = 2, .group_topk = 3}};
  call.run();
  for (int64_t t = 0; t < 7; ++t) {
    std::vector<double> s(24), c(24);
    for (size_t e = 0; e < 24; ++e) {
      s[e] = 1 / (1 + std::exp(-static_cast<double>(call.logits[at(t) * 24 + e])));
      c[e] = s[e] + static_cast<double>(call.bias[e]);
    }
    std::vector<std::pair<double, size_t>> groups;
    for (size_t g = 0; g < 6; ++g) {
      std::vector<double> sorted(c.begin() + 4 * g, c.begin() + 4 * g + 4);
      std::sort(sorted.rbegin(), sorted.rend());
      groups.emplace_back(-(sorted[0] + sorted[1] + sorted[2]), g);
    }
    std::sort(groups.begin(), groups.end());
    std::vector<std::pair<double, int64_t>> experts;
    for (size_t kept = 0; kept < 2; ++kept) {
      for (size_t e = 4 * groups[kept].second; e < 4 * groups[kept].second + 4; ++e) {
        experts.emplace_back(-c[e], e);
      }
    }
    std::sort(experts.begin(), experts.end());
    std::vector<int64_t> wanted;
    for (size_t j = 0; j < 5; ++j) {
      wanted.push_back(experts[j].second);
    }
    std::sort(wanted.begin(), wanted.end());
    EXPECT_EQ(chosen(call, t), wanted);
    for (const int64_t e : wanted) {
      EXPECT_NEAR(call.probs[at(t * 24 + e)], std::log(s[at(e)]), 1e-5);
    }
  }
}

TEST(MoEGroupRouter, TiesAndNan) {
  const auto ids = [](std::vector<float> logits, MoEGroupRouterArgs args) {
    const int64_t n = static_cast<int64_t>(logits.size());
    GroupCall call{.logits = std::move(logits),
                   .bias = std::vector<float>(at(n), 0.0f),
                   .rows = 1,
                   .num_experts = n,
                   .args = args};
    call.run();
    return chosen(call);
  };
  const MoEGroupRouterArgs args{.top_k = 2, .n_group = 4, .topk_group = 1};
  EXPECT_EQ(ids({1, 1, 1, 1, 1, 1, 1, 1}, args), (std::vector<int64_t>{0, 1}));
  EXPECT_EQ(ids({0, 0, 2, 2, 2, 2, 1, 1}, args), (std::vector<int64_t>{2, 3}));
  // A NaN leaves the sum while others suffice: groups of 4, two summed.
  EXPECT_EQ(ids({0, 0, 0, 0, kNan, 2, 2, 2}, {.top_k = 2, .n_group = 2}), (std::vector<int64_t>{5, 6}));
  // Groups of 2: a NaN in one makes it last.
  EXPECT_EQ(ids({9, kNan, 0, 0}, {.top_k = 2, .n_group = 2}), (std::vector<int64_t>{2, 3}));
  // Forced to take it: written as NaN.
  GroupCall forced{.logits = {1, kNan}, .bias = {0, 0}, .rows = 1, .num_experts = 2, .args = {.top_k = 2}};
  forced.run();
  EXPECT_TRUE(std::isnan(forced.probs[1]));
  EXPECT_FALSE(std::isnan(forced.probs[0]));
  // Far below: the logarithm stays finite.
  GroupCall low{
      .logits = {-200, -200}, .bias = {0, 0}, .rows = 1, .num_experts = 2, .args = {.top_k = 1, .router_sentinel = -7}};
  low.run();
  EXPECT_EQ(low.probs, (std::vector<float>{std::log(1e-20f), -7}));
}

TEST(MoEGroupRouter, FullScoresAndProjection) {
  testkit::Random random(9);
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    GroupCall call{.logits = random.normals(37 * 512),
                   .bias = random.normals(6),
                   .rows = 37,
                   .num_experts = 6,
                   .args = {.top_k = 2},
                   .dtype = dtype,
                   .projection = random.normals(6 * 512, 0.05f)};
    for (std::vector<float>* values : {&call.logits, &call.projection}) {
      for (float& value : *values) {
        value = testkit::rounded_to(dtype, value);
      }
    }
    std::vector<std::pair<std::string_view, cpu::Isa>> ways = {{"ref", cpu::Isa::kScalar}};
    for (const cpu::Isa isa : cpu::available_isas()) {
      ways.emplace_back("", isa);
    }
    for (const auto& [variant, isa] : ways) {
      call.run(variant, isa);
      for (int64_t t = 0; t < 37; ++t) {
        for (int64_t e = 0; e < 6; ++e) {
          double logit = 0;
          for (int64_t i = 0; i < 512; ++i) {
            logit += static_cast<double>(call.logits[at(t * 512 + i)]) *
                     static_cast<double>(call.projection[at(e * 512 + i)]);
          }
          const double s = 1 / (1 + std::exp(-logit));
          ASSERT_NEAR(call.weights[at(t * 6 + e)], s, 2e-6);
          ASSERT_NEAR(call.scores[at(t * 6 + e)], s + static_cast<double>(call.bias[at(e)]), 3e-6);
        }
      }
    }
    const std::vector<float> together = call.weights;  // a row does not depend on its number
    GroupCall single = call;
    single.rows = 1;
    single.logits.assign(call.logits.begin() + 33 * 512, call.logits.begin() + 34 * 512);
    single.run();
    EXPECT_EQ(single.weights, std::vector<float>(together.begin() + 33 * 6, together.begin() + 34 * 6));
  }
}

TEST(MoEGroupRouter, Rejections) {
  const auto rejected = [](std::string_view part, const auto& change) {
    GroupCall call{.logits = std::vector<float>(16, 1.0f),
                   .bias = std::vector<float>(8, 0.0f),
                   .rows = 2,
                   .num_experts = 8,
                   .args = {.top_k = 2, .n_group = 4, .topk_group = 2}};
    change(call);
    expect_error(ErrorCode::kInvalidArgument, concat("moe_group_router: ", part), [&] { call.run(); });
  };
  rejected("top_k is 0", [](GroupCall& c) { c.args.top_k = 0; });
  rejected("top_k is 5, but the kept groups have 4 experts", [](GroupCall& c) { c.args.top_k = 5; });
  rejected("n_group is 3", [](GroupCall& c) { c.args.n_group = 3; });
  rejected("n_group is 0", [](GroupCall& c) { c.args.n_group = 0; });
  rejected("topk_group is 5", [](GroupCall& c) { c.args.topk_group = 5; });
  rejected("topk_group is 0", [](GroupCall& c) { c.args.topk_group = 0; });
  rejected("group_topk is 0", [](GroupCall& c) { c.args.group_topk = 0; });
  rejected("n_group is 4, expected 1 with full_scores", [](GroupCall& c) { c.args.full_scores = true; });
  rejected("logits has shape [2, 8]", [](GroupCall& c) { c.num_experts = 12, c.bias.resize(12); });
  rejected("logits has width 8", [](GroupCall& c) {
    c.args.n_group = c.args.topk_group = 1;
    c.projection.assign(64, 0.0f);
  });
}

}  // namespace
}  // namespace shoal
