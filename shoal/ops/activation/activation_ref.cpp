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
  }
  return 0.0;
}

}  // namespace

void gated_activation_ref(const GatedActivationArgs& args) {
  const DType dtype = args.out.dtype;
  for (int64_t t = 0; t < args.out.dim(0); ++t) {
    for (int64_t i = 0; i < args.out.dim(1); ++i) {
      const double gate = read_element(dtype, args.gate.data, t * args.gate.stride(0) + i);
      const double value = read_element(dtype, args.value.data, t * args.value.stride(0) + i);
      const double product = gated(args.kind, gate) * value;
      write_element(dtype, args.out.data, t * args.out.stride(0) + i, static_cast<float>(product));
    }
  }
}

}  // namespace shoal
