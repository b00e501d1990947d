// First all requests are judged from metadata alone, then states are advanced, then tokens select, request by request.
// Where malformed offsets give a token to two sound requests, the later one's selection stands.
#include "shoal/ops/packed_sparse_attention_indexer/packed_sparse_attention_indexer.h"

#include <algorithm>
#include <cstring>

#include "shoal/cpu/thread_pool.h"
#include "shoal/ops/element.h"
#include "shoal/ops/packed_sparse_attention_indexer/packed_sparse_attention_indexer_problem.h"
#include "shoal/ops/variant.h"

namespace shoal {
namespace {

using Args = PackedSparseAttentionIndexerArgs;
using indexer::TokenRows;
using packed_indexer::kName;
using packed_indexer::Mode;
using packed_indexer::Problem;

constexpr int64_t kCopyGrain = 64;   // rows
constexpr int64_t kBlockGrain = 4;   // keys to be made
constexpr int64_t kTokenGrain = 16;  // rows to be finished

enum Status : int32_t { kApplied = 0, kInconsistent = 1, kOverflow = 2 };

struct Request {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t past = 0;
  int64_t entries = 0;  // before this call, clamped if the request is rejected
  int64_t buffered = 0;
  int64_t num_new = 0;      // entries that this call adds
  int64_t keep_start = 0;   // the first of buffered and new tokens that stays buffered
  int64_t keep_length = 0;  // how many do
  Status status = kApplied;

  int64_t num_tokens() const { return end - begin; }
  bool sound() const { return status == kApplied; }
};

int32_t at(const TensorView& view, int64_t i) { return view.as<const int32_t>()[i * view.stride(0)]; }

int32_t at(const TensorView& view, int64_t i, int64_t j) {
  return view.as<const int32_t>()[i * view.stride(0) + j * view.stride(1)];
}

class Run {
 public:
  Run(const Args& a, const Problem& p, const OpContext& context) : a_(a), p_(p), context_(context) {
    Workspace& workspace = *context.workspace;
    const auto take = [&](int64_t count) { return workspace.take<float>(static_cast<size_t>(count)); };
    requests_ = workspace.take<Request>(static_cast<size_t>(p.batch_size));
    weights_ = take(2 * p.head_dim);
    scratch_ = take(context.pool->num_threads() * scratch_floats(p));
    indexer::load_row(row_of(a.query_norm_weight), 0, 0, p.head_dim, weights_.data());
    indexer::load_row(row_of(a.key_norm_weight), 0, 0, p.head_dim, weights_.data() + p.head_dim);
    finish_ = {p.policy, p.head_dim, a.epsilon, a.cos_cache, a.sin_cache};
    fresh_keys_ = a.key;
    if (!a.key) {  // the last head of query
      fresh_keys_ = a.query;
      fresh_keys_.shape[1] = p.head_dim;
      if (a.query.data != nullptr) {
        fresh_keys_.data = a.query.as<std::byte>() +
                           p.num_heads * p.head_dim * a.query.stride(1) * static_cast<int64_t>(size_of(a.query.dtype));
      }
    }
  }

  static size_t bytes(const Args& a, const Problem& p, int num_threads) {
    const auto count = [](int64_t n) { return static_cast<size_t>(n); };
    return Workspace::bytes_for<Request>(count(p.batch_size)) + Workspace::bytes_for<float>(count(2 * p.head_dim)) +
           Workspace::bytes_for<float>(count(num_threads * scratch_floats(p))) +
           2 * Workspace::bytes_for<int64_t>(count(a.query.dim(0))) + scan_memory(a, p, num_threads).bytes();
  }

  void judge_requests();
  void advance_states();
  void select();
  void reuse();

 private:
  // A pooled key and what pooling needs.
  static int64_t scratch_floats(const Problem& p) { return (1 + indexer::GatedPool::kScratchRows) * p.head_dim; }

  static indexer::ScanMemory scan_memory(const Args& a, const Problem& p, int num_threads) {
    return {a.query.dim(0), a.state_capacity, p.num_heads, p.head_dim, num_threads};
  }

  // A vector as the one row of a matrix.
  static TensorView row_of(const TensorView& vector) {
    TensorView row = vector;
    row.rank = 2;
    row.shape = {1, vector.dim(0)};
    row.strides = {0, vector.stride(0)};
    return row;
  }

  Request judge(int64_t b, bool ends_hold) const;
  void carry_over(const TensorView& past, const TensorView& present);
  TokenRows tokens_of(const Request& request, int64_t b, const TensorView& past, const TensorView& fresh) const {
    return {indexer::slice(past, b), fresh, request.buffered, request.begin};
  }
  void add_keys(int64_t b);
  void keep_tokens(int64_t b, const TensorView& past, const TensorView& fresh, const TensorView& present);
  void capture(int64_t b);
  void select_request(int64_t b, const indexer::ScanMemory& memory, std::span<int64_t> positions,
                      std::span<int64_t> visible);

  const Args& a_;
  const Problem& p_;
  const OpContext& context_;
  std::span<Request> requests_;
  std::span<float> weights_;  // [2, head_dim]: of queries, of keys
  std::span<float> scratch_;  // a thread each
  indexer::RowFinish finish_;
  TensorView fresh_keys_;  // [num_tokens, head_dim or 2 head_dim]
};

Request Run::judge(int64_t b, bool ends_hold) const {
  const int64_t ratio = a_.compress_ratio;
  const int64_t max_buffered = p_.qsa() ? ratio - 1 : 2 * ratio - 1;
  Request r;
  r.begin = at(a_.cumulative_sequence_lengths, b);
  r.end = at(a_.cumulative_sequence_lengths, b + 1);
  r.past = at(a_.past_sequence_lengths, b);
  r.entries = at(a_.past_state_lengths, b, 0);
  r.buffered = at(a_.past_state_lengths, b, 1);
  bool holds = ends_hold;
  if (p_.mode == Mode::kSelect) {
    holds = holds && 0 <= r.begin && r.begin <= r.end && r.end <= p_.num_tokens;
  } else {
    holds = holds && r.begin == b && r.end == b + 1;
  }
  if (p_.mode != Mode::kReuseHold) {
    holds = holds && r.past >= 0 && 0 <= r.entries && r.entries <= a_.state_capacity && 0 <= r.buffered &&
            r.buffered <= max_buffered;
    if (p_.qsa()) {
      holds =
          holds && r.entries == r.past / ratio && r.buffered == r.past % ratio && r.past + r.num_tokens() <= INT32_MAX;
    }
  }
  if (!holds) {
    r.status = kInconsistent;
  } else if (p_.mode != Mode::kReuseHold) {
    if (p_.qsa()) {
      r.num_new = (r.buffered + r.num_tokens()) / ratio;
      r.keep_start = r.num_new * ratio;
      r.keep_length = (r.buffered + r.num_tokens()) % ratio;
    } else {
      const indexer::WindowPlan plan = indexer::plan_windows(r.buffered, r.num_tokens(), ratio);
      r.num_new = plan.num_windows;
      r.keep_start = plan.start;
      r.keep_length = plan.length;
    }
    r.status = r.entries + r.num_new > a_.state_capacity ? kOverflow : kApplied;
  }
  if (!r.sound()) {
    r.entries = std::clamp<int64_t>(r.entries, 0, a_.state_capacity);
    r.buffered = std::clamp<int64_t>(r.buffered, 0, max_buffered);
  }
  return r;
}

void Run::judge_requests() {
  const bool ends_hold =
      at(a_.cumulative_sequence_lengths, 0) == 0 && at(a_.cumulative_sequence_lengths, p_.batch_size) == p_.num_tokens;
  for (int64_t b = 0; b < p_.batch_size; ++b) {
    requests_[static_cast<size_t>(b)] = judge(b, ends_hold);
  }
}

// A state as it was, unless it is changed in place.
void Run::carry_over(const TensorView& past, const TensorView& present) {
  if (past.data == present.data) {
    return;
  }
  const int64_t num_rows = past.dim(1);
  context_.pool->parallel_for(p_.batch_size * num_rows, kCopyGrain, [&](int64_t begin, int64_t end, int) {
    if (past.is_contiguous()) {
      const int64_t row_bytes = past.dim(2) * static_cast<int64_t>(size_of(past.dtype));
      std::memcpy(present.as<std::byte>() + begin * row_bytes, past.as<std::byte>() + begin * row_bytes,
                  static_cast<size_t>((end - begin) * row_bytes));
      return;
    }
    for (int64_t i = begin; i < end; ++i) {
      indexer::copy_row(indexer::slice(past, i / num_rows), i % num_rows, indexer::slice(present, i / num_rows),
                        i % num_rows);
    }
  });
}

// Makes the request's new entries of key_state.
void Run::add_keys(int64_t b) {
  const Request& r = requests_[static_cast<size_t>(b)];
  const int64_t ratio = a_.compress_ratio;
  const TokenRows keys = tokens_of(r, b, a_.past_kv_buffer, fresh_keys_);
  indexer::GatedPool gated;
  int64_t overlap = 0;
  if (!p_.qsa()) {
    gated = {keys, tokens_of(r, b, a_.past_gate_buffer, a_.gate), a_.position_bias, ratio, p_.head_dim};
    overlap = indexer::plan_windows(r.buffered, r.num_tokens(), ratio).overlap;
  }
  context_.pool->parallel_for(r.num_new, kBlockGrain, [&](int64_t begin, int64_t end, int thread_idx) {
    float* const pooled = scratch_.data() + thread_idx * scratch_floats(p_);
    float* const scratch = pooled + p_.head_dim;
    for (int64_t block = begin; block < end; ++block) {
      if (p_.qsa()) {
        indexer::pool_mean(ratio, p_.head_dim, pooled, scratch,
                           [&](int64_t i, float* to) { keys.load(block * ratio + i, 0, p_.head_dim, to); });
      } else {
        gated.pool(overlap + block * ratio, block > 0 || overlap > 0, pooled, scratch);
      }
      const int64_t entry = r.entries + block;
      finish_.apply(weights_.data() + p_.head_dim, b, entry * ratio, pooled);
      const int64_t first = (b * a_.state_capacity + entry) * p_.head_dim;
      for (int64_t c = 0; c < p_.head_dim; ++c) {
        write_element(a_.present_key_state.dtype, a_.present_key_state.data, first + c, pooled[c]);
      }
    }
  });
}

// The new buffer. In place only with qsa, where a token of the old buffer stays in its slot if it stays at all.
void Run::keep_tokens(int64_t b, const TensorView& past, const TensorView& fresh, const TensorView& present) {
  const Request& r = requests_[static_cast<size_t>(b)];
  const TokenRows tokens = tokens_of(r, b, past, fresh);
  const TensorView slots = indexer::slice(present, b);
  for (int64_t slot = 0; slot < r.keep_length; ++slot) {
    const int64_t token = r.keep_start + slot;
    if (token >= r.buffered || token != slot) {
      tokens.copy(token, slots, slot);
    }
  }
}

void Run::capture(int64_t b) {
  const Request& r = requests_[static_cast<size_t>(b)];
  const TensorView slots = indexer::slice(a_.state_update, b);
  std::memset(slots.data, 0, slots.num_bytes());
  if (!p_.captures || !r.sound() || p_.mode != Mode::kSelect) {
    return;
  }
  const int64_t count =
      std::clamp<int64_t>(at(a_.state_update_capture_count, b), 0, std::min(r.num_tokens(), a_.state_update_capacity));
  const TensorView key_state = indexer::slice(a_.present_key_state, b);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t num_keys = r.buffered + i + 1;
    if (num_keys % a_.compress_ratio != 0) {
      indexer::copy_row(fresh_keys_, r.begin + i, slots, i);
      continue;
    }
    const int64_t entry = r.entries + num_keys / a_.compress_ratio - 1;
    if (key_state.dtype == slots.dtype) {
      indexer::copy_row(key_state, entry, slots, i);
      continue;
    }
    for (int64_t c = 0; c < p_.head_dim; ++c) {
      write_element(slots.dtype, slots.data, i * p_.head_dim + c,
                    read_element(key_state.dtype, key_state.data, entry * p_.head_dim + c));
    }
  }
}

void Run::advance_states() {
  carry_over(a_.past_key_state, a_.present_key_state);
  carry_over(a_.past_kv_buffer, a_.present_kv_buffer);
  if (!p_.qsa()) {
    carry_over(a_.past_gate_buffer, a_.present_gate_buffer);
  }
  for (int64_t b = 0; b < p_.batch_size; ++b) {
    const Request& r = requests_[static_cast<size_t>(b)];
    const bool changes = r.sound() && p_.mode != Mode::kReuseHold;
    if (changes) {
      add_keys(b);
      keep_tokens(b, a_.past_kv_buffer, fresh_keys_, a_.present_kv_buffer);
      if (!p_.qsa()) {
        keep_tokens(b, a_.past_gate_buffer, a_.gate, a_.present_gate_buffer);
      }
    }
    int32_t* lengths = a_.present_state_lengths.as<int32_t>() + 2 * b;
    lengths[0] = static_cast<int32_t>(r.entries + (changes ? r.num_new : 0));
    lengths[1] = static_cast<int32_t>(changes ? r.keep_length : r.buffered);
    if (a_.state_status) {
      a_.state_status.as<int32_t>()[b] = r.status;
    }
    if (a_.state_update) {
      capture(b);
    }
  }
}

void Run::select_request(int64_t b, const indexer::ScanMemory& memory, std::span<int64_t> positions,
                         std::span<int64_t> visible) {
  const Request& r = requests_[static_cast<size_t>(b)];
  const int64_t num_entries = r.entries + r.num_new;
  for (int64_t i = 0; i < r.num_tokens(); ++i) {
    const int64_t position =
        p_.qsa() ? r.past + i : a_.position_ids.as<const int64_t>()[(r.begin + i) * a_.position_ids.stride(0)];
    positions[static_cast<size_t>(i)] = position;
    visible[static_cast<size_t>(i)] = std::min(num_entries, indexer::entries_before(position, a_.compress_ratio));
  }
  indexer::Scan scan;
  scan.finish = finish_;
  scan.num_heads = p_.num_heads;
  scan.scale = p_.scale;
  scan.query_weight = weights_.data();
  scan.batch_idx = b;
  scan.first_row = r.begin;
  scan.query = a_.query;
  scan.head_weights = a_.head_weights;
  scan.keys = indexer::slice(a_.present_key_state, b);
  scan.positions = positions.first(static_cast<size_t>(r.num_tokens()));
  scan.visible = visible.first(static_cast<size_t>(r.num_tokens()));
  scan.top_k = p_.qsa() ? *a_.token_budget / a_.compress_ratio : *a_.index_topk;
  scan.out = a_.selected_indices;
  memory.run(scan, context_);
  context_.pool->parallel_for(r.num_tokens(), kTokenGrain, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) {
      int32_t* const row = a_.selected_indices.as<int32_t>() + (r.begin + i) * p_.width;
      int64_t count = std::min(scan.top_k, visible[static_cast<size_t>(i)]);
      if (p_.qsa()) {
        count = indexer::expand_blocks(count, a_.compress_ratio, r.past + i + 1, nullptr, p_.capacity, p_.width, row);
      } else {
        std::fill(row + count, row + p_.width, -1);
      }
      a_.selected_counts.as<int32_t>()[r.begin + i] = static_cast<int32_t>(count);
    }
  });
}

void Run::select() {
  const int64_t num_rows = a_.query.dim(0);
  // Tokens of no sound request keep this.
  std::fill_n(a_.selected_indices.as<int32_t>(), num_rows * p_.width, -1);
  std::fill_n(a_.selected_counts.as<int32_t>(), num_rows, 0);
  if (a_.indexshare_status) {
    std::fill_n(a_.indexshare_status.as<int32_t>(), num_rows, 0);
  }
  const std::span<int64_t> positions = context_.workspace->take<int64_t>(static_cast<size_t>(num_rows));
  const std::span<int64_t> visible = context_.workspace->take<int64_t>(static_cast<size_t>(num_rows));
  indexer::ScanMemory memory = scan_memory(a_, p_, context_.pool->num_threads());
  memory.take(*context_.workspace);
  for (int64_t b = 0; b < p_.batch_size; ++b) {
    if (requests_[static_cast<size_t>(b)].sound()) {
      select_request(b, memory, positions, visible);
    }
  }
}

void Run::reuse() {
  for (int64_t b = 0; b < p_.batch_size; ++b) {
    int32_t* const row = a_.selected_indices.as<int32_t>() + b * p_.width;
    int32_t* const count = a_.selected_counts.as<int32_t>() + b;
    int32_t* const status = a_.indexshare_status.as<int32_t>() + b;
    *status = at(a_.merged_status, b);
    if (requests_[static_cast<size_t>(b)].sound()) {
      for (int64_t j = 0; j < p_.width; ++j) {
        row[j] = at(a_.merged_indices, b, j);
      }
      *count = at(a_.merged_counts, b);
    } else {
      std::fill_n(row, p_.width, -1);
      *count = 0;
      *status = *status == 0 ? 1 : *status;
    }
  }
}

}  // namespace

PackedSparseAttentionIndexerShapes packed_sparse_attention_indexer_shapes(const Args& a) {
  const Problem p = packed_indexer::check_inputs(a);
  const DType dtype = a.query.dtype;
  const auto as = [](const TensorView& view) {
    return OutputSpec{view.dtype, {view.dims().begin(), view.dims().end()}, static_cast<bool>(view)};
  };
  const int64_t num_rows = p.mode == Mode::kSelect ? a.query.dim(0) : p.batch_size;
  return {.selected_indices = {DType::kI32, {num_rows, p.width}},
          .selected_counts = {DType::kI32, {num_rows}},
          .present_key_state = as(a.past_key_state),
          .present_kv_buffer = as(a.past_kv_buffer),
          .present_gate_buffer = as(a.past_gate_buffer),
          .present_state_lengths = as(a.past_state_lengths),
          .state_update = {dtype, {p.batch_size, a.state_update_capacity, p.head_dim}, a.state_update_capacity > 0},
          .indexshare_status = {DType::kI32, {num_rows}, a.max_output_entries > 0},
          .state_status = {DType::kI32, {p.batch_size}}};
}

size_t packed_sparse_attention_indexer_workspace_bytes(const Args& a, int num_threads) {
  return Run::bytes(a, packed_indexer::check_inputs(a), num_threads);
}

void packed_sparse_attention_indexer(const Args& a, const OpContext& context) {
  const PackedSparseAttentionIndexerShapes shapes = packed_sparse_attention_indexer_shapes(a);
  packed_indexer::check_outputs(a, shapes);
  wants_reference(kName, context.variant);  // one path for both

  const Problem p = packed_indexer::check_inputs(a);
  const Workspace::Scope scope(*context.workspace);
  Run run(a, p, context);
  run.judge_requests();
  run.advance_states();
  if (p.mode == Mode::kSelect) {
    run.select();
  } else {
    run.reuse();
  }
}

}  // namespace shoal
