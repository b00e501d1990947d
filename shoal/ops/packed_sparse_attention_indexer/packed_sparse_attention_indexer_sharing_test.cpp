// Index sharing: refresh, reuse, hold and advance.
#include "shoal/ops/packed_sparse_attention_indexer/packed_sparse_attention_indexer_cases.h"

namespace shoal::packed_indexer {
namespace {

TEST(PackedSparseAttentionIndexer, RefreshSelectsAsWithoutSharing) {
  for (const bool csa : {false, true}) {
    Case c{.csa = csa, .past = {3, 6}, .counts = {6, 3}};
    c.fill(91);
    const Results right = run_case(c);
    Bound bound;
    bind(c, c.before(), bound);
    share(bound, 0, 0);
    const Results r = run(bound);
    EXPECT_TRUE(bound.intact());
    EXPECT_EQ(r.counts, right.counts);
    EXPECT_EQ(r.sharing, Ints(9, 0));
    EXPECT_EQ(r.states.lengths, right.states.lengths);
    for (int64_t token = 0; token < 9; ++token) {
      Ints row = row_of(right, token);
      row.resize(12, -1);
      EXPECT_EQ(row_of(r, token), row);
    }
  }
}

Ints merged_row(int32_t b) {
  Ints row(12);
  std::iota(row.begin(), row.end(), 100 + 12 * b);
  return row;
}

TEST(PackedSparseAttentionIndexer, ReuseHandsOnAndHolds) {
  for (const auto& [csa, policy] : {std::pair{false, "default"}, {false, "hold"}, {true, "hold"}}) {
    Case c = reuse_case(csa, false);
    c.capture_capacity = csa ? 0 : 2;
    c.capture_counts = csa ? Ints{} : Ints{1, 1, 1};
    const States before = c.before();
    Bound bound;
    bind(c, before, bound);
    share(bound, 1, 3, policy);
    const Results r = run(bound);
    EXPECT_TRUE(bound.intact());
    for (int32_t b = 0; b < 3; ++b) {
      EXPECT_EQ(row_of(r, b), merged_row(b));
    }
    EXPECT_EQ(r.counts, (Ints{12, 12, 12}));
    EXPECT_EQ(r.sharing, (Ints{0, 0, 0}));
    EXPECT_EQ(r.status, (Ints{0, 0, 0}));
    EXPECT_EQ(r.states.lengths, before.lengths);
    expect_same(r.states.keys, before.keys);
    expect_same(r.states.kv, before.kv);
    EXPECT_EQ(r.update, Floats(r.update.size(), 0.0f));
    // Rows out of place.
    bound.args.merged_status.as<int32_t>()[1] = 7;
    for (const auto& [cu, bad] : {std::pair{Ints{0, 2, 2, 3}, Ints{1, 1, 0}},
                                  {Ints{0, 1, 1, 3}, Ints{0, 1, 1}},
                                  {Ints{0, 1, 2, 2}, Ints{1, 1, 1}},
                                  {Ints{1, 1, 2, 3}, Ints{1, 1, 1}},
                                  {Ints{0, INT32_MAX, INT32_MIN, 3}, Ints{1, 1, 1}}}) {
      std::copy(cu.begin(), cu.end(), bound.args.cumulative_sequence_lengths.as<int32_t>());
      const Results s = run(bound);
      EXPECT_EQ(s.status, bad);
      EXPECT_EQ(s.sharing, (Ints{bad[0], 7, bad[2]}));
      for (int32_t b = 0; b < 3; ++b) {
        EXPECT_EQ(row_of(s, b), bad[at(b)] != 0 ? Ints(12, -1) : merged_row(b));
        EXPECT_EQ(s.counts[at(b)], bad[at(b)] != 0 ? 0 : 12);
      }
      expect_same(s.states.keys, before.keys);
      EXPECT_EQ(s.states.lengths, before.lengths);
    }
  }
}

TEST(PackedSparseAttentionIndexer, ReuseAdvancesCsa) {
  for (const char* policy : {"default", "advance"}) {
    Case c = reuse_case(true, true);
    const States before = c.before();
    const States after = c.after();
    Bound bound;
    bind(c, before, bound);
    share(bound, 1, 3, policy);
    const Results r = run(bound);
    EXPECT_EQ(r.status, (Ints{0, 0, 0}));
    EXPECT_EQ(r.sharing, (Ints{0, 0, 0}));
    EXPECT_EQ(r.states.lengths, after.lengths);
    expect_near(r.states.keys, after.keys, 1e-5, "keys");
    expect_near(r.states.kv, after.kv, 0.0, "kv");
    expect_near(r.states.gates, after.gates, 0.0, "gates");
    for (int32_t b = 0; b < 3; ++b) {
      EXPECT_EQ(row_of(r, b), merged_row(b));
    }
    // A request that is out of place or whose state is malformed or full keeps its state.
    const auto expect_bad = [&](int64_t bad, int32_t status) {
      const Results s = run(bound);
      for (int64_t b = 0; b < 3; ++b) {
        EXPECT_EQ(s.status[at(b)], b == bad ? status : 0);
        EXPECT_EQ(s.sharing[at(b)], b == bad ? 1 : 0);
        EXPECT_EQ(row_of(s, b), b == bad ? Ints(12, -1) : merged_row(static_cast<int32_t>(b)));
      }
      EXPECT_EQ(s.states.lengths[at(2 * bad + 1)],
                std::clamp(bound.args.past_state_lengths.as<int32_t>()[2 * bad + 1], 0, 7));
    };
    bound.args.past_sequence_lengths.as<int32_t>()[1] = -1;
    expect_bad(1, 1);
    bound.args.past_sequence_lengths.as<int32_t>()[1] = 6;
    bound.args.past_state_lengths.as<int32_t>()[5] = 9;
    expect_bad(2, 1);
    bound.args.past_state_lengths.as<int32_t>()[5] = before.lengths[5];
    bound.args.past_state_lengths.as<int32_t>()[0] = 16;  // full, and its fourth token is here
    expect_bad(0, 2);
  }
}

TEST(PackedSparseAttentionIndexer, ReuseInPlace) {
  Case c = reuse_case(false, false);
  Bound bound;
  bind(c, c.before(), bound);
  share(bound, 1, 3);
  PackedSparseAttentionIndexerArgs& a = bound.args;
  a.selected_indices = a.merged_indices;
  a.selected_counts = a.merged_counts;
  a.indexshare_status = a.merged_status;
  a.present_key_state = a.past_key_state;
  a.present_kv_buffer = a.past_kv_buffer;
  a.present_state_lengths = a.past_state_lengths;
  a.cumulative_sequence_lengths.as<int32_t>()[1] = 2;
  cpu::ThreadPool pool(2);
  Workspace workspace(packed_sparse_attention_indexer_workspace_bytes(a, 2));
  packed_sparse_attention_indexer(a, {.pool = &pool, .workspace = &workspace});
  EXPECT_EQ(bound.values_of(a.selected_counts), (Ints{0, 0, 12}));
  EXPECT_EQ(bound.values_of(a.indexshare_status), (Ints{1, 1, 0}));
  const Ints indices = bound.values_of(a.selected_indices);
  EXPECT_EQ(Ints(indices.begin(), indices.begin() + 24), Ints(24, -1));
  EXPECT_EQ(Ints(indices.begin() + 24, indices.end()), merged_row(2));
}

}  // namespace
}  // namespace shoal::packed_indexer
