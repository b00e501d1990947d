// What the kernels of paged_attention read: a checked call with device pointers.
#pragma once

#include "shoal/cuda/launch.cuh"
#include "shoal/ops/paged_problem.h"

namespace shoal::cuda {

struct AttentionParams {
  paged::Problem call;
  const float* k_scale;  // [1] or [num_kv_heads * head_dim]; null: not quantised
  const float* v_scale;
  bool k_scale_is_one, v_scale_is_one;  // element for all channels
  int page_bits;                        // page_size = 1 << page_bits
  void* query;                          // [num_tokens, num_heads, padded_dim] of the tensor cores' type
  int padded_dim;
  int num_splits;
  float* partial_out;  // [num_splits, num_tokens, num_heads, padded_dim]
  float2* partial;     // [num_splits, num_tokens, num_heads]: maximum, sum
};

constexpr int kKeyTile = 64;
constexpr int kAttendWarps = 4;

__device__ inline int index_at(const paged::Matrix& m, int64_t row, int64_t column = 0) {
  return *reinterpret_cast<const int32_t*>(m.data + row * m.row_stride + column * m.column_stride);
}

struct DeviceSequence {
  int begin, end, past;
  bool sound;
  __device__ int kv_len() const { return past + (end - begin); }
};

__device__ inline DeviceSequence read_sequence(const paged::Problem& p, int64_t seq_idx) {
  DeviceSequence seq{index_at(p.cu, seq_idx), index_at(p.cu, seq_idx + 1), index_at(p.past, seq_idx), false};
  seq.sound = seq.begin >= 0 && seq.begin <= seq.end && seq.end <= p.num_tokens && seq.past >= 0;
  return seq;
}

template <class T>
__device__ inline float read_value(const paged::Matrix& m, int64_t row, int64_t column) {
  return to_float(*reinterpret_cast<const T*>(m.data + row * m.row_stride + column * m.column_stride));
}

// Launches of one (type of the tensor cores, head size); generated sources instantiate them.
template <class E, int kPaddedDim>
void launch_attend(const AttentionParams& params, Stream stream);

}  // namespace shoal::cuda
