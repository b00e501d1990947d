// Repacking of weights into the layouts of matmul_layout.h, once at load.
#pragma once

#include "shoal/ops/matmul/matmul_layout.h"

namespace shoal {

// Whether the integer kernels can read the matrix: its format has a layout there, and its scales are numbers of it.
bool has_integer_kernel(const QuantMatrix& raw);

// Fills `part.packed` from `part.raw` for the kernel that `part.kernel` names, and drops the reference to the raw
// bytes.
void pack_matmul_part(MatmulPart& part, int64_t k, int group, cpu::ThreadPool& pool);

}  // namespace shoal
