// The insides of Engine: what callers share with the loop, and the loop.
//
// Who owns what: `mutex_` guards the requests' updates, the arrivals, cancellations and resumptions, the statistics and the flags.
// The scheduler, the model, the cache and a request's tokens belong to the loop's thread alone once it runs.
#pragma once

#include <unistd.h>

#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "shoal/cpu/thread_pool.h"
#include "shoal/engine/batch.h"
#include "shoal/engine/device_step.h"
#include "shoal/engine/engine.h"
#include "shoal/engine/resolve.h"
#include "shoal/engine/scheduler.h"
#include "shoal/model/model.h"
#include "shoal/state/kv_cache.h"
#include "shoal/state/state_pool.h"

namespace shoal {

class Engine::Impl {
 public:
  Impl(const EngineOptions& options, std::unique_ptr<Model> model, std::unique_ptr<cpu::ThreadPool> pool);
  ~Impl();

  bool is_here() const { return owner_ == ::getpid(); }  // not in a child of the process that made it
  const EngineInfo& info() const { return info_; }
  EngineStats stats();
  Result<RequestId, SubmitFailure> submit(Request request);
  RequestUpdate wait(RequestId id, std::chrono::milliseconds timeout);
  void cancel(RequestId id);
  std::vector<float> logits(std::span<const int32_t> tokens);

 private:
  // Guarded by mutex_ from `update` on; before that the loop's, once submitted.
  struct State : Sequence {
    SamplingOptions sampling;
    std::vector<int32_t> stop_ids;
    int64_t max_tokens = 0;
    int64_t max_queued_tokens = 0;
    std::vector<float>* logits = nullptr;  // [num_prompt, vocab_size], of a caller that waits in logits()

    RequestUpdate update;
    ErrorCode error_code = ErrorCode::kInternal;  // with kError
    bool is_changed = false;
    bool is_paused = false;
    bool is_delivered = false;
    std::condition_variable changed;
  };

  // What a step did to one sequence.
  struct Outcome {
    bool has_token = false;
    Sampled token;
    int64_t num_prompt_done = 0;
    int64_t num_prefix_hit = 0;
    FinishReason finish = FinishReason::kNone;
    std::string error;
  };

  // Counts callers that may sleep, so that the destructor outlives them.
  class Inside {
   public:
    explicit Inside(Impl& impl);
    ~Inside();
    Inside(const Inside&) = delete;
    Inside& operator=(const Inside&) = delete;

   private:
    Impl& impl_;
  };

  void check_request(const Request& request) const;
  Result<std::shared_ptr<State>, SubmitFailure> enqueue(Request request, std::vector<float>* logits);
  RequestUpdate wait_for(State& state, std::chrono::milliseconds timeout, std::unique_lock<std::mutex>& lock);

  void loop();
  bool receive();
  void step();
  void draw(std::span<const Chunk> chunks);
  void draw_chunk(const Chunk& chunk, const float* rows, Outcome& outcome);
  void advance(std::span<const Chunk> chunks);
  void fail_chunks(std::span<const Chunk> chunks, ErrorCode code, const std::string& message);
  void end_all(FinishReason reason, const std::string& message);
  void set_finish(State& state, FinishReason reason, const std::string& message);
  void update_stats();

  std::unique_ptr<Model> model_;
  std::unique_ptr<cpu::ThreadPool> threads_;
  Device device_;
  ResolvedOptions resolved_;
  Workspace workspace_;
  std::unique_ptr<DeviceStep> device_step_;  // null on the CPU
  OpContext context_;
  std::unique_ptr<KvCache> cache_;
  std::unique_ptr<StatePool> states_;  // null for a model without states
  PagePool pages_;
  Scheduler scheduler_;
  BatchBuilder batch_;
  AlignedBuffer logits_;                  // [max_logit_rows, vocab_size]
  std::vector<const float*> chunk_rows_;  // first row of each chunk
  std::vector<Outcome> outcomes_;         // of each chunk
  EngineInfo info_;

  std::mutex mutex_;
  std::condition_variable wake_;                                    // the loop
  std::condition_variable leave_;                                   // the destructor
  std::unordered_map<RequestId, std::shared_ptr<State>> requests_;  // until their last update is delivered
  std::vector<State*> arrivals_;
  std::vector<RequestId> cancellations_;
  std::vector<RequestId> resumptions_;
  EngineStats stats_;
  RequestId next_id_ = 1;
  int64_t num_inside_ = 0;
  bool is_stopping_ = false;
  bool has_failed_ = false;

  const pid_t owner_ = ::getpid();
  std::thread thread_;  // last: starts when everything above is there
};

}  // namespace shoal
