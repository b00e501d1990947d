// Expert kernels of one instruction set. A tile is two panels of kLanes outputs (gate and value, or neighbours); an
// output is a lane, k ascends, one fused multiply-add a term. One or two rows: weights go from registers into the sums.
// More: a stretch of k is decoded into memory that all rows use. Both give the same bits.
#include "shoal/ops/moe/moe_job.h"
#if defined(SHOAL_ISA_AVX2) || defined(SHOAL_ISA_AVX512)
#include "shoal/ops/moe/moe_decode_vector.h"
#else
#include "shoal/ops/moe/moe_decode_scalar.h"
#endif

namespace shoal::SHOAL_ISA {
namespace {

using moe::Gate;
using moe::Job;
using moe::kRowsAtOnce;
using moe::kTileK;
using moe::Problem;
using moe::Projection;
using moe::Scaling;

#if defined(SHOAL_ISA_AVX512)
constexpr int kTileRows = 8;  // 16 sums: enough to hide the latency of two multiply-adds a clock
#else
constexpr int kTileRows = 6;  // 12 sums, two weights and a broadcast fill 16 registers
#endif

// Up to kTileRows rows times a decoded stretch of k. Pieces end in this stretch, all but the row's last.
template <int NumRows, bool Pieces>
SHOAL_INLINE void tile_rows(const Panel* panels, const float* tile, const float* const* x, int64_t k_begin,
                            int64_t k_end, float* sums) {
  Floats total[NumRows][2];
  for (int r = 0; r < NumRows; ++r) {
    for (int p = 0; p < 2; ++p) {
      total[r][p] = load(sums + (2 * r + p) * kLanes);
    }
  }
  const int64_t step = Pieces ? panels[0].piece : k_end - k_begin;
  for (int64_t begin = k_begin; begin < k_end; begin += step) {
    const int64_t end = begin + step < k_end ? begin + step : k_end;
    Floats part[NumRows][2];
    for (int r = 0; r < NumRows; ++r) {
      for (int p = 0; p < 2; ++p) {
        part[r][p] = Pieces ? zero() : total[r][p];
      }
    }
    for (int64_t k = begin; k < end; ++k) {
      const Floats w0 = load(tile + (k - k_begin) * kTileStride);
      const Floats w1 = load(tile + (k - k_begin) * kTileStride + kLanes);
      for (int r = 0; r < NumRows; ++r) {
        const Floats value = splat(x[r][k]);
        part[r][0] = fused(value, w0, part[r][0]);
        part[r][1] = fused(value, w1, part[r][1]);
      }
    }
    for (int p = 0; p < 2; ++p) {
      const Floats scale = Pieces ? load(panels[p].scales + (begin >> panels[p].group_shift) * kLanes) : zero();
      for (int r = 0; r < NumRows; ++r) {
        total[r][p] = Pieces ? fused(part[r][p], scale, total[r][p]) : part[r][p];
      }
    }
  }
  for (int r = 0; r < NumRows; ++r) {
    for (int p = 0; p < 2; ++p) {
      store(sums + (2 * r + p) * kLanes, total[r][p]);
    }
  }
}

template <bool Pieces>
void tile_all_rows(const Panel* panels, const float* tile, const float* const* x, int64_t num_rows, int64_t k_begin,
                   int64_t k_end, float* sums) {
  int64_t r = 0;
  for (; r + kTileRows <= num_rows; r += kTileRows) {
    tile_rows<kTileRows, Pieces>(panels, tile, x + r, k_begin, k_end, sums + r * 2 * kLanes);
  }
  const auto rest = [&](auto rows) {
    constexpr int kRows = decltype(rows)::value;
    if (r + kRows <= num_rows) {
      tile_rows<kRows, Pieces>(panels, tile, x + r, k_begin, k_end, sums + r * 2 * kLanes);
      r += kRows;
    }
  };
  rest(Number<4>{});
  rest(Number<3>{});
  rest(Number<2>{});
  rest(Number<1>{});
}

void decode_panel(const Panel& panel, DType dtype, int64_t k_begin, int64_t k_end, float* tile, float* row) {
  if (panel.projection->codes == moe::Codes::kBlocks) {
    decode_blocks(panel, dtype, k_begin, k_end, tile, row);
  } else {
    decode_codes(panel, dtype, k_begin, k_end, tile);
  }
}

// Sums of up to kRowsAtOnce rows into scratch, [row, panel, lane].
void sum_rows(const Panel* panels, DType dtype, const float* const* x, int64_t num_rows, float* sums, float* tile,
              float* row) {
  const Projection& projection = *panels[0].projection;
  for (int64_t i = 0; i < 2 * num_rows; ++i) {
    store(sums + i * kLanes, zero());
  }
  for (int64_t k_begin = 0; k_begin < projection.k; k_begin += kTileK) {
    const int64_t k_end = k_begin + kTileK < projection.k ? k_begin + kTileK : projection.k;
    decode_panel(panels[0], dtype, k_begin, k_end, tile, row);
    decode_panel(panels[1], dtype, k_begin, k_end, tile + kLanes, row);
    if (projection.scaling == Scaling::kPieces) {
      tile_all_rows<true>(panels, tile, x, num_rows, k_begin, k_end, sums);
    } else {
      tile_all_rows<false>(panels, tile, x, num_rows, k_begin, k_end, sums);
    }
  }
}

// One row's sums of a panel, with scale after the sum, profile S's rounding, and bias.
SHOAL_INLINE Floats finish(const Problem& problem, const Panel& panel, const float* sums) {
  Floats value = load(sums);
  if (panel.projection->scaling == Scaling::kAfter) {
    value = value * load(panel.scales);
  }
  if (problem.staged) {
    value = round_to(problem.dtype, value);
  }
  return value + load(panel.bias);
}

// Where the parts of a thread's scratch stand.
struct Parts {
  Parts(const Problem& problem, float* scratch) {
    const moe::ScratchSizes sizes(problem);
    tile = scratch;
    sums = tile + sizes.tile;
    row = sums + sizes.sums;
    scales = row + sizes.row;
    zeros = scales + sizes.scales;
    panel_scales = sizes.scales / moe::kMaxPanels;
  }
  float* tile;
  float* sums;
  float* row;
  float* scales;
  float* zeros;
  int64_t panel_scales;
};

void set_up(const Projection& projection, int64_t expert, int64_t first_row, int64_t step, float* scales, float* zeros,
            Panel& panel) {
  panel.projection = &projection;
  set_rows(panel, expert, first_row, step);
  set_scales(panel, expert, fill_scale_vectors(panel, expert, scales), scales, zeros);
}

// The two panels of a tile of outputs, which start at `begin`, in the places `slot` and slot + 1. `stride`: tiles until
// the one that is read next.
void set_up_tile(const Job& job, int64_t begin, int slot, int64_t stride, const Parts& parts, Panel* panels) {
  const Problem& problem = *job.problem;
  const Gate gate = job.first ? problem.gate : Gate::kNone;
  const Projection& main = job.first ? problem.fc1 : problem.fc2;
  const auto panel = [&](int i, const Projection& projection, int64_t row, int64_t step) {
    const int64_t offset = (slot + i) * parts.panel_scales;
    set_up(projection, job.expert, row, step, parts.scales + offset, parts.zeros + offset, panels[i]);
  };
  if (gate == Gate::kConcatenated || gate == Gate::kSeparate) {
    panel(0, main, begin, 1);
    gate == Gate::kSeparate ? panel(1, problem.fc3, begin, 1) : panel(1, main, problem.inter + begin, 1);
    for (int i = 0; i < 2; ++i) {
      set_next(panels[i], panels[i].rows[0] + stride * kLanes * panels[i].projection->row_bytes);
    }
    return;
  }
  if (gate == Gate::kInterleaved) {
    panel(0, main, 2 * begin, 2);
    panel(1, main, 2 * begin + 1, 2);
  } else {
    panel(0, main, begin, 1);
    panel(1, main, begin + kLanes, 1);
  }
  for (int i = 0; i < 2; ++i) {  // both read the same stretch of memory, or one after the other
    set_next(panels[i], panels[0].rows[0] + (2 * stride + i) * kLanes * main.row_bytes);
  }
}

// From a row's sums of a tile to its outputs.
SHOAL_INLINE void finish_row(const Job& job, const Panel* panels, int64_t begin, int64_t row_idx, const float* sums0,
                             const float* sums1) {
  const Problem& problem = *job.problem;
  const Floats a = finish(problem, panels[0], sums0);
  const Floats b = finish(problem, panels[1], sums1);
  if (!job.first) {  // profile S adds up what is rounded and biased, F rounds with the bias
    float* to = job.a2 + job.ids[row_idx] * job.a2_stride + begin;
    store(to, problem.staged ? a : round_to(problem.dtype, a));
    store(to + kLanes, problem.staged ? b : round_to(problem.dtype, b));
    return;
  }
  float* to = job.h + row_idx * job.h_stride + begin;
  if (problem.gate == Gate::kNone) {
    store(to, round_to(problem.dtype, activate(problem.activation, a)));
    store(to + kLanes, round_to(problem.dtype, activate(problem.activation, b)));
  } else {
    store(to, round_to(problem.dtype, gated(problem, a, b)));
  }
}

SHOAL_INLINE const float* row_of(const Job& job, int64_t row_idx) {
  return job.first ? job.x_rows[job.ids[row_idx] % job.num_tokens] : job.h + row_idx * job.h_stride;
}

void one_tile(const Job& job, const Panel* panels, int64_t begin, const Parts& parts) {
  const float* x[kRowsAtOnce];
  for (int64_t first = 0; first < job.num_rows; first += kRowsAtOnce) {
    const int64_t count = job.num_rows - first < kRowsAtOnce ? job.num_rows - first : kRowsAtOnce;
    for (int64_t r = 0; r < count; ++r) {
      x[r] = row_of(job, first + r);
    }
    sum_rows(panels, job.problem->dtype, x, count, parts.sums, parts.tile, parts.row);
    for (int64_t r = 0; r < count; ++r) {
      const float* sums = parts.sums + 2 * r * kLanes;
      finish_row(job, panels, begin, first + r, sums, sums + kLanes);
    }
  }
}

}  // namespace

int64_t moe_num_tiles(const Problem& problem, bool first) {
  if (first && problem.gate != Gate::kNone) {
    return (problem.inter + kLanes - 1) / kLanes;
  }
  const int64_t n = first ? problem.inter : problem.hidden;
  return (n + 2 * kLanes - 1) / (2 * kLanes);
}

void moe_tiles(const Job& job, int64_t tile_begin, int64_t tile_end, float* scratch) {
  const Parts parts(*job.problem, scratch);
  const int64_t width = job.first && job.problem->gate != Gate::kNone ? kLanes : 2 * kLanes;
  const int64_t at_once = job.num_rows == 1 ? 2 : 1;  // tiles: see fused_rows
  Panel panels[moe::kMaxPanels];
  const float* x[moe::kFusedRows];
  for (int64_t r = 0; r < moe::kFusedRows; ++r) {
    x[r] = row_of(job, r < job.num_rows ? r : 0);
  }
  for (int64_t tile = tile_begin; tile < tile_end; tile += at_once) {
    const int64_t begin = tile * width;
    const bool two = at_once == 2 && tile + 1 < tile_end;
    set_up_tile(job, begin, 0, two ? 2 : 1, parts, panels);
    if (two) {
      set_up_tile(job, begin + width, 2, 2, parts, panels + 2);
    }
    const bool fused = two ? can_fuse(panels, 4) : job.num_rows == 2 && can_fuse(panels, 2);
    if (!fused) {
      one_tile(job, panels, begin, parts);
      if (two) {
        one_tile(job, panels + 2, begin + width, parts);
      }
      continue;
    }
    fused_sums(panels, job.problem->dtype, x, job.num_rows, parts.sums);
    for (int64_t r = 0; r < job.num_rows; ++r) {
      const float* sums = parts.sums + r * kLanes;
      const int64_t stride = job.num_rows * kLanes;  // from panel to panel
      finish_row(job, panels, begin, r, sums, sums + stride);
      if (two) {
        finish_row(job, panels + 2, begin + width, r, sums + 2 * stride, sums + 3 * stride);
      }
    }
  }
}

void moe_load_row(DType dtype, const void* from, int64_t stride, int64_t count, float* to) {
  switch (dtype) {
    case DType::kF32: load_row(static_cast<const float*>(from), stride, count, to); return;
    case DType::kF16: load_row(static_cast<const f16*>(from), stride, count, to); return;
    default: load_row(static_cast<const bf16*>(from), stride, count, to); return;
  }
}

void moe_store_row(DType dtype, const float* from, int64_t count, void* to, int64_t stride) {
  switch (dtype) {
    case DType::kF32: store_row(from, count, static_cast<float*>(to), stride); return;
    case DType::kF16: store_row(from, count, static_cast<f16*>(to), stride); return;
    default: store_row(from, count, static_cast<bf16*>(to), stride); return;
  }
}

void moe_combine(float weight, const float* row, int64_t count, float* acc) {
  const Floats w = splat(weight);
  for (int64_t i = 0; i < count; i += kLanes) {
    store(acc + i, fused(w, load(row + i), load(acc + i)));
  }
}

}  // namespace shoal::SHOAL_ISA
