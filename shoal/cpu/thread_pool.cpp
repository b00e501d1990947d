#include "shoal/cpu/thread_pool.h"

#include <algorithm>
#include <system_error>

#include "shoal/base/checked.h"
#include "shoal/base/error.h"

namespace shoal::cpu {
namespace {

constexpr int kSpins =
    20000;  // about 100 us of pause instructions: longer than the gaps between the operators of a step

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

}  // namespace

ThreadPool::ThreadPool(int num_threads) {
  require(num_threads >= 0 && num_threads <= 1024, "threads must be 0 (all) to 1024, not ", num_threads);
  const int count = num_threads > 0 ? num_threads : static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  claims_ = std::make_unique<Claim[]>(static_cast<size_t>(count));
  workers_.reserve(static_cast<size_t>(count - 1));
  try {
    for (int thread_idx = 1; thread_idx < count; ++thread_idx) {
      workers_.emplace_back([this, thread_idx] { work(thread_idx); });
    }
  } catch (const std::system_error& error) {
    const size_t num_started = workers_.size() + 1;
    stop();  // a running thread that is destroyed would end the process
    fail(ErrorCode::kOutOfMemory, "cannot start thread ", num_started + 1, " of ", count, ": ", error.what());
  }
}

ThreadPool::~ThreadPool() { stop(); }

void ThreadPool::stop() {
  {
    const std::lock_guard lock(mutex_);
    stop_.store(true);
    generation_.fetch_add(1);
  }
  wake_.notify_all();
  for (std::thread& worker : workers_) {
    worker.join();
  }
}

void ThreadPool::run(int64_t count, int64_t grain, Call call, void* body) {
  if (count <= 0) {
    return;
  }
  const int64_t step = std::max<int64_t>(grain, 1);
  const int64_t share = ceil_div(ceil_div(count, static_cast<int64_t>(num_threads())), step);
  const int64_t chunk = checked_mul(share, step).value_or(count);
  if (workers_.empty() || chunk >= count) {
    call(body, 0, count, 0);
    return;
  }
  job_ = {call, body, count, chunk};
  num_done_.store(0, std::memory_order_relaxed);
  uint64_t generation = 0;
  bool wake = false;
  {
    // The lock orders this store against a worker that is about to sleep.
    const std::lock_guard lock(mutex_);
    generation = generation_.fetch_add(1, std::memory_order_release) + 1;
    wake = num_sleeping_ > 0;
  }
  if (wake) {
    wake_.notify_all();
  }
  for (int range_idx = 0; range_idx < num_threads(); ++range_idx) {
    take_range(generation, range_idx);
  }
  for (int spin = 0; num_done_.load(std::memory_order_acquire) != num_threads(); ++spin) {
    spin < kSpins ? pause() : std::this_thread::yield();
  }
  std::exception_ptr error;
  {
    const std::lock_guard lock(mutex_);
    std::swap(error, error_);
  }
  if (error) {
    std::rethrow_exception(error);
  }
}

void ThreadPool::work(int thread_idx) {
  uint64_t seen = 0;
  while (true) {
    int spin = 0;
    while (generation_.load(std::memory_order_acquire) == seen && spin < kSpins) {
      pause();
      ++spin;
    }
    if (generation_.load(std::memory_order_acquire) == seen) {
      std::unique_lock lock(mutex_);
      ++num_sleeping_;
      wake_.wait(lock, [&] { return generation_.load(std::memory_order_acquire) != seen; });
      --num_sleeping_;
    }
    seen = generation_.load(std::memory_order_acquire);
    if (stop_.load()) {
      return;
    }
    take_range(seen, thread_idx);
  }
}

// Runs the range unless somebody took it. A worker may come so late that its job is over: then the claim stands at that
// job or a later one, since run() returns only after every range was taken and ended.
void ThreadPool::take_range(uint64_t generation, int range_idx) {
  std::atomic<uint64_t>& claim = claims_[static_cast<size_t>(range_idx)].generation;
  uint64_t last = claim.load(std::memory_order_relaxed);
  if (last >= generation || !claim.compare_exchange_strong(last, generation, std::memory_order_acq_rel)) {
    return;
  }
  run_range(job_, range_idx);
  num_done_.fetch_add(1, std::memory_order_acq_rel);
}

void ThreadPool::run_range(const Job& job, int range_idx) {
  if (range_idx >= ceil_div(job.count, job.chunk)) {
    return;
  }
  const int64_t begin = job.chunk * range_idx;
  const int64_t end = begin + std::min(job.chunk, job.count - begin);
  try {
    job.call(job.body, begin, end, range_idx);
  } catch (...) {
    const std::lock_guard lock(mutex_);
    if (!error_) {
      error_ = std::current_exception();
    }
  }
}

}  // namespace shoal::cpu
