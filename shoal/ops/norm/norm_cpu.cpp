// Rows of rms_norm with vectors: one pass for the sum of squares, one for the outputs.
//
// The second pass adds the residual again instead of keeping the sums: out may be x and residual_out may be residual,
// so nothing may be stored before the first pass is over, and a row stays in the first-level cache.
#include "shoal/cpu/simd.h"
#include "shoal/ops/norm/norm.h"

namespace shoal::SHOAL_ISA {

template <class T>
struct Row {
  const T* x;
  const T* residual;  // null if there is none
  T* out;
  T* residual_out;
};

template <class T>
SHOAL_INLINE Floats sum_at(const Row<T>& row, int64_t i) {
  const Floats x = load(row.x + i);
  return row.residual != nullptr ? x + load(row.residual + i) : x;
}
template <class T>
SHOAL_INLINE Floats partial_sum_at(const Row<T>& row, int64_t i, int64_t n) {
  const Floats x = load_partial(row.x + i, n);
  return row.residual != nullptr ? x + load_partial(row.residual + i, n) : x;
}

template <class T>
static float sum_of_squares(const Row<T>& row, int64_t hidden) {
  constexpr int kChains = 4;  // independent sums, to hide the latency of the addition
  Floats sums[kChains] = {zero(), zero(), zero(), zero()};
  int64_t i = 0;
  for (; i + kChains * kLanes <= hidden; i += kChains * kLanes) {
    for (int chain = 0; chain < kChains; ++chain) {
      const Floats x = sum_at(row, i + chain * kLanes);
      sums[chain] = fma(x, x, sums[chain]);
    }
  }
  for (; i + kLanes <= hidden; i += kLanes) {
    const Floats x = sum_at(row, i);
    sums[0] = fma(x, x, sums[0]);
  }
  if (i < hidden) {
    const Floats x = partial_sum_at(row, i, hidden - i);
    sums[1] = fma(x, x, sums[1]);
  }
  return sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

template <class T, class Weight>
static void rows_of(const RmsNormArgs& args, int64_t begin, int64_t end) {
  const int64_t hidden = args.x.shape[1];
  const Weight* weight = static_cast<const Weight*>(args.weight.data);
  for (int64_t t = begin; t < end; ++t) {
    Row<T> row = {static_cast<const T*>(args.x.data) + t * args.x.strides[0], nullptr,
                  static_cast<T*>(args.out.data) + t * args.out.strides[0], nullptr};
    if (args.residual.data != nullptr) {
      row.residual = static_cast<const T*>(args.residual.data) + t * args.residual.strides[0];
      row.residual_out = static_cast<T*>(args.residual_out.data) + t * args.residual_out.strides[0];
    }
    const float mean = sum_of_squares(row, hidden) / static_cast<float>(hidden);
    const Floats inverse = splat(1.0f / __builtin_sqrtf(mean + args.eps));
    int64_t i = 0;
    for (; i + kLanes <= hidden; i += kLanes) {
      const Floats x = sum_at(row, i);
      if (row.residual != nullptr) {
        store(row.residual_out + i, x);
      }
      store(row.out + i, x * inverse * load(weight + i));
    }
    if (i < hidden) {
      const int64_t n = hidden - i;
      const Floats x = partial_sum_at(row, i, n);
      if (row.residual != nullptr) {
        store_partial(row.residual_out + i, x, n);
      }
      store_partial(row.out + i, x * inverse * load_partial(weight + i, n), n);
    }
  }
}

template <class T>
static void rows_with_weight(const RmsNormArgs& args, int64_t begin, int64_t end) {
  if (args.weight.dtype == DType::kF32) {
    rows_of<T, float>(args, begin, end);
  } else {
    rows_of<T, T>(args, begin, end);
  }
}

void rms_norm_rows(const RmsNormArgs& args, int64_t begin, int64_t end) {
  switch (args.x.dtype) {
    case DType::kF32: rows_of<float, float>(args, begin, end); break;
    case DType::kF16: rows_with_weight<f16>(args, begin, end); break;
    default: rows_with_weight<bf16>(args, begin, end); break;
  }
}

}  // namespace shoal::SHOAL_ISA
