// A row's window is read a block of channels at a time; channels run innermost, so that all but the exponentials are
// vectors.
#include "shoal/ops/gated_latent_pool/gated_latent_pool.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "shoal/base/checked.h"
#include "shoal/base/text.h"
#include "shoal/cpu/thread_pool.h"
#include "shoal/ops/element.h"
#include "shoal/ops/latent_rows.h"
#include "shoal/ops/variant.h"
#include "shoal/tensor/matcher.h"

namespace shoal {
namespace {

constexpr std::string_view kName = "gated_latent_pool";
constexpr float kMaskedLogit = -1e30f;
constexpr int64_t kChannels = 64;  // of a block
constexpr int64_t kMaxPast = int64_t{1} << 62;

struct Sizes {
  explicit Sizes(const GatedLatentPoolArgs& a)
      : num_tokens(a.kv.dim(1)),
        span(a.window_multiplier * a.ratio),
        features(a.window_multiplier * a.head_dim),
        num_rows(ceil_div(num_tokens, a.ratio) + 1) {}
  int64_t num_tokens;
  int64_t span;
  int64_t features;
  int64_t num_rows;
};

struct Scratch {
  std::span<float> row;     // head_dim
  std::span<float> logits;  // span * kChannels, then the weights
  std::span<float> values;  // span * kChannels
};

size_t scratch_floats(const GatedLatentPoolArgs& a) {
  return static_cast<size_t>(a.head_dim + 2 * Sizes(a).span * kChannels);
}

int64_t past_len_of(const GatedLatentPoolArgs& a, int64_t b) {
  return a.past_lens.as<const int64_t>()[b * a.past_lens.stride(0)];
}
bool is_sound(int64_t past) { return past >= 0 && past < kMaxPast; }

// `count` features from `feature` on of position `pos` in the past state and the new tokens, one after the other.
void load_features(const GatedLatentPoolArgs& a, bool of_score, int64_t b, int64_t pos, int64_t feature, int64_t count,
                   float* to) {
  const Sizes sizes(a);
  if (pos < sizes.span) {
    const TensorView& state = of_score ? a.past_state_score : a.past_state_kv;
    latent::load_row(DType::kF32, state.data, b * state.stride(0) + pos * state.stride(1) + feature * state.stride(2),
                     state.stride(2), count, to);
    return;
  }
  const TensorView& tokens = of_score && a.score ? a.score : a.kv;
  const int64_t column = of_score && !a.score ? sizes.features + feature : feature;
  latent::load_row(tokens.dtype, tokens.data,
                   b * tokens.stride(0) + (pos - sizes.span) * tokens.stride(1) + column * tokens.stride(2),
                   tokens.stride(2), count, to);
}

// Channels [begin, begin + count) of the row whose first token is p0.
void pool_channels(const GatedLatentPoolArgs& a, int64_t b, int64_t past, int64_t p0, int64_t begin, int64_t count,
                   Scratch& scratch) {
  const Sizes sizes(a);
  const int64_t num_before = sizes.span - a.ratio;  // tokens of the previous window
  const int64_t total = past + sizes.num_tokens;
  // A window starts after past - span, so that no position is before the buffer.
  const auto pos_of = [&](int64_t slot) { return p0 - num_before + slot - (past - sizes.span); };
  const auto is_there = [&](int64_t slot) {
    const int64_t token = p0 - num_before + slot;
    return token >= 0 && token < total;
  };
  const bool is_empty = !is_there(sizes.span - a.ratio) && !is_there(0);
  float max[kChannels];
  float sum[kChannels];
  std::fill(max, max + count, -std::numeric_limits<float>::max());
  for (int64_t slot = 0; slot < sizes.span; ++slot) {
    float* logits = scratch.logits.data() + slot * kChannels;
    float* values = scratch.values.data() + slot * kChannels;
    const int64_t feature = begin + (slot < num_before ? 0 : sizes.features - a.head_dim);
    if (is_there(slot)) {
      load_features(a, /*of_score=*/true, b, pos_of(slot), feature, count, logits);
      load_features(a, /*of_score=*/false, b, pos_of(slot), feature, count, values);
      const float* ape = a.ape.as<const float>() + slot % a.ratio * a.ape.stride(0) + feature * a.ape.stride(1);
      for (int64_t c = 0; c < count; ++c) {
        logits[c] += ape[c * a.ape.stride(1)];
      }
    } else {
      std::fill(logits, logits + count, kMaskedLogit);
      if (is_empty && total > 0) {
        load_features(a, /*of_score=*/false, b, sizes.span + sizes.num_tokens - 1, feature, count, values);
      } else {
        std::fill(values, values + count, 0.0f);
      }
    }
    for (int64_t c = 0; c < count; ++c) {
      max[c] = logits[c] > max[c] ? logits[c] : max[c];
    }
  }
  std::fill(sum, sum + count, 0.0f);
  for (int64_t slot = 0; slot < sizes.span; ++slot) {
    float* logits = scratch.logits.data() + slot * kChannels;
    for (int64_t c = 0; c < count; ++c) {
      logits[c] = std::exp(logits[c] - max[c]);
    }
    for (int64_t c = 0; c < count; ++c) {
      sum[c] += logits[c];
    }
  }
  float* row = scratch.row.data() + begin;
  std::fill(row, row + count, 0.0f);
  for (int64_t slot = 0; slot < sizes.span; ++slot) {
    const float* weights = scratch.logits.data() + slot * kChannels;
    const float* values = scratch.values.data() + slot * kChannels;
    for (int64_t c = 0; c < count; ++c) {
      row[c] += weights[c] / sum[c] * values[c];
    }
  }
}

// Norm, rotary, grids.
void finish_row(const GatedLatentPoolArgs& a, int64_t p0, float* row) {
  const int64_t width = a.head_dim;
  const int64_t num_plain = width - a.rope_head_dim;
  latent::round_row(a.kv.dtype, row, width);
  double squares = 0.0;
  for (int64_t c = 0; c < width; ++c) {
    squares += static_cast<double>(row[c]) * row[c];
  }
  const float inverse = 1.0f / std::sqrt(static_cast<float>(squares / static_cast<double>(width)) + a.epsilon);
  const auto* weight = a.norm_weight.as<const float>();
  for (int64_t c = 0; c < width; ++c) {
    row[c] = row[c] * inverse * weight[c * a.norm_weight.stride(0)];
  }
  if (a.rope_head_dim > 0) {
    const int64_t pos = std::min(p0, a.max_seq_len - 1);
    latent::rotate_pairs(row + num_plain, a.cos.as<const float>() + pos * a.cos.stride(0), a.cos.stride(1),
                         a.sin.as<const float>() + pos * a.sin.stride(0), a.sin.stride(1), a.rope_head_dim);
  }
  if (a.simulate_fp8) {
    latent::round_to_fp8(row, num_plain);
  }
  if (a.simulate_rotated_fp4) {
    latent::simulate_rotated_fp4(a.kv.dtype, row, width);
  }
}

void make_row(const GatedLatentPoolArgs& a, int64_t b, int64_t j, Scratch& scratch) {
  const int64_t width = a.head_dim;
  const int64_t past = past_len_of(a, b);
  float* row = scratch.row.data();
  if (is_sound(past)) {
    const int64_t p0 = (past / a.ratio + j) * a.ratio;
    for (int64_t begin = 0; begin < width; begin += kChannels) {
      pool_channels(a, b, past, p0, begin, std::min(kChannels, width - begin), scratch);
    }
    finish_row(a, p0, row);
  } else {
    std::fill(row, row + width, 0.0f);
  }
  for (int64_t c = 0; c < width; ++c) {
    write_element(a.rows.dtype, a.rows.data, (b * Sizes(a).num_rows + j) * width + c, row[c]);
  }
}

// Also in place: rows move towards the front, in ascending order.
void roll_states(const GatedLatentPoolArgs& a, int64_t b) {
  const Sizes sizes(a);
  for (const bool of_score : {false, true}) {
    const TensorView& present = of_score ? a.present_state_score : a.present_state_kv;
    for (int64_t r = 0; r < sizes.span; ++r) {
      load_features(a, of_score, b, sizes.num_tokens + r, 0, sizes.features,
                    present.as<float>() + (b * sizes.span + r) * sizes.features);
    }
  }
  const int64_t past = past_len_of(a, b);
  a.first_slot.as<int64_t>()[b] = is_sound(past) ? past / a.ratio : 0;
  a.last_slot.as<int64_t>()[b] = is_sound(past) ? ceil_div(past + sizes.num_tokens, a.ratio) - 1 : -1;
}

void check_attributes(const GatedLatentPoolArgs& a) {
  const auto positive = [](std::string_view name, int64_t value) {
    require(value >= 1 && value <= INT32_MAX, kName, ": ", name, " is ", value, ", expected 1 to ", INT32_MAX);
  };
  positive("ratio", a.ratio);
  require(a.window_multiplier == 1 || a.window_multiplier == 2, kName, ": window_multiplier is ", a.window_multiplier,
          ", expected 1 or 2");
  positive("head_dim", a.head_dim);
  require(a.rope_head_dim >= 0 && a.rope_head_dim <= a.head_dim && a.rope_head_dim % 2 == 0, kName,
          ": rope_head_dim is ", a.rope_head_dim, ", expected an even number from 0 to head_dim = ", a.head_dim);
  require(a.max_seq_len >= 1, kName, ": max_seq_len is ", a.max_seq_len, ", expected at least 1");
  require(std::isfinite(a.epsilon) && a.epsilon >= 0.0f, kName, ": epsilon is ", a.epsilon,
          ", expected a finite number of at least 0");
  require(!a.simulate_fp8 || (a.head_dim - a.rope_head_dim) % latent::kFp8Block == 0, kName,
          ": simulate_fp8 needs head_dim - rope_head_dim to be a multiple of ", latent::kFp8Block, ", not ",
          a.head_dim - a.rope_head_dim);
  require(!a.simulate_rotated_fp4 || latent::fits_rotated_fp4(a.head_dim), kName,
          ": simulate_rotated_fp4 needs head_dim to be a power of two of at least ", latent::kFp4Block, ", not ",
          a.head_dim);
}

}  // namespace

GatedLatentPoolShapes gated_latent_pool_shapes(const GatedLatentPoolArgs& a) {
  check_attributes(a);
  const int64_t span = a.window_multiplier * a.ratio;
  const int64_t features = a.window_multiplier * a.head_dim;
  const Matcher match(kName);
  Dim batch{"batch_size"};
  Dim tokens{"sequence_length"};
  match.tensor("kv", a.kv).types(kFloats).shape({batch, tokens, a.score ? features : 2 * features});
  const Device device = a.kv.device;
  if (a.score) {
    match.tensor("score", a.score).type(a.kv.dtype).shape({batch, tokens, features}).device(device);
  }
  for (const auto& [name, state] :
       {std::pair{"past_state_kv", &a.past_state_kv}, {"past_state_score", &a.past_state_score}}) {
    match.tensor(name, *state).type(DType::kF32).shape({batch, span, features}).device(device);
  }
  match.tensor("ape", a.ape).type(DType::kF32).shape({a.ratio, features}).device(device);
  match.tensor("norm_weight", a.norm_weight).type(DType::kF32).shape({a.head_dim}).device(device);
  if (a.rope_head_dim > 0) {
    Dim positions{"max_seq_len", a.max_seq_len};
    match.tensor("cos", a.cos).type(DType::kF32).shape({positions, a.rope_head_dim}).device(device);
    match.tensor("sin", a.sin).type(DType::kF32).shape({positions, a.rope_head_dim}).device(device);
  }
  match.tensor("past_lens", a.past_lens).type(DType::kI64).shape({batch}).device(device);
  return {.rows = {a.kv.dtype, {batch, Sizes(a).num_rows, a.head_dim}},
          .first_slot = {DType::kI64, {batch, 1}},
          .last_slot = {DType::kI64, {batch, 1}},
          .row_count = {DType::kI64, {}},
          .present_state_kv = {DType::kF32, {batch, span, features}},
          .present_state_score = {DType::kF32, {batch, span, features}}};
}

size_t gated_latent_pool_workspace_bytes(const GatedLatentPoolArgs& a, int num_threads) {
  return Workspace::bytes_for<float>(static_cast<size_t>(num_threads) * scratch_floats(a));
}

void gated_latent_pool(const GatedLatentPoolArgs& a, const OpContext& context) {
  const GatedLatentPoolShapes shapes = gated_latent_pool_shapes(a);
  const Matcher match(kName);
  for (const auto& [name, view, spec] :
       {std::tuple{"rows", &a.rows, &shapes.rows},
        {"first_slot", &a.first_slot, &shapes.first_slot},
        {"last_slot", &a.last_slot, &shapes.last_slot},
        {"row_count", &a.row_count, &shapes.row_count},
        {"present_state_kv", &a.present_state_kv, &shapes.present_state_kv},
        {"present_state_score", &a.present_state_score, &shapes.present_state_score}}) {
    check_output(kName, name, *view, *spec, a.kv.device);
    match.tensor(name, *view).contiguous();
  }
  wants_reference(kName, context.variant);  // one path for both

  const int64_t batch = a.kv.dim(0);
  const int64_t num_rows = Sizes(a).num_rows;
  *a.row_count.as<int64_t>() = num_rows;
  const Workspace::Scope scope(*context.workspace);
  const size_t per_thread = scratch_floats(a);
  const std::span<float> memory =
      context.workspace->take<float>(static_cast<size_t>(context.pool->num_threads()) * per_thread);
  context.pool->parallel_for(batch * num_rows, 1, [&](int64_t begin, int64_t end, int thread_idx) {
    const std::span<float> own = memory.subspan(static_cast<size_t>(thread_idx) * per_thread, per_thread);
    const auto width = static_cast<size_t>(a.head_dim);
    const size_t window = (per_thread - width) / 2;
    Scratch scratch{own.first(width), own.subspan(width, window), own.subspan(width + window, window)};
    for (int64_t i = begin; i < end; ++i) {
      make_row(a, i / num_rows, i % num_rows, scratch);
    }
  });
  // The rows above read the states that these replace.
  context.pool->parallel_for(batch, 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t b = begin; b < end; ++b) {
      roll_states(a, b);
    }
  });
}

}  // namespace shoal
