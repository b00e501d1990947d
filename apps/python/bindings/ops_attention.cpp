// Attention for shoal.ops.
#include "apps/python/bindings/ops_call.h"
#include "shoal/ops/paged_attention/paged_attention.h"

namespace shoal::python {
namespace {

using Args = PagedAttentionArgs;

void fields(Args& a, Fields& f) {
  f.input("query", a.query);
  f.input("key", a.key);
  f.input("value", a.value);
  f.input("key_cache", a.key_cache, Layout::kInPlace);
  f.input("value_cache", a.value_cache, Layout::kInPlace);
  f.input("cumulative_sequence_length", a.cumulative_sequence_length);
  f.input("past_seqlens", a.past_seqlens);
  f.input("block_table", a.block_table);
  f.input("cos_cache", a.cos_cache);
  f.input("sin_cache", a.sin_cache);
  f.input("slot_mapping", a.slot_mapping);
  f.input("head_sink", a.head_sink);
  f.input("q_norm_weight", a.q_norm_weight);
  f.input("k_norm_weight", a.k_norm_weight);
  f.input("k_scale", a.k_scale, Layout::kContiguous);
  f.input("v_scale", a.v_scale, Layout::kContiguous);
  f.input("attention_metadata", a.attention_metadata, Layout::kHost);
  f.attribute("num_heads", a.num_heads);
  f.attribute("kv_num_heads", a.kv_num_heads);
  f.attribute("scale", a.scale);
  f.attribute("softcap", a.softcap);
  f.attribute("local_window_size", a.local_window_size);
  f.attribute("is_causal", a.is_causal);
  f.attribute("do_rotary", a.do_rotary);
  f.attribute("rotary_interleaved", a.rotary_interleaved);
  f.attribute("rotary_offset", a.rotary_offset);
  f.attribute("qk_norm_epsilon", a.qk_norm_epsilon);
  f.attribute("k_quant_type", a.k_quant_type);
  f.attribute("v_quant_type", a.v_quant_type);
  f.attribute("k_cache_dtype", a.k_cache_dtype);
  f.attribute("v_cache_dtype", a.v_cache_dtype);
  f.attribute("kv_cache_layout", a.kv_cache_layout);
  f.attribute("v_head_size", a.v_head_size);
}

OutputSpec like(const TensorView& view) {
  if (!view) {
    return {.present = false};
  }
  return {view.dtype, {view.dims().begin(), view.dims().end()}};
}

std::vector<OutputSpec> specs(Args& a) {
  paged_attention_workspace_bytes(a, 1);  // checks
  const int64_t heads = a.num_heads + (a.key ? 0 : 2 * a.kv_num_heads);
  const int64_t v_head_size = a.v_head_size == 0 ? a.query.dim(1) / heads : a.v_head_size;
  return {{a.query.dtype, {a.query.dim(0), a.num_heads * v_head_size}}, like(a.key_cache), like(a.value_cache)};
}

const OperatorTraits<Args> kPagedAttention{
    .name = "paged_attention",
    .fields = fields,
    .specs = specs,
    .workspace = paged_attention_workspace_bytes,
    .run = paged_attention,
    .outputs = {{{"output"}, &Args::output},
                {{"key_cache_out", "key_cache"}, &Args::key_cache_out},
                {{"value_cache_out", "value_cache"}, &Args::value_cache_out}},
};

}  // namespace

void add_attention() { add_operator(kPagedAttention); }

}  // namespace shoal::python
