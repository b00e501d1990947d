// Reference of rms_norm: the formula, with the sum in f64.
#include <cmath>

#include "shoal/ops/element.h"
#include "shoal/ops/norm/norm.h"

namespace shoal {

void rms_norm_ref(const RmsNormArgs& args) {
  const DType dtype = args.x.dtype;
  const int64_t hidden = args.x.dim(1);
  const auto sum_of = [&](int64_t t, int64_t h) {
    const float x = read_element(dtype, args.x.data, t * args.x.stride(0) + h);
    return args.residual ? x + read_element(dtype, args.residual.data, t * args.residual.stride(0) + h) : x;
  };
  for (int64_t t = 0; t < args.x.dim(0); ++t) {
    double sum_of_squares = 0.0;
    for (int64_t h = 0; h < hidden; ++h) {
      const double x = sum_of(t, h);
      sum_of_squares += x * x;
    }
    const double root = std::sqrt(sum_of_squares / static_cast<double>(hidden) + args.eps);
    for (int64_t h = 0; h < hidden; ++h) {
      const float x = sum_of(t, h);
      const float weight = read_element(args.weight.dtype, args.weight.data, h);
      if (args.residual) {  // before the store to out, which may be x
        write_element(dtype, args.residual_out.data, t * args.residual_out.stride(0) + h, x);
      }
      write_element(dtype, args.out.data, t * args.out.stride(0) + h, static_cast<float>(weight * (x / root)));
    }
  }
}

}  // namespace shoal
