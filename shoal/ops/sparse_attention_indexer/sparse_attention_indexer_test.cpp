// The dense indexer: csa against the f64 definition of the packed one's cases, qsa against one of its own that forms
// blocks from lists of visible tokens; both against the packed operator where they must agree.
#include "shoal/ops/sparse_attention_indexer/sparse_attention_indexer.h"

#include <gtest/gtest.h>

#include <functional>

#include "shoal/ops/indexer_cases.h"
#include "shoal/tensor/matcher.h"
#include "testkit/expect_error.h"

namespace shoal {
namespace {

using packed_indexer::at;
using packed_indexer::Case;
using packed_indexer::Doubles;
using packed_indexer::Floats;
using packed_indexer::Ints;
using packed_indexer::kInf;
using packed_indexer::kNan;
using packed_indexer::Longs;
using packed_indexer::States;
using testkit::expect_error;
using Args = SparseAttentionIndexerArgs;

// A call made of a Case whose requests are equally long.
struct Call {
  explicit Call(const Case& problem) : c(problem) {}

  int64_t past() const { return c.past[0]; }
  int64_t tokens() const { return c.counts[0]; }
  int64_t entries() const { return past() / c.ratio; }
  int64_t waiting() const { return past() - (c.csa ? std::max<int64_t>(0, entries() - 1) * c.ratio : 0); }

  // Room for how many rows past_key has behind those that count; -1: no past_sequence_length.
  void bind(int64_t room = -1) {
    Floats new_keys;
    Floats new_gates;
    Floats past_key;
    const int64_t rows = c.csa ? entries() : past();
    const States before = c.before();
    for (int64_t b = 0; b < c.batch(); ++b) {
      const auto from = past() * c.key_width();
      new_keys.insert(new_keys.end(), c.keys[at(b)].begin() + from, c.keys[at(b)].end());
      new_gates.insert(new_gates.end(), c.gates[at(b)].begin() + from, c.gates[at(b)].end());
      const auto old = c.csa ? before.keys.begin() + b * c.capacity * c.head_dim : c.keys[at(b)].begin();
      past_key.insert(past_key.end(), old, old + rows * c.head_dim);
      past_key.insert(past_key.end(), at(std::max<int64_t>(room, 0) * c.head_dim), kNan);
    }
    const int64_t query_width = c.num_heads * c.head_dim;
    if (c.packed_key) {
      Floats both;
      for (int64_t i = 0; i < c.batch() * tokens(); ++i) {
        both.insert(both.end(), c.queries.begin() + i * query_width, c.queries.begin() + (i + 1) * query_width);
        both.insert(both.end(), new_keys.begin() + i * c.head_dim, new_keys.begin() + (i + 1) * c.head_dim);
      }
      a.query = t.floats(c.dtype, {c.batch(), tokens(), query_width + c.head_dim}, both, 3);
    } else {
      a.query = t.floats(c.dtype, {c.batch(), tokens(), query_width}, c.queries, 3);
      a.key = t.floats(c.dtype, {c.batch(), tokens(), c.key_width()}, new_keys, 1);
    }
    a.query_norm_weight = t.floats(c.dtype, {c.head_dim}, c.query_norm);
    a.key_norm_weight = t.floats(c.dtype, {c.head_dim}, c.key_norm);
    std::vector<int64_t> table = {c.positions, c.rope};
    if (c.own_tables) {
      table.insert(table.begin(), c.batch());
    }
    a.cos_cache = t.floats(c.dtype, table, c.cos);
    a.sin_cache = t.floats(c.dtype, table, c.sin, 1);
    a.past_key = t.floats(c.dtype, {c.batch(), rows + std::max<int64_t>(room, 0), c.head_dim}, past_key);
    if (room >= 0) {
      a.past_sequence_length = t.integers({static_cast<int32_t>(rows)});
    }
    a.policy_mode = c.csa ? "csa" : "qsa";
    a.compress_ratio = c.ratio;
    a.epsilon = c.epsilon;
    if (c.scale != 0.0f) {
      a.scale = c.scale;
    }
    if (!c.csa) {
      a.token_budget = c.limit;
      return;
    }
    Floats buffer;
    for (const Floats* plane : {&before.kv, &before.gates}) {
      for (int64_t b = 0; b < c.batch(); ++b) {
        const auto first = plane->begin() + b * c.buffer_rows() * c.key_width();
        buffer.insert(buffer.end(), first, first + waiting() * c.key_width());
      }
    }
    a.index_topk = c.limit;
    a.gate = t.floats(c.dtype, {c.batch(), tokens(), c.key_width()}, new_gates);
    a.position_bias = t.floats(c.dtype, {c.ratio, c.key_width()}, c.bias);
    a.head_weights = t.floats(c.dtype, {c.batch(), tokens(), c.num_heads}, c.weights);
    a.position_ids = TensorView(c.position_ids.data(), DType::kI64, {c.batch(), tokens()});
    a.past_proj_buffer = t.floats(c.dtype, {2, c.batch(), waiting(), c.key_width()}, buffer, 2);
  }

  void set_mask(Longs values) {
    mask = std::move(values);
    a.mask = TensorView(mask.data(), DType::kI64, {c.batch(), past() + tokens()});
  }

  void run(int num_threads = 2, bool in_place = false) {
    const SparseAttentionIndexerShapes shapes = sparse_attention_indexer_shapes(a);
    int64_t count = 1;
    for (const int64_t extent : shapes.selected_indices.shape) {
      count *= extent;
    }
    auto& memory = ints.emplace_back(at(count));
    a.selected_indices = TensorView(memory.data(), DType::kI32, shapes.selected_indices.shape);
    a.present_key = in_place ? a.past_key : t.output(shapes.present_key.dtype, shapes.present_key.shape);
    a.present_proj_buffer = shapes.present_proj_buffer.present
                                ? t.output(shapes.present_proj_buffer.dtype, shapes.present_proj_buffer.shape)
                                : TensorView{};
    cpu::ThreadPool pool(num_threads);
    Workspace workspace(sparse_attention_indexer_workspace_bytes(a, num_threads));
    sparse_attention_indexer(a, {.pool = &pool, .workspace = &workspace});
    EXPECT_TRUE(memory.guards_intact());
    EXPECT_TRUE(t.intact());
    selection.assign(memory.data(), memory.data() + count);
    present = t.values_of(a.present_key);
    buffer = t.values_of(a.present_proj_buffer);
  }

  Ints row(int64_t token) const {
    const auto width = c.columns();
    return {selection.begin() + token * width, selection.begin() + (token + 1) * width};
  }

  Case c;
  testkit::BoundTensors t{};
  std::deque<testkit::Guarded<int32_t>> ints{};
  Longs mask{};
  Args a{};
  Ints selection{};
  Floats present{};
  Floats buffer{};
};

// qsa by lists: the tokens that a query may see, in blocks of their own.
std::vector<Ints> expected_tokens(const Call& call) {
  const Case& c = call.c;
  const int64_t total = call.past() + call.tokens();
  std::vector<Ints> all;
  for (int64_t b = 0; b < c.batch(); ++b) {
    for (int64_t s = 0; s < call.tokens(); ++s) {
      Ints seen;
      for (int64_t token = 0; token <= call.past() + s; ++token) {
        if (call.mask.empty() || call.mask[at(b * total + token)] != 0) {
          seen.push_back(static_cast<int32_t>(token));
        }
      }
      Doubles scores;
      for (size_t first = 0; first + at(c.ratio) <= seen.size(); first += at(c.ratio)) {
        Doubles pooled(at(c.head_dim), 0.0);
        for (size_t i = first; i < first + at(c.ratio); ++i) {
          for (int64_t x = 0; x < c.head_dim; ++x) {
            pooled[at(x)] += c.keys[at(b)][at(seen[i] * c.head_dim + x)] / static_cast<double>(c.ratio);
          }
        }
        pooled = c.finished(pooled, c.key_norm, b, seen[first]);
        double score = 0.0;
        for (int64_t h = 0; h < c.num_heads; ++h) {
          Doubles q;
          for (int64_t x = 0; x < c.head_dim; ++x) {
            q.push_back(c.queries[at(((b * call.tokens() + s) * c.num_heads + h) * c.head_dim + x)]);
          }
          q = c.finished(q, c.query_norm, b, call.past() + s);
          score += std::max(0.0, std::inner_product(q.begin(), q.end(), pooled.begin(), 0.0));
        }
        scores.push_back(score);
      }
      Ints order(scores.size());
      std::iota(order.begin(), order.end(), 0);
      std::stable_sort(order.begin(), order.end(), [&](int32_t x, int32_t y) { return scores[at(x)] > scores[at(y)]; });
      order.resize(std::min(order.size(), at(c.limit / c.ratio)));
      Ints row;
      for (const int32_t block : order) {
        row.insert(row.end(), seen.begin() + block * c.ratio, seen.begin() + (block + 1) * c.ratio);
      }
      row.insert(row.end(), seen.begin() + static_cast<int64_t>(scores.size()) * c.ratio, seen.end());
      row.resize(at(c.columns()), -1);
      all.push_back(row);
    }
  }
  return all;
}

void expect_rows(const Call& call, const std::vector<Ints>& expected) {
  for (size_t i = 0; i < expected.size(); ++i) {
    Ints row = expected[i];
    row.resize(at(call.c.columns()), -1);
    ASSERT_EQ(call.row(static_cast<int64_t>(i)), row) << call.c.name() << " row " << i;
  }
}

// The raw keys of the first `rows` tokens, then NaN.
void expect_raw_keys(const Call& call) {
  const int64_t rows = call.past() + call.tokens();
  const int64_t size = static_cast<int64_t>(call.present.size()) / call.c.batch();
  for (int64_t b = 0; b < call.c.batch(); ++b) {
    for (int64_t i = 0; i < size; ++i) {
      const float actual = call.present[at(b * size + i)];
      if (i < rows * call.c.head_dim) {
        ASSERT_EQ(actual, call.c.keys[at(b)][at(i)]);
      } else {
        ASSERT_TRUE(std::isnan(actual));
      }
    }
  }
}

TEST(SparseAttentionIndexer, QsaAgreesWithF64) {
  uint64_t seed = 200;
  for (const DType dtype : kFloats) {
    for (const int64_t ratio : {1, 2, 4, 5}) {
      for (const int64_t past : {0, 1, 21}) {
        for (const int64_t room : {-1, 0, 5}) {
          Case c{.dtype = dtype, .key_dtype = dtype, .ratio = ratio, .head_dim = 12, .past = {past, past}};
          c.counts = {9, 9};
          c.rope = seed % 2 == 0 ? 4 : 12;
          c.own_tables = seed % 3 == 0;
          c.packed_key = seed % 5 == 0;
          c.positions = seed % 4 == 0 ? 6 : 64;
          c.limit = ratio * (1 + static_cast<int64_t>(seed % 4));
          c.fill(++seed);
          Call call(c);
          call.bind(room < 0 ? room : 9 + room);
          if (seed % 3 != 1) {
            testkit::Random random(seed);
            Longs mask(at(2 * (past + 9)));
            for (int64_t& value : mask) {
              value = random.integer(-1, 2);
            }
            call.set_mask(mask);
          }
          call.run();
          expect_rows(call, expected_tokens(call));
          expect_raw_keys(call);
          if (room >= 0) {
            const Ints right = call.selection;
            call.run(1, /*in_place=*/true);
            EXPECT_EQ(call.selection, right);
            expect_raw_keys(call);
          }
        }
      }
    }
  }
}

TEST(SparseAttentionIndexer, MaskByHand) {
  Case c{.ratio = 2, .num_heads = 1, .head_dim = 2, .rope = 2, .limit = 2, .past = {4}, .counts = {3}};
  c.fill(1);
  c.keys[0] = {1, 1, 9, 9, -1, -1, 1, -1, 1, 1, -1, 1, 1, 1};
  c.queries = {1, 1, -1, -1, 1, 1};
  c.query_norm = c.key_norm = {1, 1};
  std::fill(c.cos.begin(), c.cos.end(), 1.0f);
  std::fill(c.sin.begin(), c.sin.end(), 0.0f);
  Call call(c);
  call.bind();
  call.set_mask({1, 0, 1, 1, 1, 0, -7});  // visible: 0 2 | 3 4 | 6
  call.run();
  EXPECT_EQ(call.row(0), (Ints{3, 4, -1}));  // (0, 0) against (1, 0)
  EXPECT_EQ(call.row(1), (Ints{0, 2, -1}));  // neither is alike: the first block
  EXPECT_EQ(call.row(2), (Ints{3, 4, 6}));
  call.set_mask({0, 0, 0, 0, 0, 0, 1});
  call.run();
  EXPECT_EQ(call.row(1), (Ints{-1, -1, -1}));
  EXPECT_EQ(call.row(2), (Ints{6, -1, -1}));
}

TEST(SparseAttentionIndexer, CsaAgreesWithF64) {
  uint64_t seed = 300;
  for (const DType dtype : kFloats) {
    const double tolerance = dtype == DType::kF32 ? 1e-5 : dtype == DType::kF16 ? 4e-3 : 3e-2;
    for (const int64_t ratio : {1, 2, 4, 5}) {
      for (const int64_t past : {0, 3, 21}) {
        for (const int64_t room : {-1, 9, 12}) {
          Case c{.csa = true, .dtype = dtype, .key_dtype = dtype, .ratio = ratio, .head_dim = 12};
          c.past = {past, past};
          c.counts = {9, 9};
          c.capacity = 40;
          c.own_tables = seed % 3 == 0;
          c.positions = seed % 4 == 0 ? 6 : 64;
          c.limit = 1 + static_cast<int64_t>(seed % 4);
          c.fill(++seed);
          Call call(c);
          call.bind(room);
          call.run();
          const States after = c.after();
          const int64_t entries = (past + 9) / ratio;
          const int64_t rows = room < 0 ? entries : past / ratio + room;
          ASSERT_EQ(call.present.size(), at(2 * rows * 12));
          Floats keys;  // as the cases have them
          for (int64_t b = 0; b < 2; ++b) {
            for (int64_t i = 0; i < 40 * 12; ++i) {
              keys.push_back(i < rows * 12 ? call.present[at(b * rows * 12 + i)] : kNan);
              if (i < entries * 12) {
                ASSERT_NEAR(keys.back(), after.keys[at(b * 40 * 12 + i)], tolerance) << c.name();
              } else {
                ASSERT_TRUE(std::isnan(keys.back()));
              }
            }
          }
          expect_rows(call, c.selection(keys));
          const int64_t waiting = after.lengths[1];
          ASSERT_EQ(call.buffer.size(), at(2 * 2 * waiting * 24));
          for (int64_t plane = 0; plane < 2; ++plane) {
            for (int64_t b = 0; b < 2; ++b) {
              for (int64_t i = 0; i < waiting * 24; ++i) {
                const Floats& expected = plane == 0 ? after.kv : after.gates;
                ASSERT_EQ(call.buffer[at((plane * 2 + b) * waiting * 24 + i)],
                          expected[at(b * c.buffer_rows() * 24 + i)]);
              }
            }
          }
          if (room >= 0) {
            const Ints right = call.selection;
            const Floats present = call.present;
            call.run(1, /*in_place=*/true);
            EXPECT_EQ(call.selection, right);
            EXPECT_TRUE(std::equal(present.begin(), present.begin() + entries * 12, call.present.begin()));
          }
        }
      }
    }
  }
}

// Both operators on long contexts, with scores that are exact in f32 and tie often.
TEST(SparseAttentionIndexer, AgreesWithThePackedOne) {
  for (const int64_t length : {8192, 32768, 262144}) {
    Case c{.ratio = 4, .num_heads = 4, .head_dim = 16, .rope = 16, .limit = 2048, .capacity = length / 4};
    c.positions = 8;
    c.past = {length - 3};
    c.counts = {3};
    c.fill_exact(static_cast<uint64_t>(length));
    Call call(c);
    States before;  // what a packed call needs: block keys are raw keys here
    for (int64_t e = 0; e < c.capacity; ++e) {
      before.keys.insert(before.keys.end(), c.keys[0].begin() + e * 64, c.keys[0].begin() + e * 64 + 16);
    }
    before.kv.assign(at(7 * 16), kNan);
    std::copy_n(c.keys[0].begin() + (length - 4) * 16, 16, before.kv.begin());
    before.lengths = {static_cast<int32_t>(c.capacity - 1), 1};
    packed_indexer::Bound bound;
    packed_indexer::bind(c, before, bound);
    const packed_indexer::Results packed = packed_indexer::run(bound);
    ASSERT_EQ(packed.status, Ints{0});
    Case bare = c;  // the f64 states of a Case would take long
    bare.capacity = 0;
    call.c = bare;
    call.bind();
    call.run();
    EXPECT_EQ(call.selection, packed.indices) << length;
  }
}

TEST(SparseAttentionIndexer, CallBoundariesNeighboursAndThreadsChangeNothing) {
  for (const bool csa : {false, true}) {
    Case whole{.csa = csa, .dtype = DType::kBF16, .key_dtype = DType::kBF16, .head_dim = 24, .past = {6, 6}};
    whole.counts = {19, 19};
    whole.fill(7);
    Call right(whole);
    right.bind();
    right.run(1);
    Call threads(whole);
    threads.bind();
    threads.run(5);
    EXPECT_EQ(threads.selection, right.selection);
    // Token by token, each sequence alone.
    for (int64_t b = 0; b < 2; ++b) {
      Floats key;
      Floats buffer;
      for (int64_t i = 0; i < 19; ++i) {
        Case part = whole;
        part.past = {6 + i};
        part.counts = {1};
        const auto cut = [](const Floats& values, int64_t begin, int64_t count) {
          return Floats(values.begin() + begin, values.begin() + begin + count);
        };
        part.keys = {cut(whole.keys[at(b)], 0, (7 + i) * whole.key_width())};
        part.gates = {cut(whole.gates[at(b)], 0, (7 + i) * whole.key_width())};
        part.queries = cut(whole.queries, (b * 19 + i) * 48, 48);
        part.weights = cut(whole.weights, (b * 19 + i) * 2, 2);
        part.position_ids = {6 + i};
        Call step(part);
        step.bind();
        if (csa && i > 0) {  // the state of the step before instead of the definition's
          step.a.past_key = step.t.floats(DType::kBF16, {1, static_cast<int64_t>(key.size()) / 24, 24}, key);
          step.a.past_proj_buffer =
              step.t.floats(DType::kBF16, {2, 1, static_cast<int64_t>(buffer.size()) / 96, 48}, buffer);
        }
        step.run();
        key = step.present;
        buffer = step.buffer;
        EXPECT_EQ(step.row(0), right.row(b * 19 + i)) << csa << " " << b << " " << i;
      }
    }
  }
}

TEST(SparseAttentionIndexer, NanAndGatesWithoutAWeight) {
  Case c{.csa = true, .ratio = 2, .num_heads = 1, .head_dim = 4, .rope = 1, .limit = 4};
  c.counts = {4};
  c.fill(3);
  for (int64_t token = 0; token < 4; ++token) {
    c.gates[0][at(token * 8)] = c.gates[0][at(token * 8 + 4)] = token < 2 ? -kInf : kInf;
  }
  c.weights = {1, kNan, 1, 1};
  c.position_ids = {-1, 3, 3, 1};
  Call call(c);
  call.bind();
  call.run();
  EXPECT_EQ(call.present[0], 0.0f);
  EXPECT_EQ(call.present[4], 0.0f);
  EXPECT_EQ(call.row(0), (Ints{-1, -1, -1, -1}));
  EXPECT_EQ(call.row(1), (Ints{0, 1, -1, -1}));
  EXPECT_EQ(call.row(3), (Ints{0, -1, -1, -1}));
}

TEST(SparseAttentionIndexer, EmptyCalls) {
  for (const bool csa : {false, true}) {
    Case c{.csa = csa, .past = {5, 5}, .counts = {0, 0}};
    c.fill(1);
    Call call(c);
    call.bind();
    call.run();
    EXPECT_TRUE(call.selection.empty());
    EXPECT_EQ(call.present.size(), at(2 * (csa ? 1 : 5) * 8));
    Case nobody{.csa = csa, .past = {0}, .counts = {3}};
    nobody.fill(1);
    Call first(nobody);
    first.bind();
    first.run();
    EXPECT_EQ(first.row(0)[0], csa ? -1 : 0);
  }
}

TEST(SparseAttentionIndexer, Rejections) {
  Case c{.past = {6, 6}, .counts = {3, 3}};
  c.fill(1);
  Call qsa(c);
  qsa.bind(5);
  c.csa = true;
  c.fill(1);
  Call csa(c);
  csa.bind(5);
  const auto rejects = [](Call& call, std::string_view message, const std::function<void(Args&)>& change) {
    Args a = call.a;
    sparse_attention_indexer_shapes(a);
    change(a);
    expect_error(ErrorCode::kInvalidArgument, concat("sparse_attention_indexer: ", message),
                 [&] { sparse_attention_indexer_shapes(a); });
  };
  testkit::BoundTensors t;
  const auto floats = [&](std::vector<int64_t> shape, DType dtype = DType::kF32) {
    return t.output(dtype, std::move(shape));
  };
  rejects(qsa, "policy_mode is 'hca', expected qsa or csa", [](Args& a) { a.policy_mode = "hca"; });
  rejects(qsa, "compress_ratio is 0", [](Args& a) { a.compress_ratio = 0; });
  rejects(qsa, "epsilon is -1", [](Args& a) { a.epsilon = -1; });
  rejects(qsa, "scale is nan", [](Args& a) { a.scale = kNan; });
  rejects(csa, "head_weight_scale is inf", [](Args& a) { a.head_weight_scale = kInf; });
  rejects(qsa, "token_budget is required with policy_mode qsa", [](Args& a) { a.token_budget.reset(); });
  rejects(qsa, "token_budget is 0", [](Args& a) { a.token_budget = 0; });
  rejects(qsa, "token_budget is 6, expected a multiple of compress_ratio = 4", [](Args& a) { a.token_budget = 6; });
  rejects(csa, "index_topk is required with policy_mode csa", [](Args& a) { a.index_topk.reset(); });
  rejects(csa, "index_topk is -1", [](Args& a) { a.index_topk = -1; });
  for (const auto& [name, change] : std::vector<std::pair<std::string_view, std::function<void(Args&)>>>{
           {"index_topk", [](Args& a) { a.index_topk = 1; }},
           {"head_weight_scale", [](Args& a) { a.head_weight_scale = 1.0f; }},
           {"gate", [](Args& a) { a.gate = a.query; }},
           {"position_bias", [](Args& a) { a.position_bias = a.query; }},
           {"head_weights", [](Args& a) { a.head_weights = a.query; }},
           {"position_ids", [](Args& a) { a.position_ids = a.query; }},
           {"past_proj_buffer", [](Args& a) { a.past_proj_buffer = a.query; }}}) {
    rejects(qsa, concat(name, " must be absent with policy_mode qsa"), change);
  }
  rejects(csa, "token_budget must be absent with policy_mode csa", [](Args& a) { a.token_budget = 4; });
  rejects(csa, "mask must be absent with policy_mode csa", [](Args& a) { a.mask = a.position_ids; });
  rejects(qsa, "query is required", [](Args& a) { a.query = {}; });
  rejects(qsa, "query has type int64", [](Args& a) { a.query.dtype = DType::kI64; });
  rejects(qsa, "query has shape [2, 3], expected [batch_size", [&](Args& a) { a.query = floats({2, 3}); });
  rejects(qsa, "query has 17 columns, expected a multiple of 8", [&](Args& a) { a.query = floats({2, 3, 17}); });
  rejects(qsa, "query has 8 columns, expected a multiple of 8, the head size, for at least one head and the key",
          [&](Args& a) {
            a.query = floats({2, 3, 8});
            a.key = {};
          });
  rejects(qsa, "query_norm_weight is required", [](Args& a) { a.query_norm_weight = {}; });
  rejects(qsa, "query_norm_weight is empty", [&](Args& a) { a.query_norm_weight = floats({0}); });
  rejects(qsa, "key_norm_weight has shape [9]", [&](Args& a) { a.key_norm_weight = floats({9}); });
  rejects(qsa, "key has shape [2, 3, 16], expected [batch_size = 2, sequence_length = 3, head_size = 8]", [&](Args& a) {
    a.key = floats({2, 3, 16});
  });
  rejects(csa, "key is required with policy_mode csa", [](Args& a) { a.key = {}; });
  rejects(qsa, "cos_cache has shape [1, 64, 4], expected 2 tables", [&](Args& a) { a.cos_cache = floats({1, 64, 4}); });
  rejects(qsa, "sin_cache has shape [64, 2]", [&](Args& a) { a.sin_cache = floats({64, 2}); });
  rejects(csa, "cos_cache has 5 columns, expected 1 to 4", [&](Args& a) {
    a.cos_cache = a.sin_cache = floats({64, 5});
  });
  rejects(qsa, "past_key is required", [](Args& a) { a.past_key = {}; });
  rejects(qsa, "past_key has type float16", [&](Args& a) { a.past_key = floats({2, 11, 8}, DType::kF16); });
  rejects(qsa, "past_key has shape [1, 11, 8]", [&](Args& a) { a.past_key = floats({1, 11, 8}); });
  rejects(qsa, "mask has shape [2, 11], expected [batch_size = 2, total_sequence_length = 9]", [](Args& a) {
    static int64_t values[22] = {};
    a.mask = TensorView(values, DType::kI64, {2, 11});
  });
  rejects(qsa, "mask has type float32, expected int64", [&](Args& a) { a.mask = floats({2, 9}); });
  rejects(qsa, "past_sequence_length is 12, expected 0 to 11",
          [&](Args& a) { a.past_sequence_length = t.integers({12}); });
  rejects(qsa, "past_sequence_length is -1", [&](Args& a) { a.past_sequence_length = t.integers({-1}); });
  rejects(qsa, "past_sequence_length is 9, and 3 more rows do not fit into past_key, which has 11",
          [&](Args& a) { a.past_sequence_length = t.integers({9}); });
  rejects(csa, "past_sequence_length is 6, and 1 more rows do not fit into past_key, which has 6",
          [&](Args& a) { a.past_sequence_length = t.integers({6}); });
  rejects(qsa, "past_sequence_length has shape [2]", [&](Args& a) { a.past_sequence_length = t.integers({1, 1}); });
  rejects(qsa, "past_sequence_length has type float32", [&](Args& a) { a.past_sequence_length = floats({1}); });
  rejects(csa, "gate is required", [](Args& a) { a.gate = {}; });
  rejects(csa, "position_bias has shape [8, 16]", [&](Args& a) { a.position_bias = floats({8, 16}); });
  rejects(csa, "head_weights has shape [2, 3, 3]", [&](Args& a) { a.head_weights = floats({2, 3, 3}); });
  rejects(csa, "position_ids has type float32", [&](Args& a) { a.position_ids = floats({2, 3}); });
  rejects(csa, "past_proj_buffer is required", [](Args& a) { a.past_proj_buffer = {}; });
  rejects(csa, "past_proj_buffer has shape [1, 2, 4, 16]", [&](Args& a) {
    a.past_proj_buffer = floats({1, 2, 4, 16});
  });
  rejects(csa, "past_proj_buffer holds 8 tokens, expected less than 8", [&](Args& a) {
    a.past_proj_buffer = floats({2, 2, 8, 16});
  });
  // Outputs; a rejected call writes nothing.
  for (Call* call : {&qsa, &csa}) {
    call->run();
    cpu::ThreadPool pool(1);
    Workspace workspace(sparse_attention_indexer_workspace_bytes(call->a, 1));
    const auto rejects_output = [&](std::string_view message, const std::function<void(Args&)>& change) {
      Args a = call->a;
      std::fill_n(call->a.selected_indices.as<int32_t>(), a.selected_indices.num_elements(), 77);
      change(a);
      expect_error(ErrorCode::kInvalidArgument, concat("sparse_attention_indexer: ", message),
                   [&] { sparse_attention_indexer(a, {.pool = &pool, .workspace = &workspace}); });
      EXPECT_EQ(*call->a.selected_indices.as<int32_t>(), 77);
    };
    rejects_output("selected_indices is required", [](Args& a) { a.selected_indices = {}; });
    rejects_output("present_key has shape", [](Args& a) { a.present_key.shape[1] = 3; });
    rejects_output("present_key must be contiguous", [](Args& a) { a.present_key.strides[0] += 1; });
    rejects_output("past_key must be contiguous to be changed in place", [](Args& a) {
      a.past_key.data = a.present_key.data;
      a.past_key.strides[0] += 1;
    });
    rejects_output("present_key shares memory with past_key, which needs past_sequence_length", [&](Args& a) {
      a.past_sequence_length = {};
      const int64_t rows = a.past_key.dim(1) + (call == &qsa ? 3 : 1);
      a.present_key = TensorView(a.past_key.data, DType::kF32, {2, rows, 8});
    });
    if (call == &qsa) {
      rejects_output("present_proj_buffer is given, but this call has no such output",
                     [](Args& a) { a.present_proj_buffer = a.query; });
    } else {
      rejects_output("present_proj_buffer is required", [](Args& a) { a.present_proj_buffer = {}; });
      rejects_output("present_proj_buffer shares memory with past_proj_buffer",
                     [](Args& a) { a.past_proj_buffer.data = a.present_proj_buffer.data; });
    }
    expect_error(ErrorCode::kInvalidArgument, "no variant \"fast\"", [&] {
      sparse_attention_indexer(call->a, {.pool = &pool, .workspace = &workspace, .variant = "fast"});
    });
  }
}

}  // namespace
}  // namespace shoal
