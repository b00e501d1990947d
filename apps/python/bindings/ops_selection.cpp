// Selections of sparse attention and the compressed rows that they name, for shoal.ops.
#include "apps/python/bindings/ops_call.h"
#include "shoal/ops/gated_latent_pool/gated_latent_pool.h"
#include "shoal/ops/selection_merge/selection_merge.h"
#include "shoal/ops/sparse_row_select/sparse_row_select.h"

namespace shoal::python {
namespace {

using Merge = SelectionMergeArgs;
using Select = SparseRowSelectArgs;
using Pool = GatedLatentPoolArgs;

void base_fields(Merge& a, Fields& f) {
  f.input("base_indices", a.base_indices);
  f.input("base_counts", a.base_counts);
  f.input("base_row_indices", a.base_row_indices);
  f.input("range_starts", a.range_starts);
  f.input("range_ends", a.range_ends);
  f.attribute("max_output_entries", a.max_output_entries);
}

std::vector<OutputSpec> list(const SelectionMergeShapes& shapes) {
  return {shapes.selected_indices, shapes.selected_counts, shapes.status};
}

const std::vector<std::pair<Output, TensorView Merge::*>> kMergeOutputs = {
    {{"selected_indices"}, &Merge::selected_indices},
    {{"selected_counts"}, &Merge::selected_counts},
    {{"status"}, &Merge::status},
};

const OperatorTraits<Merge> kRangeMerge{
    .name = "sparse_attention_selection_merge",
    .fields = base_fields,
    .specs = [](Merge& a) { return list(sparse_attention_selection_merge_shapes(a)); },
    .workspace = selection_merge_workspace_bytes,
    .run = sparse_attention_selection_merge,
    .outputs = kMergeOutputs,
};

const OperatorTraits<Merge> kPackedMerge{
    .name = "packed_sparse_attention_indexer_merge",
    .fields =
        [](Merge& a, Fields& f) {
          base_fields(a, f);
          f.input("additional_indices", a.additional_indices);
          f.input("additional_counts", a.additional_counts);
          f.attribute("policy_mode", a.policy_mode);
        },
    .specs = [](Merge& a) { return list(packed_sparse_attention_indexer_merge_shapes(a)); },
    .workspace = selection_merge_workspace_bytes,
    .run = packed_sparse_attention_indexer_merge,
    .outputs = kMergeOutputs,
};

const OperatorTraits<Select> kSelect{
    .name = "sparse_row_select",
    .fields =
        [](Select& a, Fields& f) {
          f.input("query", a.query);
          f.input("cos", a.cos, Layout::kContiguous);
          f.input("sin", a.sin, Layout::kContiguous);
          f.input("rows", a.rows);
          f.input("first_slot", a.first_slot);
          f.input("last_slot", a.last_slot);
          f.input("past_cache", a.past_cache);
          f.input("weights", a.weights, Layout::kContiguous);
          f.input("past_lens", a.past_lens);
          f.attribute("num_heads", a.num_heads);
          f.attribute("head_dim", a.head_dim);
          f.attribute("rope_head_dim", a.rope_head_dim);
          f.attribute("ratio", a.ratio);
          f.attribute("topk", a.topk);
          f.attribute("row_id_offset", a.row_id_offset);
          f.attribute("scale", a.scale);
          f.attribute("simulate_rotated_fp4", a.simulate_rotated_fp4);
        },
    .specs = [](Select& a) -> std::vector<OutputSpec> {
      const SparseRowSelectShapes shapes = sparse_row_select_shapes(a);
      return {shapes.selection, shapes.present_cache};
    },
    .workspace = sparse_row_select_workspace_bytes,
    .run = sparse_row_select,
    .outputs = {{{"selection"}, &Select::selection}, {{"present_cache", "past_cache"}, &Select::present_cache}},
};

const OperatorTraits<Pool> kPool{
    .name = "gated_latent_pool",
    .fields =
        [](Pool& a, Fields& f) {
          f.input("kv", a.kv);
          f.input("score", a.score);
          f.input("past_state_kv", a.past_state_kv);
          f.input("past_state_score", a.past_state_score);
          f.input("ape", a.ape);
          f.input("norm_weight", a.norm_weight);
          f.input("cos", a.cos);
          f.input("sin", a.sin);
          f.input("past_lens", a.past_lens);
          f.attribute("ratio", a.ratio);
          f.attribute("window_multiplier", a.window_multiplier);
          f.attribute("head_dim", a.head_dim);
          f.attribute("rope_head_dim", a.rope_head_dim);
          f.attribute("max_seq_len", a.max_seq_len);
          f.attribute("epsilon", a.epsilon);
          f.attribute("simulate_fp8", a.simulate_fp8);
          f.attribute("simulate_rotated_fp4", a.simulate_rotated_fp4);
        },
    .specs = [](Pool& a) -> std::vector<OutputSpec> {
      const GatedLatentPoolShapes shapes = gated_latent_pool_shapes(a);
      return {shapes.rows,      shapes.first_slot,       shapes.last_slot,
              shapes.row_count, shapes.present_state_kv, shapes.present_state_score};
    },
    .workspace = gated_latent_pool_workspace_bytes,
    .run = gated_latent_pool,
    .outputs = {{{"rows"}, &Pool::rows},
                {{"first_slot"}, &Pool::first_slot},
                {{"last_slot"}, &Pool::last_slot},
                {{"row_count"}, &Pool::row_count},
                {{"present_state_kv", "past_state_kv"}, &Pool::present_state_kv},
                {{"present_state_score", "past_state_score"}, &Pool::present_state_score}},
};

}  // namespace

void add_selections() {
  add_operator(kRangeMerge);
  add_operator(kPackedMerge);
  add_operator(kSelect);
  add_operator(kPool);
}

}  // namespace shoal::python
