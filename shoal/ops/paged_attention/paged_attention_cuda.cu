// Entry of the CUDA path, and what stands around the attention itself: QK-norm, rotary, the write into the cache, the
// merge of splits.
#include "shoal/ops/paged_attention/paged_attention_cuda.h"

#include <algorithm>
#include <bit>

#include "shoal/base/checked.h"
#include "shoal/base/float_bits.h"
#include "shoal/ops/paged_attention/paged_attention_cuda_params.cuh"

namespace shoal::cuda {

extern template void launch_attend<__nv_bfloat16, 64>(const AttentionParams&, Stream);
extern template void launch_attend<__nv_bfloat16, 128>(const AttentionParams&, Stream);
extern template void launch_attend<__nv_bfloat16, 256>(const AttentionParams&, Stream);
extern template void launch_attend<__half, 64>(const AttentionParams&, Stream);
extern template void launch_attend<__half, 128>(const AttentionParams&, Stream);
extern template void launch_attend<__half, 256>(const AttentionParams&, Stream);

namespace {

using paged::Store;

constexpr int kPrologueWarps = 4;
constexpr int kMaxHead = 256;
constexpr int kMaxSplits = 64;

__device__ int to_code(float value, float low, float high) {
  // NaN gives low, as the reference's comparisons do.
  return static_cast<int>(rintf(value > low ? fminf(value, high) : low));
}

// One channel of a head; int4 is written in pairs by the even channel's lane.
__device__ void write_cache(const paged::CacheSide& side, std::byte* head, int i, const float* values,
                            const float* scale, bool scale_is_one) {
  const auto scaled = [&](int channel) {
    const float s = scale[scale_is_one ? 0 : channel];
    return s == 0.0f ? 0.0f : __fdiv_rn(values[channel], s);
  };
  switch (side.store) {
    case Store::kF32: reinterpret_cast<float*>(head)[i] = values[i]; break;
    case Store::kF16: reinterpret_cast<__half*>(head)[i] = __float2half_rn(values[i]); break;
    case Store::kBF16: reinterpret_cast<__nv_bfloat16*>(head)[i] = __float2bfloat16_rn(values[i]); break;
    case Store::kI8:
      reinterpret_cast<int8_t*>(head)[i] = static_cast<int8_t>(to_code(scaled(i), -128.0f, 127.0f));
      break;
    case Store::kF8: reinterpret_cast<uint8_t*>(head)[i] = f32_to_e4m3(scaled(i)); break;
    case Store::kI4:
      if (i % 2 == 0) {
        const int low = to_code(scaled(i), -8.0f, 7.0f) + 8;
        const int high = to_code(scaled(i + 1), -8.0f, 7.0f) + 8;
        reinterpret_cast<uint8_t*>(head)[i / 2] = static_cast<uint8_t>(low | high << 4);
      }
      break;
  }
}

// A warp a head of a token: query heads, then K, then V. Nothing is fused, so that bytes of the cache are those of the
// reference.
template <class T, class E>
__global__ void __launch_bounds__(kPrologueWarps* kWarp) paged_attention_prologue_kernel(AttentionParams p) {
  begin_kernel();
  const paged::Problem& c = p.call;
  __shared__ float heads[kPrologueWarps][kMaxHead];
  __shared__ int owner;
  const int64_t token = blockIdx.x;
  if (threadIdx.x == 0) {
    owner = INT32_MAX;
  }
  __syncthreads();
  for (int seq_idx = threadIdx.x; seq_idx < c.num_seqs; seq_idx += blockDim.x) {
    const DeviceSequence seq = read_sequence(c, seq_idx);
    if (seq.sound && token >= seq.begin && token < seq.end) {
      atomicMin(&owner, seq_idx);
    }
  }
  __syncthreads();
  const int lane = threadIdx.x % kWarp;
  const int warp = threadIdx.x / kWarp;
  const int head_dim = static_cast<int>(c.head_dim);
  if (owner == INT32_MAX) {  // a token of no sequence: zeros, and nothing is written
    if (blockIdx.y > 0) {
      return;
    }
    T* out = reinterpret_cast<T*>(c.output + token * c.output_stride);
    for (int i = threadIdx.x; i < c.num_heads * c.v_head_dim; i += blockDim.x) {
      out[i] = from_float<T>(0.0f);
    }
    for (int64_t i = threadIdx.x; i < p.num_splits * c.num_heads; i += blockDim.x) {
      const int64_t row = token * c.num_heads + i % c.num_heads;
      p.partial[i / c.num_heads * c.num_tokens * c.num_heads + row] = make_float2(paged::kEmpty, 0.0f);
    }
    return;
  }
  const DeviceSequence seq = read_sequence(c, owner);
  const int64_t pos = seq.past + (token - seq.begin);

  int64_t slot = -1;
  if (pos < c.num_columns * c.page_size) {
    if (c.slots.data != nullptr) {
      slot = index_at(c.slots, token);
      slot = slot < c.num_pages * c.page_size ? slot : -1;
    } else {
      const int page = index_at(c.table, owner, pos >> p.page_bits);
      slot = page >= 0 && page < c.num_pages ? page * c.page_size + pos % c.page_size : -1;
    }
  }

  float* head = heads[warp];
  const int num_heads = static_cast<int>(c.num_heads);
  const int num_kv = static_cast<int>(c.num_kv_heads);
  const int total = num_heads + (c.latent ? 1 : 2) * num_kv;
  for (int h = static_cast<int>(blockIdx.y) * kPrologueWarps + warp; h < total; h += kPrologueWarps * gridDim.y) {
    const bool is_query = h < num_heads;
    const bool is_key = !is_query && h < num_heads + num_kv;
    if (!is_query && slot < 0) {
      continue;
    }
    const int head_idx = is_query ? h : is_key ? h - num_heads : h - num_heads - num_kv;
    const paged::Matrix& from = is_query ? c.query : is_key ? c.key : c.value;
    for (int i = lane; i < head_dim; i += kWarp) {
      head[i] = read_value<T>(from, token, static_cast<int64_t>(head_idx) * head_dim + i);
    }
    __syncwarp();
    if ((is_query || is_key) && c.norm) {
      const paged::Matrix& weight = is_query ? c.q_norm_weight : c.k_norm_weight;
      double sum = 0.0;
      for (int i = lane; i < head_dim; i += kWarp) {
        sum += static_cast<double>(head[i]) * static_cast<double>(head[i]);
      }
      for (int distance = kWarp / 2; distance > 0; distance /= 2) {
        sum += __shfl_xor_sync(0xffffffffu, sum, distance);
      }
      const float mean = static_cast<float>(sum / head_dim);
      const float factor = static_cast<float>(1.0 / sqrt(static_cast<double>(mean) + static_cast<double>(c.epsilon)));
      for (int i = lane; i < head_dim; i += kWarp) {
        const float scaled = __fmul_rn(__fmul_rn(head[i], factor), read_value<T>(weight, 0, i));
        head[i] = to_float(from_float<T>(scaled));
      }
      __syncwarp();
    }
    if ((is_query || is_key) && c.rotary) {
      const int64_t row = pos < c.max_pos ? pos : c.max_pos - 1;
      const int half = static_cast<int>(c.rotary_dim / 2);
      for (int i = lane; i < half; i += kWarp) {
        float& x = head[c.rotary_offset + (c.rotary_interleaved ? 2 * i : i)];
        float& y = head[c.rotary_offset + (c.rotary_interleaved ? 2 * i + 1 : half + i)];
        const float cos = read_value<T>(c.cos, row, i);
        const float sin = read_value<T>(c.sin, row, i);
        const float turned_x = __fsub_rn(__fmul_rn(x, cos), __fmul_rn(y, sin));
        const float turned_y = __fadd_rn(__fmul_rn(y, cos), __fmul_rn(x, sin));
        x = to_float(from_float<T>(turned_x));
        y = to_float(from_float<T>(turned_y));
      }
      __syncwarp();
    }
    if (is_query) {
      E* query = static_cast<E*>(p.query) + (token * num_heads + head_idx) * p.padded_dim;
      const int64_t kv_head = head_idx / c.group;
      for (int i = lane; i < p.padded_dim; i += kWarp) {
        float value = 0.0f;
        if (i < head_dim) {
          value = head[i];
          if (p.k_scale != nullptr) {  // codes are multiplied as they are: the query carries their scale
            value *= p.k_scale[p.k_scale_is_one ? 0 : kv_head * head_dim + i];
          }
        }
        query[i] = from_float<E>(value);
      }
    } else {
      const paged::CacheSide& side = is_key ? c.k_cache : c.v_cache;
      const float* scale = is_key ? p.k_scale : p.v_scale;
      const bool is_one = is_key ? p.k_scale_is_one : p.v_scale_is_one;
      std::byte* to = side.data + slot * side.token_bytes + head_idx * side.head_bytes;
      const float* own = scale == nullptr || is_one ? scale : scale + static_cast<int64_t>(head_idx) * head_dim;
      for (int i = lane; i < head_dim; i += kWarp) {
        write_cache(side, to, i, head, own, is_one);
      }
    }
    __syncwarp();
  }
}

constexpr int kCombineThreads = 128;

// Adds the splits of a (token, head) in their order; applies the sink and V's scale. A block a row; its first warp turns
// the splits' maxima and sums into shares.
template <class T>
__global__ void __launch_bounds__(kCombineThreads) paged_attention_combine_kernel(AttentionParams p) {
  begin_kernel();
  __shared__ float shares[kMaxSplits];
  const paged::Problem& c = p.call;
  const int64_t row = blockIdx.x;  // token * num_heads + head
  const int64_t num_rows = c.num_tokens * c.num_heads;
  const int64_t token = row / c.num_heads;
  const int64_t head = row % c.num_heads;
  if (threadIdx.x < kWarp) {
    const int lane = threadIdx.x;
    float2 parts[kMaxSplits / kWarp];
    float largest = paged::kEmpty;
#pragma unroll
    for (int i = 0; i < kMaxSplits / kWarp; ++i) {
      const int split = i * kWarp + lane;
      parts[i] = split < p.num_splits ? p.partial[split * num_rows + row] : make_float2(paged::kEmpty, 0.0f);
      largest = fmaxf(largest, parts[i].x);
    }
    largest = warp_max(largest);
    const bool is_empty = largest <= paged::kEmpty;
    float sink = 0.0f;
    if (c.sink.data != nullptr && !is_empty) {
      const float logit = read_value<T>(c.sink, 0, head);
      largest = fmaxf(largest, logit);
      sink = expf(logit - largest);
    }
    float weights[kMaxSplits / kWarp];
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kMaxSplits / kWarp; ++i) {
      weights[i] = parts[i].x <= paged::kEmpty ? 0.0f : expf(parts[i].x - largest);
      sum += weights[i] * parts[i].y;
    }
    sum = warp_sum(sum) + sink;
#pragma unroll
    for (int i = 0; i < kMaxSplits / kWarp; ++i) {
      shares[i * kWarp + lane] = is_empty ? 0.0f : weights[i] / sum;
    }
  }
  __syncthreads();
  T* out = reinterpret_cast<T*>(c.output + token * c.output_stride) + head * c.v_head_dim;
  for (int i = threadIdx.x; i < c.v_head_dim; i += kCombineThreads) {
    float value = 0.0f;
#pragma unroll 8
    for (int split = 0; split < p.num_splits; ++split) {
      const float share = shares[split];  // an empty split's numbers are whatever was there
      const float part = share == 0.0f ? 0.0f : p.partial_out[(split * num_rows + row) * p.padded_dim + i];
      value += share * part;
    }
    if (p.v_scale != nullptr) {
      value *= p.v_scale[p.v_scale_is_one ? 0 : head / c.group * c.head_dim + i];
    }
    out[i] = from_float<T>(value);
  }
}

// The same where there is one split: a warp a row.
template <class T>
__global__ void __launch_bounds__(kCombineThreads) paged_attention_finish_kernel(AttentionParams p) {
  begin_kernel();
  const paged::Problem& c = p.call;
  const int lane = threadIdx.x % kWarp;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (kCombineThreads / kWarp) + threadIdx.x / kWarp;
  if (row >= c.num_tokens * c.num_heads) {
    return;
  }
  const int64_t token = row / c.num_heads;
  const int64_t head = row % c.num_heads;
  const float2 part = p.partial[row];
  const bool is_empty = part.x <= paged::kEmpty;
  float largest = part.x;
  float sink = 0.0f;
  if (c.sink.data != nullptr && !is_empty) {
    const float logit = read_value<T>(c.sink, 0, head);
    largest = fmaxf(largest, logit);
    sink = expf(logit - largest);
  }
  const float weight = is_empty ? 0.0f : expf(part.x - largest);
  const float share = is_empty ? 0.0f : weight / (weight * part.y + sink);
  T* out = reinterpret_cast<T*>(c.output + token * c.output_stride) + head * c.v_head_dim;
  for (int i = lane; i < c.v_head_dim; i += kWarp) {
    float value = is_empty ? 0.0f : share * p.partial_out[row * p.padded_dim + i];
    if (p.v_scale != nullptr) {
      value *= p.v_scale[p.v_scale_is_one ? 0 : head / c.group * c.head_dim + i];
    }
    out[i] = from_float<T>(value);
  }
}

int padded_dim(int64_t head_dim) { return head_dim <= 64 ? 64 : head_dim <= 128 ? 128 : 256; }

constexpr int64_t kSplitBlocks = 2 * 132;  // what splits are to fill: two blocks an SM of an H200
constexpr int64_t kUnitRows = 64;

// As many splits as fill the device, each of at least one tile of keys. From shapes alone.
int num_splits(const paged::Problem& c) {
  const int64_t rows = c.num_tokens * c.group;
  const int64_t units =
      std::max<int64_t>(1, std::max(ceil_div(rows, kUnitRows), std::min(c.num_tokens, c.num_seqs))) * c.num_kv_heads;
  const int64_t longest =
      c.window > 0 ? std::min(c.window + c.num_tokens, c.num_columns * c.page_size) : c.num_columns * c.page_size;
  const int64_t most = std::max<int64_t>(1, longest / kKeyTile);
  return static_cast<int>(std::clamp<int64_t>(kSplitBlocks / units, 1, std::min<int64_t>(most, kMaxSplits)));
}

void check_supported(const paged::Problem& c) {
  if (c.head_dim > kMaxHead) {
    fail(ErrorCode::kUnsupported, "paged_attention: head_size ", c.head_dim, " has no CUDA kernel, the largest is ",
         kMaxHead);
  }
  for (const paged::CacheSide* side : {&c.k_cache, &c.v_cache}) {
    if (side->store == Store::kF32) {
      fail(ErrorCode::kUnsupported, "paged_attention: a float32 cache has no CUDA kernel");
    }
    require(!side->quantized() || side->scale->is_contiguous(), "paged_attention: on CUDA scales must be contiguous");
  }
}

struct Sizes {
  size_t query, partial_out, partial;
  explicit Sizes(const paged::Problem& c) {
    const int64_t rows = c.num_tokens * c.num_heads;
    query = static_cast<size_t>(rows * padded_dim(c.head_dim));
    partial = static_cast<size_t>(num_splits(c) * rows);
    partial_out = partial * static_cast<size_t>(padded_dim(c.head_dim));
  }
};

template <class E>
void attend(const AttentionParams& params, Stream stream) {
  switch (params.padded_dim) {
    case 64: launch_attend<E, 64>(params, stream); return;
    case 128: launch_attend<E, 128>(params, stream); return;
    default: launch_attend<E, 256>(params, stream); return;
  }
}

}  // namespace

size_t paged_attention_workspace_bytes(const paged::Problem& problem) {
  const Sizes sizes(problem);
  // Fewer tokens may have more splits: rows times splits are no more than either of these.
  const int64_t rows =
      std::max({problem.num_tokens * problem.num_heads, kSplitBlocks * kUnitRows, kSplitBlocks * problem.group});
  const auto partial = static_cast<size_t>(rows);
  return Workspace::bytes_for<uint16_t>(sizes.query) +
         Workspace::bytes_for<float>(partial * static_cast<size_t>(padded_dim(problem.head_dim))) +
         Workspace::bytes_for<float2>(partial);
}

void paged_attention(const paged::Problem& problem, const OpContext& context) {
  check_supported(problem);
  const Workspace::Scope scope(*context.workspace);
  const Sizes sizes(problem);
  AttentionParams p{};
  p.call = problem;
  const auto scale = [](const paged::CacheSide& side, const float*& values, bool& is_one) {
    if (side.quantized()) {
      values = side.scale->as<const float>();
      is_one = side.scale->num_elements() == 1;
    }
  };
  scale(problem.k_cache, p.k_scale, p.k_scale_is_one);
  scale(problem.v_cache, p.v_scale, p.v_scale_is_one);
  p.page_bits = std::countr_zero(static_cast<uint64_t>(problem.page_size));
  p.padded_dim = padded_dim(problem.head_dim);
  p.num_splits = num_splits(problem);
  p.query = context.workspace->take<uint16_t>(sizes.query).data();
  p.partial_out = context.workspace->take<float>(sizes.partial_out).data();
  p.partial = context.workspace->take<float2>(sizes.partial).data();

  // The tensor cores take f16 where that holds everything: no bf16 or f32 anywhere.
  const bool is_half =
      problem.type == DType::kF16 && problem.k_cache.store != Store::kBF16 && problem.v_cache.store != Store::kBF16;
  visit_float(problem.type, [&](auto type) {
    using T = decltype(type);
    // Few tokens: a block for every four heads; many: a block loops over them.
    constexpr int64_t kManyTokens = 256;
    const int64_t num_heads = problem.num_heads + 2 * problem.num_kv_heads;
    const dim3 grid(static_cast<unsigned>(problem.num_tokens),
                    problem.num_tokens < kManyTokens ? blocks_for(num_heads, kPrologueWarps) : 1);
    const dim3 block(kPrologueWarps * kWarp);
    if (is_half) {
      launch(paged_attention_prologue_kernel<T, __half>, grid, block, 0, context.stream, p);
      attend<__half>(p, context.stream);
    } else {
      launch(paged_attention_prologue_kernel<T, __nv_bfloat16>, grid, block, 0, context.stream, p);
      attend<__nv_bfloat16>(p, context.stream);
    }
    const int64_t num_rows = problem.num_tokens * problem.num_heads;
    if (p.num_splits == 1) {
      launch(paged_attention_finish_kernel<T>, dim3(blocks_for(num_rows, kCombineThreads / kWarp)),
             dim3(kCombineThreads), 0, context.stream, p);
    } else {
      launch(paged_attention_combine_kernel<T>, dim3(static_cast<unsigned>(num_rows)), dim3(kCombineThreads), 0,
             context.stream, p);
    }
  });
}

}  // namespace shoal::cuda
