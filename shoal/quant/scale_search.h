// Scales that minimise the squared error of a group of values, for `encode` of the K blocks and the table formats.
//
// Each search tries a few steps around the obvious one (the group's range over the number of codes); for the codes that
// a step gives, the best scale follows in closed form by least squares.
#pragma once

#include <cmath>

#include "shoal/quant/block.h"

namespace shoal::block {

// Nearest code in [low, high] of value / scale; `inverse` is 1 / scale.
inline int32_t nearest_code(float value, float inverse, int32_t low, int32_t high) {
  return to_int(value * inverse + (0.5f - static_cast<float>(low)), 0, high - low) + low;
}

// The value of largest magnitude, with its sign.
inline float extreme_of(const float* x, int n) {
  float extreme = 0.0f;
  for (int i = 0; i < n; ++i) {
    extreme = std::fabs(x[i]) > std::fabs(extreme) ? x[i] : extreme;
  }
  return extreme;
}

// x ~ scale * q, q in [low, high] with low = -(high + 1): the extreme value gets the longer, negative side, hence the
// scale's sign. 0 for a group of zeros.
inline float search_scale(const float* x, int n, int32_t low, int32_t high) {
  const float extreme = extreme_of(x, n);
  const float unit = inverse(extreme);  // squares of tiny values would vanish
  if (unit == 0.0f) {
    return 0.0f;
  }
  float best_scale = extreme / static_cast<float>(low);
  float best_gain = -1.0f;  // error = sum x^2 - gain
  for (int t = -9; t <= 9; ++t) {
    const float step_inverse = (static_cast<float>(low) + 0.1f * static_cast<float>(t)) / extreme;
    float xq = 0.0f;
    float qq = 0.0f;
    for (int i = 0; i < n; ++i) {
      const float q = static_cast<float>(nearest_code(x[i], step_inverse, low, high));
      xq += x[i] * unit * q;
      qq += q * q;
    }
    if (qq > 0.0f && xq * xq > best_gain * qq) {
      best_gain = xq * xq / qq;
      best_scale = xq / qq * extreme;
    }
  }
  return best_scale;
}

struct ScaleMin {
  float scale;  // >= 0
  float min;    // >= 0
};

// x ~ scale * q - min, q in [0, high].
inline ScaleMin search_scale_min(const float* x, int n, int32_t high) {
  float low_value = 0.0f;  // min is not negative: a group of positive values starts at zero
  float high_value = x[0];
  for (int i = 0; i < n; ++i) {
    low_value = std::fmin(low_value, x[i]);
    high_value = std::fmax(high_value, x[i]);
  }
  const float range = high_value - low_value;
  if (inverse(range) == 0.0f) {
    return {0.0f, -low_value};
  }
  ScaleMin best{range / static_cast<float>(high), -low_value};
  float best_error = INFINITY;
  for (int t = -10; t <= 10; ++t) {
    const float step_inverse = (static_cast<float>(high) + 0.1f * static_cast<float>(t)) / range;
    float sum_q = 0.0f;
    float sum_qq = 0.0f;
    float sum_y = 0.0f;
    float sum_qy = 0.0f;
    float sum_yy = 0.0f;
    for (int i = 0; i < n; ++i) {
      const float y = (x[i] - low_value) / range;  // in [0, 1]: squares neither vanish nor overflow
      const float q = static_cast<float>(nearest_code(x[i] - low_value, step_inverse, 0, high));
      sum_q += q;
      sum_qq += q * q;
      sum_y += y;
      sum_qy += q * y;
      sum_yy += y * y;
    }
    const float count = static_cast<float>(n);
    const float determinant = count * sum_qq - sum_q * sum_q;
    float scale = 0.0f;
    float offset = sum_y / count;
    if (determinant > 0.0f) {
      scale = (count * sum_qy - sum_q * sum_y) / determinant;
      offset = (sum_qq * sum_y - sum_q * sum_qy) / determinant;
    }
    if (offset + low_value / range > 0.0f || scale <= 0.0f) {  // min would be negative: fix it at 0
      offset = -low_value / range;
      scale = sum_qq > 0.0f ? (sum_qy - offset * sum_q) / sum_qq : 0.0f;
    }
    const float error = sum_yy + scale * scale * sum_qq + offset * offset * count +
                        2.0f * (scale * offset * sum_q - scale * sum_qy - offset * sum_y);
    if (scale >= 0.0f && error < best_error) {
      best_error = error;
      best = {scale * range, std::fmax(0.0f, -(low_value + offset * range))};
    }
  }
  return best;
}

// Squared error, relative to `unit`, of x ~ scale * q - min with nearest codes; writes the codes.
inline float quantise_group(const float* x, int n, float scale, float min, int32_t low, int32_t high, float unit,
                            int32_t* codes) {
  const float scale_inverse = inverse(scale);
  const float unit_inverse = inverse(unit);
  float error = 0.0f;
  for (int i = 0; i < n; ++i) {
    codes[i] = nearest_code(x[i] + min, scale_inverse, low, high);
    const float difference = (scale * static_cast<float>(codes[i]) - min - x[i]) * unit_inverse;
    error += difference * difference;
  }
  return error;
}

// The integer scale of a group, at or beside `scale / d` in [scale_low, scale_high], that gives the least error
// together with its codes: rounding the scale moved the optimum.
inline int32_t quantise_group_scale(const float* x, int n, float scale, float d, float min, int32_t scale_low,
                                    int32_t scale_high, int32_t low, int32_t high, int32_t* codes) {
  const int32_t center = nearest_code(scale, inverse(d), scale_low, scale_high);
  const float unit = std::fabs(extreme_of(x, n));
  int32_t best = center;
  float best_error = quantise_group(x, n, d * static_cast<float>(center), min, low, high, unit, codes);
  for (const int32_t candidate : {center - 1, center + 1}) {
    int32_t candidate_codes[32];
    if (candidate < scale_low || candidate > scale_high) {
      continue;
    }
    const float error = quantise_group(x, n, d * static_cast<float>(candidate), min, low, high, unit, candidate_codes);
    if (error < best_error) {
      best_error = error;
      best = candidate;
      std::memcpy(codes, candidate_codes, static_cast<size_t>(n) * sizeof(int32_t));
    }
  }
  return best;
}

}  // namespace shoal::block
