// The small operators around products: on the CPU against loops written out here, on CUDA against the CPU.
#include "shoal/ops/rows/rows.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "testkit/expect_error.h"
#include "testkit/on_device.h"
#include "testkit/testkit.h"

namespace shoal {
namespace {

Tensor random_matrix(int64_t rows, int64_t columns, uint64_t seed) {
  testkit::Random random(seed);
  Tensor matrix(DType::kF32, {rows, columns});
  for (float& value : matrix.span<float>()) {
    value = random.normal();
  }
  return matrix;
}

Tensor poisoned(int64_t rows, int64_t columns) {
  Tensor matrix(DType::kF32, {rows, columns});
  std::ranges::fill(matrix.span<float>(), std::numeric_limits<float>::quiet_NaN());
  return matrix;
}

Tensor integers(std::vector<int32_t> values, std::initializer_list<int64_t> shape) {
  Tensor tensor(DType::kI32, shape);
  std::ranges::copy(values, tensor.span<int32_t>().begin());
  return tensor;
}

OpContext host_context() {
  static cpu::ThreadPool pool(2);
  OpContext context;
  context.pool = &pool;
  return context;
}

TEST(GatherRows, TakesThemInOrder) {
  const Tensor x = random_matrix(7, 5, 1);
  const Tensor rows = integers({6, 0, 3, 3}, {4});
  const Tensor out = poisoned(4, 5);
  gather_rows({.out = out, .x = x, .rows = rows}, host_context());
  for (size_t i = 0; i < 4; ++i) {
    for (size_t c = 0; c < 5; ++c) {
      EXPECT_EQ(out.span<float>()[i * 5 + c], x.span<float>()[static_cast<size_t>(rows.span<int32_t>()[i]) * 5 + c]);
    }
  }
  const Tensor wrong = integers({7}, {1});
  testkit::expect_error(ErrorCode::kInvalidArgument, "rows[0] is 7, outside [0, 7)",
                        [&] { gather_rows({.out = poisoned(1, 5), .x = x, .rows = wrong}, host_context()); });
}

TEST(SortRows, GroupsByExpertAndKeepsOrder) {
  const Tensor ids = integers({2, 0, 2, 1, 0, 2}, {3, 2});
  const Tensor row_of = integers(std::vector<int32_t>(6, -1), {3, 2});
  const Tensor source = integers(std::vector<int32_t>(6, -1), {6});
  const Tensor row_begin = integers(std::vector<int32_t>(5, -1), {5});
  sort_rows({.row_of = row_of, .source = source, .row_begin = row_begin, .expert_ids = ids, .num_experts = 4},
            host_context());
  EXPECT_TRUE(std::ranges::equal(row_begin.span<int32_t>(), std::vector<int32_t>{0, 2, 3, 6, 6}));
  EXPECT_TRUE(std::ranges::equal(row_of.span<int32_t>(), std::vector<int32_t>{3, 0, 4, 2, 1, 5}));
  EXPECT_TRUE(std::ranges::equal(source.span<int32_t>(), std::vector<int32_t>{0, 2, 1, 0, 1, 2}));
  testkit::expect_error(ErrorCode::kInvalidArgument, "expert_ids[3] is 1, outside [0, 1)", [&] {
    const Tensor few = integers({0, 0, 0, 1, 0, 0}, {3, 2});
    const Tensor begin = integers({0, 0}, {2});
    sort_rows({.row_of = row_of, .source = source, .row_begin = begin, .expert_ids = few, .num_experts = 1},
              host_context());
  });
}

TEST(CombineRows, WeighsInOrder) {
  const Tensor rows = random_matrix(6, 3, 2);
  const Tensor weights = random_matrix(3, 2, 3);
  const Tensor row_of = integers({3, 0, 4, 2, 1, 5}, {3, 2});
  const Tensor out = poisoned(3, 3);
  combine_rows({.out = out, .rows = rows, .row_of = row_of, .weights = weights}, host_context());
  for (size_t t = 0; t < 3; ++t) {
    for (size_t c = 0; c < 3; ++c) {
      double want = 0.0;
      for (size_t j = 0; j < 2; ++j) {
        const auto row = static_cast<size_t>(row_of.span<int32_t>()[t * 2 + j]);
        want += static_cast<double>(weights.span<float>()[t * 2 + j]) * rows.span<float>()[row * 3 + c];
      }
      EXPECT_NEAR(out.span<float>()[t * 3 + c], want, 1e-6);
    }
  }
}

TEST(AddGatedRows, BySigmoidOrWhole) {
  const Tensor rows = random_matrix(2, 4, 4);
  const Tensor gates = random_matrix(2, 1, 5);
  for (const bool has_gates : {false, true}) {
    const Tensor out = random_matrix(2, 4, 6);
    const Tensor before = random_matrix(2, 4, 6);
    add_gated_rows({.out = out, .rows = rows, .gates = has_gates ? gates.view() : TensorView()}, host_context());
    for (size_t i = 0; i < 8; ++i) {
      const double share = has_gates ? 1.0 / (1.0 + std::exp(-static_cast<double>(gates.span<float>()[i / 4]))) : 1.0;
      EXPECT_NEAR(out.span<float>()[i], before.span<float>()[i] + share * rows.span<float>()[i], 1e-6);
    }
  }
}

TEST(RowsCuda, MatchTheCpu) {
  SHOAL_NEEDS_DEVICE();
  testkit::OnDevice device;
  constexpr int64_t kTokens = 70;
  constexpr int64_t kWidth = 333;
  const Tensor x = random_matrix(kTokens, kWidth, 1);
  const Tensor gates = random_matrix(kTokens, 1, 2);
  const Tensor weights = random_matrix(kTokens / 2, 2, 3);
  std::vector<int32_t> order(kTokens);
  for (size_t i = 0; i < order.size(); ++i) {
    order[i] = static_cast<int32_t>(i * 27 % order.size());
  }
  const Tensor rows = integers(order, {kTokens});
  const Tensor row_of = integers(order, {kTokens / 2, 2});
  const auto check = [&](const std::function<void(const TensorView& out, const std::function<TensorView(TensorView)>&,
                                                  const OpContext&)>& run,
                         int64_t num_rows) {
    const Tensor expected = random_matrix(num_rows, kWidth, 9);
    const Tensor actual = random_matrix(num_rows, kWidth, 9);
    run(
        expected, [](TensorView view) { return view; }, host_context());
    run(
        device.copy(actual), [&](TensorView view) { return device.copy(view); }, device.context());
    device.fetch();
    const auto result = testkit::compare(actual.span<float>(), expected.span<float>(), 1e-6, 1e-6);
    EXPECT_TRUE(result.ok) << result.text;
  };
  check([&](const TensorView& out, const auto& at,
            const OpContext& context) { gather_rows({.out = out, .x = at(x), .rows = at(rows)}, context); },
        kTokens);
  check(
      [&](const TensorView& out, const auto& at, const OpContext& context) {
        combine_rows({.out = out, .rows = at(x), .row_of = at(row_of), .weights = at(weights)}, context);
      },
      kTokens / 2);
  check([&](const TensorView& out, const auto& at,
            const OpContext& context) { add_gated_rows({.out = out, .rows = at(x), .gates = at(gates)}, context); },
        kTokens);
}

}  // namespace
}  // namespace shoal
