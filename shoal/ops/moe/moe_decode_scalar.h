// Weights of a panel in plain C++, code by code: what moe_decode_vector.h does with vectors.
#pragma once

#include "shoal/ops/moe/moe_panel.h"

namespace shoal::SHOAL_ISA {
namespace {

constexpr bool can_fuse(const Panel*, int) { return false; }
inline void fused_sums(const Panel*, DType, const float* const*, int64_t, float*) {}
inline int64_t fill_scale_vectors(const Panel&, int64_t, float*) { return 0; }

inline float number_of(const Panel& panel, int64_t lane, int64_t k) {
  static constexpr ByteTable kE4M3 = e4m3_table();
  const moe::Projection& p = *panel.projection;
  if (p.codes == moe::Codes::kE2M1Columns) {
    const int64_t n = panel.row_of(lane);
    return kE2M1Doubled[block::u8(panel.columns + k * p.row_bytes + n / 2) >> (n % 2 * 4) & 15u];
  }
  const int64_t bit = k * p.bits;
  uint32_t window = block::u8(panel.rows[lane] + bit / 8);
  if (bit % 8 + p.bits > 8) {
    window |= block::u8(panel.rows[lane] + bit / 8 + 1) << 8;
  }
  const uint32_t code = window >> (bit % 8) & ((1u << p.bits) - 1u);
  switch (p.codes) {
    case moe::Codes::kE2M1: return kE2M1Doubled[code];
    case moe::Codes::kE4M3: return kE4M3.value[code];
    default: return static_cast<float>(code);
  }
}

inline void decode_codes(const Panel& panel, DType dtype, int64_t k_begin, int64_t k_end, float* tile) {
  const moe::Projection& p = *panel.projection;
  for (int64_t k = k_begin; k < k_end; ++k) {
    const int64_t group = k >> panel.group_shift;
    Floats weights;
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      weights.v[lane] = number_of(panel, lane, k);
      if (p.codes == moe::Codes::kAffine) {
        weights.v[lane] -= panel.zeros[group * panel.zero_stride + lane];
      }
    }
    if (p.scaling == moe::Scaling::kValues) {
      weights = round_to(dtype, weights * load(panel.scales + group * kLanes));
    }
    store(tile + (k - k_begin) * kTileStride, weights);
  }
}

}  // namespace
}  // namespace shoal::SHOAL_ISA
