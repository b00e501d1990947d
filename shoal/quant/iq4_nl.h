// IQ4_NL: 32 values in 18 bytes, 4-bit codes through a table that is finer around zero.
//
//   bytes 0-1   f16 d
//   bytes 2-17  qs: low nibbles are values 0-15, high nibbles values 16-31
//   value       d * table[q]
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "shoal/quant/block.h"
#include "shoal/quant/scale_search.h"

namespace shoal {

namespace block {
SHOAL_BLOCK_INLINE constexpr float iq4_value(uint32_t code) {
  constexpr int8_t kTable[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
  return static_cast<float>(kTable[code]);
}

// Between each two neighbours of the table: the middle, and their distance.
struct Iq4Edges {
  float middles[15] = {};
  float steps[15] = {};
  constexpr Iq4Edges() {
    for (uint32_t i = 0; i < 15; ++i) {
      middles[i] = 0.5f * (iq4_value(i) + iq4_value(i + 1));
      steps[i] = iq4_value(i + 1) - iq4_value(i);
    }
  }
};
inline constexpr Iq4Edges kIq4Edges;

// Code of the table's value nearest to v.
inline uint32_t iq4_nearest(float v) {
  uint32_t code = 0;
  for (const float middle : kIq4Edges.middles) {
    code += v > middle ? 1 : 0;
  }
  return code;
}

// The table's values nearest to y[i] * inverse: steps are added up instead of codes looked up, which vectorises.
inline void iq4_nearest_values(const float (&y)[32], float inverse, float (&v)[32]) {
  for (float& value : v) {
    value = iq4_value(0);
  }
  for (int j = 0; j < 15; ++j) {
    for (int i = 0; i < 32; ++i) {
      const int32_t above = y[i] * inverse > kIq4Edges.middles[j] ? 1 : 0;
      v[i] += static_cast<float>(above) * kIq4Edges.steps[j];
    }
  }
}

// The scale of 32 values x ~ scale * table[q] with the least squared error among some that put the extreme value near
// either end.
inline float iq4_search_scale(const float* x) {
  const float extreme = extreme_of(x, 32);
  const float unit = inverse(extreme);
  float y[32];
  for (int i = 0; i < 32; ++i) {
    y[i] = x[i] * unit;
  }
  float best_scale = 0.0f;
  float best_gain = 0.0f;
  for (const float end : {iq4_value(0), iq4_value(15)}) {
    for (int t = -6; t <= 6 && unit != 0.0f; ++t) {
      const float step_inverse = end * (1.0f + 0.03f * static_cast<float>(t));
      float v[32];
      iq4_nearest_values(y, step_inverse, v);
      const float yv = dot(y, v);
      const float vv = dot(v, v);
      if (yv * yv > best_gain * vv) {
        best_gain = yv * yv / vv;
        best_scale = yv / vv * extreme;
      }
    }
  }
  return best_scale;
}
}  // namespace block

struct IQ4_NL {
  static constexpr std::string_view kName = "iq4_nl";
  static constexpr int kGgmlType = 20;
  static constexpr int kBlockSize = 32;
  static constexpr int kBlockBytes = 18;
  static constexpr bool kCanEncode = true;

  SHOAL_BLOCK_INLINE static void decode(const std::byte* __restrict block, float* __restrict values) {
    const float d = block::f16(block);
    for (int i = 0; i < 16; ++i) {
      const uint32_t q = block::u8(block + 2 + i);
      values[i] = d * block::iq4_value(q & 15);
      values[i + 16] = d * block::iq4_value(q >> 4);
    }
  }

  static void encode(const float* values, std::byte* block) {
    const float d = block::rounded_f16(block::iq4_search_scale(values));
    const float inverse = block::inverse(d);
    block::store_f16(block, d);
    for (int i = 0; i < 16; ++i) {
      const uint32_t low = block::iq4_nearest(values[i] * inverse);
      const uint32_t high = block::iq4_nearest(values[i + 16] * inverse);
      block[2 + i] = block::to_byte(low | high << 4);
    }
  }
};

}  // namespace shoal
