// The dense layer in front of MoEGroupRouter: one vector of sums along k for an expert and up to four rows.
#include "shoal/cpu/simd.h"
#include "shoal/tensor/tensor.h"

namespace shoal::SHOAL_ISA {
namespace {

template <class T, int NumRows>
SHOAL_INLINE void dots(const float* a, const T* weight, int64_t width, float* out, int64_t out_stride) {
  Floats sums[NumRows];
  for (int r = 0; r < NumRows; ++r) {
    sums[r] = zero();
  }
  for (int64_t i = 0; i < width; i += kLanes) {  // width is a multiple of 256
    const Floats w = load(weight + i);
    for (int r = 0; r < NumRows; ++r) {
      sums[r] = fma(load(a + r * width + i), w, sums[r]);
    }
  }
  for (int r = 0; r < NumRows; ++r) {
    out[r * out_stride] = sum(sums[r]);
  }
}

template <class T>
SHOAL_INLINE T element(const TensorView& weight, int64_t e, int64_t i) {
  return weight.as<const T>()[e * weight.strides[0] + i * weight.strides[1]];
}

template <class T>
void project(const float* a, const TensorView& weight, int64_t num_rows, int64_t begin, int64_t end, float* out,
             int64_t out_stride) {
  const int64_t width = weight.shape[1];
  constexpr int64_t kChunk = 256;
  for (int64_t e = begin; e < end; ++e) {
    const T* row = weight.as<const T>() + e * weight.strides[0];
    if (weight.strides[1] != 1) {  // a view: in pieces through a copy
      for (int64_t r = 0; r < num_rows; ++r) {
        Floats total = zero();
        for (int64_t i = 0; i < width; i += kChunk) {
          T piece[kChunk];
          for (int64_t j = 0; j < kChunk; ++j) {
            piece[j] = element<T>(weight, e, i + j);
          }
          for (int64_t j = 0; j < kChunk; j += kLanes) {
            total = fma(load(a + r * width + i + j), load(piece + j), total);
          }
        }
        out[r * out_stride + e] = sum(total);
      }
      continue;
    }
    int64_t r = 0;
    for (; r + 4 <= num_rows; r += 4) {
      dots<T, 4>(a + r * width, row, width, out + r * out_stride + e, out_stride);
    }
    for (; r < num_rows; ++r) {
      dots<T, 1>(a + r * width, row, width, out + r * out_stride + e, out_stride);
    }
  }
}

}  // namespace

void project_rows(const float* a, const TensorView& weight, int64_t num_rows, int64_t begin, int64_t end, float* out,
                  int64_t out_stride) {
  switch (weight.dtype) {
    case DType::kF32: project<float>(a, weight, num_rows, begin, end, out, out_stride); return;
    case DType::kF16: project<f16>(a, weight, num_rows, begin, end, out, out_stride); return;
    default: project<bf16>(a, weight, num_rows, begin, end, out, out_stride); return;
  }
}

}  // namespace shoal::SHOAL_ISA
