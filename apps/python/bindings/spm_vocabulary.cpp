#include "apps/python/bindings/spm_vocabulary.h"

#include <algorithm>
#include <queue>

#include "shoal/base/error.h"

namespace shoal::python {
namespace {

constexpr int kNone = -1;

struct Symbol {
  int prev;
  int next;
  size_t begin;
  size_t size;  // 0: merged into its left neighbour
};

struct Pair {
  float score;
  int left;
  int right;
  size_t size;  // of both together, when the pair was found: tells an outdated entry
};

// The largest is merged first.
bool operator<(const Pair& a, const Pair& b) { return a.score < b.score || (a.score == b.score && a.left > b.left); }

size_t character_size(unsigned char first) {
  if (first < 0xC0) {
    return 1;
  }
  return first < 0xE0 ? 2 : first < 0xF0 ? 3 : 4;
}

class Merger {
 public:
  Merger(std::string_view text, std::span<const float> scores, const std::unordered_map<std::string_view, int32_t>& ids)
      : text_(text), scores_(scores), ids_(ids) {
    for (size_t at = 0; at < text.size();) {
      const size_t size = std::min(character_size(static_cast<unsigned char>(text[at])), text.size() - at);
      const int index = static_cast<int>(symbols_.size());
      symbols_.push_back({index - 1, at + size == text.size() ? kNone : index + 1, at, size});
      at += size;
    }
  }

  void run() {
    for (int i = 1; i < static_cast<int>(symbols_.size()); ++i) {
      add_pair(i - 1, i);
    }
    while (!pairs_.empty()) {
      const Pair pair = pairs_.top();
      pairs_.pop();
      Symbol& left = symbols_[pair.left];
      Symbol& right = symbols_[pair.right];
      if (left.size == 0 || right.size == 0 || left.size + right.size != pair.size) {
        continue;
      }
      left.size += right.size;
      right.size = 0;
      left.next = right.next;
      if (right.next != kNone) {
        symbols_[right.next].prev = pair.left;
      }
      add_pair(left.prev, pair.left);
      add_pair(pair.left, left.next);
    }
  }

  const std::vector<Symbol>& symbols() const { return symbols_; }

 private:
  void add_pair(int left, int right) {
    if (left == kNone || right == kNone) {
      return;
    }
    const size_t size = symbols_[left].size + symbols_[right].size;
    const auto found = ids_.find(text_.substr(symbols_[left].begin, size));
    if (found != ids_.end()) {
      pairs_.push({scores_.empty() ? 0.0f : scores_[found->second], left, right, size});
    }
  }

  std::string_view text_;
  std::span<const float> scores_;
  const std::unordered_map<std::string_view, int32_t>& ids_;
  std::vector<Symbol> symbols_;
  std::priority_queue<Pair> pairs_;
};

}  // namespace

SpmVocabulary::SpmVocabulary(std::vector<std::string> pieces, std::vector<float> scores)
    : pieces_(std::move(pieces)), scores_(std::move(scores)) {
  require(scores_.empty() || scores_.size() == pieces_.size(), "tokenizer: ", scores_.size(), " scores for ",
          pieces_.size(), " tokens");
  require(pieces_.size() <= INT32_MAX, "tokenizer: ", pieces_.size(), " tokens are too many");
  ids_.reserve(pieces_.size());
  for (size_t i = 0; i < pieces_.size(); ++i) {
    ids_[pieces_[i]] = static_cast<int32_t>(i);
  }
  constexpr char kDigits[] = "0123456789ABCDEF";
  for (int byte = 0; byte < 256; ++byte) {
    const char name[] = {'<', '0', 'x', kDigits[byte >> 4], kDigits[byte & 15], '>'};
    byte_ids_[byte] = find(std::string_view(name, sizeof(name)));
    if (byte_ids_[byte] == kNone) {
      const char itself = static_cast<char>(byte);
      byte_ids_[byte] = find(std::string_view(&itself, 1));
    }
  }
}

int32_t SpmVocabulary::find(std::string_view piece) const {
  const auto found = ids_.find(piece);
  return found == ids_.end() ? kNone : found->second;
}

std::vector<int32_t> SpmVocabulary::encode(std::string_view text, int32_t unknown_id) const {
  Merger merger(text, scores_, ids_);
  merger.run();
  std::vector<int32_t> out;
  // A merge makes a piece, so only a single character can be no piece.
  for (const Symbol& symbol : merger.symbols()) {
    if (symbol.size == 0) {
      continue;
    }
    const std::string_view piece = text.substr(symbol.begin, symbol.size);
    const int32_t id = find(piece);
    if (id != kNone) {
      out.push_back(id);
      continue;
    }
    for (const char c : piece) {
      const int32_t byte_id = byte_ids_[static_cast<unsigned char>(c)];
      if (byte_id != kNone || unknown_id >= 0) {
        out.push_back(byte_id != kNone ? byte_id : unknown_id);
      }
    }
  }
  return out;
}

}  // namespace shoal::python
