#include "shoal/engine/batch.h"

#include <algorithm>

#include "shoal/base/error.h"

namespace shoal {

BatchBuilder::BatchBuilder(int64_t max_tokens, int64_t max_seqs, int64_t max_pages, int64_t max_logit_rows,
                           int64_t page_size)
    : page_size_(page_size) {
  for (auto* array : {&token_ids_, &positions_, &slot_mapping_}) {
    array->reserve(static_cast<size_t>(max_tokens));
  }
  cu_q_lens_.reserve(static_cast<size_t>(max_seqs + 1));
  past_lens_.reserve(static_cast<size_t>(max_seqs));
  logit_rows_.reserve(static_cast<size_t>(max_logit_rows));
  state_slots_.reserve(static_cast<size_t>(max_seqs));
  pages_.reserve(static_cast<size_t>(max_seqs));
  page_table_.reserve(static_cast<size_t>(max_seqs * max_pages));
  clear();
}

void BatchBuilder::clear() {
  for (auto* array :
       {&token_ids_, &positions_, &cu_q_lens_, &past_lens_, &slot_mapping_, &logit_rows_, &state_slots_}) {
    array->clear();
  }
  pages_.clear();
  cu_q_lens_.push_back(0);
}

void BatchBuilder::add(std::span<const int32_t> tokens, int64_t past, std::span<const PageId> pages,
                       int64_t num_logit_rows, std::optional<StateSlot> slot) {
  const auto count = static_cast<int64_t>(tokens.size());
  SHOAL_ASSERT(static_cast<int64_t>(pages.size()) * page_size_ >= past + count && num_logit_rows <= count);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t position = past + i;
    const PageId page = pages[static_cast<size_t>(position / page_size_)];
    token_ids_.push_back(tokens[static_cast<size_t>(i)]);
    positions_.push_back(static_cast<int32_t>(position));
    slot_mapping_.push_back(static_cast<int32_t>(page * page_size_ + position % page_size_));
  }
  for (int64_t row = num_tokens() - num_logit_rows; row < num_tokens(); ++row) {
    logit_rows_.push_back(static_cast<int32_t>(row));
  }
  cu_q_lens_.push_back(static_cast<int32_t>(num_tokens()));
  past_lens_.push_back(static_cast<int32_t>(past));
  pages_.push_back(pages);
  if (slot) {
    state_slots_.push_back(*slot);
  }
}

Batch BatchBuilder::batch() {
  size_t width = 0;
  for (const auto& pages : pages_) {
    width = std::max(width, pages.size());
  }
  page_table_.assign(pages_.size() * width, -1);
  for (size_t i = 0; i < pages_.size(); ++i) {
    std::ranges::copy(pages_[i], page_table_.begin() + static_cast<int64_t>(i * width));
  }
  const auto vector_view = [](std::vector<int32_t>& array) {
    return TensorView(array.data(), DType::kI32, {static_cast<int64_t>(array.size())});
  };
  Batch batch;
  batch.token_ids = vector_view(token_ids_);
  batch.positions = vector_view(positions_);
  batch.cu_q_lens = vector_view(cu_q_lens_);
  batch.past_lens = vector_view(past_lens_);
  batch.page_table =
      TensorView(page_table_.data(), DType::kI32, {static_cast<int64_t>(pages_.size()), static_cast<int64_t>(width)});
  batch.slot_mapping = vector_view(slot_mapping_);
  batch.logit_rows = vector_view(logit_rows_);
  if (!state_slots_.empty()) {
    SHOAL_ASSERT(state_slots_.size() == pages_.size());
    batch.state_slots = vector_view(state_slots_);
  }
  return batch;
}

}  // namespace shoal
