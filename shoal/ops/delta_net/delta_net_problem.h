// GatedDeltaNet and LinearAttention in one form: sequences, heads and every tensor by its strides. What may go wrong
// when reading: a "state head" has num_queries queries when queries outnumber states, and several state heads share a
// query or key when states do.
#pragma once

#include <algorithm>
#include <cstdint>

#include "shoal/ops/delta_net/delta_net.h"

namespace shoal::delta {

// Strides count elements. `sequence` is 0 where sequences are packed.
struct Rows {
  void* data = nullptr;
  DType dtype = DType::kF32;
  int64_t sequence = 0;
  int64_t token = 0;
  int64_t head = 0;
  int64_t inner = 0;

  int64_t at(int64_t b, int64_t t, int64_t h) const { return b * sequence + t * token + h * head; }
};

struct States {
  void* data = nullptr;  // null: zeros (incoming), not wanted (outgoing)
  DType dtype = DType::kF32;
  int64_t sequence = 0;
  int64_t head = 0;
  int64_t value = 0;  // stride over head_size_v
  int64_t key = 0;    // stride over head_size_qk

  int64_t at(int64_t b, int64_t h, int64_t v) const { return b * sequence + h * head + v * value; }
};

enum class Gate : uint8_t { kNone, kSoftplus, kSigmoid };

struct Problem {
  int64_t num_seqs = 0;
  int64_t num_tokens = 0;  // of a sequence, or of all when packed
  int64_t num_heads = 0;   // of states
  int64_t num_queries = 1;
  int64_t states_per_query = 1;  // consecutive state heads that share a query head
  int64_t states_per_key = 1;
  int64_t k_size = 0;
  int64_t v_size = 0;
  float scale = 1.0f;
  bool normalise = false;

  Rows output, query, key, value;
  Rows decay;  // no data: 1
  bool decay_per_key = false;
  Gate gate = Gate::kNone;
  float gate_lower_bound = 0.0f;
  const float* a_log = nullptr;
  int64_t a_log_head = 0;
  const float* dt_bias = nullptr;
  int64_t dt_bias_head = 0;
  int64_t dt_bias_inner = 0;
  Rows beta;  // no data: the rule has no retrieval
  bool beta_sigmoid = false;

  States initial;
  States final;  // of window slot 0
  int64_t num_windows = 1;
  int64_t window_stride = 0;

  float* capture = nullptr;  // rows of state_update, contiguous in themselves
  int64_t capture_sequence = 0;
  int64_t capture_inner = 1;
  int64_t capture_capacity = 0;
  const int32_t* capture_count = nullptr;
  int64_t capture_count_stride = 1;
  bool capture_active = true;

  const int32_t* offsets = nullptr;  // null: not packed
  int64_t offsets_stride = 1;

  int64_t begin_of(int64_t b) const {
    return offsets == nullptr ? 0 : std::clamp<int64_t>(offsets[b * offsets_stride], 0, num_tokens);
  }
  int64_t length_of(int64_t b) const {
    if (offsets == nullptr) {
      return num_tokens;
    }
    const int64_t end = std::clamp<int64_t>(offsets[(b + 1) * offsets_stride], 0, num_tokens);
    return std::max<int64_t>(0, end - begin_of(b));
  }
  int64_t num_captured(int64_t b) const {
    if (!capture_active) {
      return 0;
    }
    const int64_t most = std::min(capture_capacity, length_of(b));
    return std::clamp<int64_t>(capture_count[b * capture_count_stride], 0, most);
  }

  // The window slot that holds the state after `num_consumed` of `length` tokens, or -1.
  int64_t slot_after(int64_t num_consumed, int64_t length) const {
    const int64_t slot = num_windows - 1 - (length - num_consumed);
    return slot >= 0 ? slot : -1;
  }

  // The leading window slots without a token of this call; the last slot always holds the final state.
  int64_t num_empty_slots(int64_t length) const { return std::min(num_windows - length, num_windows - 1); }

  // Offsets of a token's factors in a row of state_update.
  int64_t decay_width() const { return decay_per_key ? num_heads * k_size : num_heads; }
  int64_t num_key_heads() const { return num_heads / states_per_key; }
  int64_t captured_decay(int64_t slot, int64_t h) const {
    return slot * decay_width() + h * (decay_per_key ? k_size : 1);
  }
  int64_t captured_key(int64_t slot, int64_t key_head) const {
    return capture_capacity * decay_width() + (slot * num_key_heads() + key_head) * k_size;
  }
  int64_t captured_delta(int64_t slot, int64_t h) const {
    return capture_capacity * (decay_width() + num_key_heads() * k_size) + (slot * num_heads + h) * v_size;
  }
};

// What one thread keeps while it walks over a head: sizes in f32 values, padded to whole vectors of any set.
struct Scratch {
  static constexpr int64_t kChunk = 16;  // tokens whose keys and queries are prepared at once: they stay in L1
  static constexpr int64_t kPad = 16;

  int64_t key_row = 0;    // padded k_size
  int64_t value_row = 0;  // padded v_size

  explicit Scratch(const Problem& p)
      : key_row((p.k_size + kPad - 1) / kPad * kPad), value_row((p.v_size + kPad - 1) / kPad * kPad) {}

  // In this order: state, keys, decayed keys, decays, queries, values, deltas, outputs, scalars.
  int64_t size(const Problem& p) const {
    return value_row * key_row + kChunk * key_row * (3 + p.num_queries) + kChunk * value_row * (2 + p.num_queries) +
           kChunk * 2;
  }
};

}  // namespace shoal::delta
