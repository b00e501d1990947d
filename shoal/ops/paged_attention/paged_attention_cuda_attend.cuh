// Attention of tiles of query rows over a range of keys, on the tensor cores (mma m16n8k16), after FlashAttention-2 (Dao
// 2023): running maximum and sum, K and V of 64 keys at a time in shared memory, the next ones on their way.
//
// A row is a (token, query head); the heads of one KV head and their tokens are packed, so that a decoded token's heads
// share what is read. Three shapes:
//   kNarrow  16 rows; every warp takes 16 of the 64 keys and the four merge at the end
//   kMiddle  64 rows, 16 a warp; all warps see every key
//   kWide    128 rows, 32 a warp, so that what a warp reads from shared memory serves twice as many; the query stands
//            there too
//
// Codes of quantised caches are multiplied as they are, as small numbers of E: the query carries K's scale, the combine
// kernel applies V's.
#pragma once

#include <algorithm>

#include "shoal/base/float_bits.h"
#include "shoal/cuda/mma.cuh"
#include "shoal/ops/paged_attention/paged_attention_cuda_params.cuh"

namespace shoal::cuda {

enum class AttendShape : uint8_t { kNarrow, kMiddle, kWide };

constexpr int rows_of(AttendShape shape) {
  return shape == AttendShape::kNarrow ? 16 : shape == AttendShape::kMiddle ? 64 : 128;
}

template <class E, int kDim>
struct AttendShared {
  alignas(128) E key[2][kKeyTile * kDim];
  alignas(128) E value[2][kKeyTile * kDim];
  int slot[2][kKeyTile];          // of the tile to be fetched next and the one after; -1: none
  uint8_t admitted[2][kKeyTile];  // page mapped and inside the range
};

// Element offset of 16 bytes (piece) of a key's row; pieces are permuted by the row against bank conflicts. Unsigned, so
// that the remainder is a mask.
template <int kDim>
__device__ inline unsigned piece_offset(unsigned row, unsigned piece) {
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

template <class E, int kDim, AttendShape kShape>
__global__ void __launch_bounds__(kAttendWarps* kWarp, kDim > 128 ? 1 : 2)
    paged_attention_attend_kernel(AttentionParams p) {
  begin_kernel();
  constexpr bool kIsNarrow = kShape == AttendShape::kNarrow;
  constexpr bool kIsWide = kShape == AttendShape::kWide;
  constexpr int kRows = rows_of(kShape);
  constexpr int kBlocks = kIsWide ? 2 : 1;                                                        // of 16 rows, a warp
  constexpr int kKeys = kIsNarrow ? kKeyTile / kAttendWarps : kIsWide ? kKeyTile / 2 : kKeyTile;  // of a warp at a time
  constexpr int kDimSteps = kDim / 16;
  constexpr float kLog2e = 1.44269504088896341f;
  using Shared = AttendShared<E, kDim>;
  extern __shared__ __align__(128) std::byte memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  E* shared_query = reinterpret_cast<E*>(memory + sizeof(Shared));  // kWide: [128, kDim], pieces permuted
  const paged::Problem& c = p.call;
  const int group = static_cast<int>(c.group);
  const unsigned lane = threadIdx.x % kWarp;
  const unsigned warp = threadIdx.x / kWarp;
  const int kv_head = blockIdx.y;
  AttendUnit unit;
  if (!find_unit<kRows>(p, unit)) {
    return;
  }

  // Row r of the unit: token and head.
  const int warp_row = kIsNarrow ? 0 : 16 * kBlocks * warp;
  const auto query_row = [&](int r) {  // token * num_heads + head; the last row where there is none
    const int row = unit.row_begin + min(r, unit.num_rows - 1);
    return static_cast<int64_t>(unit.seq.begin + row / group) * c.num_heads + kv_head * group + row % group;
  };
  int position[kBlocks][2];
#pragma unroll
  for (int m = 0; m < kBlocks; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = warp_row + 16 * m + lane / 4 + 8 * half;
      position[m][half] = unit.seq.past + (unit.row_begin + min(r, unit.num_rows - 1)) / group;
    }
  }
  uint32_t query[kIsWide ? 1 : kDimSteps][4];
  if constexpr (kIsWide) {
    for (int i = threadIdx.x; i < kRows * (kDim / 8); i += blockDim.x) {
      const int r = i / (kDim / 8);
      const int piece = i % (kDim / 8);
      copy_async(shared_address(shared_query + piece_offset<kDim>(r, piece)),
                 static_cast<const E*>(p.query) + query_row(r) * kDim + 8 * piece, true);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kDimSteps; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const auto* from = reinterpret_cast<const uint32_t*>(static_cast<const E*>(p.query) +
                                                             query_row(warp_row + lane / 4 + 8 * half) * kDim);
        query[i][half] = from[8 * i + lane % 4];
        query[i][half + 2] = from[8 * i + 4 + lane % 4];
      }
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

  float out[kBlocks][kDim / 8][4] = {};
  float largest[kBlocks][2];
  float sum[kBlocks][2];
#pragma unroll
  for (int m = 0; m < kBlocks; ++m) {
    largest[m][0] = largest[m][1] = paged::kEmpty;
    sum[m][0] = sum[m][1] = 0.0f;
  }
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
    const bool is_whole = key_begin + kKeyTile <= unit.key_end;
    const uint32_t key_base = shared_address(shared.key[stage]);
    const uint32_t value_base = shared_address(shared.value[stage]);
    const uint32_t query_base = shared_address(shared_query);
#pragma unroll
    for (int part = 0; part < (kIsWide ? 2 : 1); ++part) {
      const int warp_key = kIsNarrow ? kKeys * warp : kKeys * part;
      float scores[kBlocks][kKeys / 8][4] = {};
#pragma unroll
      for (int i = 0; i < kDimSteps; ++i) {
        uint32_t q[kBlocks][4];
        if constexpr (kIsWide) {
#pragma unroll
          for (int m = 0; m < kBlocks; ++m) {
            const int row = warp_row + 16 * m + lane / 8 % 2 * 8 + lane % 8;
            ldmatrix(q[m], query_base + 2 * piece_offset<kDim>(row, 2 * i + lane / 16));
          }
        }
#pragma unroll
        for (int n = 0; n < kKeys / 16; ++n) {
          uint32_t k[4];
          const int row = warp_key + 16 * n + lane / 16 * 8 + lane % 8;
          ldmatrix(k, key_base + 2 * piece_offset<kDim>(row, 2 * i + lane / 8 % 2));
#pragma unroll
          for (int m = 0; m < kBlocks; ++m) {
            mma(scores[m][2 * n], kIsWide ? q[m] : query[kIsWide ? 0 : i], k[0], k[1], E{});
            mma(scores[m][2 * n + 1], kIsWide ? q[m] : query[kIsWide ? 0 : i], k[2], k[3], E{});
          }
        }
      }

#pragma unroll
      for (int m = 0; m < kBlocks; ++m) {
        // Scores in units of log 2; masked, unless every row admits every key.
        if (is_plain) {
#pragma unroll
          for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              scores[m][n][i] *= scale_log2;
            }
          }
        } else {
#pragma unroll
          for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              const int key_idx = warp_key + 8 * n + lane % 4 * 2 + i % 2;
              const int key = key_begin + key_idx;
              const int pos = position[m][i / 2];
              float x = scores[m][n][i] * c.scale;
              if (c.softcap > 0.0f) {
                x = c.softcap * tanhf(x / c.softcap);
              }
              const bool in_range = (is_whole || key < unit.key_end) && (!c.is_causal || key <= pos) &&
                                    (c.window == 0 || key > pos - static_cast<int>(c.window));
              scores[m][n][i] = in_range && shared.admitted[stage][key_idx] != 0 ? x * kLog2e : paged::kEmpty;
            }
          }
        }
        float shrink[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float tile_largest = paged::kEmpty;
#pragma unroll
          for (int n = 0; n < kKeys / 8; ++n) {
            tile_largest = fmaxf(tile_largest, fmaxf(scores[m][n][2 * half], scores[m][n][2 * half + 1]));
          }
          tile_largest = fmaxf(tile_largest, __shfl_xor_sync(0xffffffffu, tile_largest, 1));
          tile_largest = fmaxf(tile_largest, __shfl_xor_sync(0xffffffffu, tile_largest, 2));
          const float next = fmaxf(largest[m][half], tile_largest);
          shrink[half] = fast_exp2(largest[m][half] - next);
          largest[m][half] = next;
          sum[m][half] *= shrink[half];
        }
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float x = scores[m][n][i];
            const float weight = is_plain || x > paged::kEmpty ? fast_exp2(x - largest[m][i / 2]) : 0.0f;
            scores[m][n][i] = weight;
            sum[m][i / 2] += weight;
          }
        }
        if (__any_sync(0xffffffffu, shrink[0] != 1.0f || shrink[1] != 1.0f)) {  // maxima move seldom after a while
#pragma unroll
          for (int d = 0; d < kDim / 8; ++d) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              out[m][d][i] *= shrink[i / 2];
            }
          }
        }
      }

#pragma unroll
      for (int n = 0; n < kKeys / 16; ++n) {
        uint32_t weights[kBlocks][4];
#pragma unroll
        for (int m = 0; m < kBlocks; ++m) {
          const auto& w = scores[m];
          weights[m][0] = pack(w[2 * n][0], w[2 * n][1], E{});
          weights[m][1] = pack(w[2 * n][2], w[2 * n][3], E{});
          weights[m][2] = pack(w[2 * n + 1][0], w[2 * n + 1][1], E{});
          weights[m][3] = pack(w[2 * n + 1][2], w[2 * n + 1][3], E{});
        }
#pragma unroll
        for (int d = 0; d < kDim / 16; ++d) {
          uint32_t v[4];
          const int row = warp_key + 16 * n + lane / 8 % 2 * 8 + lane % 8;
          ldmatrix_trans(v, value_base + 2 * piece_offset<kDim>(row, 2 * d + lane / 16));
#pragma unroll
          for (int m = 0; m < kBlocks; ++m) {
            mma(out[m][2 * d], weights[m], v[0], v[1], E{});
            mma(out[m][2 * d + 1], weights[m], v[2], v[3], E{});
          }
        }
      }
    }
    __syncthreads();
  }
  copy_wait<0>();

#pragma unroll
  for (int m = 0; m < kBlocks; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      sum[m][half] += __shfl_xor_sync(0xffffffffu, sum[m][half], 1);
      sum[m][half] += __shfl_xor_sync(0xffffffffu, sum[m][half], 2);
    }
  }

  const int64_t split_begin = static_cast<int64_t>(blockIdx.z) * c.num_tokens * c.num_heads;
  if constexpr (kIsNarrow) {
    // The warps' keys together, in the order of the warps.
    auto* all_out = reinterpret_cast<float*>(memory);  // [warps, 16, kDim]
    auto* all = reinterpret_cast<float2*>(all_out + kAttendWarps * 16 * kDim);
    __syncthreads();
#pragma unroll
    for (int d = 0; d < kDim / 8; ++d) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        all_out[(warp * 16 + lane / 4 + i / 2 * 8) * kDim + 8 * d + lane % 4 * 2 + i % 2] = out[0][d][i];
      }
    }
    if (lane % 4 == 0) {
      all[warp * 16 + lane / 4] = make_float2(largest[0][0], sum[0][0]);
      all[warp * 16 + lane / 4 + 8] = make_float2(largest[0][1], sum[0][1]);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < unit.num_rows * kDim; i += blockDim.x) {
      const int r = i / kDim;
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
      const int64_t idx = split_begin + query_row(r);
      p.partial_out[idx * kDim + i % kDim] = value;
      if (i % kDim == 0) {
        p.partial[idx] = make_float2(whole <= paged::kEmpty ? paged::kEmpty : whole / kLog2e, weight);
      }
    }
  } else {
#pragma unroll
    for (int m = 0; m < kBlocks; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int r = warp_row + 16 * m + lane / 4 + 8 * half;
        if (r >= unit.num_rows) {
          continue;
        }
        const int64_t idx = split_begin + query_row(r);
#pragma unroll
        for (int d = 0; d < kDim / 8; ++d) {
          *reinterpret_cast<float2*>(p.partial_out + idx * kDim + 8 * d + lane % 4 * 2) =
              make_float2(out[m][d][2 * half], out[m][d][2 * half + 1]);
        }
        if (lane % 4 == 0) {
          const float own = largest[m][half];
          p.partial[idx] = make_float2(own <= paged::kEmpty ? paged::kEmpty : own / kLog2e, sum[m][half]);
        }
      }
    }
  }
}

template <class E, int kDim>
void launch_attend(const AttentionParams& p, Stream stream) {
  const paged::Problem& c = p.call;
  const auto run = [&]<AttendShape kShape>() {
    constexpr size_t kMerge = kAttendWarps * 16 * (kDim * sizeof(float) + sizeof(float2));
    constexpr size_t kQuery = kShape == AttendShape::kWide ? rows_of(kShape) * kDim * sizeof(E) : 0;
    constexpr size_t kShared = std::max(sizeof(AttendShared<E, kDim>) + kQuery, kMerge);
    constexpr int64_t kRows = rows_of(kShape);
    const int64_t num_rows = c.num_tokens * c.group;
    const int64_t units = std::min(num_rows / kRows + std::min(c.num_tokens, c.num_seqs), num_rows);
    const dim3 grid(static_cast<unsigned>(units), static_cast<unsigned>(c.num_kv_heads),
                    static_cast<unsigned>(p.num_splits));
    launch(paged_attention_attend_kernel<E, kDim, kShape>, grid, dim3(kAttendWarps * kWarp), kShared, stream, p);
  };
  const int64_t rows_of_seq = c.num_tokens * c.group / std::max<int64_t>(1, c.num_seqs);  // on average
  if (rows_of_seq <= rows_of(AttendShape::kNarrow)) {
    run.template operator()<AttendShape::kNarrow>();
    return;
  }
  if constexpr (kDim <= 128) {  // 256 channels of 32 rows are more than a thread's registers
    if (rows_of_seq > rows_of(AttendShape::kMiddle)) {
      run.template operator()<AttendShape::kWide>();
      return;
    }
  }
  run.template operator()<AttendShape::kMiddle>();
}

}  // namespace shoal::cuda
