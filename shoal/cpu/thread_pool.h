// A fixed pool of threads with a deterministic partition: the same sizes give every thread the same ranges.
//
// Work is short (tens of microseconds) and frequent, so idle workers spin for a while before they sleep.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
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

  // Calls body(begin, end, thread_idx) on contiguous ranges that cover [0, count), at most one range per thread; each
  // range but the last is a multiple of `grain`. Returns when all are done. The caller takes part. An exception of a
  // body is rethrown here, after all ranges ended. Not reentrant; one caller at a time.
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
  void run_range(const Job& job, int thread_idx);

  std::vector<std::thread> workers_;
  Job job_;
  std::atomic<uint64_t> generation_{0};
  std::atomic<int> num_pending_{0};
  std::atomic<bool> stop_{false};
  std::mutex mutex_;
  std::condition_variable wake_;
  int num_sleeping_ = 0;      // guarded by mutex_
  std::exception_ptr error_;  // guarded by mutex_
};

}  // namespace shoal::cpu
