// Reading and writing the fields of packed blocks. Everything is by memcpy: block sizes such as 18, 34 and 210 bytes
// leave no alignment to rely on.
//
// What `decode` uses is force-inlined: kernels compiled for several instruction sets include it, and the linker must
// not keep the copy of the widest one.
#pragma once

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "shoal/base/float_bits.h"

#define SHOAL_BLOCK_INLINE [[gnu::always_inline]] SHOAL_HOST_DEVICE inline

static_assert(std::endian::native == std::endian::little, "blocks are little-endian and read as they are");

namespace shoal::block {

SHOAL_BLOCK_INLINE uint32_t u8(const std::byte* p) { return static_cast<uint32_t>(*p); }

SHOAL_BLOCK_INLINE int32_t i8(const std::byte* p) { return static_cast<int8_t>(*p); }

SHOAL_BLOCK_INLINE uint32_t u16(const std::byte* p) {
  uint16_t value = 0;
  std::memcpy(&value, p, sizeof(value));
  return value;
}

SHOAL_BLOCK_INLINE uint32_t u32(const std::byte* p) {
  uint32_t value = 0;
  std::memcpy(&value, p, sizeof(value));
  return value;
}

// f16 without branches, so that loops over it vectorise (selection by mask: compilers turn `?:` over a float product
// into a jump); the same values as f16_to_f32.
SHOAL_BLOCK_INLINE float f16(const std::byte* p) {
  const uint32_t h = u16(p);
  const uint32_t exponent = h & 0x7c00u;
  const float subnormal = static_cast<float>(static_cast<int32_t>(h & 0x3ffu)) * 0x1p-24f;
  const uint32_t is_subnormal = 0u - ((exponent - 1u) >> 31);
  const uint32_t is_special = 0u - ((exponent + 0x400u) >> 15);  // infinity, NaN
  const uint32_t normal = ((h & 0x7fffu) << 13) + (112u << 23) + (is_special & (112u << 23));
  const uint32_t magnitude = (normal & ~is_subnormal) | (std::bit_cast<uint32_t>(subnormal) & is_subnormal);
  return std::bit_cast<float>(magnitude | ((h & 0x8000u) << 16));
}

// Field of an f16 scale. Beyond the range it saturates: an infinite scale would turn zeros into NaN.
inline void store_f16(std::byte* p, float value) {
  const float limited = value > 65504.0f ? 65504.0f : (value < -65504.0f ? -65504.0f : value);
  const uint16_t bits = f32_to_f16(limited);
  std::memcpy(p, &bits, sizeof(bits));
}

// An f16 scale as `decode` will read it back.
inline float rounded_f16(float value) {
  std::byte bytes[2];
  store_f16(bytes, value);
  return f16(bytes);
}

inline void store_u16(std::byte* p, uint32_t value) {
  const uint16_t bits = static_cast<uint16_t>(value);
  std::memcpy(p, &bits, sizeof(bits));
}

inline void store_u32(std::byte* p, uint32_t value) { std::memcpy(p, &value, sizeof(value)); }

inline std::byte to_byte(uint32_t value) { return static_cast<std::byte>(value & 0xffu); }

// 1 / scale, or 0 where that is no finite number: a block of zeros (or of values too small for any scale) gets code 0.
inline float inverse(float scale) {
  const float result = 1.0f / scale;
  return std::fabs(result) <= 0x1.fffffep127f ? result : 0.0f;
}

// Clamped to [low, high], then cut towards zero. NaN, which an overflow inside `encode` can make, gives `low`.
inline int32_t to_int(float value, int32_t low, int32_t high) {
  const float limited = value > static_cast<float>(low) ? value : static_cast<float>(low);
  return static_cast<int32_t>(limited < static_cast<float>(high) ? limited : static_cast<float>(high));
}

}  // namespace shoal::block
