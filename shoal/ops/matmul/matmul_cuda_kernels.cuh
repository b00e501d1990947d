// The two CUDA kernels of the matmul, for one tile layout each.
//
//   small   up to 16 rows: a warp multiplies 16 outputs with all rows, a block's eight warps share k; codes go into the
//           tensor core as they are and sums of a group are scaled in f32. Bound by reading the weights.
//   large   128 outputs by 128 rows (or 32) a block, a warp 32 by all rows; weights are scaled to bf16 in registers, the
//           activations stand in shared memory as bf16. Bound by the tensor cores.
//
// Both walk k upwards in one order that depends on nothing but the shapes, so the same call gives the same bits.
#pragma once

#include "shoal/cuda/launch.cuh"
#include "shoal/ops/matmul/matmul_cuda.h"
#include "shoal/ops/matmul/matmul_tile.cuh"

namespace shoal::cuda {

struct ProductParams {
  Operand weight;
  const Operand* weights;  // of groups; null: `weight`
  const int32_t* source;
  const int4* tiles;
  const float* a;
  const __nv_bfloat16* a16;  // large: [num_sources, num_chunks * 128]
  int64_t a_stride;
  float* out;
  int64_t out_stride;
  const float* bias;
  int64_t bias_stride;
  int m, n, k, num_chunks;
};

// Rows [begin, begin + count) of a group.
struct RowTile {
  int group, begin, count;
};

__device__ inline RowTile row_tile(const ProductParams& p, int tile_idx, int tile_rows) {
  if (p.tiles != nullptr) {
    const int4 tile = p.tiles[tile_idx];
    return {tile.x, tile.y, tile.z};
  }
  const int begin = tile_idx * tile_rows;
  return {0, begin, min(tile_rows, p.m - begin)};
}

__device__ inline Operand operand_of(const ProductParams& p, int group) {
  return p.weights != nullptr ? p.weights[group] : p.weight;
}

constexpr int kSmallWarps = 8;

// Partial sums of one group of columns times its scales, added to a row's sums.
template <class Scales, bool kHasMin>
__device__ inline void add_scaled(float (&acc)[4], const float (&part)[4], const float (&sums)[4],
                                  const Scales (&scales)[2], int idx, float excess, float offset) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float scale = scales[half].scale(idx);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int i = 2 * half + j;
      if constexpr (kHasMin) {
        acc[i] += scale * (part[i] - excess * sums[i]) + scales[half].min(idx) * sums[i];
      } else {
        acc[i] += scale * (part[i] - (excess + offset) * sums[i]);
      }
    }
  }
}

template <Codes kCodes, int kGroup, bool kHasMin, int kTiles>
__global__ void __launch_bounds__(kSmallWarps* kWarp) matmul_small_kernel(ProductParams p, float offset) {
  announce();
  if (p.tiles != nullptr) {
    wait_for_inputs();  // otherwise the weights go ahead
  }
  using Regs = TileRegs<kCodes>;
  constexpr bool kScaled = kCodes != Codes::kBF16;
  constexpr TileLayout kLayout{kCodes, kGroup, kHasMin, 0};
  constexpr bool kNeedsSums = kHasMin || kCodes != Codes::kE2M1;  // of the activations: to take 128 + offset out
  const int lane = threadIdx.x % kWarp;
  const int warp = threadIdx.x / kWarp;
  const RowTile tile = row_tile(p, blockIdx.y, 8 * kTiles);
  if (tile.count <= 0) {
    return;
  }
  const Operand weight = operand_of(p, tile.group);
  const int64_t first_tile = static_cast<int64_t>(blockIdx.x) * p.num_chunks;
  const std::byte* codes = weight.codes + first_tile * kLayout.tile_bytes();
  const std::byte* scale_tiles = weight.scales + first_tile * kLayout.scale_tile_bytes();

  // Chunks on their way: as many as registers hold, since a warp has few and each comes from far.
  constexpr int kDepth = kLayout.bits() <= 4 ? 4 : kLayout.bits() <= 8 ? 2 : 1;
  Regs regs[kDepth][2];
  ScaleRegs<kGroup, kHasMin> scales[kDepth][2];
  const auto load = [&](int chunk, int slot) {
    const std::byte* code_tile = codes + static_cast<int64_t>(chunk) * kLayout.tile_bytes();
    regs[slot][0].load(code_tile, 0, lane);
    regs[slot][1].load(code_tile, 1, lane);
    if constexpr (kScaled) {
      const std::byte* scale_tile = scale_tiles + static_cast<int64_t>(chunk) * kLayout.scale_tile_bytes();
      scales[slot][0].load(scale_tile, lane / 4);
      scales[slot][1].load(scale_tile, lane / 4 + 8);
    }
  };
#pragma unroll
  for (int slot = 0; slot < kDepth; ++slot) {
    if (warp + slot * kSmallWarps < p.num_chunks) {
      load(warp + slot * kSmallWarps, slot);
    }
  }
  if (p.tiles == nullptr) {
    wait_for_inputs();
  }

  const float* a[kTiles];  // the row of each tile that this lane loads; null: none
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
    const int row = 8 * t + lane / 4;
    const int at = tile.begin + row;
    a[t] = row < tile.count ? p.a + (p.source != nullptr ? p.source[at] : at) * p.a_stride : nullptr;
  }

  float acc[kTiles][4] = {};
  constexpr uint32_t kOne = 0x3f803f80u;
  constexpr uint32_t kOnes[4] = {kOne, kOne, kOne, kOne};
  for (int first = warp; first < p.num_chunks; first += kDepth * kSmallWarps) {
#pragma unroll
    for (int slot = 0; slot < kDepth; ++slot) {
      const int chunk = first + slot * kSmallWarps;
      if (chunk >= p.num_chunks) {
        break;
      }
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
#pragma unroll
        for (int group = 0; group < kGroupsOfChunk; ++group) {
          float part[4] = {};
          float sums[4] = {};
#pragma unroll
          for (int step = 0; step < 2; ++step) {
            const int column = chunk * kChunk + group * 32 + step * 16 + lane % 4 * 4;
            float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (a[t] != nullptr && column < p.k) {
              v = *reinterpret_cast<const float4*>(a[t] + column);
            }
            const uint32_t b0 = pack(v.x, v.y, __nv_bfloat16{});
            const uint32_t b1 = pack(v.z, v.w, __nv_bfloat16{});
            const uint32_t w[4] = {regs[slot][0].pair(group, 2 * step), regs[slot][1].pair(group, 2 * step),
                                   regs[slot][0].pair(group, 2 * step + 1), regs[slot][1].pair(group, 2 * step + 1)};
            if constexpr (!kScaled) {
              mma(acc[t], w, b0, b1, __nv_bfloat16{});
            } else {
              mma(part, w, b0, b1, __nv_bfloat16{});
              if constexpr (kCodes == Codes::kU8) {
                const uint32_t high[4] = {
                    regs[slot][0].high_pair(group, 2 * step), regs[slot][1].high_pair(group, 2 * step),
                    regs[slot][0].high_pair(group, 2 * step + 1), regs[slot][1].high_pair(group, 2 * step + 1)};
                mma(part, high, b0, b1, __nv_bfloat16{});
              }
              if constexpr (kNeedsSums) {
                mma(sums, kOnes, b0, b1, __nv_bfloat16{});
              }
              if constexpr (kGroup == 16) {
                add_scaled<ScaleRegs<kGroup, kHasMin>, kHasMin>(acc[t], part, sums, scales[slot], 2 * group + step,
                                                                Regs::kExcess, offset);
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                  part[i] = 0.0f;
                  sums[i] = 0.0f;
                }
              }
            }
          }
          if constexpr (kScaled && kGroup == 32) {
            add_scaled<ScaleRegs<kGroup, kHasMin>, kHasMin>(acc[t], part, sums, scales[slot], group, Regs::kExcess,
                                                            offset);
          }
        }
      }
      if (chunk + kDepth * kSmallWarps < p.num_chunks) {
        load(chunk + kDepth * kSmallWarps, slot);
      }
    }
  }

  // The warps' shares, added in their order.
  __shared__ float shares[kSmallWarps][kTiles * 8][kTileRows + 1];
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      shares[warp][8 * t + lane % 4 * 2 + i % 2][lane / 4 + i / 2 * 8] = acc[t][i];
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < kTiles * 8 * kTileRows; i += blockDim.x) {
    const int row = i / kTileRows;
    const int column = static_cast<int>(blockIdx.x) * kTileRows + i % kTileRows;
    if (row >= tile.count || column >= p.n) {
      continue;
    }
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < kSmallWarps; ++w) {
      sum += shares[w][row][i % kTileRows];
    }
    sum *= weight.factor;
    if (p.bias != nullptr) {
      sum += p.bias[tile.group * p.bias_stride + column];
    }
    p.out[(tile.begin + row) * p.out_stride + column] = sum;
  }
}

constexpr int kLargeRows = 128;     // rows of a and of out, a block
constexpr int kMiddleRows = 32;     // where a group has no more
constexpr int kLargeOutputs = 128;  // 4 warps of 32
constexpr int kLargeWarps = 4;

// Where 16 bytes (piece 0-15) of a row of a stage stand: rows of 256 bytes, whose 32-byte units are permuted by the row
// so that eight rows' units of one k do not share banks.
// Unsigned, so that the remainder is a mask.
__device__ inline uint32_t stage_offset(unsigned row, unsigned piece) {
  return row * 256 + ((piece / 2) ^ (row % 8)) * 32 + piece % 2 * 16;
}

// Pairs of codes as weights of bf16: exactly minus the excess, which leaves codes about zero, then one rounding. A minimum
// is moved to that zero first, lest two large roundings be added.
template <Codes kCodes, bool kHasMin>
struct Scaler {
  __nv_bfloat162 scale, min;
  __device__ void set(float s, float m) {
    scale = __float2bfloat162_rn(s);
    min = __float2bfloat162_rn(m);
  }
  __device__ uint32_t operator()(uint32_t pair, __nv_bfloat162 excess) const {
    __nv_bfloat162 v = *reinterpret_cast<__nv_bfloat162*>(&pair);
    if constexpr (kCodes != Codes::kE2M1) {
      v = __hsub2(v, excess);
    }
    v = kHasMin ? __hfma2(v, scale, min) : __hmul2(v, scale);
    return *reinterpret_cast<uint32_t*>(&v);
  }
};

template <Codes kCodes, int kGroup, bool kHasMin, int kRows>
__global__ void __launch_bounds__(kLargeWarps* kWarp, 2) matmul_large_kernel(ProductParams p, float offset) {
  begin_kernel();
  constexpr int kTiles = kRows / 8;
  constexpr size_t kStageBytes = kRows * kChunk * 2;
  constexpr int kPieces = 16 * kRows / (kLargeWarps * kWarp);  // of a thread, of a stage
  using Regs = TileRegs<kCodes>;
  constexpr bool kScaled = kCodes != Codes::kBF16;
  constexpr TileLayout kLayout{kCodes, kGroup, kHasMin, 0};
  extern __shared__ __align__(128) std::byte stages[];
  const int lane = threadIdx.x % kWarp;
  const int warp = threadIdx.x / kWarp;
  const RowTile tile = row_tile(p, blockIdx.y, kRows);
  if (tile.count <= 0) {
    return;
  }
  const Operand weight = operand_of(p, tile.group);
  const int num_row_blocks = (p.n + kTileRows - 1) / kTileRows;
  const int row_block = static_cast<int>(blockIdx.x) * (kLargeOutputs / kTileRows) + 2 * warp;

  // Neighbours copy neighbouring pieces of a row, so that a warp's copies are whole lines.
  __shared__ int sources[kRows];  // rows of a; -1: none
  for (int row = threadIdx.x; row < kRows; row += kLargeWarps * kWarp) {
    const int at = tile.begin + row;
    sources[row] = row >= tile.count ? -1 : p.source != nullptr ? p.source[at] : at;
  }
  __syncthreads();
  const int piece = threadIdx.x % 16;
  const int64_t row_size = static_cast<int64_t>(p.num_chunks) * kChunk;
  const uint32_t shared = shared_address(stages);
  const auto fetch = [&](int chunk) {
    if (chunk < p.num_chunks) {
      const uint32_t stage = shared + chunk % 2 * kStageBytes;
      const __nv_bfloat16* from = p.a16 + chunk * kChunk + piece * 8;
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        const int row = threadIdx.x / 16 + i * (kLargeWarps * kWarp / 16);
        const int source = sources[row];
        copy_async(stage + stage_offset(row, piece), from + max(source, 0) * row_size, source >= 0);
      }
    }
    copy_commit();
  };

  float acc[2][kTiles][4] = {};
  fetch(0);
  constexpr float kMiddle = static_cast<float>(1 << (kLayout.bits() - 1)) * (kScaled ? 1.0f : 0.0f);
  const __nv_bfloat162 excess = __float2bfloat162_rn(128.0f + (kHasMin                ? kMiddle
                                                               : kCodes == Codes::kU8 ? 0.0f
                                                                                      : offset));
  for (int chunk = 0; chunk < p.num_chunks; ++chunk) {
    fetch(chunk + 1);
    Regs regs[2][2];
    ScaleRegs<kGroup, kHasMin> scales[2][2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int64_t tile_idx = static_cast<int64_t>(min(row_block + i, num_row_blocks - 1)) * p.num_chunks + chunk;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        regs[i][half].load(weight.codes + tile_idx * kLayout.tile_bytes(), half, lane);
        if constexpr (kScaled) {
          scales[i][half].load(weight.scales + tile_idx * kLayout.scale_tile_bytes(), lane / 4 + 8 * half);
        }
      }
    }
    copy_wait<1>();
    __syncthreads();
    const std::byte* stage = stages + chunk % 2 * kStageBytes;
#pragma unroll
    for (int group = 0; group < kGroupsOfChunk; ++group) {
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        uint32_t w[2][4];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int j = 0; j < 2; ++j) {
              uint32_t pair = regs[i][half].pair(group, 2 * step + j);
              if constexpr (kScaled) {
                const int idx = kGroup == 16 ? 2 * group + step : group;
                Scaler<kCodes, kHasMin> scaler;
                const float scale = scales[i][half].scale(idx);
                scaler.set(scale, kHasMin ? fmaf(kMiddle, scale, scales[i][half].min(idx)) : 0.0f);
                if constexpr (kCodes == Codes::kU8) {
                  // code - offset = (low - 128) + (16 high + 2048 - 2048 - offset): both exact, and so is their sum.
                  const uint32_t high = regs[i][half].high_pair(group, 2 * step + j);
                  const __nv_bfloat162 low = __hsub2(*reinterpret_cast<__nv_bfloat162*>(&pair), excess);
                  const __nv_bfloat162 rest =
                      __hsub2(*reinterpret_cast<const __nv_bfloat162*>(&high), __float2bfloat162_rn(2048.0f + offset));
                  const __nv_bfloat162 v = __hmul2(__hadd2(low, rest), scaler.scale);
                  pair = *reinterpret_cast<const uint32_t*>(&v);
                } else {
                  pair = scaler(pair, excess);
                }
              }
              w[i][2 * j + half] = pair;
            }
          }
        }
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
          const int row = 8 * t + lane / 4;
          const int unit = 2 * group + step;
          const uint2 b = *reinterpret_cast<const uint2*>(stage + stage_offset(row, 2 * unit) + lane % 4 * 8);
          mma(acc[0][t], w[0], b.x, b.y, __nv_bfloat16{});
          mma(acc[1][t], w[1], b.x, b.y, __nv_bfloat16{});
        }
      }
    }
    __syncthreads();
  }

#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int row = 8 * t + lane % 4 * 2 + j % 2;
        const int column = (row_block + i) * kTileRows + lane / 4 + j / 2 * 8;
        if (row < tile.count && column < p.n) {
          float sum = acc[i][t][j] * weight.factor;
          if (p.bias != nullptr) {
            sum += p.bias[tile.group * p.bias_stride + column];
          }
          p.out[(tile.begin + row) * p.out_stride + column] = sum;
        }
      }
    }
  }
}

// Launches for one layout, of which matmul_cuda.cu keeps a table.
template <Codes kCodes, int kGroup, bool kHasMin>
void launch_product(const ProductParams& p, int64_t num_tiles, int64_t tile_rows, int offset, Stream stream) {
  const auto outputs = static_cast<int64_t>(p.n);
  const auto tiles = static_cast<unsigned>(num_tiles);
  const float zero = static_cast<float>(offset);
  const dim3 large_grid(blocks_for(outputs, kLargeOutputs), tiles);
  const dim3 large_block(kLargeWarps * kWarp);
  const dim3 grid(blocks_for(outputs, kTileRows), tiles);
  const dim3 block(kSmallWarps * kWarp);
  const auto shared = static_cast<size_t>(2 * tile_rows * kChunk * 2);  // two stages of the large kernel
  switch (tile_rows) {
    case 8: launch(matmul_small_kernel<kCodes, kGroup, kHasMin, 1>, grid, block, 0, stream, p, zero); return;
    case 16: launch(matmul_small_kernel<kCodes, kGroup, kHasMin, 2>, grid, block, 0, stream, p, zero); return;
    case kMiddleRows:
      launch(matmul_large_kernel<kCodes, kGroup, kHasMin, kMiddleRows>, large_grid, large_block, shared, stream, p,
             zero);
      return;
    default:
      launch(matmul_large_kernel<kCodes, kGroup, kHasMin, kLargeRows>, large_grid, large_block, shared, stream, p,
             zero);
      return;
  }
}

}  // namespace shoal::cuda
