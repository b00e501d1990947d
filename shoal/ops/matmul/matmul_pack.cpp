#include "shoal/ops/matmul/matmul_pack.h"

#include <algorithm>
#include <cstring>

#include "shoal/base/checked.h"
#include "shoal/base/float_bits.h"
#include "shoal/cpu/thread_pool.h"
#include "shoal/quant/block.h"
#include "shoal/quant/gguf_mxfp4.h"
#include "shoal/quant/k_scales.h"

namespace shoal {

void unpack_codes(Format format, const std::byte* block, int sub, uint8_t* codes) {
  const auto nibbles = [codes](const std::byte* from) {
    for (int i = 0; i < 16; ++i) {
      codes[i] = static_cast<uint8_t>(from[i]) & 15;
      codes[i + 16] = static_cast<uint8_t>(from[i]) >> 4;
    }
  };
  const auto fifth_bits = [codes](const std::byte* from) {
    const uint32_t bits = block::u32(from);
    for (int i = 0; i < 32; ++i) {
      codes[i] = static_cast<uint8_t>(codes[i] | (bits >> i & 1) << 4);
    }
  };
  // K formats: 64 values in 32 bytes, the first 32 in the low nibbles.
  const auto k_nibbles = [codes, sub](const std::byte* from) {
    for (int i = 0; i < 32; ++i) {
      codes[i] = static_cast<uint8_t>(static_cast<uint8_t>(from[32 * (sub / 2) + i]) >> (4 * (sub % 2)) & 15);
    }
  };
  // The same in 32 bytes for 128 values, two bits each.
  const auto k_crumbs = [codes, sub](const std::byte* from) {
    for (int i = 0; i < 32; ++i) {
      codes[i] = static_cast<uint8_t>(static_cast<uint8_t>(from[32 * (sub / 4) + i]) >> (2 * (sub % 4)) & 3);
    }
  };
  switch (format) {
    case Format::kQ2_K: k_crumbs(block + 16); return;
    case Format::kQ3_K:
      k_crumbs(block + 32);
      for (int i = 0; i < 32; ++i) {
        codes[i] = static_cast<uint8_t>(codes[i] | (block::u8(block + i) >> sub & 1) << 2);
      }
      return;
    case Format::kGGUF_MXFP4: nibbles(block + 1); return;
    case Format::kQ4_0:
    case Format::kIQ4_NL: nibbles(block + 2); return;
    case Format::kQ4_1: nibbles(block + 4); return;
    case Format::kIQ4_XS: nibbles(block + 8 + 16 * sub); return;
    case Format::kQ5_0:
      nibbles(block + 6);
      fifth_bits(block + 2);
      return;
    case Format::kQ5_1:
      nibbles(block + 8);
      fifth_bits(block + 4);
      return;
    case Format::kQ8_0: std::memcpy(codes, block + 2, 32); return;
    case Format::kQ4_K: k_nibbles(block + 16); return;
    case Format::kQ5_K:
      k_nibbles(block + 48);
      for (int i = 0; i < 32; ++i) {
        codes[i] = static_cast<uint8_t>(codes[i] | (block::u8(block + 16 + i) >> sub & 1) << 4);
      }
      return;
    case Format::kQ6_K: {
      const std::byte* low = block + 64 * (sub / 4) + 32 * (sub % 2);
      const std::byte* high = block + 128 + 32 * (sub / 4);
      const int low_shift = sub % 4 < 2 ? 0 : 4;
      const int high_shift = 2 * (sub % 4);
      for (int i = 0; i < 32; ++i) {
        codes[i] =
            static_cast<uint8_t>((block::u8(low + i) >> low_shift & 15) | (block::u8(high + i) >> high_shift & 3) << 4);
      }
      return;
    }
    default: fail(ErrorCode::kInternal, "matmul: no integer layout for ", info(format).name);
  }
}

uint32_t q3_k_scale(const std::byte* block, int i) {
  const uint32_t low = block::u8(block + 96 + i % 8) >> (i < 8 ? 0 : 4) & 15;
  const uint32_t high = block::u8(block + 104 + i % 4) >> (2 * (i / 4)) & 3;
  return (low | high << 4) - 32;
}

namespace {

// [k, group] of T: value i of every row of the group side by side.
template <class T>
void pack_plain_group(const MatmulPart& part, int64_t k, int group, int64_t group_idx) {
  T* to = reinterpret_cast<T*>(part.packed.data() + group_idx * static_cast<int64_t>(part.group_bytes));
  for (int lane = 0; lane < group; ++lane) {
    const int64_t n_idx = group_idx * group + lane;
    const std::byte* from = n_idx < part.n ? part.raw.row(n_idx) : nullptr;
    for (int64_t i = 0; i < k; ++i) {
      T value{};
      if (from != nullptr) {
        std::memcpy(&value, from + i * static_cast<int64_t>(sizeof(T)), sizeof(T));
      }
      to[i * group + lane] = value;
    }
  }
}

// Codes of a row's block at its lane: 4 bytes a vector.
void put_codes(const IntegerLayout& layout, const uint8_t* codes, int group, std::byte* lane) {
  const int vector = 4 * group;
  if (layout.low_bits == 8) {
    for (int j = 0; j < 8; ++j) {
      std::memcpy(lane + j * vector, codes + 4 * j, 4);
    }
    return;
  }
  const int num_low = layout.low_bits;  // vectors of low bits; each holds 8 / low_bits steps
  uint8_t low[16] = {};
  for (int i = 0; i < kQuantBlock; ++i) {
    const int shift = i / (4 * num_low) * layout.low_bits;
    uint8_t& to = low[i % (4 * num_low)];
    to = static_cast<uint8_t>(to | (codes[i] & ((1 << layout.low_bits) - 1)) << shift);
  }
  for (int j = 0; j < num_low; ++j) {
    std::memcpy(lane + j * vector, low + 4 * j, 4);
  }
  if (layout.high_bits == 0) {
    return;
  }
  uint8_t high[8] = {};
  for (int j = 0; j < 8; ++j) {
    for (int i = 0; i < 4; ++i) {
      const int bits = codes[4 * j + i] >> layout.low_bits;
      uint8_t& to = high[layout.high_bits == 1 ? i : j / 4 * 4 + i];
      to = static_cast<uint8_t>(to | bits << (layout.high_bits == 1 ? j : 2 * (j % 4)));
    }
  }
  for (int v = 0; v < layout.high_bits; ++v) {
    std::memcpy(lane + (num_low + v) * vector, high + 4 * v, 4);
  }
}

// The scales of one stored block at its lane; `at` is where the scales of this block (or of its 8 sub-blocks) begin.
void put_scales(Format format, const std::byte* block, int group, int lane, std::byte* at) {
  const auto put_f16 = [&](int idx, const std::byte* from) { std::memcpy(at + 2 * (idx * group + lane), from, 2); };
  const auto put_pair = [&](int num_f16, int sub, uint32_t first, uint32_t second) {
    std::byte* pair = at + 2 * num_f16 * group + 2 * (sub * group + lane);
    pair[0] = static_cast<std::byte>(first);
    pair[1] = static_cast<std::byte>(second);
  };
  switch (format) {
    case Format::kQ4_K:
    case Format::kQ5_K:
      put_f16(0, block);
      put_f16(1, block + 2);
      for (int sub = 0; sub < 8; ++sub) {
        put_pair(2, sub, block::k_scale(block + 4, sub), block::k_min(block + 4, sub));
      }
      return;
    case Format::kQ2_K:
      put_f16(0, block + 80);
      put_f16(1, block + 82);
      for (int sub = 0; sub < 8; ++sub) {
        put_pair(2, sub, block::u8(block + 2 * sub), block::u8(block + 2 * sub + 1));
      }
      return;
    case Format::kQ3_K:
      put_f16(0, block + 108);
      for (int sub = 0; sub < 8; ++sub) {
        put_pair(1, sub, q3_k_scale(block, 2 * sub), q3_k_scale(block, 2 * sub + 1));
      }
      return;
    case Format::kQ6_K:
      put_f16(0, block + 208);
      for (int sub = 0; sub < 8; ++sub) {
        put_pair(1, sub, block::u8(block + 192 + 2 * sub), block::u8(block + 193 + 2 * sub));
      }
      return;
    case Format::kIQ4_XS:
      put_f16(0, block);
      for (int sub = 0; sub < 8; ++sub) {
        const uint32_t low = block::u8(block + 4 + sub / 2) >> (4 * (sub % 2)) & 15;
        const uint32_t scale = (low | (block::u16(block + 2) >> (2 * sub) & 3) << 4) - 32;
        put_pair(1, sub, scale, scale);
      }
      return;
    case Format::kGGUF_MXFP4: {
      const uint16_t scale = f32_to_f16(block::e8m0_halved(block::u8(block)));
      std::memcpy(at + 2 * lane, &scale, 2);
      return;
    }
    case Format::kQ4_1:
    case Format::kQ5_1: put_f16(1, block + 2); [[fallthrough]];
    default: put_f16(0, block); return;
  }
}

void pack_integer_group(const MatmulPart& part, const IntegerLayout& layout, int64_t k, int group, int64_t group_idx) {
  std::byte* to = part.packed.data() + group_idx * static_cast<int64_t>(part.group_bytes);
  const FormatInfo& format = info(part.raw.format);
  const int num_subs = format.block_size / kQuantBlock;
  const int64_t num_rows = std::min<int64_t>(group, part.n - group_idx * group);
  if (num_rows < group) {
    std::memset(to, 0, part.group_bytes);
  }
  std::byte* scales = to + code_region_bytes(layout, k, group);
  uint8_t codes[kQuantBlock];
  // Blocks outside, rows inside: writes stay within a few lines, reads advance in `group` streams.
  for (int64_t b = 0; b < k / format.block_size; ++b) {
    for (int lane = 0; lane < num_rows; ++lane) {
      const std::byte* block = part.raw.row(group_idx * group + lane) + b * format.block_bytes;
      for (int sub = 0; sub < num_subs; ++sub) {
        unpack_codes(part.raw.format, block, sub, codes);
        put_codes(layout, codes, group, to + (b * num_subs + sub) * layout.code_bytes() * group + 4 * lane);
      }
      put_scales(part.raw.format, block, group, lane, scales + b * layout.scale_bytes() * group);
    }
  }
}

// Half of 2^(e - 127) is an f16 number for these; any scale will do for a block of zeros, zero included.
bool fits_f16(const std::byte* block) {
  constexpr uint32_t kSmallest = 104;
  constexpr uint32_t kLargest = 143;
  const uint32_t scale = block::u8(block);
  const auto is_zero = [](std::byte codes) { return (codes & std::byte{0x77}) == std::byte{0}; };
  return (scale >= kSmallest && scale <= kLargest) ||
         (scale < kSmallest && std::all_of(block + 1, block + 17, is_zero));
}

}  // namespace

bool has_integer_kernel(const QuantMatrix& raw) {
  if (raw.format == Format::kGGUF_MXFP4) {
    const int64_t num_blocks = raw.n * raw.k / kQuantBlock;
    for (int64_t b = 0; b < num_blocks; ++b) {
      if (!fits_f16(raw.codes + b * info(raw.format).block_bytes)) {
        return false;
      }
    }
  }
  return integer_layout(raw.format).has_value();
}

size_t packed_group_bytes(const MatmulPart& part, int64_t k, int group) {
  if (part.kernel == MatmulKernel::kPlain) {
    return static_cast<size_t>(k) * static_cast<size_t>(group) * (part.raw.format == Format::kF32 ? 4 : 2);
  }
  const IntegerLayout layout = *integer_layout(part.raw.format);
  return static_cast<size_t>(code_region_bytes(layout, k, group) + scale_region_bytes(layout, k, group));
}

void pack_matmul_part(MatmulPart& part, int64_t k, int group, cpu::ThreadPool& pool) {
  const bool plain = part.kernel == MatmulKernel::kPlain;
  const IntegerLayout layout = plain ? IntegerLayout{} : *integer_layout(part.raw.format);
  part.packed = AlignedBuffer(part.group_bytes * static_cast<size_t>(part.num_groups));
  pool.parallel_for(part.num_groups, 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t g = begin; g < end; ++g) {
      if (!plain) {
        pack_integer_group(part, layout, k, group, g);
      } else if (part.raw.format == Format::kF32) {
        pack_plain_group<uint32_t>(part, k, group, g);
      } else {
        pack_plain_group<uint16_t>(part, k, group, g);
      }
    }
  });
}

}  // namespace shoal
