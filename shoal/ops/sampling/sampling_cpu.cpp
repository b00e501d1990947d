// The passes of sampling over a whole row. Every instruction set gives the same bits: maxima are exact, and the
// exponentials are plain f64 loops, which the compiler turns into vectors without fusing or reordering anything.
#include "shoal/cpu/simd.h"

namespace shoal::SHOAL_ISA {

// Maxima of blocks of 64 logits, the last one may be shorter; false if a logit is NaN or +inf.
bool sampling_block_maxima(const float* logits, int64_t count, float* maxima) {
  constexpr int64_t kBlock = 64;
  constexpr float kInfinity = __builtin_inff();
  Floats unusable = zero();
  int64_t i = 0;
  for (; i + kBlock <= count; i += kBlock) {
    Floats most = splat(-kInfinity);
    for (int64_t lane = 0; lane < kBlock; lane += kLanes) {
      const Floats x = load(logits + i + lane);
      unusable = max(unusable, if_less(x, splat(kInfinity), zero(), splat(1.0f)));  // NaN is not less, either
      most = max(most, x);
    }
    maxima[i / kBlock] = largest(most);
  }
  bool usable = largest(unusable) == 0.0f;
  if (i < count) {
    float most = -kInfinity;
    for (int64_t k = i; k < count; ++k) {
      usable = usable && logits[k] < kInfinity;
      most = logits[k] > most ? logits[k] : most;
    }
    maxima[i / kBlock] = most;
  }
  return usable;
}

constexpr double kLeast = -708.0;  // below it exp would be subnormal

// exp for kLeast <= x <= 0, within 2 ulp.
SHOAL_INLINE double exp_of_negative(double x) {
  constexpr double kShift = 0x1.8p52;  // adding it rounds to an integer, which then stands in the low bits
  const double shifted = x * 0x1.71547652b82fep+0 + kShift;
  const double n = shifted - kShift;
  const double r = (x - n * 0x1.62e42fefap-1) - n * 0x1.cf79abc9e3b3ap-40;
  // Taylor's series, whose next term is below 2^-57 for |r| <= ln(2) / 2, in Estrin's order: short chains.
  const double r2 = r * r;
  const double r4 = r2 * r2;
  const double low = ((1.0 / 24.0 + r * (1.0 / 120.0)) + r2 * (1.0 / 720.0 + r * (1.0 / 5040.0))) +
                     r4 * (1.0 / 40320.0 + r * (1.0 / 362880.0));
  const double high = (1.0 / 3628800.0 + r * (1.0 / 39916800.0)) + r2 * (1.0 / 479001600.0 + r * (1.0 / 6227020800.0));
  const double p = 1.0 + (r + (r2 * (0.5 + r * (1.0 / 6.0)) + r4 * (low + (r4 * r2) * high)));
  const uint64_t exponent = __builtin_bit_cast(uint64_t, shifted) << 52;
  return __builtin_bit_cast(double, __builtin_bit_cast(uint64_t, p) + exponent);
}

// weights[i] = exp((logits[i] - most) * inverse_temperature); 0 where the exponent is kLeast or less.
// Three loops: with the bounds in the second one, GCC 12 keeps the branches and makes no vectors (8 times slower).
void sampling_weights(const float* logits, int64_t count, float most, double inverse_temperature, double* weights) {
  for (int64_t i = 0; i < count; ++i) {
    const double x = (static_cast<double>(logits[i]) - static_cast<double>(most)) * inverse_temperature;
    weights[i] = x > kLeast ? x : kLeast;
  }
  for (int64_t i = 0; i < count; ++i) {
    weights[i] = exp_of_negative(weights[i]);
  }
  const double none = exp_of_negative(kLeast);
  for (int64_t i = 0; i < count; ++i) {
    weights[i] = weights[i] > none ? weights[i] : 0.0;
  }
}

}  // namespace shoal::SHOAL_ISA
