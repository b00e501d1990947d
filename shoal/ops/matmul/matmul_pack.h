// Repacking of weights into the layouts of matmul_layout.h, once at load.
#pragma once

#include "shoal/ops/matmul/matmul_layout.h"

namespace shoal {

// Whether the integer kernels can read the matrix: its format has a layout there, and its scales are numbers of it.
bool has_integer_kernel(const QuantMatrix& raw);

// The 32 codes of sub-block `sub` of a stored block, one a byte.
void unpack_codes(Format format, const std::byte* block, int sub, uint8_t* codes);

// Scale of sub-block i of 16 of a q3_k block: a signed number.
uint32_t q3_k_scale(const std::byte* block, int i);

// Bytes of a group of outputs in the layout that `part.kernel` reads.
size_t packed_group_bytes(const MatmulPart& part, int64_t k, int group);

// Fills `part.packed`, groups of `part.group_bytes`, from `part.raw` for the kernel that `part.kernel` names.
void pack_matmul_part(MatmulPart& part, int64_t k, int group, cpu::ThreadPool& pool);

}  // namespace shoal
