// The engine: requests of token ids in, tokens out. Knows nothing of text; never shows tensors.
//
// One thread runs the loop: it schedules a step, runs the model, samples, and puts tokens into each request's queue.
// All functions are safe to call from any thread. A request's greedy tokens do not depend on its neighbours, on
// chunking, on the order of pages or on a prefix hit.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "shoal/base/result.h"
#include "shoal/ops/sampling/sampling.h"

namespace shoal {

class Model;

struct EngineOptions {
  std::string model;              // path of a GGUF file or a model folder
  std::string device = "auto";    // auto, cpu, cuda, cuda:N; auto: CUDA where it is, if the options below allow it
  std::string kv_dtype = "auto";  // auto, f32, f16, bf16, int8; auto: f16, with exact f32, on CUDA bf16
  // Tokens of one sequence, prompt and answer, at most the model's; 0: the model's, but no more than 8192.
  int64_t max_context = 0;
  int64_t max_batch_tokens = 2048;  // token budget of a step; bounds a prefill chunk
  int64_t max_seqs = 64;            // sequences in one step
  int64_t page_size = 32;           // tokens per KV page: a power of two, at least 16
  int64_t num_pages = 0;            // 0: from kv_bytes
  // Memory for the KV cache; 0: what max_context of 4 sequences needs, at most a third of free memory.
  int64_t kv_bytes = 0;
  int threads = 0;     // 0: all cores
  bool exact = false;  // f32 activations and sums
  bool prefix_cache = true;
  std::function<void(double fraction)> load_progress;
};

using RequestId = uint64_t;

struct Request {
  std::vector<int32_t> prompt;  // at least one token
  SamplingOptions sampling;
  int64_t max_tokens = 16;        // 0: only reads the prompt
  std::vector<int32_t> stop_ids;  // end-of-sequence tokens; a sampled stop id is reported, then the request ends. An id
                                  // outside the vocabulary is never sampled
  bool all_logits = false;        // computes the logits of every prompt token, see logits(); implies max_tokens 0
  uint64_t salt = 0;              // separates prefix caches
  int64_t max_queued_tokens = 0;  // so many tokens that wait() has not taken pause the request until it does; 0: never
};

enum class FinishReason : uint8_t { kNone, kStop, kLength, kCancelled, kNonFinite, kError };
std::string_view to_string(FinishReason reason);  // "stop", "length", "cancelled", "non_finite", "error"

enum class SubmitFailure : uint8_t {
  kContextTooLong,  // prompt + max_tokens exceeds max_context, or can never fit the pages
  kStopped,         // the engine is shutting down or has failed
};

// What happened to a request since it was last asked: new tokens; the rest is cumulative.
struct RequestUpdate {
  std::vector<Sampled> tokens;
  int64_t num_prompt_done = 0;  // prompt tokens read so far, prefix hits included
  int64_t num_prefix_hit = 0;   // of these, found in the prefix cache
  FinishReason finish = FinishReason::kNone;
  std::string error;  // kError, kNonFinite: the sentence
};

struct EngineStats {
  int64_t num_waiting = 0;
  int64_t num_running = 0;
  int64_t num_paused = 0;
  int64_t num_pages = 0;
  int64_t num_free_pages = 0;    // not held by anyone
  int64_t num_cached_pages = 0;  // held by the prefix cache alone or shared
  int64_t num_preemptions = 0;
  int64_t num_steps = 0;
  int64_t num_tokens = 0;  // rows computed
};

struct EngineInfo {
  std::string architecture;
  std::string model_name;
  std::string device;    // "cpu", "cuda:0"
  std::string isa;       // "avx2"
  std::string kv_dtype;  // resolved
  int threads = 0;
  int64_t vocab_size = 0;
  int64_t max_context = 0;
  int64_t page_size = 0;
  int64_t num_pages = 0;
  int64_t num_parameters = 0;
  int64_t weight_bytes = 0;
  int64_t kv_bytes = 0;
  int64_t state_bytes = 0;  // of the slots for convolution and recurrent states, those of cached prefixes included
  bool prefix_cache = false;
};

class Engine {
 public:
  explicit Engine(const EngineOptions& options);
  // With a model made elsewhere (tests).
  Engine(const EngineOptions& options, std::unique_ptr<Model> model);
  ~Engine();  // cancels everything and joins the loop
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  const EngineInfo& info() const;
  EngineStats stats() const;

  // Throws kInvalidArgument for a prompt token outside the vocabulary, an empty prompt or an option out of range.
  // A request that was accepted is kept until wait() has delivered its end.
  Result<RequestId, SubmitFailure> submit(Request request);

  // Waits until something happened to the request or the time is over. After an update with a finish reason the request
  // is gone; asking again throws kInvalidArgument. Who waits while the engine is destroyed gets kCancelled.
  //
  // An exception of the model ends the requests of its step with kError; the engine goes on with the others.
  RequestUpdate wait(RequestId id, std::chrono::milliseconds timeout);

  // Takes effect within one step. The request still delivers its last update (kCancelled). Unknown or ended: no effect.
  void cancel(RequestId id);

  // Logits [num_tokens, vocab_size] of a request with all_logits, row-major; waits until they are there. Throws
  // kInvalidArgument for tokens that submit would refuse, kOutOfMemory if the result does not fit, kModelFormat if a
  // row is not finite, and what the model threw.
  std::vector<float> logits(std::span<const int32_t> tokens);

 private:
  class Impl;
  Impl& here() const;  // kInvalidArgument in a child of fork()
  std::unique_ptr<Impl> impl_;
};

}  // namespace shoal
