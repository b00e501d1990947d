#include "shoal/engine/scheduler.h"

#include <algorithm>
#include <limits>

#include "shoal/base/checked.h"
#include "shoal/base/error.h"

namespace shoal {
namespace {

bool is_older(const Sequence* a, const Sequence* b) { return a->arrival < b->arrival; }

// One token is left to compute. With all_logits even that one needs a row of the other kind.
bool is_decode(const Sequence& sequence) {
  return sequence.num_tokens() - sequence.num_computed == 1 && !sequence.all_logits;
}

// Pages of a prefix that may be taken from the tree: at least the last token is always computed, for its logits.
int64_t num_matchable_pages(const Sequence& sequence, int64_t page_size) {
  return sequence.all_logits ? 0 : (sequence.num_tokens() - 1) / page_size;
}

}  // namespace

Scheduler::Scheduler(PagePool& pool, const SchedulerOptions& options, StatePool* states)
    : pool_(pool), options_(options), states_(states) {
  require(options.max_batch_tokens >= 1 && options.max_seqs >= 1 && options.max_all_logits_rows >= 1 &&
              options.page_size >= 1,
          "the scheduler's limits must be positive");
  options_.max_seqs = std::min(options.max_seqs, options.max_batch_tokens);
  SHOAL_ASSERT(states == nullptr || states->num_slots() >= options_.max_seqs);
  if (options.prefix_cache) {
    tree_.emplace(pool, options.page_size, states, states == nullptr ? 0 : states->num_slots() - options_.max_seqs);
  }
}

bool Scheduler::can_ever_fit(int64_t num_tokens) const {
  return ceil_div(num_tokens, options_.page_size) <= pool_.num_pages();
}

void Scheduler::add(Sequence& sequence) {
  SHOAL_ASSERT(!sequence.tokens.empty() && sequence.pages.empty() && sequence.num_computed == 0);
  waiting_.insert(std::ranges::upper_bound(waiting_, &sequence, is_older), &sequence);
}

std::span<const Chunk> Scheduler::schedule() {
  chunks_.clear();
  budget_ = options_.max_batch_tokens;
  logit_rows_left_ = options_.max_all_logits_rows;
  continue_running(true);
  continue_running(false);
  admit_waiting();
  SHOAL_ASSERT(!chunks_.empty() || !has_work());
  return chunks_;
}

void Scheduler::continue_running(bool decodes) {
  // By index: a preemption takes sequences off the end, never the one at hand or an older one.
  for (size_t i = 0; i < running_.size(); ++i) {
    if (is_decode(*running_[i]) == decodes) {
      add_chunk(*running_[i]);
    }
  }
}

void Scheduler::add_chunk(Sequence& sequence) {
  int64_t num_tokens =
      std::min({sequence.num_tokens() - sequence.num_computed, budget_, tokens_to_next_stop(sequence)});
  if (sequence.all_logits) {
    num_tokens = std::min(num_tokens, logit_rows_left_);
  }
  if (num_tokens == 0) {
    return;
  }
  num_tokens = reserve(sequence, num_tokens);
  if (num_tokens == 0) {
    return;  // out of pages: waits for an older sequence, keeping what it has
  }
  const bool reaches_end = sequence.num_computed + num_tokens == sequence.num_tokens();
  const int64_t num_rows = sequence.all_logits ? num_tokens : (reaches_end ? 1 : 0);
  chunks_.push_back({&sequence, sequence.num_computed, num_tokens, num_rows});
  budget_ -= num_tokens;
  logit_rows_left_ -= sequence.all_logits ? num_tokens : 0;
}

// With states: a chunk ends where they are to be kept.
int64_t Scheduler::tokens_to_next_stop(const Sequence& sequence) const {
  for (const int64_t num_pages : {sequence.branch_pages, sequence.prompt_pages}) {
    if (num_pages * options_.page_size > sequence.num_computed) {
      return num_pages * options_.page_size - sequence.num_computed;
    }
  }
  return std::numeric_limits<int64_t>::max();
}

int64_t Scheduler::reserve(Sequence& sequence, int64_t num_tokens) {
  const auto room = [&] {
    return static_cast<int64_t>(sequence.pages.size()) * options_.page_size - sequence.num_computed;
  };
  while (room() < num_tokens) {
    const std::optional<PageId> page = take_page(sequence);
    if (!page) {
      break;
    }
    sequence.pages.push_back(*page);
  }
  return std::min(num_tokens, room());
}

std::optional<PageId> Scheduler::take_page(const Sequence& sequence) {
  while (true) {
    if (const std::optional<PageId> page = pool_.allocate()) {
      return page;
    }
    if (tree_ && tree_->evict(1) > 0) {
      continue;
    }
    if (strip_paused()) {
      continue;
    }
    if (!is_older(&sequence, running_.back())) {
      return std::nullopt;  // itself the youngest
    }
    preempt_youngest();
  }
}

void Scheduler::preempt_youngest() {
  Sequence& victim = *running_.back();
  running_.pop_back();
  const auto planned = std::ranges::find(chunks_, &victim, &Chunk::sequence);
  if (planned != chunks_.end()) {
    budget_ += planned->num_tokens;
    logit_rows_left_ += victim.all_logits ? planned->num_tokens : 0;
    chunks_.erase(planned);
  }
  // Its full pages stay in the prefix tree until somebody needs them, so resuming is often cheap.
  release_memory(victim);
  add(victim);
  ++num_preemptions_;
}

// Takes the pages and the state of the sequence that paused last. False if no paused one has any.
bool Scheduler::strip_paused() {
  const auto victim =
      std::find_if(paused_.rbegin(), paused_.rend(), [](const Sequence* each) { return !each->pages.empty(); });
  if (victim == paused_.rend()) {
    return false;
  }
  release_memory(**victim);
  ++num_preemptions_;
  return true;
}

void Scheduler::pause(Sequence& sequence) {
  const size_t num_erased = std::erase(running_, &sequence);
  SHOAL_ASSERT(num_erased == 1);
  paused_.push_back(&sequence);
}

void Scheduler::resume(Sequence& sequence) {
  const size_t num_erased = std::erase(paused_, &sequence);
  SHOAL_ASSERT(num_erased == 1);
  if (!sequence.pages.empty() && num_running() < options_.max_seqs) {
    running_.insert(std::ranges::upper_bound(running_, &sequence, is_older), &sequence);
    return;
  }
  release_memory(sequence);
  add(sequence);
}

void Scheduler::admit_waiting() {
  int64_t num_deferred = 0;
  for (auto it = waiting_.begin(); it != waiting_.end();) {
    if (budget_ == 0 || num_running() >= options_.max_seqs) {
      return;
    }
    Sequence& sequence = **it;
    if (sequence.all_logits && logit_rows_left_ == 0) {
      return;
    }
    PrefixMatch match;
    if (tree_) {
      match = match_prefix(sequence);
      if (prefix_is_coming(sequence, static_cast<int64_t>(sequence.pages.size()))) {
        release_memory(sequence);
        if (++num_deferred == options_.max_seqs) {
          return;  // a long queue for one prefix is not compared with it in every step
        }
        ++it;
        continue;
      }
    }
    if (!try_admit(sequence)) {
      release_memory(sequence);
      return;  // no overtaking: the younger would take the pages that this one waits for
    }
    if (states_ != nullptr) {
      // Running and paused ones share max_seqs slots: the others are the prefix tree's.
      const auto num_held =
          std::ranges::count_if(paused_, [](const Sequence* each) { return each->state_slot.has_value(); });
      if (num_running() + num_held >= options_.max_seqs) {
        strip_paused();
      }
      sequence.state_slot = states_->acquire();
      SHOAL_ASSERT(sequence.state_slot.has_value());  // there are as many as sequences may run
      if (match.state) {
        states_->copy(*match.state, *sequence.state_slot);
      }
    }
    it = waiting_.erase(it);
    running_.insert(std::ranges::upper_bound(running_, &sequence, is_older), &sequence);
    if (sequence.num_prefix_hit < 0) {
      sequence.num_prefix_hit = sequence.num_computed;
    }
    const size_t num_waiting_before = waiting_.size();
    add_chunk(sequence);
    SHOAL_ASSERT(waiting_.size() == num_waiting_before);  // try_admit saw to it that nobody is preempted
  }
}

PrefixMatch Scheduler::match_prefix(Sequence& sequence) {
  const int64_t num_matchable = num_matchable_pages(sequence, options_.page_size);
  PrefixMatch match = tree_->match(
      std::span(sequence.tokens).first(static_cast<size_t>(num_matchable * options_.page_size)), sequence.salt);
  sequence.pages = match.pages;
  const auto num_matched = static_cast<int64_t>(match.pages.size());
  sequence.num_computed = num_matched * options_.page_size;
  if (states_ != nullptr) {
    sequence.branch_pages = match.num_known_pages > num_matched ? match.num_known_pages : 0;
    sequence.prompt_pages = num_matchable;
    sequence.answer_pages = 0;
  }
  return match;
}

// Whether the pages suffice for all of it, after what running prompts still need and a page for each to grow: who is
// let in too early is preempted soon, and its work done twice.
bool Scheduler::try_admit(Sequence& sequence) {
  if (running_.empty()) {
    return true;
  }
  int64_t needed = missing_pages(sequence) + num_running();
  for (const Sequence* other : running_) {
    needed += missing_pages(*other);
  }
  const auto suffices = [&] {
    return needed <= pool_.num_free() || (tree_ && needed <= pool_.num_free() + tree_->num_evictable());
  };
  while (!suffices()) {
    if (!strip_paused()) {
      return false;
    }
  }
  return true;
}

int64_t Scheduler::missing_pages(const Sequence& sequence) const {
  return ceil_div(sequence.num_tokens(), options_.page_size) - static_cast<int64_t>(sequence.pages.size());
}

// Several requests with one prompt often come together (n answers, a shared system prompt). When a running sequence is
// about to compute at least half of what this one lacks, waiting for it costs less than computing it twice.
bool Scheduler::prefix_is_coming(const Sequence& sequence, int64_t num_matched_pages) const {
  const auto page_size = static_cast<size_t>(options_.page_size);
  const auto limit = static_cast<size_t>(num_matchable_pages(sequence, options_.page_size)) * page_size;
  for (const Sequence* other : running_) {
    if (other->salt != sequence.salt) {
      continue;
    }
    const size_t length = std::min(limit, other->tokens.size());
    const auto end = sequence.tokens.begin() + static_cast<int64_t>(length);
    const auto differs = std::mismatch(sequence.tokens.begin(), end, other->tokens.begin()).first;
    int64_t num_common = (differs - sequence.tokens.begin()) / options_.page_size;
    if (states_ != nullptr) {  // only where the other's states will be kept
      const int64_t num_kept = other->prompt_pages <= num_common ? other->prompt_pages : other->branch_pages;
      num_common = num_kept <= num_common && num_kept * options_.page_size > other->num_computed ? num_kept : 0;
    }
    const int64_t num_coming = (num_common - num_matched_pages) * options_.page_size;
    if (num_coming > 0 && 2 * num_coming >= sequence.num_tokens() - sequence.num_computed) {
      return true;
    }
  }
  return false;
}

void Scheduler::mark_computed(const Chunk& chunk) {
  Sequence& sequence = *chunk.sequence;
  const int64_t num_full_before = sequence.num_computed / options_.page_size;
  sequence.num_computed += chunk.num_tokens;
  const int64_t num_full = sequence.num_computed / options_.page_size;
  if (!tree_ || num_full == num_full_before) {
    return;
  }
  // Where the tree had the page already, its copy replaces ours. Keeping both would not only waste a page: the tree's
  // could not be evicted while our later pages hang below it, and the pool might not suffice for this sequence alone.
  const auto tokens = std::span(sequence.tokens).first(static_cast<size_t>(num_full * options_.page_size));
  tree_->insert(tokens, std::span(sequence.pages).first(static_cast<size_t>(num_full)), sequence.salt);
  if (states_ != nullptr && !sequence.all_logits && sequence.num_computed == num_full * options_.page_size) {
    keep_state(sequence, num_full);
  }
}

// The states stand at the end of so many pages, all of which the tree knows.
void Scheduler::keep_state(Sequence& sequence, int64_t num_pages) {
  const auto tokens_of = [&](int64_t count) {
    return std::span(sequence.tokens).first(static_cast<size_t>(count * options_.page_size));
  };
  if (num_pages > sequence.prompt_pages) {  // an answer's move on with it
    if (sequence.answer_pages > 0) {
      tree_->drop_state(tokens_of(sequence.answer_pages), sequence.salt);
    }
    sequence.answer_pages = num_pages;
  } else if (num_pages != sequence.prompt_pages && num_pages != sequence.branch_pages) {
    return;
  }
  tree_->keep_state(tokens_of(num_pages), *sequence.state_slot, sequence.salt);
}

void Scheduler::remove(Sequence& sequence) {
  std::erase(running_, &sequence);
  std::erase(waiting_, &sequence);
  std::erase(paused_, &sequence);
  release_memory(sequence);
}

void Scheduler::release_memory(Sequence& sequence) {
  for (const PageId page : sequence.pages) {
    pool_.release(page);
  }
  sequence.pages.clear();
  sequence.num_computed = 0;
  if (sequence.state_slot) {
    states_->release(*sequence.state_slot);
    sequence.state_slot.reset();
  }
}

}  // namespace shoal
