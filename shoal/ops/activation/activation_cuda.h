// The CUDA path of gated_activation and softcap: checked arguments.
#pragma once

#include "shoal/ops/activation/activation.h"

namespace shoal::cuda {

void gated_activation(const GatedActivationArgs& args, const OpContext& context);
void softcap(const TensorView& x, float cap, const OpContext& context);

}  // namespace shoal::cuda
