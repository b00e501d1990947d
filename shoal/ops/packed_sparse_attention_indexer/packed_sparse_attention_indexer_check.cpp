#include <algorithm>
#include <cmath>
#include <utility>

#include "shoal/base/text.h"
#include "shoal/ops/packed_sparse_attention_indexer/packed_sparse_attention_indexer_problem.h"
#include "shoal/tensor/matcher.h"

namespace shoal::packed_indexer {
namespace {

using Args = PackedSparseAttentionIndexerArgs;
using indexer::Policy;

constexpr int64_t kMaxCaptured = 8;

// What belongs to the other policy.
void check_policy_arguments(const Args& a, Policy policy) {
  if (policy == Policy::kQsa) {
    indexer::check_absent(kName, policy,
                          {{"index_topk", a.index_topk.has_value()},
                           {"head_weight_scale", a.head_weight_scale.has_value()},
                           {"gate", static_cast<bool>(a.gate)},
                           {"position_bias", static_cast<bool>(a.position_bias)},
                           {"head_weights", static_cast<bool>(a.head_weights)},
                           {"position_ids", static_cast<bool>(a.position_ids)},
                           {"past_gate_buffer", static_cast<bool>(a.past_gate_buffer)}});
  } else {
    indexer::check_absent(kName, policy,
                          {{"token_budget", a.token_budget.has_value()},
                           {"state_update_capacity", a.state_update_capacity != 0},
                           {"state_update_capture_count", static_cast<bool>(a.state_update_capture_count)},
                           {"state_update_active", static_cast<bool>(a.state_update_active)}});
  }
}

void check_attributes(const Args& a, Policy policy) {
  require(2 * a.compress_ratio - 1 <= INT32_MAX, kName, ": compress_ratio is ", a.compress_ratio, ", expected 1 to ",
          (int64_t{INT32_MAX} + 1) / 2);
  indexer::check_attributes(kName, policy,
                            {.compress_ratio = a.compress_ratio,
                             .token_budget = a.token_budget,
                             .index_topk = a.index_topk,
                             .epsilon = a.epsilon,
                             .scale = a.scale,
                             .head_weight_scale = a.head_weight_scale});
  indexer::check_positive(kName, "state_capacity", a.state_capacity);
  if (policy == Policy::kQsa) {
    require(a.state_update_capacity >= 0 && a.state_update_capacity <= kMaxCaptured, kName,
            ": state_update_capacity is ", a.state_update_capacity, ", expected 0 to ", kMaxCaptured);
  }
  const std::string_view sharing = a.indexshare_state_policy;
  require(sharing == "default" || sharing == "hold" || sharing == "advance", kName, ": indexshare_state_policy is '",
          printable(sharing), "', expected default, hold or advance");
  require(policy == Policy::kCsa || sharing != "advance", kName,
          ": indexshare_state_policy is advance, expected default or hold with policy_mode qsa");
}

int32_t host_value(std::string_view name, const TensorView& view) {
  require(view.rank == 0 || (view.rank == 1 && view.dim(0) == 1), kName, ": ", name, " has shape ",
          shape_text(view.dims()), ", expected [1]");
  require(view.dtype == DType::kI32, kName, ": ", name, " has type ", to_string(view.dtype), ", expected int32");
  require(view.device.type == DeviceType::kCpu, kName, ": ", name, " must be on the host");
  return *view.as<const int32_t>();
}

// All of index sharing or nothing.
Mode check_sharing(const Args& a, const Problem& p) {
  const std::pair<std::string_view, const TensorView*> inputs[] = {{"indexshare_mode", &a.indexshare_mode},
                                                                   {"merged_indices", &a.merged_indices},
                                                                   {"merged_counts", &a.merged_counts},
                                                                   {"merged_status", &a.merged_status}};
  if (a.max_output_entries == 0) {
    for (const auto& [name, view] : inputs) {
      require(!*view, kName, ": ", name, " must be absent when max_output_entries is 0");
    }
    return Mode::kSelect;
  }
  require(a.max_output_entries >= p.capacity && a.max_output_entries <= INT32_MAX, kName, ": max_output_entries is ",
          a.max_output_entries, ", expected 0 or ", p.capacity, " to ", INT32_MAX);
  for (const auto& [name, view] : inputs) {
    require(static_cast<bool>(*view), kName, ": ", name, " is required with max_output_entries");
  }
  const int32_t mode = host_value("indexshare_mode", a.indexshare_mode);
  require(mode == 0 || mode == 1, kName, ": indexshare_mode is ", mode, ", expected 0 or 1");
  if (mode == 0) {
    return Mode::kSelect;
  }
  return p.qsa() || a.indexshare_state_policy == "hold" ? Mode::kReuseHold : Mode::kReuseAdvance;
}

void check_metadata(const Args& a, const Problem& p, Dim& batch) {
  const Matcher match(kName);
  const Device device = a.query.device;
  match.tensor("past_sequence_lengths", a.past_sequence_lengths).type(DType::kI32).shape({batch}).device(device);
  match.tensor("cumulative_sequence_lengths", a.cumulative_sequence_lengths)
      .type(DType::kI32)
      .shape({batch + 1})
      .device(device);
  match.tensor("past_state_lengths", a.past_state_lengths).type(DType::kI32).shape({batch, 2}).device(device);
  if (a.state_update_capture_count) {
    match.tensor("state_update_capture_count", a.state_update_capture_count)
        .type(DType::kI32)
        .shape({batch})
        .device(device);
  }
  require(a.state_update_capacity == 0 || a.state_update_capture_count, kName,
          ": state_update_capture_count is required with state_update_capacity");
  if (a.max_output_entries > 0) {
    Dim rows{p.mode == Mode::kSelect ? "0 with indexshare_mode 0" : "batch_size",
             p.mode == Mode::kSelect ? 0 : batch.value()};
    match.tensor("merged_indices", a.merged_indices)
        .type(DType::kI32)
        .shape({rows, a.max_output_entries})
        .device(device);
    match.tensor("merged_counts", a.merged_counts).type(DType::kI32).shape({rows}).device(device);
    match.tensor("merged_status", a.merged_status).type(DType::kI32).shape({rows}).device(device);
  }
}

// Of these two, the byte ranges.
bool overlap(const TensorView& x, const TensorView& y) {
  const auto range = [](const TensorView& view) {
    const std::byte* low = view.as<const std::byte>();
    const std::byte* high = low;
    for (int axis = 0; axis < view.rank; ++axis) {
      const int64_t bytes = (view.dim(axis) - 1) * view.stride(axis) * static_cast<int64_t>(size_of(view.dtype));
      (bytes < 0 ? low : high) += bytes;
    }
    return std::pair(low, high);
  };
  if (x.num_elements() == 0 || y.num_elements() == 0) {
    return false;
  }
  const auto [x_low, x_high] = range(x);
  const auto [y_low, y_high] = range(y);
  return x_low <= y_high && y_low <= x_high;
}

}  // namespace

Problem check_inputs(const Args& a) {
  Problem p;
  p.policy = indexer::check_policy(kName, a.policy_mode);
  check_policy_arguments(a, p.policy);
  check_attributes(a, p.policy);
  p.capacity = p.qsa() ? *a.token_budget + a.compress_ratio - 1 : *a.index_topk;
  p.mode = check_sharing(a, p);
  p.width = a.max_output_entries > 0 ? a.max_output_entries : p.capacity;

  const Matcher match(kName);
  Dim batch{"batch_size"};
  Dim head_dim{"head_size"};
  match.tensor("query", a.query).types(kFloats).rank(2);
  const DType dtype = a.query.dtype;
  const Device device = a.query.device;
  match.tensor("query_norm_weight", a.query_norm_weight).type(dtype).shape({head_dim}).device(device);
  require(head_dim > 0, kName, ": query_norm_weight is empty, expected the head size");
  match.tensor("key_norm_weight", a.key_norm_weight).type(dtype).shape({head_dim}).device(device);
  p.head_dim = head_dim;

  // The tokens: rows of query, or with reuse of what advances the state.
  const bool reuse = p.mode != Mode::kSelect;
  require(!reuse || a.query.dim(0) == 0, kName, ": query has ", a.query.dim(0),
          " rows, expected none with indexshare_mode 1");
  const bool has_key = static_cast<bool>(a.key);
  const int64_t num_parts = a.query.dim(1) / head_dim;
  p.num_heads = num_parts - (has_key ? 0 : 1);
  require(has_key || p.qsa(), kName, ": key is required with policy_mode csa");
  require(a.query.dim(1) % head_dim == 0 && p.num_heads > 0, kName, ": query has ", a.query.dim(1),
          " columns, expected a multiple of ", head_dim.value(), ", the head size",
          has_key ? "" : ", for at least one head and the key");
  match.tensor("past_sequence_lengths", a.past_sequence_lengths).shape({batch});
  p.batch_size = batch;
  Dim state_tokens{p.mode == Mode::kReuseAdvance ? "batch_size" : "num_tokens",
                   p.mode == Mode::kReuseAdvance ? batch.value() : a.query.dim(0)};
  p.num_tokens = reuse ? p.batch_size : a.query.dim(0);
  Dim key_width{p.qsa() ? "head_size" : "2 * head_size", p.qsa() ? p.head_dim : 2 * p.head_dim};
  if (has_key) {
    match.tensor("key", a.key).type(dtype).shape({state_tokens, key_width}).device(device);
  }
  indexer::check_tables(kName, p.policy, a.cos_cache, a.sin_cache, p.batch_size, p.head_dim, dtype, device);
  check_metadata(a, p, batch);
  const int64_t buffer_rows = 2 * a.compress_ratio - 1;
  Dim capacity{"state_capacity", a.state_capacity};
  match.tensor("past_key_state", a.past_key_state).shape({batch, capacity, head_dim}).device(device);
  if (dtype == DType::kBF16) {
    match.tensor("past_key_state", a.past_key_state).types({DType::kBF16, DType::kF32});
  } else {
    match.tensor("past_key_state", a.past_key_state).type(dtype);
  }
  match.tensor("past_kv_buffer", a.past_kv_buffer).type(dtype).shape({batch, buffer_rows, key_width}).device(device);
  if (!p.qsa()) {
    match.tensor("gate", a.gate).type(dtype).shape({state_tokens, key_width}).device(device);
    match.tensor("position_bias", a.position_bias).type(dtype).shape({a.compress_ratio, key_width}).device(device);
    match.tensor("head_weights", a.head_weights).type(dtype).shape({a.query.dim(0), p.num_heads}).device(device);
    match.tensor("position_ids", a.position_ids).type(DType::kI64).shape({state_tokens}).device(device);
    match.tensor("past_gate_buffer", a.past_gate_buffer)
        .type(dtype)
        .shape({batch, buffer_rows, key_width})
        .device(device);
  }
  if (a.state_update_active) {
    p.captures = host_value("state_update_active", a.state_update_active) != 0;
  } else {
    p.captures = a.state_update_capacity > 0;
  }
  p.scale = a.scale.value_or(1.0f / std::sqrt(static_cast<float>(p.head_dim)));
  if (!p.qsa()) {
    p.scale *= a.head_weight_scale.value_or(1.0f / std::sqrt(static_cast<float>(p.num_heads)));
  }
  return p;
}

void check_outputs(const Args& a, const PackedSparseAttentionIndexerShapes& shapes) {
  const Device device = a.query.device;
  const Matcher match(kName);
  const auto check = [&](std::string_view name, const TensorView& view, const OutputSpec& spec, bool optional = false) {
    check_output(kName, name, view, spec, device, optional);
    if (view) {
      match.tensor(name, view).contiguous();
    }
  };
  check("selected_indices", a.selected_indices, shapes.selected_indices);
  check("selected_counts", a.selected_counts, shapes.selected_counts);
  check("present_key_state", a.present_key_state, shapes.present_key_state);
  check("present_kv_buffer", a.present_kv_buffer, shapes.present_kv_buffer);
  check("present_gate_buffer", a.present_gate_buffer, shapes.present_gate_buffer);
  check("present_state_lengths", a.present_state_lengths, shapes.present_state_lengths);
  check("state_update", a.state_update, shapes.state_update, /*optional=*/true);
  check("indexshare_status", a.indexshare_status, shapes.indexshare_status);
  check("state_status", a.state_status, shapes.state_status, /*optional=*/true);
  // Strides of a state must agree if the memory does.
  const auto check_in_place = [&](std::string_view name, const TensorView& past, const TensorView& present) {
    require(past.data != present.data || past.is_contiguous(), kName, ": ", name,
            " must be contiguous to be changed in place");
  };
  check_in_place("past_key_state", a.past_key_state, a.present_key_state);
  check_in_place("past_kv_buffer", a.past_kv_buffer, a.present_kv_buffer);
  check_in_place("past_state_lengths", a.past_state_lengths, a.present_state_lengths);
  if (shapes.present_gate_buffer.present) {
    for (const auto& [name, present] : {std::pair{"present_kv_buffer", &a.present_kv_buffer},
                                        std::pair{"present_gate_buffer", &a.present_gate_buffer}}) {
      for (const auto& [past_name, past] :
           {std::pair{"past_kv_buffer", &a.past_kv_buffer}, std::pair{"past_gate_buffer", &a.past_gate_buffer}}) {
        require(!overlap(*past, *present), kName, ": ", name, " shares memory with ", past_name,
                ", which policy_mode csa does not allow");
      }
    }
  }
}

}  // namespace shoal::packed_indexer
