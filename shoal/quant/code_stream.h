// Codes of 1 to 8 bits as an LSB-first stream: code i occupies bits [bits * i, bits * (i + 1)) of the row, bit 0 being
// the lowest of byte 0. Codes of 3 bits cross bytes: 0..7 are 88 c6 fa.
#pragma once

#include <cstddef>
#include <cstdint>

namespace shoal {

inline uint32_t read_code(const std::byte* row, int bits, int64_t idx) {
  const int64_t bit = idx * bits;
  const int64_t byte = bit / 8;
  const int shift = static_cast<int>(bit % 8);
  uint32_t window = static_cast<uint32_t>(row[byte]);
  if (shift + bits > 8) {  // only then: the next byte may not exist
    window |= static_cast<uint32_t>(row[byte + 1]) << 8;
  }
  return (window >> shift) & ((1u << bits) - 1u);
}

// Sets bits that are zero so far.
inline void write_code(std::byte* row, int bits, int64_t idx, uint32_t code) {
  const int64_t bit = idx * bits;
  const int64_t byte = bit / 8;
  const int shift = static_cast<int>(bit % 8);
  const uint32_t window = code << shift;
  row[byte] |= static_cast<std::byte>(window & 0xffu);
  if (shift + bits > 8) {
    row[byte + 1] |= static_cast<std::byte>(window >> 8);
  }
}

// The bits of the last byte of a row that no code uses.
inline uint32_t pad_bits(const std::byte* row, int bits, int64_t num_codes) {
  const int used = static_cast<int>(num_codes * bits % 8);
  return used == 0 ? 0u : static_cast<uint32_t>(row[num_codes * bits / 8]) >> used;
}

}  // namespace shoal
