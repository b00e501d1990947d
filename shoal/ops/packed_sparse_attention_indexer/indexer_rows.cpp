// Tokens go in groups whose queries and scores fit a fixed amount of memory; for each group the visible keys are
// widened a tile at a time and scored against all its tokens.
#include "shoal/ops/indexer_rows.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "shoal/base/error.h"
#include "shoal/base/text.h"
#include "shoal/cpu/thread_pool.h"
#include "shoal/ops/element.h"
#include "shoal/ops/top_indices.h"
#include "shoal/tensor/matcher.h"

namespace shoal::indexer {
namespace {

constexpr int64_t kTileRows = 32;
constexpr int64_t kGroupFloats = int64_t{1} << 21;  // queries and scores of a group, unless one token needs more
constexpr int64_t kLanes = 16;                      // partial sums of a dot product

float dot(const float* x, const float* y, int64_t count) {
  float lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      lanes[lane] += x[i + lane] * y[i + lane];
    }
  }
  for (int64_t lane = 0; i < count; ++i, ++lane) {
    lanes[lane] += x[i] * y[i];
  }
  for (int64_t half = kLanes / 2; half > 0; half /= 2) {
    for (int64_t lane = 0; lane < half; ++lane) {
      lanes[lane] += lanes[lane + half];
    }
  }
  return lanes[0];
}

// Without branches, so that a loop of it becomes vector code: a subnormal is exact once scaled, infinities and NaN get
// their exponent afterwards.
float widen_f16(uint16_t h) {
  const uint32_t magnitude = static_cast<uint32_t>(h & 0x7fffu) << 13;
  const auto scaled = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) * 0x1p112f);
  const uint32_t special = (h & 0x7c00u) == 0x7c00u ? 0x7f800000u : 0u;
  return std::bit_cast<float>(scaled | special | static_cast<uint32_t>(h & 0x8000u) << 16);
}

void widen(DType dtype, const void* data, int64_t first, int64_t stride, int64_t count, float* to) {
  switch (dtype) {
    case DType::kF32: {
      const float* from = static_cast<const float*>(data) + first;
      for (int64_t i = 0; i < count; ++i) {
        to[i] = from[i * stride];
      }
      return;
    }
    case DType::kF16: {
      const uint16_t* from = static_cast<const uint16_t*>(data) + first;
      for (int64_t i = 0; i < count; ++i) {
        to[i] = widen_f16(from[i * stride]);
      }
      return;
    }
    default: {
      const uint16_t* from = static_cast<const uint16_t*>(data) + first;
      for (int64_t i = 0; i < count; ++i) {
        to[i] = bf16_to_f32(from[i * stride]);
      }
      return;
    }
  }
}

template <class Bits>
void copy_elements(const TensorView& from, int64_t from_row, const TensorView& to, int64_t to_row) {
  const Bits* source = from.as<const Bits>() + from_row * from.stride(0);
  Bits* target = to.as<Bits>() + to_row * to.stride(0);
  for (int64_t c = 0; c < to.dim(1); ++c) {
    target[c * to.stride(1)] = source[c * from.stride(1)];
  }
}

// One channel's part of a softmax over the slots of a window: logits are gate + bias.
struct Slots {
  const GatedPool& pool;
  int64_t token = 0;    // of slot 0
  int64_t channel = 0;  // the first one

  void load_logits(int64_t slot, float* logits, float* scratch) const {
    pool.gates.load(token + slot, channel, pool.head_dim, logits);
    indexer::load_row(pool.position_bias, slot, channel, pool.head_dim, scratch);
    for (int64_t c = 0; c < pool.head_dim; ++c) {
      logits[c] += scratch[c];
    }
  }
};

}  // namespace

void load_row(const TensorView& view, int64_t row, int64_t first, int64_t count, float* to) {
  const int64_t start = row * view.stride(0) + first * view.stride(1);
  if (view.stride(1) == 1) {
    widen(view.dtype, view.data, start, 1, count, to);
  } else {
    widen(view.dtype, view.data, start, view.stride(1), count, to);
  }
}

void copy_row(const TensorView& from, int64_t from_row, const TensorView& to, int64_t to_row) {
  if (size_of(from.dtype) == 4) {
    copy_elements<uint32_t>(from, from_row, to, to_row);
  } else {
    copy_elements<uint16_t>(from, from_row, to, to_row);
  }
}

TensorView slice(const TensorView& view, int64_t index) {
  TensorView part = view;
  --part.rank;
  for (int axis = 0; axis < part.rank; ++axis) {
    part.shape[static_cast<size_t>(axis)] = view.dim(axis + 1);
    part.strides[static_cast<size_t>(axis)] = view.stride(axis + 1);
  }
  if (view.data != nullptr) {
    part.data = view.as<std::byte>() + index * view.stride(0) * static_cast<int64_t>(size_of(view.dtype));
  }
  return part;
}

void RowFinish::apply(const float* weight, int64_t batch_idx, int64_t position, float* row) const {
  const float mean_square = dot(row, row, head_dim) / static_cast<float>(head_dim);
  const float inverse = 1.0f / std::sqrt(mean_square + epsilon);
  for (int64_t c = 0; c < head_dim; ++c) {
    row[c] = row[c] * inverse * weight[c];
  }
  const int axis = cos.rank - 2;
  const int64_t angle = std::clamp<int64_t>(position, 0, cos.dim(axis) - 1);
  const auto entry = [&](const TensorView& table, int64_t i) {
    const int64_t batch = axis == 1 ? batch_idx * table.stride(0) : 0;
    return read_element(table.dtype, table.data, batch + angle * table.stride(axis) + i * table.stride(axis + 1));
  };
  const int64_t width = cos.dim(axis + 1);
  if (policy == Policy::kQsa) {
    const int64_t half = width / 2;
    for (int64_t i = 0; i < half; ++i) {
      const float x0 = row[i];
      const float x1 = row[i + half];
      row[i] = x0 * entry(cos, i) - x1 * entry(sin, i);
      row[i + half] = x1 * entry(cos, i + half) + x0 * entry(sin, i + half);
    }
    return;
  }
  float* pair = row + head_dim - 2 * width;
  for (int64_t i = 0; i < width; ++i, pair += 2) {
    const float x0 = pair[0];
    const float x1 = pair[1];
    pair[0] = x0 * entry(cos, i) - x1 * entry(sin, i);
    pair[1] = x1 * entry(cos, i) + x0 * entry(sin, i);
  }
}

void TokenRows::load(int64_t token, int64_t first, int64_t count, float* to) const {
  if (token < num_buffered) {
    load_row(buffered, token, first, count, to);
  } else {
    load_row(fresh, first_fresh + token - num_buffered, first, count, to);
  }
}

void TokenRows::copy(int64_t token, const TensorView& to, int64_t to_row) const {
  if (token < num_buffered) {
    copy_row(buffered, token, to, to_row);
  } else {
    copy_row(fresh, first_fresh + token - num_buffered, to, to_row);
  }
}

WindowPlan plan_windows(int64_t num_buffered, int64_t num_fresh, int64_t ratio) {
  WindowPlan plan;
  plan.overlap = num_buffered >= ratio ? ratio : 0;
  const int64_t pending = num_buffered - plan.overlap + num_fresh;
  plan.num_windows = pending / ratio;
  if (plan.num_windows > 0) {
    plan.start = plan.overlap + (plan.num_windows - 1) * ratio;
    plan.length = ratio + pending % ratio;
  } else {
    plan.length = num_buffered + num_fresh;
  }
  return plan;
}

void GatedPool::pool(int64_t token, bool has_previous, float* pooled, float* scratch) const {
  float* const largest = scratch;
  float* const sums = largest + head_dim;
  float* const logits = sums + head_dim;
  float* const row = logits + head_dim;
  float* const bias = row + head_dim;
  const Slots parts[2] = {{*this, token - ratio, 0}, {*this, token, head_dim}};
  const int first_part = has_previous ? 0 : 1;
  std::fill(largest, largest + head_dim, -std::numeric_limits<float>::infinity());
  for (int part = first_part; part < 2; ++part) {
    for (int64_t slot = 0; slot < ratio; ++slot) {
      parts[part].load_logits(slot, logits, bias);
      for (int64_t c = 0; c < head_dim; ++c) {
        largest[c] = logits[c] > largest[c] ? logits[c] : largest[c];
      }
    }
  }
  std::fill(sums, sums + head_dim, 0.0f);
  std::fill(pooled, pooled + head_dim, 0.0f);
  for (int part = first_part; part < 2; ++part) {
    for (int64_t slot = 0; slot < ratio; ++slot) {
      parts[part].load_logits(slot, logits, bias);
      values.load(parts[part].token + slot, parts[part].channel, head_dim, row);
      for (int64_t c = 0; c < head_dim; ++c) {
        const float e = std::exp(logits[c] - largest[c]);
        sums[c] += e;
        pooled[c] += e * row[c];
      }
    }
  }
  for (int64_t c = 0; c < head_dim; ++c) {
    pooled[c] = sums[c] > 0.0f && std::isfinite(sums[c]) ? pooled[c] / sums[c] : 0.0f;
  }
}

int64_t entries_before(int64_t position, int64_t ratio) {
  return position < 0 ? 0 : position / ratio + (position % ratio == ratio - 1 ? 1 : 0);
}

ScanMemory::ScanMemory(int64_t num_tokens, int64_t num_keys, int64_t num_heads, int64_t head_dim, int num_threads)
    : num_keys_(num_keys),
      head_dim_(head_dim),
      query_width_(num_heads * (head_dim + 1)),
      group_size_(std::clamp<int64_t>(kGroupFloats / (query_width_ + num_keys), 1, std::max<int64_t>(num_tokens, 1))),
      num_threads_(num_threads) {}

size_t ScanMemory::bytes() const {
  const auto floats = [](int64_t count) { return Workspace::bytes_for<float>(static_cast<size_t>(count)); };
  return floats(group_size_ * query_width_) + floats(group_size_ * num_keys_) +
         floats(num_threads_ * kTileRows * head_dim_) +
         Workspace::bytes_for<uint64_t>(static_cast<size_t>(num_threads_ * num_keys_));
}

void ScanMemory::take(Workspace& workspace) {
  queries_ = workspace.take<float>(static_cast<size_t>(group_size_ * query_width_));
  scores_ = workspace.take<float>(static_cast<size_t>(group_size_ * num_keys_));
  tiles_ = workspace.take<float>(static_cast<size_t>(num_threads_ * kTileRows * head_dim_));
  ranks_ = workspace.take<uint64_t>(static_cast<size_t>(num_threads_ * num_keys_));
}

void ScanMemory::run(const Scan& scan, const OpContext& context) const {
  const auto num_tokens = static_cast<int64_t>(scan.positions.size());
  for (int64_t begin = 0; begin < num_tokens; begin += group_size_) {
    run_group(scan, context, begin, std::min(begin + group_size_, num_tokens));
  }
}

void ScanMemory::run_group(const Scan& scan, const OpContext& context, int64_t begin, int64_t end) const {
  const auto visible = [&](int64_t token) { return scan.visible[static_cast<size_t>(token)]; };
  int64_t num_visible = 0;
  for (int64_t token = begin; token < end; ++token) {
    num_visible = std::max(num_visible, visible(token));
  }
  if (num_visible == 0) {
    return;
  }
  const auto query_of = [&](int64_t token) { return queries_.data() + (token - begin) * query_width_; };
  const auto scores_of = [&](int64_t token) { return scores_.data() + (token - begin) * num_keys_; };

  context.pool->parallel_for((end - begin) * scan.num_heads, 1, [&](int64_t from, int64_t to, int) {
    for (int64_t i = from; i < to; ++i) {
      const int64_t token = begin + i / scan.num_heads;
      const int64_t head = i % scan.num_heads;
      if (visible(token) > 0) {
        float& weight = query_of(token)[scan.num_heads * head_dim_ + head];
        weight = 1.0f;
        if (scan.head_weights) {
          load_row(scan.head_weights, scan.first_row + token, head, 1, &weight);
        }
        float* q = query_of(token) + head * head_dim_;
        load_row(scan.query, scan.first_row + token, head * head_dim_, head_dim_, q);
        scan.finish.apply(scan.query_weight, scan.batch_idx, scan.positions[static_cast<size_t>(token)], q);
      }
    }
  });

  context.pool->parallel_for(num_visible, kTileRows, [&](int64_t from, int64_t to, int thread_idx) {
    float* const tile = tiles_.data() + thread_idx * kTileRows * head_dim_;
    for (int64_t first = from; first < to; first += kTileRows) {
      const int64_t num_rows = std::min(kTileRows, to - first);
      for (int64_t row = 0; row < num_rows; ++row) {
        load_row(scan.keys, first + row, 0, head_dim_, tile + row * head_dim_);
      }
      for (int64_t token = begin; token < end; ++token) {
        const int64_t count = std::min(num_rows, visible(token) - first);
        const float* const q = query_of(token);
        const float* const weights = q + scan.num_heads * head_dim_;
        float* const scores = scores_of(token) + first;
        for (int64_t row = 0; row < count; ++row) {
          float sum = 0.0f;
          for (int64_t head = 0; head < scan.num_heads; ++head) {
            const float product = dot(q + head * head_dim_, tile + row * head_dim_, head_dim_);
            const float positive = product > 0.0f ? product : 0.0f;  // also of NaN
            sum += positive * weights[head];
          }
          scores[row] = sum * scan.scale;
        }
      }
    }
  });

  context.pool->parallel_for(end - begin, 1, [&](int64_t from, int64_t to, int thread_idx) {
    for (int64_t token = begin + from; token < begin + to; ++token) {
      top_indices(scores_of(token), visible(token), std::min(scan.top_k, visible(token)),
                  ranks_.data() + thread_idx * num_keys_,
                  scan.out.as<int32_t>() + (scan.first_row + token) * scan.out.stride(0));
    }
  });
}

int64_t expand_blocks(int64_t num_chosen, int64_t ratio, int64_t num_tokens, const int32_t* tokens, int64_t capacity,
                      int64_t width, int32_t* row) {
  const auto token_at = [&](int64_t rank) { return tokens == nullptr ? static_cast<int32_t>(rank) : tokens[rank]; };
  // From the last block on: its tokens stand no earlier than its number.
  for (int64_t j = num_chosen - 1; j >= 0; --j) {
    const int64_t first = row[j] * ratio;
    for (int64_t i = ratio - 1; i >= 0; --i) {
      row[j * ratio + i] = token_at(first + i);
    }
  }
  int64_t count = num_chosen * ratio;
  for (int64_t rank = num_tokens - num_tokens % ratio; rank < num_tokens && count < capacity; ++rank) {
    row[count++] = token_at(rank);
  }
  std::fill(row + count, row + width, -1);
  return count;
}

Policy check_policy(std::string_view op, std::string_view policy_mode) {
  require(policy_mode == "qsa" || policy_mode == "csa", op, ": policy_mode is '", printable(policy_mode),
          "', expected qsa or csa");
  return policy_mode == "qsa" ? Policy::kQsa : Policy::kCsa;
}

void check_tables(std::string_view op, Policy policy, const TensorView& cos, const TensorView& sin, int64_t batch_size,
                  int64_t head_dim, DType dtype, Device device) {
  const Matcher match(op);
  match.tensor("cos_cache", cos).type(dtype).device(device);
  match.tensor("sin_cache", sin).type(dtype).device(device);
  require(cos.rank == 2 || cos.rank == 3, op, ": cos_cache has ", cos.rank, " dimensions, expected 2 or 3");
  require(cos.rank == 2 || cos.dim(0) == batch_size, op, ": cos_cache has shape ", shape_text(cos.dims()),
          ", expected ", batch_size, " tables or one without a batch dimension");
  require(std::ranges::equal(cos.dims(), sin.dims()), op, ": sin_cache has shape ", shape_text(sin.dims()),
          ", expected that of cos_cache, ", shape_text(cos.dims()));
  require(cos.dim(cos.rank - 2) > 0, op, ": cos_cache has shape ", shape_text(cos.dims()),
          ", expected at least one position");
  const int64_t width = cos.dim(cos.rank - 1);
  if (policy == Policy::kQsa) {
    require(width > 0 && width <= head_dim && width % 2 == 0, op, ": cos_cache has ", width,
            " columns, expected an even number of at most ", head_dim, ", the head size");
  } else {
    require(width > 0 && width <= head_dim / 2, op, ": cos_cache has ", width, " columns, expected 1 to ", head_dim / 2,
            ", half the head size");
  }
}

void check_positive(std::string_view op, std::string_view name, int64_t value) {
  require(value > 0 && value <= INT32_MAX, op, ": ", name, " is ", value, ", expected 1 to ", INT32_MAX);
}

void check_absent(std::string_view op, Policy policy, std::initializer_list<std::pair<std::string_view, bool>> given) {
  for (const auto& [name, is_given] : given) {
    require(!is_given, op, ": ", name, " must be absent with policy_mode ", policy == Policy::kQsa ? "qsa" : "csa");
  }
}

void check_attributes(std::string_view op, Policy policy, const Attributes& a) {
  check_positive(op, "compress_ratio", a.compress_ratio);
  require(std::isfinite(a.epsilon) && a.epsilon >= 0.0f, op, ": epsilon is ", a.epsilon,
          ", expected a finite number of at least 0");
  require(!a.scale || std::isfinite(*a.scale), op, ": scale is ", a.scale.value_or(0), ", expected a finite number");
  require(!a.head_weight_scale || std::isfinite(*a.head_weight_scale), op, ": head_weight_scale is ",
          a.head_weight_scale.value_or(0), ", expected a finite number");
  if (policy == Policy::kQsa) {
    require(a.token_budget.has_value(), op, ": token_budget is required with policy_mode qsa");
    check_positive(op, "token_budget", *a.token_budget);
    require(*a.token_budget % a.compress_ratio == 0, op, ": token_budget is ", *a.token_budget,
            ", expected a multiple of compress_ratio = ", a.compress_ratio);
    check_positive(op, "token_budget + compress_ratio - 1", *a.token_budget + a.compress_ratio - 1);
  } else {
    require(a.index_topk.has_value(), op, ": index_topk is required with policy_mode csa");
    check_positive(op, "index_topk", *a.index_topk);
  }
}

}  // namespace shoal::indexer
