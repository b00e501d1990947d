// Sizes and intermediate results of a call. `start` is the checked state_row.
#pragma once

#include <algorithm>

#include "shoal/ops/mamba2/mamba2.h"

namespace shoal::mamba2 {

constexpr int64_t kHeadDim = 64;
constexpr int64_t kStateSize = 128;
constexpr int64_t kTaps = 4;

struct Problem {
  const Mamba2VerifyArgs& args;
  int64_t num_rows;  // R
  int64_t num_slots;
  int64_t inner_size;  // di
  int64_t num_channels;
  int64_t num_partitions;
  int64_t start;

  float* xbc = nullptr;      // [R, channels], of bf16 precision
  float* readout = nullptr;  // [R, di]

  explicit Problem(const Mamba2VerifyArgs& a, int64_t state_row)
      : args(a),
        num_rows(a.projection.dim(0)),
        num_slots(a.conv_state.dim(0)),
        inner_size(a.heads * kHeadDim),
        num_channels(inner_size + 2 * a.n_groups * kStateSize),
        num_partitions(num_rows == 1 && num_slots == 1 ? 2 : 4),
        start(state_row) {}

  int64_t heads_per_group() const { return args.heads / args.n_groups; }
  // The row that keeps the state after token t, or -1.
  int64_t slot_of(int64_t t) const {
    const int64_t slot = t - std::max<int64_t>(0, num_rows - num_slots);
    return slot >= 0 ? slot : -1;
  }
};

}  // namespace shoal::mamba2
