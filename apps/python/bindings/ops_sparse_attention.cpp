// Attention over selected positions for shoal.ops.
#include "apps/python/bindings/ops_call.h"
#include "shoal/ops/dynamic_sparse_attention/dynamic_sparse_attention.h"
#include "shoal/ops/sparse_paged_attention/sparse_paged_attention.h"

namespace shoal::python {
namespace {

using Paged = SparsePagedAttentionArgs;
using Dynamic = DynamicSparseAttentionArgs;

void paged_fields(Paged& a, Fields& f) {
  f.input("query", a.query);
  f.input("key", a.key);
  f.input("value", a.value);
  f.input("key_cache", a.key_cache, Layout::kInPlace);
  f.input("value_cache", a.value_cache, Layout::kInPlace);
  f.input("cumulative_sequence_length", a.cumulative_sequence_length);
  f.input("past_seqlens", a.past_seqlens);
  f.input("block_table", a.block_table);
  f.input("slot_mapping", a.slot_mapping);
  f.input("selected_indices", a.selected_indices);
  f.input("selected_counts", a.selected_counts);
  f.input("auxiliary_key", a.auxiliary_key);
  f.input("auxiliary_value", a.auxiliary_value);
  f.input("auxiliary_lengths", a.auxiliary_lengths);
  f.input("cos_cache", a.cos_cache);
  f.input("sin_cache", a.sin_cache);
  f.input("head_sink", a.head_sink);
  f.input("q_norm_weight", a.q_norm_weight);
  f.input("k_norm_weight", a.k_norm_weight);
  f.input("k_scale", a.k_scale);
  f.input("v_scale", a.v_scale);
  f.input("attention_metadata", a.attention_metadata, Layout::kHost);
  f.attribute("num_heads", a.num_heads);
  f.attribute("kv_num_heads", a.kv_num_heads);
  f.attribute("scale", a.scale);
  f.attribute("softcap", a.softcap);
  f.attribute("local_window_size", a.local_window_size);
  f.attribute("is_causal", a.is_causal);
  f.attribute("attention_mode", a.attention_mode);
  f.attribute("selected_kv_source", a.selected_kv_source);
  f.attribute("auxiliary_cache_layout", a.auxiliary_cache_layout);
  f.attribute("auxiliary_kv_shared", a.auxiliary_kv_shared);
  f.attribute("do_rotary", a.do_rotary);
  f.attribute("rotary_interleaved", a.rotary_interleaved);
  f.attribute("rotary_offset", a.rotary_offset);
  f.attribute("qk_norm_epsilon", a.qk_norm_epsilon);
  f.attribute("k_quant_type", a.k_quant_type);
  f.attribute("v_quant_type", a.v_quant_type);
}

std::vector<OutputSpec> paged_specs(Paged& a) {
  const SparsePagedAttentionShapes shapes = sparse_paged_attention_shapes(a);
  return {shapes.output, shapes.key_cache_out, shapes.value_cache_out};
}

const OperatorTraits<Paged> kSparsePagedAttention{
    .name = "sparse_paged_attention",
    .fields = paged_fields,
    .specs = paged_specs,
    .workspace = sparse_paged_attention_workspace_bytes,
    .run = sparse_paged_attention,
    .outputs = {{{"output"}, &Paged::output},
                {{"key_cache_out", "key_cache"}, &Paged::key_cache_out},
                {{"value_cache_out", "value_cache"}, &Paged::value_cache_out}},
};

void dynamic_fields(Dynamic& a, Fields& f) {
  f.input("query", a.query);
  f.input("key", a.key);
  f.input("value", a.value);
  f.input("past_key", a.past_key, Layout::kInPlace);
  f.input("past_value", a.past_value, Layout::kInPlace);
  f.input("auxiliary_key", a.auxiliary_key);
  f.input("auxiliary_value", a.auxiliary_value);
  f.input("selected_indices", a.selected_indices);
  f.input("selected_counts", a.selected_counts);
  f.input("seqlens_k", a.seqlens_k);
  f.input("total_sequence_length", a.total_sequence_length, Layout::kHost);
  f.input("cos_cache", a.cos_cache);
  f.input("sin_cache", a.sin_cache);
  f.input("position_ids", a.position_ids);
  f.input("q_norm_weight", a.q_norm_weight);
  f.input("k_norm_weight", a.k_norm_weight);
  f.input("head_sink", a.head_sink);
  f.input("committed_length", a.committed_length);
  f.input("key_scale", a.key_scale);
  f.input("value_scale", a.value_scale);
  f.attribute("num_heads", a.num_heads);
  f.attribute("kv_num_heads", a.kv_num_heads);
  f.attribute("scale", a.scale);
  f.attribute("is_causal", a.is_causal);
  f.attribute("attention_mode", a.attention_mode);
  f.attribute("selected_kv_source", a.selected_kv_source);
  f.attribute("local_window_size", a.local_window_size);
  f.attribute("auxiliary_kv_shared", a.auxiliary_kv_shared);
  f.attribute("smooth_softmax", a.smooth_softmax);
  f.attribute("output_bf16", a.output_bf16);
  f.attribute("do_rotary", a.do_rotary);
  f.attribute("rotary_interleaved", a.rotary_interleaved);
  f.attribute("rotary_offset", a.rotary_offset);
  f.attribute("qk_norm_epsilon", a.qk_norm_epsilon);
}

std::vector<OutputSpec> dynamic_specs(Dynamic& a) {
  const DynamicSparseAttentionShapes shapes = dynamic_sparse_attention_shapes(a);
  return {shapes.output, shapes.present_key, shapes.present_value, shapes.validation_status};
}

const OperatorTraits<Dynamic> kDynamicSparseAttention{
    .name = "dynamic_sparse_attention",
    .fields = dynamic_fields,
    .specs = dynamic_specs,
    .workspace = dynamic_sparse_attention_workspace_bytes,
    .run = dynamic_sparse_attention,
    .outputs = {{{"output"}, &Dynamic::output},
                {{"present_key", "past_key"}, &Dynamic::present_key},
                {{"present_value", "past_value"}, &Dynamic::present_value},
                {{"validation_status"}, &Dynamic::validation_status}},
};

}  // namespace

void add_sparse_attention() {
  add_operator(kSparsePagedAttention);
  add_operator(kDynamicSparseAttention);
}

}  // namespace shoal::python
