// Sizes, scratch and division of a call: everything of the fast path that is done once and not per element.
#include "shoal/ops/paged_attention/paged_attention_plan.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "shoal/base/checked.h"

namespace shoal::paged {
namespace {

constexpr int64_t kMaxPartialSize = int64_t{4} << 20;  // floats: 16 MiB

int64_t max_rows(const Problem& p) {
  return p.head_dim > 256 ? kMaxRows / 2 : kMaxRows;  // the unit's rows should stay in the second-level cache
}

// Calls visit(pointer, count) for every array of the plan but the threads'.
template <class Visit>
void visit_arrays(Plan& plan, Visit&& visit) {
  const Problem& p = *plan.problem;
  const int64_t channels = p.num_kv_heads * p.head_dim;
  visit(plan.query, plan.num_rows() * plan.k_stride);
  if (p.k_cache.quantized()) {
    visit(plan.k_scales, channels);
    visit(plan.k_fold, channels);
    visit(plan.k_unit, p.num_kv_heads);
  }
  if (p.v_cache.quantized() && !p.latent) {
    visit(plan.v_scales, channels);
  }
  if (p.norm) {
    visit(plan.q_norm_weight, p.head_dim);
    visit(plan.k_norm_weight, p.head_dim);
  }
  if (p.sink.data != nullptr) {
    visit(plan.sink, p.num_heads);
  }
  visit(plan.owner, p.num_tokens);
  visit(plan.slot, p.num_tokens);
  visit(plan.runs, p.num_tokens);
  visit(plan.units, plan.max_units);
  visit(plan.partial_max, plan.partial_size);
  visit(plan.threads, plan.num_threads);
}

template <class Visit>
void visit_thread_arrays(const Plan& plan, ThreadScratch& scratch, Visit&& visit) {
  const int64_t rows = max_rows(*plan.problem);
  visit(scratch.k_tile, kTile * plan.k_stride);
  visit(scratch.v_tile, kTile * plan.v_stride);
  visit(scratch.weights, rows * kTile);
  visit(scratch.acc, rows * plan.v_stride);
  visit(scratch.total, rows * plan.v_stride);
  visit(scratch.row_values, kNumRowValues * kMaxRows);
  visit(scratch.head, 3 * plan.k_stride);
  visit(scratch.rows, kPad * plan.k_stride);
  visit(scratch.zeros, plan.k_stride);
}

// k_unit is a power of two near the largest scale of its head: query * (scale / unit) stays in range whatever the
// scale, and so does softmax_scale * unit.
void fold_scales(const Plan& plan) {
  const Problem& p = *plan.problem;
  int scale_exponent = 0;
  static_cast<void>(std::frexp(p.scale, &scale_exponent));
  for (int64_t kv_head = 0; kv_head < p.num_kv_heads; ++kv_head) {
    const float* scales = plan.k_scales + kv_head * p.head_dim;
    float largest = 0.0f;
    for (int64_t i = 0; i < p.head_dim; ++i) {
      const float magnitude = std::fabs(scales[i]);
      largest = magnitude > largest && std::isfinite(magnitude) ? magnitude : largest;
    }
    int exponent = 0;
    static_cast<void>(std::frexp(largest, &exponent));
    exponent = largest == 0.0f ? 0 : std::clamp(exponent, -100, std::clamp(126 - scale_exponent, -100, 126));
    const float unit = std::ldexp(1.0f, exponent);
    plan.k_unit[kv_head] = unit;
    for (int64_t i = 0; i < p.head_dim; ++i) {
      plan.k_fold[kv_head * p.head_dim + i] = scales[i] / unit;
    }
  }
}

void find_runs(Plan& plan) {
  const Problem& p = *plan.problem;
  assign_owners(p, plan.owner);
  plan.num_runs = 0;
  const size_t row_bytes = static_cast<size_t>(p.num_heads * p.v_head_dim) * size_of(p.type);
  for (int64_t t = 0; t < p.num_tokens; ++t) {
    const int32_t seq_idx = plan.owner[t];
    if (seq_idx < 0) {
      std::memset(p.output + t * p.output_stride, 0, row_bytes);
      plan.slot[t] = -1;
      continue;
    }
    const Sequence seq = sequence(p, seq_idx);
    const int64_t pos = seq.past + t - seq.begin;
    plan.slot[t] = write_slot(p, seq_idx, t, pos);
    if (t == 0 || plan.owner[t - 1] != seq_idx) {
      plan.runs[plan.num_runs++] = {seq_idx, t, t, pos, seq.kv_len()};
    }
    ++plan.runs[plan.num_runs - 1].end;
  }
}

// Blocks of rows, later and therefore costlier ones last.
void make_units(Plan& plan) {
  const Problem& p = *plan.problem;
  int64_t num_rows = 0;
  for (int64_t i = 0; i < plan.num_runs; ++i) {
    num_rows += (plan.runs[i].end - plan.runs[i].begin) * p.group;
  }
  const int64_t wanted = ceil_div(num_rows * p.num_kv_heads, 4 * plan.num_threads);
  const int64_t block = std::clamp(round_up(wanted, kMinRows), kMinRows, max_rows(p));
  plan.num_units = 0;
  int64_t num_spans = 1;
  for (int64_t i = 0; i < plan.num_runs; ++i) {
    const Run& run = plan.runs[i];
    const int64_t rows = (run.end - run.begin) * p.group;
    for (int64_t begin = 0; begin < rows; begin += block) {
      for (int64_t kv_head = 0; kv_head < p.num_kv_heads; ++kv_head) {
        const Unit unit = {&run, static_cast<int32_t>(kv_head), static_cast<int32_t>(begin),
                           static_cast<int32_t>(std::min(begin + block, rows))};
        SHOAL_ASSERT(plan.num_units < plan.max_units);
        plan.units[plan.num_units++] = unit;
        const SpanRange spans = span_range(plan, unit);
        num_spans = std::max(num_spans, spans.end - spans.begin);
      }
    }
  }
  const int64_t needed = num_spans * plan.num_rows() * (plan.v_stride + 2);
  plan.split =
      num_spans > 1 && plan.num_units < 4 * plan.num_threads && plan.num_threads > 1 && needed <= plan.partial_size;
  if (plan.split) {
    plan.num_spans = num_spans;
    plan.partial_sum = plan.partial_max + num_spans * plan.num_rows();
    plan.partial_acc = plan.partial_sum + num_spans * plan.num_rows();
  }
}

}  // namespace

Plan make_plan(const Problem& p, int num_threads) {
  Plan plan;
  plan.problem = &p;
  plan.k_stride = round_up(p.head_dim, kPad);
  plan.v_stride = round_up(p.v_head_dim, kPad);
  plan.num_threads = num_threads;
  // A run of its own for every token at worst, and every block but the last of a run has kMinRows rows or more.
  plan.max_units = p.num_kv_heads * (p.num_tokens + ceil_div(p.num_tokens * p.group, kMinRows));
  if (num_threads > 1) {
    const int64_t spans = ceil_div(p.num_columns * p.page_size, kSpan);
    const int64_t span_size = plan.num_rows() * (plan.v_stride + 2);
    plan.partial_size = spans < 2 ? 0 : std::min(spans * span_size, kMaxPartialSize);
  }
  return plan;
}

size_t plan_bytes(const Plan& sizes) {
  Plan plan = sizes;
  size_t num_bytes = 0;
  const auto count_bytes = [&](auto* pointer, int64_t count) {
    num_bytes += Workspace::bytes_for<std::remove_pointer_t<decltype(pointer)>>(static_cast<size_t>(count));
  };
  visit_arrays(plan, count_bytes);
  ThreadScratch scratch;
  for (int64_t i = 0; i < plan.num_threads; ++i) {
    visit_thread_arrays(plan, scratch, count_bytes);
  }
  return num_bytes;
}

void take_arrays(Plan& plan, Workspace& workspace) {
  const auto take = [&](auto*& pointer, int64_t count) {
    pointer = workspace.take<std::remove_reference_t<decltype(*pointer)>>(static_cast<size_t>(count)).data();
  };
  visit_arrays(plan, take);
  for (int64_t i = 0; i < plan.num_threads; ++i) {
    plan.threads[i] = {};
    visit_thread_arrays(plan, plan.threads[i], take);
  }
}

void fill_plan(Plan& plan) {
  const Problem& p = *plan.problem;
  if (p.k_cache.quantized()) {
    fill_scales(p, p.k_cache, plan.k_scales);
    fold_scales(plan);
  }
  if (p.latent) {
    plan.v_scales = plan.k_scales;
  } else if (p.v_cache.quantized()) {
    fill_scales(p, p.v_cache, plan.v_scales);
  }
  if (p.norm) {
    load_row(p.type, p.q_norm_weight, 0, 0, p.head_dim, plan.q_norm_weight);
    load_row(p.type, p.k_norm_weight, 0, 0, p.head_dim, plan.k_norm_weight);
  }
  if (p.sink.data != nullptr) {
    load_row(p.type, p.sink, 0, 0, p.num_heads, plan.sink);
  }
  find_runs(plan);
  make_units(plan);
}

SpanRange span_range(const Plan& plan, const Unit& unit) {
  const Problem& p = *plan.problem;
  const Run& run = *unit.run;
  const int64_t first = run.pos + unit.row_begin / p.group;
  const int64_t last = run.pos + (unit.row_end - 1) / p.group;
  const int64_t begin = p.window > 0 ? std::max<int64_t>(0, first - p.window + 1) : 0;
  const int64_t end = std::min(p.is_causal ? last + 1 : run.kv_len, p.num_columns * p.page_size);
  if (begin >= end) {
    return {};
  }
  return {begin / kSpan, ceil_div(end, kSpan)};
}

}  // namespace shoal::paged
