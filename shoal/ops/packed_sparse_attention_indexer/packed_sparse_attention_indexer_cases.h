// What the tests of packed_sparse_attention_indexer share: calls of ops/indexer_cases.h, comparisons, index sharing.
#pragma once

#include <gtest/gtest.h>

#include "shoal/ops/indexer_cases.h"

namespace shoal::packed_indexer {

inline Results run_case(const Case& c, const States& before, int num_threads = 2, bool in_place = false) {
  Bound bound;
  bind(c, before, bound);
  Results r = run(bound, num_threads, in_place);
  EXPECT_TRUE(bound.intact()) << c.name();
  return r;
}

inline Results run_case(const Case& c) { return run_case(c, c.before()); }

// Where the expected value is NaN, anything may stand.
inline void expect_near(const Floats& actual, const Floats& expected, double tolerance, const std::string& what) {
  ASSERT_EQ(actual.size(), expected.size()) << what;
  for (size_t i = 0; i < actual.size(); ++i) {
    if (!std::isnan(expected[i])) {
      ASSERT_NEAR(actual[i], expected[i], tolerance) << what << " at " << i;
    }
  }
}

inline void expect_same(const Floats& actual, const Floats& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i) {
    ASSERT_TRUE(actual[i] == expected[i] || (std::isnan(actual[i]) && std::isnan(expected[i]))) << i;
  }
}

inline double tolerance_of(DType dtype) { return dtype == DType::kF32 ? 1e-5 : dtype == DType::kF16 ? 4e-3 : 3e-2; }

inline Ints row_of(const Results& r, int64_t token) {
  const size_t width = r.indices.size() / r.counts.size();
  return {r.indices.begin() + token * static_cast<int64_t>(width),
          r.indices.begin() + (token + 1) * static_cast<int64_t>(width)};
}

inline void expect_selection(const Results& r, std::vector<Ints> expected, const std::string& what) {
  ASSERT_EQ(r.counts.size(), expected.size());
  for (size_t t = 0; t < expected.size(); ++t) {
    EXPECT_EQ(r.counts[t], static_cast<int32_t>(expected[t].size())) << what << " token " << t;
    expected[t].resize(r.indices.size() / r.counts.size(), -1);
    ASSERT_EQ(row_of(r, static_cast<int64_t>(t)), expected[t]) << what << " token " << t;
  }
}

// Merged rows for two requests with six columns.
inline void share(Bound& bound, int32_t mode, int64_t rows, std::string_view policy = "default") {
  PackedSparseAttentionIndexerArgs& a = bound.args;
  a.max_output_entries = 12;
  a.indexshare_state_policy = policy;
  a.indexshare_mode = bound.tensors.integers({mode});
  Ints indices(at(rows * 12));
  std::iota(indices.begin(), indices.end(), 100);
  Ints counts(at(rows), 12);
  Ints status(at(rows), 0);
  a.merged_indices = bound.tensors.integers(indices, {rows, 12});
  a.merged_counts = bound.tensors.integers(counts, {rows});
  a.merged_status = bound.tensors.integers(status, {rows});
}

// A reuse call: no queries; with `advance` one new token a request.
inline Case reuse_case(bool csa, bool advance) {
  Case c{.csa = csa, .past = {3, 6, 8}, .counts = {1, 1, 1}};
  c.fill(92);
  c.queries.clear();
  c.weights.clear();
  if (!advance) {
    c.counts = {0, 0, 0};
    c.position_ids.clear();
    for (int64_t b = 0; b < 3; ++b) {
      c.keys[at(b)].resize(at(c.past[at(b)] * c.key_width()));
      c.gates[at(b)].resize(at(c.past[at(b)] * c.key_width()));
    }
  }
  return c;
}

}  // namespace shoal::packed_indexer
