// Small floats as bits: f16, bf16, fp8 e4m3fn, e8m0. Conversions to narrower types round to nearest even.
//
// Plain integer arithmetic, so that host and device, every compiler and every instruction set give the same bits.
// Vector code uses hardware conversions, which agree for all finite values.
#pragma once

#include <bit>
#include <cstdint>

#if defined(__CUDACC__)
#define SHOAL_HOST_DEVICE __host__ __device__
#else
#define SHOAL_HOST_DEVICE
#endif

namespace shoal {

SHOAL_HOST_DEVICE constexpr float f16_to_f32(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
  const uint32_t exponent = (h >> 10) & 0x1fu;
  uint32_t mantissa = h & 0x3ffu;
  if (exponent == 31) {
    return std::bit_cast<float>(sign | 0x7f800000u | (mantissa << 13));
  }
  if (exponent != 0) {
    return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (mantissa << 13));
  }
  // Subnormal or zero: mantissa * 2^-24 is exact in f32.
  const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
  return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(magnitude));
}

SHOAL_HOST_DEVICE constexpr uint16_t f32_to_f16(float f) {
  const uint32_t bits = std::bit_cast<uint32_t>(f);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) {  // NaN stays NaN: quiet, upper payload kept
    return static_cast<uint16_t>(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu));
  }
  if (magnitude >= 0x477ff000u) {  // rounds to or beyond 65520: infinity
    return static_cast<uint16_t>(sign | 0x7c00u);
  }
  if (magnitude < 0x38800000u) {  // below 2^-14: subnormal; adding 0.5 aligns the mantissa and rounds to nearest even
    const float aligned = std::bit_cast<float>(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(aligned) - 0x3f000000u));
  }
  const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  return static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
}

SHOAL_HOST_DEVICE constexpr float bf16_to_f32(uint16_t b) {
  return std::bit_cast<float>(static_cast<uint32_t>(b) << 16);
}

SHOAL_HOST_DEVICE constexpr uint16_t f32_to_bf16(float f) {
  const uint32_t bits = std::bit_cast<uint32_t>(f);
  if ((bits & 0x7fffffffu) > 0x7f800000u) {
    return static_cast<uint16_t>((bits >> 16) | 0x0040u);
  }
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// FP8 E4M3FN: sign, 4 exponent bits (bias 7), 3 mantissa bits; no infinities, 0x7f and 0xff are NaN, largest 448.
SHOAL_HOST_DEVICE constexpr float e4m3_to_f32(uint8_t v) {
  const uint32_t sign = static_cast<uint32_t>(v & 0x80u) << 24;
  const uint32_t exponent = (v >> 3) & 0xfu;
  const uint32_t mantissa = v & 7u;
  if ((v & 0x7fu) == 0x7fu) {
    return std::bit_cast<float>(sign | 0x7fc00000u);
  }
  if (exponent == 0) {
    const float magnitude = static_cast<float>(mantissa) * 0x1p-9f;
    return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(magnitude));
  }
  return std::bit_cast<float>(sign | ((exponent + 120) << 23) | (mantissa << 20));
}

// Saturates beyond 448 (infinities too); NaN becomes 0x7f with the sign kept.
SHOAL_HOST_DEVICE constexpr uint8_t f32_to_e4m3(float f) {
  const uint32_t bits = std::bit_cast<uint32_t>(f);
  const uint8_t sign = static_cast<uint8_t>((bits >> 24) & 0x80u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) {
    return static_cast<uint8_t>(sign | 0x7fu);
  }
  if (magnitude >= 0x43e00000u) {  // 448 and above
    return static_cast<uint8_t>(sign | 0x7eu);
  }
  if (magnitude < 0x3c800000u) {  // below 2^-6: multiples of 2^-9; the sum's last mantissa bit is worth 2^-9
    const float aligned = std::bit_cast<float>(magnitude) + 0x1p14f;
    return static_cast<uint8_t>(sign | (std::bit_cast<uint32_t>(aligned) - 0x46800000u));
  }
  const uint32_t rounded = magnitude + 0x7ffffu + ((magnitude >> 20) & 1u);
  const uint32_t code = (rounded - (120u << 23)) >> 20;
  return static_cast<uint8_t>(sign | (code > 0x7eu ? 0x7eu : code));
}

// E8M0, the block scale of the MX formats: 2^(v - 127); 0 is 2^-127 (OCP), 255 is NaN.
SHOAL_HOST_DEVICE constexpr float e8m0_to_f32(uint8_t v) {
  if (v == 255) {
    return std::bit_cast<float>(0x7fc00000u);
  }
  return v == 0 ? std::bit_cast<float>(0x00400000u) : std::bit_cast<float>(static_cast<uint32_t>(v) << 23);
}

}  // namespace shoal
