// The CUDA path of paged_attention. No CUDA headers.
#pragma once

#include "shoal/ops/paged_problem.h"

namespace shoal::cuda {

// Scratch bytes in device memory. Depends on shapes and types alone.
size_t paged_attention_workspace_bytes(const paged::Problem& problem);

// kUnsupported names what has no kernel here.
void paged_attention(const paged::Problem& problem, const OpContext& context);

}  // namespace shoal::cuda
