// The CUDA path of embedding: checked arguments, the table's codes in device memory.
#pragma once

#include "shoal/ops/embedding/embedding.h"

namespace shoal::cuda {

void embedding(const EmbeddingArgs& args, const OpContext& context);

}  // namespace shoal::cuda
