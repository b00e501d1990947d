// What stands in the place of attention and remembers a sequence in a state slot instead of in pages.
#pragma once

#include <algorithm>
#include <span>

#include "shoal/model/model.h"

namespace shoal {

class StateMixer {
 public:
  virtual ~StateMixer() = default;

  virtual int64_t width() const = 0;  // of its output, which the block's output projection reads
  virtual StateLayerShape state_shape() const = 0;
  virtual size_t workspace_bytes(const StepLimits& limits) const = 0;

  // Moves the sequences' slots over their tokens. out [num_tokens, width], h [num_tokens, hidden], both f32.
  virtual void forward(const TensorView& h, const TensorView& out, const Batch& batch, const StatePool& states,
                       size_t state_idx, const OpContext& context) const = 0;
};

// The slots of a step's sequences as one tensor: the slot itself where there is one sequence, else copies in scratch
// memory, which store() takes back.
class SlotRows {
 public:
  // `view_of` gives a slot's state, [1, ...] f32.
  template <class ViewOf>
  SlotRows(const Batch& batch, Workspace& workspace, const ViewOf& view_of) {
    const auto* slots = batch.state_slots.as<int32_t>();
    const int64_t num_seqs = batch.state_slots.dim(0);
    rows_ = view_of(slots[0]);
    size_ = rows_.num_elements();
    if (num_seqs == 1) {
      return;
    }
    rows_.data = workspace.take<float>(static_cast<size_t>(num_seqs * size_)).data();
    rows_.shape[0] = num_seqs;
    slots_ = workspace.take<float*>(static_cast<size_t>(num_seqs));
    for (size_t s = 0; s < slots_.size(); ++s) {
      slots_[s] = view_of(slots[s]).template as<float>();
      std::copy_n(slots_[s], size_, rows_.as<float>() + static_cast<int64_t>(s) * size_);
    }
  }

  const TensorView& rows() const { return rows_; }  // [num_seqs, ...]

  void store() const {
    for (size_t s = 0; s < slots_.size(); ++s) {
      std::copy_n(rows_.as<float>() + static_cast<int64_t>(s) * size_, size_, slots_[s]);
    }
  }

  // `size`: values of a slot.
  static size_t workspace_bytes(const StepLimits& limits, int64_t size) {
    const auto num_seqs = static_cast<size_t>(std::min(limits.max_tokens, limits.max_seqs));
    return Workspace::bytes_for<float>(num_seqs * static_cast<size_t>(size)) + Workspace::bytes_for<float*>(num_seqs);
  }

 private:
  TensorView rows_;
  int64_t size_ = 0;
  std::span<float*> slots_;  // none where rows_ is the slot itself
};

}  // namespace shoal
