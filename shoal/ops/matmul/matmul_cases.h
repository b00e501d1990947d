// Random weights of every format and the shapes of test and bench.
#pragma once

#include <cstring>
#include <vector>

#include "shoal/base/float_bits.h"
#include "shoal/quant/quant_matrix.h"
#include "testkit/testkit.h"

namespace shoal::testkit {

enum class Codes { kRandom, kLowest, kHighest };  // all code bits random, clear or set; scales stay random

// Owns the bytes of a matrix made of random blocks: codes of any value, scales of a size that gives weights near 1.
class RandomMatrix {
 public:
  RandomMatrix(Format format, int64_t n, int64_t k, uint64_t seed, Codes codes = Codes::kRandom)
      : bytes_(static_cast<size_t>(n * row_bytes(format, k))) {
    Random random(seed);
    for (std::byte& byte : bytes_) {
      byte = codes == Codes::kRandom    ? static_cast<std::byte>(random.bits())
             : codes == Codes::kHighest ? std::byte{0xff}
                                        : std::byte{0};
    }
    const auto block_bytes = static_cast<size_t>(info(format).block_bytes);
    for (size_t at = 0; at < bytes_.size(); at += block_bytes) {
      set_scales(format, at, random);
    }
    matrix_.format = format;
    matrix_.n = n;
    matrix_.k = k;
    matrix_.codes = bytes_.data();
  }
  const QuantMatrix& matrix() const { return matrix_; }

 private:
  void put(size_t at, uint16_t value) { std::memcpy(bytes_.data() + at, &value, 2); }
  void put_f16(size_t at, float value) { put(at, f32_to_f16(value)); }

  void set_scales(Format format, size_t at, Random& random) {
    const float scale = random.uniform(0.5f, 1.5f) * (random.bits() % 4 == 0 ? -1.0f : 1.0f);
    const float offset = random.uniform(-1.0f, 1.0f);
    switch (format) {
      case Format::kF32: {
        const float value = random.normal();
        std::memcpy(bytes_.data() + at, &value, 4);
        return;
      }
      case Format::kF16: put_f16(at, random.normal()); return;
      case Format::kBF16: put(at, f32_to_bf16(random.normal())); return;
      case Format::kQ4_1:
      case Format::kQ5_1: put_f16(at + 2, offset); [[fallthrough]];
      case Format::kQ4_0:
      case Format::kQ5_0: put_f16(at, scale / 16); return;
      case Format::kQ8_0:
      case Format::kIQ4_NL: put_f16(at, scale / 128); return;
      case Format::kQ2_K:
        put_f16(at + 80, scale / 32);
        put_f16(at + 82, offset / 16);
        return;
      case Format::kQ3_K: put_f16(at + 108, scale / 64); return;
      case Format::kQ4_K:
      case Format::kQ5_K:
        put_f16(at, scale / 1024);
        put_f16(at + 2, offset / 64);
        return;
      case Format::kQ6_K: put_f16(at + 208, scale / 2048); return;
      case Format::kIQ4_XS: put_f16(at, scale / 2048); return;
      case Format::kIQ2_XXS:
      case Format::kIQ2_XS:
      case Format::kIQ2_S:
      case Format::kIQ3_XXS:
      case Format::kIQ3_S: put_f16(at, scale / 128); return;
      case Format::kGGUF_MXFP4: bytes_[at] = static_cast<std::byte>(124 + random.bits() % 4); return;
      case Format::kGGUF_NVFP4:
        for (size_t i = 0; i < 4; ++i) {
          bytes_[at + i] = static_cast<std::byte>(0x28 + random.bits() % 16);
        }
        return;
      default: return;  // scales stand apart
    }
  }

  std::vector<std::byte> bytes_;
  QuantMatrix matrix_;
};

inline std::vector<Format> all_formats() {
  return {
#define SHOAL_FORMAT(Struct, header) Format::k##Struct,
#include "shoal/quant/formats.def"
#undef SHOAL_FORMAT
  };
}

}  // namespace shoal::testkit
