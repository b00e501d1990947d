// Weights of the CUDA matmul: how they stand in device memory, how they are made, and the calls. No CUDA headers.
//
// A matrix [n, k] is cut into tiles of 16 rows by 128 columns (chunks), padded with zeros; tile (row block, chunk) stands
// at (row_block * num_chunks + chunk) * tile_bytes. A tile holds its planes of bits one after the other; a plane is what
// the 32 lanes of a warp load at once, rows 0-7 before rows 8-15: lane = 4 (row % 8) + q holds, of each group of 32
// columns, columns 4q ... 4q + 3 and 16 + 4q ... 16 + 4q + 3 (its eight values are numbered v = 0..7, pairs p = v / 2).
//
//   4 bits   16 bytes a lane, a word a group: value v in bits 4 (v / 2) + 16 (v % 2)
//   2 bits    8 bytes a lane, a word two groups: bits 2 t + 16 (v % 2), t = 4 (group % 2) + v / 2
//   1 bit     4 bytes a lane, one word: bits t + 16 (v % 2), t = 4 group + v / 2
//   16 bits  four planes of 16 bytes a lane, one a group: value v as it is
//
//   kU2: 2   kU3: 2, 1   kU4, kE2M1: 4   kU5: 4, 1   kU6: 4, 2   kU8: 4 (low), 4 (high)   kBF16: 16
//
// Scales stand by themselves, f16, [row block, chunk, 16 rows, 128 / group]; with a minimum each is a pair (scale, min):
//   weight = factor (scale (code - offset))     or     factor (scale code + min)
// factor is a power of two that keeps the scales inside f16. kF32: plain rows, exact products in f32.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "shoal/ops/matmul/matmul.h"

namespace shoal::cuda {

enum class Codes : uint8_t { kF32, kBF16, kU2, kU3, kU4, kU5, kU6, kU8, kE2M1 };

constexpr int kTileRows = 16;
constexpr int kChunk = 128;

struct TileLayout {
  Codes codes = Codes::kBF16;
  int group = 32;        // columns that share a scale
  bool has_min = false;  // pairs of scales
  int offset = 0;        // without a minimum
  bool operator==(const TileLayout&) const = default;

  constexpr int bits() const {
    switch (codes) {
      case Codes::kF32: return 32;
      case Codes::kBF16: return 16;
      case Codes::kU2: return 2;
      case Codes::kU3: return 3;
      case Codes::kU4:
      case Codes::kE2M1: return 4;
      case Codes::kU5: return 5;
      case Codes::kU6: return 6;
      case Codes::kU8: return 8;
    }
    return 0;
  }
  constexpr bool has_scales() const { return codes != Codes::kF32 && codes != Codes::kBF16; }
  constexpr int tile_bytes() const { return kTileRows * kChunk * bits() / 8; }
  constexpr int scale_tile_bytes() const { return has_scales() ? kTileRows * kChunk / group * (has_min ? 4 : 2) : 0; }
};

// What a kernel reads of one matrix; lies in device memory for groups of them.
struct Operand {
  const std::byte* codes = nullptr;
  const std::byte* scales = nullptr;
  float factor = 1.0f;
};

// Consecutive outputs of a weight in one layout.
struct DevicePart {
  TileLayout layout;
  int64_t n = 0;
  int64_t out_begin = 0;
  AlignedBuffer codes, scales;
  float factor = 1.0f;

  Operand operand() const { return {codes.data(), scales.data(), factor}; }
  int64_t num_bytes() const { return static_cast<int64_t>(codes.size() + scales.size()); }
  std::string name() const;  // "u4_g32_min"
};

// Rows of a product. Strides count elements.
struct DeviceRows {
  const float* a = nullptr;  // [., k]
  int64_t a_stride = 0;
  float* out = nullptr;  // [m, n]
  int64_t out_stride = 0;
  const float* bias = nullptr;  // [n], or [num_groups, .]
  int64_t bias_stride = 0;      // between groups
  int64_t m = 0;
  int64_t k = 0;
  int64_t num_sources = 0;  // rows of a
};

// The rows of a grouped product as kernels take them, made on the device by sort_rows (ops/rows): each tile is
// {group, first row, number of rows, 0}; unused ones have none.
struct DeviceGroups {
  const Operand* weights = nullptr;  // [num_groups], of one part
  const int32_t* source = nullptr;   // [m] row of a that a row reads; null: its own
  const int32_t* tiles = nullptr;    // [num_tiles, 4]
  int64_t num_tiles = 0;
  int64_t tile_rows = 0;  // at most, of a tile: 8, 16, 32 or 128
};

// Rows of a tile for `m` rows spread over `num_groups` groups, and how many tiles there can be.
int64_t group_tile_rows(int64_t m, int64_t num_groups);
int64_t max_group_tiles(int64_t m, int64_t num_groups, int64_t tile_rows);

// Scratch bytes: activations as bf16, where many rows are multiplied.
size_t product_workspace_bytes(int64_t num_sources, int64_t k);

// out = a W^T + bias for one part; `groups` null: all rows with `weight`.
void product(const DevicePart& weight, const DeviceRows& rows, const DeviceGroups* groups, const OpContext& context);

}  // namespace shoal::cuda
