// Entry of rms_norm: checks, then the reference or the kernel of the instruction set over ranges of rows.
#include "shoal/ops/norm/norm.h"

#include <algorithm>
#include <cmath>

#include "shoal/cpu/thread_pool.h"
#include "shoal/ops/norm/norm_cuda.h"
#include "shoal/ops/on_cuda.h"
#include "shoal/ops/variant.h"
#include "shoal/tensor/matcher.h"

namespace shoal {

SHOAL_DECLARE_FOR_EACH_ISA(void rms_norm_rows(const RmsNormArgs& args, int64_t begin, int64_t end))
void rms_norm_ref(const RmsNormArgs& args);

namespace {

constexpr int64_t kGrainElements = 16384;  // less is not worth waking a thread for

void check(const RmsNormArgs& args) {
  const Matcher match("rms_norm");
  Dim tokens{"num_tokens"};
  Dim hidden{"hidden"};
  match.tensor("x", args.x).shape({tokens, hidden}).types(kFloats).inner_contiguous();
  match.tensor("out", args.out).shape({tokens, hidden}).type(args.x.dtype).inner_contiguous().device(args.x.device);
  TensorMatcher weight = match.tensor("weight", args.weight);
  weight.shape({hidden}).contiguous().device(args.x.device);
  if (args.x.dtype == DType::kF32) {
    weight.type(DType::kF32);
  } else {
    weight.types({DType::kF32, args.x.dtype});
  }
  require(static_cast<bool>(args.residual) == static_cast<bool>(args.residual_out),
          "rms_norm: residual and residual_out must be given together");
  if (args.residual) {
    for (const auto& [name, view] : {std::pair{"residual", &args.residual}, {"residual_out", &args.residual_out}}) {
      match.tensor(name, *view).shape({tokens, hidden}).type(args.x.dtype).inner_contiguous().device(args.x.device);
    }
  }
  require(std::isfinite(args.eps) && args.eps >= 0.0f, "rms_norm: eps is ", args.eps, ", expected a number >= 0");
}

}  // namespace

void rms_norm(const RmsNormArgs& args, const OpContext& context) {
  check(args);
  if (args.out.device.type == DeviceType::kCuda) {
    SHOAL_ON_CUDA("rms_norm", rms_norm(args, context));
    return;
  }
  if (wants_reference("rms_norm", context.variant)) {
    rms_norm_ref(args);
    return;
  }
  const auto rows = SHOAL_PICK_ISA(context.isa, rms_norm_rows);
  const int64_t grain = std::max<int64_t>(1, kGrainElements / std::max<int64_t>(1, args.x.dim(1)));
  context.pool->parallel_for(args.x.dim(0), grain, [&](int64_t begin, int64_t end, int) { rows(args, begin, end); });
}

}  // namespace shoal
