// SentencePiece merging by score with byte fallback, as GGUF's tokenizer model "llama" means it.
//
// Of all adjacent pairs whose concatenation is a piece, the one with the highest score is merged first, ties to the
// left. What ends as no piece is taken apart again, in the order it was merged, down to bytes "<0x..>".
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace shoal::python {

class SpmVocabulary {
 public:
  // `scores` may be empty (all 0) or has one entry for each piece. A piece that occurs twice means its last id.
  // kInvalidArgument if the sizes differ.
  SpmVocabulary(std::vector<std::string> pieces, std::vector<float> scores);

  // Ids of `text`, in which spaces are already U+2581. A byte without a piece of its own gives `unknown_id`; a negative
  // one leaves it out.
  std::vector<int32_t> encode(std::string_view text, int32_t unknown_id) const;

 private:
  int32_t find(std::string_view piece) const;

  std::vector<std::string> pieces_;
  std::vector<float> scores_;
  std::unordered_map<std::string_view, int32_t> ids_;  // views into pieces_
  int32_t byte_ids_[256];
};

}  // namespace shoal::python
