// Rows of activations for products with weights that are decoded tile by tile (tile_product.h), and the partition of
// such a product: rows in blocks, outputs over threads. No instruction set here: entries of operators include it.
#pragma once

#include <cstdint>

#include "shoal/base/checked.h"
#include "shoal/base/text.h"
#include "shoal/cpu/thread_pool.h"
#include "shoal/tensor/workspace.h"

namespace shoal::cpu {

constexpr int64_t kProductRows = 256;  // rows that share one decoding of a tile: its cost is lost among their products
constexpr int64_t kProductOutputs = 32;  // outputs of the smallest share of a thread: four groups of 8, two of 16
constexpr int64_t kProductAlign = 32;    // rows are padded with zeros to a multiple of this many columns

// The values of up to kProductRows rows, padded, in the order in which the weights' codes are unpacked: position p of
// 32 holds column order[p] of the same 32 (null: in order).
struct ProductRows {
  float* values = nullptr;  // [count, stride]
  int64_t count = 0;
  int64_t k = 0;
  int64_t stride = 0;  // round_up(k, kProductAlign)

  ProductRows first(int64_t num_rows) const {
    ProductRows rows = *this;
    rows.count = num_rows;
    return rows;
  }
};

// Outputs of those rows.
struct ProductOut {
  void* data = nullptr;  // row 0, column 0
  DType type = DType::kF32;
  int64_t stride = 0;          // elements between rows
  int64_t n = 0;               // outputs
  const void* bias = nullptr;  // [n] of the same type, or null
  bool has_factor = false;
  float factor = 1.0f;  // of the sum, before the bias
};

// Elements from the first of `view` to the first of row `row_idx` of [..., columns]; any strides.
inline int64_t row_offset(const TensorView& view, int64_t row_idx) {
  int64_t offset = 0;
  for (int axis = view.rank - 2; axis >= 0; --axis) {
    offset += row_idx % view.dim(axis) * view.stride(axis);
    row_idx /= view.dim(axis);
  }
  return offset;
}

inline int64_t num_rows(const TensorView& view) {
  int64_t count = 1;
  for (int axis = 0; axis + 1 < view.rank; ++axis) {
    count *= view.dim(axis);
  }
  return count;
}

// The distance between rows of [..., columns] in elements, or -1 if it is not the same everywhere or the last dimension
// is not contiguous.
inline int64_t even_row_stride(const TensorView& view) {
  if (view.rank == 0 || (view.dim(view.rank - 1) > 1 && view.stride(view.rank - 1) != 1)) {
    return -1;
  }
  int64_t stride = view.dim(view.rank - 1);  // of a single row
  int64_t next = -1;                         // what the next outer dimension must have
  for (int axis = view.rank - 2; axis >= 0; --axis) {
    if (view.dim(axis) == 1) {
      continue;
    }
    if (next < 0) {
      stride = view.stride(axis);
    } else if (view.stride(axis) != next) {
      return -1;
    }
    next = view.stride(axis) * view.dim(axis);
  }
  return stride;
}

// The stride of the rows of Y [..., n], the rest as A; kInvalidArgument if it is not so shaped or its rows not even.
inline int64_t product_row_stride(std::string_view op, const TensorView& y, const TensorView& a, int64_t n) {
  bool fits = y.rank == a.rank;
  for (int axis = 0; fits && axis < a.rank; ++axis) {
    fits = y.dim(axis) == (axis + 1 < a.rank ? a.dim(axis) : n);
  }
  require(fits, op, ": Y has shape ", shape_text(y.dims()), ", expected that of A, ", shape_text(a.dims()),
          ", with N = ", n, " at its end");
  const int64_t stride = even_row_stride(y);
  require(stride >= 0 || y.num_elements() == 0, op, ": Y must have evenly spaced rows, each contiguous");
  return stride;
}

// Workspace of the rows of one block, of m rows in all, and those rows.
inline size_t product_rows_bytes(int64_t m, int64_t k) {
  const int64_t rows = m < kProductRows ? m : kProductRows;
  return Workspace::bytes_for<float>(static_cast<size_t>(rows * round_up(k, kProductAlign)));
}
inline ProductRows take_product_rows(Workspace& workspace, int64_t m, int64_t k) {
  const int64_t stride = round_up(k, kProductAlign);
  const int64_t rows = m < kProductRows ? m : kProductRows;
  return {.values = workspace.take<float>(static_cast<size_t>(rows * stride)).data(),
          .count = rows,
          .k = k,
          .stride = stride};
}

// Outputs of the rows from `first_row` on.
inline ProductOut product_out(const TensorView& y, int64_t stride, int64_t first_row, int64_t n,
                              const TensorView& bias) {
  return {.data = y.as<std::byte>() + first_row * stride * static_cast<int64_t>(size_of(y.dtype)),
          .type = y.dtype,
          .stride = stride,
          .n = n,
          .bias = bias.data};
}

// Calls prepare(first_row, begin, end) and outputs(first_row, num_rows, begin, end) for every block of rows: the first
// makes rows first_row + [begin, end) ready, the second then computes outputs [begin, end) of all rows of the block.
template <class Prepare, class Outputs>
void product_blocks(ThreadPool& pool, int64_t m, int64_t n, int64_t k, const Prepare& prepare, const Outputs& outputs) {
  constexpr int64_t kGrainElements = 32768;  // less is not worth waking a thread for
  for (int64_t first = 0; first < m; first += kProductRows) {
    const int64_t count = m - first < kProductRows ? m - first : kProductRows;
    const int64_t grain = ceil_div<int64_t>(kGrainElements, k > 0 ? k : 1);
    pool.parallel_for(count, grain, [&](int64_t begin, int64_t end, int) { prepare(first, begin, end); });
    pool.parallel_for(n, kProductOutputs, [&](int64_t begin, int64_t end, int) { outputs(first, count, begin, end); });
  }
}

}  // namespace shoal::cpu
