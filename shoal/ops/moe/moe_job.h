// What a kernel gets: one expert of one of the two phases. Phase 1 makes h from x, phase 2 makes a2 from h.
#pragma once

#include <cstddef>
#include <cstdint>

#include "shoal/cpu/isa.h"
#include "shoal/ops/moe/moe_problem.h"

namespace shoal::moe {

constexpr int64_t kMaxLanes = 16;     // of any instruction set
constexpr int64_t kTileK = 256;       // columns that are decoded at once: whole blocks of every format
constexpr int64_t kRowsAtOnce = 256;  // rows whose sums a thread holds
constexpr int64_t kFusedRows = 2;     // up to here weights go from registers into sums, without a tile in memory
constexpr int64_t kMaxPanels = 4;     // that are set up together

struct Job {
  const Problem* problem = nullptr;
  bool first = true;  // phase 1
  int64_t expert = 0;
  int64_t num_rows = 0;
  const int32_t* ids = nullptr;  // of the rows: token + rank * num_tokens
  int64_t num_tokens = 0;
  const float* const* x_rows = nullptr;  // of each token
  float* h = nullptr;                    // the expert's rows
  int64_t h_stride = 0;
  float* a2 = nullptr;  // a row for each id
  int64_t a2_stride = 0;
};

// Scratch of a thread, in floats.
struct ScratchSizes {
  int64_t tile = 2 * kTileK * kMaxLanes;
  int64_t sums = kRowsAtOnce * 2 * kMaxLanes;
  int64_t row = kTileK + 4 * kMaxLanes;
  int64_t scales = kMaxPanels * kMaxLanes;  // and as many zeros
  explicit ScratchSizes(const Problem& problem) {
    for (const Projection* p : {&problem.fc1, &problem.fc2, &problem.fc3}) {
      const int64_t groups = p->present() ? kMaxPanels * kMaxLanes * p->num_groups() : 0;
      scales = groups > scales ? groups : scales;
    }
  }
  int64_t total() const { return tile + sums + row + 2 * scales; }
};

}  // namespace shoal::moe

namespace shoal {

// moe_num_tiles: tiles of outputs of a phase. moe_tiles: some of them, all rows of the job.
// moe_load_row: `count` elements of T, `stride` apart, as f32. moe_store_row: the combined row, from f32.
// moe_combine: acc = fma(weight, row, acc); both have room for whole vectors.
SHOAL_DECLARE_FOR_EACH_ISA(int64_t moe_num_tiles(const moe::Problem& problem, bool first);
                           void moe_tiles(const moe::Job& job, int64_t begin, int64_t end, float* scratch);
                           void moe_load_row(DType dtype, const void* from, int64_t stride, int64_t count, float* to);
                           void moe_store_row(DType dtype, const float* from, int64_t count, void* to, int64_t stride);
                           void moe_combine(float weight, const float* row, int64_t count, float* acc))

}  // namespace shoal
