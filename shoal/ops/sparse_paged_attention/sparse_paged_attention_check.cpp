// Checks of a call: what is this operator's own, then, by paged_attention's checks, what it has in common with that
// one.
#include "shoal/base/text.h"
#include "shoal/ops/sparse_paged_attention/sparse_paged_attention_problem.h"
#include "shoal/tensor/matcher.h"

namespace shoal::sparse_paged {
namespace {

using paged::matrix_of;

template <class... Args>
void expect(bool condition, const Args&... args) {
  require(condition, kOp, ": ", args...);
}

int64_t item_bytes(const TensorView& view) { return static_cast<int64_t>(size_of(view.dtype)); }

void check_attributes(const SparsePagedAttentionArgs& args) {
  expect(args.attention_mode == "selected_only" || args.attention_mode == "local_plus_selected", "attention_mode is '",
         printable(args.attention_mode), "', expected selected_only or local_plus_selected");
  expect(args.selected_kv_source == "main" || args.selected_kv_source == "auxiliary", "selected_kv_source is '",
         printable(args.selected_kv_source), "', expected main or auxiliary");
  expect(args.auxiliary_cache_layout == "contiguous", "auxiliary_cache_layout is '",
         printable(args.auxiliary_cache_layout), "', expected contiguous");
}

void check_caches(const SparsePagedAttentionArgs& args) {
  const Matcher match(kOp);
  match.tensor("query", args.query).types(kFloats);
  if (args.query.dtype == DType::kF32 && args.beyond_schema) {
    match.tensor("key_cache", args.key_cache).types({DType::kF32, DType::kF16, DType::kBF16, DType::kI8});
  } else {
    match.tensor("key_cache", args.key_cache).types({args.query.dtype, DType::kI8, DType::kF32});
  }
  if (args.kv_cache_layout == "LATENT") {
    expect(args.beyond_schema, "kv_cache_layout is 'LATENT', expected SEPARATE");
    expect(args.selected_kv_source == "main",
           "selected_kv_source is 'auxiliary', expected main with kv_cache_layout LATENT");
    return;
  }
  match.tensor("value_cache", args.value_cache);
  expect(args.value_cache.dtype == args.key_cache.dtype, "value_cache has type ", to_string(args.value_cache.dtype),
         ", expected ", to_string(args.key_cache.dtype), " as key_cache");
}

PagedAttentionArgs common_arguments(const SparsePagedAttentionArgs& args) {
  PagedAttentionArgs a;
  a.output = args.output;
  a.query = args.query;
  a.key = args.key;
  a.value = args.value;
  a.key_cache = args.key_cache;
  a.value_cache = args.value_cache;
  a.cumulative_sequence_length = args.cumulative_sequence_length;
  a.past_seqlens = args.past_seqlens;
  a.block_table = args.block_table;
  a.slot_mapping = args.slot_mapping;
  a.cos_cache = args.cos_cache;
  a.sin_cache = args.sin_cache;
  a.head_sink = args.head_sink;
  a.q_norm_weight = args.q_norm_weight;
  a.k_norm_weight = args.k_norm_weight;
  a.k_scale = args.k_scale;
  a.v_scale = args.v_scale;
  a.num_heads = args.num_heads;
  a.kv_num_heads = args.kv_num_heads;
  a.scale = args.scale;
  a.softcap = args.softcap;
  a.local_window_size = args.local_window_size;
  a.is_causal = args.is_causal;
  a.do_rotary = args.do_rotary;
  a.rotary_interleaved = args.rotary_interleaved;
  a.rotary_offset = args.rotary_offset;
  a.qk_norm_epsilon = args.qk_norm_epsilon;
  a.k_quant_type = args.k_quant_type;
  a.v_quant_type = args.v_quant_type;
  a.kv_cache_layout = args.kv_cache_layout;
  a.v_head_size = args.v_head_size;
  return a;
}

void resolve_selection(const SparsePagedAttentionArgs& args, Problem& p) {
  const Matcher match(kOp);
  Dim tokens("num_tokens", p.paged.num_tokens);
  Dim selected("max_selected_entries");
  p.by_head = args.beyond_schema && args.selected_indices.rank == 3;
  if (p.by_head) {
    Dim heads("kv_num_heads", p.paged.num_kv_heads);
    match.tensor("selected_indices", args.selected_indices)
        .type(DType::kI32)
        .shape({tokens, heads, selected})
        .contiguous();
    match.tensor("selected_counts", args.selected_counts).type(DType::kI32).shape({tokens, heads}).contiguous();
    const int64_t rows = tokens * heads;
    p.selected = matrix_of(TensorView(args.selected_indices.data, DType::kI32, {rows, selected}));
    p.counts = matrix_of(TensorView(args.selected_counts.data, DType::kI32, {rows}));
  } else {
    match.tensor("selected_indices", args.selected_indices).type(DType::kI32).shape({tokens, selected});
    match.tensor("selected_counts", args.selected_counts).type(DType::kI32).shape({tokens});
    p.selected = matrix_of(args.selected_indices);
    p.counts = matrix_of(args.selected_counts);
  }
  p.max_selected = selected;
}

sparse::RowSource rows_of(const TensorView& cache) {
  sparse::RowSource rows;
  rows.data = static_cast<const std::byte*>(cache.data);
  rows.store = cache.dtype == DType::kF16    ? paged::Store::kF16
               : cache.dtype == DType::kBF16 ? paged::Store::kBF16
                                             : paged::Store::kF32;
  rows.row_bytes = cache.stride(1) * item_bytes(cache);
  rows.head_bytes = cache.dim(2) == 1 ? 0 : cache.stride(2) * item_bytes(cache);
  rows.channel_bytes = cache.stride(3) * item_bytes(cache);
  return rows;
}

void resolve_auxiliary(const SparsePagedAttentionArgs& args, Problem& p) {
  p.auxiliary = args.selected_kv_source == "auxiliary";
  if (!p.auxiliary) {
    expect(!args.auxiliary_key, "auxiliary_key must be absent with selected_kv_source main");
    expect(!args.auxiliary_value, "auxiliary_value must be absent with selected_kv_source main");
    expect(!args.auxiliary_lengths, "auxiliary_lengths must be absent with selected_kv_source main");
    return;
  }
  expect(static_cast<bool>(args.auxiliary_key), "auxiliary_key is required with selected_kv_source auxiliary");
  expect(static_cast<bool>(args.auxiliary_lengths), "auxiliary_lengths is required with selected_kv_source auxiliary");
  expect(!args.auxiliary_kv_shared || !args.auxiliary_value,
         "auxiliary_value must be absent with auxiliary_kv_shared = 1");
  expect(args.auxiliary_kv_shared || args.auxiliary_value,
         "auxiliary_value is required with selected_kv_source auxiliary and auxiliary_kv_shared = 0");
  const Matcher match(kOp);
  Dim seqs("batch_size", p.paged.num_seqs);
  Dim capacity("auxiliary_capacity");
  Dim heads("auxiliary_heads");
  Dim head_size("head_size", p.paged.head_dim);
  match.tensor("auxiliary_key", args.auxiliary_key).type(p.paged.type).shape({seqs, capacity, heads, head_size});
  expect(heads == 1 || heads == p.paged.num_kv_heads, "auxiliary_key dimension 2 is ", heads.value(),
         ", expected 1 or kv_num_heads = ", p.paged.num_kv_heads);
  if (args.auxiliary_value) {
    match.tensor("auxiliary_value", args.auxiliary_value).type(p.paged.type).shape({seqs, capacity, heads, head_size});
  }
  match.tensor("auxiliary_lengths", args.auxiliary_lengths).type(DType::kI32).shape({seqs});
  const TensorView& value = args.auxiliary_value ? args.auxiliary_value : args.auxiliary_key;
  p.capacity = capacity;
  p.lengths = matrix_of(args.auxiliary_lengths);
  p.auxiliary_rows = {rows_of(args.auxiliary_key), rows_of(value)};
  p.auxiliary_key_stride = args.auxiliary_key.stride(0) * item_bytes(args.auxiliary_key);
  p.auxiliary_value_stride = value.stride(0) * item_bytes(value);
}

void check_metadata(const TensorView& view) {
  if (!view) {
    return;
  }
  Matcher(kOp).tensor("attention_metadata", view).rank(1).type(DType::kI32);
  expect(view.dim(0) == 5, "attention_metadata has ", view.dim(0), " elements, expected 5");
  paged::Matrix bounds = matrix_of(view);
  for (int64_t i = 0; i < 5; ++i) {
    const int64_t bound = paged::read_index(bounds, i);
    expect(bound >= 0, "attention_metadata[", i, "] is ", bound, ", expected 0 or more");
  }
}

void check_aliases(const SparsePagedAttentionArgs& args) {
  const auto check_alias = [](const TensorView& out, const TensorView& in, std::string_view name) {
    expect(!out || (out.data == in.data && out.dtype == in.dtype && out.rank == in.rank && out.shape == in.shape &&
                    out.is_contiguous()),
           name, "_out must be ", name, " itself (same memory, type and shape)");
  };
  check_alias(args.key_cache_out, args.key_cache, "key_cache");
  check_alias(args.value_cache_out, args.value_cache, "value_cache");
}

void check_devices(const SparsePagedAttentionArgs& args) {
  const struct {
    std::string_view name;
    const TensorView& view;
  } tensors[] = {{"selected_indices", args.selected_indices},   {"selected_counts", args.selected_counts},
                 {"auxiliary_key", args.auxiliary_key},         {"auxiliary_value", args.auxiliary_value},
                 {"auxiliary_lengths", args.auxiliary_lengths}, {"attention_metadata", args.attention_metadata}};
  for (const auto& tensor : tensors) {
    expect(!tensor.view || tensor.view.device.type == DeviceType::kCpu, tensor.name,
           " is on another device, expected the CPU");
  }
}

}  // namespace

void check(const SparsePagedAttentionArgs& args, bool shapes_only, Problem& p) {
  check_attributes(args);
  check_caches(args);
  check_devices(args);
  p.paged_args = common_arguments(args);
  p.paged = paged::check(p.paged_args, shapes_only, kOp);
  p.local = args.attention_mode == "local_plus_selected";
  resolve_selection(args, p);
  resolve_auxiliary(args, p);
  check_metadata(args.attention_metadata);
  check_aliases(args);
}

}  // namespace shoal::sparse_paged
