// Decides what a step computes: which sequences, how many tokens of each, on which pages. Host logic only; the engine's
// thread is its one caller.
//
// A sequence is its tokens and how many of them are computed (their K and V lie in pages). Prefill, decode and resuming
// after a preemption are the same thing: the next chunk of tokens that are not computed yet; a chunk that reaches the
// last token yields the logits from which the next one is drawn.
//
// Why nothing waits for ever: the oldest running sequence may take the pages of all others, those of paused ones are
// anybody's, what the prefix tree holds alone can be evicted, and a request is accepted only if it fits the pool by itself. So the oldest moves in every
// step.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <vector>

#include "shoal/state/page_pool.h"
#include "shoal/state/prefix_tree.h"
#include "shoal/state/state_pool.h"

namespace shoal {

struct Sequence {
  uint64_t arrival = 0;         // smaller is older; unique
  std::vector<int32_t> tokens;  // prompt, then what was generated
  int64_t num_prompt = 0;
  bool all_logits = false;  // logits of every token: never skips a prefix
  uint64_t salt = 0;

  // The scheduler's.
  std::vector<PageId> pages;            // of positions [i * page_size, (i + 1) * page_size)
  std::optional<StateSlot> state_slot;  // while running, of a model with states
  int64_t num_computed = 0;
  int64_t num_prefix_hit = -1;  // tokens found in the prefix tree when first admitted; -1: not yet
  // Of a model with states, in pages: where others' prompts are known to part from this one, where the prompt ends, and
  // how far its answer's states are kept; 0: nowhere.
  int64_t branch_pages = 0;
  int64_t prompt_pages = 0;
  int64_t answer_pages = 0;

  int64_t num_tokens() const { return static_cast<int64_t>(tokens.size()); }
};

struct Chunk {
  Sequence* sequence = nullptr;
  int64_t begin = 0;           // position of the first token
  int64_t num_tokens = 0;      // at least 1
  int64_t num_logit_rows = 0;  // the last rows: 1 if the chunk reaches the end, all of them with all_logits
};

struct SchedulerOptions {
  int64_t max_batch_tokens = 2048;
  int64_t max_seqs = 64;              // at most max_batch_tokens count, so that everybody running moves
  int64_t max_all_logits_rows = 256;  // rows a step of sequences with all_logits
  int64_t page_size = 32;
  bool prefix_cache = true;
};

class Scheduler {
 public:
  // `states`: of a model that has some, with at least max_seqs slots; those beyond keep states of prefixes. They are kept
  // where somebody will look for them: at the last full page of a prompt, at the last of an answer, and where a prompt
  // was found to share pages with another without states at their end. Chunks stop there.
  Scheduler(PagePool& pool, const SchedulerOptions& options, StatePool* states = nullptr);

  // Whether a sequence that grows to `num_tokens` computed tokens can be served at all.
  bool can_ever_fit(int64_t num_tokens) const;

  // The sequence stays the caller's and must live until it is removed. It has at least one token.
  void add(Sequence& sequence);

  // The next step: decodes first, then prompts in order of arrival until the token budget is used. Never empty while
  // there is work. Valid until the next call.
  std::span<const Chunk> schedule();

  // A chunk's K and V are written. Full pages become known to the prefix tree.
  void mark_computed(const Chunk& chunk);

  // A running sequence is left out of steps until it is resumed. It keeps its pages and state until another needs them;
  // it is then computed anew, as after a preemption.
  void pause(Sequence& sequence);
  void resume(Sequence& sequence);

  // Forgets a sequence, wherever it is, and releases its pages.
  void remove(Sequence& sequence);

  // Whether a step would compute something: what is paused is no work.
  bool has_work() const { return !running_.empty() || !waiting_.empty(); }
  int64_t num_waiting() const { return static_cast<int64_t>(waiting_.size()); }
  int64_t num_running() const { return static_cast<int64_t>(running_.size()); }
  int64_t num_paused() const { return static_cast<int64_t>(paused_.size()); }
  int64_t num_preemptions() const { return num_preemptions_; }
  int64_t num_kept_states() const { return tree_ ? tree_->num_states() : 0; }
  int64_t num_cached_pages() const { return tree_ ? tree_->num_cached() : 0; }

 private:
  void continue_running(bool decodes);
  void admit_waiting();
  PrefixMatch match_prefix(Sequence& sequence);
  bool try_admit(Sequence& sequence);
  void add_chunk(Sequence& sequence);
  int64_t reserve(Sequence& sequence, int64_t num_tokens);
  std::optional<PageId> take_page(const Sequence& sequence);
  void preempt_youngest();
  bool strip_paused();
  bool prefix_is_coming(const Sequence& sequence, int64_t num_matched_pages) const;
  int64_t tokens_to_next_stop(const Sequence& sequence) const;
  void keep_state(Sequence& sequence, int64_t num_pages);
  int64_t missing_pages(const Sequence& sequence) const;
  void release_memory(Sequence& sequence);

  PagePool& pool_;
  SchedulerOptions options_;
  StatePool* states_;
  std::optional<PrefixTree> tree_;
  std::vector<Sequence*> running_;  // oldest first
  std::deque<Sequence*> waiting_;   // oldest first; hold no pages
  std::vector<Sequence*> paused_;   // last paused last; some hold no pages any more
  std::vector<Chunk> chunks_;
  int64_t budget_ = 0;
  int64_t logit_rows_left_ = 0;  // for all_logits
  int64_t num_preemptions_ = 0;
};

}  // namespace shoal
