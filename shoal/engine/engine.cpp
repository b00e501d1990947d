#include "shoal/engine/engine.h"

#include <algorithm>
#include <cmath>
#include <new>

#include "shoal/cuda/device.h"
#include "shoal/engine/engine_impl.h"
#include "shoal/engine/kv_calibration.h"

namespace shoal {
namespace {

constexpr int64_t kMaxAllLogitsRows = 256;                 // a step of requests with all_logits
constexpr int64_t kMaxAllLogitsBytes = int64_t{64} << 20;  // of these rows; large vocabularies get fewer
constexpr std::chrono::milliseconds kLongestWait = std::chrono::hours(24 * 365);  // longer ones overflow the clock

int64_t all_logits_rows(const EngineOptions& options, const ModelInfo& model) {
  const int64_t row_bytes = model.vocab_size * static_cast<int64_t>(sizeof(float));
  return std::min(std::clamp<int64_t>(kMaxAllLogitsBytes / row_bytes, 1, kMaxAllLogitsRows), options.max_batch_tokens);
}

int64_t max_logit_rows(const EngineOptions& options, const ModelInfo& model) {
  return std::min(options.max_seqs, options.max_batch_tokens) + all_logits_rows(options, model);
}

SchedulerOptions scheduler_options(const EngineOptions& options, const ModelInfo& model) {
  SchedulerOptions result;
  result.max_batch_tokens = options.max_batch_tokens;
  result.max_seqs = options.max_seqs;
  result.max_all_logits_rows = all_logits_rows(options, model);
  result.page_size = options.page_size;
  result.prefix_cache = options.prefix_cache;
  return result;
}

Allocator allocator_of(Device device) {
  return device.type == DeviceType::kCuda ? cuda::allocator(device.index) : host_allocator();
}

std::unique_ptr<KvCache> make_cache(Model& model, const EngineOptions& options, const ResolvedOptions& resolved,
                                    const OpContext& context) {
  std::vector<KvScales> scales;
  if (resolved.kv_type == KvType::kI8) {
    scales = calibrate_kv(model, resolved.max_context, context);
  }
  return std::make_unique<KvCache>(model.info().kv_layers, resolved.kv_type, resolved.num_pages, options.page_size,
                                   scales, allocator_of(context.device));
}

std::unique_ptr<DeviceStep> make_device_step(Device device, const EngineOptions& options, const ModelInfo& model,
                                             const ResolvedOptions& resolved) {
  if (device.type == DeviceType::kCpu) {
    return nullptr;
  }
  return std::make_unique<DeviceStep>(
      device.index, DeviceStep::Limits{.max_tokens = options.max_batch_tokens,
                                       .max_seqs = std::min(options.max_seqs, options.max_batch_tokens),
                                       .max_pages = ceil_div(resolved.max_context, options.page_size),
                                       .max_logit_rows = max_logit_rows(options, model),
                                       .vocab_size = model.vocab_size});
}

OpContext make_context(cpu::ThreadPool& threads, Workspace& workspace, Device device, const DeviceStep* step) {
  OpContext context{&threads, &workspace, cpu::default_isa(), {}};
  context.device = device;
  if (step != nullptr) {
    context.stream = step->stream();
  }
  return context;
}

std::unique_ptr<StatePool> make_states(const ModelInfo& model, const EngineOptions& options,
                                       const ResolvedOptions& resolved) {
  if (model.state_layers.empty()) {
    return nullptr;
  }
  const int64_t num_slots = std::min(options.max_seqs, options.max_batch_tokens);
  return std::make_unique<StatePool>(model.state_layers, num_slots + resolved.num_kept_states, 0);
}

// Logits that a token can be drawn from: no NaN, no +inf, something above -inf. As sample() has it.
bool is_usable(std::span<const float> logits) {
  bool is_usable = true;
  float largest = -INFINITY;
  for (const float logit : logits) {
    is_usable &= logit < INFINITY;  // false for NaN
    largest = logit > largest ? logit : largest;
  }
  return is_usable && largest > -INFINITY;
}

std::string non_finite_text(int64_t position) { return concat("the logits at position ", position, " are not finite"); }

std::unique_ptr<Model> require_model(std::unique_ptr<Model> model) {
  require(model != nullptr, "the engine needs a model");
  require(model->info().vocab_size > 0 && model->info().vocab_size <= INT32_MAX, "the model's vocab_size is ",
          model->info().vocab_size, ", expected 1 to ", INT32_MAX);
  return model;
}

}  // namespace

std::string_view to_string(FinishReason reason) {
  switch (reason) {
    case FinishReason::kNone: return "none";
    case FinishReason::kStop: return "stop";
    case FinishReason::kLength: return "length";
    case FinishReason::kCancelled: return "cancelled";
    case FinishReason::kNonFinite: return "non_finite";
    case FinishReason::kError: return "error";
  }
  return "unknown";
}

// ---- construction

Engine::Impl::Impl(const EngineOptions& options, std::unique_ptr<Model> model, std::unique_ptr<cpu::ThreadPool> pool)
    : model_(require_model(std::move(model))),
      threads_(std::move(pool)),
      device_(model_->info().device),
      resolved_(resolve_options(options, model_->info(), available_memory_bytes(device_), device_)),
      workspace_(allocator_of(device_)),
      device_step_(make_device_step(device_, options, model_->info(), resolved_)),
      context_(make_context(*threads_, workspace_, device_, device_step_.get())),
      cache_(make_cache(*model_, options, resolved_, context_)),
      states_(make_states(model_->info(), options, resolved_)),
      pages_(resolved_.num_pages),
      scheduler_(pages_, scheduler_options(options, model_->info()), states_.get()),
      batch_(options.max_batch_tokens, std::min(options.max_seqs, options.max_batch_tokens),
             ceil_div(resolved_.max_context, options.page_size), max_logit_rows(options, model_->info()),
             options.page_size) {
  const ModelInfo& from = model_->info();
  const int64_t num_rows = max_logit_rows(options, from);
  logits_ = AlignedBuffer(static_cast<size_t>(num_rows * from.vocab_size) * sizeof(float),
                          device_step_ ? cuda::pinned_allocator() : host_allocator());
  workspace_.reserve(model_->workspace_bytes({.max_tokens = options.max_batch_tokens,
                                              .max_logit_rows = num_rows,
                                              .max_kv_len = round_up(resolved_.max_context, options.page_size),
                                              .num_threads = threads_->num_threads(),
                                              .max_seqs = std::min(options.max_seqs, options.max_batch_tokens)}));

  info_.architecture = from.architecture;
  info_.model_name = from.name;
  info_.device = device_.type == DeviceType::kCpu ? "cpu" : concat("cuda:", device_.index);
  info_.isa = cpu::to_string(context_.isa);
  info_.kv_dtype = to_string(resolved_.kv_type);
  info_.threads = threads_->num_threads();
  info_.vocab_size = from.vocab_size;
  info_.max_context = resolved_.max_context;
  info_.page_size = options.page_size;
  info_.num_pages = resolved_.num_pages;
  info_.num_parameters = from.num_parameters;
  info_.weight_bytes = from.weight_bytes;
  info_.kv_bytes = resolved_.num_pages * KvCache::bytes_per_page(from.kv_layers, resolved_.kv_type, options.page_size);
  if (states_) {
    info_.state_bytes = states_->num_slots() * StatePool::bytes_per_slot(from.state_layers, 0);
  }
  info_.prefix_cache = scheduler_options(options, from).prefix_cache;
  update_stats();
  thread_ = std::thread([this] { loop(); });
}

Engine::Impl::~Impl() {
  {
    const std::lock_guard lock(mutex_);
    is_stopping_ = true;
    wake_.notify_all();
  }
  thread_.join();
  std::unique_lock lock(mutex_);
  leave_.wait(lock, [&] { return num_inside_ == 0; });
}

Engine::Impl::Inside::Inside(Impl& impl) : impl_(impl) {
  const std::lock_guard lock(impl_.mutex_);
  ++impl_.num_inside_;
}

Engine::Impl::Inside::~Inside() {
  const std::lock_guard lock(impl_.mutex_);
  --impl_.num_inside_;
  impl_.leave_.notify_all();
}

// ---- callers

void Engine::Impl::check_request(const Request& request) const {
  require(!request.prompt.empty(), "the prompt is empty: at least one token is needed");
  for (size_t i = 0; i < request.prompt.size(); ++i) {
    require(request.prompt[i] >= 0 && request.prompt[i] < info_.vocab_size, "prompt token ", i, " is ",
            request.prompt[i], ", outside the vocabulary of ", info_.vocab_size);
  }
  require(request.max_tokens >= 0, "max_tokens must not be negative, it is ", request.max_tokens);
  require(request.max_queued_tokens >= 0, "max_queued_tokens must not be negative, it is ", request.max_queued_tokens);
  check_sampling_options(request.sampling, info_.vocab_size);
}

Result<std::shared_ptr<Engine::Impl::State>, SubmitFailure> Engine::Impl::enqueue(Request request,
                                                                                  std::vector<float>* logits) {
  check_request(request);
  const auto num_prompt = static_cast<int64_t>(request.prompt.size());
  const int64_t max_tokens = request.all_logits ? 0 : request.max_tokens;
  // The last token that is drawn is never computed.
  if (num_prompt > info_.max_context || max_tokens > info_.max_context - num_prompt ||
      !scheduler_.can_ever_fit(num_prompt + std::max<int64_t>(max_tokens - 1, 0))) {
    return SubmitFailure::kContextTooLong;
  }
  auto state = std::make_shared<State>();
  state->tokens = std::move(request.prompt);
  state->tokens.reserve(static_cast<size_t>(num_prompt + max_tokens));
  state->num_prompt = num_prompt;
  state->all_logits = request.all_logits;
  state->salt = request.salt;
  state->sampling = std::move(request.sampling);
  state->stop_ids = std::move(request.stop_ids);
  state->max_tokens = max_tokens;
  state->max_queued_tokens = request.max_queued_tokens;
  state->logits = logits;

  const std::lock_guard lock(mutex_);
  if (is_stopping_ || has_failed_) {
    return SubmitFailure::kStopped;
  }
  state->arrival = next_id_++;
  arrivals_.push_back(state.get());
  requests_.emplace(state->arrival, state);
  wake_.notify_one();
  return state;
}

Result<RequestId, SubmitFailure> Engine::Impl::submit(Request request) {
  auto state = enqueue(std::move(request), nullptr);
  if (!state) {
    return state.reason();
  }
  return state.value()->arrival;
}

RequestUpdate Engine::Impl::wait(RequestId id, std::chrono::milliseconds timeout) {
  const Inside inside(*this);
  std::unique_lock lock(mutex_);
  const auto it = requests_.find(id);
  require(it != requests_.end(), "request ", id, " is unknown or has already delivered its end");
  const std::shared_ptr<State> state = it->second;
  return wait_for(*state, timeout, lock);
}

RequestUpdate Engine::Impl::wait_for(State& state, std::chrono::milliseconds timeout,
                                     std::unique_lock<std::mutex>& lock) {
  const auto is_ready = [&] { return state.is_changed || state.is_delivered; };
  state.changed.wait_for(lock, std::min(timeout, kLongestWait), is_ready);
  require(!state.is_delivered, "request ", state.arrival, " has already delivered its end");
  RequestUpdate update;
  std::swap(update.tokens, state.update.tokens);  // the rest is cumulative and stays
  update.num_prompt_done = state.update.num_prompt_done;
  update.num_prefix_hit = state.update.num_prefix_hit;
  update.finish = state.update.finish;
  update.error = state.update.error;
  state.is_changed = false;
  if (state.is_paused) {
    state.is_paused = false;
    resumptions_.push_back(state.arrival);
    wake_.notify_one();
  }
  if (update.finish != FinishReason::kNone) {
    state.is_delivered = true;
    state.changed.notify_all();
    requests_.erase(state.arrival);
  }
  return update;
}

void Engine::Impl::cancel(RequestId id) {
  const std::lock_guard lock(mutex_);
  const auto it = requests_.find(id);
  if (it != requests_.end() && it->second->update.finish == FinishReason::kNone) {
    cancellations_.push_back(id);
    wake_.notify_one();
  }
}

std::vector<float> Engine::Impl::logits(std::span<const int32_t> tokens) {
  const Inside inside(*this);
  Request request;
  request.prompt.assign(tokens.begin(), tokens.end());
  request.all_logits = true;
  check_request(request);
  require(static_cast<int64_t>(tokens.size()) <= info_.max_context, "logits of ", tokens.size(),
          " tokens: more than max_context ", info_.max_context);
  std::vector<float> result;
  try {
    result.resize(tokens.size() * static_cast<size_t>(info_.vocab_size));
  } catch (const std::bad_alloc&) {
    fail(ErrorCode::kOutOfMemory, "the logits of ", tokens.size(), " tokens do not fit the memory");
  }
  auto state = enqueue(std::move(request), &result);
  if (!state) {
    require(state.reason() != SubmitFailure::kContextTooLong, "logits of ", tokens.size(),
            " tokens: more than the KV cache of ", info_.num_pages * info_.page_size, " tokens holds");
    fail(ErrorCode::kInternal, "the engine has stopped");
  }
  std::unique_lock lock(mutex_);
  RequestUpdate update;
  while (update.finish == FinishReason::kNone) {
    update = wait_for(*state.value(), kLongestWait, lock);
  }
  switch (update.finish) {
    case FinishReason::kLength: return result;
    case FinishReason::kNonFinite: fail(ErrorCode::kModelFormat, update.error);
    case FinishReason::kError: fail(state.value()->error_code, update.error);
    default: fail(ErrorCode::kInternal, "the engine stopped before the logits were computed");
  }
}

EngineStats Engine::Impl::stats() {
  const std::lock_guard lock(mutex_);
  EngineStats stats = stats_;
  stats.num_waiting += static_cast<int64_t>(arrivals_.size());
  return stats;
}

// ---- the loop

void Engine::Impl::loop() {
  try {
    while (receive()) {
      step();
    }
    end_all(FinishReason::kCancelled, "");
  } catch (const std::exception& error) {
    // Not a model's error (step() sees to these) but a broken invariant or no memory: no state can be trusted.
    end_all(FinishReason::kError, error.what());
  }
}

// Sleeps while there is nothing to do, then takes over what callers left. False when it is time to end.
bool Engine::Impl::receive() {
  std::unique_lock lock(mutex_);
  wake_.wait(lock, [&] {
    return is_stopping_ || !arrivals_.empty() || !cancellations_.empty() || !resumptions_.empty() ||
           scheduler_.has_work();
  });
  if (is_stopping_) {
    return false;
  }
  for (State* state : arrivals_) {
    scheduler_.add(*state);
  }
  arrivals_.clear();
  for (const RequestId id : cancellations_) {
    const auto it = requests_.find(id);
    if (it != requests_.end() && it->second->update.finish == FinishReason::kNone) {
      scheduler_.remove(*it->second);
      set_finish(*it->second, FinishReason::kCancelled, "");
    }
  }
  cancellations_.clear();
  for (const RequestId id : resumptions_) {
    const auto it = requests_.find(id);
    if (it != requests_.end() && it->second->update.finish == FinishReason::kNone) {
      scheduler_.resume(*it->second);
    }
  }
  resumptions_.clear();
  update_stats();
  return true;
}

void Engine::Impl::step() {
  const std::span<const Chunk> chunks = scheduler_.schedule();
  if (chunks.empty()) {
    return;
  }
  batch_.clear();
  chunk_rows_.clear();
  float* rows = reinterpret_cast<float*>(logits_.data());
  for (const Chunk& chunk : chunks) {
    chunk_rows_.push_back(rows + batch_.num_logit_rows() * info_.vocab_size);
    const std::span<const int32_t> tokens = chunk.sequence->tokens;
    batch_.add(tokens.subspan(static_cast<size_t>(chunk.begin), static_cast<size_t>(chunk.num_tokens)), chunk.begin,
               chunk.sequence->pages, chunk.num_logit_rows, chunk.sequence->state_slot);
  }
  const TensorView logits(rows, DType::kF32, {batch_.num_logit_rows(), info_.vocab_size});
  try {
    const ModelMemory memory{*cache_, states_.get()};
    if (device_step_) {
      device_step_->forward(*model_, batch_.batch(), memory, logits, context_);
    } else {
      model_->forward(batch_.batch(), memory, logits, context_);
    }
    draw(chunks);
  } catch (const Error& error) {
    fail_chunks(chunks, error.code(), error.what());
    return;
  } catch (const std::exception& error) {
    fail_chunks(chunks, ErrorCode::kInternal, error.what());
    return;
  }
  advance(chunks);
}

void Engine::Impl::draw(std::span<const Chunk> chunks) {
  outcomes_.assign(chunks.size(), Outcome());
  const auto body = [&](int64_t begin, int64_t end, int) {
    for (auto i = static_cast<size_t>(begin); i < static_cast<size_t>(end); ++i) {
      draw_chunk(chunks[i], chunk_rows_[i], outcomes_[i]);
    }
  };
  threads_->parallel_for(static_cast<int64_t>(chunks.size()), 1, body);
}

void Engine::Impl::draw_chunk(const Chunk& chunk, const float* rows, Outcome& outcome) {
  State& state = static_cast<State&>(*chunk.sequence);
  const auto vocab_size = static_cast<size_t>(info_.vocab_size);
  if (state.all_logits) {
    for (int64_t i = 0; i < chunk.num_tokens; ++i) {
      const std::span<const float> row(rows + i * info_.vocab_size, vocab_size);
      if (!is_usable(row)) {
        outcome.finish = FinishReason::kNonFinite;
        outcome.error = non_finite_text(chunk.begin + i);
        return;
      }
      if (state.logits != nullptr) {
        std::ranges::copy(row, state.logits->begin() + (chunk.begin + i) * info_.vocab_size);
      }
    }
    return;
  }
  if (chunk.num_logit_rows == 0 || state.max_tokens == 0) {
    return;
  }
  const auto num_prompt = static_cast<size_t>(state.num_prompt);
  const std::span<const int32_t> tokens = state.tokens;
  auto sampled = sample({rows, vocab_size}, state.sampling, tokens.first(num_prompt), tokens.subspan(num_prompt),
                        tokens.size() - num_prompt);
  if (!sampled) {
    outcome.finish = FinishReason::kNonFinite;
    outcome.error = non_finite_text(chunk.begin + chunk.num_tokens - 1);
    return;
  }
  outcome.has_token = true;
  outcome.token = std::move(sampled.value());
}

// The step went well: sequences grow or end, and their callers hear of it.
void Engine::Impl::advance(std::span<const Chunk> chunks) {
  for (size_t i = 0; i < chunks.size(); ++i) {
    State& state = static_cast<State&>(*chunks[i].sequence);
    Outcome& outcome = outcomes_[i];
    if (outcome.finish == FinishReason::kNone) {
      // Not when the logits are not finite: the pages of this chunk are as bad and must not be found again.
      scheduler_.mark_computed(chunks[i]);
      if (outcome.has_token) {
        state.tokens.push_back(outcome.token.id);
        if (std::ranges::find(state.stop_ids, outcome.token.id) != state.stop_ids.end()) {
          outcome.finish = FinishReason::kStop;
        }
      }
      const bool has_read_prompt = state.num_computed >= state.num_prompt;
      if (outcome.finish == FinishReason::kNone && has_read_prompt &&
          state.num_tokens() - state.num_prompt >= state.max_tokens) {
        outcome.finish = FinishReason::kLength;
      }
    }
    outcome.num_prompt_done = std::min(state.num_computed, state.num_prompt);
    outcome.num_prefix_hit = state.num_prefix_hit;
    if (outcome.finish != FinishReason::kNone) {
      scheduler_.remove(state);
    }
  }
  const std::lock_guard lock(mutex_);
  ++stats_.num_steps;
  stats_.num_tokens += batch_.num_tokens();
  // When stopping, whoever waits hears of the end and nothing before it: there is no engine to ask again.
  for (size_t i = 0; i < chunks.size() && !is_stopping_; ++i) {
    State& state = static_cast<State&>(*chunks[i].sequence);
    Outcome& outcome = outcomes_[i];
    if (outcome.has_token) {
      state.update.tokens.push_back(std::move(outcome.token));
      state.is_changed = true;
    }
    if (outcome.num_prompt_done > state.update.num_prompt_done) {  // after a preemption it starts again from less
      state.update.num_prompt_done = outcome.num_prompt_done;
      state.update.num_prefix_hit = outcome.num_prefix_hit;
      state.is_changed = true;
    }
    if (outcome.finish != FinishReason::kNone) {
      set_finish(state, outcome.finish, outcome.error);
      continue;
    }
    if (state.max_queued_tokens > 0 && std::ssize(state.update.tokens) >= state.max_queued_tokens) {
      state.is_paused = true;
      scheduler_.pause(state);
    }
    if (state.is_changed) {
      state.changed.notify_all();
    }
  }
  update_stats();  // nobody hears of an end before mutex_ is free
}

// The model refused or failed: whoever was in the step ends, everybody else goes on.
void Engine::Impl::fail_chunks(std::span<const Chunk> chunks, ErrorCode code, const std::string& message) {
  for (const Chunk& chunk : chunks) {
    scheduler_.remove(*chunk.sequence);
  }
  const std::lock_guard lock(mutex_);
  ++stats_.num_steps;
  update_stats();
  for (const Chunk& chunk : chunks) {
    State& state = static_cast<State&>(*chunk.sequence);
    state.error_code = code;
    set_finish(state, FinishReason::kError, message);
  }
}

void Engine::Impl::end_all(FinishReason reason, const std::string& message) {
  const std::lock_guard lock(mutex_);
  has_failed_ = true;
  arrivals_.clear();
  for (const auto& [id, state] : requests_) {
    if (state->update.finish == FinishReason::kNone) {
      set_finish(*state, reason, message);
    }
  }
}

// With mutex_ held. The state may be gone as soon as mutex_ is free.
void Engine::Impl::set_finish(State& state, FinishReason reason, const std::string& message) {
  state.update.finish = reason;
  state.update.error = message;
  state.is_changed = true;
  state.changed.notify_all();
}

void Engine::Impl::update_stats() {
  stats_.num_waiting = scheduler_.num_waiting();
  stats_.num_running = scheduler_.num_running();
  stats_.num_paused = scheduler_.num_paused();
  stats_.num_pages = pages_.num_pages();
  stats_.num_free_pages = pages_.num_free();
  stats_.num_cached_pages = scheduler_.num_cached_pages();
  stats_.num_preemptions = scheduler_.num_preemptions();
}

// ---- the interface

Engine::Engine(const EngineOptions& options, std::unique_ptr<Model> model) {
  check_options(options);
  impl_ = std::make_unique<Impl>(options, std::move(model), std::make_unique<cpu::ThreadPool>(options.threads));
}

// A child of fork() has a copy of everything but the threads: waiting for them would never end, nor may it be freed.
Engine::~Engine() {
  if (impl_ != nullptr && !impl_->is_here()) {
    static_cast<void>(impl_.release());
  }
}

Engine::Impl& Engine::here() const {
  require(impl_->is_here(), "the engine was made in another process: a child of fork() makes one of its own");
  return *impl_;
}

const EngineInfo& Engine::info() const { return impl_->info(); }
EngineStats Engine::stats() const { return here().stats(); }
Result<RequestId, SubmitFailure> Engine::submit(Request request) { return here().submit(std::move(request)); }
RequestUpdate Engine::wait(RequestId id, std::chrono::milliseconds timeout) { return here().wait(id, timeout); }
void Engine::cancel(RequestId id) { here().cancel(id); }
std::vector<float> Engine::logits(std::span<const int32_t> tokens) { return here().logits(tokens); }

}  // namespace shoal
