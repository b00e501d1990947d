// What the generated sources of the CUDA matmul (matmul_cuda_variant.cu.in, one a line of matmul_cuda_variants.def) give
// to its entry. Only for sources that nvcc compiles.
#pragma once

#include "shoal/ops/matmul/matmul_cuda_kernels.cuh"

namespace shoal::cuda {

using LaunchProduct = void (*)(const ProductParams& params, int64_t num_tiles, int64_t tile_rows, int offset,
                               Stream stream);

#define SHOAL_VARIANT(codes, group, has_min)                                                                     \
  extern template void launch_product<Codes::codes, group, has_min>(const ProductParams&, int64_t, int64_t, int, \
                                                                    Stream);
#include "shoal/ops/matmul/matmul_cuda_variants.def"
#undef SHOAL_VARIANT

void launch_product_f32(const ProductParams& params, int64_t num_tiles, int64_t tile_rows, int offset, Stream stream);
// out [num_rows, k rounded up to chunks]
void launch_to_bf16(__nv_bfloat16* out, const float* a, int64_t a_stride, int64_t num_rows, int64_t k, Stream stream);

}  // namespace shoal::cuda
