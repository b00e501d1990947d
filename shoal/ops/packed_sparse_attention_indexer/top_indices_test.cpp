// The order of selections, and the widening of rows before they are scored.
#include "shoal/ops/top_indices.h"

#include "shoal/ops/indexer_rows.h"
#include "shoal/ops/packed_sparse_attention_indexer/packed_sparse_attention_indexer_cases.h"

namespace shoal::packed_indexer {
namespace {

TEST(TopIndices, Order) {
  const auto choose = [](const Floats& scores, int64_t count) {
    std::vector<uint64_t> ranks(scores.size());
    testkit::Guarded<int32_t> out(at(count));
    top_indices(scores.data(), static_cast<int64_t>(scores.size()), count, ranks.data(), out.data());
    EXPECT_TRUE(out.guards_intact());
    return Ints(out.span().begin(), out.span().end());
  };
  EXPECT_EQ(choose({1, 3, 2, 3}, 2), (Ints{1, 3}));
  EXPECT_EQ(choose({1, 3, 2, 3}, 4), (Ints{1, 3, 2, 0}));
  EXPECT_EQ(choose({-0.0f, 0.0f, -0.0f, 1e-45f, -1e-45f}, 5), (Ints{3, 0, 1, 2, 4}));
  EXPECT_EQ(choose({kNan, -kInf, -kNan, kInf, -1}, 5), (Ints{3, 4, 1, 0, 2}));
  EXPECT_EQ(choose({kNan, kNan, kNan}, 2), (Ints{0, 1}));
  EXPECT_EQ(choose({}, 0), Ints{});
  testkit::Random random(4);
  for (int trial = 0; trial < 200; ++trial) {
    Floats scores(at(random.integer(1, 700)));
    for (float& score : scores) {
      score = static_cast<float>(random.integer(-5, 5));
    }
    Ints order(scores.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int32_t x, int32_t y) { return scores[at(x)] > scores[at(y)]; });
    order.resize(at(random.integer(0, static_cast<int64_t>(scores.size()))));
    EXPECT_EQ(choose(scores, static_cast<int64_t>(order.size())), order);
  }
}

TEST(TopIndices, EveryF16IsWidenedExactly) {
  std::vector<uint16_t> all(65536);
  std::iota(all.begin(), all.end(), uint16_t{0});
  Floats wide(65536);
  indexer::load_row(TensorView(all.data(), DType::kF16, {1, 65536}), 0, 0, 65536, wide.data());
  for (size_t i = 0; i < all.size(); ++i) {
    const float expected = f16_to_f32(all[i]);
    ASSERT_TRUE(std::isnan(expected) ? std::isnan(wide[i])
                                     : std::bit_cast<uint32_t>(wide[i]) == std::bit_cast<uint32_t>(expected))
        << i;
  }
}

}  // namespace
}  // namespace shoal::packed_indexer
