// Tiles of weights in registers (layouts: matmul_cuda.h), as the operand a of mma.
//
// Codes become bf16 numbers by and-or with the bits of 128.0, whose mantissa ends at one: 128 + code, two at a time. The
// 128 is taken out again where sums are scaled, or by one exact subtraction.
#pragma once

#include "shoal/cuda/mma.cuh"
#include "shoal/ops/matmul/matmul_cuda.h"

namespace shoal::cuda {

constexpr uint32_t kMagic = 0x43004300u;      // bf16 pair of 128: steps of 1
constexpr uint32_t kHighMagic = 0x45004500u;  // of 2048: steps of 16
constexpr int kGroupsOfChunk = 4;             // groups of 32 columns

// One lane's part of eight rows of a tile, every group of the chunk.
template <Codes kCodes>
struct TileRegs {
  static constexpr bool kHasFour = kCodes != Codes::kU2 && kCodes != Codes::kU3;
  static constexpr bool kHasTwo = kCodes == Codes::kU2 || kCodes == Codes::kU3 || kCodes == Codes::kU6;
  static constexpr bool kHasOne = kCodes == Codes::kU3 || kCodes == Codes::kU5;
  static constexpr int kFourBytes = kHasFour ? 1024 : 0;
  static constexpr int kTwoBytes = kHasTwo ? 512 : 0;
  // What the products of a chunk's codes have too much, times the sum of the activations.
  static constexpr int kExcess = kCodes == Codes::kE2M1 ? 0 : kCodes == Codes::kU8 ? 128 + 2048 : 128;

  uint32_t four[4], two[2], one, high[4];

  // `half`: rows 0-7 or 8-15.
  __device__ void load(const std::byte* tile, int half, int lane) {
    if constexpr (kHasFour) {
      to_words(four, load_once(tile + 512 * half + 16 * lane));
    }
    if constexpr (kHasTwo) {
      const uint2 v = __ldg(reinterpret_cast<const uint2*>(tile + kFourBytes + 256 * half + 8 * lane));
      two[0] = v.x;
      two[1] = v.y;
    }
    if constexpr (kHasOne) {
      one = __ldg(reinterpret_cast<const uint32_t*>(tile + kFourBytes + kTwoBytes + 128 * half + 4 * lane));
    }
    if constexpr (kCodes == Codes::kU8) {
      to_words(high, load_once(tile + 1024 + 512 * half + 16 * lane));
    }
  }

  // Pair p of a group, as bf16 128 + code (kU8: the low four bits; kE2M1: the value itself). Indices are constants.
  __device__ uint32_t pair(int group, int p) const {
    if constexpr (kCodes == Codes::kE2M1) {
      return e2m1(four[group] >> (4 * p));
    }
    uint32_t bits = kMagic;
    if constexpr (kHasTwo) {
      const int t = 4 * (group % 2) + p;
      bits = kCodes == Codes::kU6 ? and_or(shifted(two[group / 2], 2 * t - 4), 0x00300030u, bits)
                                  : and_or(shifted(two[group / 2], 2 * t), 0x00030003u, bits);
    }
    if constexpr (kHasOne) {
      const int t = 4 * group + p;
      bits = kCodes == Codes::kU5 ? and_or(shifted(one, t - 4), 0x00100010u, bits)
                                  : and_or(shifted(one, t - 2), 0x00040004u, bits);
    }
    if constexpr (kHasFour) {
      bits = and_or(shifted(four[group], 4 * p), 0x000f000fu, bits);
    }
    return bits;
  }
  // kU8: 2048 + 16 * the high four bits.
  __device__ uint32_t high_pair(int group, int p) const {
    return and_or(shifted(high[group], 4 * p), 0x000f000fu, kHighMagic);
  }

 private:
  __device__ static uint32_t shifted(uint32_t x, int right) { return right >= 0 ? x >> right : x << -right; }
  __device__ static void to_words(uint32_t (&words)[4], uint4 v) {
    words[0] = v.x;
    words[1] = v.y;
    words[2] = v.z;
    words[3] = v.w;
  }
  // Codes in bits 0-3 and 16-19. Magnitudes 0, .5, 1, 1.5, 2, 3, 4, 6 by byte permutation, then the sign.
  __device__ static uint32_t e2m1(uint32_t codes) {
    const uint32_t picks = (codes & 0x7u) | ((codes >> 12) & 0x70u);  // nibble 0: the lower code, nibble 1: the upper
    const uint32_t high = __byte_perm(0x3f3f3f00u, 0x40404040u, picks);
    const uint32_t low = __byte_perm(0xc0800000u, 0xc0804000u, picks);
    return __byte_perm(low, high, 0x5140u) | ((codes << 12) & 0x80008000u);
  }
};

template <>
struct TileRegs<Codes::kBF16> {
  static constexpr int kExcess = 0;
  uint32_t values[4][4];
  __device__ void load(const std::byte* tile, int half, int lane) {
#pragma unroll
    for (int group = 0; group < kGroupsOfChunk; ++group) {
      const uint4 v = load_once(tile + 1024 * group + 512 * half + 16 * lane);
      values[group][0] = v.x;
      values[group][1] = v.y;
      values[group][2] = v.z;
      values[group][3] = v.w;
    }
  }
  __device__ uint32_t pair(int group, int p) const { return values[group][p]; }
};

// Scales of one row of a tile: 128 / group of them, or pairs.
template <int kGroup, bool kHasMin>
struct ScaleRegs {
  static constexpr int kCount = kChunk / kGroup;
  static constexpr int kWords = kCount * (kHasMin ? 2 : 1) / 2;
  uint32_t words[kWords];

  __device__ void load(const std::byte* tile, int row) {
    const std::byte* from = tile + row * (4 * kWords);
#pragma unroll
    for (int i = 0; i < kWords; i += 2) {
      const uint2 v = __ldg(reinterpret_cast<const uint2*>(from + 4 * i));
      words[i] = v.x;
      words[i + 1] = v.y;
    }
  }
  __device__ float scale(int idx) const { return __half2float(half_of(kHasMin ? 2 * idx : idx)); }
  __device__ float min(int idx) const { return __half2float(half_of(2 * idx + 1)); }

 private:
  __device__ __half half_of(int idx) const {
    return __ushort_as_half(static_cast<unsigned short>(words[idx / 2] >> (16 * (idx % 2))));
  }
};

}  // namespace shoal::cuda
