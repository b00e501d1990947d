// What latent rows and the queries that score them go through: trailing rotary, and the number grids that a checkpoint
// was trained against. One place, since a grid is a step function: a row and a query that were rounded differently
// would disagree by whole steps.
//
// Everything works in place on a row of f32. Sums and products are unfused.
#pragma once

#include <cmath>
#include <cstdint>

#include "shoal/base/checked.h"
#include "shoal/base/float_bits.h"
#include "shoal/ops/element.h"

namespace shoal::latent {

constexpr int64_t kFp8Block = 64;
constexpr int64_t kFp4Block = 32;

// The Hadamard transform needs a power of two, FP4 whole blocks.
constexpr bool fits_rotated_fp4(int64_t width) { return is_power_of_two(width) && width >= kFp4Block; }

// `count` elements, `stride` apart, as f32.
inline void load_row(DType dtype, const void* data, int64_t first, int64_t stride, int64_t count, float* to) {
  for (int64_t i = 0; i < count; ++i) {
    to[i] = read_element(dtype, data, first + i * stride);
  }
}

inline void round_row(DType dtype, float* row, int64_t count) {
  if (dtype == DType::kF16) {
    for (int64_t i = 0; i < count; ++i) {
      row[i] = f16_to_f32(f32_to_f16(row[i]));
    }
  } else if (dtype == DType::kBF16) {
    for (int64_t i = 0; i < count; ++i) {
      row[i] = bf16_to_f32(f32_to_bf16(row[i]));
    }
  }
}

// Pairs of neighbours among `count` channels; the tables hold each angle twice: out = x cos + (-x1, x0) sin.
inline void rotate_pairs(float* row, const float* cos, int64_t cos_stride, const float* sin, int64_t sin_stride,
                         int64_t count) {
  for (int64_t i = 0; i < count; i += 2) {
    const float x0 = row[i];
    const float x1 = row[i + 1];
    row[i] = x0 * cos[i * cos_stride] - x1 * sin[i * sin_stride];
    row[i + 1] = x1 * cos[(i + 1) * cos_stride] + x0 * sin[(i + 1) * sin_stride];
  }
}

// 2^ceil(log2(max(amax / limit, floor))), exact; 1 for a block of zeros, infinite if amax is.
inline float block_scale(float amax, float limit, float floor) {
  if (!(amax > 0.0f) || std::isinf(amax)) {
    return std::isinf(amax) ? amax : 1.0f;
  }
  const float ratio = std::fmax(amax / limit, floor);
  int exponent = 0;
  const float mantissa = std::frexp(ratio, &exponent);  // in [1/2, 1)
  return std::ldexp(1.0f, mantissa == 0.5f ? exponent - 1 : exponent);
}

// The largest magnitude; NaN does not count.
inline float largest(const float* values, int64_t count) {
  float amax = 0.0f;
  for (int64_t i = 0; i < count; ++i) {
    const float a = std::fabs(values[i]);
    amax = a > amax ? a : amax;
  }
  return amax;
}

// To E4M3 and back, in blocks of 64. NaN stays NaN; a block with an infinity becomes NaN.
inline void round_to_fp8(float* row, int64_t count) {
  for (int64_t block = 0; block < count; block += kFp8Block) {
    float* values = row + block;
    const float scale = block_scale(largest(values, kFp8Block), 448.0f, 1e-30f);
    for (int64_t i = 0; i < kFp8Block; ++i) {
      values[i] = e4m3_to_f32(f32_to_e4m3(values[i] / scale)) * scale;
    }
  }
}

// The nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6 to a magnitude, of two the smaller.
inline float nearest_fp4(float magnitude) {
  const float half_steps =
      static_cast<float>((magnitude > 0.25f) + (magnitude > 0.75f) + (magnitude > 1.25f) + (magnitude > 1.75f) +
                         2 * (magnitude > 2.5f) + 2 * (magnitude > 3.5f) + 4 * (magnitude > 5.0f));
  return 0.5f * half_steps;
}

// To E2M1 and back, in blocks of 32, ties toward zero. NaN and infinities as above.
inline void round_to_fp4(float* row, int64_t count) {
  for (int64_t block = 0; block < count; block += kFp4Block) {
    float* values = row + block;
    const float scale = block_scale(largest(values, kFp4Block), 6.0f, 1e-38f);
    for (int64_t i = 0; i < kFp4Block; ++i) {
      const float v = values[i] / scale;
      values[i] = std::isnan(v) ? v : std::copysign(nearest_fp4(std::fabs(v)), v) * scale;
    }
  }
}

// Times the Sylvester-Hadamard matrix, over sqrt(count), a power of two.
inline void hadamard(float* row, int64_t count) {
  for (int64_t half = 1; half < count; half *= 2) {
    for (int64_t start = 0; start < count; start += 2 * half) {
      float* low = row + start;
      float* high = low + half;
      for (int64_t i = 0; i < half; ++i) {
        const float sum = low[i] + high[i];
        high[i] = low[i] - high[i];
        low[i] = sum;
      }
    }
  }
  const float norm = 1.0f / std::sqrt(static_cast<float>(count));
  for (int64_t i = 0; i < count; ++i) {
    row[i] *= norm;
  }
}

// Hadamard, one rounding to `dtype`, FP4.
inline void simulate_rotated_fp4(DType dtype, float* row, int64_t count) {
  hadamard(row, count);
  round_row(dtype, row, count);
  round_to_fp4(row, count);
}

}  // namespace shoal::latent
