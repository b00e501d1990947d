// Both convolutions in one form: sequences of channels, every tensor by its strides. What may go wrong when reading:
// the offsets are not checked, so a sequence's range must come from span().
#pragma once

#include <cstdint>

#include "shoal/ops/causal_conv/causal_conv.h"

namespace shoal::conv {

// Strides count elements. `sequence` is 0 where sequences are packed.
struct Samples {
  void* data = nullptr;
  int64_t sequence = 0;
  int64_t pos = 0;
  int64_t channel = 0;
};

struct Problem {
  DType dtype = DType::kF32;
  int64_t num_seqs = 0;
  int64_t num_tokens = 0;  // of a sequence, or of all when packed
  int64_t channels = 0;
  int64_t kernel_size = 0;
  int64_t dilation = 1;
  int64_t state_length = 0;
  bool silu = false;

  Samples output;
  Samples input;
  Samples past;     // no data: zeros
  Samples present;  // of slot 0
  int64_t num_windows = 1;
  int64_t window_stride = 0;

  Samples capture;  // `pos` strides over slots; no data: none wanted
  int64_t capture_capacity = 0;
  const int32_t* capture_count = nullptr;  // null: as many as there are
  int64_t capture_count_stride = 1;

  const int32_t* offsets = nullptr;  // null: not packed
  int64_t offsets_stride = 1;

  const void* weight = nullptr;
  int64_t weight_channel = 0;
  int64_t weight_tap = 0;
  const void* bias = nullptr;
  int64_t bias_channel = 0;

  // Dynamic two-tap mode if delta is given: its current tap's correction of token 0, group 0.
  const void* delta = nullptr;
  int64_t delta_token = 0;
  int64_t delta_tap = 0;
  int64_t delta_group = 0;
  int64_t group_size = 1;
  const void* mask = nullptr;
  int64_t mask_token = 0;

  // Tokens [begin, end) of sequence b; not sound: malformed, to be left alone.
  struct Span {
    int64_t begin = 0;
    int64_t end = 0;
    bool sound = true;
  };
  Span span(int64_t b) const {
    if (offsets == nullptr) {
      return {0, num_tokens, true};
    }
    const int64_t begin = offsets[b * offsets_stride];
    const int64_t end = offsets[(b + 1) * offsets_stride];
    return {begin, end, begin >= 0 && begin <= end && end <= num_tokens};
  }
  bool end_points_sound() const {
    return offsets == nullptr || (offsets[0] == 0 && offsets[num_seqs * offsets_stride] == num_tokens);
  }
};

// Present states and captured inputs of channels [begin, end) of sequence b: plain copies. Call it after the outputs of
// these channels, since the present state may be the past one's memory.
void write_states(const Problem& problem, int64_t b, int64_t begin, int64_t end);

}  // namespace shoal::conv
