// Duplicates are found by sorting (value, position) pairs: a fixed amount of scratch memory, the same result whatever
// the values are.
#include "shoal/ops/selection_merge/selection_merge.h"

#include <algorithm>

#include "shoal/base/text.h"
#include "shoal/cpu/thread_pool.h"
#include "shoal/ops/variant.h"
#include "shoal/tensor/matcher.h"

namespace shoal {
namespace {

constexpr std::string_view kPacked = "packed_sparse_attention_indexer_merge";
constexpr std::string_view kRange = "sparse_attention_selection_merge";
constexpr int64_t kMaxEntries = int64_t{1} << 30;
constexpr int64_t kRowGrain = 4;

enum Status : int32_t { kDone = 0, kMalformed = 1, kOverflow = 2 };

// One selection's entries, strided.
struct Prefix {
  const int32_t* data = nullptr;
  int64_t stride = 1;
  int64_t count = 0;
  int32_t operator[](int64_t i) const { return data[i * stride]; }
};

int32_t at(const TensorView& view, int64_t i) { return view.as<const int32_t>()[i * view.stride(0)]; }

// The first counts[row] entries of a row; false if the count or an entry is out of range.
bool read_prefix(const TensorView& indices, const TensorView& counts, int64_t row, Prefix& prefix) {
  const int64_t count = at(counts, row);
  if (count < 0 || count > indices.dim(1)) {
    return false;
  }
  prefix = {indices.as<const int32_t>() + row * indices.stride(0), indices.stride(1), count};
  for (int64_t i = 0; i < count; ++i) {
    if (prefix[i] < 0) {
      return false;
    }
  }
  return true;
}

struct Scratch {
  std::span<int64_t> pairs;     // value << 32 | position; sorted, later one a value
  std::span<uint8_t> is_first;  // by position
};

// Marks the first occurrence of each value of both prefixes, one after the other; leaves the distinct values in
// ascending order (in the upper halves of the pairs) and returns their number.
int64_t find_firsts(const Prefix& base, const Prefix& additional, Scratch& scratch) {
  const int64_t count = base.count + additional.count;
  int64_t* pairs = scratch.pairs.data();
  for (int64_t i = 0; i < count; ++i) {
    const int64_t value = i < base.count ? base[i] : additional[i - base.count];
    pairs[i] = value << 32 | i;
    scratch.is_first[static_cast<size_t>(i)] = 0;
  }
  std::sort(pairs, pairs + count);
  int64_t num_distinct = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (num_distinct == 0 || pairs[i] >> 32 != pairs[num_distinct - 1] >> 32) {
      scratch.is_first[static_cast<size_t>(pairs[i] & 0xffffffff)] = 1;
      pairs[num_distinct++] = pairs[i];
    }
  }
  return num_distinct;
}

// Writes the union from out[0] on and its size; nothing unless the status is kDone.
Status merge_row(const SelectionMergeArgs& a, int64_t row, Scratch& scratch, int32_t* out, int32_t& num_selected) {
  const bool by_range = static_cast<bool>(a.range_starts);
  const int64_t base_row = at(a.base_row_indices, row);
  Prefix base;
  Prefix additional;
  int64_t start = 0;
  int64_t end = 0;
  if (base_row < 0 || base_row >= a.base_indices.dim(0) ||
      !read_prefix(a.base_indices, a.base_counts, base_row, base)) {
    return kMalformed;
  }
  if (by_range) {
    start = at(a.range_starts, row);
    end = at(a.range_ends, row);
    if (start < 0 || end < start) {
      return kMalformed;
    }
  } else if (!read_prefix(a.additional_indices, a.additional_counts, row, additional)) {
    return kMalformed;
  }
  const int64_t num_distinct = find_firsts(base, additional, scratch);
  const int64_t* distinct = scratch.pairs.data();
  const int64_t* known = std::lower_bound(distinct, distinct + num_distinct, start << 32);
  const int64_t* known_end = std::lower_bound(known, distinct + num_distinct, end << 32);
  const int64_t total = num_distinct + (end - start) - (known_end - known);
  if (total > a.max_output_entries) {
    return kOverflow;
  }
  for (int64_t i = 0; i < base.count + additional.count; ++i) {
    if (scratch.is_first[static_cast<size_t>(i)] != 0) {
      *out++ = i < base.count ? base[i] : additional[i - base.count];
    }
  }
  for (int64_t value = start; value < end; ++value) {
    if (known != known_end && *known >> 32 == value) {
      ++known;
    } else {
      *out++ = static_cast<int32_t>(value);
    }
  }
  num_selected = static_cast<int32_t>(total);
  return kDone;
}

SelectionMergeShapes check_inputs(std::string_view op, const SelectionMergeArgs& a) {
  require(a.policy_mode == "append_range" || a.policy_mode == "append_indices", op, ": policy_mode is '",
          printable(a.policy_mode), "', expected append_range or append_indices");
  require(a.max_output_entries >= 1 && a.max_output_entries <= kMaxEntries, op, ": max_output_entries is ",
          a.max_output_entries, ", expected 1 to ", kMaxEntries);
  const Matcher match(op);
  Dim cached{"num_cached_rows"};
  Dim base_columns{"base_columns"};
  Dim queries{"num_queries"};
  match.tensor("base_indices", a.base_indices).type(DType::kI32).shape({cached, base_columns});
  const Device device = a.base_indices.device;
  match.tensor("base_counts", a.base_counts).type(DType::kI32).shape({cached}).device(device);
  match.tensor("base_row_indices", a.base_row_indices).type(DType::kI32).shape({queries}).device(device);
  int64_t num_columns = base_columns;
  if (a.policy_mode == "append_range") {
    match.tensor("range_starts", a.range_starts).type(DType::kI32).shape({queries}).device(device);
    match.tensor("range_ends", a.range_ends).type(DType::kI32).shape({queries}).device(device);
    require(!a.additional_indices, op, ": additional_indices must be absent with append_range");
    require(!a.additional_counts, op, ": additional_counts must be absent with append_range");
  } else {
    Dim additional_columns{"additional_columns"};
    match.tensor("additional_indices", a.additional_indices)
        .type(DType::kI32)
        .shape({queries, additional_columns})
        .device(device);
    match.tensor("additional_counts", a.additional_counts).type(DType::kI32).shape({queries}).device(device);
    require(!a.range_starts, op, ": range_starts must be absent with append_indices");
    require(!a.range_ends, op, ": range_ends must be absent with append_indices");
    require(additional_columns <= INT32_MAX, op, ": additional_indices has ", additional_columns.value(),
            " columns, at most ", INT32_MAX, " are supported");
    num_columns += additional_columns;
  }
  require(cached <= INT32_MAX && num_columns <= INT32_MAX, op, ": base_indices has shape ",
          shape_text(a.base_indices.dims()), ", at most ", INT32_MAX, " rows and columns are supported");
  require(queries <= INT32_MAX, op, ": base_row_indices has ", queries.value(), " entries, at most ", INT32_MAX,
          " are supported");
  return {.selected_indices = {DType::kI32, {queries, a.max_output_entries}},
          .selected_counts = {DType::kI32, {queries}},
          .status = {DType::kI32, {queries}}};
}

size_t num_columns_of(const SelectionMergeArgs& a) {
  return static_cast<size_t>(a.base_indices.dim(1) + (a.additional_indices ? a.additional_indices.dim(1) : 0));
}

void run(std::string_view op, const SelectionMergeArgs& a, const OpContext& context) {
  const SelectionMergeShapes shapes = check_inputs(op, a);
  const Device device = a.base_indices.device;
  check_output(op, "selected_indices", a.selected_indices, shapes.selected_indices, device);
  check_output(op, "selected_counts", a.selected_counts, shapes.selected_counts, device);
  check_output(op, "status", a.status, shapes.status, device);
  const Matcher match(op);
  match.tensor("selected_indices", a.selected_indices).contiguous();
  match.tensor("selected_counts", a.selected_counts).contiguous();
  match.tensor("status", a.status).contiguous();
  wants_reference(op, context.variant);  // one path for both

  const Workspace::Scope scope(*context.workspace);
  const size_t num_columns = num_columns_of(a);
  const auto num_threads = static_cast<size_t>(context.pool->num_threads());
  const std::span<int64_t> pairs = context.workspace->take<int64_t>(num_threads * num_columns);
  const std::span<uint8_t> is_first = context.workspace->take<uint8_t>(num_threads * num_columns);
  context.pool->parallel_for(a.base_row_indices.dim(0), kRowGrain, [&](int64_t begin, int64_t end, int thread_idx) {
    const size_t offset = static_cast<size_t>(thread_idx) * num_columns;
    Scratch scratch{pairs.subspan(offset, num_columns), is_first.subspan(offset, num_columns)};
    for (int64_t row = begin; row < end; ++row) {
      int32_t* out = a.selected_indices.as<int32_t>() + row * a.max_output_entries;
      int32_t num_selected = 0;
      a.status.as<int32_t>()[row] = merge_row(a, row, scratch, out, num_selected);
      a.selected_counts.as<int32_t>()[row] = num_selected;
      std::fill(out + num_selected, out + a.max_output_entries, -1);
    }
  });
}

void check_range_only(const SelectionMergeArgs& a) {
  require(a.policy_mode == "append_range", kRange, ": policy_mode is '", printable(a.policy_mode),
          "', expected append_range");
}

}  // namespace

SelectionMergeShapes packed_sparse_attention_indexer_merge_shapes(const SelectionMergeArgs& args) {
  return check_inputs(kPacked, args);
}

SelectionMergeShapes sparse_attention_selection_merge_shapes(const SelectionMergeArgs& args) {
  check_range_only(args);
  return check_inputs(kRange, args);
}

size_t selection_merge_workspace_bytes(const SelectionMergeArgs& args, int num_threads) {
  const size_t count = static_cast<size_t>(num_threads) * num_columns_of(args);
  return Workspace::bytes_for<int64_t>(count) + Workspace::bytes_for<uint8_t>(count);
}

void packed_sparse_attention_indexer_merge(const SelectionMergeArgs& args, const OpContext& context) {
  run(kPacked, args, context);
}

void sparse_attention_selection_merge(const SelectionMergeArgs& args, const OpContext& context) {
  check_range_only(args);
  run(kRange, args, context);
}

}  // namespace shoal
