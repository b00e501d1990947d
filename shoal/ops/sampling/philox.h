// Philox4x32-10, a counter-based random generator: the same key and counter give the same 128 bits, in any order.
// Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3".
#pragma once

#include <array>
#include <cstdint>

namespace shoal {

constexpr std::array<uint32_t, 4> philox4x32(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xd2511f53u} * counter[0];
    const uint64_t b = uint64_t{0xcd9e8d57u} * counter[2];
    counter = {static_cast<uint32_t>(b >> 32) ^ counter[1] ^ key[0], static_cast<uint32_t>(b),
               static_cast<uint32_t>(a >> 32) ^ counter[3] ^ key[1], static_cast<uint32_t>(a)};
    key = {key[0] + 0x9e3779b9u, key[1] + 0xbb67ae85u};
  }
  return counter;
}

// Uniform in (0, 1), neither end included: the middles of 2^52 equal intervals.
constexpr double philox_uniform(uint64_t seed, uint64_t step) {
  const auto bits = philox4x32({static_cast<uint32_t>(step), static_cast<uint32_t>(step >> 32), 0, 0},
                               {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)});
  const uint64_t high = ((uint64_t{bits[0]} << 32) | bits[1]) >> 12;  // 52 bits: one is left for the middle
  return (static_cast<double>(high) + 0.5) * 0x1p-52;
}

}  // namespace shoal
