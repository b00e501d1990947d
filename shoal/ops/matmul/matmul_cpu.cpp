// Kernels of one instruction set: here the f32 ones, for plain formats and decoded tiles; the integer ones are
// included.
//
// One output a lane; k ascends; one fused multiply-add a term. A tile only says how many sums run at once.
#include "shoal/ops/matmul/matmul_layout.h"
#include "shoal/ops/matmul/matmul_simd.h"
#if defined(SHOAL_ISA_AVX2) || defined(SHOAL_ISA_AVX512)
#include "shoal/ops/matmul/matmul_integer.h"
#else
#include "shoal/ops/matmul/matmul_integer_scalar.h"
#endif

namespace shoal::SHOAL_ISA {
namespace {

struct ElementF32 {
  using Type = float;
  SHOAL_INLINE F load(const Type* p) { return SHOAL_ISA::load(p); }
};
struct ElementF16 {
  using Type = uint16_t;
  SHOAL_INLINE F load(const Type* p) { return load_f16(p); }
};
struct ElementBF16 {
  using Type = uint16_t;
  SHOAL_INLINE F load(const Type* p) { return load_bf16(p); }
};

constexpr int kRows = 4;  // rows of a full tile: with 2 groups 8 sums hide the latency of fma

// Adds the terms k in [k_begin, k_end) to a tile of `NumRows` rows by `NumGroups` groups. `w` points at the tile's
// first value, `group_size` values between groups. `first`: sums start at zero; `last`: bias is added. In between they
// rest in `sums`, [row, group, lane].
template <class Element, int NumRows, int NumGroups>
[[gnu::always_inline]] inline void f32_tile(const typename Element::Type* w, int64_t group_size, const float* a,
                                            int64_t a_stride, int64_t num_k, F (&sums)[kRows][kDecodeGroups * 2]) {
  F acc[NumRows][NumGroups];
  for (int r = 0; r < NumRows; ++r) {
    for (int g = 0; g < NumGroups; ++g) {
      acc[r][g] = sums[r][g];
    }
  }
  for (int64_t i = 0; i < num_k; ++i) {
    F weights[NumGroups];
    for (int g = 0; g < NumGroups; ++g) {
      weights[g] = Element::load(w + g * group_size + i * kGroup);
    }
    for (int r = 0; r < NumRows; ++r) {
      const F value = broadcast(a[r * a_stride + i]);
      for (int g = 0; g < NumGroups; ++g) {
        acc[r][g] = fma(value, weights[g], acc[r][g]);
      }
    }
  }
  for (int r = 0; r < NumRows; ++r) {
    for (int g = 0; g < NumGroups; ++g) {
      sums[r][g] = acc[r][g];
    }
  }
}

// Rows x groups of one chunk of k, with the sums kept in `out` between chunks.
template <class Element, int NumRows, int NumGroups>
void f32_chunk(const MatmulPart& part, const MatmulRows& rows, const typename Element::Type* w, int64_t group_size,
               int64_t group_idx, int64_t row_idx, int64_t k_begin, int64_t k_end) {
  F sums[kRows][kDecodeGroups * 2];
  const bool first = k_begin == 0;
  MatmulRows rest = rows;
  rest.bias = k_end == rows.k ? rows.bias : nullptr;
  alignas(64) float lane_values[kGroup];
  for (int r = 0; r < NumRows; ++r) {
    for (int g = 0; g < NumGroups; ++g) {
      sums[r][g] = zero();
      if (!first) {
        copy_lanes(lane_values, rows.out + (row_idx + r) * rows.out_stride + part.out_begin + (group_idx + g) * kGroup,
                   lanes_of(part.n, group_idx + g));
        sums[r][g] = load(lane_values);
      }
    }
  }
  f32_tile<Element, NumRows, NumGroups>(w, group_size, rows.a + row_idx * rows.a_stride + k_begin, rows.a_stride,
                                        k_end - k_begin, sums);
  for (int r = 0; r < NumRows; ++r) {
    for (int g = 0; g < NumGroups; ++g) {
      store_outputs(part, rest, row_idx + r, group_idx + g, sums[r][g]);
    }
  }
}

// All rows of `NumGroups` groups for one chunk of k. A single row takes more groups at once, for the same latency.
template <class Element, int NumGroups>
void f32_rows(const MatmulPart& part, const MatmulRows& rows, const typename Element::Type* w, int64_t group_size,
              int64_t group_idx, int64_t k_begin, int64_t k_end) {
  int64_t row_idx = 0;
  for (; row_idx + 4 <= rows.m; row_idx += 4) {
    f32_chunk<Element, 4, NumGroups>(part, rows, w, group_size, group_idx, row_idx, k_begin, k_end);
  }
  if (row_idx + 2 <= rows.m) {
    f32_chunk<Element, 2, NumGroups>(part, rows, w, group_size, group_idx, row_idx, k_begin, k_end);
    row_idx += 2;
  }
  if (row_idx < rows.m) {
    f32_chunk<Element, 1, NumGroups>(part, rows, w, group_size, group_idx, row_idx, k_begin, k_end);
  }
}

template <class Element>
void plain_groups(const MatmulPart& part, const MatmulRows& rows, int64_t begin, int64_t end) {
  const auto* packed = reinterpret_cast<const typename Element::Type*>(part.packed.data());
  const int64_t group_size = static_cast<int64_t>(part.group_bytes / sizeof(typename Element::Type));
  int64_t g = begin;
  if (rows.m == 1) {
    for (; g + 4 <= end; g += 4) {
      f32_chunk<Element, 1, 4>(part, rows, packed + g * group_size, group_size, g, 0, 0, rows.k);
    }
  }
  for (; g + 2 <= end; g += 2) {
    f32_rows<Element, 2>(part, rows, packed + g * group_size, group_size, g, 0, rows.k);
  }
  if (g < end) {
    f32_rows<Element, 1>(part, rows, packed + g * group_size, group_size, g, 0, rows.k);
  }
}

// Decodes values [k_begin, k_end) of one group's rows into `tile`, [k, lane]; rows past the end are zeros.
void decode_group(const MatmulPart& part, int64_t group_idx, int64_t k_begin, int64_t k_end, float* tile, float* row) {
  const FormatInfo& format = info(part.raw.format);
  const int64_t lanes = lanes_of(part.n, group_idx);
  for (int64_t lane = 0; lane < kGroup; ++lane) {
    const int64_t n_idx = group_idx * kGroup + lane;
    if (lane < lanes && k_end - k_begin == part.raw.k) {
      decode_rows(part.raw, n_idx, n_idx + 1, row);
    } else if (lane < lanes) {
      const std::byte* codes = part.raw.row(n_idx) + k_begin / format.block_size * format.block_bytes;
      decode_row(part.raw.format, codes, k_end - k_begin, row);
    }
    for (int64_t i = 0; i < k_end - k_begin; ++i) {
      tile[i * kGroup + lane] = lane < lanes ? row[i] : 0.0f;
    }
  }
}

void decoded_groups(const MatmulPart& part, const MatmulRows& rows, int64_t begin, int64_t end, float* scratch) {
  const int64_t group_size = part.decode_chunk * kGroup;
  float* row = scratch + kDecodeGroups * group_size;
  for (int64_t g = begin; g < end; g += kDecodeGroups) {
    const int64_t num_groups = end - g < kDecodeGroups ? end - g : kDecodeGroups;
    for (int64_t k_begin = 0; k_begin < rows.k; k_begin += part.decode_chunk) {
      const int64_t k_end = k_begin + part.decode_chunk < rows.k ? k_begin + part.decode_chunk : rows.k;
      for (int64_t i = 0; i < num_groups; ++i) {
        decode_group(part, g + i, k_begin, k_end, scratch + i * group_size, row);
      }
      if (num_groups == kDecodeGroups) {
        f32_rows<ElementF32, kDecodeGroups>(part, rows, scratch, group_size, g, k_begin, k_end);
      } else {
        f32_rows<ElementF32, 1>(part, rows, scratch, group_size, g, k_begin, k_end);
      }
    }
  }
}

}  // namespace

void matmul_f32_groups(const MatmulPart& part, const MatmulRows& rows, int64_t begin, int64_t end, float* scratch) {
  if (part.kernel == MatmulKernel::kDecode) {
    decoded_groups(part, rows, begin, end, scratch);
    return;
  }
  switch (part.raw.format) {
    case Format::kF32: plain_groups<ElementF32>(part, rows, begin, end); return;
    case Format::kF16: plain_groups<ElementF16>(part, rows, begin, end); return;
    default: plain_groups<ElementBF16>(part, rows, begin, end); return;
  }
}

void matmul_integer_groups(const MatmulPart& part, const MatmulRows& rows, const QuantRows& quant, int64_t begin,
                           int64_t end) {
  switch (part.raw.format) {
#define SHOAL_CASE(name) \
  case Format::name: integer_groups<Format::name>(part, rows, quant, begin, end); return;
    SHOAL_CASE(kQ4_0)
    SHOAL_CASE(kQ4_1)
    SHOAL_CASE(kQ5_0)
    SHOAL_CASE(kQ5_1)
    SHOAL_CASE(kQ8_0)
    SHOAL_CASE(kQ2_K)
    SHOAL_CASE(kQ3_K)
    SHOAL_CASE(kQ4_K)
    SHOAL_CASE(kQ5_K)
    SHOAL_CASE(kQ6_K)
    SHOAL_CASE(kIQ4_NL)
    SHOAL_CASE(kIQ4_XS)
    SHOAL_CASE(kGGUF_MXFP4)
#undef SHOAL_CASE
    default: return;  // integer_layout() has no other format
  }
}

void quantize_activations(const MatmulRows& rows, int64_t begin, int64_t end, const QuantRows& quant) {
  for (int64_t m = begin; m < end; ++m) {
    quantize_row(rows.a + m * rows.a_stride, rows.k, quant.codes + m * rows.k,
                 quant.blocks + m * (rows.k / kQuantBlock));
  }
}

}  // namespace shoal::SHOAL_ISA
