// The CUDA path of rms_norm: checked arguments.
#pragma once

#include "shoal/ops/norm/norm.h"

namespace shoal::cuda {

void rms_norm(const RmsNormArgs& args, const OpContext& context);

}  // namespace shoal::cuda
