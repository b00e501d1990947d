// Indexers of sparse attention for shoal.ops.
#include "apps/python/bindings/ops_call.h"
#include "shoal/ops/packed_sparse_attention_indexer/packed_sparse_attention_indexer.h"
#include "shoal/ops/sparse_attention_indexer/sparse_attention_indexer.h"

namespace shoal::python {
namespace {

using Packed = PackedSparseAttentionIndexerArgs;
using Dense = SparseAttentionIndexerArgs;

const OperatorTraits<Packed> kPacked{
    .name = "packed_sparse_attention_indexer",
    .fields =
        [](Packed& a, Fields& f) {
          f.input("query", a.query);
          f.input("key", a.key);
          f.input("query_norm_weight", a.query_norm_weight);
          f.input("key_norm_weight", a.key_norm_weight);
          f.input("cos_cache", a.cos_cache);
          f.input("sin_cache", a.sin_cache);
          f.input("cumulative_sequence_lengths", a.cumulative_sequence_lengths);
          f.input("past_sequence_lengths", a.past_sequence_lengths);
          f.input("gate", a.gate);
          f.input("position_bias", a.position_bias);
          f.input("head_weights", a.head_weights);
          f.input("position_ids", a.position_ids);
          f.input("past_key_state", a.past_key_state);
          f.input("past_kv_buffer", a.past_kv_buffer);
          f.input("past_gate_buffer", a.past_gate_buffer);
          f.input("past_state_lengths", a.past_state_lengths);
          f.input("state_update_capture_count", a.state_update_capture_count);
          f.input("state_update_active", a.state_update_active, Layout::kHost);
          f.input("indexshare_mode", a.indexshare_mode, Layout::kHost);
          f.input("merged_indices", a.merged_indices);
          f.input("merged_counts", a.merged_counts);
          f.input("merged_status", a.merged_status);
          f.attribute("policy_mode", a.policy_mode);
          f.attribute("compress_ratio", a.compress_ratio);
          f.attribute("state_capacity", a.state_capacity);
          f.attribute("token_budget", a.token_budget);
          f.attribute("index_topk", a.index_topk);
          f.attribute("epsilon", a.epsilon);
          f.attribute("scale", a.scale);
          f.attribute("head_weight_scale", a.head_weight_scale);
          f.attribute("state_update_capacity", a.state_update_capacity);
          f.attribute("max_output_entries", a.max_output_entries);
          f.attribute("indexshare_state_policy", a.indexshare_state_policy);
        },
    .specs = [](Packed& a) -> std::vector<OutputSpec> {
      const PackedSparseAttentionIndexerShapes shapes = packed_sparse_attention_indexer_shapes(a);
      return {shapes.selected_indices,  shapes.selected_counts,     shapes.present_key_state,
              shapes.present_kv_buffer, shapes.present_gate_buffer, shapes.present_state_lengths,
              shapes.state_update,      shapes.indexshare_status,   shapes.state_status};
    },
    .workspace = packed_sparse_attention_indexer_workspace_bytes,
    .run = packed_sparse_attention_indexer,
    .outputs = {{{"selected_indices", "merged_indices"}, &Packed::selected_indices},
                {{"selected_counts", "merged_counts"}, &Packed::selected_counts},
                {{"present_key_state", "past_key_state"}, &Packed::present_key_state},
                {{"present_kv_buffer", "past_kv_buffer"}, &Packed::present_kv_buffer},
                {{"present_gate_buffer", "past_gate_buffer"}, &Packed::present_gate_buffer},
                {{"present_state_lengths", "past_state_lengths"}, &Packed::present_state_lengths},
                {{"state_update"}, &Packed::state_update},
                {{"indexshare_status", "merged_status"}, &Packed::indexshare_status},
                {{"state_status"}, &Packed::state_status}},
};

const OperatorTraits<Dense> kDense{
    .name = "sparse_attention_indexer",
    .fields =
        [](Dense& a, Fields& f) {
          f.input("query", a.query);
          f.input("key", a.key);
          f.input("query_norm_weight", a.query_norm_weight);
          f.input("key_norm_weight", a.key_norm_weight);
          f.input("cos_cache", a.cos_cache);
          f.input("sin_cache", a.sin_cache);
          f.input("mask", a.mask);
          f.input("past_key", a.past_key);
          f.input("gate", a.gate);
          f.input("position_bias", a.position_bias);
          f.input("head_weights", a.head_weights);
          f.input("position_ids", a.position_ids);
          f.input("past_sequence_length", a.past_sequence_length, Layout::kHost);
          f.input("past_proj_buffer", a.past_proj_buffer);
          f.attribute("policy_mode", a.policy_mode);
          f.attribute("compress_ratio", a.compress_ratio);
          f.attribute("token_budget", a.token_budget);
          f.attribute("index_topk", a.index_topk);
          f.attribute("epsilon", a.epsilon);
          f.attribute("scale", a.scale);
          f.attribute("head_weight_scale", a.head_weight_scale);
        },
    .specs = [](Dense& a) -> std::vector<OutputSpec> {
      const SparseAttentionIndexerShapes shapes = sparse_attention_indexer_shapes(a);
      return {shapes.selected_indices, shapes.present_key, shapes.present_proj_buffer};
    },
    .workspace = sparse_attention_indexer_workspace_bytes,
    .run = sparse_attention_indexer,
    .outputs = {{{"selected_indices"}, &Dense::selected_indices},
                {{"present_key", "past_key"}, &Dense::present_key},
                {{"present_proj_buffer", "past_proj_buffer"}, &Dense::present_proj_buffer}},
};

}  // namespace

void add_indexers() {
  add_operator(kPacked);
  add_operator(kDense);
}

}  // namespace shoal::python
