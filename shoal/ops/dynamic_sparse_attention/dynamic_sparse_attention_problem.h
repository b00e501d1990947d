// A checked call, resolved. Internal to the operator.
#pragma once

#include "shoal/ops/dynamic_sparse_attention/dynamic_sparse_attention.h"
#include "shoal/ops/paged_problem.h"
#include "shoal/ops/sparse_attend.h"

namespace shoal::dynamic_sparse {

constexpr std::string_view kOp = "dynamic_sparse_attention";

// [B, rows, columns] of a type of its own, any strides. A tensor without a batch has one sequence.
struct Rows {
  DType type = DType::kF32;
  paged::Matrix first{};     // of sequence 0
  int64_t batch_stride = 0;  // bytes
  paged::Matrix of(int64_t seq_idx) const {
    paged::Matrix matrix = first;
    matrix.data += seq_idx * batch_stride;
    return matrix;
  }
};

struct Problem {
  int64_t batch = 0;
  int64_t seq_len = 0;  // S
  int64_t num_heads = 0;
  int64_t num_kv_heads = 0;
  int64_t head_dim = 0;
  int64_t capacity = 0;       // C, of the outgoing caches
  int64_t past_capacity = 0;  // 0: no past
  int64_t total_length = 0;   // total_sequence_length
  bool grows = false;         // the outgoing caches are new arrays
  DType type = DType::kF32;   // T
  DType cache_type = DType::kF32;
  bool quantized = false;
  bool local = false;  // local_plus_selected with auxiliary; else selected_only with main
  int64_t window = 0;
  paged::Problem head{};  // type, head_dim, norm and rotary of a head

  Rows query, key, value;
  Rows cos, sin;  // cos.first.data may be null
  Rows q_norm_weight, k_norm_weight, sink;
  paged::Matrix selected{}, counts{}, lengths{}, committed{};  // committed.data may be null
  paged::Matrix positions{};                                   // i64; data may be null
  int64_t max_selected = 0;
  sparse::Source auxiliary{};  // of sequence 0
  int64_t auxiliary_key_stride = 0;
  int64_t auxiliary_value_stride = 0;
  int64_t auxiliary_length = 0;  // L
  bool has_sink = false;         // head_sink, or 0 with smooth_softmax

  int64_t num_rows() const { return batch * seq_len; }
  int64_t group() const { return num_heads / num_kv_heads; }
};

// Checks inputs and attributes.
Problem check(const DynamicSparseAttentionArgs& args);
// Checks the outputs of a call that was checked.
void check_outputs(const DynamicSparseAttentionArgs& args, const Problem& problem);
DynamicSparseAttentionShapes shapes_of(const DynamicSparseAttentionArgs& args, const Problem& problem);

}  // namespace shoal::dynamic_sparse
