// The integer kernels without vectors: right on every machine, not fast. Same sums as matmul_integer.h, bit for bit.
#pragma once

#include "shoal/ops/matmul/matmul_layout.h"
#include "shoal/ops/matmul/matmul_simd.h"

namespace shoal::SHOAL_ISA {
namespace {

// Code of value `i` of a block, signed and without its offset.
template <Format kFormat>
SHOAL_INLINE int32_t code_at(const std::byte* codes, int lane, int i) {
  constexpr IntegerLayout kLayout = *integer_layout(kFormat);
  constexpr int kVector = 4 * kGroup;
  const int step = i / 4;
  const std::byte* at = codes + 4 * lane + i % 4;
  if constexpr (kLayout.low_bits == 8) {
    return static_cast<int8_t>(at[step * kVector]);
  } else {
    constexpr int kLow = kLayout.low_bits;  // bits, and vectors
    int32_t code = static_cast<int32_t>(at[step % kLow * kVector]) >> step / kLow * kLow & ((1 << kLow) - 1);
    if constexpr (kLayout.table != CodeTable::kNone) {
      return table_bytes(kLayout.table)[code];
    }
    if constexpr (kLayout.high_bits == 1) {
      code |= (static_cast<int32_t>(at[kLow * kVector]) >> step & 1) << kLow;
    } else if constexpr (kLayout.high_bits == 2) {
      code |= (static_cast<int32_t>(at[(4 + step / 4) * kVector]) >> 2 * (step % 4) & 3) << 4;
    }
    return code - kLayout.offset;
  }
}

// Scales of one output and block; `first` and `second` belong to the block's halves.
struct LaneScales {
  float d = 0.0f;
  float min = 0.0f;  // added, times the sum of the activations
  int32_t first = 1;
  int32_t second = 1;
  int32_t first_min = 0;  // times min and the sum of a half
  int32_t second_min = 0;
};

template <Format kFormat>
SHOAL_INLINE LaneScales scales_at(const std::byte* scales, int64_t block_idx, int lane) {
  constexpr IntegerLayout kLayout = *integer_layout(kFormat);
  const std::byte* at = scales + block_idx / kLayout.blocks_per_scale() * kLayout.scale_bytes() * kGroup;
  const auto* halves = reinterpret_cast<const uint16_t*>(at);
  LaneScales result;
  result.d = f16_to_f32(halves[lane]);
  if constexpr (kLayout.scales == ScaleKind::kScaleMin) {
    result.min = f16_to_f32(halves[kGroup + lane]);
  } else if constexpr (kLayout.scales == ScaleKind::kSuperMin) {
    const std::byte* pair = at + 4 * kGroup + block_idx % 8 * 2 * kGroup + 2 * lane;
    result.first = result.second = static_cast<int32_t>(pair[0]);
    result.min = -(f16_to_f32(halves[kGroup + lane]) * static_cast<float>(static_cast<int32_t>(pair[1])));
  } else if constexpr (kLayout.scales == ScaleKind::kSuperHalf) {
    const std::byte* pair = at + 2 * kGroup + block_idx % 8 * 2 * kGroup + 2 * lane;
    result.first = static_cast<int8_t>(pair[0]);
    result.second = static_cast<int8_t>(pair[1]);
  } else if constexpr (kLayout.scales == ScaleKind::kSuperHalfMin) {
    const std::byte* pair = at + 4 * kGroup + block_idx % 8 * 2 * kGroup + 2 * lane;
    result.first = static_cast<int32_t>(pair[0]) & 15;
    result.second = static_cast<int32_t>(pair[1]) & 15;
    result.first_min = static_cast<int32_t>(pair[0]) >> 4;
    result.second_min = static_cast<int32_t>(pair[1]) >> 4;
    result.min = f16_to_f32(halves[kGroup + lane]);
  }
  return result;
}

template <Format kFormat>
void integer_groups(const MatmulPart& part, const MatmulRows& rows, const QuantRows& quant, int64_t begin,
                    int64_t end) {
  constexpr IntegerLayout kLayout = *integer_layout(kFormat);
  const int64_t num_blocks = rows.k / kQuantBlock;
  for (int64_t g = begin; g < end; ++g) {
    const std::byte* codes = part.packed.data() + g * static_cast<int64_t>(part.group_bytes);
    const std::byte* scales = codes + code_region_bytes(kLayout, rows.k, kGroup);
    for (int64_t m = 0; m < rows.m; ++m) {
      F acc = zero();
      for (int64_t b = 0; b < num_blocks; ++b) {
        const QuantBlock& block = quant.blocks[m * num_blocks + b];
        const int8_t* a = quant.codes + m * rows.k + b * kQuantBlock;
        for (int lane = 0; lane < kGroup; ++lane) {
          int32_t first = 0;
          int32_t second = 0;
          for (int i = 0; i < 16; ++i) {
            first += code_at<kFormat>(codes + b * kLayout.code_bytes() * kGroup, lane, i) * a[i];
            second += code_at<kFormat>(codes + b * kLayout.code_bytes() * kGroup, lane, i + 16) * a[i + 16];
          }
          const LaneScales s = scales_at<kFormat>(scales, b, lane);
          const int32_t sum =
              first * s.first * (block.factor_pairs[0] & 0xffff) + second * s.second * (block.factor_pairs[1] & 0xffff);
          acc.lane[lane] = __builtin_fmaf(s.d * block.scale, static_cast<float>(sum), acc.lane[lane]);
          if constexpr (kLayout.scales == ScaleKind::kScaleMin || kLayout.scales == ScaleKind::kSuperMin) {
            acc.lane[lane] = __builtin_fmaf(s.min, block.sum, acc.lane[lane]);
          } else if constexpr (kLayout.scales == ScaleKind::kSuperHalfMin) {
            const int32_t mins = s.first_min * block.half_sums[0] + s.second_min * block.half_sums[1];
            acc.lane[lane] = __builtin_fmaf(-(s.min * block.scale), static_cast<float>(mins), acc.lane[lane]);
          }
        }
      }
      store_outputs(part, rows, m, g, acc);
    }
  }
}

void quantize_row(const float* a, int64_t k, int8_t* codes, QuantBlock* blocks) {
  for (int64_t b = 0; b < k / kQuantBlock; ++b) {
    uint32_t largest[2] = {0, 0};  // magnitudes of floats order like their bits, with infinity and NaN on top
    for (int i = 0; i < kQuantBlock; ++i) {
      const uint32_t bits = __builtin_bit_cast(uint32_t, a[b * kQuantBlock + i]) & 0x7fffffffu;
      uint32_t& top = largest[i / kQuantHalf];
      top = bits > top ? bits : top;
    }
    const QuantScale scale = quant_scale(__builtin_bit_cast(float, largest[0]), __builtin_bit_cast(float, largest[1]));
    int32_t sums[2] = {0, 0};
    for (int i = 0; i < kQuantBlock; ++i) {
      const float value = a[b * kQuantBlock + i];
      const float inverse = scale.inverses[i / kQuantHalf];
      const long code = inverse == 0.0f ? 0 : __builtin_lrintf(value * inverse);
      codes[b * kQuantBlock + i] = static_cast<int8_t>(code);
      sums[i / kQuantHalf] += static_cast<int32_t>(code);
    }
    blocks[b] = quant_block(scale, sums[0], sums[1]);
  }
}

}  // namespace
}  // namespace shoal::SHOAL_ISA
