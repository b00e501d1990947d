// Frequency tables of rotary embeddings.
//
// Everything is f64 until the store. transformers computes inverse frequencies and angles in f32, whose angle is off by
// up to 2^-24 of itself: 2e-4 radians at position 4096. Ours is what the formulas say; inverse frequencies agree to
// 1e-6.
#include <algorithm>
#include <cmath>
#include <numbers>

#include "shoal/ops/rope/rope.h"

namespace shoal {
namespace {

void check(const RopeConfig& config, int64_t max_pos) {
  const auto positive = [](std::string_view name, double value) {
    require(std::isfinite(value) && value > 0.0, "rope tables: ", name, " is ", value, ", expected a number > 0");
  };
  require(config.rotary_dim > 0 && config.rotary_dim % 2 == 0, "rope tables: rotary_dim is ", config.rotary_dim,
          ", expected an even number > 0");
  require(max_pos >= 0, "rope tables: max_pos is ", max_pos, ", expected >= 0");
  positive("theta", config.theta);
  if (config.scaling != RopeScaling::kNone) {
    positive("factor", config.factor);
  }
  if (config.scaling == RopeScaling::kLlama3 || config.scaling == RopeScaling::kYarn) {
    positive("original_max_positions", config.original_max_positions);
  }
  if (config.scaling == RopeScaling::kLlama3) {
    positive("low_freq_factor", config.low_freq_factor);
    require(std::isfinite(config.high_freq_factor) && config.high_freq_factor > config.low_freq_factor,
            "rope tables: high_freq_factor is ", config.high_freq_factor,
            ", expected more than low_freq_factor = ", config.low_freq_factor);
  }
  if (config.scaling == RopeScaling::kYarn) {
    positive("beta_fast", config.beta_fast);
    positive("beta_slow", config.beta_slow);
    require(config.theta != 1.0, "rope tables: theta is 1, for which yarn is not defined");
    require(std::isfinite(config.attention_factor) && config.attention_factor >= 0.0,
            "rope tables: attention_factor is ", config.attention_factor, ", expected a number >= 0");
    require(std::isfinite(config.mscale) && config.mscale >= 0.0 && std::isfinite(config.mscale_all_dim) &&
                config.mscale_all_dim >= 0.0,
            "rope tables: mscale is ", config.mscale, " and mscale_all_dim ", config.mscale_all_dim,
            ", expected numbers >= 0");
  }
  const size_t num_pairs = static_cast<size_t>(config.rotary_dim / 2);
  require(config.freq_factors.empty() || config.freq_factors.size() == num_pairs, "rope tables: freq_factors has ",
          config.freq_factors.size(), " values, expected rotary_dim / 2 = ", num_pairs);
  for (const float factor : config.freq_factors) {
    positive("freq_factors", factor);
  }
}

// Llama 3.1: long wavelengths are stretched, short ones kept, those between interpolated.
double llama3(const RopeConfig& config, double inv_freq) {
  const double turns = config.original_max_positions * inv_freq / (2.0 * std::numbers::pi);  // within the old context
  if (turns < config.low_freq_factor) {
    return inv_freq / config.factor;
  }
  if (turns > config.high_freq_factor) {
    return inv_freq;
  }
  const double keep = (turns - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor);
  return (1.0 - keep) * inv_freq / config.factor + keep * inv_freq;
}

// Peng et al. 2023, "YaRN", section 3.2: a linear ramp over the columns between two numbers of turns.
double yarn(const RopeConfig& config, int64_t column, double inv_freq) {
  const auto column_of_turns = [&](double turns) {
    return static_cast<double>(config.rotary_dim) *
           std::log(config.original_max_positions / (turns * 2.0 * std::numbers::pi)) / (2.0 * std::log(config.theta));
  };
  double low = column_of_turns(config.beta_fast);
  double high = column_of_turns(config.beta_slow);
  if (config.truncate) {
    low = std::floor(low);
    high = std::ceil(high);
  }
  low = std::max(low, 0.0);
  high = std::min(high, static_cast<double>(config.rotary_dim - 1));
  if (low == high) {
    high += 0.001;  // as published: a step instead of a division by zero
  }
  const double ramp = std::clamp((static_cast<double>(column) - low) / (high - low), 0.0, 1.0);
  return ramp * inv_freq / config.factor + (1.0 - ramp) * inv_freq;
}

double attention_factor(const RopeConfig& config) {
  if (config.scaling != RopeScaling::kYarn) {
    return 1.0;
  }
  if (config.attention_factor != 0.0) {
    return config.attention_factor;
  }
  const auto scale = [&](double mscale) {
    return config.factor <= 1.0 ? 1.0 : 0.1 * mscale * std::log(config.factor) + 1.0;
  };
  return config.mscale != 0.0 && config.mscale_all_dim != 0.0 ? scale(config.mscale) / scale(config.mscale_all_dim)
                                                              : scale(1.0);
}

double inverse_frequency(const RopeConfig& config, int64_t column) {
  const double exponent = 2.0 * static_cast<double>(column) / static_cast<double>(config.rotary_dim);
  double inv_freq = std::pow(config.theta, -exponent);
  switch (config.scaling) {
    case RopeScaling::kNone: break;
    case RopeScaling::kLinear: inv_freq /= config.factor; break;
    case RopeScaling::kLlama3: inv_freq = llama3(config, inv_freq); break;
    case RopeScaling::kYarn: inv_freq = yarn(config, column, inv_freq); break;
  }
  return config.freq_factors.empty() ? inv_freq : inv_freq / config.freq_factors[static_cast<size_t>(column)];
}

}  // namespace

RopeTables make_rope_tables(const RopeConfig& config, int64_t max_pos) {
  check(config, max_pos);
  const int64_t num_pairs = config.rotary_dim / 2;
  const double factor = attention_factor(config);
  RopeTables tables{Tensor(DType::kF32, {max_pos, num_pairs}), Tensor(DType::kF32, {max_pos, num_pairs})};
  const auto cos = tables.cos.span<float>();
  const auto sin = tables.sin.span<float>();
  for (int64_t column = 0; column < num_pairs; ++column) {
    const double inv_freq = inverse_frequency(config, column);
    for (int64_t pos = 0; pos < max_pos; ++pos) {
      const double angle = static_cast<double>(pos) * inv_freq;
      cos[static_cast<size_t>(pos * num_pairs + column)] = static_cast<float>(factor * std::cos(angle));
      sin[static_cast<size_t>(pos * num_pairs + column)] = static_cast<float>(factor * std::sin(angle));
    }
  }
  return tables;
}

}  // namespace shoal
