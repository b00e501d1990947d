// What the sparse attention indexers have in common: pooling keys, preparing rows, scoring them against queries,
// choosing, and turning chosen blocks into tokens. The source is packed_sparse_attention_indexer's.
//
// Sums are f32, unfused, in an order that depends on the head size alone: a row's bits do not depend on what else the
// call holds.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <span>
#include <string_view>
#include <utility>

#include "shoal/ops/context.h"
#include "shoal/tensor/tensor.h"

namespace shoal::indexer {

enum class Policy { kQsa, kCsa };

// Attributes that both indexers have; `op` begins every message.
struct Attributes {
  int64_t compress_ratio = 0;
  std::optional<int64_t> token_budget{};
  std::optional<int64_t> index_topk{};
  float epsilon = 0.0f;
  std::optional<float> scale{};
  std::optional<float> head_weight_scale{};
};
void check_attributes(std::string_view op, Policy policy, const Attributes& a);
void check_positive(std::string_view op, std::string_view name, int64_t value);  // 1 to 2^31 - 1
// What belongs to the other policy.
void check_absent(std::string_view op, Policy policy, std::initializer_list<std::pair<std::string_view, bool>> given);

// Channels [first, first + count) of a row of a rank-2 view as f32.
void load_row(const TensorView& view, int64_t row, int64_t first, int64_t count, float* to);
// Elements of one row as they are; both views have one type and rank 2.
void copy_row(const TensorView& from, int64_t from_row, const TensorView& to, int64_t to_row);

// One slice of the first dimension.
TensorView slice(const TensorView& view, int64_t index);

// Root-mean-square normalisation and rotary embedding of rows of one head.
struct RowFinish {
  Policy policy = Policy::kQsa;
  int64_t head_dim = 0;
  float epsilon = 0.0f;
  TensorView cos{};  // [P, R] or [B, P, R]
  TensorView sin{};

  // In place. qsa rotates the leading R channels, halves against each other, each half with entries of its own; csa the
  // trailing 2 R, neighbours against each other. The position is clamped to the tables.
  void apply(const float* weight, int64_t batch_idx, int64_t position, float* row) const;
};

// Tokens of one request: those that wait in a buffer, then those of this call.
struct TokenRows {
  TensorView buffered{};  // [at least num_buffered, W]
  TensorView fresh{};     // [any, W]
  int64_t num_buffered = 0;
  int64_t first_fresh = 0;

  void load(int64_t token, int64_t first, int64_t count, float* to) const;
  void copy(int64_t token, const TensorView& to, int64_t to_row) const;
};

// The mean of rows; load(i, to) makes row i of `ratio`. `scratch` has head_dim values.
template <class Load>
void pool_mean(int64_t ratio, int64_t head_dim, float* pooled, float* scratch, Load&& load) {
  load(int64_t{0}, pooled);
  for (int64_t i = 1; i < ratio; ++i) {
    load(i, scratch);
    for (int64_t c = 0; c < head_dim; ++c) {
      pooled[c] += scratch[c];
    }
  }
  for (int64_t c = 0; c < head_dim; ++c) {
    pooled[c] /= static_cast<float>(ratio);
  }
}

// How csa groups buffered and new tokens into windows of `ratio`.
struct WindowPlan {
  int64_t overlap = 0;      // ratio when the buffer begins with the previous window, else 0
  int64_t num_windows = 0;  // closed by this call
  int64_t start = 0;        // the first token that stays buffered
  int64_t length = 0;       // how many do
};
WindowPlan plan_windows(int64_t num_buffered, int64_t num_fresh, int64_t ratio);

// Softmax-gated mean of the window's second half of channels and, with a window before it, of that one's first half, a
// softmax for each channel; 0 where its denominator is not positive and finite.
struct GatedPool {
  TokenRows values{};          // 2 head_dim channels
  TokenRows gates{};           // 2 head_dim channels
  TensorView position_bias{};  // [ratio, 2 head_dim]
  int64_t ratio = 0;
  int64_t head_dim = 0;

  static constexpr int64_t kScratchRows = 5;
  // `token` is the first of the window; `scratch` has kScratchRows * head_dim values.
  void pool(int64_t token, bool has_previous, float* pooled, float* scratch) const;
};

// The entries that position `position` may see, without overflow: (position + 1) / ratio, at least 0.
int64_t entries_before(int64_t position, int64_t ratio);

// Token queries against the keys of one request: for each the best keys among the first `visible` ones.
struct Scan {
  RowFinish finish{};
  int64_t num_heads = 0;
  float scale = 1.0f;                    // of the sum over heads
  const float* query_weight = nullptr;   // [head_dim]
  int64_t batch_idx = 0;                 // of the rotary tables
  int64_t first_row = 0;                 // of `query`, `head_weights` and `out`
  TensorView query{};                    // [rows, at least num_heads * head_dim]
  TensorView head_weights{};             // [rows, num_heads], or absent: all 1
  TensorView keys{};                     // [num_keys, head_dim], contiguous rows
  std::span<const int64_t> positions{};  // of each token
  std::span<const int64_t> visible{};    // of each token, at most num_keys
  int64_t top_k = 0;
  TensorView out{};  // [rows, at least min(top_k, visible)] int32, contiguous rows; only those columns are written
};

// Scratch memory of scans over at most num_tokens tokens and num_keys keys each.
class ScanMemory {
 public:
  ScanMemory(int64_t num_tokens, int64_t num_keys, int64_t num_heads, int64_t head_dim, int num_threads);
  size_t bytes() const;
  void take(Workspace& workspace);
  void run(const Scan& scan, const OpContext& context) const;

 private:
  void run_group(const Scan& scan, const OpContext& context, int64_t begin, int64_t end) const;

  int64_t num_keys_;
  int64_t head_dim_;
  int64_t query_width_;
  int64_t group_size_;
  int64_t num_threads_;
  std::span<float> queries_;   // [group_size]: [num_heads, head_dim], then the weights of the heads
  std::span<float> scores_;    // [group_size, num_keys]
  std::span<float> tiles_;     // a thread each
  std::span<uint64_t> ranks_;  // a thread each: [num_keys]
};

// Turns num_chosen block numbers at the start of a row of `width` columns into their tokens, `ratio` each, appends the
// tokens behind the last whole block as far as `capacity` columns go, fills up with -1 and returns the number of
// tokens. `tokens` names the visible tokens in order; null: 0, 1, ...
int64_t expand_blocks(int64_t num_chosen, int64_t ratio, int64_t num_tokens, const int32_t* tokens, int64_t capacity,
                      int64_t width, int32_t* row);

// The checks of what both operators have.
Policy check_policy(std::string_view op, std::string_view policy_mode);
// cos_cache and sin_cache for a head of head_dim channels.
void check_tables(std::string_view op, Policy policy, const TensorView& cos, const TensorView& sin, int64_t batch_size,
                  int64_t head_dim, DType dtype, Device device);

}  // namespace shoal::indexer
