// Pooling against a definition in f64 that walks absolute tokens; the number grids against their formulas.
#include "shoal/ops/gated_latent_pool/gated_latent_pool.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <limits>

#include "shoal/cpu/thread_pool.h"
#include "shoal/ops/latent_rows.h"
#include "shoal/tensor/matcher.h"
#include "testkit/bound_tensors.h"
#include "testkit/expect_error.h"

namespace shoal {
namespace {

using Floats = std::vector<float>;
using Doubles = std::vector<double>;
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
  int64_t ratio = 4;
  int64_t multiplier = 2;
  int64_t width = 128;
  int64_t rope = 64;
  int64_t num_tokens = 7;
  Longs past = {0, 5};
  int64_t max_seq_len = 64;
  bool fp8 = false;
  bool fp4 = false;
  bool joined = false;  // kv and score in one tensor

  Floats kv{}, score{}, state_kv{}, state_score{}, ape{}, weight{}, cos{}, sin{};

  int64_t batch() const { return static_cast<int64_t>(past.size()); }
  int64_t span() const { return multiplier * ratio; }
  int64_t features() const { return multiplier * width; }
  int64_t num_rows() const { return (num_tokens + ratio - 1) / ratio + 1; }
  std::string name() const {
    return concat(to_string(dtype), " r", ratio, " m", multiplier, " d", width, " rd", rope, " S", num_tokens,
                  fp8 ? " fp8" : "", fp4 ? " fp4" : "", joined ? " joined" : "");
  }
  // States before the first token of a sequence are NaN: they must not be read.
  void fill(uint64_t seed) {
    testkit::Random random(seed);
    const auto numbers = [&](int64_t count, DType type, float deviation = 1.0f) {
      Floats values = random.normals(at(count), deviation);
      for (float& value : values) {
        value = testkit::rounded_to(type, value);
      }
      return values;
    };
    kv = numbers(batch() * num_tokens * features(), dtype);
    score = numbers(batch() * num_tokens * features(), dtype);
    state_kv = numbers(batch() * span() * features(), DType::kF32);
    state_score = numbers(batch() * span() * features(), DType::kF32);
    for (int64_t b = 0; b < batch(); ++b) {
      const int64_t unwritten = std::clamp<int64_t>(span() - past[at(b)], 0, span());
      std::fill_n(state_kv.begin() + b * span() * features(), unwritten * features(), kNan);
      std::fill_n(state_score.begin() + b * span() * features(), unwritten * features(), kNan);
    }
    ape = numbers(ratio * features(), DType::kF32, 0.5f);
    weight = numbers(width, DType::kF32);
    for (float& value : weight) {
      value = std::fabs(value) + 0.5f;
    }
    cos.clear();
    sin.clear();
    for (int64_t pos = 0; pos < max_seq_len; ++pos) {
      for (int64_t i = 0; i < rope / 2; ++i) {
        const float angle =
            static_cast<float>(pos) * std::pow(10000.0f, -2.0f * static_cast<float>(i) / static_cast<float>(rope));
        cos.insert(cos.end(), 2, std::cos(angle));
        sin.insert(sin.end(), 2, std::sin(angle));
      }
    }
  }
};

struct Results {
  Floats rows;
  Floats state_kv;
  Floats state_score;
  Longs first;
  Longs last;
  int64_t row_count = 0;
};

TensorView longs(const Longs& values, std::vector<int64_t> shape) {
  return TensorView(const_cast<int64_t*>(values.data()), DType::kI64, shape);
}

GatedLatentPoolArgs arguments(const Problem& p, BoundTensors& tensors) {
  GatedLatentPoolArgs a;
  if (p.joined) {
    Floats both;
    for (int64_t row = 0; row < p.batch() * p.num_tokens; ++row) {
      for (const Floats* half : {&p.kv, &p.score}) {
        both.insert(both.end(), half->begin() + row * p.features(), half->begin() + (row + 1) * p.features());
      }
    }
    a.kv = tensors.floats(p.dtype, {p.batch(), p.num_tokens, 2 * p.features()}, both, 3);
  } else {
    a.kv = tensors.floats(p.dtype, {p.batch(), p.num_tokens, p.features()}, p.kv, 3);
    a.score = tensors.floats(p.dtype, {p.batch(), p.num_tokens, p.features()}, p.score);
  }
  a.past_state_kv = tensors.floats(DType::kF32, {p.batch(), p.span(), p.features()}, p.state_kv);
  a.past_state_score = tensors.floats(DType::kF32, {p.batch(), p.span(), p.features()}, p.state_score);
  a.ape = tensors.floats(DType::kF32, {p.ratio, p.features()}, p.ape, 1);
  a.norm_weight = tensors.floats(DType::kF32, {p.width}, p.weight);
  a.cos = tensors.floats(DType::kF32, {p.max_seq_len, p.rope}, p.cos);
  a.sin = tensors.floats(DType::kF32, {p.max_seq_len, p.rope}, p.sin, 2);
  a.past_lens = longs(p.past, {p.batch()});
  a.ratio = p.ratio;
  a.window_multiplier = p.multiplier;
  a.head_dim = p.width;
  a.rope_head_dim = p.rope;
  a.max_seq_len = p.max_seq_len;
  a.simulate_fp8 = p.fp8;
  a.simulate_rotated_fp4 = p.fp4;
  return a;
}

Results run(const Problem& p, int num_threads = 2, bool in_place = false) {
  cpu::ThreadPool pool(num_threads);
  BoundTensors tensors;
  GatedLatentPoolArgs a = arguments(p, tensors);
  Results r;
  r.first.assign(at(p.batch()), 77);
  r.last = r.first;
  const std::vector<int64_t> state_shape = {p.batch(), p.span(), p.features()};
  a.rows = tensors.output(p.dtype, {p.batch(), p.num_rows(), p.width});
  a.first_slot = longs(r.first, {p.batch(), 1});
  a.last_slot = longs(r.last, {p.batch(), 1});
  a.row_count = TensorView(&r.row_count, DType::kI64, std::initializer_list<int64_t>{});
  a.present_state_kv = in_place ? a.past_state_kv : tensors.output(DType::kF32, state_shape);
  a.present_state_score = in_place ? a.past_state_score : tensors.output(DType::kF32, state_shape);
  Workspace workspace(gated_latent_pool_workspace_bytes(a, num_threads));
  gated_latent_pool(a, {.pool = &pool, .workspace = &workspace});
  EXPECT_TRUE(tensors.intact());
  r.rows = tensors.values_of(a.rows);
  r.state_kv = tensors.values_of(a.present_state_kv);
  r.state_score = tensors.values_of(a.present_state_score);
  return r;
}

double e4m3(double x) {
  const double a = std::min(std::fabs(x), 448.0);
  const double step = std::exp2(std::max(std::floor(std::log2(std::max(a, 1e-300))), -6.0) - 3);
  return std::copysign(std::nearbyint(a / step) * step, x);
}

double e2m1(double x) {
  const double a = std::min(std::fabs(x), 6.0);
  const double step = a < 2 ? 0.5 : a < 4 ? 1 : 2;
  return std::copysign(step * std::ceil(a / step - 0.5), x);
}

template <class Round>
void to_grid(double* values, int64_t count, int64_t block, double limit, double floor, Round&& round) {
  for (int64_t first = 0; first < count; first += block) {
    double amax = 0;
    for (int64_t i = first; i < first + block; ++i) {
      amax = std::max(amax, std::fabs(values[i]));
    }
    const double scale = amax == 0 ? 1 : std::exp2(std::ceil(std::log2(std::max(amax / limit, floor))));
    for (int64_t i = first; i < first + block; ++i) {
      values[i] = round(values[i] / scale) * scale;
    }
  }
}

Doubles times_hadamard(const Doubles& x) {
  Doubles y(x.size());
  for (size_t i = 0; i < x.size(); ++i) {
    for (size_t j = 0; j < x.size(); ++j) {
      y[i] += std::popcount(i & j) % 2 == 0 ? x[j] : -x[j];
    }
    y[i] /= std::sqrt(static_cast<double>(x.size()));
  }
  return y;
}

// Feature f of absolute token t of sequence b; t must exist.
double feature(const Problem& p, bool of_score, int64_t b, int64_t t, int64_t f) {
  const int64_t past = p.past[at(b)];
  if (t >= past) {
    return (of_score ? p.score : p.kv)[at((b * p.num_tokens + t - past) * p.features() + f)];
  }
  return (of_score ? p.state_score : p.state_kv)[at((b * p.span() + t - past + p.span()) * p.features() + f)];
}

Doubles expected_row(const Problem& p, int64_t b, int64_t j) {
  const int64_t total = p.past[at(b)] + p.num_tokens;
  const int64_t p0 = (p.past[at(b)] / p.ratio + j) * p.ratio;
  Doubles row(at(p.width));
  for (int64_t c = 0; c < p.width; ++c) {
    Doubles logits, values;
    for (int64_t t = p0 - (p.multiplier - 1) * p.ratio; t < std::min(p0 + p.ratio, total); ++t) {
      if (t >= 0) {
        const int64_t f = p.multiplier == 2 && t >= p0 ? p.width + c : c;
        logits.push_back(feature(p, true, b, t, f) + p.ape[at(t % p.ratio * p.features() + f)]);
        values.push_back(feature(p, false, b, t, f));
      }
    }
    double sum = 0;
    for (size_t i = 0; i < logits.size(); ++i) {
      sum += std::exp(logits[i]);
    }
    for (size_t i = 0; i < logits.size(); ++i) {
      row[at(c)] += std::exp(logits[i]) / sum * values[i];
    }
    if (logits.empty() && total > 0) {
      row[at(c)] = feature(p, false, b, total - 1, c);
    }
    row[at(c)] = testkit::rounded_to(p.dtype, static_cast<float>(row[at(c)]));
  }
  double squares = 0;
  for (const double x : row) {
    squares += x * x;
  }
  for (int64_t c = 0; c < p.width; ++c) {
    row[at(c)] *= p.weight[at(c)] / std::sqrt(squares / static_cast<double>(p.width) + 1e-6);
  }
  const int64_t pos = std::min(p0, p.max_seq_len - 1);
  double* tail = row.data() + p.width - p.rope;
  for (int64_t i = 0; i < p.rope; i += 2) {
    const double cos = p.cos[at(pos * p.rope + i)], sin = p.sin[at(pos * p.rope + i)];
    const double x = tail[i], y = tail[i + 1];
    tail[i] = x * cos - y * sin;
    tail[i + 1] = y * cos + x * sin;
  }
  if (p.fp8) {
    to_grid(row.data(), p.width - p.rope, 64, 448, 1e-30, e4m3);
  }
  if (p.fp4) {
    row = times_hadamard(row);
    for (double& x : row) {
      x = testkit::rounded_to(p.dtype, static_cast<float>(x));
    }
    to_grid(row.data(), p.width, 32, 6, 1e-38, e2m1);
  }
  for (double& x : row) {
    x = testkit::rounded_to(p.dtype, static_cast<float>(x));
  }
  return row;
}

// At most 0.5 % of the elements beyond the tolerance, where grids are simulated: a value near the middle of a step may
// fall on either side. Otherwise none.
void expect_right(const Problem& p) {
  SCOPED_TRACE(p.name());
  const Results r = run(p);
  EXPECT_EQ(r.row_count, p.num_rows());
  size_t num_bad = 0;
  const double tolerance = p.dtype == DType::kF32 ? 1e-5 : p.dtype == DType::kF16 ? 6e-3 : 3e-2;
  for (int64_t b = 0; b < p.batch(); ++b) {
    const int64_t past = p.past[at(b)];
    EXPECT_EQ(r.first[at(b)], past / p.ratio);
    EXPECT_EQ(r.last[at(b)], (past + p.num_tokens + p.ratio - 1) / p.ratio - 1);
    for (int64_t j = 0; j < p.num_rows(); ++j) {
      const Doubles row = expected_row(p, b, j);
      for (int64_t c = 0; c < p.width; ++c) {
        const double actual = r.rows[at((b * p.num_rows() + j) * p.width + c)];
        num_bad += std::fabs(actual - row[at(c)]) <= tolerance * std::max(1.0, std::fabs(row[at(c)])) ? 0 : 1;
      }
    }
    for (int64_t i = 0; i < p.span() * p.features(); ++i) {
      const int64_t token = past + p.num_tokens - p.span() + i / p.features();
      const size_t place = at(b * p.span() * p.features() + i);
      const int64_t f = i % p.features();
      if (token >= 0) {
        EXPECT_EQ(r.state_kv[place], feature(p, false, b, token, f));
        EXPECT_EQ(r.state_score[place], feature(p, true, b, token, f));
      } else {
        EXPECT_TRUE(std::isnan(r.state_kv[place]) && std::isnan(r.state_score[place]));
      }
    }
  }
  EXPECT_LE(static_cast<double>(num_bad), p.fp8 || p.fp4 ? 5e-3 * static_cast<double>(r.rows.size()) : 0.0);
}

TEST(GatedLatentPool, AgreesWithF64) {
  uint64_t seed = 0;
  for (const DType dtype : kFloats) {
    for (const auto& [ratio, multiplier] : {std::pair<int64_t, int64_t>{4, 2}, {8, 1}, {1, 1}, {3, 2}}) {
      for (const auto& [num_tokens, past] :
           {std::pair<int64_t, Longs>{7, {0, 5}}, {1, {11, 3}}, {20, {0, 2, 100}}, {0, {0, 8, 9}}}) {
        for (const int grids : {0, 1, 2, 3}) {
          Problem p{.dtype = dtype, .ratio = ratio, .multiplier = multiplier, .num_tokens = num_tokens, .past = past};
          p.fp8 = grids % 2 == 1;
          p.fp4 = grids >= 2;
          p.joined = ++seed % 2 == 0;
          p.rope = grids == 0 && seed % 3 == 0 ? 0 : 64;
          p.width = grids == 0 && seed % 5 == 0 ? 70 : 128;
          p.fill(seed);
          expect_right(p);
        }
      }
    }
  }
}

TEST(GatedLatentPool, ModelShapes) {
  for (const auto& [ratio, multiplier] : {std::pair<int64_t, int64_t>{4, 2}, {128, 1}}) {
    Problem p{.dtype = DType::kBF16, .ratio = ratio, .multiplier = multiplier, .width = 512, .max_seq_len = 1100};
    p.fp8 = true;
    p.num_tokens = 1;
    p.past = {1000, 1001};
    p.fill(1);
    expect_right(p);
    p.num_tokens = 300;
    p.past = {0, 3};
    p.fill(2);
    expect_right(p);
  }
}

void expect_same_bits(const Floats& actual, const Floats& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i) {
    ASSERT_EQ(std::bit_cast<uint32_t>(actual[i]), std::bit_cast<uint32_t>(expected[i])) << i;
  }
}

TEST(GatedLatentPool, InPlaceThreadsAndNeighboursChangeNothing) {
  Problem p{.dtype = DType::kF16, .num_tokens = 9, .past = {5, 17, 2}, .fp8 = true, .fp4 = true};
  p.fill(4);
  const Results right = run(p);
  for (const int num_threads : {1, 3}) {
    const Results r = run(p, num_threads, /*in_place=*/true);
    expect_same_bits(r.rows, right.rows);
    expect_same_bits(r.state_kv, right.state_kv);
    expect_same_bits(r.state_score, right.state_score);
  }
  Problem alone = p;
  alone.past = {17};
  const auto slice = [](Floats& values, int64_t row) { values = {values.begin() + row, values.begin() + 2 * row}; };
  slice(alone.kv, p.num_tokens * p.features());
  slice(alone.score, p.num_tokens * p.features());
  slice(alone.state_kv, p.span() * p.features());
  slice(alone.state_score, p.span() * p.features());
  Floats rows = right.rows;
  slice(rows, p.num_rows() * p.width);
  expect_same_bits(run(alone).rows, rows);
}

TEST(GatedLatentPool, ChunksAgreeWithTheWhole) {
  for (const int64_t multiplier : {1, 2}) {
    Problem whole{.dtype = DType::kBF16, .multiplier = multiplier, .num_tokens = 13, .past = {6}, .fp8 = true};
    whole.fill(8);
    const Results right = run(whole);
    for (const int64_t cut : {1, 2, 6, 12}) {
      Problem head = whole, tail = whole;
      head.num_tokens = cut;
      tail.num_tokens = 13 - cut;
      tail.past = {6 + cut};
      for (Floats Problem::*values : {&Problem::kv, &Problem::score}) {
        (head.*values).resize(at(cut * whole.features()));
        (tail.*values).erase((tail.*values).begin(), (tail.*values).begin() + cut * whole.features());
      }
      const Results first = run(head);
      tail.state_kv = first.state_kv;
      tail.state_score = first.state_score;
      const Results second = run(tail);
      expect_same_bits(second.state_kv, right.state_kv);
      expect_same_bits(second.state_score, right.state_score);
      // The second call makes the row that the first left open once more.
      for (int64_t slot = second.first[0]; slot <= second.last[0]; ++slot) {
        const auto row_of = [&](const Results& r) {
          const auto begin = r.rows.begin() + (slot - r.first[0]) * whole.width;
          return Floats(begin, begin + whole.width);
        };
        expect_same_bits(row_of(second), row_of(right));
      }
      for (int64_t slot = first.first[0]; slot < second.first[0]; ++slot) {
        const auto begin = (slot - right.first[0]) * whole.width;
        expect_same_bits({first.rows.begin() + begin, first.rows.begin() + begin + whole.width},
                         {right.rows.begin() + begin, right.rows.begin() + begin + whole.width});
      }
    }
  }
}

TEST(GatedLatentPool, MalformedLengthsStayAlone) {
  Problem p{.num_tokens = 5, .past = {5, 17}};
  p.fill(5);
  const Results right = run(p);
  for (const int64_t past : {int64_t{-1}, kLowest, kHighest, int64_t{1} << 62}) {
    p.past[0] = past;
    const Results r = run(p);
    EXPECT_EQ(r.first, (Longs{0, 4}));
    EXPECT_EQ(r.last, (Longs{-1, 5}));
    const int64_t half = p.num_rows() * p.width;
    EXPECT_EQ(Floats(r.rows.begin(), r.rows.begin() + half), Floats(at(half), 0.0f));
    expect_same_bits({r.rows.begin() + half, r.rows.end()}, {right.rows.begin() + half, right.rows.end()});
    expect_same_bits(r.state_kv, right.state_kv);
  }
  p.past[0] = (int64_t{1} << 62) - 1;  // sound, far past the tables
  p.fill(5);
  const Results r = run(p);
  EXPECT_EQ(r.first[0], p.past[0] / 4);
  EXPECT_TRUE(std::all_of(r.rows.begin(), r.rows.end(), [](float x) { return std::isfinite(x); }));
}

TEST(GatedLatentPool, NanStaysInItsRow) {
  Problem p{.ratio = 2, .multiplier = 1, .width = 4, .rope = 0, .num_tokens = 6, .past = {0}};
  p.fill(6);
  p.score[2 * 4] = kNan;   // token 2: row 1
  p.kv[5 * 4 + 1] = kInf;  // token 5: row 2
  const Results r = run(p);
  for (int64_t c = 0; c < 4; ++c) {
    EXPECT_TRUE(std::isfinite(r.rows[at(c)]));
    EXPECT_TRUE(std::isnan(r.rows[at(4 + c)]));
    EXPECT_FALSE(std::isfinite(r.rows[at(8 + c)]) && c == 1);
  }
}

TEST(GatedLatentPool, Scales) {
  for (int exponent = -120; exponent < 127; ++exponent) {
    const float power = std::ldexp(1.0f, exponent);
    EXPECT_EQ(latent::block_scale(power, 1.0f, 1e-38f), power);
    EXPECT_EQ(latent::block_scale(std::nextafter(power, kInf), 1.0f, 1e-38f), 2.0f * power);
    EXPECT_EQ(latent::block_scale(std::nextafter(power, 0.0f), 1.0f, 1e-38f), power);
  }
  EXPECT_EQ(latent::block_scale(0.0f, 6.0f, 1e-38f), 1.0f);
  EXPECT_EQ(latent::block_scale(6.0f, 6.0f, 1e-38f), 1.0f);
  EXPECT_EQ(latent::block_scale(6.01f, 6.0f, 1e-38f), 2.0f);
  EXPECT_EQ(latent::block_scale(448.0f, 448.0f, 1e-30f), 1.0f);
  EXPECT_EQ(latent::block_scale(1e-44f, 448.0f, 1e-30f), 0x1p-99f);
  EXPECT_EQ(latent::block_scale(1e-44f, 6.0f, 1e-38f), 0x1p-126f);
  EXPECT_EQ(latent::block_scale(kInf, 6.0f, 1e-38f), kInf);
}

TEST(GatedLatentPool, Grids) {
  const Floats fp4 = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  for (size_t i = 0; i < fp4.size(); ++i) {
    EXPECT_EQ(latent::nearest_fp4(fp4[i]), fp4[i]);
    if (i > 0) {  // a tie goes down
      const float middle = (fp4[i - 1] + fp4[i]) / 2;
      EXPECT_EQ(latent::nearest_fp4(middle), fp4[i - 1]);
      EXPECT_EQ(latent::nearest_fp4(std::nextafter(middle, kInf)), fp4[i]);
    }
  }
  EXPECT_EQ(latent::nearest_fp4(100.0f), 6.0f);
  testkit::Random random(3);
  for (int trial = 0; trial < 200; ++trial) {
    const float size = std::exp(random.uniform(-60.0f, 60.0f));
    const Floats x = random.normals(64, size);
    for (const bool is_fp8 : {false, true}) {
      Floats actual = x;
      Doubles expected(x.begin(), x.end());
      if (is_fp8) {
        latent::round_to_fp8(actual.data(), 64);
        to_grid(expected.data(), 64, 64, 448, 1e-30, e4m3);
      } else {
        latent::round_to_fp4(actual.data(), 64);
        to_grid(expected.data(), 64, 32, 6, 1e-38, e2m1);
      }
      for (size_t i = 0; i < 64; ++i) {
        EXPECT_EQ(actual[i], static_cast<float>(expected[i])) << is_fp8 << " " << x[i];
      }
    }
  }
  for (const auto round : {latent::round_to_fp8, latent::round_to_fp4}) {
    Floats values(64, 1.0f);
    values[3] = kNan;
    round(values.data(), 64);
    EXPECT_TRUE(std::isnan(values[3]));
    values[3] = 1.0f;
    EXPECT_EQ(values, Floats(64, 1.0f));
    values[5] = -kInf;
    round(values.data(), 64);
    EXPECT_TRUE(std::isnan(values[5]) && std::isnan(values[0]));
    values.assign(64, 0.0f);
    round(values.data(), 64);
    EXPECT_EQ(values, Floats(64, 0.0f));
  }
}

TEST(GatedLatentPool, Hadamard) {
  testkit::Random random(2);
  for (const int64_t width : {1, 2, 32, 128, 512}) {
    Floats x = random.normals(at(width));
    const Doubles expected = times_hadamard(Doubles(x.begin(), x.end()));
    latent::hadamard(x.data(), width);
    for (size_t i = 0; i < x.size(); ++i) {
      EXPECT_NEAR(x[i], expected[i], 1e-5);
    }
  }
  EXPECT_FALSE(latent::fits_rotated_fp4(16));
  EXPECT_FALSE(latent::fits_rotated_fp4(96));
  EXPECT_TRUE(latent::fits_rotated_fp4(32));
}

TEST(GatedLatentPool, Rejections) {
  Problem p;
  p.fill(1);
  BoundTensors tensors;
  const GatedLatentPoolArgs good = arguments(p, tensors);
  gated_latent_pool_shapes(good);
  const auto rejects = [&](std::string_view message, const std::function<void(GatedLatentPoolArgs&)>& change) {
    GatedLatentPoolArgs a = good;
    change(a);
    expect_error(ErrorCode::kInvalidArgument, concat("gated_latent_pool: ", message),
                 [&] { gated_latent_pool_shapes(a); });
  };
  rejects("ratio is 0, expected 1 to", [](GatedLatentPoolArgs& a) { a.ratio = 0; });
  rejects("ratio is 9223372036854775807, expected 1 to", [](GatedLatentPoolArgs& a) { a.ratio = kHighest; });
  rejects("window_multiplier is 3, expected 1 or 2", [](GatedLatentPoolArgs& a) { a.window_multiplier = 3; });
  rejects("head_dim is 0", [](GatedLatentPoolArgs& a) { a.head_dim = 0; });
  rejects("rope_head_dim is 63, expected an even number", [](GatedLatentPoolArgs& a) { a.rope_head_dim = 63; });
  rejects("rope_head_dim is 130", [](GatedLatentPoolArgs& a) { a.rope_head_dim = 130; });
  rejects("rope_head_dim is -2", [](GatedLatentPoolArgs& a) { a.rope_head_dim = -2; });
  rejects("max_seq_len is 0", [](GatedLatentPoolArgs& a) { a.max_seq_len = 0; });
  rejects("epsilon is -1", [](GatedLatentPoolArgs& a) { a.epsilon = -1.0f; });
  rejects("epsilon is nan", [](GatedLatentPoolArgs& a) { a.epsilon = kNan; });
  rejects("simulate_fp8 needs head_dim - rope_head_dim to be a multiple of 64, not 66", [](GatedLatentPoolArgs& a) {
    a.simulate_fp8 = true;
    a.rope_head_dim = 62;
  });
  rejects("simulate_rotated_fp4 needs head_dim to be a power of two of at least 32, not 96",
          [](GatedLatentPoolArgs& a) {
            a.simulate_rotated_fp4 = true;
            a.head_dim = 96;
          });
  rejects("kv is required", [](GatedLatentPoolArgs& a) { a.kv = {}; });
  rejects("kv has type int32", [](GatedLatentPoolArgs& a) { a.kv.dtype = DType::kI32; });
  rejects("kv has shape [2, 7, 256], expected [batch_size, sequence_length, 512]",
          [](GatedLatentPoolArgs& a) { a.score = {}; });
  rejects("score has shape [2, 7, 255]", [](GatedLatentPoolArgs& a) { a.score.shape[2] = 255; });
  rejects("score has type float16, expected float32", [](GatedLatentPoolArgs& a) { a.score.dtype = DType::kF16; });
  rejects("past_state_kv has shape [2, 7, 256], expected [batch_size = 2, 8, 256]",
          [](GatedLatentPoolArgs& a) { a.past_state_kv.shape[1] = 7; });
  rejects("past_state_kv has type float16", [](GatedLatentPoolArgs& a) { a.past_state_kv.dtype = DType::kF16; });
  rejects("past_state_score is required", [](GatedLatentPoolArgs& a) { a.past_state_score = {}; });
  rejects("ape has shape [3, 256]", [](GatedLatentPoolArgs& a) { a.ape.shape[0] = 3; });
  rejects("norm_weight has shape [127]", [](GatedLatentPoolArgs& a) { a.norm_weight.shape[0] = 127; });
  rejects("cos is required", [](GatedLatentPoolArgs& a) { a.cos = {}; });
  rejects("cos has shape [64, 64], expected [max_seq_len = 65, 64]",
          [](GatedLatentPoolArgs& a) { a.max_seq_len = 65; });
  rejects("sin has type bfloat16", [](GatedLatentPoolArgs& a) { a.sin.dtype = DType::kBF16; });
  rejects("past_lens has type int32, expected int64", [](GatedLatentPoolArgs& a) { a.past_lens.dtype = DType::kI32; });
  rejects("past_lens has shape [1]", [](GatedLatentPoolArgs& a) { a.past_lens.shape[0] = 1; });

  cpu::ThreadPool pool(1);
  Workspace workspace(gated_latent_pool_workspace_bytes(good, 1));
  GatedLatentPoolArgs a = good;
  Longs slots(2, 77);
  int64_t row_count = 77;
  a.rows = tensors.output(p.dtype, {2, 3, 128});
  a.first_slot = a.last_slot = longs(slots, {2, 1});
  a.row_count = TensorView(&row_count, DType::kI64, std::initializer_list<int64_t>{});
  a.present_state_kv = a.past_state_kv;
  a.present_state_score = a.past_state_score;
  const Floats state = tensors.values_of(a.past_state_kv);
  const auto rejects_output = [&](std::string_view message, const std::function<void(GatedLatentPoolArgs&)>& change) {
    GatedLatentPoolArgs bad = a;
    change(bad);
    expect_error(ErrorCode::kInvalidArgument, message,
                 [&] { gated_latent_pool(bad, {.pool = &pool, .workspace = &workspace}); });
    EXPECT_EQ(row_count, 77);
    EXPECT_EQ(slots, Longs(2, 77));
    EXPECT_TRUE(std::isnan(*a.rows.as<float>()));
    expect_same_bits(tensors.values_of(a.past_state_kv), state);
  };
  rejects_output("rows has shape [2, 2, 128], expected [2, 3, 128]",
                 [](GatedLatentPoolArgs& bad) { bad.rows.shape[1] = 2; });
  rejects_output("rows has type float16, expected float32",
                 [](GatedLatentPoolArgs& bad) { bad.rows.dtype = DType::kF16; });
  rejects_output("first_slot is required", [](GatedLatentPoolArgs& bad) { bad.first_slot = {}; });
  rejects_output("row_count has shape [2, 1], expected []",
                 [](GatedLatentPoolArgs& bad) { bad.row_count = bad.last_slot; });
  rejects_output("present_state_kv must be contiguous",
                 [](GatedLatentPoolArgs& bad) { bad.present_state_kv.strides[0] += 1; });
  expect_error(ErrorCode::kInvalidArgument, "no variant \"fast\"",
               [&] { gated_latent_pool(a, {.pool = &pool, .workspace = &workspace, .variant = "fast"}); });
  EXPECT_EQ(row_count, 77);
}

}  // namespace
}  // namespace shoal
