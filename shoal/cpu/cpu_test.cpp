#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <limits>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "shoal/cpu/isa.h"
#include "shoal/cpu/thread_pool.h"
#include "testkit/expect_error.h"

namespace shoal::cpu {
namespace {

using testkit::expect_error;

// Sets SHOAL_CPU_ISA for a scope.
class IsaVariable {
 public:
  explicit IsaVariable(const char* value) {
    if (const char* before = std::getenv("SHOAL_CPU_ISA")) {
      before_ = before;
    }
    value == nullptr ? ::unsetenv("SHOAL_CPU_ISA") : ::setenv("SHOAL_CPU_ISA", value, 1);
  }
  ~IsaVariable() { before_ ? ::setenv("SHOAL_CPU_ISA", before_->c_str(), 1) : ::unsetenv("SHOAL_CPU_ISA"); }

 private:
  std::optional<std::string> before_;
};

TEST(Isa, ScalarIsAlwaysThereAndFirst) {
  ASSERT_FALSE(available_isas().empty());
  EXPECT_EQ(available_isas().front(), Isa::kScalar);
  for (size_t i = 1; i < available_isas().size(); ++i) {
    EXPECT_LT(available_isas()[i - 1], available_isas()[i]);
  }
  EXPECT_FALSE(processor_name().empty());
}

TEST(Isa, Names) {
  for (const Isa isa : available_isas()) {
    EXPECT_EQ(isa_from_name(to_string(isa)), isa);
  }
  EXPECT_EQ(isa_from_name(""), available_isas().back());
  for (const Isa isa : {Isa::kAvx2, Isa::kAvx512}) {
    if (available_isas().back() < isa) {
      expect_error(ErrorCode::kUnsupported, "is not available on this machine", [&] { isa_from_name(to_string(isa)); });
    }
  }
  expect_error(ErrorCode::kInvalidArgument, "\"sse9\\n\" is unknown: scalar, avx2 or avx512",
               [] { isa_from_name("sse9\n"); });
}

TEST(Isa, EnvironmentForcesIt) {
  {
    const IsaVariable variable("scalar");
    EXPECT_EQ(default_isa(), Isa::kScalar);
  }
  {
    const IsaVariable variable(nullptr);
    EXPECT_EQ(default_isa(), available_isas().back());
  }
  const IsaVariable variable("AVX2");
  expect_error(ErrorCode::kInvalidArgument, "\"AVX2\" is unknown", [] { default_isa(); });
}

using Range = std::tuple<int64_t, int64_t, int>;  // begin, end, thread_idx

std::vector<Range> ranges_of(ThreadPool& pool, int64_t count, int64_t grain) {
  std::vector<std::optional<Range>> by_thread(static_cast<size_t>(pool.num_threads()));
  std::atomic<int> num_calls = 0;
  pool.parallel_for(count, grain, [&](int64_t begin, int64_t end, int thread_idx) {
    by_thread[static_cast<size_t>(thread_idx)] = Range{begin, end, thread_idx};
    ++num_calls;
  });
  std::vector<Range> ranges;
  for (const auto& range : by_thread) {
    if (range) {
      ranges.push_back(*range);
    }
  }
  EXPECT_EQ(static_cast<size_t>(num_calls), ranges.size()) << "a thread was called twice";
  return ranges;
}

TEST(ThreadPool, CoversExactlyOnceWithWholeGrains) {
  for (const int num_threads : {1, 2, 3, 8}) {
    ThreadPool pool(num_threads);
    EXPECT_EQ(pool.num_threads(), num_threads);
    for (const int64_t count : {1, 2, 3, 7, 8, 9, 63, 64, 65, 1000}) {
      for (const int64_t grain : {-1, 0, 1, 2, 3, 8, 64, 5000}) {
        SCOPED_TRACE(testing::Message() << num_threads << " threads, " << count << " / " << grain);
        const std::vector<Range> ranges = ranges_of(pool, count, grain);
        int64_t covered = 0;
        for (const auto& [begin, end, thread_idx] : ranges) {
          EXPECT_EQ(begin, covered);
          EXPECT_LT(begin, end);
          EXPECT_TRUE(end == count || (end - begin) % std::max<int64_t>(grain, 1) == 0);
          covered = end;
        }
        EXPECT_EQ(covered, count);
        EXPECT_EQ(ranges_of(pool, count, grain), ranges);  // the same partition every time
      }
    }
  }
}

TEST(ThreadPool, PartitionDependsOnSizesOnly) {
  ThreadPool one(3);
  ThreadPool other(3);
  EXPECT_EQ(ranges_of(one, 1000, 16), ranges_of(other, 1000, 16));
  EXPECT_EQ(ranges_of(one, 1000, 16), (std::vector<Range>{{0, 336, 0}, {336, 672, 1}, {672, 1000, 2}}));
}

TEST(ThreadPool, HugeSizesDoNotWrap) {
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
  ThreadPool pool(4);
  for (const int64_t count : {kMax, kMax - 1, kMax / 2, kMax / 4 + 1}) {
    for (const int64_t grain : {int64_t{1}, int64_t{3}, kMax / 3, kMax / 2, kMax}) {
      SCOPED_TRACE(testing::Message() << count << " / " << grain);
      int64_t covered = 0;
      for (const auto& [begin, end, thread_idx] : ranges_of(pool, count, grain)) {
        EXPECT_EQ(begin, covered);
        EXPECT_LT(begin, end);
        covered = end;
      }
      EXPECT_EQ(covered, count);
    }
  }
}

TEST(ThreadPool, NothingToDo) {
  ThreadPool pool(2);
  for (const int64_t count : {int64_t{0}, int64_t{-5}, std::numeric_limits<int64_t>::min()}) {
    pool.parallel_for(count, 1, [](int64_t, int64_t, int) { FAIL() << "called"; });
  }
}

TEST(ThreadPool, RejectsThreadCounts) {
  expect_error(ErrorCode::kInvalidArgument, "threads must be 0 (all) to 1024, not -1", [] { ThreadPool pool(-1); });
  expect_error(ErrorCode::kInvalidArgument, "not 1025", [] { ThreadPool pool(1025); });
  EXPECT_GE(ThreadPool(0).num_threads(), 1);
}

// A thousand regions of a few microseconds: a lost wake-up hangs, a missing barrier shows as a wrong sum.
TEST(ThreadPool, ManySmallRegions) {
  ThreadPool pool(4);
  std::vector<int64_t> values(64, 0);  // not atomic: regions must order their accesses
  constexpr int kNumRegions = 1000;
  for (int region = 0; region < kNumRegions; ++region) {
    // Neighbours are read, so every region depends on all ranges of the one before.
    std::vector<int64_t> next(values.size());
    const auto count = static_cast<int64_t>(values.size());
    pool.parallel_for(count, 1 + region % 5, [&](int64_t begin, int64_t end, int) {
      for (int64_t i = begin; i < end; ++i) {
        next[static_cast<size_t>(i)] = values[static_cast<size_t>((i + 17) % count)] + 1;
      }
    });
    values = next;
  }
  for (const int64_t value : values) {
    EXPECT_EQ(value, kNumRegions);
  }
}

TEST(ThreadPool, WorkersThatSleepAreWoken) {
  ThreadPool pool(3);
  for (int round = 0; round < 5; ++round) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));  // longer than workers spin
    std::atomic<int64_t> sum = 0;
    pool.parallel_for(300, 1, [&](int64_t begin, int64_t end, int) { sum += end - begin; });
    EXPECT_EQ(sum, 300);
  }
}

TEST(ThreadPool, StartsAndStops) {
  for (int round = 0; round < 50; ++round) {
    ThreadPool pool(1 + round % 4);
    if (round % 2 == 0) {
      std::atomic<int64_t> sum = 0;
      pool.parallel_for(10, 1, [&](int64_t begin, int64_t end, int) { sum += end - begin; });
      EXPECT_EQ(sum, 10);
    }
  }
}

TEST(ThreadPool, RethrowsAfterAllRangesEnded) {
  ThreadPool pool(4);
  for (int thrower = 0; thrower < 4; ++thrower) {
    for (int round = 0; round < 50; ++round) {
      std::atomic<int> num_ended = 0;
      try {
        pool.parallel_for(4, 1, [&](int64_t begin, int64_t, int) {
          ++num_ended;
          if (begin == thrower) {
            throw std::out_of_range("range " + std::to_string(begin));
          }
        });
        FAIL() << "no exception";
      } catch (const std::out_of_range& error) {
        EXPECT_EQ(error.what(), "range " + std::to_string(thrower));
        EXPECT_EQ(num_ended, 4);
      }
    }
  }
}

TEST(ThreadPool, OneOfSeveralExceptionsArrivesAndThePoolGoesOn) {
  ThreadPool pool(4);
  for (int round = 0; round < 50; ++round) {
    EXPECT_THROW(pool.parallel_for(4, 1, [](int64_t, int64_t, int) { throw std::runtime_error("all"); }),
                 std::runtime_error);
    std::atomic<int64_t> sum = 0;
    pool.parallel_for(4, 1, [&](int64_t begin, int64_t end, int) { sum += end - begin; });  // no exception left over
    EXPECT_EQ(sum, 4);
  }
}

TEST(ThreadPool, ThrowsFromTheOnlyThread) {
  ThreadPool pool(1);
  EXPECT_THROW(pool.parallel_for(4, 1, [](int64_t, int64_t, int) { throw std::runtime_error("x"); }),
               std::runtime_error);
}

}  // namespace
}  // namespace shoal::cpu
