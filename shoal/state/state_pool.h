// The states of convolutions and recurrences: for every layer that has one, a slot of fixed size a sequence.
//
// Prefill and decode read and write a slot in place. A step that verifies drafted tokens must be able to take them
// back: it reads the slot, writes its final states elsewhere (conv_scratch; a recurrence needs none) and captures the
// transitions of its first tokens in the slot's capture memory. commit() then replays those that were accepted. What
// may go wrong: the tokens of such a step that are certain (the one sampled last) are captured and committed like
// drafted ones, so that at most capture_capacity tokens can be verified, them included.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "shoal/tensor/tensor.h"

namespace shoal {

namespace cpu {
class ThreadPool;
}

using StateSlot = int32_t;

// Shapes and meaning are those of VarlenCausalConvWithState and GatedDeltaNet.
struct StateLayerShape {
  // The last inputs of a convolution, [conv_channels, conv_reach]. No channels: the layer has none.
  DType conv_dtype = DType::kF32;  // f32, f16 or bf16
  int64_t conv_channels = 0;
  int64_t conv_reach = 0;
  // The state of a recurrence, [num_heads, value_size, key_size] f32. No heads: the layer has none.
  int64_t num_heads = 0;
  int64_t num_key_heads = 0;  // divides num_heads
  int64_t value_size = 0;
  int64_t key_size = 0;
  bool decay_per_key = false;
};

class StatePool {
 public:
  static constexpr int64_t kMaxCapture = 8;

  // kInvalidArgument names what is out of range, kOutOfMemory what could not be allocated. A capture_capacity of 0:
  // nothing can be captured.
  StatePool(const std::vector<StateLayerShape>& layers, int64_t num_slots, int64_t capture_capacity);

  // A slot whose states are all zero, as before the first token; nothing when none is free.
  std::optional<StateSlot> acquire();
  void release(StateSlot slot);
  // States of one slot into another, both in use: for a sequence that starts from another's prefix. Captures stay.
  void copy(StateSlot from, StateSlot to);

  // Views of `count` consecutive slots, for calls with as many sequences: initial states, and final ones in place.
  TensorView conv_state(size_t layer_idx, StateSlot slot, int64_t count = 1) const;  // [count, conv_channels, reach]
  TensorView recurrent_state(size_t layer_idx, StateSlot slot, int64_t count = 1) const;  // [count, heads, v, k]
  // state_update of these calls with state_update_capacity = capture_capacity; absent without capacity.
  TensorView conv_capture(size_t layer_idx, StateSlot slot, int64_t count = 1) const;
  TensorView recurrent_capture(size_t layer_idx, StateSlot slot, int64_t count = 1) const;
  // Memory for final states of a convolution that nobody wants; every layer has the same.
  TensorView conv_scratch(size_t layer_idx, int64_t count = 1) const;

  // Moves the slot's states over the first `num_accepted` captured tokens, in every layer: to the bits that a call with
  // only these tokens would have left. So many must have been captured since the last commit.
  void commit(StateSlot slot, int64_t num_accepted, cpu::ThreadPool& pool);

  int64_t num_slots() const { return static_cast<int64_t>(in_use_.size()); }
  int64_t num_free() const { return static_cast<int64_t>(free_.size()); }
  int64_t capture_capacity() const { return capture_capacity_; }

  // Bytes of all layers for one slot, captures included; the scratch memory not.
  static int64_t bytes_per_slot(const std::vector<StateLayerShape>& layers, int64_t capture_capacity);

 private:
  struct Layer {
    StateLayerShape shape;
    AlignedBuffer conv;
    AlignedBuffer recurrent;
    AlignedBuffer conv_capture;
    AlignedBuffer recurrent_capture;
  };

  const Layer& layer(size_t layer_idx) const;
  void check_range(StateSlot slot, int64_t count) const;
  void check_in_use(StateSlot slot) const;
  void commit_conv(const Layer& layer, size_t layer_idx, StateSlot slot, int64_t num_accepted);
  void commit_recurrent(const Layer& layer, size_t layer_idx, StateSlot slot, int64_t num_accepted,
                        cpu::ThreadPool& pool);

  int64_t capture_capacity_;
  std::vector<Layer> layers_;
  AlignedBuffer conv_scratch_;
  std::vector<bool> in_use_;
  std::vector<StateSlot> free_;
};

}  // namespace shoal
