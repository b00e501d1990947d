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

#include "shoal/ops/context.h"
#include "shoal/quant/quant_matrix.h"
#include "shoal/tensor/tensor.h"

namespace shoal {

enum class MatmulPrecision : uint8_t { kDefault, kExact };

// A weight in the layout its kernels read. Owns what was repacked; otherwise refers to the raw bytes, which must
// outlive it.
class MatmulWeight {
 public:
  MatmulWeight();
  ~MatmulWeight();
  MatmulWeight(MatmulWeight&&) noexcept;
  MatmulWeight& operator=(MatmulWeight&&) noexcept;

  int64_t n() const;
  int64_t k() const;
  Format format() const;
  std::string_view layout() const;   // "raw", or the name of a repacked layout
  std::string_view variant() const;  // kernel family that runs, for `inspect` and `explain`
  bool owns_bytes() const;           // true: the raw bytes are no longer read
  int64_t num_bytes() const;         // resident bytes of this layout

  struct Impl;
  const Impl& impl() const { return *impl_; }

 private:
  friend MatmulWeight prepare_matmul(std::span<const QuantMatrix>, MatmulPrecision, const OpContext&);
  std::unique_ptr<Impl> impl_;
};

// Prepares one matrix, or several with the same k whose outputs stand beside each other (q, k and v; gate and up) as
// one: one quantisation of the activations and one pass serve them all. Matrices of different formats may be joined.
MatmulWeight prepare_matmul(std::span<const QuantMatrix> parts, MatmulPrecision precision, const OpContext& context);

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

}  // namespace shoal
