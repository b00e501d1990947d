// The arrays of a Batch, reserved once for the largest step and filled anew for each.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "shoal/model/model.h"
#include "shoal/state/page_pool.h"

namespace shoal {

class BatchBuilder {
 public:
  // `max_pages`: of one sequence.
  BatchBuilder(int64_t max_tokens, int64_t max_seqs, int64_t max_pages, int64_t max_logit_rows, int64_t page_size);

  void clear();

  // The next sequence: `tokens` at positions `past` and on, in `pages` that cover all of them. The logits of its last
  // `num_logit_rows` tokens are wanted. `pages` must live until batch() returns. Of one batch all sequences have a
  // state slot, or none.
  void add(std::span<const int32_t> tokens, int64_t past, std::span<const PageId> pages, int64_t num_logit_rows,
           std::optional<StateSlot> slot = std::nullopt);

  // Views of this builder's arrays, valid until the next clear().
  Batch batch();

  int64_t num_tokens() const { return static_cast<int64_t>(token_ids_.size()); }
  int64_t num_logit_rows() const { return static_cast<int64_t>(logit_rows_.size()); }

 private:
  int64_t page_size_;
  std::vector<int32_t> token_ids_;
  std::vector<int32_t> positions_;
  std::vector<int32_t> cu_q_lens_;
  std::vector<int32_t> past_lens_;
  std::vector<int32_t> slot_mapping_;
  std::vector<int32_t> logit_rows_;
  std::vector<int32_t> state_slots_;
  std::vector<std::span<const PageId>> pages_;  // of each sequence
  std::vector<int32_t> page_table_;             // [num_seqs, longest of them]
};

}  // namespace shoal
