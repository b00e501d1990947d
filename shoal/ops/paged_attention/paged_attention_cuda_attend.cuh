// Attention of tiles of query rows over a range of keys, on the tensor cores (mma m16n8k16), after FlashAttention-2 (Dao
// 2023): running maximum and sum, K and V of 64 keys at a time in shared memory, the next ones on their way.
//
// A row is a (token, query head); the heads of one KV head and their tokens are packed, so that a decoded token's heads
// share what is read. Two shapes:
//   wide     64 rows, 16 a warp; all warps see every key
//   narrow   16 rows; every warp takes 16 of the 64 keys and the four merge at the end
//
// Codes of quantised caches are multiplied as they are, as small numbers of E: the query carries K's scale, the combine
// kernel applies V's.
#pragma once

#include "shoal/base/float_bits.h"
#include "shoal/cuda/mma.cuh"
#include "shoal/ops/paged_attention/paged_attention_cuda_params.cuh"

namespace shoal::cuda {

template <class E, int kDim>
struct AttendShared {
  alignas(128) E key[2][kKeyTile * kDim];
  alignas(128) E value[2][kKeyTile * kDim];
  int slot[2][kKeyTile];          // of the tile to be fetched next and the one after; -1: none
  uint8_t admitted[2][kKeyTile];  // page mapped and inside the range
};

// Element offset of 16 bytes (piece) of a key's row; pieces are permuted by the row against bank conflicts.
template <int kDim>
__device__ inline int piece_offset(int row, int piece) {
  return row * kDim + (piece ^ (row % 8)) * 8;
}

// Eight channels of a head from the cache, as E.
template <class E>
__device__ inline uint4 read_piece(paged::Store store, const std::byte* head, int piece) {
  float v[8];
  switch (store) {
    case paged::Store::kF16:
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        v[i] = __half2float(reinterpret_cast<const __half*>(head)[8 * piece + i]);
      }
      break;
    case paged::Store::kBF16:
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        v[i] = __bfloat162float(reinterpret_cast<const __nv_bfloat16*>(head)[8 * piece + i]);
      }
      break;
    case paged::Store::kI8: {
      const uint2 codes = *reinterpret_cast<const uint2*>(head + 8 * piece);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        v[i] = static_cast<float>(static_cast<int8_t>((i < 4 ? codes.x : codes.y) >> (8 * (i % 4))));
      }
      break;
    }
    case paged::Store::kF8:
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        v[i] = e4m3_to_f32(static_cast<uint8_t>(head[8 * piece + i]));
      }
      break;
    default: {  // int4
      const uint32_t codes = *reinterpret_cast<const uint32_t*>(head + 4 * piece);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        v[i] = static_cast<float>(static_cast<int>(codes >> (4 * i) & 15) - 8);
      }
      break;
    }
  }
  return make_uint4(pack(v[0], v[1], E{}), pack(v[2], v[3], E{}), pack(v[4], v[5], E{}), pack(v[6], v[7], E{}));
}

template <class E>
__device__ constexpr bool is_own_type(paged::Store store) {
  return store == (std::is_same_v<E, __half> ? paged::Store::kF16 : paged::Store::kBF16);
}

// A unit of work: rows [row_begin, row_begin + rows) of a sequence and KV head, and the keys of one split.
struct AttendUnit {
  DeviceSequence seq;
  int seq_idx, row_begin, num_rows;
  int key_begin, key_end;  // whole tiles from the first, none beyond the second
  int first_key;           // that any row admits: what lies before it in a tile must not be read
};

// Finds the unit of this block; false: there is none. Lengths are known only here.
template <int kRows>
__device__ inline bool find_unit(const AttentionParams& p, AttendUnit& unit) {
  const paged::Problem& c = p.call;
  const int group = static_cast<int>(c.group);
  int rest = blockIdx.x;
  for (int seq_idx = 0;; ++seq_idx) {
    if (seq_idx == c.num_seqs) {
      return false;
    }
    unit.seq = read_sequence(c, seq_idx);
    if (!unit.seq.sound) {
      continue;
    }
    const int rows = (unit.seq.end - unit.seq.begin) * group;
    const int tiles = (rows + kRows - 1) / kRows;
    if (rest < tiles) {
      unit.seq_idx = seq_idx;
      unit.row_begin = rest * kRows;
      unit.num_rows = min(kRows, rows - unit.row_begin);
      break;
    }
    rest -= tiles;
  }
  const int first = unit.seq.past + unit.row_begin / group;
  const int last = unit.seq.past + (unit.row_begin + unit.num_rows - 1) / group;
  const int limit = static_cast<int>(c.num_columns * c.page_size);
  const int end = min(c.is_causal ? last + 1 : unit.seq.kv_len(), limit);
  unit.first_key = c.window > 0 ? max(0, first - static_cast<int>(c.window) + 1) : 0;
  const int begin = unit.first_key / kKeyTile * kKeyTile;
  const int tiles = max(0, (end - begin + kKeyTile - 1) / kKeyTile);
  const int each = (tiles + p.num_splits - 1) / p.num_splits * kKeyTile;
  unit.key_begin = begin + static_cast<int>(blockIdx.z) * each;
  unit.key_end = min(end, unit.key_begin + each);
  return true;
}

template <class E, int kDim, bool kNarrow>
__global__ void __launch_bounds__(kAttendWarps* kWarp) paged_attention_attend_kernel(AttentionParams p) {
  begin_kernel();
  constexpr int kRows = kNarrow ? 16 : 64;
  constexpr int kKeys = kNarrow ? kKeyTile / kAttendWarps : kKeyTile;  // of a warp
  constexpr int kDimSteps = kDim / 16;
  constexpr float kLog2e = 1.44269504088896341f;
  using Shared = AttendShared<E, kDim>;
  extern __shared__ __align__(128) std::byte memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const paged::Problem& c = p.call;
  const int group = static_cast<int>(c.group);
  const int lane = threadIdx.x % kWarp;
  const int warp = threadIdx.x / kWarp;
  const int kv_head = blockIdx.y;
  AttendUnit unit;
  if (!find_unit<kRows>(p, unit)) {
    return;
  }

  // Row r of the unit: token and head.
  const int warp_row = kNarrow ? 0 : 16 * warp;
  int position[2];
  int64_t row_idx[2];  // token * num_heads + head
  bool has_row[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int r = warp_row + lane / 4 + 8 * half;
    const int row = unit.row_begin + min(r, unit.num_rows - 1);
    has_row[half] = r < unit.num_rows;
    position[half] = unit.seq.past + row / group;
    row_idx[half] = static_cast<int64_t>(unit.seq.begin + row / group) * c.num_heads + kv_head * group + row % group;
  }
  uint32_t query[kDimSteps][4];
#pragma unroll
  for (int i = 0; i < kDimSteps; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const auto* from = reinterpret_cast<const uint32_t*>(static_cast<const E*>(p.query) + row_idx[half] * kDim);
      query[i][half] = from[8 * i + lane % 4];
      query[i][half + 2] = from[8 * i + 4 + lane % 4];
    }
  }

  // Neighbours bring neighbouring parts of a head, so that a warp's copies are whole lines. Slots of the tile after next
  // are found by the first 64 threads, their pages one tile earlier still, so that nothing waits for the table.
  constexpr int kPieces = kDim / 8;  // of a head
  constexpr int kKeysAtOnce = kAttendWarps * kWarp / kPieces;
  const int head_dim = static_cast<int>(c.head_dim);
  const int v_head_dim = static_cast<int>(c.v_head_dim);
  const int piece = threadIdx.x % kPieces;
  const auto fetch_side = [&](E* to, const paged::CacheSide& side, int width, const int* slots) {
    const std::byte* heads = side.data + kv_head * side.head_bytes;
    const bool is_own = is_own_type<E>(side.store);
#pragma unroll
    for (int i = 0; i < kKeyTile / kKeysAtOnce; ++i) {
      const int key = threadIdx.x / kPieces + i * kKeysAtOnce;
      const int64_t slot = slots[key];
      E* at = to + piece_offset<kDim>(key, piece);
      const bool valid = slot >= 0 && 8 * piece < width;
      const std::byte* head = heads + slot * side.token_bytes;
      if (is_own) {
        copy_async(shared_address(at), valid ? head + 16 * piece : side.data, valid);
      } else {
        *reinterpret_cast<uint4*>(at) = valid ? read_piece<E>(side.store, head, piece) : make_uint4(0, 0, 0, 0);
      }
    }
  };
  const int own_key = threadIdx.x;           // of the first 64 threads
  const auto page_at = [&](int key_begin) {  // -1: none
    const int key = key_begin + own_key;
    return own_key < kKeyTile && key >= unit.first_key && key < unit.key_end
               ? index_at(c.table, unit.seq_idx, key >> p.page_bits)
               : -1;
  };
  const auto find_slots = [&](int key_begin, int page, int stage) {
    if (own_key < kKeyTile) {
      shared.slot[stage][own_key] =
          page >= 0 && page < c.num_pages
              ? page * static_cast<int>(c.page_size) + ((key_begin + own_key) & ((1 << p.page_bits) - 1))
              : -1;
    }
  };
  bool is_admitted_0 = true;  // this thread's key, by stage
  bool is_admitted_1 = true;
  const auto fetch = [&](int key_begin, int stage) {
    if (key_begin < unit.key_end) {
      if (own_key < kKeyTile) {
        const bool has_slot = shared.slot[stage][own_key] >= 0;
        (stage == 0 ? is_admitted_0 : is_admitted_1) = has_slot;
        shared.admitted[stage][own_key] = has_slot;
      }
      fetch_side(shared.key[stage], c.k_cache, head_dim, shared.slot[stage]);
      fetch_side(shared.value[stage], c.v_cache, v_head_dim, shared.slot[stage]);
    }
    copy_commit();
  };
  find_slots(unit.key_begin, page_at(unit.key_begin), 0);
  find_slots(unit.key_begin + kKeyTile, page_at(unit.key_begin + kKeyTile), 1);
  int next_page = page_at(unit.key_begin + 2 * kKeyTile);
  __syncthreads();
  // Positions that every row of the unit admits, if their pages are mapped.
  const int first_pos = unit.seq.past + unit.row_begin / group;
  const int last_pos = unit.seq.past + (unit.row_begin + unit.num_rows - 1) / group;
  const int all_begin = c.window > 0 ? last_pos - static_cast<int>(c.window) + 1 : 0;
  const int all_end = c.is_causal ? first_pos + 1 : unit.key_end;
  const float scale_log2 = c.scale * kLog2e;

  float out[kDim / 8][4] = {};
  float largest[2] = {paged::kEmpty, paged::kEmpty};
  float sum[2] = {0.0f, 0.0f};
  int stage = 0;
  fetch(unit.key_begin, 0);
  __syncthreads();  // its slots are read: the loop may write the next ones
  for (int key_begin = unit.key_begin; key_begin < unit.key_end; key_begin += kKeyTile, stage ^= 1) {
    fetch(key_begin + kKeyTile, stage ^ 1);
    find_slots(key_begin + 2 * kKeyTile, next_page, stage);
    next_page = page_at(key_begin + 3 * kKeyTile);
    copy_wait<1>();
    const bool is_plain = __syncthreads_and(stage == 0 ? is_admitted_0 : is_admitted_1) != 0 &&
                          key_begin >= all_begin && key_begin + kKeyTile <= min(all_end, unit.key_end) &&
                          c.softcap == 0.0f;
    const int warp_key = kNarrow ? kKeys * warp : 0;
    const uint32_t key_base = shared_address(shared.key[stage]);
    const uint32_t value_base = shared_address(shared.value[stage]);

    float scores[kKeys / 8][4] = {};
#pragma unroll
    for (int i = 0; i < kDimSteps; ++i) {
#pragma unroll
      for (int n = 0; n < kKeys / 16; ++n) {
        uint32_t k[4];
        const int row = warp_key + 16 * n + lane / 16 * 8 + lane % 8;
        ldmatrix(k, key_base + 2 * piece_offset<kDim>(row, 2 * i + lane / 8 % 2));
        mma(scores[2 * n], query[i], k[0], k[1], E{});
        mma(scores[2 * n + 1], query[i], k[2], k[3], E{});
      }
    }

    // Scores in units of log 2; masked, unless every row admits every key.
    if (is_plain) {
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          scores[n][i] *= scale_log2;
        }
      }
    } else {
      const bool is_whole = key_begin + kKeyTile <= unit.key_end;
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int key_idx = warp_key + 8 * n + lane % 4 * 2 + i % 2;
          const int key = key_begin + key_idx;
          const int pos = position[i / 2];
          float x = scores[n][i] * c.scale;
          if (c.softcap > 0.0f) {
            x = c.softcap * tanhf(x / c.softcap);
          }
          const bool in_range = (is_whole || key < unit.key_end) && (!c.is_causal || key <= pos) &&
                                (c.window == 0 || key > pos - static_cast<int>(c.window));
          scores[n][i] = in_range && shared.admitted[stage][key_idx] != 0 ? x * kLog2e : paged::kEmpty;
        }
      }
    }
    float shrink[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float tile_largest = paged::kEmpty;
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
        tile_largest = fmaxf(tile_largest, fmaxf(scores[n][2 * half], scores[n][2 * half + 1]));
      }
      tile_largest = fmaxf(tile_largest, __shfl_xor_sync(0xffffffffu, tile_largest, 1));
      tile_largest = fmaxf(tile_largest, __shfl_xor_sync(0xffffffffu, tile_largest, 2));
      const float next = fmaxf(largest[half], tile_largest);
      shrink[half] = fast_exp2(largest[half] - next);
      largest[half] = next;
      sum[half] *= shrink[half];
    }
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float x = scores[n][i];
        const float weight = is_plain || x > paged::kEmpty ? fast_exp2(x - largest[i / 2]) : 0.0f;
        scores[n][i] = weight;
        sum[i / 2] += weight;
      }
    }
    if (__any_sync(0xffffffffu, shrink[0] != 1.0f || shrink[1] != 1.0f)) {  // maxima move seldom after a while
#pragma unroll
      for (int d = 0; d < kDim / 8; ++d) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          out[d][i] *= shrink[i / 2];
        }
      }
    }
#pragma unroll
    for (int n = 0; n < kKeys / 16; ++n) {
      const uint32_t weights[4] = {
          pack(scores[2 * n][0], scores[2 * n][1], E{}), pack(scores[2 * n][2], scores[2 * n][3], E{}),
          pack(scores[2 * n + 1][0], scores[2 * n + 1][1], E{}), pack(scores[2 * n + 1][2], scores[2 * n + 1][3], E{})};
#pragma unroll
      for (int d = 0; d < kDim / 16; ++d) {
        uint32_t v[4];
        const int row = warp_key + 16 * n + lane / 8 % 2 * 8 + lane % 8;
        ldmatrix_trans(v, value_base + 2 * piece_offset<kDim>(row, 2 * d + lane / 16));
        mma(out[2 * d], weights, v[0], v[1], E{});
        mma(out[2 * d + 1], weights, v[2], v[3], E{});
      }
    }
    __syncthreads();
  }
  copy_wait<0>();

#pragma unroll
  for (int half = 0; half < 2; ++half) {
    sum[half] += __shfl_xor_sync(0xffffffffu, sum[half], 1);
    sum[half] += __shfl_xor_sync(0xffffffffu, sum[half], 2);
  }

  if constexpr (kNarrow) {
    // The warps' keys together, in the order of the warps.
    auto* all_out = reinterpret_cast<float*>(memory);  // [warps, 16, kDim]
    auto* all = reinterpret_cast<float2*>(all_out + kAttendWarps * 16 * kDim);
    __syncthreads();
#pragma unroll
    for (int d = 0; d < kDim / 8; ++d) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        all_out[(warp * 16 + lane / 4 + i / 2 * 8) * kDim + 8 * d + lane % 4 * 2 + i % 2] = out[d][i];
      }
    }
    if (lane % 4 == 0) {
      all[warp * 16 + lane / 4] = make_float2(largest[0], sum[0]);
      all[warp * 16 + lane / 4 + 8] = make_float2(largest[1], sum[1]);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < unit.num_rows * kDim; i += blockDim.x) {
      const int r = i / kDim;
      const int row = unit.row_begin + r;
      float whole = paged::kEmpty;
#pragma unroll
      for (int w = 0; w < kAttendWarps; ++w) {
        whole = fmaxf(whole, all[w * 16 + r].x);
      }
      float value = 0.0f;
      float weight = 0.0f;
#pragma unroll
      for (int w = 0; w < kAttendWarps; ++w) {
        const float2 part = all[w * 16 + r];
        const float share = part.x <= paged::kEmpty ? 0.0f : exp2f(part.x - whole);
        value += share * all_out[(w * 16 + r) * kDim + i % kDim];
        weight += share * part.y;
      }
      const int64_t idx = static_cast<int64_t>(blockIdx.z) * c.num_tokens * c.num_heads +
                          static_cast<int64_t>(unit.seq.begin + row / group) * c.num_heads + kv_head * group +
                          row % group;
      p.partial_out[idx * kDim + i % kDim] = value;
      if (i % kDim == 0) {
        p.partial[idx] = make_float2(whole <= paged::kEmpty ? paged::kEmpty : whole / kLog2e, weight);
      }
    }
  } else {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (!has_row[half]) {
        continue;
      }
      const int64_t idx = static_cast<int64_t>(blockIdx.z) * c.num_tokens * c.num_heads + row_idx[half];
#pragma unroll
      for (int d = 0; d < kDim / 8; ++d) {
        *reinterpret_cast<float2*>(p.partial_out + idx * kDim + 8 * d + lane % 4 * 2) =
            make_float2(out[d][2 * half], out[d][2 * half + 1]);
      }
      if (lane % 4 == 0) {
        const float own = largest[half];
        p.partial[idx] = make_float2(own <= paged::kEmpty ? paged::kEmpty : own / kLog2e, sum[half]);
      }
    }
  }
}

template <class E, int kDim>
void launch_attend(const AttentionParams& p, Stream stream) {
  const paged::Problem& c = p.call;
  // Few rows a sequence: decoded or verified tokens.
  const bool is_narrow = c.num_tokens * c.group <= 16 * c.num_seqs;
  const int rows = is_narrow ? 16 : 64;
  const int64_t units =
      std::min(c.num_tokens * c.group / rows + std::min(c.num_tokens, c.num_seqs), c.num_tokens * c.group);
  const dim3 grid(static_cast<unsigned>(units), static_cast<unsigned>(c.num_kv_heads),
                  static_cast<unsigned>(p.num_splits));
  const dim3 block(kAttendWarps * kWarp);
  constexpr size_t kMerge = kAttendWarps * 16 * (kDim * sizeof(float) + sizeof(float2));
  constexpr size_t kShared = sizeof(AttendShared<E, kDim>) > kMerge ? sizeof(AttendShared<E, kDim>) : kMerge;
  if (is_narrow) {
    launch(paged_attention_attend_kernel<E, kDim, true>, grid, block, kShared, stream, p);
  } else {
    launch(paged_attention_attend_kernel<E, kDim, false>, grid, block, kShared, stream, p);
  }
}

}  // namespace shoal::cuda
