// Product with a weight matrix in any format: out = a W^T + bias.
//
//   out[m, n] = sum over k of a[m, k] * W[n, k] + bias[n]
//
// A weight is prepared once at load (`prepare_matmul`): the layout that the chosen kernels read is made there, and
// named in `MatmulWeight::layout()`. Two precisions:
//   kExact    activations stay f32, weights are decoded to f32, products and sums in f32
//   kDefault  where the format has an integer kernel, activations are quantised to int8 by 16 along k; of two such
//   halves
//             of a block of 32 the larger amax gives the unit amax / (127 * 16), and each half the smallest whole
//             factor of it that holds its own amax (round half to even); sums of a block in int32, blocks added in f32.
//             Otherwise as kExact
//
// Shapes    out [m, n]; a [m, k]; bias [n]
// Types     out, a: f32; bias: f32
// Layout    last dimension contiguous; rows may be strided; out may not overlap a
// Numerics  every out[m, n] is the same bits whatever m is, whichever rows stand beside it and however many threads run
// Errors    kInvalidArgument: shapes, types; kUnsupported names a format without a kernel
// Workspace matmul_workspace_bytes(weight, m)
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "shoal/ops/context.h"
#include "shoal/quant/quant_matrix.h"
#include "shoal/tensor/tensor.h"

namespace shoal {

enum class MatmulPrecision : uint8_t { kDefault, kExact };

// A weight in the layout its kernels read. Owns what was repacked; otherwise refers to the raw bytes, which must
// outlive it.
//
// On CUDA (context.device) weights stand in tiles in device memory and activations are rounded to bf16, products added in
// f32; scales are applied in f32 (few rows) or rounded with the weight to bf16 (many). kExact: weights and products in
// f32. A format without a layout of its own is stored as bf16. A row's bits depend on how many rows there are.
class MatmulWeight {
 public:
  MatmulWeight();
  ~MatmulWeight();
  MatmulWeight(MatmulWeight&&) noexcept;
  MatmulWeight& operator=(MatmulWeight&&) noexcept;

  int64_t n() const;
  int64_t k() const;
  Format format() const;
  Device device() const;
  std::string_view layout() const;   // "raw", or the name of a repacked layout
  std::string_view variant() const;  // kernel family that runs, for `inspect` and `explain`
  bool owns_bytes() const;           // true: the raw bytes are no longer read
  int64_t num_bytes() const;         // resident bytes of this layout

  struct Impl;
  const Impl& impl() const { return *impl_; }

 private:
  friend MatmulWeight prepare_matmul(std::span<const QuantMatrix>, MatmulPrecision, const OpContext&);
  friend MatmulWeight plan_matmul(std::span<const QuantMatrix>, MatmulPrecision, const OpContext&);
  std::unique_ptr<Impl> impl_;
};

// Prepares one matrix, or several with the same k whose outputs stand beside each other (q, k and v; gate and up) as
// one: one quantisation of the activations and one pass serve them all. Matrices of different formats may be joined.
MatmulWeight prepare_matmul(std::span<const QuantMatrix> parts, MatmulPrecision precision, const OpContext& context);

// What prepare_matmul would make, without its bytes: tells layout, variant and num_bytes, and cannot be run. CPU only.
MatmulWeight plan_matmul(std::span<const QuantMatrix> parts, MatmulPrecision precision, const OpContext& context);

struct MatmulArgs {
  TensorView out;     // [m, n] f32
  TensorView a;       // [m, k] f32
  TensorView bias{};  // [n] f32, optional
};

size_t matmul_workspace_bytes(const MatmulWeight& weight, int64_t m);
void matmul(const MatmulArgs& args, const MatmulWeight& weight, const OpContext& context);

// Rows in groups, each with a weight of its own (the experts of a mixture): rows [row_begin[g], row_begin[g + 1]) of a
// and out belong to weights[g]. A weight is read once for all rows of its group, those of empty groups not at all; all
// groups are one pass over the threads. Every row has the bits that `matmul` gives it.
struct GroupedMatmulArgs {
  TensorView out;                      // [m, n] f32
  TensorView a;                        // [m, k] f32
  std::span<const int32_t> row_begin;  // [num_groups + 1], ascending from 0 to m
  TensorView bias{};                   // [num_groups, n] f32, optional
};

// The weights: the same n, k, formats and preparation. Workspace: matmul_workspace_bytes of one of them.
void grouped_matmul(const GroupedMatmulArgs& args, std::span<const MatmulWeight> weights, const OpContext& context);

// The same on CUDA, where only the device knows the groups: sort_rows (ops/rows) lays them out as tiles.
class GroupedWeights {
 public:
  GroupedWeights();
  // Weights of one n, k and layout, all on the context's device. kUnsupported if they were joined of several formats.
  GroupedWeights(std::vector<MatmulWeight> weights, const OpContext& context);
  ~GroupedWeights();
  GroupedWeights(GroupedWeights&&) noexcept;
  GroupedWeights& operator=(GroupedWeights&&) noexcept;

  int64_t num_groups() const;
  const MatmulWeight& weight(int64_t group) const;
  int64_t n() const;
  int64_t k() const;

  struct Impl;
  const Impl& impl() const { return *impl_; }

 private:
  std::unique_ptr<Impl> impl_;
};

struct TiledMatmulArgs {
  TensorView out;       // [m, n] f32
  TensorView a;         // [num_sources, k] f32
  TensorView source{};  // [m] i32: row of a for a row of out; absent: its own
  TensorView tiles;     // [num_tiles, 4] i32, of sort_rows
  int64_t tile_rows = 0;
  TensorView bias{};  // [num_groups, n] f32, optional
};

// Tiles for m rows spread over num_groups groups: how many rows each holds, and how many there may be.
struct TileCount {
  int64_t tile_rows = 0;
  int64_t num_tiles = 0;
};
TileCount matmul_tiles(int64_t m, int64_t num_groups);

size_t tiled_matmul_workspace_bytes(int64_t num_sources, int64_t k);
void tiled_matmul(const TiledMatmulArgs& args, const GroupedWeights& weights, const OpContext& context);

}  // namespace shoal
