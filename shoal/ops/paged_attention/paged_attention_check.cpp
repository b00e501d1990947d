// Checks of a call, in the order of the contract: attributes, input mode, sizes, cache formats, options, outputs.
#include <algorithm>
#include <cmath>

#include "shoal/base/checked.h"
#include "shoal/base/text.h"
#include "shoal/ops/paged_attention/paged_attention_plan.h"
#include "shoal/tensor/matcher.h"

namespace shoal::paged {

Matrix matrix_of(const TensorView& view) {
  const auto item = static_cast<int64_t>(size_of(view.dtype));
  Matrix matrix;
  matrix.data = static_cast<const std::byte*>(view.data);
  matrix.row_stride = view.stride(0) * item;
  matrix.column_stride = view.rank > 1 ? view.stride(1) * item : 0;
  return matrix;
}

namespace {

template <class... Args>
void expect(std::string_view op, bool condition, const Args&... args) {
  require(condition, op, ": ", args...);
}

// A vector as one row, so that load_row reads it.
Matrix row_of(const TensorView& view) {
  Matrix matrix;
  matrix.data = static_cast<const std::byte*>(view.data);
  matrix.column_stride = view.stride(0) * static_cast<int64_t>(size_of(view.dtype));
  return matrix;
}

void check_attributes(std::string_view op, const PagedAttentionArgs& args) {
  expect(op, args.num_heads > 0, "num_heads is ", args.num_heads, ", expected more than 0");
  expect(op, args.kv_num_heads > 0, "kv_num_heads is ", args.kv_num_heads, ", expected more than 0");
  expect(op, args.num_heads % args.kv_num_heads == 0, "num_heads is ", args.num_heads,
         ", expected a multiple of kv_num_heads = ", args.kv_num_heads);
  expect(op, args.kv_cache_layout == "SEPARATE" || args.kv_cache_layout == "LATENT", "kv_cache_layout is '",
         printable(args.kv_cache_layout), "', expected SEPARATE or LATENT");
  expect(op, std::isfinite(args.scale), "scale is ", args.scale, ", expected a finite value (0: 1 / sqrt(head_size))");
  expect(op, std::isfinite(args.softcap) && args.softcap >= 0.0f, "softcap is ", args.softcap,
         ", expected a finite value of at least 0 (0: off)");
  expect(op, std::isfinite(args.qk_norm_epsilon) && args.qk_norm_epsilon > 0.0f, "qk_norm_epsilon is ",
         args.qk_norm_epsilon, ", expected a finite value above 0");
  expect(op, args.rotary_offset >= 0 && args.rotary_offset % 8 == 0, "rotary_offset is ", args.rotary_offset,
         ", expected a multiple of 8 that is not negative");
}

// Which inputs are given decides the mode; every other pattern is an error.
void check_presence(std::string_view op, const PagedAttentionArgs& args, bool latent) {
  expect(op, static_cast<bool>(args.query), "query is required");
  expect(op, static_cast<bool>(args.key_cache), "key_cache is required");
  if (latent) {
    expect(op, static_cast<bool>(args.key), "key is required with kv_cache_layout LATENT");
    expect(op, !args.value, "value must be absent with kv_cache_layout LATENT");
    expect(op, !args.value_cache, "value_cache must be absent with kv_cache_layout LATENT");
    expect(op, !args.value_cache_out, "value_cache_out must be absent with kv_cache_layout LATENT");
    expect(op, !args.v_scale, "v_scale must be absent with kv_cache_layout LATENT: V is read with k_scale");
    expect(op, args.v_quant_type == "NONE", "v_quant_type is '", printable(args.v_quant_type),
           "', expected NONE with kv_cache_layout LATENT");
    expect(op, args.v_cache_dtype.empty(), "v_cache_dtype is '", printable(args.v_cache_dtype),
           "', expected '' with kv_cache_layout LATENT");
    expect(op, !args.head_sink, "head_sink must be absent with kv_cache_layout LATENT");
    expect(op, !args.q_norm_weight && !args.k_norm_weight,
           "q_norm_weight and k_norm_weight must be absent with kv_cache_layout LATENT");
    expect(op, args.kv_num_heads == 1, "kv_num_heads is ", args.kv_num_heads,
           ", expected 1 with kv_cache_layout LATENT");
  } else {
    expect(op, static_cast<bool>(args.key) || !args.value,
           "key is required when value is given (both absent: packed QKV)");
    expect(op, static_cast<bool>(args.value) || !args.key,
           "value is required when key is given (both absent: packed QKV)");
    expect(op, static_cast<bool>(args.value_cache), "value_cache is required with kv_cache_layout SEPARATE");
    expect(op, static_cast<bool>(args.key_cache_out) == static_cast<bool>(args.value_cache_out),
           "key_cache_out and value_cache_out must both be given or both be absent");
  }
  expect(op, static_cast<bool>(args.cumulative_sequence_length), "cumulative_sequence_length is required");
  expect(op, static_cast<bool>(args.past_seqlens), "past_seqlens is required");
  expect(op, static_cast<bool>(args.block_table), "block_table is required, also with slot_mapping");
}

void resolve_heads(std::string_view op, const PagedAttentionArgs& args, Problem& p) {
  const Matcher match(op);
  match.tensor("query", args.query).rank(2).types(kFloats);
  p.type = args.query.dtype;
  p.num_tokens = args.query.dim(0);
  p.num_heads = args.num_heads;
  p.num_kv_heads = args.kv_num_heads;
  p.group = p.num_heads / p.num_kv_heads;
  const bool packed = !args.key;
  const int64_t width = args.query.dim(1);
  const int64_t heads = packed ? p.num_heads + 2 * p.num_kv_heads : p.num_heads;
  expect(op, width > 0 && width % heads == 0, "query dimension 1 is ", width, ", expected a multiple of ",
         packed ? "num_heads + 2 * kv_num_heads = " : "num_heads = ", heads);
  p.head_dim = width / heads;
  expect(op, p.head_dim % 8 == 0, "head_size is ", p.head_dim, " (from query), expected a multiple of 8");
  p.v_head_dim = args.v_head_size == 0 ? p.head_dim : args.v_head_size;
  expect(op, p.v_head_dim >= 1 && p.v_head_dim <= p.head_dim, "v_head_size is ", args.v_head_size,
         ", expected 0 (head_size) or 1 to head_size = ", p.head_dim);
  expect(op, p.latent || p.v_head_dim == p.head_dim, "v_head_size is ", args.v_head_size,
         ", expected head_size = ", p.head_dim, " with kv_cache_layout SEPARATE");
  expect(op, p.v_head_dim == p.head_dim || args.scale != 0.0f, "scale is required when v_head_size = ", p.v_head_dim,
         " differs from head_size = ", p.head_dim);
  p.scale = args.scale != 0.0f ? args.scale : static_cast<float>(1.0 / std::sqrt(static_cast<double>(p.head_dim)));

  p.query = matrix_of(args.query);
  if (packed) {
    p.key = p.query;
    p.value = p.query;
    const int64_t step = p.query.column_stride;
    if (p.query.data != nullptr) {
      p.key.data += p.num_heads * p.head_dim * step;
      p.value.data += (p.num_heads + p.num_kv_heads) * p.head_dim * step;
    }
    return;
  }
  Dim tokens("num_tokens", p.num_tokens);
  Dim kv_width("kv_num_heads * head_size", p.num_kv_heads * p.head_dim);
  match.tensor("key", args.key).type(p.type).shape({tokens, kv_width});
  p.key = matrix_of(args.key);
  if (args.value) {
    match.tensor("value", args.value).type(p.type).shape({tokens, kv_width});
    p.value = matrix_of(args.value);
  }
}

// The logical type of a cache from its tensor and its dtype attribute.
Store store_of(std::string_view op, const TensorView& cache, std::string_view name, std::string_view attribute,
               std::string_view dtype) {
  Matcher(op)
      .tensor(name, cache)
      .types({DType::kF32, DType::kF16, DType::kBF16, DType::kI8, DType::kF8E4M3, DType::kU8});
  const bool known = dtype.empty() || dtype == "float32" || dtype == "float16" || dtype == "bfloat16" ||
                     dtype == "int8" || dtype == "float8e4m3fn" || dtype == "int4";
  expect(op, dtype != "float4e2m1", attribute,
         " is 'float4e2m1', which is reserved: expected '', float16, bfloat16, int8, float8e4m3fn or int4");
  expect(op, known, attribute, " is '", printable(dtype),
         "', expected '', float16, bfloat16, int8, float8e4m3fn or int4 (float32 on the CPU)");
  if (cache.dtype == DType::kU8) {
    expect(op, dtype == "int4", attribute, " is '", printable(dtype), "', expected int4 with a uint8 ", name);
    return Store::kI4;
  }
  expect(op, dtype.empty() || dtype == to_string(cache.dtype), attribute, " is '", printable(dtype), "', expected ",
         to_string(cache.dtype), ", the type of ", name, dtype == "int4" ? " (int4 needs a uint8 cache)" : "");
  switch (cache.dtype) {
    case DType::kF16: return Store::kF16;
    case DType::kBF16: return Store::kBF16;
    case DType::kI8: return Store::kI8;
    case DType::kF8E4M3: return Store::kF8;
    default: return Store::kF32;
  }
}

void check_scale(std::string_view op, const Problem& p, const TensorView& scale, std::string_view side,
                 std::string_view quant_type, Store store) {
  const bool quantized = store == Store::kI8 || store == Store::kF8 || store == Store::kI4;
  expect(op, quant_type == "NONE" || quant_type == "PER_TENSOR" || quant_type == "PER_CHANNEL", side,
         "_quant_type is '", printable(quant_type), "', expected NONE, PER_TENSOR or PER_CHANNEL");
  if (!quantized) {
    expect(op, quant_type == "NONE", side, "_quant_type is ", quant_type,
           ", expected NONE: the cache is not quantized");
    expect(op, !scale, side, "_scale must be absent with ", side, "_quant_type NONE");
    return;
  }
  expect(op, quant_type != "NONE", side,
         "_quant_type is NONE, expected PER_TENSOR or PER_CHANNEL: the cache is quantized");
  expect(op, static_cast<bool>(scale), side, "_scale is required with ", side, "_quant_type ", quant_type);
  Matcher(op).tensor(concat(side, "_scale"), scale).type(DType::kF32);
  const int64_t expected = quant_type == "PER_TENSOR" ? 1 : p.num_kv_heads * p.head_dim;
  expect(op, scale.num_elements() == expected, side, "_scale has shape ", shape_text(scale.dims()), ", expected ",
         expected, expected == 1 ? " element" : " elements (kv_num_heads * head_size)", " with ", side, "_quant_type ",
         quant_type);
}

CacheSide resolve_cache(std::string_view op, const Problem& p, const TensorView& cache, std::string_view name,
                        Store store, const TensorView& scale) {
  expect(op, cache.rank == 4, name, " has ", cache.rank, " dimensions, expected 4");
  const int64_t width = store == Store::kI4 ? p.head_dim / 2 : p.head_dim;
  expect(op, cache.dim(2) == p.num_kv_heads, name, " dimension 2 is ", cache.dim(2),
         ", expected kv_num_heads = ", p.num_kv_heads);
  expect(op, cache.dim(3) == width, name, " dimension 3 is ", cache.dim(3),
         store == Store::kI4 ? ", expected (head_size + 1) / 2 = " : ", expected head_size = ", width);
  Matcher(op).tensor(name, cache).contiguous();
  CacheSide side;
  side.data = static_cast<std::byte*>(cache.data);
  side.store = store;
  side.head_bytes = width * static_cast<int64_t>(size_of(cache.dtype));
  side.token_bytes = side.head_bytes * p.num_kv_heads;
  side.scale = scale ? &scale : nullptr;
  return side;
}

void resolve_caches(std::string_view op, const PagedAttentionArgs& args, Problem& p) {
  const Store k_store = store_of(op, args.key_cache, "key_cache", "k_cache_dtype", args.k_cache_dtype);
  expect(op, !p.latent || k_store != Store::kI4,
         "k_cache_dtype is 'int4', expected another type with kv_cache_layout LATENT");
  check_scale(op, p, args.k_scale, "k", args.k_quant_type, k_store);
  p.k_cache = resolve_cache(op, p, args.key_cache, "key_cache", k_store, args.k_scale);
  p.num_pages = args.key_cache.dim(0);
  p.page_size = args.key_cache.dim(1);
  expect(op, is_power_of_two(p.page_size) && p.page_size >= 16, "block_size (key_cache dimension 1) is ", p.page_size,
         ", expected a power of two of at least 16");
  if (p.latent) {
    p.v_cache = p.k_cache;
    return;
  }
  const Store v_store = store_of(op, args.value_cache, "value_cache", "v_cache_dtype", args.v_cache_dtype);
  check_scale(op, p, args.v_scale, "v", args.v_quant_type, v_store);
  p.v_cache = resolve_cache(op, p, args.value_cache, "value_cache", v_store, args.v_scale);
  for (int axis = 0; axis < 2; ++axis) {
    expect(op, args.value_cache.dim(axis) == args.key_cache.dim(axis), "value_cache dimension ", axis, " is ",
           args.value_cache.dim(axis), ", expected ", args.key_cache.dim(axis), " as in key_cache");
  }
}

void resolve_indices(std::string_view op, const PagedAttentionArgs& args, Problem& p) {
  const Matcher match(op);
  match.tensor("cumulative_sequence_length", args.cumulative_sequence_length).rank(1).type(DType::kI32);
  p.num_seqs = args.cumulative_sequence_length.dim(0) - 1;
  expect(op, p.num_seqs >= 1, "cumulative_sequence_length has ", p.num_seqs + 1,
         " elements, expected batch_size + 1, at least 2");
  Dim seqs("batch_size", p.num_seqs);
  Dim tokens("num_tokens", p.num_tokens);
  match.tensor("past_seqlens", args.past_seqlens).type(DType::kI32).shape({seqs});
  Dim columns("max_blocks_per_sequence");
  match.tensor("block_table", args.block_table).type(DType::kI32).shape({seqs, columns});
  p.num_columns = columns;
  p.cu = matrix_of(args.cumulative_sequence_length);
  p.past = matrix_of(args.past_seqlens);
  p.table = matrix_of(args.block_table);
  if (args.slot_mapping) {
    match.tensor("slot_mapping", args.slot_mapping).type(DType::kI32).shape({tokens});
    p.slots = matrix_of(args.slot_mapping);
  }
}

void resolve_rotary(std::string_view op, const PagedAttentionArgs& args, Problem& p) {
  expect(op, static_cast<bool>(args.cos_cache) || !args.sin_cache, "cos_cache is required when sin_cache is given");
  expect(op, static_cast<bool>(args.sin_cache) || !args.cos_cache, "sin_cache is required when cos_cache is given");
  expect(op, !args.do_rotary || args.cos_cache, "cos_cache and sin_cache are required with do_rotary = 1");
  if (!args.cos_cache) {
    return;
  }
  const Matcher match(op);
  Dim max_pos("max_pos");
  Dim half("rotary_dim / 2");
  match.tensor("cos_cache", args.cos_cache).type(p.type).shape({max_pos, half});
  match.tensor("sin_cache", args.sin_cache).type(p.type).shape({max_pos, half});
  expect(op, half > 0 && half % 8 == 0 && half <= p.head_dim / 2, "cos_cache dimension 1 (rotary_dim / 2) is ",
         half.value(), ", expected a multiple of 8 of at most head_size / 2 = ", p.head_dim / 2);
  p.rotary_dim = 2 * half;
  expect(op, args.rotary_offset + p.rotary_dim <= p.head_dim, "rotary_offset + rotary_dim is ",
         args.rotary_offset + p.rotary_dim, ", expected at most head_size = ", p.head_dim);
  expect(op, !args.do_rotary || max_pos > 0, "cos_cache has no rows, expected at least 1");
  p.max_pos = max_pos;
  p.rotary = args.do_rotary;
  p.rotary_interleaved = args.rotary_interleaved;
  p.rotary_offset = args.rotary_offset;
  p.cos = matrix_of(args.cos_cache);
  p.sin = matrix_of(args.sin_cache);
}

void resolve_norms_and_sink(std::string_view op, const PagedAttentionArgs& args, Problem& p) {
  const Matcher match(op);
  Dim head_size("head_size", p.head_dim);
  expect(op, static_cast<bool>(args.q_norm_weight) || !args.k_norm_weight,
         "q_norm_weight is required when k_norm_weight is given");
  expect(op, static_cast<bool>(args.k_norm_weight) || !args.q_norm_weight,
         "k_norm_weight is required when q_norm_weight is given");
  if (args.q_norm_weight) {
    match.tensor("q_norm_weight", args.q_norm_weight).type(p.type).shape({head_size});
    match.tensor("k_norm_weight", args.k_norm_weight).type(p.type).shape({head_size});
    p.norm = true;
    p.epsilon = args.qk_norm_epsilon;
    p.q_norm_weight = row_of(args.q_norm_weight);
    p.k_norm_weight = row_of(args.k_norm_weight);
  }
  if (args.head_sink) {
    Dim heads("num_heads", p.num_heads);
    match.tensor("head_sink", args.head_sink).type(p.type).shape({heads});
    p.sink = row_of(args.head_sink);
  }
}

void check_metadata(std::string_view op, const PagedAttentionArgs& args, const Problem& p, bool shapes_only) {
  const TensorView& view = args.attention_metadata;
  if (!view) {
    return;
  }
  Matcher(op).tensor("attention_metadata", view).rank(1).type(DType::kI32);
  expect(op, view.dim(0) == 2 || view.dim(0) == 3, "attention_metadata has ", view.dim(0),
         " elements, expected 2 or 3");
  if (shapes_only) {
    return;
  }
  int64_t bounds[3] = {0, 0, 0};
  for (int i = 0; i < view.dim(0); ++i) {
    bounds[i] = view.as<int32_t>()[i * view.stride(0)];
    expect(op, bounds[i] >= 0, "attention_metadata[", i, "] is ", bounds[i], ", expected 0 (unknown) or more");
  }
  const int64_t limit = p.num_columns * p.page_size;
  const int64_t upper = bounds[1] == 0 ? limit : std::min(bounds[1], limit);
  expect(op, bounds[2] <= upper, "attention_metadata[2] (max_kv_len_lower_bound) is ", bounds[2], ", expected at most ",
         upper, ", the upper bound");
}

void check_outputs(std::string_view op, const PagedAttentionArgs& args, Problem& p, bool shapes_only) {
  const Matcher match(op);
  Dim tokens("num_tokens", p.num_tokens);
  Dim width("num_heads * v_head_size", p.num_heads * p.v_head_dim);
  if (shapes_only && !args.output) {
    return;
  }
  match.tensor("output", args.output).type(p.type).shape({tokens, width}).inner_contiguous();
  p.output = static_cast<std::byte*>(args.output.data);
  p.output_stride = args.output.stride(0) * static_cast<int64_t>(size_of(p.type));
  const auto check_alias = [op](const TensorView& out, const TensorView& in, std::string_view name) {
    expect(op,
           !out || (out.data == in.data && out.dtype == in.dtype && out.rank == in.rank && out.shape == in.shape &&
                    out.is_contiguous()),
           name, "_out must be ", name, " itself (same memory, type and shape)");
  };
  check_alias(args.key_cache_out, args.key_cache, "key_cache");
  check_alias(args.value_cache_out, args.value_cache, "value_cache");
}

void check_devices(std::string_view op, const PagedAttentionArgs& args, bool runs_on_devices) {
  const struct {
    std::string_view name;
    const TensorView& view;
  } tensors[] = {{"output", args.output},
                 {"query", args.query},
                 {"key", args.key},
                 {"value", args.value},
                 {"key_cache", args.key_cache},
                 {"value_cache", args.value_cache},
                 {"cumulative_sequence_length", args.cumulative_sequence_length},
                 {"past_seqlens", args.past_seqlens},
                 {"block_table", args.block_table},
                 {"cos_cache", args.cos_cache},
                 {"sin_cache", args.sin_cache},
                 {"slot_mapping", args.slot_mapping},
                 {"head_sink", args.head_sink},
                 {"q_norm_weight", args.q_norm_weight},
                 {"k_norm_weight", args.k_norm_weight},
                 {"k_scale", args.k_scale},
                 {"v_scale", args.v_scale},
                 {"attention_metadata", args.attention_metadata}};
  for (const auto& tensor : tensors) {
    if (runs_on_devices && args.query.device.type != DeviceType::kCpu) {
      expect(op, !tensor.view || tensor.view.device == args.query.device, tensor.name,
             " is on another device than query");
      continue;
    }
    expect(op, !tensor.view || tensor.view.device.type == DeviceType::kCpu, tensor.name,
           " is on another device, expected the CPU");
  }
}

}  // namespace

Problem check(const PagedAttentionArgs& args, bool shapes_only, std::string_view op, bool runs_on_devices) {
  check_attributes(op, args);
  Problem p;
  p.latent = args.kv_cache_layout == "LATENT";
  check_presence(op, args, p.latent);
  check_devices(op, args, runs_on_devices);
  shapes_only |= args.query.device.type != DeviceType::kCpu;
  resolve_heads(op, args, p);
  resolve_caches(op, args, p);
  resolve_indices(op, args, p);
  resolve_rotary(op, args, p);
  resolve_norms_and_sink(op, args, p);
  check_metadata(op, args, p, shapes_only);
  check_outputs(op, args, p, shapes_only);
  p.is_causal = args.is_causal;
  p.window = args.local_window_size > 0 ? args.local_window_size : 0;
  p.softcap = args.softcap;
  return p;
}

void check_page_ids([[maybe_unused]] const PagedAttentionArgs& args, [[maybe_unused]] const Problem& p) {
#ifndef NDEBUG
  for (int64_t seq_idx = 0; seq_idx < p.num_seqs; ++seq_idx) {
    for (int64_t column = 0; column < p.num_columns; ++column) {
      const int32_t page =
          args.block_table.as<int32_t>()[seq_idx * args.block_table.stride(0) + column * args.block_table.stride(1)];
      expect("paged_attention", page >= -1 && page < p.num_pages, "block_table[", seq_idx, "][", column, "] is ", page,
             ", expected -1 or a page below ", p.num_pages);
    }
  }
#endif
}

}  // namespace shoal::paged
