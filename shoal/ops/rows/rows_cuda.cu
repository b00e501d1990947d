// Rows on the device. The sort is by counting, one warp an expert, so that its order is always the same.
#include <algorithm>

#include "shoal/cuda/launch.cuh"
#include "shoal/ops/rows/rows_cuda.h"

namespace shoal::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kMaxExperts = 1024;

__global__ void __launch_bounds__(kThreads)
    gather_rows_kernel(float* out, int64_t out_stride, const float* x, int64_t x_stride, const int32_t* rows,
                       int64_t num_tokens, int width) {
  begin_kernel();
  const int64_t i = blockIdx.x;
  const int32_t row = rows[i];
  const bool is_known = row >= 0 && row < num_tokens;
  for (int c = threadIdx.x; c < width; c += kThreads) {
    out[i * out_stride + c] = is_known ? x[row * x_stride + c] : 0.0f;
  }
}

constexpr int kFewRows = 256;

// Few rows: everything in one block, a thread an expert. Same result as the three kernels below.
__global__ void __launch_bounds__(kMaxExperts)
    sort_few_rows_kernel(int32_t* row_of, int32_t* source, int32_t* row_begin, int4* tiles, int num_tiles,
                         int num_experts, int tile_rows, const int32_t* experts, int count, int top_k) {
  begin_kernel();
  __shared__ int32_t ids[kFewRows];
  __shared__ int2 warp_totals[kWarp];
  const int e = threadIdx.x;
  const int lane = e % kWarp;
  for (int i = e; i < count; i += static_cast<int>(blockDim.x)) {
    ids[i] = experts[i];
  }
  __syncthreads();
  int own = 0;
  for (int i = 0; i < count; ++i) {
    own += ids[i] == e ? 1 : 0;
  }
  const int own_tiles = (own + tile_rows - 1) / tile_rows;
  int rows = own;
  int needed = own_tiles;
#pragma unroll
  for (int distance = 1; distance < kWarp; distance *= 2) {
    const int more_rows = __shfl_up_sync(0xffffffffu, rows, distance);
    const int more_tiles = __shfl_up_sync(0xffffffffu, needed, distance);
    rows += lane >= distance ? more_rows : 0;
    needed += lane >= distance ? more_tiles : 0;
  }
  if (lane == kWarp - 1) {
    warp_totals[e / kWarp] = make_int2(rows, needed);
  }
  __syncthreads();
  int total_tiles = 0;
  for (int w = 0; w < static_cast<int>(blockDim.x) / kWarp; ++w) {
    const int2 total = warp_totals[w];
    if (w < e / kWarp) {
      rows += total.x;
      needed += total.y;
    }
    total_tiles += total.y;
  }
  int place = rows - own;
  if (e < num_experts) {
    row_begin[e + 1] = rows;
    if (e == 0) {
      row_begin[0] = 0;
    }
    for (int t = 0; t < own_tiles; ++t) {
      const int at = needed - own_tiles + t;
      if (at < num_tiles) {
        tiles[at] = make_int4(e, place + t * tile_rows, min(tile_rows, own - t * tile_rows), 0);
      }
    }
  }
  for (int t = total_tiles + e; t < num_tiles; t += static_cast<int>(blockDim.x)) {
    tiles[t] = make_int4(0, 0, 0, 0);
  }
  for (int i = 0; own > 0 && i < count; ++i) {
    if (ids[i] == e) {
      row_of[i] = place;
      source[place] = i / top_k;
      ++place;
    }
  }
}

// A warp an expert counts its pairs.
__global__ void count_rows_kernel(int32_t* counts, const int32_t* experts, int count) {
  begin_kernel();
  const int expert = blockIdx.x;
  const int lane = threadIdx.x;
  int sum = 0;
  for (int i = lane; i < count; i += kWarp) {
    sum += experts[i] == expert ? 1 : 0;
  }
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    sum += __shfl_xor_sync(0xffffffffu, sum, distance);
  }
  if (lane == 0) {
    counts[expert + 1] = sum;
  }
}

// One block: counts become begins, and the tiles are laid out expert after expert.
__global__ void __launch_bounds__(kMaxExperts)
    lay_out_kernel(int32_t* row_begin, int4* tiles, int num_tiles, int num_experts, int tile_rows) {
  begin_kernel();
  __shared__ int rows[kMaxExperts];
  __shared__ int needed[kMaxExperts];
  const int e = threadIdx.x;
  const int own = e < num_experts ? row_begin[e + 1] : 0;
  const int own_tiles = (own + tile_rows - 1) / tile_rows;
  rows[e] = own;
  needed[e] = own_tiles;
  __syncthreads();
  for (int distance = 1; distance < kMaxExperts; distance *= 2) {
    const int more_rows = e >= distance ? rows[e - distance] : 0;
    const int more_tiles = e >= distance ? needed[e - distance] : 0;
    __syncthreads();
    rows[e] += more_rows;
    needed[e] += more_tiles;
    __syncthreads();
  }
  const int begin = rows[e] - own;
  if (e < num_experts) {
    row_begin[e + 1] = rows[e];
    if (e == 0) {
      row_begin[0] = 0;
    }
    for (int t = 0; t < own_tiles; ++t) {
      const int at = needed[e] - own_tiles + t;
      if (at < num_tiles) {
        tiles[at] = make_int4(e, begin + t * tile_rows, min(tile_rows, own - t * tile_rows), 0);
      }
    }
  }
  const int total = needed[kMaxExperts - 1];
  for (int t = total + e; t < num_tiles; t += kMaxExperts) {
    tiles[t] = make_int4(0, 0, 0, 0);
  }
}

// A warp an expert gives its pairs their places, in order.
__global__ void place_rows_kernel(int32_t* row_of, int32_t* source, const int32_t* row_begin, const int32_t* experts,
                                  int count, int top_k) {
  begin_kernel();
  const int expert = blockIdx.x;
  const int lane = threadIdx.x;
  int place = row_begin[expert];
  const int end = row_begin[expert + 1];
  for (int first = 0; first < count && place < end; first += kWarp) {
    const int i = first + lane;
    const bool is_ours = i < count && experts[i] == expert;
    const unsigned ours = __ballot_sync(0xffffffffu, is_ours);
    if (is_ours) {
      const int at = place + __popc(ours & ((1u << lane) - 1u));
      row_of[i] = at;
      source[at] = i / top_k;
    }
    place += __popc(ours);
  }
}

__global__ void __launch_bounds__(kThreads)
    combine_rows_kernel(float* out, int64_t out_stride, const float* rows, int64_t rows_stride, const int32_t* row_of,
                        const float* weights, int top_k, int width) {
  begin_kernel();
  const int64_t token = blockIdx.y;
  const int i = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x);
  if (i >= width) {
    return;
  }
  float sum = 0.0f;
  for (int j = 0; j < top_k; ++j) {
    sum += weights[token * top_k + j] * rows[row_of[token * top_k + j] * rows_stride + i];
  }
  out[token * out_stride + i] = sum;
}

__global__ void __launch_bounds__(kThreads) add_gated_rows_kernel(float* out, int64_t out_stride, const float* rows,
                                                                  int64_t rows_stride, const float* gates, int width) {
  begin_kernel();
  const int64_t token = blockIdx.y;
  const int i = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x);
  if (i < width) {
    const float share = gates == nullptr ? 1.0f : 1.0f / (1.0f + expf(-gates[token]));
    out[token * out_stride + i] += share * rows[token * rows_stride + i];
  }
}

// Rows in the second dimension of the grid, in as many launches as that needs.
template <class Launch>
void for_row_ranges(int64_t num_rows, Launch&& run) {
  constexpr int64_t kMaxRows = 65535;
  for (int64_t begin = 0; begin < num_rows; begin += kMaxRows) {
    run(begin, static_cast<unsigned>(std::min(kMaxRows, num_rows - begin)));
  }
}

}  // namespace

void gather_rows(const GatherRowsArgs& args, const OpContext& context) {
  const auto num_rows = static_cast<unsigned>(args.rows.dim(0));
  if (num_rows > 0) {
    launch(gather_rows_kernel, dim3(num_rows), dim3(kThreads), 0, context.stream, args.out.as<float>(),
           args.out.stride(0), args.x.as<const float>(), args.x.stride(0), args.rows.as<const int32_t>(), args.x.dim(0),
           static_cast<int>(args.x.dim(1)));
  }
}

void sort_rows(const SortRowsArgs& args, const OpContext& context) {
  require(args.num_experts <= kMaxExperts, "sort_rows: on CUDA at most ", kMaxExperts, " experts, not ",
          args.num_experts);
  const auto num_experts = static_cast<unsigned>(args.num_experts);
  const auto count = static_cast<int>(args.expert_ids.num_elements());
  const int32_t* experts = args.expert_ids.as<const int32_t>();
  auto* row_begin = args.row_begin.as<int32_t>();
  if (count <= kFewRows) {
    launch(sort_few_rows_kernel, dim3(1), dim3((num_experts + kWarp - 1) / kWarp * kWarp), 0, context.stream,
           args.row_of.as<int32_t>(), args.source.as<int32_t>(), row_begin, reinterpret_cast<int4*>(args.tiles.data),
           static_cast<int>(args.tiles.dim(0)), static_cast<int>(args.num_experts), static_cast<int>(args.tile_rows),
           experts, count, static_cast<int>(args.expert_ids.dim(1)));
    return;
  }
  launch(count_rows_kernel, dim3(num_experts), dim3(kWarp), 0, context.stream, row_begin, experts, count);
  launch(lay_out_kernel, dim3(1), dim3(kMaxExperts), 0, context.stream, row_begin,
         reinterpret_cast<int4*>(args.tiles.data), static_cast<int>(args.tiles.dim(0)),
         static_cast<int>(args.num_experts), static_cast<int>(args.tile_rows));
  launch(place_rows_kernel, dim3(num_experts), dim3(kWarp), 0, context.stream, args.row_of.as<int32_t>(),
         args.source.as<int32_t>(), static_cast<const int32_t*>(row_begin), experts, count,
         static_cast<int>(args.expert_ids.dim(1)));
}

void combine_rows(const CombineRowsArgs& args, const OpContext& context) {
  const auto width = static_cast<int>(args.out.dim(1));
  const int64_t top_k = args.row_of.dim(1);
  for_row_ranges(args.out.dim(0), [&](int64_t begin, unsigned count) {
    launch(combine_rows_kernel, dim3(blocks_for(width, kThreads), count), dim3(kThreads), 0, context.stream,
           args.out.as<float>() + begin * args.out.stride(0), args.out.stride(0), args.rows.as<const float>(),
           args.rows.stride(0), args.row_of.as<const int32_t>() + begin * top_k,
           args.weights.as<const float>() + begin * top_k, static_cast<int>(top_k), width);
  });
}

void add_gated_rows(const AddGatedRowsArgs& args, const OpContext& context) {
  const auto width = static_cast<int>(args.out.dim(1));
  for_row_ranges(args.out.dim(0), [&](int64_t begin, unsigned count) {
    launch(add_gated_rows_kernel, dim3(blocks_for(width, kThreads), count), dim3(kThreads), 0, context.stream,
           args.out.as<float>() + begin * args.out.stride(0), args.out.stride(0),
           args.rows.as<const float>() + begin * args.rows.stride(0), args.rows.stride(0),
           args.gates ? args.gates.as<const float>() + begin : nullptr, width);
  });
}

}  // namespace shoal::cuda
