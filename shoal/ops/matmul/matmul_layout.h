// Insides of the matmul operator: what a prepared weight holds and what its kernels read.
//
// Every layout puts `group` outputs side by side (8, or 16 for AVX-512), one output a vector lane, and every kernel
// walks k upwards with one fused multiply-add a term and lane. So the order of a sum does not depend on the tile it is
// computed in.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "shoal/ops/matmul/matmul.h"
#include "shoal/quant/quant_matrix.h"
#include "shoal/tensor/tensor.h"

namespace shoal {

enum class MatmulKernel : uint8_t {
  kReference,  // f64 sums over decoded rows
  kDecode,     // raw rows, decoded to f32 a tile at a time
  kPlain,      // f32, f16 or bf16, repacked [n / group, k, group]
};

struct MatmulPart {
  QuantMatrix raw;  // codes are null once the part is repacked
  MatmulKernel kernel = MatmulKernel::kDecode;
  int64_t n = 0;
  int64_t out_begin = 0;    // first column of `out`
  int64_t group_begin = 0;  // first group of this part among those of all parts
  int64_t num_groups = 0;   // ceil(n / group); missing rows of the last one are zeros
  size_t group_bytes = 0;   // of `packed`; 0 if not repacked
  AlignedBuffer packed;
};

struct MatmulWeight::Impl {
  std::vector<MatmulPart> parts;
  int64_t n = 0;
  int64_t k = 0;
  int64_t num_groups = 0;
  MatmulPrecision precision = MatmulPrecision::kDefault;
  cpu::Isa isa = cpu::Isa::kScalar;  // of the context at preparation: the layout depends on it
  int group = 8;
  int num_slots = 1;  // threads of the pool at preparation; each slot has its own scratch and range of outputs
  std::string layout;
  std::string variant;
};

// One call's rows. Strides count elements.
struct MatmulRows {
  const float* a = nullptr;  // [m, k]
  int64_t a_stride = 0;
  float* out = nullptr;  // [m, n]
  int64_t out_stride = 0;
  const float* bias = nullptr;  // [n] or null
  int64_t m = 0;
  int64_t k = 0;
};

constexpr int64_t kDecodeChunk = 1024;  // values of k decoded at a time: a tile of 2 x 8 rows is 64 KiB, within L2
constexpr int kDecodeGroups = 2;        // groups decoded together
static_assert(kDecodeChunk % 256 == 0, "a chunk is a whole number of blocks of every format");

constexpr int matmul_group(cpu::Isa isa) { return isa == cpu::Isa::kAvx512 ? 16 : 8; }

// f32 values of scratch that one slot needs for decoded tiles.
constexpr int64_t decode_scratch_size(int group) { return kDecodeChunk * (kDecodeGroups * group + 1); }

void matmul_reference(const MatmulWeight::Impl& weight, const MatmulRows& rows);

// Outputs of groups [begin, end) of one part, all rows. `scratch`: decode_scratch_size values for kDecode.
SHOAL_DECLARE_FOR_EACH_ISA(void matmul_f32_groups(const MatmulPart& part, const MatmulRows& rows, int64_t begin,
                                                  int64_t end, float* scratch))

}  // namespace shoal
