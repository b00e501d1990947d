// Rows of gated_activation with vectors.
//
// Both kinds of GELU are written so that nothing cancels for negative gates: 0.5 (1 + tanh u) is 1 / (1 + exp(-2u)),
// and 0.5 (1 + erf(g / sqrt 2)) comes from erfc, which keeps its relative precision in the tail.
#include "shoal/cpu/simd.h"
#include "shoal/ops/activation/activation.h"

namespace shoal::SHOAL_ISA {

SHOAL_INLINE Floats times_sigmoid(Floats g, Floats u) { return g / (splat(1.0f) + exp(zero() - u)); }

// erfc(t) for t >= 0 as w exp(p(w) - t^2) with w = 1 / (1 + t/2), after Press et al., Numerical Recipes, "erfcc"; p is
// a polynomial of our own, fitted to 6e-8.
SHOAL_INLINE Floats complementary_error(Floats t) {
  constexpr float kCoefficients[] = {-7.301738858e-01f, 1.273329973e+00f,  -8.520886898e-01f,
                                     4.914898053e-02f,  -6.776276231e-02f, 5.815488473e-02f,
                                     3.817035556e-01f,  9.992073774e-01f,  -1.265476227e+00f};
  const Floats w = splat(1.0f) / fma(t, splat(0.5f), splat(1.0f));
  Floats p = splat(1.539568454e-01f);
  for (const float coefficient : kCoefficients) {
    p = fma(p, w, splat(coefficient));
  }
  return w * exp(p - t * t);
}

template <Gate kKind>
SHOAL_INLINE Floats gated(Floats g) {
  if constexpr (kKind == Gate::kSilu) {
    return times_sigmoid(g, g);
  } else if constexpr (kKind == Gate::kGeluTanh) {
    constexpr float kTwiceRoot = 1.5957691216057308f;  // 2 sqrt(2 / pi)
    return times_sigmoid(g, splat(kTwiceRoot) * fma(splat(0.044715f) * g * g, g, g));
  } else if constexpr (kKind == Gate::kGelu) {
    const Floats tail = splat(0.5f) * complementary_error(abs(g) * splat(0.7071067811865476f));
    return g * if_less(g, zero(), tail, splat(1.0f) - tail);
  } else {
    return max(zero(), g);  // NaN passes: simd.h
  }
}

template <Gate kKind>
SHOAL_INLINE Floats product(const GatedActivationArgs& args, Floats g, Floats v) {
  if constexpr (kKind == Gate::kClamped) {
    const Floats limit = splat(args.limit);  // in this order of operands NaN passes
    const Floats gate = min(limit, g);
    const Floats value = max(zero() - limit, min(limit, v));
    return times_sigmoid(gate, splat(args.alpha) * gate) * (value + splat(1.0f));
  } else if constexpr (kKind == Gate::kSigmoid) {
    return times_sigmoid(v, g);
  } else {
    return gated<kKind>(g) * v;
  }
}

template <class T, Gate kKind>
static void rows_of(const GatedActivationArgs& args, int64_t begin, int64_t end) {
  const int64_t width = args.out.shape[1];
  for (int64_t t = begin; t < end; ++t) {
    T* out = static_cast<T*>(args.out.data) + t * args.out.strides[0];
    const T* gate = static_cast<const T*>(args.gate.data) + t * args.gate.strides[0];
    const T* value = static_cast<const T*>(args.value.data) + t * args.value.strides[0];
    int64_t i = 0;
    for (; i + kLanes <= width; i += kLanes) {
      store(out + i, product<kKind>(args, load(gate + i), load(value + i)));
    }
    if (i < width) {
      const int64_t n = width - i;
      store_partial(out + i, product<kKind>(args, load_partial(gate + i, n), load_partial(value + i, n)), n);
    }
  }
}

template <class T>
static void rows_of_type(const GatedActivationArgs& args, int64_t begin, int64_t end) {
  switch (args.kind) {
    case Gate::kSilu: rows_of<T, Gate::kSilu>(args, begin, end); break;
    case Gate::kGeluTanh: rows_of<T, Gate::kGeluTanh>(args, begin, end); break;
    case Gate::kGelu: rows_of<T, Gate::kGelu>(args, begin, end); break;
    case Gate::kRelu: rows_of<T, Gate::kRelu>(args, begin, end); break;
    case Gate::kSigmoid: rows_of<T, Gate::kSigmoid>(args, begin, end); break;
    case Gate::kClamped: rows_of<T, Gate::kClamped>(args, begin, end); break;
  }
}

void gated_activation_rows(const GatedActivationArgs& args, int64_t begin, int64_t end) {
  switch (args.out.dtype) {
    case DType::kF32: rows_of_type<float>(args, begin, end); break;
    case DType::kF16: rows_of_type<f16>(args, begin, end); break;
    default: rows_of_type<bf16>(args, begin, end); break;
  }
}

}  // namespace shoal::SHOAL_ISA
