// Row selection against a definition in f64 with another Hadamard transform, another rounding and a full sort. Where
// selections must agree exactly the inputs are such that every score is exact in f32.
#include "shoal/ops/sparse_row_select/sparse_row_select.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>

#include "shoal/cpu/thread_pool.h"
#include "shoal/ops/sparse_row_select/sparse_row_select_choose.h"
#include "shoal/tensor/matcher.h"
#include "testkit/bound_tensors.h"
#include "testkit/expect_error.h"

namespace shoal {
namespace {

using Floats = std::vector<float>;
using Longs = std::vector<int64_t>;
using testkit::BoundTensors;
using testkit::expect_error;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr int64_t kLowest = std::numeric_limits<int64_t>::min();
constexpr int64_t kHighest = std::numeric_limits<int64_t>::max();

size_t at(int64_t i) { return static_cast<size_t>(i); }

struct Problem {
  DType dtype = DType::kF32;
  int64_t batch = 2;
  int64_t num_tokens = 3;
  int64_t num_heads = 2;
  int64_t width = 64;
  int64_t rope = 16;
  int64_t ratio = 4;
  int64_t topk = 4;
  int64_t capacity = 40;
  bool fp4 = true;
  float scale = 0.5f;
  int64_t offset = 100;
  Longs past = {40, 57};

  Longs first{};
  Longs last{};
  Floats query{}, cos{}, sin{}, rows{}, cache{}, weights{};
  int64_t num_rows = 0;

  // What the pool would say of the same step.
  void set_slots() {
    num_rows = (num_tokens + ratio - 1) / ratio + 1;
    first.clear();
    last.clear();
    for (const int64_t p : past) {
      first.push_back(p / ratio);
      last.push_back((p + num_tokens + ratio - 1) / ratio - 1);
    }
  }
  // Small whole numbers and right angles: every score is exact. Rows that may not be read are NaN.
  void fill(uint64_t seed, bool exact = true) {
    set_slots();
    testkit::Random random(seed);
    const auto numbers = [&](int64_t count) {
      Floats values(at(count));
      for (float& value : values) {
        value = exact ? static_cast<float>(random.integer(-2, 2)) : testkit::rounded_to(dtype, random.normal());
      }
      return values;
    };
    query = numbers(batch * num_tokens * num_heads * width);
    rows = numbers(batch * num_rows * width);
    cache = numbers(batch * capacity * width);
    weights = numbers(batch * num_tokens * num_heads);
    cos.clear();
    sin.clear();
    for (int64_t i = 0; i < batch * num_tokens * rope / 2; ++i) {
      const int64_t quarter = random.integer(0, 3);
      const float angle = random.uniform(0.0f, 6.0f);
      const float c = exact ? static_cast<float>(quarter % 2 == 0 ? 1 - quarter : 0) : std::cos(angle);
      const float s = exact ? static_cast<float>(quarter % 2 == 1 ? 2 - quarter : 0) : std::sin(angle);
      cos.insert(cos.end(), {c, c});
      sin.insert(sin.end(), {s, s});
    }
    for (int64_t b = 0; b < batch; ++b) {
      for (int64_t row = first[at(b)]; row < capacity; ++row) {
        std::fill_n(cache.begin() + (b * capacity + row) * width, width, kNan);
      }
      for (int64_t j = last[at(b)] - first[at(b)] + 1; j < num_rows; ++j) {
        std::fill_n(rows.begin() + (b * num_rows + j) * width, width, kNan);
      }
    }
  }
};

struct Results {
  Longs selection;
  Floats cache;
};

TensorView longs(const Longs& values, std::vector<int64_t> shape) {
  return TensorView(const_cast<int64_t*>(values.data()), DType::kI64, shape);
}

SparseRowSelectArgs arguments(const Problem& p, BoundTensors& tensors) {
  SparseRowSelectArgs a;
  a.query = tensors.floats(p.dtype, {p.batch, p.num_tokens, p.num_heads * p.width}, p.query, 3);
  a.cos = tensors.floats(DType::kF32, {p.batch, p.num_tokens, p.rope}, p.cos);
  a.sin = tensors.floats(DType::kF32, {p.batch, p.num_tokens, p.rope}, p.sin);
  a.rows = tensors.floats(p.dtype, {p.batch, p.num_rows, p.width}, p.rows, 5);
  a.first_slot = longs(p.first, {p.batch, 1});
  a.last_slot = longs(p.last, {p.batch, 1});
  a.past_cache = tensors.floats(p.dtype, {p.batch, p.capacity, p.width}, p.cache);
  a.weights = tensors.floats(p.dtype, {p.batch, p.num_tokens, p.num_heads}, p.weights);
  a.past_lens = longs(p.past, {p.batch});
  a.num_heads = p.num_heads;
  a.head_dim = p.width;
  a.rope_head_dim = p.rope;
  a.ratio = p.ratio;
  a.topk = p.topk;
  a.row_id_offset = p.offset;
  a.scale = p.scale;
  a.simulate_rotated_fp4 = p.fp4;
  return a;
}

Results run(const Problem& p, int num_threads = 2, bool in_place = false) {
  cpu::ThreadPool pool(num_threads);
  BoundTensors tensors;
  SparseRowSelectArgs a = arguments(p, tensors);
  testkit::Guarded<int64_t> selection(at(p.batch * p.num_tokens * p.topk));
  a.selection = TensorView(selection.data(), DType::kI64, {p.batch, p.num_tokens, p.topk});
  a.present_cache = in_place ? a.past_cache : tensors.output(p.dtype, {p.batch, p.capacity, p.width});
  Workspace workspace(sparse_row_select_workspace_bytes(a, num_threads));
  sparse_row_select(a, {.pool = &pool, .workspace = &workspace});
  EXPECT_TRUE(selection.guards_intact() && tensors.intact());
  return {{selection.span().begin(), selection.span().end()}, tensors.values_of(a.present_cache)};
}

std::vector<double> simulated(const std::vector<double>& x, DType dtype) {
  const size_t d = x.size();
  std::vector<double> y(d);
  for (size_t i = 0; i < d; ++i) {
    double sum = 0;
    for (size_t j = 0; j < d; ++j) {
      sum += std::popcount(i & j) % 2 == 0 ? x[j] : -x[j];
    }
    y[i] = testkit::rounded_to(dtype, static_cast<float>(sum / std::sqrt(static_cast<double>(d))));
  }
  for (size_t block = 0; block < d; block += 32) {
    double amax = 0;
    for (size_t i = block; i < block + 32; ++i) {
      amax = std::max(amax, std::fabs(y[i]));
    }
    const double scale = amax == 0 ? 1 : std::exp2(std::ceil(std::log2(std::max(amax / 6, 1e-38))));
    for (size_t i = block; i < block + 32; ++i) {
      const double u = std::min(std::fabs(y[i]) / scale, 6.0);
      const double step = u < 2 ? 0.5 : u < 4 ? 1 : 2;
      y[i] = std::copysign(step * std::ceil(u / step - 0.5), y[i]) * scale;
    }
  }
  return y;
}

Floats expected_cache(const Problem& p) {
  Floats cache = p.cache;
  for (int64_t b = 0; b < p.batch; ++b) {
    for (int64_t j = 0; j < p.num_rows && p.first[at(b)] < p.capacity; ++j) {
      const int64_t slot = p.first[at(b)] + j;
      if (slot >= 0 && slot < p.capacity && slot <= p.last[at(b)]) {
        std::copy_n(p.rows.begin() + (b * p.num_rows + j) * p.width, p.width,
                    cache.begin() + (b * p.capacity + slot) * p.width);
      }
    }
  }
  return cache;
}

int64_t visible_rows(const Problem& p, int64_t b, int64_t s) {
  return std::clamp<int64_t>((p.past[at(b)] + s + 1) / p.ratio, 0, p.capacity);
}

// Scores of the visible rows.
std::vector<double> expected_scores(const Problem& p, const Floats& cache, int64_t b, int64_t s) {
  std::vector<double> scores(at(visible_rows(p, b, s)), 0.0);
  const int64_t token = b * p.num_tokens + s;
  for (int64_t h = 0; h < p.num_heads; ++h) {
    const float* source = p.query.data() + (token * p.num_heads + h) * p.width;
    std::vector<double> q(source, source + p.width);
    for (int64_t i = 0; i < p.rope; ++i) {
      const double partner = source[p.width - p.rope + (i ^ 1)];
      const size_t angle = at(token * p.rope + i);
      q[at(p.width - p.rope + i)] =
          source[p.width - p.rope + i] * double{p.cos[angle]} + (i % 2 == 0 ? -partner : partner) * p.sin[angle];
    }
    q = p.fp4 ? simulated(q, p.dtype) : q;
    const double weight = double{p.weights[at(token * p.num_heads + h)]} * p.scale;
    for (size_t c = 0; c < scores.size(); ++c) {
      double product = 0;
      for (int64_t i = 0; i < p.width; ++i) {
        product += q[at(i)] * cache[(at(b * p.capacity) + c) * at(p.width) + at(i)];
      }
      scores[c] += (product > 0 ? product : 0) * weight;
    }
  }
  return scores;
}

Longs expected_selection(const Problem& p) {
  const Floats cache = expected_cache(p);
  Longs all;
  for (int64_t b = 0; b < p.batch; ++b) {
    for (int64_t s = 0; s < p.num_tokens; ++s) {
      const std::vector<double> scores = expected_scores(p, cache, b, s);
      Longs order(scores.size());
      std::iota(order.begin(), order.end(), 0);
      if (static_cast<int64_t>(order.size()) > p.topk) {
        std::stable_sort(order.begin(), order.end(),
                         [&](int64_t x, int64_t y) { return scores[at(x)] > scores[at(y)]; });
        order.resize(at(p.topk));
        std::sort(order.begin(), order.end());
      }
      for (int64_t& row : order) {
        row += p.offset;
      }
      order.resize(at(p.topk), -1);
      all.insert(all.end(), order.begin(), order.end());
    }
  }
  return all;
}

void expect_same_values(const Floats& actual, const Floats& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i) {
    ASSERT_TRUE(actual[i] == expected[i] || (std::isnan(actual[i]) && std::isnan(expected[i]))) << i;
  }
}

TEST(SparseRowSelect, AgreesWithF64) {
  uint64_t seed = 0;
  for (const DType dtype : kFloats) {
    for (const bool fp4 : {false, true}) {
      for (const int64_t num_tokens : {1, 5, 9}) {
        for (const int64_t topk : {1, 3, 8, 40}) {
          Problem p{.dtype = dtype, .num_tokens = num_tokens, .num_heads = 1 + static_cast<int64_t>(seed % 4)};
          p.fp4 = fp4;
          p.width = fp4 ? 64 : 22;  // sqrt(64) is exact; 22 is no multiple of a vector
          p.rope = seed % 3 == 0 ? 0 : 6;
          p.ratio = 1 + static_cast<int64_t>(seed % 5);
          p.capacity = 70;
          p.topk = topk;
          p.past = {0, static_cast<int64_t>(seed % 7 * 8)};
          p.fill(++seed);
          const Results r = run(p);
          EXPECT_EQ(r.selection, expected_selection(p)) << seed;
          expect_same_values(r.cache, expected_cache(p));
          const Results again = run(p, 1, /*in_place=*/true);
          EXPECT_EQ(again.selection, r.selection) << seed;
          expect_same_values(again.cache, r.cache);
        }
      }
    }
  }
}

// A real model's shape: scores that are not exact may choose either of two rows whose scores are nearly equal.
TEST(SparseRowSelect, ModelShape) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const int64_t width : {32, 128}) {
      Problem p{.dtype = dtype, .num_tokens = 2, .num_heads = 16, .width = width, .rope = width / 2, .topk = 64};
      p.capacity = 300;
      p.past = {1000, 400};
      p.scale = 0.03f;
      p.fill(7, /*exact=*/false);
      const Results r = run(p);
      const Floats cache = expected_cache(p);
      for (int64_t b = 0; b < 2; ++b) {
        for (int64_t s = 0; s < 2; ++s) {
          const std::vector<double> scores = expected_scores(p, cache, b, s);
          std::vector<double> sorted = scores;
          std::sort(sorted.begin(), sorted.end(), std::greater<>());
          const double threshold = sorted[at(p.topk - 1)];
          std::vector<bool> kept(scores.size(), false);
          for (int64_t i = 0; i < p.topk; ++i) {
            const int64_t row = r.selection[at((b * 2 + s) * p.topk + i)] - p.offset;
            ASSERT_GE(row, 0);
            ASSERT_LT(row, static_cast<int64_t>(scores.size()));
            kept[at(row)] = true;
          }
          EXPECT_EQ(std::count(kept.begin(), kept.end(), true), p.topk);
          for (size_t c = 0; c < scores.size(); ++c) {
            EXPECT_TRUE(kept[c] ? scores[c] > threshold - 1e-4 : scores[c] < threshold + 1e-4) << scores[c];
          }
        }
      }
    }
  }
}

TEST(SparseRowSelect, AllEqualScoresGiveTheFirstRows) {
  Problem p{.batch = 1, .num_tokens = 1, .topk = 5, .capacity = 300, .past = {1200}};
  p.fill(3);
  std::fill(p.weights.begin(), p.weights.end(), 0.0f);
  EXPECT_EQ(run(p).selection, (Longs{100, 101, 102, 103, 104}));
}

TEST(SparseRowSelect, Choice) {
  const auto choose = [](const Floats& scores, int64_t topk) {
    std::vector<uint32_t> keys(scores.size());
    testkit::Guarded<int64_t> out(at(topk));
    row_select::choose_rows(scores.data(), static_cast<int64_t>(scores.size()), topk, 10, keys.data(), out.data());
    EXPECT_TRUE(out.guards_intact());
    return Longs(out.span().begin(), out.span().end());
  };
  EXPECT_EQ(choose({1, 3, 2, 3}, 2), (Longs{11, 13}));
  EXPECT_EQ(choose({3, 1, 3, 3}, 2), (Longs{10, 12}));
  EXPECT_EQ(choose({-0.0f, 0.0f, -0.0f, 0.0f}, 3), (Longs{10, 11, 13}));
  EXPECT_EQ(choose({kNan, -kInf, kNan, kNan}, 1), (Longs{11}));
  EXPECT_EQ(choose({kNan, -kInf, -kNan, kNan}, 3), (Longs{10, 11, 12}));
  EXPECT_EQ(choose({kNan, -1, kInf, -2}, 2), (Longs{11, 12}));
  EXPECT_EQ(choose({-1, -2, -3}, 1), (Longs{10}));
  EXPECT_EQ(choose({kNan, 1}, 3), (Longs{10, 11, -1}));
  EXPECT_EQ(choose({}, 2), (Longs{-1, -1}));
  testkit::Random random(4);
  for (int trial = 0; trial < 100; ++trial) {
    Floats scores(at(random.integer(2, 400)));
    for (float& score : scores) {
      score = static_cast<float>(random.integer(-5, 5));
    }
    const int64_t topk = random.integer(1, static_cast<int64_t>(scores.size()) - 1);
    Longs order(scores.size());
    std::iota(order.begin(), order.end(), 10);
    std::stable_sort(order.begin(), order.end(),
                     [&](int64_t x, int64_t y) { return scores[at(x - 10)] > scores[at(y - 10)]; });
    order.resize(at(topk));
    std::sort(order.begin(), order.end());
    EXPECT_EQ(choose(scores, topk), order);
  }
}

// NaN in a key or a query counts as no similarity, NaN in a weight as the worst score.
TEST(SparseRowSelect, NanAmongTheScores) {
  Problem p{.batch = 1, .num_tokens = 1, .num_heads = 1, .width = 2, .rope = 0, .ratio = 1, .topk = 2, .capacity = 5};
  p.fp4 = false;
  p.past = {4};
  p.fill(1);
  p.query = {1, 1};
  p.weights = {1};
  p.cache = {kNan, 1, 1, 1, -1, -1, 2, 2, 0, 0};
  p.rows = {1, 0, 9, 9};
  EXPECT_EQ(run(p).selection, (Longs{101, 103}));
  p.weights = {-1};  // 0, -2, 0, -4, -1
  EXPECT_EQ(run(p).selection, (Longs{100, 102}));
  p.weights = {kNan};
  EXPECT_EQ(run(p).selection, (Longs{100, 101}));
  p.weights = {kInf};  // inf * 0 is NaN
  EXPECT_EQ(run(p).selection, (Longs{101, 103}));
}

TEST(SparseRowSelect, ChunksNeighboursAndThreadsChangeNothing) {
  Problem whole{.dtype = DType::kBF16, .batch = 1, .num_tokens = 12, .width = 32, .rope = 8, .topk = 5, .past = {61}};
  whole.fill(9, /*exact=*/false);
  const Results right = run(whole, 1);
  EXPECT_EQ(run(whole, 3).selection, right.selection);
  // The same tokens in two calls; rows of the whole call serve both.
  for (const int64_t cut : {1, 3, 7}) {
    Longs joined;
    Floats cache = whole.cache;
    for (const int64_t begin : {int64_t{0}, cut}) {
      const int64_t end = begin == 0 ? cut : 12;
      Problem part = whole;
      part.num_tokens = end - begin;
      part.past = {61 + begin};
      const auto slice = [&](Floats& values, int64_t row) {
        values = {values.begin() + begin * row, values.begin() + end * row};
      };
      slice(part.query, whole.num_heads * whole.width);
      slice(part.cos, whole.rope);
      slice(part.sin, whole.rope);
      slice(part.weights, whole.num_heads);
      part.set_slots();
      part.rows.assign(at(part.num_rows * whole.width), 0.0f);
      for (int64_t j = 0; j < part.num_rows && part.first[0] - whole.first[0] + j < whole.num_rows; ++j) {
        std::copy_n(whole.rows.begin() + (part.first[0] - whole.first[0] + j) * whole.width, whole.width,
                    part.rows.begin() + j * whole.width);
      }
      part.cache = cache;
      const Results r = run(part, 2, /*in_place=*/true);
      cache = r.cache;
      joined.insert(joined.end(), r.selection.begin(), r.selection.end());
    }
    EXPECT_EQ(joined, right.selection) << cut;
    expect_same_values(cache, right.cache);
  }
  // Beside another sequence.
  Problem pair = whole;
  pair.batch = 2;
  pair.past = {61, 5};
  for (Floats* values : {&pair.query, &pair.cos, &pair.sin, &pair.rows, &pair.cache, &pair.weights}) {
    const Floats twice = *values;
    values->insert(values->end(), twice.begin(), twice.end());
  }
  pair.set_slots();
  Longs first = run(pair).selection;
  first.resize(first.size() / 2);
  EXPECT_EQ(first, right.selection);
}

// A capacity so large that every token is a group of its own.
TEST(SparseRowSelect, ManyGroups) {
  Problem p{.batch = 1, .num_tokens = 6, .num_heads = 1, .width = 2, .rope = 2, .ratio = 1, .topk = 3};
  p.fp4 = false;
  p.capacity = int64_t{1} << 21;
  p.past = {300};
  p.fill(2);
  EXPECT_EQ(run(p).selection, expected_selection(p));
}

TEST(SparseRowSelect, MalformedSlotsAndLengthsStayAlone) {
  Problem p{.batch = 2, .num_tokens = 2, .topk = 2, .past = {40, 57}};
  p.fill(6);
  std::fill(p.cache.begin(), p.cache.end(), 1.0f);
  const Longs right = expected_selection(p);
  const std::vector<std::pair<int64_t, int64_t>> slots = {
      {-1, 0},
      {-2, 5},
      {-3, 5},
      {kLowest, kHighest},
      {kHighest, kHighest},
      {kHighest, kLowest},
      {0, kHighest},
      {39, kHighest},
      {40, 41},
      {5, 3},
      {kLowest, kLowest},
      {38, 39},
      {0, 2},
      {kHighest, 0},
  };
  for (const auto& [first, last] : slots) {
    p.first[0] = first;
    p.last[0] = last;
    const Results r = run(p);
    expect_same_values(r.cache, expected_cache(p));
    EXPECT_EQ(r.selection, expected_selection(p)) << first << " " << last;
    EXPECT_EQ(Longs(r.selection.begin() + 4, r.selection.end()), Longs(right.begin() + 4, right.end()));
  }
  p.set_slots();
  for (const int64_t past : {int64_t{-1}, int64_t{-2}, int64_t{-100}, kLowest, int64_t{1000}, kHighest, kHighest - 1}) {
    p.past[0] = past;
    const Longs selection = run(p).selection;
    EXPECT_EQ(Longs(selection.begin() + 4, selection.end()), Longs(right.begin() + 4, right.end()));
    if (past < 0) {
      EXPECT_EQ(Longs(selection.begin(), selection.begin() + 4), Longs(4, -1)) << past;
    } else {
      EXPECT_TRUE(std::all_of(selection.begin(), selection.end(), [](int64_t row) { return row >= 100 && row < 140; }));
    }
  }
}

TEST(SparseRowSelect, EmptyCalls) {
  Problem no_tokens{.batch = 1, .num_tokens = 0, .past = {8}};
  no_tokens.fill(1);
  expect_same_values(run(no_tokens).cache, expected_cache(no_tokens));
  EXPECT_TRUE(run(no_tokens).selection.empty());
  Problem nothing_visible{.batch = 1, .num_tokens = 2, .past = {0}};
  nothing_visible.fill(1);
  EXPECT_EQ(run(nothing_visible).selection, Longs(8, -1));
}

TEST(SparseRowSelect, Rejections) {
  Problem p;
  p.fill(1);
  BoundTensors tensors;
  const SparseRowSelectArgs good = arguments(p, tensors);
  sparse_row_select_shapes(good);
  const auto rejects = [&](std::string_view message, const std::function<void(SparseRowSelectArgs&)>& change) {
    SparseRowSelectArgs a = good;
    change(a);
    expect_error(ErrorCode::kInvalidArgument, concat("sparse_row_select: ", message),
                 [&] { sparse_row_select_shapes(a); });
  };
  rejects("num_heads is 0, expected 1 to", [](SparseRowSelectArgs& a) { a.num_heads = 0; });
  rejects("head_dim is -1, expected 1 to", [](SparseRowSelectArgs& a) { a.head_dim = -1; });
  rejects("rope_head_dim is 7, expected an even number", [](SparseRowSelectArgs& a) { a.rope_head_dim = 7; });
  rejects("rope_head_dim is 66", [](SparseRowSelectArgs& a) { a.rope_head_dim = 66; });
  rejects("rope_head_dim is -2", [](SparseRowSelectArgs& a) { a.rope_head_dim = -2; });
  rejects("ratio is 0", [](SparseRowSelectArgs& a) { a.ratio = 0; });
  rejects("topk is 0", [](SparseRowSelectArgs& a) { a.topk = 0; });
  rejects("topk is 41, but past_cache has a capacity of 40", [](SparseRowSelectArgs& a) { a.topk = 41; });
  rejects("row_id_offset is 0", [](SparseRowSelectArgs& a) { a.row_id_offset = 0; });
  rejects("row_id_offset is 9223372036854775807, too large",
          [](SparseRowSelectArgs& a) { a.row_id_offset = kHighest; });
  for (const int64_t width : {16, 48}) {
    rejects(concat("simulate_rotated_fp4 needs head_dim to be a power of two of at least 32, not ", width),
            [&](SparseRowSelectArgs& a) { a.head_dim = width; });
  }
  rejects("query is required", [](SparseRowSelectArgs& a) { a.query = {}; });
  rejects("query has type int32", [](SparseRowSelectArgs& a) { a.query.dtype = DType::kI32; });
  rejects("query has shape [2, 3, 128], expected [batch_size, sequence_length, 192]",
          [](SparseRowSelectArgs& a) { a.num_heads = 3; });
  rejects("rows is required", [](SparseRowSelectArgs& a) { a.rows = {}; });
  rejects("rows has type float16, expected float32", [](SparseRowSelectArgs& a) { a.rows.dtype = DType::kF16; });
  rejects("rows has shape [2, 2, 63]", [](SparseRowSelectArgs& a) { a.rows.shape[2] = 63; });
  rejects("first_slot has shape [2, 2]", [](SparseRowSelectArgs& a) { a.first_slot.shape[1] = 2; });
  rejects("first_slot has type int32, expected int64",
          [](SparseRowSelectArgs& a) { a.first_slot.dtype = DType::kI32; });
  rejects("last_slot has shape [2, 2]", [](SparseRowSelectArgs& a) { a.last_slot.shape[1] = 2; });
  rejects("past_cache has shape [2, 40, 63]", [](SparseRowSelectArgs& a) { a.past_cache.shape[2] = 63; });
  rejects("past_cache has type bfloat16", [](SparseRowSelectArgs& a) { a.past_cache.dtype = DType::kBF16; });
  rejects("weights has shape [2, 3, 1], expected 12 elements", [](SparseRowSelectArgs& a) {
    a.weights = TensorView(a.weights.data, DType::kF32, {2, 3, 1});
  });
  rejects("weights has type float16", [](SparseRowSelectArgs& a) { a.weights.dtype = DType::kF16; });
  rejects("cos is required", [](SparseRowSelectArgs& a) { a.cos = {}; });
  rejects("cos has shape [2, 3, 16], expected 48 elements", [](SparseRowSelectArgs& a) { a.rope_head_dim = 8; });
  rejects("sin has type float16", [](SparseRowSelectArgs& a) { a.sin.dtype = DType::kF16; });
  rejects("sin must be contiguous", [](SparseRowSelectArgs& a) { a.sin.strides[0] = 7; });
  rejects("past_lens has shape [1]", [](SparseRowSelectArgs& a) { a.past_lens.shape[0] = 1; });
  // Without rotary the tables are not looked at; any shape of weights will do.
  SparseRowSelectArgs a = good;
  a.rope_head_dim = 0;
  a.cos = a.sin = {};
  a.weights = TensorView(a.weights.data, p.dtype, {12});
  EXPECT_EQ(sparse_row_select_shapes(a).selection.shape, (Longs{2, 3, 4}));
  EXPECT_EQ(sparse_row_select_shapes(a).present_cache.shape, (Longs{2, 40, 64}));
  // Outputs; a rejected call writes nothing.
  cpu::ThreadPool pool(1);
  Workspace workspace(sparse_row_select_workspace_bytes(good, 1));
  a = good;
  Longs selection(24, 7);
  a.selection = longs(selection, {2, 3, 4});
  a.present_cache = tensors.output(p.dtype, {2, 40, 64});
  const auto rejects_output = [&](std::string_view message, const SparseRowSelectArgs& args) {
    expect_error(ErrorCode::kInvalidArgument, message,
                 [&] { sparse_row_select(args, {.pool = &pool, .workspace = &workspace}); });
    EXPECT_EQ(selection, Longs(24, 7));
    EXPECT_TRUE(std::isnan(*a.present_cache.as<float>()));
  };
  SparseRowSelectArgs bad = a;
  bad.selection = longs(selection, {2, 3, 3});
  rejects_output("selection has shape [2, 3, 3], expected [2, 3, 4]", bad);
  bad = a;
  bad.present_cache.strides[0] += 1;
  rejects_output("present_cache must be contiguous", bad);
  bad = a;
  bad.present_cache.dtype = DType::kF16;
  rejects_output("present_cache has type float16, expected float32", bad);
}

}  // namespace
}  // namespace shoal
