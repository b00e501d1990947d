// Scales decoded values and stores them in the output's type.
#include "shoal/cpu/simd.h"
#include "shoal/tensor/dtype.h"

namespace shoal::SHOAL_ISA {

template <class T>
static void store_scaled(const float* values, int64_t count, float scale, T* out) {
  const Floats factor = splat(scale);
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    store(out + i, factor * load(values + i));
  }
  if (i < count) {
    store_partial(out + i, factor * load_partial(values + i, count - i), count - i);
  }
}

void embedding_store(const float* values, int64_t count, float scale, DType dtype, void* out) {
  switch (dtype) {
    case DType::kF32: store_scaled(values, count, scale, static_cast<float*>(out)); break;
    case DType::kF16: store_scaled(values, count, scale, static_cast<f16*>(out)); break;
    default: store_scaled(values, count, scale, static_cast<bf16*>(out)); break;
  }
}

}  // namespace shoal::SHOAL_ISA
