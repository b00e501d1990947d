// Every call that paged_attention must refuse, with a part of its message: one change of a sound call each.
#pragma once

#include <functional>
#include <limits>

#include "shoal/ops/paged_attention/paged_attention_cases.h"

namespace shoal::paged_cases {

struct Rejection {
  std::string expected;  // part of the message
  std::function<void(Step&, PagedAttentionArgs&)> change;
  Case c = {.head_dim = 64, .sink = true, .norm = true, .rotary = Rotary::kHalf};
};

inline Case latent_case() {
  return {.num_heads = 4, .num_kv_heads = 1, .head_dim = 64, .v_head_dim = 32, .scale = 0.2f};
}

inline Case quantized_case() {
  return {.k_cache = DType::kI8, .v_cache = DType::kU8, .k_quant = "PER_TENSOR", .v_quant = "PER_CHANNEL"};
}

inline TensorView shaped(const TensorView& view, std::initializer_list<int64_t> shape) {
  return TensorView(view.data, view.dtype, shape);
}

inline TensorView typed(const TensorView& view, DType type) { return TensorView(view.data, type, view.dims()); }

inline std::vector<Rejection> rejections() {
  using A = PagedAttentionArgs;
  static int32_t metadata[4] = {1, 0, 0, 0};
  const auto with_metadata = [](A& a, std::vector<int32_t> values) {
    std::copy(values.begin(), values.end(), metadata);
    a.attention_metadata = TensorView(metadata, DType::kI32, {static_cast<int64_t>(values.size())});
  };
  return {
      {"num_heads is 0", [](Step&, A& a) { a.num_heads = 0; }},
      {"kv_num_heads is -1", [](Step&, A& a) { a.kv_num_heads = -1; }},
      {"num_heads is 4, expected a multiple of kv_num_heads = 3", [](Step&, A& a) { a.kv_num_heads = 3; }},
      {"kv_cache_layout is 'PAGED', expected SEPARATE or LATENT", [](Step&, A& a) { a.kv_cache_layout = "PAGED"; }},
      {"scale is", [](Step&, A& a) { a.scale = std::numeric_limits<float>::quiet_NaN(); }},
      {"softcap is", [](Step&, A& a) { a.softcap = -1.0f; }},
      {"qk_norm_epsilon is 0", [](Step&, A& a) { a.qk_norm_epsilon = 0.0f; }},
      {"qk_norm_epsilon is inf", [](Step&, A& a) { a.qk_norm_epsilon = std::numeric_limits<float>::infinity(); }},
      {"rotary_offset is -8", [](Step&, A& a) { a.rotary_offset = -8; }},
      {"rotary_offset is 4, expected a multiple of 8", [](Step&, A& a) { a.rotary_offset = 4; }},
      {"query is required", [](Step&, A& a) { a.query = {}; }},
      {"query has 1 dimensions, expected 2", [](Step&, A& a) { a.query = shaped(a.query, {256}); }},
      {"query has type int8", [](Step&, A& a) { a.query = typed(a.query, DType::kI8); }},
      {"query dimension 1 is 255, expected a multiple of num_heads = 4",
       [](Step&, A& a) {
         a.query = shaped(a.query, {1, 255});
       }},
      {"head_size is 60 (from query), expected a multiple of 8",
       [](Step&, A& a) {
         a.query = shaped(a.query, {1, 240});
       }},
      {"key is required when value is given", [](Step&, A& a) { a.key = {}; }},
      {"value is required when key is given", [](Step&, A& a) { a.value = {}; }},
      {"key has shape [1, 127]",
       [](Step&, A& a) {
         a.key = shaped(a.key, {1, 127});
       }},
      {"key has type float16, expected float32", [](Step&, A& a) { a.key = typed(a.key, DType::kF16); }},
      {"value has shape [2, 64]",
       [](Step&, A& a) {
         a.value = shaped(a.value, {2, 64});
       }},
      {"key_cache is required", [](Step&, A& a) { a.key_cache = {}; }},
      {"value_cache is required", [](Step&, A& a) { a.value_cache = {}; }},
      {"key_cache has 3 dimensions, expected 4",
       [](Step&, A& a) {
         a.key_cache = shaped(a.key_cache, {1, 32, 128});
       }},
      {"key_cache dimension 2 is 1, expected kv_num_heads = 2",
       [](Step&, A& a) {
         a.key_cache = shaped(a.key_cache, {1, 32, 1, 64});
       }},
      {"key_cache dimension 3 is 32, expected head_size = 64",
       [](Step&, A& a) {
         a.key_cache = shaped(a.key_cache, {1, 32, 2, 32});
       }},
      {"block_size (key_cache dimension 1) is 24",
       [](Step&, A& a) {
         a.key_cache = shaped(a.key_cache, {1, 24, 2, 64});
       }},
      {"block_size (key_cache dimension 1) is 8",
       [](Step&, A& a) {
         a.key_cache = shaped(a.key_cache, {1, 8, 2, 64});
       }},
      {"value_cache dimension 1 is 16, expected 32 as in key_cache",
       [](Step&, A& a) {
         a.value_cache = shaped(a.value_cache, {a.value_cache.dim(0), 16, 2, 64});
       }},
      {"value_cache dimension 0 is 1",
       [](Step&, A& a) {
         a.value_cache = shaped(a.value_cache, {1, 32, 2, 64});
       }},
      {"key_cache must be contiguous", [](Step&, A& a) { a.key_cache.strides[1] *= 2; }},
      {"value_cache must be contiguous", [](Step&, A& a) { a.value_cache.strides[0] += 1; }},
      {"key_cache has type int32", [](Step&, A& a) { a.key_cache = typed(a.key_cache, DType::kI32); }},
      {"cumulative_sequence_length is required", [](Step&, A& a) { a.cumulative_sequence_length = {}; }},
      {"cumulative_sequence_length has 1 elements",
       [](Step&, A& a) { a.cumulative_sequence_length = shaped(a.cumulative_sequence_length, {1}); }},
      {"cumulative_sequence_length has type int64",
       [](Step&, A& a) { a.cumulative_sequence_length = typed(a.cumulative_sequence_length, DType::kI64); }},
      {"past_seqlens is required", [](Step&, A& a) { a.past_seqlens = {}; }},
      {"past_seqlens has shape [2], expected [batch_size = 1]",
       [](Step&, A& a) { a.past_seqlens = shaped(a.past_seqlens, {2}); }},
      {"block_table is required", [](Step&, A& a) { a.block_table = {}; }},
      {"block_table has shape [2, 1]",
       [](Step&, A& a) {
         a.block_table = shaped(a.block_table, {2, 1});
       }},
      {"slot_mapping has shape [3], expected [num_tokens = 1]",
       [](Step&, A& a) { a.slot_mapping = shaped(a.past_seqlens, {3}); }},
      {"sin_cache is required when cos_cache", [](Step&, A& a) { a.sin_cache = {}; }},
      {"cos_cache is required when sin_cache", [](Step&, A& a) { a.cos_cache = {}; }},
      {"cos_cache and sin_cache are required with do_rotary", [](Step&, A& a) { a.cos_cache = a.sin_cache = {}; }},
      {"sin_cache has shape",
       [](Step&, A& a) {
         a.sin_cache = shaped(a.sin_cache, {2, 16});
       }},
      {"cos_cache dimension 1 (rotary_dim / 2) is 12",
       [](Step&, A& a) {
         a.cos_cache = shaped(a.cos_cache, {2, 12});
         a.sin_cache = a.cos_cache;
       }},
      {"cos_cache dimension 1 (rotary_dim / 2) is 40",
       [](Step&, A& a) {
         a.cos_cache = shaped(a.cos_cache, {2, 40});
         a.sin_cache = a.cos_cache;
       }},
      {"rotary_offset + rotary_dim is 72, expected at most head_size = 64", [](Step&, A& a) { a.rotary_offset = 8; }},
      {"q_norm_weight is required when k_norm_weight", [](Step&, A& a) { a.q_norm_weight = {}; }},
      {"k_norm_weight is required when q_norm_weight", [](Step&, A& a) { a.k_norm_weight = {}; }},
      {"q_norm_weight has shape [32]", [](Step&, A& a) { a.q_norm_weight = shaped(a.q_norm_weight, {32}); }},
      {"head_sink has shape [3], expected [num_heads = 4]",
       [](Step&, A& a) { a.head_sink = shaped(a.head_sink, {3}); }},
      {"v_head_size is 65", [](Step&, A& a) { a.v_head_size = 65; }},
      {"v_head_size is -1", [](Step&, A& a) { a.v_head_size = -1; }},
      {"v_head_size is 32, expected head_size = 64 with kv_cache_layout SEPARATE",
       [](Step&, A& a) { a.v_head_size = 32; }},
      {"k_quant_type is 'PER_TOKEN'", [](Step&, A& a) { a.k_quant_type = "PER_TOKEN"; }},
      {"k_quant_type is PER_TENSOR, expected NONE", [](Step&, A& a) { a.k_quant_type = "PER_TENSOR"; }},
      {"v_scale must be absent", [](Step& s, A& a) { a.v_scale = s.v_scale; }},
      {"k_cache_dtype is 'uint4'", [](Step&, A& a) { a.k_cache_dtype = "uint4"; }},
      {"v_cache_dtype is 'float4e2m1', which is reserved", [](Step&, A& a) { a.v_cache_dtype = "float4e2m1"; }},
      {"k_cache_dtype is 'int8', expected float16", [](Step&, A& a) { a.k_cache_dtype = "int8"; }},
      {"k_cache_dtype is 'int4'", [](Step&, A& a) { a.k_cache_dtype = "int4"; }},
      {"k_quant_type is NONE", [](Step&, A& a) { a.k_quant_type = "NONE"; }, quantized_case()},
      {"k_scale is required", [](Step&, A& a) { a.k_scale = {}; }, quantized_case()},
      {"v_scale is required", [](Step&, A& a) { a.v_scale = {}; }, quantized_case()},
      {"k_scale has shape [2], expected 1 element", [](Step&, A& a) { a.k_scale = shaped(a.k_scale, {2}); },
       quantized_case()},
      {"v_scale has shape [1], expected 128 elements", [](Step&, A& a) { a.v_scale = shaped(a.v_scale, {1}); },
       quantized_case()},
      {"k_scale has type float16", [](Step&, A& a) { a.k_scale = typed(a.k_scale, DType::kF16); }, quantized_case()},
      {"v_cache_dtype is '', expected int4 with a uint8 value_cache", [](Step&, A& a) { a.v_cache_dtype = ""; },
       quantized_case()},
      {"value_cache dimension 3 is 64, expected (head_size + 1) / 2 = 32",
       [](Step&, A& a) {
         a.value_cache = shaped(a.value_cache, {a.value_cache.dim(0), 32, 2, 64});
       },
       quantized_case()},
      {"key is required with kv_cache_layout LATENT", [](Step&, A& a) { a.key = {}; }, latent_case()},
      {"value must be absent", [](Step&, A& a) { a.value = a.key; }, latent_case()},
      {"value_cache must be absent", [](Step&, A& a) { a.value_cache = a.key_cache; }, latent_case()},
      {"value_cache_out must be absent", [](Step&, A& a) { a.value_cache_out = a.key_cache; }, latent_case()},
      {"v_scale must be absent", [](Step& s, A& a) { a.v_scale = s.v_scale; }, latent_case()},
      {"v_quant_type is 'PER_TENSOR', expected NONE", [](Step&, A& a) { a.v_quant_type = "PER_TENSOR"; },
       latent_case()},
      {"v_cache_dtype is 'int8', expected ''", [](Step&, A& a) { a.v_cache_dtype = "int8"; }, latent_case()},
      {"head_sink must be absent", [](Step&, A& a) { a.head_sink = a.key; }, latent_case()},
      {"q_norm_weight and k_norm_weight must be absent", [](Step&, A& a) { a.q_norm_weight = a.k_norm_weight = a.key; },
       latent_case()},
      {"kv_num_heads is 2, expected 1", [](Step&, A& a) { a.kv_num_heads = 2; }, latent_case()},
      {"scale is required when v_head_size = 32 differs from head_size = 64", [](Step&, A& a) { a.scale = 0.0f; },
       latent_case()},
      {"k_cache_dtype is 'int4', expected another type",
       [](Step&, A& a) {
         a.key_cache = typed(a.key_cache, DType::kU8);
         a.k_cache_dtype = "int4";
       },
       latent_case()},
      {"attention_metadata has 1 elements, expected 2 or 3", [=](Step&, A& a) { with_metadata(a, {1}); }},
      {"attention_metadata has 4 elements, expected 2 or 3",
       [=](Step&, A& a) {
         with_metadata(a, {1, 2, 3, 4});
       }},
      {"attention_metadata[2] is -1",
       [=](Step&, A& a) {
         with_metadata(a, {1, 256, -1});
       }},
      {"attention_metadata[0] is -5",
       [=](Step&, A& a) {
         with_metadata(a, {-5, 256});
       }},
      {"attention_metadata[2] (max_kv_len_lower_bound) is 65, expected at most 64",
       [=](Step&, A& a) {
         with_metadata(a, {1, 64, 65});
       }},
      {"attention_metadata[2] (max_kv_len_lower_bound) is 257",
       [=](Step&, A& a) {
         with_metadata(a, {1, 0, 257});
       }},
      {"attention_metadata has type float32",
       [=](Step&, A& a) {
         with_metadata(a, {1, 0});
         a.attention_metadata.dtype = DType::kF32;
       }},
      {"output is required", [](Step&, A& a) { a.output = {}; }},
      {"output has shape [1, 128]",
       [](Step&, A& a) {
         a.output = shaped(a.output, {1, 128});
       }},
      {"output has type float16, expected float32", [](Step&, A& a) { a.output = typed(a.output, DType::kF16); }},
      {"output must be contiguous in its last dimension", [](Step&, A& a) { a.output.strides[1] = 2; }},
      {"key_cache_out must be key_cache itself",
       [](Step&, A& a) {
         a.key_cache_out = a.value_cache;
         a.value_cache_out = a.value_cache;
       }},
      {"value_cache_out must be value_cache itself",
       [](Step&, A& a) {
         a.key_cache_out = a.key_cache;
         a.value_cache_out = a.key_cache;
       }},
      {"key_cache_out and value_cache_out must both", [](Step&, A& a) { a.key_cache_out = a.key_cache; }},
      {"past_seqlens is on another device", [](Step&, A& a) { a.past_seqlens.device.type = DeviceType::kCuda; }},
  };
}

}  // namespace shoal::paged_cases
