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

// Sum of a[i] * b[i] for a group of 16 or 32, by halves: loops over elements vectorise, and the order of additions is
// fixed. Searches work on whole groups step by step for the same reason.
template <int kCount>
float dot(const float (&a)[kCount], const float (&b)[kCount]) {
  float products[kCount];
  for (int i = 0; i < kCount; ++i) {
    products[i] = a[i] * b[i];
  }
  float eighths[8];
  for (int l = 0; l < 8; ++l) {
    eighths[l] = products[l] + products[l + 8];
    if constexpr (kCount == 32) {
      eighths[l] += products[l + 16] + products[l + 24];
    }
  }
  return ((eighths[0] + eighths[4]) + (eighths[2] + eighths[6])) +
         ((eighths[1] + eighths[5]) + (eighths[3] + eighths[7]));
}

template <int kCount>
float sum(const float (&a)[kCount]) {
  float ones[kCount];
  for (float& one : ones) {
    one = 1.0f;
  }
  return dot(a, ones);
}

// Not inlined: with a known count of 16 GCC 12 unrolls the loop before it could vectorise it, at half the speed (Zen
// 1).
[[gnu::noinline]] inline void nearest_codes(const float* __restrict y, int n, float inverse, int32_t low, int32_t high,
                                            float* __restrict q) {
  for (int i = 0; i < n; ++i) {
    q[i] = static_cast<float>(nearest_code(y[i], inverse, low, high));
  }
}

// x ~ scale * q, q in [low, high] with low = -(high + 1): the extreme value gets the longer, negative side, hence the
// scale's sign. 0 for a group of zeros.
template <int kCount>
float search_scale(const float* x, int32_t low, int32_t high) {
  const float extreme = extreme_of(x, kCount);
  const float unit = inverse(extreme);  // relative to the extreme, squares of tiny values do not vanish
  if (unit == 0.0f) {
    return 0.0f;
  }
  float y[kCount];
  for (int i = 0; i < kCount; ++i) {
    y[i] = x[i] * unit;
  }
  float best_scale = extreme / static_cast<float>(low);
  float best_gain = -1.0f;  // error = sum y^2 - gain
  for (int t = -9; t <= 9; ++t) {
    const float step_inverse = static_cast<float>(low) + 0.1f * static_cast<float>(t);
    float q[kCount];
    nearest_codes(y, kCount, step_inverse, low, high, q);
    const float yq = dot(y, q);
    const float qq = dot(q, q);
    if (qq > 0.0f && yq * yq > best_gain * qq) {
      best_gain = yq * yq / qq;
      best_scale = yq / qq * extreme;
    }
  }
  return best_scale;
}

struct ScaleMin {
  float scale;  // >= 0
  float min;    // >= 0
};

// x ~ scale * q - min, q in [0, high].
template <int kCount>
ScaleMin search_scale_min(const float* x, int32_t high) {
  float low_value = 0.0f;  // min is not negative: a group of positive values starts at zero
  float high_value = x[0];
  for (int i = 0; i < kCount; ++i) {
    low_value = x[i] < low_value ? x[i] : low_value;
    high_value = x[i] > high_value ? x[i] : high_value;
  }
  const float range = high_value - low_value;
  const float unit = inverse(range);
  if (unit == 0.0f) {
    return {0.0f, -low_value};
  }
  float y[kCount];  // in [0, 1]: squares neither vanish nor overflow
  for (int i = 0; i < kCount; ++i) {
    y[i] = (x[i] - low_value) * unit;
  }
  const float sum_y = sum(y);
  const float sum_yy = dot(y, y);
  const float zero = -low_value * unit;  // where x = 0 lies
  ScaleMin best{range / static_cast<float>(high), -low_value};
  float best_error = INFINITY;
  for (int t = -10; t <= 10; ++t) {
    const float step_inverse = static_cast<float>(high) + 0.1f * static_cast<float>(t);
    float q[kCount];
    nearest_codes(y, kCount, step_inverse, 0, high, q);
    const float sum_q = sum(q);
    const float sum_qq = dot(q, q);
    const float sum_qy = dot(q, y);
    constexpr float kCountF = kCount;
    // y ~ scale * q + offset
    const float determinant = kCountF * sum_qq - sum_q * sum_q;
    float scale = 0.0f;
    float offset = zero + 1.0f;
    if (determinant > 0.0f) {
      scale = (kCountF * sum_qy - sum_q * sum_y) / determinant;
      offset = (sum_qq * sum_y - sum_q * sum_qy) / determinant;
    }
    if (offset > zero) {  // min would be negative: fix it at 0
      offset = zero;
      scale = sum_qq > 0.0f ? (sum_qy - offset * sum_q) / sum_qq : 0.0f;
    }
    const float error = sum_yy + scale * scale * sum_qq + offset * offset * kCountF +
                        2.0f * (scale * offset * sum_q - scale * sum_qy - offset * sum_y);
    if (scale >= 0.0f && error < best_error) {
      best_error = error;
      best = {scale * range, (zero - offset) * range};
    }
  }
  return best;
}

// Squared error, relative to 1 / `unit`, of x ~ scale * q - min with nearest codes; writes the codes.
template <int kCount>
float quantise_group(const float* x, float scale, float min, int32_t low, int32_t high, float unit, int32_t* codes) {
  const float scale_inverse = inverse(scale);
  float shifted[kCount];
  float q[kCount];
  float difference[kCount];
  for (int i = 0; i < kCount; ++i) {
    shifted[i] = x[i] + min;
  }
  nearest_codes(shifted, kCount, scale_inverse, low, high, q);
  for (int i = 0; i < kCount; ++i) {
    codes[i] = static_cast<int32_t>(q[i]);
    difference[i] = (scale * q[i] - min - x[i]) * unit;
  }
  return dot(difference, difference);
}

// The integer scale of a group, at or beside `scale / d` in [scale_low, scale_high], that gives the least error
// together with its codes: rounding the scale moved the optimum.
template <int kCount>
int32_t quantise_group_scale(const float* x, float scale, float d, float min, int32_t scale_low, int32_t scale_high,
                             int32_t low, int32_t high, int32_t* codes) {
  const int32_t center = nearest_code(scale, inverse(d), scale_low, scale_high);
  const float unit = inverse(extreme_of(x, kCount));
  int32_t best = center;
  float best_error = quantise_group<kCount>(x, d * static_cast<float>(center), min, low, high, unit, codes);
  for (const int32_t candidate : {center - 1, center + 1}) {
    if (candidate < scale_low || candidate > scale_high) {
      continue;
    }
    int32_t candidate_codes[kCount];
    const float error =
        quantise_group<kCount>(x, d * static_cast<float>(candidate), min, low, high, unit, candidate_codes);
    if (error < best_error) {
      best_error = error;
      best = candidate;
      std::memcpy(codes, candidate_codes, sizeof(candidate_codes));
    }
  }
  return best;
}

}  // namespace shoal::block
