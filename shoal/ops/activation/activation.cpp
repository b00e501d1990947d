// Entry of gated_activation: checks, then the reference or the kernel of the instruction set over ranges of rows.
#include "shoal/ops/activation/activation.h"

#include <algorithm>
#include <cmath>

#include "shoal/cpu/thread_pool.h"
#include "shoal/ops/activation/activation_cuda.h"
#include "shoal/ops/on_cuda.h"
#include "shoal/ops/variant.h"
#include "shoal/tensor/matcher.h"

namespace shoal {

SHOAL_DECLARE_FOR_EACH_ISA(void gated_activation_rows(const GatedActivationArgs& args, int64_t begin, int64_t end))
void gated_activation_ref(const GatedActivationArgs& args);

namespace {

constexpr int64_t kGrainElements = 4096;  // less is not worth waking a thread for

void check(const GatedActivationArgs& args) {
  const Matcher match("gated_activation");
  Dim tokens{"num_tokens"};
  Dim width{"width"};
  match.tensor("gate", args.gate).shape({tokens, width}).types(kFloats).inner_contiguous();
  for (const auto& [name, view] : {std::pair{"value", &args.value}, {"out", &args.out}}) {
    match.tensor(name, *view).shape({tokens, width}).type(args.gate.dtype).inner_contiguous().device(args.gate.device);
  }
  require(args.kind <= Gate::kClamped, "gated_activation: kind is ", static_cast<int>(args.kind), ", expected a Gate");
  require(args.limit >= 0.0f && std::isfinite(args.alpha), "gated_activation: alpha is ", args.alpha, " and limit ",
          args.limit, ", expected a finite number and one that is not negative");
}

}  // namespace

void gated_activation(const GatedActivationArgs& args, const OpContext& context) {
  check(args);
  if (args.out.device.type == DeviceType::kCuda) {
    SHOAL_ON_CUDA("gated_activation", gated_activation(args, context));
    return;
  }
  if (wants_reference("gated_activation", context.variant)) {
    gated_activation_ref(args);
    return;
  }
  const auto rows = SHOAL_PICK_ISA(context.isa, gated_activation_rows);
  const int64_t grain = std::max<int64_t>(1, kGrainElements / std::max<int64_t>(1, args.out.dim(1)));
  context.pool->parallel_for(args.out.dim(0), grain, [&](int64_t begin, int64_t end, int) { rows(args, begin, end); });
}

void softcap(const TensorView& x, float cap, const OpContext& context) {
  Matcher("softcap").tensor("x", x).type(DType::kF32).contiguous();
  require(std::isfinite(cap) && cap > 0.0f, "softcap: cap is ", cap, ", expected a finite number above 0");
  if (x.device.type == DeviceType::kCuda) {
    SHOAL_ON_CUDA("softcap", softcap(x, cap, context));
    return;
  }
  float* values = x.as<float>();
  context.pool->parallel_for(x.num_elements(), kGrainElements, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) {
      values[i] = cap * std::tanh(values[i] / cap);
    }
  });
}

}  // namespace shoal
