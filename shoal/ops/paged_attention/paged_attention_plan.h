// How the fast path divides a call and where its scratch memory lies. Internal to the operator.
//
// Keys are taken in tiles of 64 aligned to absolute positions, tiles in spans of 1024. A span gives every row a
// maximum, a sum and an accumulator; spans are merged in ascending order. This order alone fixes the bits of a row: row
// blocks, threads and whether spans are computed apart (split) are free.
#pragma once

#include "shoal/ops/paged_problem.h"
#include "shoal/tensor/workspace.h"

namespace shoal::paged {

constexpr int64_t kSpan = 1024;
constexpr int64_t kMaxRows = 96;  // rows of a unit: enough that converting a K or V tile costs a few percent
constexpr int64_t kMinRows = 24;  // smaller blocks only where there are no more rows

// Tokens [begin, end) of one sequence.
struct Run {
  int32_t seq_idx = 0;
  int64_t begin = 0;
  int64_t end = 0;
  int64_t pos = 0;  // of the first token
  int64_t kv_len = 0;
};

// Rows (token, head of the group) [row_begin, row_end) of a run for one KV head.
struct Unit {
  const Run* run = nullptr;
  int32_t kv_head = 0;
  int32_t row_begin = 0;
  int32_t row_end = 0;
};

// Scratch of one thread.
struct ThreadScratch {
  float* k_tile = nullptr;      // [kTile, k_stride], turned
  float* v_tile = nullptr;      // [kTile, v_stride]
  float* weights = nullptr;     // [kMaxRows, kTile]: scores, then softmax numerators
  float* acc = nullptr;         // [kMaxRows, v_stride], of the span
  float* total = nullptr;       // [kMaxRows, v_stride], of the spans so far
  float* row_values = nullptr;  // [kNumRowValues, kMaxRows]
  float* head = nullptr;        // [3, k_stride], a head and its rotary table rows
  float* rows = nullptr;        // [16, k_stride], keys on their way into k_tile
  float* zeros = nullptr;       // [k_stride], the row of a key that is not there
};
constexpr int64_t kNumRowValues = 6;

struct Plan {
  const Problem* problem = nullptr;
  int64_t k_stride = 0;  // head_dim, padded
  int64_t v_stride = 0;  // v_head_dim, padded
  int64_t num_threads = 0;
  int64_t max_units = 0;
  int64_t partial_size = 0;  // floats for spans computed apart

  float* query = nullptr;     // [num_kv_heads, num_tokens, group, k_stride], ready for the dot product
  float* k_scales = nullptr;  // [num_kv_heads, head_dim] or null
  float* v_scales = nullptr;
  float* k_fold = nullptr;         // [num_kv_heads, head_dim]: k_scales / k_unit, multiplied into the query
  float* k_unit = nullptr;         // [num_kv_heads]: a power of two
  float* q_norm_weight = nullptr;  // [head_dim]
  float* k_norm_weight = nullptr;
  float* sink = nullptr;         // [num_heads] or null
  int32_t* owner = nullptr;      // [num_tokens]
  int64_t* slot = nullptr;       // [num_tokens]
  Run* runs = nullptr;           // [num_tokens]
  Unit* units = nullptr;         // [max_units]
  float* partial_max = nullptr;  // [num_spans, num_rows]
  float* partial_sum = nullptr;
  float* partial_acc = nullptr;  // [num_spans, num_rows, v_stride]
  ThreadScratch* threads = nullptr;

  int64_t num_runs = 0;
  int64_t num_units = 0;
  int64_t num_spans = 1;  // of a unit, when spans are computed apart
  bool split = false;
  int64_t num_rows() const { return problem->num_tokens * problem->num_heads; }
};

// A wrong page id is masked in release builds; a debug build names it.
void check_page_ids(const PagedAttentionArgs& args, const Problem& problem);

// Sizes only.
Plan make_plan(const Problem& problem, int num_threads);
// Bytes of all arrays, and their places.
size_t plan_bytes(const Plan& plan);
void take_arrays(Plan& plan, Workspace& workspace);
// Reads the metadata: owners, runs, slots, scales, units. Zeroes the rows of no sequence.
void fill_plan(Plan& plan);

// First and one past the last span with a position that some row of the unit admits.
struct SpanRange {
  int64_t begin = 0;
  int64_t end = 0;
};
SpanRange span_range(const Plan& plan, const Unit& unit);

SHOAL_DECLARE_FOR_EACH_ISA(void prepare(const Plan& plan, int64_t part, int64_t num_parts))
SHOAL_DECLARE_FOR_EACH_ISA(void attend_unit(const Plan& plan, const Unit& unit, const ThreadScratch& scratch))
SHOAL_DECLARE_FOR_EACH_ISA(void attend_span(const Plan& plan, const Unit& unit, int64_t span,
                                            const ThreadScratch& scratch))
SHOAL_DECLARE_FOR_EACH_ISA(void merge_unit(const Plan& plan, const Unit& unit, const ThreadScratch& scratch))

}  // namespace shoal::paged
