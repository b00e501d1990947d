// Merges against a walk that looks every value up in what it has written; every kind of malformed row; rejections.
#include "shoal/ops/selection_merge/selection_merge.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <limits>

#include "shoal/cpu/thread_pool.h"
#include "testkit/expect_error.h"
#include "testkit/testkit.h"

namespace shoal {
namespace {

using Ints = std::vector<int32_t>;
using testkit::expect_error;

constexpr int32_t kMax = std::numeric_limits<int32_t>::max();
constexpr int32_t kMin = std::numeric_limits<int32_t>::min();

struct Problem {
  int64_t num_cached = 1;
  int64_t base_columns = 0;
  Ints base{};  // [num_cached, base_columns]
  Ints base_counts{};
  Ints rows{};
  Ints starts{};
  Ints ends{};
  int64_t additional_columns = -1;  // -1: a range
  Ints additional{};
  Ints additional_counts{};
  int64_t max_entries = 1;

  bool by_range() const { return additional_columns < 0; }
  int64_t num_queries() const { return static_cast<int64_t>(rows.size()); }
};

struct Results {
  Ints indices;
  Ints counts;
  Ints status;
  bool operator==(const Results&) const = default;
};

TensorView view(const Ints& values, std::vector<int64_t> shape) {
  return TensorView(const_cast<int32_t*>(values.data()), DType::kI32, shape);
}

SelectionMergeArgs arguments(const Problem& p) {
  SelectionMergeArgs a;
  a.base_indices = view(p.base, {p.num_cached, p.base_columns});
  a.base_counts = view(p.base_counts, {p.num_cached});
  a.base_row_indices = view(p.rows, {p.num_queries()});
  if (p.by_range()) {
    a.range_starts = view(p.starts, {p.num_queries()});
    a.range_ends = view(p.ends, {p.num_queries()});
  } else {
    a.additional_indices = view(p.additional, {p.num_queries(), p.additional_columns});
    a.additional_counts = view(p.additional_counts, {p.num_queries()});
    a.policy_mode = "append_indices";
  }
  a.max_output_entries = p.max_entries;
  return a;
}

Results run(const Problem& p, int num_threads = 2, bool packed = true) {
  cpu::ThreadPool pool(num_threads);
  SelectionMergeArgs a = arguments(p);
  testkit::Guarded<int32_t> indices(p.rows.size() * static_cast<size_t>(p.max_entries));
  testkit::Guarded<int32_t> counts(p.rows.size());
  testkit::Guarded<int32_t> status(p.rows.size());
  a.selected_indices = TensorView(indices.data(), DType::kI32, {p.num_queries(), p.max_entries});
  a.selected_counts = TensorView(counts.data(), DType::kI32, {p.num_queries()});
  a.status = TensorView(status.data(), DType::kI32, {p.num_queries()});
  Workspace workspace(selection_merge_workspace_bytes(a, num_threads));
  (packed ? packed_sparse_attention_indexer_merge : sparse_attention_selection_merge)(
      a, {.pool = &pool, .workspace = &workspace});
  EXPECT_TRUE(indices.guards_intact() && counts.guards_intact() && status.guards_intact());
  return {{indices.span().begin(), indices.span().end()},
          {counts.span().begin(), counts.span().end()},
          {status.span().begin(), status.span().end()}};
}

// The contract, word by word. Ranges must be short.
Results expected(const Problem& p) {
  Results r;
  for (size_t i = 0; i < p.rows.size(); ++i) {
    Ints row;
    int32_t status = 0;
    const auto add = [&](const Ints& values, int64_t first, int64_t columns, int32_t count) {
      if (count < 0 || count > columns) {
        status = 1;
        return;
      }
      for (int64_t j = first; j < first + count; ++j) {
        const int32_t value = values[static_cast<size_t>(j)];
        status = value < 0 ? 1 : status;
        if (std::find(row.begin(), row.end(), value) == row.end()) {
          row.push_back(value);
        }
      }
    };
    if (p.rows[i] < 0 || p.rows[i] >= p.num_cached) {
      status = 1;
    } else {
      add(p.base, p.rows[i] * p.base_columns, p.base_columns, p.base_counts[static_cast<size_t>(p.rows[i])]);
      if (p.by_range()) {
        status = p.starts[i] < 0 || p.ends[i] < p.starts[i] ? 1 : status;
        Ints range;
        for (int32_t value = p.starts[i]; status == 0 && value < p.ends[i]; ++value) {
          range.push_back(value);
        }
        const auto length = static_cast<int32_t>(range.size());
        add(range, 0, length, length);
      } else {
        add(p.additional, static_cast<int64_t>(i) * p.additional_columns, p.additional_columns, p.additional_counts[i]);
      }
    }
    if (status == 0 && static_cast<int64_t>(row.size()) > p.max_entries) {
      status = 2;
    }
    if (status != 0) {
      row.clear();
    }
    r.counts.push_back(static_cast<int32_t>(row.size()));
    r.status.push_back(status);
    row.resize(static_cast<size_t>(p.max_entries), -1);
    r.indices.insert(r.indices.end(), row.begin(), row.end());
  }
  return r;
}

TEST(SelectionMerge, RangesByHand) {
  // Two queries share row 0; padding behind the prefix is garbage.
  Problem p{.num_cached = 2, .base_columns = 4, .base = {7, 3, 7, -9, 5, kMin, -1, kMax}, .base_counts = {3, 1}};
  p.rows = {0, 0, 1, 1};
  p.starts = {2, 9, 5, 0};
  p.ends = {5, 9, 7, 0};
  p.max_entries = 5;
  const Results r = run(p);
  EXPECT_EQ(r.indices, (Ints{7, 3, 2, 4, -1, 7, 3, -1, -1, -1, 5, 6, -1, -1, -1, 5, -1, -1, -1, -1}));
  EXPECT_EQ(r.counts, (Ints{4, 2, 2, 1}));
  EXPECT_EQ(r.status, (Ints{0, 0, 0, 0}));
  EXPECT_EQ(run(p, 1, /*packed=*/false), r);
}

TEST(SelectionMerge, RangeOverAllOfTheBase) {
  Problem p{.num_cached = 1, .base_columns = 3, .base = {4, 1, 3}, .base_counts = {3}, .rows = {0}, .starts = {0}};
  p.ends = {6};
  p.max_entries = 6;
  EXPECT_EQ(run(p), (Results{{4, 1, 3, 0, 2, 5}, {6}, {0}}));
}

TEST(SelectionMerge, SelectionsByHand) {
  Problem p{.num_cached = 1, .base_columns = 3, .base = {4, 4, 1}, .base_counts = {3}};
  p.rows = {0, 0, 0};
  p.additional_columns = 3;
  p.additional = {9, 1, 9, 0, kMax, -5, 8, 8, 8};
  p.additional_counts = {3, 2, 0};
  p.max_entries = 4;
  const Results r = run(p);
  EXPECT_EQ(r.indices, (Ints{4, 1, 9, -1, 4, 1, 0, kMax, 4, 1, -1, -1}));
  EXPECT_EQ(r.counts, (Ints{3, 4, 2}));
  EXPECT_EQ(r.status, (Ints{0, 0, 0}));
}

TEST(SelectionMerge, CapacityIsExact) {
  Problem p{.num_cached = 1, .base_columns = 3, .base = {1, 10, 1}, .base_counts = {3}, .rows = {0, 0}};
  p.starts = {10, 10};
  p.ends = {13, 14};  // with 1: four, five
  p.max_entries = 4;
  const Results r = run(p);
  EXPECT_EQ(r.indices, (Ints{1, 10, 11, 12, -1, -1, -1, -1}));
  EXPECT_EQ(r.counts, (Ints{4, 0}));
  EXPECT_EQ(r.status, (Ints{0, 2}));
}

TEST(SelectionMerge, HugeRangesAreNotWalked) {
  Problem p{.num_cached = 2, .base_columns = 2, .base = {kMax, kMax - 1, 0, 1}, .base_counts = {2, 2}};
  for (int i = 0; i < 1000; ++i) {  // hours, if a range were walked
    p.rows.insert(p.rows.end(), {0, 1, 1});
    p.starts.insert(p.starts.end(), {kMax - 2, 0, kMax});
    p.ends.insert(p.ends.end(), {kMax, kMax, kMax});
  }
  p.max_entries = 3;
  const Results r = run(p);
  EXPECT_EQ(Ints(r.status.begin(), r.status.begin() + 3), (Ints{0, 2, 0}));
  EXPECT_EQ(Ints(r.indices.begin(), r.indices.begin() + 9), (Ints{kMax, kMax - 1, kMax - 2, -1, -1, -1, 0, 1, -1}));
}

TEST(SelectionMerge, MalformedRowsFailAlone) {
  Problem p{.num_cached = 4, .base_columns = 2, .base = {1, 2, -3, 4, 5, 6, 7, 8}, .base_counts = {2, 2, 3, -1}};
  p.rows = {0, -1, 4, 1, 2, 3, 0, 0, 0, kMin, kMax, 0};
  p.starts = {0, 0, 0, 0, 0, 0, -1, 5, kMax, 0, 0, kMin};
  p.ends = {1, 1, 1, 1, 1, 1, 1, 4, kMin, 1, 1, kMax};
  p.max_entries = 3;
  const Results r = run(p);
  EXPECT_EQ(r.status, (Ints{0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1}));
  EXPECT_EQ(Ints(r.indices.begin(), r.indices.begin() + 3), (Ints{1, 2, 0}));
  EXPECT_TRUE(std::all_of(r.indices.begin() + 3, r.indices.end(), [](int32_t value) { return value == -1; }));
  // Malformed and too large at once: malformed. The same for a second selection.
  Problem q{.num_cached = 1, .base_columns = 2, .base = {1, 2}, .base_counts = {2}, .rows = {0, 0, 0, 0}};
  q.additional_columns = 2;
  q.additional = {3, -1, 3, 4, 3, 4, 3, -1};
  q.additional_counts = {2, -1, 3, 1};
  q.max_entries = 2;
  EXPECT_EQ(run(q).status, (Ints{1, 1, 1, 2}));
}

TEST(SelectionMerge, NothingToMerge) {
  Problem no_rows{.num_cached = 0, .rows = {0}, .starts = {0}, .ends = {1}};
  EXPECT_EQ(run(no_rows).status, Ints{1});
  Problem no_columns{.num_cached = 1, .base_counts = {0}, .rows = {0, 0}, .starts = {3, 3}, .ends = {4, 3}};
  EXPECT_EQ(run(no_columns), (Results{{3, -1}, {1, 0}, {0, 0}}));
  Problem no_queries{.num_cached = 1, .base_columns = 1, .base = {1}, .base_counts = {1}};
  EXPECT_EQ(run(no_queries), Results{});
}

TEST(SelectionMerge, AgreesWithTheWalk) {
  testkit::Random random(5);
  for (int trial = 0; trial < 300; ++trial) {
    Problem p;
    p.num_cached = random.integer(1, 4);
    p.base_columns = random.integer(0, 40);
    const int64_t num_queries = random.integer(0, 9);
    const auto value = [&] { return static_cast<int32_t>(random.integer(0, 60) == 0 ? -1 : random.integer(0, 30)); };
    for (int64_t i = 0; i < p.num_cached * p.base_columns; ++i) {
      p.base.push_back(value());
    }
    for (int64_t i = 0; i < p.num_cached; ++i) {
      p.base_counts.push_back(static_cast<int32_t>(random.integer(-1, p.base_columns + 1)));
    }
    const bool by_range = trial % 2 == 0;
    p.additional_columns = by_range ? -1 : random.integer(0, 20);
    for (int64_t i = 0; i < num_queries; ++i) {
      p.rows.push_back(static_cast<int32_t>(random.integer(-1, p.num_cached)));
      if (by_range) {
        p.starts.push_back(static_cast<int32_t>(random.integer(-1, 30)));
        p.ends.push_back(p.starts.back() + static_cast<int32_t>(random.integer(-1, 12)));
      } else {
        p.additional_counts.push_back(static_cast<int32_t>(random.integer(-1, p.additional_columns + 1)));
        for (int64_t j = 0; j < p.additional_columns; ++j) {
          p.additional.push_back(value());
        }
      }
    }
    p.max_entries = random.integer(1, 40);
    const Results right = expected(p);
    EXPECT_EQ(run(p), right) << trial;
    EXPECT_EQ(run(p, 1, !by_range), right) << trial;
  }
}

TEST(SelectionMerge, TakesAnyStrides) {
  Problem p{.num_cached = 2, .base_columns = 2, .base = {1, 2, 3, 4}, .base_counts = {2, 1}, .rows = {1, 0}};
  p.starts = {8, 9};
  p.ends = {9, 9};
  p.max_entries = 3;
  cpu::ThreadPool pool(1);
  SelectionMergeArgs a = arguments(p);
  // Columns three apart, in reverse; vectors two apart.
  Ints base(12, -7), counts = {2, -7, 1, -7}, rows = {1, -7, 0, -7};
  for (size_t row = 0; row < 2; ++row) {
    for (size_t column = 0; column < 2; ++column) {
      base[row * 6 + 3 - column * 3] = p.base[row * 2 + column];
    }
  }
  a.base_indices = TensorView(base.data() + 3, DType::kI32, {2, 2});
  a.base_indices.strides = {6, -3};
  a.base_counts = TensorView(counts.data(), DType::kI32, {2});
  a.base_counts.strides = {2};
  a.base_row_indices = TensorView(rows.data(), DType::kI32, {2});
  a.base_row_indices.strides = {2};
  Ints indices(6), selected(2), status(2);
  a.selected_indices = view(indices, {2, 3});
  a.selected_counts = view(selected, {2});
  a.status = view(status, {2});
  Workspace workspace(selection_merge_workspace_bytes(a, 1));
  sparse_attention_selection_merge(a, {.pool = &pool, .workspace = &workspace});
  EXPECT_EQ(indices, (Ints{3, 8, -1, 1, 2, -1}));
}

TEST(SelectionMerge, Rejections) {
  Problem p{.num_cached = 1, .base_columns = 2, .base = {1, 2}, .base_counts = {2}, .rows = {0}, .starts = {0}};
  p.ends = {1};
  const Ints two = {0, 0};
  const auto rejects = [&](std::string_view message, const std::function<void(SelectionMergeArgs&)>& change) {
    SelectionMergeArgs a = arguments(p);
    change(a);
    expect_error(ErrorCode::kInvalidArgument, message, [&] { packed_sparse_attention_indexer_merge_shapes(a); });
  };
  const auto name = [](std::string_view text) { return concat("packed_sparse_attention_indexer_merge: ", text); };
  rejects(name("policy_mode is 'both', expected append_range or append_indices"),
          [](SelectionMergeArgs& a) { a.policy_mode = "both"; });
  rejects(name("max_output_entries is 0, expected 1 to 1073741824"),
          [](SelectionMergeArgs& a) { a.max_output_entries = 0; });
  rejects(name("max_output_entries is 1073741825"),
          [](SelectionMergeArgs& a) { a.max_output_entries = (int64_t{1} << 30) + 1; });
  rejects(name("base_indices is required"), [](SelectionMergeArgs& a) { a.base_indices = {}; });
  rejects(name("base_indices has type int64, expected int32"),
          [](SelectionMergeArgs& a) { a.base_indices.dtype = DType::kI64; });
  rejects(name("base_indices has shape [2]"), [&](SelectionMergeArgs& a) { a.base_indices = view(two, {2}); });
  rejects(name("base_counts has shape [2], expected [num_cached_rows = 1]"),
          [&](SelectionMergeArgs& a) { a.base_counts = view(two, {2}); });
  rejects(name("base_row_indices has shape [1, 2]"), [&](SelectionMergeArgs& a) {
    a.base_row_indices = view(two, {1, 2});
  });
  rejects(name("range_starts is required"), [](SelectionMergeArgs& a) { a.range_starts = {}; });
  rejects(name("range_ends is required"), [](SelectionMergeArgs& a) { a.range_ends = {}; });
  rejects(name("range_starts has shape [2], expected [num_queries = 1]"),
          [&](SelectionMergeArgs& a) { a.range_starts = view(two, {2}); });
  rejects(name("range_ends has shape [2], expected [num_queries = 1]"),
          [&](SelectionMergeArgs& a) { a.range_ends = view(two, {2}); });
  rejects(name("additional_indices must be absent"), [&](SelectionMergeArgs& a) {
    a.additional_indices = view(two, {1, 2});
  });
  rejects(name("additional_counts must be absent"),
          [&](SelectionMergeArgs& a) { a.additional_counts = view(two, {2}); });
  p.additional_columns = 2;
  p.additional = {0, 0};
  p.additional_counts = {0};
  rejects(name("additional_indices is required"), [](SelectionMergeArgs& a) { a.additional_indices = {}; });
  rejects(name("additional_counts is required"), [](SelectionMergeArgs& a) { a.additional_counts = {}; });
  rejects(name("additional_indices has shape [2, 1]"), [&](SelectionMergeArgs& a) {
    a.additional_indices = view(two, {2, 1});
  });
  rejects(name("additional_counts has shape [2]"),
          [&](SelectionMergeArgs& a) { a.additional_counts = view(two, {2}); });
  rejects(name("range_starts must be absent"), [&](SelectionMergeArgs& a) { a.range_starts = view(two, {1}); });
  rejects(name("range_ends must be absent"), [&](SelectionMergeArgs& a) { a.range_ends = view(two, {1}); });
  const auto huge = [](TensorView& view, int axis) { view.shape[static_cast<size_t>(axis)] = int64_t{1} << 31; };
  rejects("additional_indices has 2147483648 columns", [&](SelectionMergeArgs& a) { huge(a.additional_indices, 1); });
  rejects("base_indices has shape [1, 2147483648], at most", [&](SelectionMergeArgs& a) { huge(a.base_indices, 1); });
  expect_error(ErrorCode::kInvalidArgument, "sparse_attention_selection_merge: policy_mode is 'append_indices'",
               [&] { sparse_attention_selection_merge_shapes(arguments(p)); });
}

TEST(SelectionMerge, RejectedCallsWriteNothing) {
  Problem p{.num_cached = 1, .base_columns = 1, .base = {1}, .base_counts = {1}, .rows = {0}, .starts = {0}};
  p.ends = {1};
  p.max_entries = 2;
  cpu::ThreadPool pool(1);
  Workspace workspace(1024);
  Ints indices(4, 77), counts(2, 77), status(2, 77);
  const auto rejects = [&](std::string_view message,
                           const std::function<void(SelectionMergeArgs&, OpContext&)>& change) {
    SelectionMergeArgs a = arguments(p);
    a.selected_indices = view(indices, {1, 2});
    a.selected_counts = view(counts, {1});
    a.status = view(status, {1});
    OpContext context{.pool = &pool, .workspace = &workspace};
    change(a, context);
    expect_error(ErrorCode::kInvalidArgument, message, [&] { packed_sparse_attention_indexer_merge(a, context); });
    EXPECT_EQ(indices, Ints(4, 77));
    EXPECT_EQ(counts, Ints(2, 77));
    EXPECT_EQ(status, Ints(2, 77));
  };
  rejects("selected_indices is required", [](SelectionMergeArgs& a, OpContext&) { a.selected_indices = {}; });
  rejects("selected_indices has shape [1, 3], expected [1, 2]",
          [&](SelectionMergeArgs& a, OpContext&) { a.selected_indices.shape[1] = 3; });
  rejects("selected_indices must be contiguous",
          [&](SelectionMergeArgs& a, OpContext&) { a.selected_indices.strides[1] = 2; });
  rejects("selected_counts has shape [2], expected [1]",
          [&](SelectionMergeArgs& a, OpContext&) { a.selected_counts = view(counts, {2}); });
  rejects("status has type int64, expected int32",
          [](SelectionMergeArgs& a, OpContext&) { a.status.dtype = DType::kI64; });
  rejects("no variant \"fast\"", [](SelectionMergeArgs&, OpContext& context) { context.variant = "fast"; });
}

}  // namespace
}  // namespace shoal
