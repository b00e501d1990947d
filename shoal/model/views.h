// Matrices of f32 in the step's workspace, as the layers use them.
#pragma once

#include <initializer_list>

#include "shoal/tensor/tensor.h"
#include "shoal/tensor/workspace.h"

namespace shoal {

// Scratch memory of that shape, until the enclosing Scope ends.
inline TensorView take(std::initializer_list<int64_t> shape, Workspace& workspace, DType dtype = DType::kF32) {
  const TensorView sizes(nullptr, dtype, shape);
  return TensorView(workspace.take<float>(static_cast<size_t>(sizes.num_elements())).data(), dtype, shape,
                    workspace.device());
}

// Columns [begin, begin + width) of a matrix.
inline TensorView columns(const TensorView& matrix, int64_t begin, int64_t width) {
  TensorView view = matrix;
  view.data = matrix.as<float>() + begin;
  view.shape[1] = width;
  return view;
}

}  // namespace shoal
