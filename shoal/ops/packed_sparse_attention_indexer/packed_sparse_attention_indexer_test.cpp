// Calls against the definition in f64 of ops/indexer_cases.h; exact ties; malformed requests; captures.
#include <gtest/gtest.h>

#include <functional>

#include "shoal/ops/indexer_rows.h"
#include "shoal/ops/packed_sparse_attention_indexer/packed_sparse_attention_indexer_cases.h"
#include "shoal/tensor/matcher.h"
#include "testkit/expect_error.h"

namespace shoal::packed_indexer {
namespace {

using testkit::expect_error;

// States within the tolerance, everything else exact.
void expect_definition(const Case& c) {
  const Results r = run_case(c);
  const States after = c.after();
  const std::string what = c.name();
  expect_near(r.states.keys, after.keys, tolerance_of(c.key_dtype), what);
  expect_near(r.states.kv, after.kv, 0.0, what);
  if (c.csa) {
    expect_near(r.states.gates, after.gates, 0.0, what);
  }
  EXPECT_EQ(r.states.lengths, after.lengths) << what;
  EXPECT_EQ(r.status, Ints(c.past.size(), 0)) << what;
  expect_selection(r, c.selection(r.states.keys), what);
  const Results again = run_case(c, c.before(), 1, /*in_place=*/true);
  EXPECT_EQ(again.indices, r.indices) << what;
  expect_same(again.states.keys, r.states.keys);
  expect_near(again.states.kv, after.kv, 0.0, what);
  EXPECT_EQ(again.states.lengths, r.states.lengths);
}

TEST(PackedSparseAttentionIndexer, QsaAgreesWithF64) {
  uint64_t seed = 0;
  for (const DType dtype : kFloats) {
    for (const int64_t ratio : {1, 2, 4, 5}) {
      for (const int64_t width : {2, 8, 19, 40}) {
        Case c{.dtype = dtype, .key_dtype = dtype, .ratio = ratio, .head_dim = width};
        c.num_heads = 1 + static_cast<int64_t>(seed % 3);
        c.rope = seed % 2 == 0 ? 2 : width / 2 * 2;
        c.own_tables = seed % 3 == 1;
        c.packed_key = seed % 4 == 3;
        c.limit = ratio * (1 + static_cast<int64_t>(seed % 5));
        c.capacity = 40;
        c.positions = seed % 5 == 0 ? 7 : 64;  // positions are clamped to the tables
        c.past = {0, 13, 0, 30};
        c.counts = {7, 3, 0, 1};
        c.fill(++seed);
        expect_definition(c);
      }
    }
  }
}

TEST(PackedSparseAttentionIndexer, CsaAgreesWithF64) {
  uint64_t seed = 100;
  for (const DType dtype : kFloats) {
    for (const int64_t ratio : {1, 2, 4, 5}) {
      for (const int64_t width : {2, 8, 19, 40}) {
        Case c{.csa = true, .dtype = dtype, .key_dtype = dtype, .ratio = ratio, .head_dim = width};
        c.num_heads = 1 + static_cast<int64_t>(seed % 3);
        c.rope = seed % 2 == 0 ? 1 : width / 2;
        c.own_tables = seed % 3 == 1;
        c.limit = 1 + static_cast<int64_t>(seed % 5);
        c.capacity = 40;
        c.positions = seed % 5 == 0 ? 7 : 64;
        c.past = {0, 13, 0, 30, 1};
        c.counts = {7, 3, 0, 1, 2};
        c.fill(++seed);
        expect_definition(c);
      }
    }
  }
}

// The cases that ONNX Runtime's own tests have.
TEST(PackedSparseAttentionIndexer, PublishedShapes) {
  Case c{.csa = true, .ratio = 2, .num_heads = 2, .head_dim = 4, .rope = 2, .limit = 3, .capacity = 4};
  c.past = {0, 4};
  c.counts = {2, 3};  // cu {0, 2, 5}
  c.fill(21);
  expect_definition(c);
  // Prefill {0, 3, 5}, then one token for the first request and two for the second.
  for (const bool csa : {false, true}) {
    Case p{.csa = csa, .ratio = 2, .limit = 4, .capacity = 8};
    p.rope = 2;
    p.past = {0, 0};
    p.counts = {3, 2};
    p.fill(22);
    expect_definition(p);
    p.past = {3, 2};
    p.counts = {1, 2};
    p.fill(23);
    expect_definition(p);
  }
  // r = 64 with as much in the buffer as leaves one token beside the last window.
  Case wide{.csa = true, .ratio = 64, .num_heads = 1, .head_dim = 4, .rope = 1, .limit = 2, .capacity = 4};
  wide.positions = 300;
  for (const int64_t count : {1, 62, 63, 64, 130}) {
    wide.past = {129};  // 65 in the buffer
    wide.counts = {count};
    wide.fill(24);
    ASSERT_EQ(wide.before().lengths, (Ints{2, 65}));
    expect_definition(wide);
  }
}

// Scores that are exact in f32 with many ties, at a real model's geometry: any wrong order shows.
TEST(PackedSparseAttentionIndexer, ProductionGeometryWithExactTies) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    Case c{.dtype = dtype, .key_dtype = dtype, .ratio = 4, .num_heads = 4, .head_dim = 128, .rope = 64, .limit = 2048};
    c.capacity = 2056;
    c.past = {0, 8204};
    c.counts = {70, 3};
    c.packed_key = true;
    c.fill_exact(31);
    expect_definition(c);
  }
  // The same through csa: weights of both signs, and zero.
  Case c{.csa = true, .ratio = 4, .num_heads = 4, .head_dim = 128, .rope = 32, .limit = 512, .capacity = 2056};
  c.past = {8204};
  c.counts = {2};
  c.fill_exact(32);
  States before = c.before();
  testkit::Random random(3);
  for (float& x : before.keys) {
    x = random.integer(0, 1) == 0 ? -1.0f : 1.0f;
  }
  for (float& w : c.weights) {
    w = static_cast<float>(random.integer(-1, 1));
  }
  const Results r = run_case(c, before);
  expect_selection(r, c.selection(r.states.keys), c.name());
}

TEST(PackedSparseAttentionIndexer, AllEqualScoresGiveTheFirst) {
  for (const int64_t blocks : {1, 7, 8, 31, 32, 33, 64, 65, 511, 512, 513, 600}) {
    for (const bool csa : {false, true}) {
      Case c{.csa = csa, .ratio = 1, .num_heads = 1, .head_dim = 4, .rope = 2, .limit = 512, .capacity = 600};
      c.past = {blocks - 1};
      c.counts = {1};
      c.fill(1);
      std::fill(c.key_norm.begin(), c.key_norm.end(), 0.0f);
      States before = c.before();
      std::fill(before.keys.begin(), before.keys.end(), 0.0f);
      const Results r = run_case(c, before);
      Ints expected(at(std::min<int64_t>(blocks, 512)));
      std::iota(expected.begin(), expected.end(), 0);
      expect_selection(r, {expected}, c.name());
    }
  }
}

TEST(PackedSparseAttentionIndexer, ByHand) {
  // H = 2, r = 2, no rotation: keys (3, 4) and (0, 0) have the mean (1.5, 2), whose square is 3.125 on average.
  Case c{.ratio = 2, .num_heads = 1, .head_dim = 2, .rope = 2, .limit = 2, .capacity = 2};
  c.counts = {5};
  c.fill(1);
  c.keys[0] = {3, 4, 0, 0, -1, 1, -1, 1, 9, 9};
  c.queries = {1, 1, 1, 1, 1, 1, -1, 1, 0, -1};
  c.query_norm = c.key_norm = {1, 2};
  c.epsilon = 0.0f;
  std::fill(c.cos.begin(), c.cos.end(), 1.0f);
  std::fill(c.sin.begin(), c.sin.end(), 0.0f);
  const Results r = run_case(c);
  const float norm = std::sqrt(3.125f);
  expect_near(r.states.keys, {1.5f / norm, 4.0f / norm, -1.0f, 2.0f}, 1e-6, "keys");
  EXPECT_EQ(Floats(r.states.kv.begin(), r.states.kv.begin() + 2), (Floats{9, 9}));
  EXPECT_EQ(r.states.lengths, (Ints{2, 1}));
  EXPECT_EQ(row_of(r, 0), (Ints{0, -1, -1}));
  EXPECT_EQ(row_of(r, 1), (Ints{0, 1, -1}));
  EXPECT_EQ(row_of(r, 2), (Ints{0, 1, 2}));
  EXPECT_EQ(row_of(r, 3), (Ints{2, 3, -1}));
  EXPECT_EQ(row_of(r, 4), (Ints{0, 1, 4}));  // the second key scores as much: the lower block stands
  EXPECT_EQ(r.counts, (Ints{1, 2, 3, 2, 3}));
}

// Position ids of csa: any order, before the first entry, beyond the entries, extreme.
TEST(PackedSparseAttentionIndexer, PositionIds) {
  Case c{.csa = true, .ratio = 4, .limit = 5, .capacity = 12, .past = {30}, .counts = {9}};
  c.fill(4);
  c.position_ids = {0, 3, 38, 7, -1, std::numeric_limits<int64_t>::min(), -5, 4, 2};
  Case usual = c;
  usual.positions = 64;
  const Results r = run_case(c);
  expect_selection(r, c.selection(r.states.keys), "ids");
  c.position_ids[0] = std::numeric_limits<int64_t>::max();
  c.position_ids[1] = 63;
  const Results far = run_case(c);
  EXPECT_EQ(far.counts[0], 5);
  Ints all = row_of(far, 0);
  EXPECT_TRUE(std::all_of(all.begin(), all.end(), [](int32_t e) { return e >= 0 && e < 9; }));
  EXPECT_EQ(far.counts[1], 5);
}

TEST(PackedSparseAttentionIndexer, KeyStateInF32UnderBf16) {
  for (const bool csa : {false, true}) {
    Case c{.csa = csa, .dtype = DType::kBF16, .key_dtype = DType::kF32, .past = {5}, .counts = {9}};
    c.fill(8);
    c.capture_capacity = csa ? 0 : 8;
    c.capture_counts = csa ? Ints{} : Ints{8};
    const Results r = run_case(c);
    expect_near(r.states.keys, c.after().keys, 1e-5, "f32 keys");
    expect_selection(r, c.selection(r.states.keys), "f32 keys");
    if (!csa) {  // the token at 7 completes block 1
      for (int64_t i = 0; i < 8; ++i) {
        EXPECT_EQ(r.update[at(2 * 8 + i)], testkit::rounded_to(DType::kBF16, r.states.keys[at(8 + i)]));
      }
    }
  }
}

// Requests

// Two good requests around a bad one, which starts from {entries, buffered}.
void expect_rejected(const Case& c, const States& before, const Results& right, int32_t status, const Ints& lengths) {
  const Results r = run_case(c, before);
  EXPECT_EQ(r.status, (Ints{0, status, 0})) << c.name();
  EXPECT_EQ((Ints{r.states.lengths[2], r.states.lengths[3]}), lengths);
  const int64_t first = c.counts[0];
  for (int64_t token = 0; token < c.num_tokens(); ++token) {
    const bool bad = token >= first && token < first + c.counts[1];
    EXPECT_EQ(r.counts[at(token)], bad ? 0 : right.counts[at(token)]);
    const Ints row = row_of(r, token);
    EXPECT_EQ(row, bad ? Ints(row.size(), -1) : row_of(right, token));
  }
  for (const auto& [now, then, good] : {std::tuple{&r.states.keys, &before.keys, &right.states.keys},
                                        std::tuple{&r.states.kv, &before.kv, &right.states.kv},
                                        std::tuple{&r.states.gates, &before.gates, &right.states.gates}}) {
    const auto third = static_cast<int64_t>(now->size()) / 3;
    const auto part = [&](const Floats& all, int64_t i) {
      return Floats(all.begin() + i * third, all.begin() + (i + 1) * third);
    };
    expect_same(part(*now, 0), part(*good, 0));
    if (third > 0) {
      expect_same(part(*now, 1), part(*then, 1));
    }
    expect_same(part(*now, 2), part(*good, 2));
  }
  if (!r.update.empty()) {
    const auto third = static_cast<int64_t>(r.update.size()) / 3;
    EXPECT_EQ(Floats(r.update.begin() + third, r.update.begin() + 2 * third), Floats(at(third), 0.0f));
  }
}

TEST(PackedSparseAttentionIndexer, MalformedStatesAreRejectedAlone) {
  for (const bool csa : {false, true}) {
    Case c{.csa = csa, .ratio = 4, .limit = 8, .capacity = 4, .past = {3, 6, 9}, .counts = {5, 4, 2}};
    c.capture_capacity = csa ? 0 : 3;
    c.capture_counts = csa ? Ints{} : Ints{3, 3, 3};
    c.fill(41);
    const States before = c.before();
    const Results right = run_case(c, before);
    ASSERT_EQ(right.status, (Ints{0, 0, 0}));
    const int32_t most = csa ? 7 : 3;
    for (const auto& [lengths, clamped, status] :
         std::vector<std::tuple<Ints, Ints, int32_t>>{{{-1, 2}, {0, 2}, 1},
                                                      {{5, 2}, {4, 2}, 1},
                                                      {{1, -7}, {1, 0}, 1},
                                                      {{1, most + 1}, {1, most}, 1},
                                                      {{INT32_MAX, INT32_MIN}, {4, 0}, 1},
                                                      {{INT32_MIN, INT32_MAX}, {0, most}, 1}}) {
      States bad = before;
      bad.lengths[2] = lengths[0];
      bad.lengths[3] = lengths[1];
      expect_rejected(c, bad, right, status, clamped);
    }
    Case negative = c;
    negative.past[1] = -1;
    Bound bound;
    bind(c, before, bound);
    int32_t* past = bound.args.past_sequence_lengths.as<int32_t>();
    past[1] = -1;
    const Results r = run(bound);
    EXPECT_EQ(r.status, (Ints{0, 1, 0}));
    EXPECT_EQ(r.counts[5], 0);
    if (!csa) {  // lengths that are in range but not those of the past
      for (const auto& [entries, buffered] : {std::pair{2, 2}, {1, 1}, {0, 2}}) {
        States bad = before;
        bad.lengths[2] = entries;
        bad.lengths[3] = buffered;
        expect_rejected(c, bad, right, 1, {entries, buffered});
      }
    }
  }
}

TEST(PackedSparseAttentionIndexer, RequestsThatDoNotFitAreRejectedAlone) {
  for (const bool csa : {false, true}) {
    Case c{.csa = csa, .ratio = 2, .limit = 4, .capacity = 2, .past = {0, 0, 1}, .counts = {3, 8, 2}};
    c.rope = 2;
    c.fill(42);
    const States before = c.before();
    Case fits = c;
    fits.capacity = 4;
    // The good requests with a larger state select the same.
    const Results r = run_case(c, before);
    const Results large = run_case(fits, fits.before());
    EXPECT_EQ(r.status, (Ints{0, 2, 0}));
    EXPECT_EQ(large.status, (Ints{0, 0, 0}));
    for (int64_t token = 0; token < 13; ++token) {
      const bool bad = token >= 3 && token < 11;
      EXPECT_EQ(row_of(r, token), bad ? Ints(at(c.columns()), -1) : row_of(large, token));
      EXPECT_EQ(r.counts[at(token)], bad ? 0 : large.counts[at(token)]);
    }
    EXPECT_EQ(r.states.lengths[2], 0);
    EXPECT_EQ(r.states.lengths[3], 0);
    EXPECT_TRUE(
        std::all_of(r.states.keys.begin() + 16, r.states.keys.begin() + 32, [](float x) { return std::isnan(x); }));
    // {3, 8} tokens, and a capacity of one that is used up.
    Case published{.csa = csa, .ratio = 2, .limit = 4, .capacity = 2, .past = {0, 0}, .counts = {3, 8}};
    published.rope = 2;
    published.fill(43);
    EXPECT_EQ(run_case(published).status, (Ints{0, 2}));
    published.capacity = 1;
    published.past = {2};
    published.counts = {2};
    published.fill(44);
    const Results full = run_case(published);
    EXPECT_EQ(full.status, Ints{2});
    EXPECT_EQ(full.counts, (Ints{0, 0}));
    EXPECT_EQ(full.states.lengths, published.before().lengths);
  }
}

TEST(PackedSparseAttentionIndexer, MalformedOffsets) {
  for (const bool csa : {false, true}) {
    Case c{.csa = csa, .past = {3, 6, 9}, .counts = {5, 4, 2}};
    c.fill(51);
    const States before = c.before();
    const Results right = run_case(c, before);
    const auto with = [&](Ints cu) {
      Case bad = c;
      bad.cu = std::move(cu);
      return run_case(bad, before);
    };
    // Wrong end points reject everything.
    for (const Ints& cu : {Ints{1, 5, 9, 11}, Ints{0, 5, 9, 10}, Ints{0, 5, 9, 12}, Ints{-1, 5, 9, 11},
                           Ints{0, 0, 0, 0}, Ints{INT32_MIN, 0, 0, INT32_MAX}}) {
      const Results r = with(cu);
      EXPECT_EQ(r.status, (Ints{1, 1, 1}));
      EXPECT_EQ(r.counts, Ints(11, 0));
      EXPECT_EQ(r.indices, Ints(r.indices.size(), -1));
      EXPECT_EQ(r.states.lengths, before.lengths);
      expect_same(r.states.keys, before.keys);
      expect_same(r.states.kv, before.kv);
    }
    // Others only those whose range is malformed; tokens of none are empty.
    const auto expect_parts = [&](const Ints& cu, const Ints& status) {
      const Results r = with(cu);
      EXPECT_EQ(r.status, status);
      for (int64_t token = 0; token < 11; ++token) {
        const int64_t b = token < 5 ? 0 : token < 9 ? 1 : 2;
        int num_claims = 0;
        for (size_t i = 0; i < 3; ++i) {
          num_claims += status[i] == 0 && cu[i] <= token && token < cu[i + 1] ? 1 : 0;
        }
        if (num_claims == 0) {
          EXPECT_EQ(r.counts[at(token)], 0);
          EXPECT_EQ(row_of(r, token), Ints(at(c.columns()), -1));
        } else if (num_claims == 1 && cu[at(b)] == c.cu[at(b)] && cu[at(b + 1)] == c.cu[at(b + 1)]) {
          EXPECT_EQ(row_of(r, token), row_of(right, token)) << token;
          EXPECT_EQ(r.counts[at(token)], right.counts[at(token)]) << token;
        }
      }
      return r;
    };
    EXPECT_EQ(expect_parts({0, 5, 4, 11}, {0, 1, 0}).counts[3], right.counts[3]);
    expect_parts({0, -3, 9, 11}, {1, 1, 0});
    expect_parts({0, 5, 12, 11}, {0, 1, 1});
    const Results hole = expect_parts({0, 5, INT32_MAX, 11}, {0, 1, 1});
    EXPECT_EQ(Ints(hole.counts.begin() + 5, hole.counts.end()), Ints(6, 0));
    expect_parts({0, 5, INT32_MIN, 11}, {0, 1, 1});
  }
}

TEST(PackedSparseAttentionIndexer, EmptyCalls) {
  for (const bool csa : {false, true}) {
    Case c{.csa = csa, .past = {3, 6}, .counts = {0, 0}};
    c.fill(1);
    const States before = c.before();
    const Results r = run_case(c, before);
    EXPECT_TRUE(r.indices.empty());
    EXPECT_EQ(r.status, (Ints{0, 0}));
    EXPECT_EQ(r.states.lengths, before.lengths);
    expect_same(r.states.kv, before.kv);
    Case nobody{.csa = csa, .past = {}, .counts = {}};
    nobody.fill(1);
    nobody.cu = {0};
    EXPECT_TRUE(run_case(nobody, {}).status.empty());
  }
}

// Positions that int32 cannot hold: nothing is emitted in their place.
TEST(PackedSparseAttentionIndexer, PositionsBeyondInt32) {
  constexpr int64_t kRatio = int64_t{1} << 21;
  Case c{.ratio = kRatio, .num_heads = 1, .head_dim = 2, .rope = 2, .limit = kRatio, .capacity = 1024};
  c.fill(1);
  c.counts = {1};
  c.queries = {1, 1};
  c.cu = {0, 1};
  c.keys = {{1, 1}};
  c.gates = {{1, 1}};
  States before;
  before.keys = Floats(2048, 1.0f);
  before.kv = Floats(at(c.buffer_rows() * 2), 1.0f);
  for (const int64_t back : {0, 1}) {
    const int64_t past = INT32_MAX - back;
    before.lengths = {static_cast<int32_t>(past / kRatio), static_cast<int32_t>(past % kRatio)};
    Bound bound;
    bind(c, before, bound);
    const_cast<int32_t*>(bound.args.past_sequence_lengths.as<int32_t>())[0] = static_cast<int32_t>(past);
    const Results r = run(bound, 1);
    EXPECT_EQ(r.status, Ints{back == 0 ? 1 : 0});
    EXPECT_EQ(r.counts[0], back == 0 ? 0 : 2 * kRatio - 1);
    if (back == 1) {
      EXPECT_EQ(r.indices[at(r.counts[0] - 1)], INT32_MAX - 1);
    }
  }
}

// Nothing but the own request and the history decides about a row.
TEST(PackedSparseAttentionIndexer, ChunksNeighboursAndThreadsChangeNothing) {
  for (const bool csa : {false, true}) {
    Case whole{
        .csa = csa, .dtype = DType::kBF16, .key_dtype = DType::kBF16, .head_dim = 24, .past = {6}, .counts = {33}};
    whole.fill(61);
    const Results right = run_case(whole, whole.before(), 1);
    EXPECT_EQ(run_case(whole, whole.before(), 5).indices, right.indices);
    States states = whole.before();
    const int64_t query_width = whole.num_heads * whole.head_dim;
    int64_t begin = 0;
    for (const int64_t count : {1, 3, 1, 17, 11}) {
      Case part = whole;
      part.past = {6 + begin};
      part.counts = {count};
      part.cu = {0, static_cast<int32_t>(count)};
      for (Floats* rows : {&part.keys[0], &part.gates[0]}) {
        rows->resize(at((6 + begin + count) * part.key_width()));
      }
      part.queries = {whole.queries.begin() + begin * query_width,
                      whole.queries.begin() + (begin + count) * query_width};
      part.weights = {whole.weights.begin() + begin * 2, whole.weights.begin() + (begin + count) * 2};
      part.position_ids = {whole.position_ids.begin() + begin, whole.position_ids.begin() + begin + count};
      const Results r = run_case(part, states, 2, /*in_place=*/begin % 2 == 0);
      for (int64_t i = 0; i < count; ++i) {
        EXPECT_EQ(row_of(r, i), row_of(right, begin + i)) << begin + i;
      }
      states = r.states;
      begin += count;
    }
    EXPECT_EQ(states.lengths, right.states.lengths);
    expect_same(states.keys, right.states.keys);
    const int64_t kept = states.lengths[1] * whole.key_width();
    expect_same({states.kv.begin(), states.kv.begin() + kept},
                {right.states.kv.begin(), right.states.kv.begin() + kept});
    // Behind another request.
    Case pair = whole;
    pair.past = {2, 6};
    pair.counts = {4, 33};
    pair.fill(62);
    pair.keys[1] = whole.keys[0];
    pair.gates[1] = whole.gates[0];
    std::copy(whole.queries.begin(), whole.queries.end(), pair.queries.begin() + 4 * query_width);
    std::copy(whole.weights.begin(), whole.weights.end(), pair.weights.begin() + 4 * 2);
    pair.query_norm = whole.query_norm;
    pair.key_norm = whole.key_norm;
    pair.cos = whole.cos;
    pair.sin = whole.sin;
    pair.bias = whole.bias;
    const Results both = run_case(pair, pair.before(), 3);
    for (int64_t i = 0; i < 33; ++i) {
      EXPECT_EQ(row_of(both, 4 + i), row_of(right, i));
    }
  }
}

// A state so large that every token is a group of its own.
TEST(PackedSparseAttentionIndexer, ManyGroups) {
  Case c{.ratio = 1, .num_heads = 1, .head_dim = 2, .rope = 2, .limit = 3, .past = {70}, .counts = {5}};
  c.capacity = int64_t{1} << 21;
  c.fill(5);
  Case small = c;
  small.capacity = 80;
  Bound bound;
  States before = small.before();
  before.keys.resize(at(c.capacity * 2), kNan);
  bind(c, before, bound);
  EXPECT_EQ(run(bound).indices, run_case(small).indices);
}

TEST(PackedSparseAttentionIndexer, Capture) {
  for (const DType dtype : kFloats) {
    for (const bool packed : {false, true}) {
      Case c{.dtype = dtype, .key_dtype = dtype, .past = {2, 7, 0, 4, 1}, .counts = {5, 1, 0, 9, 2}};
      c.packed_key = packed;
      c.capture_capacity = 8;
      c.capture_counts = {3, 4, 2, 100, -5};
      c.fill(71);
      for (const int active : {-1, 0, 1, -3}) {
        c.active = active;
        const Results r = run_case(c);
        ASSERT_EQ(r.update.size(), at(5 * 8 * c.head_dim));
        for (int64_t b = 0; b < 5; ++b) {
          const int64_t captured =
              active == 0 ? 0 : std::clamp<int64_t>(c.capture_counts[at(b)], 0, std::min<int64_t>(c.counts[at(b)], 8));
          for (int64_t i = 0; i < 8; ++i) {
            const int64_t token = c.past[at(b)] + i;
            const bool completes = (token + 1) % c.ratio == 0;
            for (int64_t x = 0; x < c.head_dim; ++x) {
              const float expected = i >= captured ? 0.0f
                                     : completes
                                         ? r.states.keys[at((b * c.capacity + token / c.ratio) * c.head_dim + x)]
                                         : c.keys[at(b)][at(token * c.head_dim + x)];
              ASSERT_EQ(r.update[at((b * 8 + i) * c.head_dim + x)], expected) << b << " " << i;
            }
          }
        }
        if (active < 0) {
          break;  // only there to be seen absent
        }
      }
    }
  }
}

// What must not be read holds NaN in all of these tests (see States); so do tokens of a rejected request here.
TEST(PackedSparseAttentionIndexer, NanWhereNothingIsRead) {
  for (const bool csa : {false, true}) {
    Case c{.csa = csa, .past = {3, 6}, .counts = {6, 3}};
    c.fill(81);
    States before = c.before();
    const Results right = run_case(c, before);
    std::fill(c.queries.begin() + 6 * 16, c.queries.end(), kNan);
    std::fill(c.weights.begin() + 6 * 2, c.weights.end(), kNan);
    std::fill(c.keys[1].begin(), c.keys[1].end(), kNan);
    std::fill(c.gates[1].begin(), c.gates[1].end(), kNan);
    std::fill(before.keys.begin() + 16 * 8, before.keys.end(), kNan);
    const Results r = run_case(c, before);
    for (int64_t token = 0; token < 6; ++token) {
      EXPECT_EQ(row_of(r, token), row_of(right, token));
    }
    EXPECT_EQ(r.status, (Ints{0, 0}));
    // NaN that is read: keys of no similarity, the lowest block of equals first.
    Ints first = row_of(r, 8);
    EXPECT_EQ(first[0], 0);
    EXPECT_EQ(first[1], 1);
  }
}

// A channel whose softmax has no positive finite denominator is 0.
TEST(PackedSparseAttentionIndexer, GatesWithoutAWeight) {
  for (const float gate : {-kInf, kInf, kNan}) {
    Case c{.csa = true, .ratio = 2, .num_heads = 1, .head_dim = 4, .rope = 1, .limit = 2, .capacity = 4};
    c.counts = {4};
    c.fill(9);
    for (int64_t token = 0; token < 4; ++token) {
      c.gates[0][at(token * 8 + 1)] = gate;
      c.gates[0][at(token * 8 + 5)] = gate;
    }
    const Results r = run_case(c);
    Case zero = c;
    for (int64_t token = 0; token < 4; ++token) {
      for (const int64_t x : {1, 5}) {
        zero.gates[0][at(token * 8 + x)] = 0.0f;
        zero.keys[0][at(token * 8 + x)] = 0.0f;
      }
    }
    expect_same(r.states.keys, run_case(zero).states.keys);
    EXPECT_FALSE(std::isnan(r.states.keys[0]));
  }
  // One such gate of several: -inf is no weight, +inf and NaN empty the channel.
  for (const float gate : {-kInf, kInf, kNan}) {
    Case c{.csa = true, .ratio = 2, .num_heads = 1, .head_dim = 4, .rope = 1, .limit = 2, .capacity = 4};
    c.counts = {2};
    c.fill(9);
    std::fill(c.cos.begin(), c.cos.end(), 1.0f);
    std::fill(c.sin.begin(), c.sin.end(), 0.0f);
    c.gates[0][4] = gate;
    const Results r = run_case(c);
    Case same = c;
    same.gates[0][4] = -kInf;
    if (gate == -kInf) {
      expect_near(r.states.keys, c.after().keys, 1e-5, "-inf");
    } else {
      EXPECT_EQ(r.states.keys[0], 0.0f) << gate;
    }
  }
}

}  // namespace
}  // namespace shoal::packed_indexer
