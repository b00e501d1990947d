// A checked call: sizes and modes, for the parts of packed_sparse_attention_indexer.
#pragma once

#include "shoal/ops/indexer_rows.h"
#include "shoal/ops/packed_sparse_attention_indexer/packed_sparse_attention_indexer.h"

namespace shoal::packed_indexer {

inline constexpr std::string_view kName = "packed_sparse_attention_indexer";

enum class Mode { kSelect, kReuseHold, kReuseAdvance };  // kSelect: without index sharing, or refresh

struct Problem {
  indexer::Policy policy = indexer::Policy::kQsa;
  Mode mode = Mode::kSelect;
  int64_t batch_size = 0;
  int64_t num_tokens = 0;  // that the request offsets count: with reuse one a request
  int64_t num_heads = 0;
  int64_t head_dim = 0;
  int64_t capacity = 0;  // columns of the selection that may be used
  int64_t width = 0;     // columns there are
  float scale = 1.0f;    // of the sum over heads
  bool captures = false;

  bool qsa() const { return policy == indexer::Policy::kQsa; }
};

// Checks inputs and attributes.
Problem check_inputs(const PackedSparseAttentionIndexerArgs& args);
// Checks outputs, and what memory they share with inputs.
void check_outputs(const PackedSparseAttentionIndexerArgs& args, const PackedSparseAttentionIndexerShapes& shapes);

}  // namespace shoal::packed_indexer
