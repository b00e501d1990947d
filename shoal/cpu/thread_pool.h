// A fixed pool of threads with a deterministic partition: the same sizes give every thread the same ranges.
//
// Work is short (tens of microseconds) and frequent, so idle workers spin for a while before they sleep.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

namespace shoal::cpu {

class ThreadPool {
 public:
  // `num_threads` counts the caller; 0 means one per hardware thread. kInvalidArgument outside 0..1024, kOutOfMemory if
  // the operating system refuses a thread.
  explicit ThreadPool(int num_threads = 0);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const { return static_cast<int>(workers_.size()) + 1; }

  // Calls body(begin, end, thread_idx) on contiguous ranges that cover [0, count), at most num_threads of them; each
  // range but the last is a multiple of `grain`. `thread_idx` is the range's number, for scratch memory: no two ranges
  // share it. Returns when all are done. The caller takes part, also in ranges whose thread has not woken yet: on a
  // busy machine it does not wait for a thread that is not running. An exception of a body is rethrown here, after all
  // ranges ended. Not reentrant; one caller at a time.
  template <class Body>
  void parallel_for(int64_t count, int64_t grain, Body&& body) {
    using Plain = std::remove_reference_t<Body>;
    run(
        count, grain,
        [](void* b, int64_t begin, int64_t end, int thread_idx) { (*static_cast<Plain*>(b))(begin, end, thread_idx); },
        const_cast<void*>(static_cast<const void*>(&body)));
  }

 private:
  using Call = void (*)(void* body, int64_t begin, int64_t end, int thread_idx);
  struct Job {
    Call call = nullptr;
    void* body = nullptr;
    int64_t count = 0;
    int64_t chunk = 0;  // size of every range but the last
  };

  void stop();
  void run(int64_t count, int64_t grain, Call call, void* body);
  void work(int thread_idx);
  void take_range(uint64_t generation, int range_idx);
  void run_range(const Job& job, int range_idx);

  // The last job whose range of this number somebody took. A cache line each: they are written by different threads.
  struct alignas(64) Claim {
    std::atomic<uint64_t> generation{0};
  };

  std::vector<std::thread> workers_;
  std::unique_ptr<Claim[]> claims_;  // one a thread
  Job job_;                          // written by run() while no range is open, read by whoever claimed one
  std::atomic<uint64_t> generation_{0};
  std::atomic<int> num_done_{0};  // ranges of the current job that ended
  std::atomic<bool> stop_{false};
  std::mutex mutex_;
  std::condition_variable wake_;
  int num_sleeping_ = 0;      // guarded by mutex_
  std::exception_ptr error_;  // guarded by mutex_
};

}  // namespace shoal::cpu
