// Weights of a panel with vectors: into a tile in memory, or straight into the sums of a few rows.
#pragma once

#include "shoal/ops/moe/moe_codecs.h"
#include "shoal/ops/moe/moe_panel.h"

namespace shoal::SHOAL_ISA {
namespace {

// How a number becomes a weight.
enum class Mode { kPieces, kAfter, kValueF32, kValueF16, kValueBF16 };

constexpr bool is_value(Mode mode) { return mode != Mode::kPieces && mode != Mode::kAfter; }

// The zeros and scales of one unit of codes.
struct UnitScales {
  Floats zeros;
  Floats scales;
};

template <class Codec, Mode M>
SHOAL_INLINE UnitScales unit_scales(const Panel& panel, int64_t k) {
  const int64_t group = k >> panel.group_shift;
  return {Codec::zeros_of(load(panel.zeros + group * panel.zero_stride)),
          is_value(M) ? load(panel.scales + group * kLanes) : zero()};
}

template <class Codec, Mode M, int J>
SHOAL_INLINE Floats weight_of(const Ints* word, const UnitScales& unit) {
  Floats weight = Codec::template weight<J>(word, unit.zeros);
  if constexpr (is_value(M)) {
    weight = weight * unit.scales;
  }
  if constexpr (M == Mode::kValueF16) {
    weight = round_f16(weight);
  } else if constexpr (M == Mode::kValueBF16) {
    weight = round_bf16(weight);
  }
  return weight;
}

// Rows x panels over all of k, which is whole steps. sums [panel, row, lane]. All panels go in step: NumRows *
// NumPanels chains of sums are under way, which one row alone needs four panels for.
template <class Codec, Mode M, int NumRows, int NumPanels>
void fused_rows(const Panel* panels, const float* const* x, float* sums) {
  Floats part[NumRows][NumPanels];
  Floats total[NumRows][NumPanels];
  for (int r = 0; r < NumRows; ++r) {
    for (int p = 0; p < NumPanels; ++p) {
      part[r][p] = zero();
      total[r][p] = zero();
    }
  }
  const int64_t num_k = panels[0].projection->k;
  const int64_t piece_mask = panels[0].piece - 1;
  int64_t bytes = 0;
  for (int64_t k = 0; k < num_k; bytes += Codec::kBytes) {
    Ints words[NumPanels][4];
    for (int p = 0; p < NumPanels; ++p) {
      load_words(panels[p].rows, bytes, words[p]);
      // What follows in memory, as far in as this panel.
      const std::byte* next = panels[p].next + bytes * kLanes;
      for (int line = 0; line < Codec::kBytes * kLanes; line += 64) {
        __builtin_prefetch(next + line);
      }
    }
    for (int w = 0; w < Codec::kWords; ++w, k += Codec::kCodes) {
      UnitScales units[NumPanels];
      for (int p = 0; p < NumPanels; ++p) {
        units[p] = unit_scales<Codec, M>(panels[p], k);
      }
      unroll<Codec::kCodes>([&](auto j) {
        constexpr int kJ = decltype(j)::value;
        for (int p = 0; p < NumPanels; ++p) {
          const Floats weight = weight_of<Codec, M, kJ>(words[p] + w, units[p]);
          for (int r = 0; r < NumRows; ++r) {
            part[r][p] = fused(splat(x[r][k + kJ]), weight, part[r][p]);
          }
        }
      });
      if (M == Mode::kPieces && ((k + Codec::kCodes) & piece_mask) == 0) {
        for (int p = 0; p < NumPanels; ++p) {
          const Floats scale = load(panels[p].scales + (k >> panels[p].group_shift) * kLanes);
          for (int r = 0; r < NumRows; ++r) {
            total[r][p] = fused(part[r][p], scale, total[r][p]);
            part[r][p] = zero();
          }
        }
      }
    }
  }
  for (int r = 0; r < NumRows; ++r) {
    for (int p = 0; p < NumPanels; ++p) {
      store(sums + (p * NumRows + r) * kLanes, M == Mode::kPieces ? total[r][p] : part[r][p]);
    }
  }
}

// Columns [k_begin, k_end) of a panel into `tile`, kTileStride floats from column to column. Whole steps are written:
// the tile has room for them.
template <class Codec, Mode M>
void decode_steps(const Panel& panel, int64_t k_begin, int64_t k_end, float* tile) {
  alignas(64) std::byte tail[kLanes * 16];
  for (int64_t k = k_begin; k < k_end;) {
    const int64_t offset = k / (Codec::kWords * Codec::kCodes) * Codec::kBytes;
    Ints words[4];
    if (offset + 16 <= panel.row_bytes) {
      load_words(panel.rows, offset, words);
    } else {  // the end of a row may be the end of the memory
      const std::byte* rows[kLanes];
      std::memset(tail, 0, sizeof(tail));
      for (int lane = 0; lane < kLanes; ++lane) {
        rows[lane] = tail + 16 * lane;
        std::memcpy(tail + 16 * lane, panel.rows[lane] + offset, static_cast<size_t>(panel.row_bytes - offset));
      }
      load_words(rows, 0, words);
    }
    for (int w = 0; w < Codec::kWords; ++w, k += Codec::kCodes) {
      // Beyond the row's end there are no scales to read.
      const UnitScales unit = unit_scales<Codec, M>(panel, k < k_end ? k : k_end - 1);
      float* to = tile + (k - k_begin) * kTileStride;
      unroll<Codec::kCodes>([&](auto j) {
        constexpr int kJ = decltype(j)::value;
        store(to + kJ * kTileStride, weight_of<Codec, M, kJ>(words + w, unit));
      });
    }
  }
}

// E2M1 nibbles along n, doubled, into tile. First rows of panels with step 1 are even.
inline void decode_columns(const Panel& panel, int64_t k_begin, int64_t k_end, float* tile) {
  const moe::Projection& p = *panel.projection;
  const bool whole = panel.first_row + (kLanes - 1) * panel.step < p.n;
  for (int64_t k = k_begin; k < k_end; ++k) {
    const std::byte* column = panel.columns + k * p.row_bytes;
    float* to = tile + (k - k_begin) * kTileStride;
    if (!whole) {
      for (int64_t lane = 0; lane < kLanes; ++lane) {
        const int64_t n = panel.row_of(lane);
        to[lane] = static_cast<float>(kE2M1Doubled[block::u8(column + n / 2) >> (n % 2 * 4) & 15u]);
      }
      continue;
    }
    const std::byte* start = column + panel.first_row / 2;
    const Ints codes = panel.step == 1 ? adjacent_nibbles(start) : strided_nibbles(start, panel.first_row % 2 == 1);
    store(to, to_floats(shift_right_signed<24>(shift_left<24>(look_up(kE2M1Doubled, codes)))));
  }
}

// Calls visitor.operator()<Codec, Mode>() for a projection whose rows run along k.
template <class Visitor>
SHOAL_INLINE void visit_codec(const moe::Projection& projection, DType dtype, const Visitor& visitor) {
  const bool pieces = projection.scaling == moe::Scaling::kPieces;
  if (projection.codes == moe::Codes::kE2M1) {
    visitor.template operator()<E2M1Codec, Mode::kPieces>();
  } else if (projection.codes == moe::Codes::kE4M3) {
    if (projection.scaling == moe::Scaling::kAfter) {
      visitor.template operator()<E4M3Codec, Mode::kAfter>();
    } else if (dtype == DType::kF16) {
      visitor.template operator()<E4M3Codec, Mode::kValueF16>();
    } else if (dtype == DType::kBF16) {
      visitor.template operator()<E4M3Codec, Mode::kValueBF16>();
    } else {
      visitor.template operator()<E4M3Codec, Mode::kValueF32>();
    }
  } else if (projection.bits == 2) {
    pieces ? visitor.template operator()<AffineCodec<2>, Mode::kPieces>()
           : visitor.template operator()<AffineCodec<2>, Mode::kAfter>();
  } else if (projection.bits == 3) {  // always in blocks
    visitor.template operator()<Affine3Codec, Mode::kPieces>();
  } else if (projection.bits == 4) {
    pieces ? visitor.template operator()<AffineCodec<4>, Mode::kPieces>()
           : visitor.template operator()<AffineCodec<4>, Mode::kAfter>();
  } else {
    pieces ? visitor.template operator()<AffineCodec<8>, Mode::kPieces>()
           : visitor.template operator()<AffineCodec<8>, Mode::kAfter>();
  }
}

inline void decode_codes(const Panel& panel, DType dtype, int64_t k_begin, int64_t k_end, float* tile) {
  if (panel.projection->codes == moe::Codes::kE2M1Columns) {
    decode_columns(panel, k_begin, k_end, tile);
    return;
  }
  visit_codec(*panel.projection, dtype,
              [&]<class Codec, Mode M>() { decode_steps<Codec, M>(panel, k_begin, k_end, tile); });
}

// Whether the panels have rows of whole steps in one format.
inline bool can_fuse(const Panel* panels, int num_panels) {
  const moe::Projection& p = *panels[0].projection;
  const int64_t codes = p.bits == 3 ? 32 : 128 / p.bits;
  bool can = p.codes != moe::Codes::kBlocks && p.codes != moe::Codes::kE2M1Columns && p.k % codes == 0;
  for (int i = 0; i < num_panels; ++i) {
    const moe::Projection& other = *panels[i].projection;
    can = can && p.codes == other.codes && p.bits == other.bits && panels[i].can_over_read;
  }
  return can;
}

// One row by four panels, or two rows by two.
inline void fused_sums(const Panel* panels, DType dtype, const float* const* x, int64_t num_rows, float* sums) {
  visit_codec(*panels[0].projection, dtype, [&]<class Codec, Mode M>() {
    num_rows == 1 ? fused_rows<Codec, M, 1, 4>(panels, x, sums) : fused_rows<Codec, M, 2, 2>(panels, x, sums);
  });
}

// Scales that stand beside each other, 16 bytes of each lane's row at a time: as the codes. Returns how many groups.
inline int64_t fill_scale_vectors(const Panel& panel, int64_t expert, float* scales) {
  const moe::Projection& p = *panel.projection;
  if (p.scales == nullptr || p.scale_strides[2] != 1) {
    return 0;
  }
  const int64_t element_bytes = static_cast<int64_t>(size_of(p.scale_type));
  const std::byte* rows[kLanes];
  for (int64_t lane = 0; lane < kLanes; ++lane) {
    const int64_t at = expert * p.scale_strides[0] + panel.row_of(lane) / p.row_group * p.scale_strides[1];
    rows[lane] = static_cast<const std::byte*>(p.scales) + at * element_bytes;
  }
  const Floats global = splat(p.global != nullptr ? p.global[expert * p.global_stride] : 1.0f);
  const Floats factor = splat(scale_factor(p));
  const int64_t per_step = 16 / element_bytes;
  int64_t g = 0;
  for (; g + per_step <= p.num_groups(); g += per_step) {
    Ints words[4];
    load_words(rows, g * element_bytes, words);
    float* to = scales + g * kLanes;
    const auto put = [&](int i, const Floats& scale) { store(to + i * kLanes, scale * global * factor); };
    for (int w = 0; w < 4; ++w) {
      const Ints word = words[w];
      switch (p.scale_type) {
        case DType::kF32: put(w, as_floats(word)); break;
        case DType::kF16:
          put(2 * w, low_f16(word));
          put(2 * w + 1, low_f16(shift_right<16>(word)));
          break;
        case DType::kBF16:
          put(2 * w, as_floats(shift_left<16>(word)));
          put(2 * w + 1, as_floats(word & splat_int(0xffff0000u)));
          break;
        case DType::kF8E4M3:
          unroll<4>(
              [&](auto j) { put(4 * w + decltype(j)::value, E4M3Codec::weight<decltype(j)::value>(&word, zero())); });
          break;
        default:
          unroll<4>([&](auto j) {
            const Ints byte = byte_of<decltype(j)::value>(word);
            const Ints smallest = where_equal(byte, splat_int(0)) & splat_int(0x00400000u);
            const Ints nan = where_equal(byte, splat_int(255)) & splat_int(0x7fc00000u);
            put(4 * w + decltype(j)::value, as_floats(shift_left<23>(byte) | smallest | nan));
          });
          break;
      }
    }
  }
  return g;
}

}  // namespace
}  // namespace shoal::SHOAL_ISA
