// Reference of gated_activation: the formulas in f64.
#include <cmath>
#include <numbers>

#include "shoal/ops/activation/activation.h"
#include "shoal/ops/element.h"

namespace shoal {
namespace {

double gated(Gate kind, double g) {
  switch (kind) {
    case Gate::kSilu: return g / (1.0 + std::exp(-g));
    case Gate::kGeluTanh:
      return 0.5 * g * (1.0 + std::tanh(std::sqrt(2.0 / std::numbers::pi) * (g + 0.044715 * g * g * g)));
    case Gate::kGelu: return 0.5 * g * std::erfc(-g / std::numbers::sqrt2);  // 1 + erf(a) is erfc(-a) without loss
    case Gate::kRelu: return g < 0.0 ? 0.0 : g;                              // NaN passes
    case Gate::kSigmoid: return 1.0 / (1.0 + std::exp(-g));
    case Gate::kClamped: break;
  }
  return 0.0;
}

double clamped(const GatedActivationArgs& args, double g, double v) {
  const double limit = args.limit;
  const double gate = g > limit ? limit : g;
  const double value = v > limit ? limit : v < -limit ? -limit : v;
  return gate / (1.0 + std::exp(-static_cast<double>(args.alpha) * gate)) * (value + 1.0);
}

}  // namespace

void gated_activation_ref(const GatedActivationArgs& args) {
  const DType dtype = args.out.dtype;
  for (int64_t t = 0; t < args.out.dim(0); ++t) {
    for (int64_t i = 0; i < args.out.dim(1); ++i) {
      const double gate = read_element(dtype, args.gate.data, t * args.gate.stride(0) + i);
      const double value = read_element(dtype, args.value.data, t * args.value.stride(0) + i);
      const double product = args.kind == Gate::kClamped ? clamped(args, gate, value) : gated(args.kind, gate) * value;
      write_element(dtype, args.out.data, t * args.out.stride(0) + i, static_cast<float>(product));
    }
  }
}

}  // namespace shoal
