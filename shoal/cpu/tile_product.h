// Products of f32 rows with weights that are decoded tile by tile: for sources compiled per instruction set whose
// weights come raw at every call.
//
//   out[m, n] = (sum over k of a[m, k] * W[n, k]) * factor + bias[n]
//
// Lanes are outputs: a group is kLanes rows of W. Weights of a group are decoded for 128 columns, used by all rows, and
// forgotten. Each output is the sum, from left to right, of partial sums over 128 columns, each a chain of fused
// multiply-adds in the order of the positions. So its bits do not depend on the other rows, on tiles or on threads.
//
// A `Weights` class has
//   static constexpr int64_t kChunk;      // columns that `load` takes, a multiple of 128
//   static constexpr bool kDirect;        // `four` exists: a single row then uses weights straight from registers
//   void load(int slot, int64_t n, int64_t k, int64_t count);          // rows n .. n + kLanes - 1, columns k ...
//   void expand(int slot, int64_t at, int64_t count, float* tile);     // [count][kLanes] from column k + at
//   void four(int slot, int64_t at, Floats (&w)[4]);                   // columns k + at .. k + at + 3
// with slots 0 .. kSlots - 1. Rows behind the last and columns behind k may be anything finite.
#pragma once

#include <cstring>

#include "shoal/cpu/product_rows.h"
#include "shoal/cpu/simd.h"

namespace shoal::SHOAL_ISA {

constexpr int64_t kTileColumns = 128;
constexpr int kSlots = 4;
constexpr int kTileGroups = 2;
constexpr int kTileRows = 6;  // 6 x 2 sums, 2 weights and a value: 15 of 16 registers
constexpr int64_t kTileOutputs = kTileGroups * kLanes;

SHOAL_INLINE Floats load_lanes(DType type, const void* data, int64_t at, int64_t lanes) {
  switch (type) {
    case DType::kF32: {
      const float* p = static_cast<const float*>(data) + at;
      return lanes >= kLanes ? load(p) : load_partial(p, lanes);
    }
    case DType::kF16: {
      const f16* p = static_cast<const f16*>(data) + at;
      return lanes >= kLanes ? load(p) : load_partial(p, lanes);
    }
    default: {
      const bf16* p = static_cast<const bf16*>(data) + at;
      return lanes >= kLanes ? load(p) : load_partial(p, lanes);
    }
  }
}

SHOAL_INLINE void store_lanes(DType type, void* data, int64_t at, Floats a, int64_t lanes) {
  switch (type) {
    case DType::kF32: {
      float* p = static_cast<float*>(data) + at;
      lanes >= kLanes ? store(p, a) : store_partial(p, a, lanes);
      return;
    }
    case DType::kF16: {
      f16* p = static_cast<f16*>(data) + at;
      lanes >= kLanes ? store(p, a) : store_partial(p, a, lanes);
      return;
    }
    default: {
      bf16* p = static_cast<bf16*>(data) + at;
      lanes >= kLanes ? store(p, a) : store_partial(p, a, lanes);
      return;
    }
  }
}

// Stores the sums of one row and group.
SHOAL_INLINE void finish_outputs(const cpu::ProductOut& out, int64_t row_idx, int64_t n, Floats sums) {
  const int64_t lanes = out.n - n;
  if (lanes <= 0) {
    return;
  }
  if (out.has_factor) {
    sums = sums * splat(out.factor);
  }
  if (out.bias != nullptr) {
    sums = sums + load_lanes(out.type, out.bias, n, lanes);
  }
  store_lanes(out.type, out.data, row_idx * out.stride + n, sums, lanes);
}

// Adds the partial sums of `count` columns to `sums` of NumRows rows and NumGroups groups.
template <int NumRows, int NumGroups>
SHOAL_INLINE void multiply_tile(const float* tile, const float* a, int64_t a_stride, int64_t count, float* sums) {
  Floats acc[NumRows][NumGroups];
  for (int r = 0; r < NumRows; ++r) {
    for (int g = 0; g < NumGroups; ++g) {
      acc[r][g] = zero();
    }
  }
  for (int64_t i = 0; i < count; ++i) {
    Floats w[NumGroups];
    for (int g = 0; g < NumGroups; ++g) {
      w[g] = load(tile + (g * kTileColumns + i) * kLanes);
    }
    for (int r = 0; r < NumRows; ++r) {
      const Floats value = splat(a[r * a_stride + i]);
      for (int g = 0; g < NumGroups; ++g) {
        acc[r][g] = fma(value, w[g], acc[r][g]);
      }
    }
  }
  for (int r = 0; r < NumRows; ++r) {
    for (int g = 0; g < NumGroups; ++g) {
      float* sum = sums + r * kTileOutputs + g * kLanes;
      store(sum, load(sum) + acc[r][g]);
    }
  }
}

template <int NumGroups>
static void multiply_rows(const float* tile, const cpu::ProductRows& rows, int64_t k, int64_t count, float* sums) {
  const float* a = rows.values + k;
  int64_t row_idx = 0;
  for (; row_idx + kTileRows <= rows.count; row_idx += kTileRows) {
    multiply_tile<kTileRows, NumGroups>(tile, a + row_idx * rows.stride, rows.stride, count,
                                        sums + row_idx * kTileOutputs);
  }
  a += row_idx * rows.stride;
  sums += row_idx * kTileOutputs;
  switch (rows.count - row_idx) {
    case 5: multiply_tile<5, NumGroups>(tile, a, rows.stride, count, sums); break;
    case 4: multiply_tile<4, NumGroups>(tile, a, rows.stride, count, sums); break;
    case 3: multiply_tile<3, NumGroups>(tile, a, rows.stride, count, sums); break;
    case 2: multiply_tile<2, NumGroups>(tile, a, rows.stride, count, sums); break;
    case 1: multiply_tile<1, NumGroups>(tile, a, rows.stride, count, sums); break;
    default: break;
  }
}

// One row, NumGroups groups side by side so that their chains hide each other's latency.
template <int NumGroups, class Weights>
static void direct_outputs(Weights& weights, const cpu::ProductRows& rows, const cpu::ProductOut& out, int64_t n) {
  Floats sums[NumGroups];
  for (int g = 0; g < NumGroups; ++g) {
    sums[g] = zero();
  }
  for (int64_t k = 0; k < rows.stride; k += Weights::kChunk) {
    const int64_t chunk = rows.stride - k < Weights::kChunk ? rows.stride - k : Weights::kChunk;
    for (int g = 0; g < NumGroups; ++g) {
      weights.load(g, n + g * kLanes, k, chunk);
    }
    for (int64_t at = 0; at < chunk; at += kTileColumns) {
      const int64_t end = chunk - at < kTileColumns ? chunk : at + kTileColumns;
      Floats acc[NumGroups];
      for (int g = 0; g < NumGroups; ++g) {
        acc[g] = zero();
      }
      for (int64_t i = at; i < end; i += 4) {
        const float* a = rows.values + k + i;
        for (int g = 0; g < NumGroups; ++g) {
          Floats w[4];
          weights.four(g, i, w);
          for (int j = 0; j < 4; ++j) {
            acc[g] = fma(splat(a[j]), w[j], acc[g]);
          }
        }
      }
      for (int g = 0; g < NumGroups; ++g) {
        sums[g] = sums[g] + acc[g];
      }
    }
  }
  for (int g = 0; g < NumGroups; ++g) {
    finish_outputs(out, 0, n + g * kLanes, sums[g]);
  }
}

// Outputs [begin, end) of all rows.
template <class Weights>
static void product_outputs(Weights& weights, const cpu::ProductRows& rows, const cpu::ProductOut& out, int64_t begin,
                            int64_t end) {
  if constexpr (Weights::kDirect) {
    if (rows.count == 1) {
      int64_t n = begin;
      for (; n + 4 * kLanes <= end; n += 4 * kLanes) {
        direct_outputs<4>(weights, rows, out, n);
      }
      for (; n + kLanes < end; n += 2 * kLanes) {
        direct_outputs<2>(weights, rows, out, n);
      }
      if (n < end) {
        direct_outputs<1>(weights, rows, out, n);
      }
      return;
    }
  }
  alignas(64) float tile[kTileGroups * kTileColumns * kLanes];
  alignas(64) float sums[cpu::kProductRows * kTileOutputs];
  for (int64_t n = begin; n < end; n += kTileOutputs) {
    const int num_groups = end - n > kLanes ? 2 : 1;
    std::memset(sums, 0, static_cast<size_t>(rows.count * kTileOutputs) * sizeof(float));
    for (int64_t k = 0; k < rows.stride; k += Weights::kChunk) {
      const int64_t chunk = rows.stride - k < Weights::kChunk ? rows.stride - k : Weights::kChunk;
      for (int g = 0; g < num_groups; ++g) {
        weights.load(g, n + g * kLanes, k, chunk);
      }
      for (int64_t at = 0; at < chunk; at += kTileColumns) {
        const int64_t count = chunk - at < kTileColumns ? chunk - at : kTileColumns;
        for (int g = 0; g < num_groups; ++g) {
          weights.expand(g, at, count, tile + g * kTileColumns * kLanes);
        }
        if (num_groups == 2) {
          multiply_rows<2>(tile, rows, k + at, count, sums);
        } else {
          multiply_rows<1>(tile, rows, k + at, count, sums);
        }
      }
    }
    for (int64_t row_idx = 0; row_idx < rows.count; ++row_idx) {
      for (int g = 0; g < num_groups; ++g) {
        finish_outputs(out, row_idx, n + g * kLanes, load(sums + row_idx * kTileOutputs + g * kLanes));
      }
    }
  }
}

// 32 consecutive values of a row as f32; what is behind the end is 0.
template <class T>
SHOAL_INLINE void read_32(const T* p, int64_t stride, int64_t count, float* values) {
  if (stride == 1 && count >= 32) {
    for (int i = 0; i < 32; i += kLanes) {
      store(values + i, load(p + i));
    }
    return;
  }
  for (int64_t i = 0; i < 32; ++i) {
    T one{};
    if (i < count) {
      one = p[i * stride];
    }
    alignas(64) float lanes[kLanes];
    store(lanes, load_partial(&one, 1));
    values[i] = lanes[0];
  }
}

// Makes row `row_idx` of `a` (any strides) ready: f32, padded, in `order` (see ProductRows).
static void prepare_row(const TensorView& a, int64_t row_idx, const uint8_t* order, float* values) {
  const int axis = a.rank - 1;
  const int64_t k = a.shape[static_cast<size_t>(axis)];
  const int64_t stride = a.strides[static_cast<size_t>(axis)];
  int64_t offset = 0;
  for (int outer = axis - 1; outer >= 0; --outer) {
    const size_t at = static_cast<size_t>(outer);
    offset += row_idx % a.shape[at] * a.strides[at];
    row_idx /= a.shape[at];
  }
  alignas(64) float natural[32];
  for (int64_t i = 0; i < k; i += 32) {
    const int64_t at = offset + i * stride;
    float* to = order == nullptr ? values + i : natural;
    switch (a.dtype) {
      case DType::kF32: read_32(static_cast<const float*>(a.data) + at, stride, k - i, to); break;
      case DType::kF16: read_32(static_cast<const f16*>(a.data) + at, stride, k - i, to); break;
      default: read_32(static_cast<const bf16*>(a.data) + at, stride, k - i, to); break;
    }
    if (order != nullptr) {
      for (int p = 0; p < 32; ++p) {
        values[i + p] = natural[order[p]];
      }
    }
  }
}

}  // namespace shoal::SHOAL_ISA
