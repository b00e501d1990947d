// Exact products on the device: f32 weights, products and sums in f32. For routers and for exact models; a warp adds an
// output's products in one order, whatever stands beside it.
#include "shoal/cuda/launch.cuh"
#include "shoal/ops/matmul/matmul_cuda_variants.cuh"

namespace shoal::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kRows = 8;  // rows that one pass over a weight's row serves

// A warp an output; lane l adds columns 4l, 4l + 128, ...
__global__ void __launch_bounds__(kWarps* kWarp) matmul_f32_kernel(ProductParams p) {
  begin_kernel();
  const int lane = threadIdx.x % kWarp;
  const int column = static_cast<int>(blockIdx.x) * kWarps + threadIdx.x / kWarp;
  const RowTile tile = row_tile(p, blockIdx.y, kLargeRows);
  if (column >= p.n || tile.count <= 0) {
    return;
  }
  const float* w = reinterpret_cast<const float*>(operand_of(p, tile.group).codes) + static_cast<int64_t>(column) * p.k;
  const float bias = p.bias != nullptr ? p.bias[tile.group * p.bias_stride + column] : 0.0f;
  for (int first = 0; first < tile.count; first += kRows) {
    float sums[kRows] = {};
#pragma unroll 4
    for (int i = 4 * lane; i < p.k; i += 4 * kWarp) {
      const float4 x = *reinterpret_cast<const float4*>(w + i);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        if (first + r < tile.count) {
          const int at = tile.begin + first + r;
          const float* row = p.a + (p.source != nullptr ? p.source[at] : at) * p.a_stride;
          const float4 y = *reinterpret_cast<const float4*>(row + i);
          sums[r] += x.x * y.x + x.y * y.y + x.z * y.z + x.w * y.w;
        }
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float sum = warp_sum(sums[r]);
      if (lane == 0 && first + r < tile.count) {
        p.out[(tile.begin + first + r) * p.out_stride + column] = sum + bias;
      }
    }
  }
}

constexpr int kFewRows = 8;

// The same for few rows: a block an output, so that a row's products are on their way together.
__global__ void __launch_bounds__(kWarps* kWarp) matmul_f32_few_kernel(ProductParams p) {
  begin_kernel();
  __shared__ float scratch[kWarp];
  const int column = blockIdx.x;
  const RowTile tile = row_tile(p, blockIdx.y, kLargeRows);
  if (tile.count <= 0) {
    return;
  }
  const float* w = reinterpret_cast<const float*>(operand_of(p, tile.group).codes) + static_cast<int64_t>(column) * p.k;
  float sums[kFewRows] = {};
  for (int i = 4 * static_cast<int>(threadIdx.x); i < p.k; i += 4 * kWarps * kWarp) {
    const float4 x = *reinterpret_cast<const float4*>(w + i);
#pragma unroll
    for (int r = 0; r < kFewRows; ++r) {
      if (r < tile.count) {
        const int at = tile.begin + r;
        const float4 y =
            *reinterpret_cast<const float4*>(p.a + (p.source != nullptr ? p.source[at] : at) * p.a_stride + i);
        sums[r] += x.x * y.x + x.y * y.y + x.z * y.z + x.w * y.w;
      }
    }
  }
  const float bias = p.bias != nullptr ? p.bias[tile.group * p.bias_stride + column] : 0.0f;
#pragma unroll
  for (int r = 0; r < kFewRows; ++r) {
    if (r < tile.count) {  // the same for all threads
      const float sum = block_sum(sums[r], scratch);
      if (threadIdx.x == 0) {
        p.out[(tile.begin + r) * p.out_stride + column] = sum + bias;
      }
    }
  }
}

// Activations as the tensor cores take them: bf16, rows padded with zeros to whole chunks.
__global__ void to_bf16_kernel(__nv_bfloat16* out, const float* a, int64_t a_stride, int k, int padded) {
  begin_kernel();
  const int64_t row = blockIdx.y;
  const int i = 4 * (static_cast<int>(blockIdx.x) * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x));
  if (i >= padded) {
    return;
  }
  float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  if (i < k) {
    v = *reinterpret_cast<const float4*>(a + row * a_stride + i);
  }
  *reinterpret_cast<uint2*>(out + row * padded + i) =
      make_uint2(pack(v.x, v.y, __nv_bfloat16{}), pack(v.z, v.w, __nv_bfloat16{}));
}

}  // namespace

void launch_product_f32(const ProductParams& p, int64_t num_tiles, int64_t, int, Stream stream) {
  if (p.m <= kFewRows) {
    launch(matmul_f32_few_kernel, dim3(static_cast<unsigned>(p.n), static_cast<unsigned>(num_tiles)),
           dim3(kWarps * kWarp), 0, stream, p);
    return;
  }
  launch(matmul_f32_kernel, dim3(blocks_for(p.n, kWarps), static_cast<unsigned>(num_tiles)), dim3(kWarps * kWarp), 0,
         stream, p);
}

void launch_to_bf16(__nv_bfloat16* out, const float* a, int64_t a_stride, int64_t num_rows, int64_t k, Stream stream) {
  constexpr int kThreads = 128;
  constexpr int64_t kMaxGridRows = 65535;
  const auto padded = static_cast<int>((k + kChunk - 1) / kChunk * kChunk);
  for (int64_t row = 0; row < num_rows; row += kMaxGridRows) {
    const auto count = static_cast<unsigned>(std::min(kMaxGridRows, num_rows - row));
    launch(to_bf16_kernel, dim3(blocks_for(padded, 4 * kThreads), count), dim3(kThreads), 0, stream, out + row * padded,
           a + row * a_stride, a_stride, static_cast<int>(k), padded);
  }
}

}  // namespace shoal::cuda
