// The functions of simd.h over arrays, for simd_test.cpp: compiled once per instruction set.
#include "shoal/cpu/simd.h"

namespace shoal::SHOAL_ISA {

void simd_exp(const float* x, float* out, int64_t count) {
  for (int64_t i = 0; i + kLanes <= count; i += kLanes) {
    store(out + i, exp(load(x + i)));
  }
}

void simd_tanh(const float* x, float* out, int64_t count) {
  for (int64_t i = 0; i + kLanes <= count; i += kLanes) {
    store(out + i, tanh(load(x + i)));
  }
}

// Converts f32 to a 16-bit type and back: `count` values through whole vectors, the rest through a partial one.
template <class T>
static void round_trip(const float* x, uint16_t* halves, float* back, int64_t count) {
  T* typed = reinterpret_cast<T*>(halves);
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    store(typed + i, load(x + i));
    store(back + i, load(typed + i));
  }
  if (i < count) {
    store_partial(typed + i, load_partial(x + i, count - i), count - i);
    store_partial(back + i, load_partial(typed + i, count - i), count - i);
  }
}
void simd_f16(const float* x, uint16_t* halves, float* back, int64_t count) { round_trip<f16>(x, halves, back, count); }
void simd_bf16(const float* x, uint16_t* halves, float* back, int64_t count) {
  round_trip<bf16>(x, halves, back, count);
}

// sum, largest, and swap_pairs of the first `n` values (the other lanes 0); returns the number of lanes.
int simd_reduce(const float* x, int64_t n, float* total, float* most, float* swapped) {
  const Floats a = n < kLanes ? load_partial(x, n) : load(x);
  *total = sum(a);
  *most = largest(a);
  store(swapped, swap_pairs(a));
  return kLanes;
}

}  // namespace shoal::SHOAL_ISA
