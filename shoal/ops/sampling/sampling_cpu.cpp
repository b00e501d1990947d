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

// exp for x <= 0 within 2 ulp; 0 below -708, where the result would be subnormal.
SHOAL_INLINE double exp_of_negative(double x) {
  constexpr double kShift = 0x1.8p52;  // adding it rounds to an integer, which then stands in the low bits
  const double clamped = x < -708.0 ? -708.0 : x;
  const double shifted = clamped * 0x1.71547652b82fep+0 + kShift;
  const double n = shifted - kShift;
  const double r = (clamped - n * 0x1.62e42fefap-1) - n * 0x1.cf79abc9e3b3ap-40;
  // Taylor's series; its next term is below 2^-60 for |r| <= ln(2) / 2.
  double p = 1.0 / 6227020800.0;
  p = p * r + 1.0 / 479001600.0;
  p = p * r + 1.0 / 39916800.0;
  p = p * r + 1.0 / 3628800.0;
  p = p * r + 1.0 / 362880.0;
  p = p * r + 1.0 / 40320.0;
  p = p * r + 1.0 / 5040.0;
  p = p * r + 1.0 / 720.0;
  p = p * r + 1.0 / 120.0;
  p = p * r + 1.0 / 24.0;
  p = p * r + 1.0 / 6.0;
  p = p * r + 0.5;
  p = p * r + 1.0;
  p = p * r + 1.0;
  const uint64_t exponent = __builtin_bit_cast(uint64_t, shifted) << 52;
  const double scaled = __builtin_bit_cast(double, __builtin_bit_cast(uint64_t, p) + exponent);
  return x < -708.0 ? 0.0 : scaled;
}

// weights[i] = exp((logits[i] - most) * inverse_temperature)
void sampling_weights(const float* logits, int64_t count, float most, double inverse_temperature, double* weights) {
  for (int64_t i = 0; i < count; ++i) {
    weights[i] = exp_of_negative((static_cast<double>(logits[i]) - static_cast<double>(most)) * inverse_temperature);
  }
}

}  // namespace shoal::SHOAL_ISA
