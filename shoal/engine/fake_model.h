// A model for tests of the engine: it keeps token and position in the KV cache and computes the logits of a row from
// what it reads back through the page table. Any mix-up of pages, positions or chunks changes the tokens.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <limits>
#include <mutex>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "shoal/cpu/thread_pool.h"
#include "shoal/model/model.h"

namespace shoal::testkit {

constexpr int32_t kFakeVocab = 64;
constexpr int32_t kNanToken = 61;    // logits of every row that has read it are NaN
constexpr int32_t kThrowToken = 62;  // a batch that holds it is refused

class FakeHash {
 public:
  void add(int32_t token) {
    state_ = (state_ ^ static_cast<uint64_t>(token + 1)) * 0x9e3779b97f4a7c15ull ^ state_ >> 29;
  }
  // Logits that depend on every token so far; the special ones are never drawn.
  void write(std::span<float> logits) const {
    for (size_t i = 0; i < logits.size(); ++i) {
      uint64_t bits = (state_ + i) * 0xbf58476d1ce4e5b9ull;
      bits = (bits ^ bits >> 31) * 0x94d049bb133111ebull;
      logits[i] = static_cast<float>(bits >> 44) * 0x1p-18f - 2.0f;
    }
    logits[kNanToken] = logits[kThrowToken] = -std::numeric_limits<float>::infinity();
  }

 private:
  uint64_t state_ = 0x243f6a8885a308d3ull;
};

// What tests and the model, which lives on the engine's thread, say to each other.
class FakeControl {
 public:
  struct Step {
    std::vector<int32_t> q_lens;
    std::vector<int32_t> past_lens;
  };

  // Steps stop at their beginning until the gate opens or as many passed as `pass` allows.
  void close() {
    const std::lock_guard lock(mutex_);
    is_open_ = false;
    num_passes_ = 0;
  }
  void open() {
    const std::lock_guard lock(mutex_);
    is_open_ = true;
    changed_.notify_all();
  }
  void pass(int count) {
    const std::lock_guard lock(mutex_);
    num_passes_ += count;
    changed_.notify_all();
  }
  // Waits until a step stands at the closed gate.
  void wait_until_held() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return is_held_ && num_passes_ == 0; });
  }
  std::vector<Step> steps() const {
    const std::lock_guard lock(mutex_);
    return steps_;
  }
  void enter(Step step) {
    std::unique_lock lock(mutex_);
    steps_.push_back(std::move(step));
    is_held_ = true;
    changed_.notify_all();
    changed_.wait(lock, [&] { return is_open_ || num_passes_ > 0; });
    is_held_ = false;
    num_passes_ -= is_open_ ? 0 : 1;
  }

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool is_open_ = true;
  bool is_held_ = false;
  int num_passes_ = 0;
  std::vector<Step> steps_;
};

class FakeModel : public Model {
 public:
  // With states: a slot holds how many tokens it has seen and the last of them, and a step that finds anything else fails.
  explicit FakeModel(std::shared_ptr<FakeControl> control, int64_t max_positions = 4096, bool has_states = false)
      : control_(std::move(control)) {
    info_.architecture = "fake";
    info_.vocab_size = kFakeVocab;
    info_.max_positions = max_positions;
    info_.kv_layers = {{1, 1, 1}};
    if (has_states) {
      info_.state_layers = {{.conv_channels = 2, .conv_reach = 1}};
    }
  }

  const ModelInfo& info() const override { return info_; }
  size_t workspace_bytes(const StepLimits& limits) const override {
    return Workspace::bytes_for<int32_t>(static_cast<size_t>(limits.max_tokens));
  }

  void forward(const Batch& batch, const ModelMemory& memory, const TensorView& logits,
               const OpContext& context) override {
    KvCache& cache = memory.kv;
    const int64_t num_seqs = batch.past_lens.dim(0);
    const auto* cu = batch.cu_q_lens.as<int32_t>();
    const auto* past = batch.past_lens.as<int32_t>();
    FakeControl::Step step;
    for (int64_t s = 0; s < num_seqs; ++s) {
      step.q_lens.push_back(cu[s + 1] - cu[s]);
      step.past_lens.push_back(past[s]);
    }
    control_->enter(std::move(step));
    const Workspace::Scope scope(*context.workspace);
    const std::span<int32_t> copy = context.workspace->take<int32_t>(static_cast<size_t>(batch.token_ids.dim(0)));
    std::copy_n(batch.token_ids.as<int32_t>(), copy.size(), copy.begin());
    const TensorView key = cache.layer(0).key;
    const TensorView value = cache.layer(0).value;
    for (size_t t = 0; t < copy.size(); ++t) {
      const int32_t slot = batch.slot_mapping.as<int32_t>()[t];
      key.as<float>()[slot] = static_cast<float>(copy[t]);
      value.as<float>()[slot] = static_cast<float>(batch.positions.as<int32_t>()[t]);
      if (copy[t] == kThrowToken) {
        throw std::runtime_error("the fake model refuses token 62");
      }
    }
    if (!info_.state_layers.empty()) {
      for (int64_t s = 0; s < num_seqs; ++s) {
        move_state(batch, *memory.states, s, key.as<float>(), cache.page_size());
      }
    }
    const auto body = [&](int64_t begin, int64_t end, int) {
      for (int64_t s = begin; s < end; ++s) {
        run_sequence(batch, cache.page_size(), s, key.as<float>(), value.as<float>(), logits);
      }
    };
    context.pool->parallel_for(num_seqs, 1, body);
  }

 private:
  static void move_state(const Batch& batch, const StatePool& states, int64_t s, const float* key, int64_t page_size) {
    const auto* cu = batch.cu_q_lens.as<int32_t>();
    const int64_t past = batch.past_lens.as<int32_t>()[s];
    auto* state = states.conv_state(0, batch.state_slots.as<int32_t>()[s]).as<float>();
    const auto* tokens = batch.token_ids.as<int32_t>();
    float last = 0.0f;  // of the tokens before, plus one
    if (past > 0) {
      const auto* pages = batch.page_table.as<int32_t>() + s * batch.page_table.dim(1);
      last = key[pages[(past - 1) / page_size] * page_size + (past - 1) % page_size] + 1.0f;
    }
    if (static_cast<int64_t>(state[0]) != past || state[1] != last) {
      throw std::runtime_error("the fake model finds another state in the slot");
    }
    state[0] = static_cast<float>(past + cu[s + 1] - cu[s]);
    state[1] = static_cast<float>(tokens[cu[s + 1] - 1] + 1);
  }

  static void run_sequence(const Batch& batch, int64_t page_size, int64_t s, const float* key, const float* value,
                           const TensorView& logits) {
    const auto* cu = batch.cu_q_lens.as<int32_t>();
    const int64_t past = batch.past_lens.as<int32_t>()[s];
    const auto* pages = batch.page_table.as<int32_t>() + s * batch.page_table.dim(1);
    FakeHash hash;
    bool is_nan = false;
    for (int64_t position = 0; position < past + cu[s + 1] - cu[s]; ++position) {
      const int64_t slot = pages[position / page_size] * page_size + position % page_size;
      const auto token = static_cast<int32_t>(key[slot]);
      if (static_cast<int64_t>(value[slot]) != position) {
        throw std::runtime_error("the fake model finds another position in the page");
      }
      hash.add(token);
      is_nan |= token == kNanToken;
      const int64_t row = position - past + cu[s];
      for (int64_t i = 0; position >= past && i < batch.logit_rows.dim(0); ++i) {
        if (batch.logit_rows.as<int32_t>()[i] == row) {
          const std::span<float> out(logits.as<float>() + i * kFakeVocab, kFakeVocab);
          hash.write(out);
          if (is_nan) {
            out[3] = std::numeric_limits<float>::quiet_NaN();
          }
        }
      }
    }
  }

  std::shared_ptr<FakeControl> control_;
  ModelInfo info_;
};

}  // namespace shoal::testkit
