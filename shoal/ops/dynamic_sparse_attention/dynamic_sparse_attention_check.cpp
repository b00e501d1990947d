// Checks of a call, in the order of the contract: attributes, sizes and types, caches, indices, options, outputs.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "shoal/base/text.h"
#include "shoal/ops/dynamic_sparse_attention/dynamic_sparse_attention_problem.h"
#include "shoal/tensor/matcher.h"

namespace shoal::dynamic_sparse {
namespace {

using paged::matrix_of;

template <class... Args>
void expect(bool condition, const Args&... args) {
  require(condition, kOp, ": ", args...);
}

int64_t item_bytes(const TensorView& view) { return static_cast<int64_t>(size_of(view.dtype)); }

Rows rows_of(const TensorView& view) {
  Rows rows;
  rows.type = view.dtype;
  rows.first.data = static_cast<const std::byte*>(view.data);
  rows.first.column_stride = view.stride(view.rank - 1) * item_bytes(view);
  rows.first.row_stride = view.rank > 1 ? view.stride(view.rank - 2) * item_bytes(view) : 0;
  rows.batch_stride = view.rank > 2 ? view.stride(0) * item_bytes(view) : 0;
  return rows;
}

paged::Store store_of(DType type) {
  switch (type) {
    case DType::kF16: return paged::Store::kF16;
    case DType::kBF16: return paged::Store::kBF16;
    case DType::kI8: return paged::Store::kI8;
    default: return paged::Store::kF32;
  }
}

void check_attributes(const DynamicSparseAttentionArgs& args) {
  expect(args.num_heads > 0, "num_heads is ", args.num_heads, ", expected more than 0");
  expect(args.kv_num_heads > 0, "kv_num_heads is ", args.kv_num_heads, ", expected more than 0");
  expect(args.num_heads % args.kv_num_heads == 0, "num_heads is ", args.num_heads,
         ", expected a multiple of kv_num_heads = ", args.kv_num_heads);
  expect(args.is_causal == 1, "is_causal is ", args.is_causal, ", expected 1");
  expect(std::isfinite(args.scale) && args.scale >= 0.0f, "scale is ", args.scale,
         ", expected a finite value of at least 0 (0: 1 / sqrt(head_size))");
  expect(std::isfinite(args.qk_norm_epsilon) && args.qk_norm_epsilon > 0.0f, "qk_norm_epsilon is ",
         args.qk_norm_epsilon, ", expected a finite value above 0");
  expect(args.rotary_offset >= 0 && args.rotary_offset % 8 == 0, "rotary_offset is ", args.rotary_offset,
         ", expected a multiple of 8 that is not negative");
  const bool local = args.attention_mode == "local_plus_selected";
  const bool auxiliary = args.selected_kv_source == "auxiliary";
  expect(local || args.attention_mode == "selected_only", "attention_mode is '", printable(args.attention_mode),
         "', expected selected_only or local_plus_selected");
  expect(auxiliary || args.selected_kv_source == "main", "selected_kv_source is '", printable(args.selected_kv_source),
         "', expected main or auxiliary");
  expect(local == auxiliary, "attention_mode ", args.attention_mode, " with selected_kv_source ",
         args.selected_kv_source, " is not supported, expected selected_only with main or local_plus_selected with ",
         "auxiliary");
  expect(args.local_window_size == -1 || args.local_window_size > 0, "local_window_size is ", args.local_window_size,
         ", expected -1 or more than 0");
  expect(!local || args.local_window_size > 0, "local_window_size is ", args.local_window_size,
         ", expected more than 0 with attention_mode local_plus_selected");
}

void resolve_tokens(const DynamicSparseAttentionArgs& args, Problem& p) {
  const Matcher match(kOp);
  match.tensor("query", args.query).rank(3).types(kFloats);
  expect(static_cast<bool>(args.key) || !args.value, "key is required when value is given (both absent: packed QKV)");
  expect(static_cast<bool>(args.value) || !args.key, "value is required when key is given (both absent: packed QKV)");
  p.batch = args.query.dim(0);
  p.seq_len = args.query.dim(1);
  p.num_heads = args.num_heads;
  p.num_kv_heads = args.kv_num_heads;
  const bool packed = !args.key;
  const int64_t heads = packed ? p.num_heads + 2 * p.num_kv_heads : p.num_heads;
  expect(args.query.dim(2) > 0 && args.query.dim(2) % heads == 0, "query dimension 2 is ", args.query.dim(2),
         ", expected a multiple of ", packed ? "num_heads + 2 * kv_num_heads = " : "num_heads = ", heads);
  p.head_dim = args.query.dim(2) / heads;
  p.query = rows_of(args.query);
  p.type = args.query.dtype;
  if (packed) {
    p.key = p.value = p.query;
    p.key.first.data += p.num_heads * p.head_dim * p.query.first.column_stride;
    p.value.first.data += (p.num_heads + p.num_kv_heads) * p.head_dim * p.query.first.column_stride;
  } else {
    Dim batch("batch_size", p.batch);
    Dim tokens("sequence_length", p.seq_len);
    Dim width("kv_num_heads * head_size", p.num_kv_heads * p.head_dim);
    match.tensor("key", args.key).type(args.query.dtype).shape({batch, tokens, width});
    match.tensor("value", args.value).types(kFloats).shape({batch, tokens, width});
    p.key = rows_of(args.key);
    p.value = rows_of(args.value);
    p.type = args.value.dtype;
  }
  if (args.output_bf16) {
    expect(args.query.dtype == DType::kF16 && p.type == DType::kF16,
           "output_bf16 is 1, expected 0 unless query, key and value are float16");
    p.type = DType::kBF16;
  }
}

void resolve_caches(const DynamicSparseAttentionArgs& args, Problem& p) {
  const Matcher match(kOp);
  match.tensor("total_sequence_length", args.total_sequence_length).type(DType::kI32);
  expect(args.total_sequence_length.num_elements() == 1, "total_sequence_length has shape ",
         shape_text(args.total_sequence_length.dims()), ", expected one element");
  int32_t total = 0;
  std::memcpy(&total, args.total_sequence_length.data, sizeof(total));
  p.total_length = total;
  expect(total >= p.seq_len, "total_sequence_length is ", total,
         ", expected at least the sequence length = ", p.seq_len);
  expect(static_cast<bool>(args.past_key) || !args.past_value, "past_key is required when past_value is given");
  expect(static_cast<bool>(args.past_value) || !args.past_key, "past_value is required when past_key is given");
  p.cache_type = args.query.dtype;
  if (args.past_key) {
    Dim batch("batch_size", p.batch);
    Dim heads("kv_num_heads", p.num_kv_heads);
    Dim capacity("capacity");
    Dim head_size("head_size", p.head_dim);
    if (args.query.dtype == DType::kF16) {
      match.tensor("past_key", args.past_key).types({DType::kF16, DType::kI8});
    } else {
      match.tensor("past_key", args.past_key).types({args.query.dtype, DType::kF16, DType::kI8});
    }
    match.tensor("past_key", args.past_key).shape({batch, heads, capacity, head_size}).contiguous();
    match.tensor("past_value", args.past_value)
        .type(args.past_key.dtype)
        .shape({batch, heads, capacity, head_size})
        .contiguous();
    p.past_capacity = capacity;
    p.cache_type = args.past_key.dtype;
  }
  p.grows = !args.past_key || p.past_capacity < p.total_length;
  p.capacity = p.grows ? p.total_length : p.past_capacity;
  p.quantized = p.cache_type == DType::kI8;
  const auto check_scale = [&](const TensorView& scale, std::string_view name) {
    if (!p.quantized) {
      expect(!scale, name, " must be absent: the cache is not int8");
      return;
    }
    expect(static_cast<bool>(scale), name, " is required with an int8 cache");
    match.tensor(name, scale).type(DType::kF32);
    expect(scale.num_elements() == p.num_kv_heads * p.head_dim, name, " has shape ", shape_text(scale.dims()),
           ", expected ", p.num_kv_heads * p.head_dim, " elements (kv_num_heads * head_size)");
  };
  check_scale(args.key_scale, "key_scale");
  check_scale(args.value_scale, "value_scale");
}

void resolve_auxiliary(const DynamicSparseAttentionArgs& args, Problem& p) {
  p.local = args.attention_mode == "local_plus_selected";
  p.window = args.local_window_size;
  expect(static_cast<bool>(args.auxiliary_key) || !args.auxiliary_value,
         "auxiliary_value must be absent without auxiliary_key");
  if (!p.local) {
    expect(!args.auxiliary_key, "auxiliary_key must be absent with selected_kv_source main");
    return;
  }
  expect(static_cast<bool>(args.auxiliary_key), "auxiliary_key is required with selected_kv_source auxiliary");
  expect(args.auxiliary_kv_shared || args.auxiliary_value, "auxiliary_value is required with auxiliary_kv_shared = 0");
  const Matcher match(kOp);
  Dim batch("batch_size", p.batch);
  Dim heads("kv_num_heads", p.num_kv_heads);
  Dim length("auxiliary_length");
  Dim head_size("head_size", p.head_dim);
  const auto source_of = [&](const TensorView& view, std::string_view name) {
    match.tensor(name, view).types({p.type, args.query.dtype}).shape({batch, heads, length, head_size});
    return sparse::RowSource{static_cast<const std::byte*>(view.data), store_of(view.dtype),
                             view.stride(2) * item_bytes(view),        view.stride(1) * item_bytes(view),
                             view.stride(3) * item_bytes(view),        nullptr};
  };
  p.auxiliary.key = source_of(args.auxiliary_key, "auxiliary_key");
  p.auxiliary.value = p.auxiliary.key;
  p.auxiliary_key_stride = args.auxiliary_key.stride(0) * item_bytes(args.auxiliary_key);
  p.auxiliary_value_stride = p.auxiliary_key_stride;
  if (args.auxiliary_value) {
    p.auxiliary.value = source_of(args.auxiliary_value, "auxiliary_value");
    p.auxiliary_value_stride = args.auxiliary_value.stride(0) * item_bytes(args.auxiliary_value);
  }
  p.auxiliary_length = length;
}

void resolve_indices(const DynamicSparseAttentionArgs& args, Problem& p) {
  const Matcher match(kOp);
  Dim rows("batch_size * sequence_length", p.num_rows());
  Dim selected("max_selected");
  Dim batch("batch_size", p.batch);
  match.tensor("selected_indices", args.selected_indices).type(DType::kI32).shape({rows, selected});
  match.tensor("selected_counts", args.selected_counts).type(DType::kI32).shape({rows});
  match.tensor("seqlens_k", args.seqlens_k).type(DType::kI32).shape({batch});
  p.selected = matrix_of(args.selected_indices);
  p.counts = matrix_of(args.selected_counts);
  p.lengths = matrix_of(args.seqlens_k);
  p.max_selected = selected;
  if (args.committed_length) {
    match.tensor("committed_length", args.committed_length).type(DType::kI32);
    const int64_t count = args.committed_length.num_elements();
    expect(args.committed_length.rank < 2, "committed_length has ", args.committed_length.rank,
           " dimensions, expected 1");
    expect(count == 1 || count == p.batch, "committed_length has ", count,
           " elements, expected 1 or batch_size = ", p.batch);
    p.committed.data = args.committed_length.as<const std::byte>();
    p.committed.row_stride = count == 1 ? 0 : args.committed_length.stride(0) * item_bytes(args.committed_length);
  }
}

void resolve_rotary(const DynamicSparseAttentionArgs& args, Problem& p) {
  const Matcher match(kOp);
  expect(static_cast<bool>(args.cos_cache) || !args.sin_cache, "cos_cache is required when sin_cache is given");
  expect(static_cast<bool>(args.sin_cache) || !args.cos_cache, "sin_cache is required when cos_cache is given");
  expect(!args.do_rotary || args.cos_cache, "cos_cache and sin_cache are required with do_rotary = 1");
  if (args.position_ids) {
    Dim batch("batch_size", p.batch);
    Dim tokens("sequence_length", p.seq_len);
    match.tensor("position_ids", args.position_ids).type(DType::kI64).shape({batch, tokens});
    p.positions = matrix_of(args.position_ids);
  }
  if (!args.cos_cache) {
    return;
  }
  Dim max_pos("max_sequence_length");
  Dim half("rotary_dim / 2");
  match.tensor("cos_cache", args.cos_cache).types({p.type, args.query.dtype}).shape({max_pos, half});
  match.tensor("sin_cache", args.sin_cache).type(args.cos_cache.dtype).shape({max_pos, half});
  expect(half > 0, "cos_cache has shape ", shape_text(args.cos_cache.dims()), ", expected at least one column");
  expect(args.rotary_offset + 2 * half <= p.head_dim, "rotary_offset + rotary_dim is ", args.rotary_offset + 2 * half,
         ", expected at most head_size = ", p.head_dim);
  p.head.rotary = args.do_rotary;
  p.head.rotary_interleaved = args.rotary_interleaved;
  p.head.rotary_offset = args.rotary_offset;
  p.head.rotary_dim = 2 * half;
  p.head.max_pos = max_pos;
  p.cos = rows_of(args.cos_cache);
  p.sin = rows_of(args.sin_cache);
}

void resolve_norms_and_sink(const DynamicSparseAttentionArgs& args, Problem& p) {
  const Matcher match(kOp);
  Dim head_size("head_size", p.head_dim);
  expect(static_cast<bool>(args.q_norm_weight) || !args.k_norm_weight,
         "q_norm_weight is required when k_norm_weight is given");
  expect(static_cast<bool>(args.k_norm_weight) || !args.q_norm_weight,
         "k_norm_weight is required when q_norm_weight is given");
  p.head.type = args.query.dtype;
  p.head.head_dim = p.head_dim;
  if (args.q_norm_weight) {
    match.tensor("q_norm_weight", args.q_norm_weight).types({p.type, args.query.dtype}).shape({head_size});
    match.tensor("k_norm_weight", args.k_norm_weight).types({p.type, args.query.dtype}).shape({head_size});
    p.head.norm = true;
    p.head.epsilon = args.qk_norm_epsilon;
    p.q_norm_weight = rows_of(args.q_norm_weight);
    p.k_norm_weight = rows_of(args.k_norm_weight);
  }
  p.has_sink = args.smooth_softmax || args.head_sink;
  if (args.head_sink) {
    Dim heads("num_heads", p.num_heads);
    match.tensor("head_sink", args.head_sink).types({p.type, args.query.dtype}).shape({heads});
    p.sink = rows_of(args.head_sink);
  }
}

void check_devices(const DynamicSparseAttentionArgs& args) {
  const struct {
    std::string_view name;
    const TensorView& view;
  } tensors[] = {{"query", args.query},
                 {"key", args.key},
                 {"value", args.value},
                 {"past_key", args.past_key},
                 {"past_value", args.past_value},
                 {"auxiliary_key", args.auxiliary_key},
                 {"auxiliary_value", args.auxiliary_value},
                 {"selected_indices", args.selected_indices},
                 {"selected_counts", args.selected_counts},
                 {"seqlens_k", args.seqlens_k},
                 {"total_sequence_length", args.total_sequence_length},
                 {"cos_cache", args.cos_cache},
                 {"sin_cache", args.sin_cache},
                 {"position_ids", args.position_ids},
                 {"q_norm_weight", args.q_norm_weight},
                 {"k_norm_weight", args.k_norm_weight},
                 {"head_sink", args.head_sink},
                 {"committed_length", args.committed_length},
                 {"key_scale", args.key_scale},
                 {"value_scale", args.value_scale}};
  for (const auto& tensor : tensors) {
    expect(!tensor.view || tensor.view.device.type == DeviceType::kCpu, tensor.name,
           " is on another device, expected the CPU");
  }
}

}  // namespace

Problem check(const DynamicSparseAttentionArgs& args) {
  check_attributes(args);
  check_devices(args);
  Problem p;
  resolve_tokens(args, p);
  resolve_caches(args, p);
  resolve_auxiliary(args, p);
  resolve_indices(args, p);
  resolve_rotary(args, p);
  resolve_norms_and_sink(args, p);
  return p;
}

DynamicSparseAttentionShapes shapes_of(const DynamicSparseAttentionArgs&, const Problem& p) {
  const OutputSpec cache = {p.cache_type, {p.batch, p.num_kv_heads, p.capacity, p.head_dim}};
  return {{p.type, {p.batch, p.seq_len, p.num_heads * p.head_dim}}, cache, cache, {DType::kI32, {1}}};
}

void check_outputs(const DynamicSparseAttentionArgs& args, const Problem& p) {
  const DynamicSparseAttentionShapes shapes = shapes_of(args, p);
  const Device cpu = {};
  check_output(kOp, "output", args.output, shapes.output, cpu);
  check_output(kOp, "present_key", args.present_key, shapes.present_key, cpu);
  check_output(kOp, "present_value", args.present_value, shapes.present_value, cpu);
  check_output(kOp, "validation_status", args.validation_status, shapes.validation_status, cpu, /*optional=*/true);
  const Matcher match(kOp);
  match.tensor("output", args.output).inner_contiguous();
  match.tensor("present_key", args.present_key).contiguous();
  match.tensor("present_value", args.present_value).contiguous();
  const auto check_alias = [&](const TensorView& present, const TensorView& past, std::string_view side) {
    expect(p.grows || present.data == past.data, "present_", side, " must be past_", side,
           " itself, which has room for total_sequence_length");
    expect(!p.grows || p.past_capacity == 0 || present.data != past.data, "present_", side, " must not be past_", side,
           ", which has no room for total_sequence_length");
  };
  check_alias(args.present_key, args.past_key, "key");
  check_alias(args.present_value, args.past_value, "value");
}

}  // namespace shoal::dynamic_sparse
