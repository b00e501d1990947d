#include "shoal/engine/scheduler.h"

#include <gtest/gtest.h>

#include <memory>
#include <numeric>
#include <set>

#include "shoal/base/error.h"
#include "testkit/testkit.h"

namespace shoal {
namespace {

constexpr int64_t kPageSize = 4;

// "0:8 2:1" reads: eight tokens of the sequence that arrived as number 0, one of number 2.
std::string text_of(std::span<const Chunk> chunks) {
  std::string text;
  for (const Chunk& chunk : chunks) {
    text += concat(text.empty() ? "" : " ", chunk.sequence->arrival, ":", chunk.num_tokens);
  }
  return text;
}

class Sim {
 public:
  Sim(int64_t num_pages, SchedulerOptions options) : pool(num_pages), scheduler(pool, with_page_size(options)) {}

  Sequence& add(std::vector<int32_t> prompt, bool all_logits = false, uint64_t salt = 0) {
    auto& sequence = sequences.emplace_back(std::make_unique<Sequence>());
    sequence->arrival = sequences.size() - 1;
    sequence->num_prompt = static_cast<int64_t>(prompt.size());
    sequence->tokens = std::move(prompt);
    sequence->all_logits = all_logits;
    sequence->salt = salt;
    scheduler.add(*sequence);
    return *sequence;
  }
  // A prompt that shares nothing with another's.
  Sequence& add(int64_t length, bool all_logits = false) {
    std::vector<int32_t> prompt(static_cast<size_t>(length));
    std::iota(prompt.begin(), prompt.end(), static_cast<int32_t>(1000 * (sequences.size() + 1)));
    return add(std::move(prompt), all_logits);
  }

  // One step; sequences that reach their end draw a token.
  std::string step() {
    const auto chunks = scheduler.schedule();
    std::string text = text_of(chunks);
    for (const Chunk& chunk : chunks) {
      Sequence& sequence = *chunk.sequence;
      EXPECT_EQ(chunk.begin, sequence.num_computed);
      EXPECT_GE(std::ssize(sequence.pages) * kPageSize, chunk.begin + chunk.num_tokens);
      for (int64_t p = chunk.begin / kPageSize; p <= (chunk.begin + chunk.num_tokens - 1) / kPageSize; ++p) {
        EXPECT_EQ(pool.ref_count(sequence.pages[static_cast<size_t>(p)]), 1) << "a shared page would be written";
      }
    }
    for (const Chunk& chunk : chunks) {
      scheduler.mark_computed(chunk);
      Sequence& sequence = *chunk.sequence;
      const bool at_end = sequence.num_computed == sequence.num_tokens();
      EXPECT_EQ(chunk.num_logit_rows, sequence.all_logits ? chunk.num_tokens : (at_end ? 1 : 0));
      if (at_end && !sequence.all_logits) {
        sequence.tokens.push_back(static_cast<int32_t>(sequence.arrival));
      } else if (at_end) {
        scheduler.remove(sequence);
        sequence.tokens.clear();
      }
    }
    return text;
  }

  PagePool pool;
  Scheduler scheduler;
  std::vector<std::unique_ptr<Sequence>> sequences;

 private:
  static SchedulerOptions with_page_size(SchedulerOptions options) {
    options.page_size = kPageSize;
    return options;
  }
};

SchedulerOptions limits(int64_t max_batch_tokens, int64_t max_seqs, bool prefix_cache = false) {
  SchedulerOptions options;
  options.max_batch_tokens = max_batch_tokens;
  options.max_seqs = max_seqs;
  options.prefix_cache = prefix_cache;
  return options;
}

TEST(Scheduler, DecodesGoFirstThenPromptsByArrivalUntilTheBudgetIsUsed) {
  Sim sim(100, limits(10, 8));
  sim.add(3);
  EXPECT_EQ(sim.step(), "0:3");
  sim.add(14);
  sim.add(4);
  sim.add(5);
  EXPECT_EQ(sim.step(), "0:1 1:9");
  EXPECT_EQ(sim.step(), "0:1 1:5 2:4");  // 3 finds no budget left
  EXPECT_EQ(sim.step(), "0:1 1:1 2:1 3:5");
  EXPECT_EQ(sim.step(), "0:1 1:1 2:1 3:1");
}

TEST(Scheduler, HonoursMaxSeqs) {
  Sim sim(100, limits(100, 2));
  sim.add(3);
  sim.add(3);
  Sequence& third = sim.add(3);
  EXPECT_EQ(sim.step(), "0:3 1:3");
  EXPECT_EQ(sim.step(), "0:1 1:1");
  EXPECT_EQ(third.num_prefix_hit, -1);
  sim.scheduler.remove(*sim.sequences[0]);
  EXPECT_EQ(sim.step(), "1:1 2:3");
}

TEST(Scheduler, EverybodyRunningMovesEvenWithABudgetBelowMaxSeqs) {
  Sim sim(100, limits(2, 64));
  for (int i = 0; i < 3; ++i) {
    sim.add(2);
  }
  EXPECT_EQ(sim.step(), "0:2");
  EXPECT_EQ(sim.step(), "0:1 1:1");
  EXPECT_EQ(sim.step(), "0:1 1:1");  // 2 is not let in: it could not move
  EXPECT_EQ(sim.scheduler.num_waiting(), 1);
}

TEST(Scheduler, PreemptsTheYoungestAndResumesItWithWhatItHadDrawn) {
  Sim sim(6, limits(100, 8));
  Sequence& old = sim.add(7);
  Sequence& young = sim.add(7);
  EXPECT_EQ(sim.step(), "0:7 1:7");
  for (int i = 0; i < 5; ++i) {
    EXPECT_EQ(sim.step(), "0:1 1:1");  // to 12 tokens: three pages each
  }
  EXPECT_EQ(sim.step(), "0:1");  // the old one takes a fourth page
  EXPECT_EQ(sim.scheduler.num_preemptions(), 1);
  EXPECT_TRUE(young.pages.empty());
  EXPECT_EQ(young.num_tokens(), 13);
  EXPECT_EQ(sim.pool.num_free(), 2);
  EXPECT_EQ(sim.step(), "0:1");
  sim.scheduler.remove(old);
  EXPECT_EQ(sim.step(), "1:13");  // prompt and six drawn tokens
  EXPECT_EQ(young.num_tokens(), 14);
}

TEST(Scheduler, AVictimLeavesThePlanOfTheStep) {
  SchedulerOptions options = limits(100, 8);
  options.max_all_logits_rows = 1;
  Sim sim(7, options);
  sim.add(16, true);  // one row a step, so it still reads its prompt while the younger one decodes
  sim.add(2);
  EXPECT_EQ(sim.step(), "0:1 1:2");
  for (int i = 0; i < 11; ++i) {
    EXPECT_EQ(sim.step(), "1:1 0:1");
  }
  // The younger decodes on its last page and is planned first; then the older one wants a page.
  EXPECT_EQ(sim.step(), "0:1");
  EXPECT_EQ(sim.scheduler.num_preemptions(), 1);
  EXPECT_EQ(sim.sequences[1]->num_tokens(), 14);
}

TEST(Scheduler, TheYoungestKeepsItsPagesWhileItWaits) {
  Sim sim(4, limits(100, 8));
  sim.add(4);
  Sequence& young = sim.add(7);
  EXPECT_EQ(sim.step(), "0:4 1:7");
  EXPECT_EQ(sim.step(), "0:1 1:1");  // the older takes the last page
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(sim.step(), "0:1");
    EXPECT_EQ(young.pages.size(), 2u);
  }
  EXPECT_EQ(sim.scheduler.num_preemptions(), 0);
  EXPECT_EQ(sim.step(), "0:1");
  EXPECT_EQ(sim.scheduler.num_preemptions(), 1);
}

TEST(Scheduler, TakesWholePagesOfAKnownPrefixButComputesTheLastToken) {
  Sim sim(20, limits(100, 8, true));
  const std::vector<int32_t> prompt = {1, 2, 3, 4, 5, 6, 7, 8};
  Sequence& first = sim.add(prompt);
  EXPECT_EQ(sim.step(), "0:8");
  EXPECT_EQ(sim.scheduler.num_cached_pages(), 2);  // shared while the first still runs
  Sequence& second = sim.add(prompt);
  EXPECT_EQ(sim.step(), "0:1 1:4");
  EXPECT_EQ(second.num_prefix_hit, 4);
  EXPECT_EQ(second.pages[0], first.pages[0]);
  EXPECT_EQ(second.pages[1], first.pages[1]);  // computed twice, kept once
  Sequence& longer = sim.add({1, 2, 3, 4, 5, 6, 7, 8, 9});
  EXPECT_EQ(sim.step(), "0:1 1:1 2:1");
  EXPECT_EQ(longer.num_prefix_hit, 8);
  Sequence& salted = sim.add(prompt, false, 7);
  EXPECT_EQ(sim.step(), "0:1 1:1 2:1 3:8");
  EXPECT_EQ(salted.num_prefix_hit, 0);
}

TEST(Scheduler, WaitsForAPrefixThatSomebodyIsComputing) {
  Sim sim(40, limits(100, 8, true));
  std::vector<int32_t> prompt(18);
  std::iota(prompt.begin(), prompt.end(), 0);
  sim.add(prompt);
  sim.add(prompt);
  sim.add(5);
  std::vector<int32_t> other = prompt;
  other[5] = 99;  // shares one page of five: not worth waiting
  sim.add(other);
  EXPECT_EQ(sim.step(), "0:18 2:5 3:18");
  EXPECT_EQ(sim.step(), "0:1 2:1 3:1 1:2");
  EXPECT_EQ(sim.sequences[1]->num_prefix_hit, 16);
}

TEST(Scheduler, ALongQueueForOnePrefixEndsTheSearch) {
  Sim sim(40, limits(100, 3, true));
  const std::vector<int32_t> prompt(18, 7);
  for (int i = 0; i < 4; ++i) {
    sim.add(prompt);
  }
  sim.add(5);
  EXPECT_EQ(sim.step(), "0:18");  // 4 would fit, but three before it wait already
  EXPECT_EQ(sim.step(), "0:1 1:2 2:2");
}

TEST(Scheduler, ASequenceThatNeedsThePoolAloneIsNotBlockedByADuplicatePage) {
  // Both compute the same first page in one step (the second is too short to wait for it); then one needs all pages.
  Sim sim(6, limits(100, 8, true));
  Sequence& first = sim.add({1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14});
  EXPECT_EQ(sim.step(), "0:14");
  Sequence& second = sim.add({1, 2, 3, 4}, true);  // reads every row, so it does not skip
  EXPECT_EQ(sim.step(), "0:1 1:4");
  EXPECT_TRUE(second.pages.empty());
  for (int i = 0; i < 9; ++i) {
    EXPECT_EQ(sim.step(), "0:1");
  }
  EXPECT_EQ(first.num_computed, 24);  // all six pages
}

TEST(Scheduler, AllLogitsSkipsNoPrefixAndIsBoundedByRows) {
  SchedulerOptions options = limits(100, 8, true);
  options.max_all_logits_rows = 5;
  Sim sim(40, options);
  const std::vector<int32_t> prompt = {1, 2, 3, 4, 5, 6, 7, 8};
  sim.add(prompt);
  sim.step();
  Sequence& all = sim.add(prompt, true);
  sim.add(7, true);
  EXPECT_EQ(sim.step(), "0:1 1:5");
  EXPECT_EQ(all.num_prefix_hit, 0);
  EXPECT_EQ(sim.step(), "0:1 1:3 2:2");
  EXPECT_EQ(sim.step(), "0:1 2:5");
  EXPECT_EQ(sim.step(), "0:1");
}

TEST(Scheduler, EvictsCachedPagesBeforeItPreempts) {
  Sim sim(6, limits(100, 8, true));
  sim.scheduler.remove([&]() -> Sequence& {
    Sequence& gone = sim.add(12);
    EXPECT_EQ(sim.step(), "0:12");
    return gone;
  }());
  EXPECT_EQ(sim.scheduler.num_cached_pages(), 3);
  EXPECT_EQ(sim.pool.num_free(), 3);
  sim.add(20);
  EXPECT_EQ(sim.step(), "1:20");
  EXPECT_EQ(sim.scheduler.num_preemptions(), 0);
  EXPECT_EQ(sim.scheduler.num_cached_pages(), 6);  // one old, five new
}

TEST(Scheduler, PausedSequencesKeepTheirPagesUntilAnotherNeedsThem) {
  Sim sim(6, limits(100, 2));
  sim.add(4);
  sim.add(6);
  EXPECT_EQ(sim.step(), "0:4 1:6");
  sim.scheduler.pause(*sim.sequences[0]);
  EXPECT_EQ(sim.step(), "1:1");
  EXPECT_EQ(sim.pool.num_free(), 3);
  sim.scheduler.resume(*sim.sequences[0]);
  EXPECT_EQ(sim.step(), "0:1 1:1");  // nothing computed anew
  // Paused ones do not count against max_seqs; the last one's pages go first, for one that runs or one that comes.
  sim.scheduler.pause(*sim.sequences[0]);
  sim.scheduler.pause(*sim.sequences[1]);
  EXPECT_FALSE(sim.scheduler.has_work());
  EXPECT_EQ(sim.step(), "");
  sim.add(12);
  EXPECT_EQ(sim.step(), "2:12");
  EXPECT_TRUE(sim.sequences[1]->pages.empty());
  EXPECT_EQ(sim.sequences[0]->pages.size(), 2u);
  sim.scheduler.resume(*sim.sequences[1]);
  sim.scheduler.resume(*sim.sequences[0]);
  EXPECT_EQ(sim.step(), "0:1 2:1");  // no room for 1 beside both
  sim.scheduler.pause(*sim.sequences[0]);
  sim.scheduler.remove(*sim.sequences[2]);
  EXPECT_EQ(sim.step(), "1:9");  // from its beginning
  sim.scheduler.remove(*sim.sequences[0]);
  sim.scheduler.remove(*sim.sequences[1]);
  EXPECT_EQ(sim.scheduler.num_paused(), 0);
  EXPECT_EQ(sim.pool.num_free(), 6);
}

TEST(Scheduler, KnowsWhatCanNeverFit) {
  Sim sim(3, limits(100, 8));
  EXPECT_TRUE(sim.scheduler.can_ever_fit(12));
  EXPECT_FALSE(sim.scheduler.can_ever_fit(13));
}

// Any mix ends, with every page accounted for, and nobody is ever fed another's page.
TEST(Scheduler, RandomLoadsAlwaysEnd) {
  for (uint64_t seed = 0; seed < 200; ++seed) {
    SCOPED_TRACE(seed);
    testkit::Random random(seed);
    const int64_t num_pages = random.integer(4, 24);
    SchedulerOptions options = limits(random.integer(1, 40), random.integer(1, 10), random.integer(0, 1) == 1);
    options.max_all_logits_rows = random.integer(1, 8);
    Sim sim(num_pages, options);
    std::vector<int64_t> target;  // tokens that are drawn before the end
    std::set<Sequence*> paused;
    int num_left = 30;
    int64_t num_alive = 0;
    for (int step = 0; step < 20000 && (num_left > 0 || num_alive > 0); ++step) {
      while (num_left > 0 && random.integer(0, 2) == 0) {
        const int64_t length = random.integer(1, num_pages * kPageSize - 1);
        std::vector<int32_t> prompt(static_cast<size_t>(length));
        for (int32_t& token : prompt) {
          token = random.integer(0, 30) == 0 ? 1 : 0;  // many shared prefixes
        }
        sim.add(std::move(prompt), random.integer(0, 7) == 0, static_cast<uint64_t>(random.integer(0, 1)));
        target.push_back(random.integer(1, num_pages * kPageSize - length + 1));
        --num_left;
        ++num_alive;
      }
      sim.step();
      num_alive = 0;
      for (size_t i = 0; i < sim.sequences.size(); ++i) {
        Sequence& sequence = *sim.sequences[i];
        if (sequence.tokens.empty()) {
          continue;
        }
        const bool is_done = sequence.num_tokens() - sequence.num_prompt >= target[i];
        const bool is_cancelled = random.integer(0, 60) == 0;
        if (is_done || is_cancelled) {
          sim.scheduler.remove(sequence);
          sequence.tokens.clear();
          paused.erase(&sequence);
        } else if (paused.contains(&sequence)) {
          if (random.integer(0, 5) == 0) {
            sim.scheduler.resume(sequence);
            paused.erase(&sequence);
          }
          ++num_alive;
        } else if (sequence.num_tokens() > sequence.num_prompt && sequence.num_computed > 0 &&
                   random.integer(0, 9) == 0) {
          sim.scheduler.pause(sequence);
          paused.insert(&sequence);
          ++num_alive;
        } else {
          ++num_alive;
        }
      }
      ASSERT_LE(sim.scheduler.num_running(), options.max_seqs);
    }
    EXPECT_EQ(num_left, 0);
    EXPECT_FALSE(sim.scheduler.has_work());
    EXPECT_EQ(sim.pool.num_free() + sim.scheduler.num_cached_pages(), num_pages);
  }
}

}  // namespace
}  // namespace shoal
