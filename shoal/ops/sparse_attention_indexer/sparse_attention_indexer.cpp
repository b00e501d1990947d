// Sequence by sequence: first the state, then (qsa) the keys of all blocks, then the queries.
#include "shoal/ops/sparse_attention_indexer/sparse_attention_indexer.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "shoal/base/text.h"
#include "shoal/cpu/thread_pool.h"
#include "shoal/ops/element.h"
#include "shoal/ops/indexer_rows.h"
#include "shoal/ops/variant.h"
#include "shoal/tensor/matcher.h"

namespace shoal {
namespace {

using Args = SparseAttentionIndexerArgs;
using indexer::Policy;
using indexer::slice;
using indexer::TokenRows;

constexpr std::string_view kName = "sparse_attention_indexer";
constexpr int64_t kCopyGrain = 64;   // rows
constexpr int64_t kBlockGrain = 4;   // keys to be made
constexpr int64_t kTokenGrain = 16;  // rows to be finished

// A checked call.
struct Problem {
  Policy policy = Policy::kQsa;
  int64_t batch_size = 0;
  int64_t num_tokens = 0;
  int64_t num_heads = 0;
  int64_t head_dim = 0;
  int64_t past = 0;      // rows of past_key that count
  int64_t num_new = 0;   // that this call adds
  int64_t key_rows = 0;  // of present_key
  int64_t top_k = 0;     // blocks or entries
  int64_t capacity = 0;  // columns of the selection
  float scale = 1.0f;    // of the sum over heads
  indexer::WindowPlan plan{};

  bool qsa() const { return policy == Policy::kQsa; }
  int64_t num_keys(const Args& a) const { return qsa() ? (past + num_new) / a.compress_ratio : past + num_new; }
};

void check_attributes(const Args& a, Policy policy) {
  if (policy == Policy::kQsa) {
    indexer::check_absent(kName, policy,
                          {{"index_topk", a.index_topk.has_value()},
                           {"head_weight_scale", a.head_weight_scale.has_value()},
                           {"gate", static_cast<bool>(a.gate)},
                           {"position_bias", static_cast<bool>(a.position_bias)},
                           {"head_weights", static_cast<bool>(a.head_weights)},
                           {"position_ids", static_cast<bool>(a.position_ids)},
                           {"past_proj_buffer", static_cast<bool>(a.past_proj_buffer)}});
  } else {
    indexer::check_absent(kName, policy,
                          {{"token_budget", a.token_budget.has_value()}, {"mask", static_cast<bool>(a.mask)}});
  }
  indexer::check_attributes(kName, policy,
                            {.compress_ratio = a.compress_ratio,
                             .token_budget = a.token_budget,
                             .index_topk = a.index_topk,
                             .epsilon = a.epsilon,
                             .scale = a.scale,
                             .head_weight_scale = a.head_weight_scale});
}

int64_t past_length(const Args& a) {
  const TensorView& length = a.past_sequence_length;
  if (!length) {
    return a.past_key.dim(1);
  }
  require(length.rank == 0 || (length.rank == 1 && length.dim(0) == 1), kName, ": past_sequence_length has shape ",
          shape_text(length.dims()), ", expected [1]");
  require(length.dtype == DType::kI32, kName, ": past_sequence_length has type ", to_string(length.dtype),
          ", expected int32");
  require(length.device.type == DeviceType::kCpu, kName, ": past_sequence_length must be on the host");
  const int64_t past = *length.as<const int32_t>();
  require(past >= 0 && past <= a.past_key.dim(1), kName, ": past_sequence_length is ", past, ", expected 0 to ",
          a.past_key.dim(1), ", the rows of past_key");
  return past;
}

Problem check_inputs(const Args& a) {
  Problem p;
  p.policy = indexer::check_policy(kName, a.policy_mode);
  check_attributes(a, p.policy);
  p.top_k = p.qsa() ? *a.token_budget / a.compress_ratio : *a.index_topk;
  p.capacity = p.qsa() ? *a.token_budget + a.compress_ratio - 1 : *a.index_topk;

  const Matcher match(kName);
  Dim batch{"batch_size"};
  Dim tokens{"sequence_length"};
  Dim width{"width"};
  Dim head_dim{"head_size"};
  match.tensor("query", a.query).types(kFloats).shape({batch, tokens, width});
  const DType dtype = a.query.dtype;
  const Device device = a.query.device;
  match.tensor("query_norm_weight", a.query_norm_weight).type(dtype).shape({head_dim}).device(device);
  require(head_dim > 0, kName, ": query_norm_weight is empty, expected the head size");
  match.tensor("key_norm_weight", a.key_norm_weight).type(dtype).shape({head_dim}).device(device);
  const bool has_key = static_cast<bool>(a.key);
  require(has_key || p.qsa(), kName, ": key is required with policy_mode csa");
  p.batch_size = batch;
  p.num_tokens = tokens;
  p.head_dim = head_dim;
  p.num_heads = width / head_dim - (has_key ? 0 : 1);
  require(width % head_dim == 0 && p.num_heads > 0, kName, ": query has ", width.value(),
          " columns, expected a multiple of ", head_dim.value(), ", the head size",
          has_key ? "" : ", for at least one head and the key");
  Dim key_width{p.qsa() ? "head_size" : "2 * head_size", p.qsa() ? p.head_dim : 2 * p.head_dim};
  if (has_key) {
    match.tensor("key", a.key).type(dtype).shape({batch, tokens, key_width}).device(device);
  }
  indexer::check_tables(kName, p.policy, a.cos_cache, a.sin_cache, p.batch_size, p.head_dim, dtype, device);

  Dim past_rows{"past_rows"};
  match.tensor("past_key", a.past_key).type(dtype).shape({batch, past_rows, head_dim}).device(device);
  p.past = past_length(a);
  p.num_new = p.num_tokens;
  if (!p.qsa()) {
    match.tensor("gate", a.gate).type(dtype).shape({batch, tokens, key_width}).device(device);
    match.tensor("position_bias", a.position_bias).type(dtype).shape({a.compress_ratio, key_width}).device(device);
    match.tensor("head_weights", a.head_weights).type(dtype).shape({batch, tokens, p.num_heads}).device(device);
    match.tensor("position_ids", a.position_ids).type(DType::kI64).shape({batch, tokens}).device(device);
    Dim waiting{"buffer_length"};
    match.tensor("past_proj_buffer", a.past_proj_buffer)
        .type(dtype)
        .shape({2, batch, waiting, key_width})
        .device(device);
    require(waiting < 2 * a.compress_ratio, kName, ": past_proj_buffer holds ", waiting.value(),
            " tokens, expected less than ", 2 * a.compress_ratio, ", twice compress_ratio");
    p.plan = indexer::plan_windows(waiting, p.num_tokens, a.compress_ratio);
    p.num_new = p.plan.num_windows;
  }
  const int64_t length = p.past + p.num_new;
  require(!a.past_sequence_length || length <= past_rows, kName, ": past_sequence_length is ", p.past, ", and ",
          p.num_new, " more rows do not fit into past_key, which has ", past_rows.value());
  require(length <= INT32_MAX, kName, ": past_key has ", p.past, " rows, with ", p.num_new, " more at most ", INT32_MAX,
          " are supported");
  p.key_rows = a.past_sequence_length ? past_rows.value() : length;
  if (a.mask) {
    Dim total{"total_sequence_length", length};
    match.tensor("mask", a.mask).type(DType::kI64).shape({batch, total}).device(device);
  }
  p.scale = a.scale.value_or(1.0f / std::sqrt(static_cast<float>(p.head_dim)));
  if (!p.qsa()) {
    p.scale *= a.head_weight_scale.value_or(1.0f / std::sqrt(static_cast<float>(p.num_heads)));
  }
  return p;
}

void check_outputs(const Args& a, const SparseAttentionIndexerShapes& shapes) {
  const Device device = a.query.device;
  const Matcher match(kName);
  const auto check = [&](std::string_view name, const TensorView& view, const OutputSpec& spec) {
    check_output(kName, name, view, spec, device);
    if (view) {
      match.tensor(name, view).contiguous();
    }
  };
  check("selected_indices", a.selected_indices, shapes.selected_indices);
  check("present_key", a.present_key, shapes.present_key);
  check("present_proj_buffer", a.present_proj_buffer, shapes.present_proj_buffer);
  const bool in_place = a.present_key.data == a.past_key.data && a.present_key.num_elements() > 0;
  require(!in_place || a.past_sequence_length, kName,
          ": present_key shares memory with past_key, which needs past_sequence_length");
  require(!in_place || a.past_key.is_contiguous(), kName, ": past_key must be contiguous to be changed in place");
  require(!a.present_proj_buffer || a.present_proj_buffer.num_elements() == 0 ||
              a.present_proj_buffer.data != a.past_proj_buffer.data,
          kName, ": present_proj_buffer shares memory with past_proj_buffer");
}

class Run {
 public:
  Run(const Args& a, const Problem& p, const OpContext& context)
      : a_(a), p_(p), context_(context), memory_(scan_memory(a, p, context.pool->num_threads())) {
    Workspace& workspace = *context.workspace;
    const auto floats = [&](int64_t count) { return workspace.take<float>(static_cast<size_t>(count)); };
    weights_ = floats(2 * p.head_dim);
    scratch_ = floats(context.pool->num_threads() * scratch_floats(p));
    blocks_ = floats(num_blocks(a, p) * p.head_dim);
    tokens_ = workspace.take<int32_t>(static_cast<size_t>(p.qsa() ? p.past + p.num_new : 0));
    positions_ = workspace.take<int64_t>(static_cast<size_t>(p.num_tokens));
    visible_ = workspace.take<int64_t>(static_cast<size_t>(p.num_tokens));
    num_seen_ = workspace.take<int64_t>(static_cast<size_t>(p.num_tokens));
    memory_.take(workspace);
    load_vector(a.query_norm_weight, weights_.data());
    load_vector(a.key_norm_weight, weights_.data() + p.head_dim);
    finish_ = {p.policy, p.head_dim, a.epsilon, a.cos_cache, a.sin_cache};
  }

  static size_t bytes(const Args& a, const Problem& p, int num_threads) {
    const auto floats = [](int64_t count) { return Workspace::bytes_for<float>(static_cast<size_t>(count)); };
    return floats(2 * p.head_dim) + floats(num_threads * scratch_floats(p)) + floats(num_blocks(a, p) * p.head_dim) +
           Workspace::bytes_for<int32_t>(static_cast<size_t>(p.qsa() ? p.past + p.num_new : 0)) +
           3 * Workspace::bytes_for<int64_t>(static_cast<size_t>(p.num_tokens)) +
           scan_memory(a, p, num_threads).bytes();
  }

  void run_sequence(int64_t b) {
    carry_over(b);
    if (p_.qsa()) {
      add_raw_keys(b);
      select_tokens(b);
    } else {
      add_entries(b);
      keep_waiting(b);
      select_entries(b);
    }
  }

 private:
  static int64_t num_blocks(const Args& a, const Problem& p) { return p.qsa() ? p.num_keys(a) : 0; }
  // A pooled key and what pooling needs.
  static int64_t scratch_floats(const Problem& p) { return (1 + indexer::GatedPool::kScratchRows) * p.head_dim; }
  static indexer::ScanMemory scan_memory(const Args& a, const Problem& p, int num_threads) {
    return {p.num_tokens, p.num_keys(a), p.num_heads, p.head_dim, num_threads};
  }
  static void load_vector(const TensorView& vector, float* to) {
    for (int64_t c = 0; c < vector.dim(0); ++c) {
      to[c] = read_element(vector.dtype, vector.data, c * vector.stride(0));
    }
  }

  void carry_over(int64_t b);
  void add_raw_keys(int64_t b);
  void add_entries(int64_t b);
  void keep_waiting(int64_t b);
  int64_t find_visible_tokens(int64_t b);
  void pool_blocks(int64_t b, int64_t num_blocks);
  void select_tokens(int64_t b);
  void select_entries(int64_t b);
  void scan(int64_t b, const TensorView& keys);

  const Args& a_;
  const Problem& p_;
  const OpContext& context_;
  indexer::ScanMemory memory_;
  indexer::RowFinish finish_;
  std::span<float> weights_;      // [2, head_dim]: of queries, of keys
  std::span<float> scratch_;      // a thread each
  std::span<float> blocks_;       // [num_keys, head_dim]: finished block keys of one sequence
  std::span<int32_t> tokens_;     // of one sequence: those that the mask lets through, in order
  std::span<int64_t> positions_;  // of the queries
  std::span<int64_t> visible_;    // keys that each query sees
  std::span<int64_t> num_seen_;   // tokens that each query sees
};

// The rows that were there, unless present_key is the same memory.
void Run::carry_over(int64_t b) {
  if (a_.present_key.data == a_.past_key.data) {
    return;
  }
  const TensorView past = slice(a_.past_key, b);
  const TensorView present = slice(a_.present_key, b);
  const int64_t num_rows = std::min(past.dim(0), present.dim(0));
  context_.pool->parallel_for(num_rows, kCopyGrain, [&](int64_t begin, int64_t end, int) {
    for (int64_t row = begin; row < end; ++row) {
      indexer::copy_row(past, row, present, row);
    }
  });
}

void Run::add_raw_keys(int64_t b) {
  TensorView fresh = slice(a_.key ? a_.key : a_.query, b);
  if (!a_.key && fresh.data != nullptr) {  // the last head of query
    fresh.shape[1] = p_.head_dim;
    fresh.data = fresh.as<std::byte>() +
                 p_.num_heads * p_.head_dim * fresh.stride(1) * static_cast<int64_t>(size_of(fresh.dtype));
  }
  const TensorView present = slice(a_.present_key, b);
  for (int64_t i = 0; i < p_.num_tokens; ++i) {
    indexer::copy_row(fresh, i, present, p_.past + i);
  }
}

void Run::add_entries(int64_t b) {
  const int64_t num_waiting = a_.past_proj_buffer.dim(2);
  const auto tokens_of = [&](int64_t plane, const TensorView& fresh) {
    return TokenRows{slice(slice(a_.past_proj_buffer, plane), b), slice(fresh, b), num_waiting, 0};
  };
  const indexer::GatedPool gated{tokens_of(0, a_.key), tokens_of(1, a_.gate), a_.position_bias, a_.compress_ratio,
                                 p_.head_dim};
  const int64_t overlap = p_.plan.overlap;
  context_.pool->parallel_for(p_.num_new, kBlockGrain, [&](int64_t begin, int64_t end, int thread_idx) {
    float* const pooled = scratch_.data() + thread_idx * scratch_floats(p_);
    for (int64_t window = begin; window < end; ++window) {
      gated.pool(overlap + window * a_.compress_ratio, window > 0 || overlap > 0, pooled, pooled + p_.head_dim);
      const int64_t entry = p_.past + window;
      finish_.apply(weights_.data() + p_.head_dim, b, entry * a_.compress_ratio, pooled);
      const int64_t first = (b * p_.key_rows + entry) * p_.head_dim;
      for (int64_t c = 0; c < p_.head_dim; ++c) {
        write_element(a_.present_key.dtype, a_.present_key.data, first + c, pooled[c]);
      }
    }
  });
}

void Run::keep_waiting(int64_t b) {
  const int64_t num_waiting = a_.past_proj_buffer.dim(2);
  for (int64_t plane = 0; plane < 2; ++plane) {
    const TokenRows tokens{slice(slice(a_.past_proj_buffer, plane), b), slice(plane == 0 ? a_.key : a_.gate, b),
                           num_waiting, 0};
    const TensorView kept = slice(slice(a_.present_proj_buffer, plane), b);
    for (int64_t slot = 0; slot < p_.plan.length; ++slot) {
      tokens.copy(p_.plan.start + slot, kept, slot);
    }
  }
}

// Fills tokens_, and num_seen_ for each query; returns how many there are.
int64_t Run::find_visible_tokens(int64_t b) {
  int64_t count = 0;
  for (int64_t token = 0; token < p_.past + p_.num_new; ++token) {
    if (!a_.mask || a_.mask.as<const int64_t>()[b * a_.mask.stride(0) + token * a_.mask.stride(1)] != 0) {
      tokens_[static_cast<size_t>(count++)] = static_cast<int32_t>(token);
    }
    if (token >= p_.past) {
      num_seen_[static_cast<size_t>(token - p_.past)] = count;
    }
  }
  return count;
}

void Run::pool_blocks(int64_t b, int64_t num_blocks) {
  const TensorView keys = slice(a_.present_key, b);
  const int64_t ratio = a_.compress_ratio;
  context_.pool->parallel_for(num_blocks, kBlockGrain, [&](int64_t begin, int64_t end, int thread_idx) {
    float* const scratch = scratch_.data() + thread_idx * scratch_floats(p_);
    for (int64_t block = begin; block < end; ++block) {
      const int32_t* const tokens = tokens_.data() + block * ratio;
      float* const pooled = blocks_.data() + block * p_.head_dim;
      indexer::pool_mean(ratio, p_.head_dim, pooled, scratch,
                         [&](int64_t i, float* to) { indexer::load_row(keys, tokens[i], 0, p_.head_dim, to); });
      finish_.apply(weights_.data() + p_.head_dim, b, tokens[0], pooled);
    }
  });
}

void Run::scan(int64_t b, const TensorView& keys) {
  indexer::Scan scan;
  scan.finish = finish_;
  scan.num_heads = p_.num_heads;
  scan.scale = p_.scale;
  scan.query_weight = weights_.data();
  scan.batch_idx = b;
  scan.query = slice(a_.query, b);
  if (a_.head_weights) {
    scan.head_weights = slice(a_.head_weights, b);
  }
  scan.keys = keys;
  scan.positions = positions_;
  scan.visible = visible_;
  scan.top_k = p_.top_k;
  scan.out = slice(a_.selected_indices, b);
  memory_.run(scan, context_);
}

void Run::select_tokens(int64_t b) {
  pool_blocks(b, find_visible_tokens(b) / a_.compress_ratio);
  for (int64_t i = 0; i < p_.num_tokens; ++i) {
    positions_[static_cast<size_t>(i)] = p_.past + i;
    visible_[static_cast<size_t>(i)] = num_seen_[static_cast<size_t>(i)] / a_.compress_ratio;
  }
  scan(b, TensorView(blocks_.data(), DType::kF32, {p_.num_keys(a_), p_.head_dim}));
  context_.pool->parallel_for(p_.num_tokens, kTokenGrain, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) {
      indexer::expand_blocks(std::min(p_.top_k, visible_[static_cast<size_t>(i)]), a_.compress_ratio,
                             num_seen_[static_cast<size_t>(i)], tokens_.data(), p_.capacity, p_.capacity,
                             a_.selected_indices.as<int32_t>() + (b * p_.num_tokens + i) * p_.capacity);
    }
  });
}

void Run::select_entries(int64_t b) {
  const TensorView ids = slice(a_.position_ids, b);
  for (int64_t i = 0; i < p_.num_tokens; ++i) {
    const int64_t position = ids.as<const int64_t>()[i * ids.stride(0)];
    positions_[static_cast<size_t>(i)] = position;
    visible_[static_cast<size_t>(i)] =
        std::min(p_.past + p_.num_new, indexer::entries_before(position, a_.compress_ratio));
  }
  scan(b, slice(a_.present_key, b));
  for (int64_t i = 0; i < p_.num_tokens; ++i) {
    int32_t* const row = a_.selected_indices.as<int32_t>() + (b * p_.num_tokens + i) * p_.capacity;
    std::fill(row + std::min(p_.top_k, visible_[static_cast<size_t>(i)]), row + p_.capacity, -1);
  }
}

}  // namespace

SparseAttentionIndexerShapes sparse_attention_indexer_shapes(const Args& a) {
  const Problem p = check_inputs(a);
  const DType dtype = a.query.dtype;
  return {.selected_indices = {DType::kI32, {p.batch_size, p.num_tokens, p.capacity}},
          .present_key = {dtype, {p.batch_size, p.key_rows, p.head_dim}},
          .present_proj_buffer = {dtype, {2, p.batch_size, p.plan.length, 2 * p.head_dim}, !p.qsa()}};
}

size_t sparse_attention_indexer_workspace_bytes(const Args& a, int num_threads) {
  return Run::bytes(a, check_inputs(a), num_threads);
}

void sparse_attention_indexer(const Args& a, const OpContext& context) {
  const SparseAttentionIndexerShapes shapes = sparse_attention_indexer_shapes(a);
  check_outputs(a, shapes);
  wants_reference(kName, context.variant);  // one path for both

  const Problem p = check_inputs(a);
  const Workspace::Scope scope(*context.workspace);
  Run run(a, p, context);
  for (int64_t b = 0; b < p.batch_size; ++b) {
    run.run_sequence(b);
  }
}

}  // namespace shoal
