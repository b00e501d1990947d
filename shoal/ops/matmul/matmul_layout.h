// Insides of the matmul operator: what a prepared weight holds and what its kernels read.
//
// Every layout puts `group` outputs side by side (8, or 16 for AVX-512), one output a vector lane, and every kernel
// walks k upwards with one fused multiply-add a term and lane. So the order of a sum does not depend on the tile it is
// computed in.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "shoal/ops/matmul/matmul.h"
#include "shoal/ops/matmul/matmul_cuda.h"
#include "shoal/quant/quant_matrix.h"
#include "shoal/tensor/tensor.h"

namespace shoal {

enum class MatmulKernel : uint8_t {
  kReference,  // f64 sums over decoded rows
  kDecode,     // raw rows, decoded to f32 a tile at a time
  kPlain,      // f32, f16 or bf16, repacked [n / group, k, group]
  kInteger,    // codes and scales as stored, repacked (IntegerLayout); int8 activations
};

// How the integer kernels store a format: per group of outputs a region of codes, block after block of 32 along k, then
// a region of scales; both start at multiples of 64 bytes. `G` is the group, a vector is 4 G bytes: byte 4 lane + i
// belongs to output `lane`. Step j of a block holds k = 4 j + i, j = 0..7.
//
//   codes of a block   kNibble   4 vectors; vector j: step j in the low, step j + 4 in the high nibbles
//                      kByte     8 vectors; vector j: step j, signed
//                      kCrumb    2 vectors; vector j: steps j, j + 2, j + 4, j + 6 in bits 0, 2, 4, 6
//              then    high bits 1: one vector, bit j: the bit above the low ones of step j
//                                2: two vectors, bits 2 (j % 4) of vector j / 4: bits 4 and 5 of step j
//   scales of a block  kScale      f16 d [G]                         weight = d (code - offset)
//                      kScaleMin   f16 d [G], f16 m [G]              weight = d code + m
//   scales of 8 blocks kSuperMin   f16 d [G], f16 dmin [G], then per block u8 [G][2]: scale, min
//                                                                    weight = d scale code - dmin min
//                      kSuperHalf  f16 d [G], then per block i8 [G][2]: scales of the block's halves
//                                                                    weight = d scale (code - offset)
//                      kSuperHalfMin  f16 d [G], f16 dmin [G], then per block u8 [G][2]: of the halves, scale in the
//                                  low and min in the high nibble    weight = d scale code - dmin min
enum class ScaleKind : uint8_t { kScale, kScaleMin, kSuperMin, kSuperHalf, kSuperHalfMin };

alignas(16) inline constexpr int8_t kIq4Table[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                                     1,    13,   25,  38,  53,  69,  89,  113};
alignas(16) inline constexpr int8_t kE2m1Doubled[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// Signed bytes that codes of four bits stand for.
enum class CodeTable : uint8_t { kNone, kIq4, kE2m1Doubled };

inline const int8_t* table_bytes(CodeTable table) { return table == CodeTable::kIq4 ? kIq4Table : kE2m1Doubled; }

struct IntegerLayout {
  int low_bits;   // 2: kCrumb, 4: kNibble, 8: kByte
  int high_bits;  // 0, 1 or 2
  int offset;     // subtracted from an unsigned code; a power of two or 0
  CodeTable table;
  ScaleKind scales;

  constexpr int code_bytes() const { return 4 * low_bits + 4 * high_bits; }  // of a row's block
  constexpr int blocks_per_scale() const {
    return scales == ScaleKind::kScale || scales == ScaleKind::kScaleMin ? 1 : 8;
  }
  constexpr int scale_bytes() const {  // of a row's blocks_per_scale blocks
    switch (scales) {
      case ScaleKind::kScale: return 2;
      case ScaleKind::kScaleMin: return 4;
      case ScaleKind::kSuperMin: return 4 + 8 * 2;
      case ScaleKind::kSuperHalf: return 2 + 8 * 2;
      case ScaleKind::kSuperHalfMin: return 4 + 8 * 2;
    }
    return 0;
  }
};

constexpr std::optional<IntegerLayout> integer_layout(Format format) {
  switch (format) {
    case Format::kQ4_0: return IntegerLayout{4, 0, 8, CodeTable::kNone, ScaleKind::kScale};
    case Format::kQ4_1: return IntegerLayout{4, 0, 0, CodeTable::kNone, ScaleKind::kScaleMin};
    case Format::kQ5_0: return IntegerLayout{4, 1, 16, CodeTable::kNone, ScaleKind::kScale};
    case Format::kQ5_1: return IntegerLayout{4, 1, 0, CodeTable::kNone, ScaleKind::kScaleMin};
    case Format::kQ8_0: return IntegerLayout{8, 0, 0, CodeTable::kNone, ScaleKind::kScale};
    case Format::kQ2_K: return IntegerLayout{2, 0, 0, CodeTable::kNone, ScaleKind::kSuperHalfMin};
    case Format::kQ3_K: return IntegerLayout{2, 1, 4, CodeTable::kNone, ScaleKind::kSuperHalf};
    case Format::kQ4_K: return IntegerLayout{4, 0, 0, CodeTable::kNone, ScaleKind::kSuperMin};
    case Format::kQ5_K: return IntegerLayout{4, 1, 0, CodeTable::kNone, ScaleKind::kSuperMin};
    case Format::kQ6_K: return IntegerLayout{4, 2, 32, CodeTable::kNone, ScaleKind::kSuperHalf};
    case Format::kIQ4_NL: return IntegerLayout{4, 0, 0, CodeTable::kIq4, ScaleKind::kScale};
    case Format::kIQ4_XS: return IntegerLayout{4, 0, 0, CodeTable::kIq4, ScaleKind::kSuperHalf};
    case Format::kGGUF_MXFP4: return IntegerLayout{4, 0, 0, CodeTable::kE2m1Doubled, ScaleKind::kScale};
    default: return std::nullopt;
  }
}

constexpr int kQuantBlock = 32;  // activations of a block
constexpr int kQuantHalf = 16;   // activations that share a scale
constexpr int kMaxFactor = 16;   // 127 * 16 activations of one half times it fit int16

constexpr int64_t round_up_64(int64_t bytes) { return (bytes + 63) / 64 * 64; }
constexpr int64_t code_region_bytes(const IntegerLayout& layout, int64_t k, int group) {
  return round_up_64(k / kQuantBlock * layout.code_bytes() * group);
}
constexpr int64_t scale_region_bytes(const IntegerLayout& layout, int64_t k, int group) {
  return round_up_64(k / kQuantBlock / layout.blocks_per_scale() * layout.scale_bytes() * group);
}

// What a kernel needs to know of 32 quantised activations: a = scale * factors[half] * code. The halves' scales are
// whole multiples of one another's unit, so that a kernel adds them in int32: as precise as a scale for every 16, at
// the cost of one for every 32 (SmolLM2-135M: mean KL 3.6e-3 with one scale, 1.9e-3 with two). A block with a value
// that is not finite has a NaN scale, so that every output of its row becomes NaN.
struct QuantBlock {
  float scale;
  float sum;                // of the activations: scale * total
  int32_t total;            // of factor * code
  int16_t half_sums[2];     // of factor * code, by half
  int32_t factor_pairs[2];  // a half's factor in both 16-bit lanes
  float factors[2];
  int32_t minus_codes[2];  // minus the sum of a half's codes
};

struct QuantScale {
  float scale;  // of a factor of one
  int32_t factors[2];
  float inverses[2];  // code = round_half_even(a * inverse)
};

// From the largest magnitude of each half. Force-inlined: kernels of several instruction sets share it.
[[gnu::always_inline]] inline QuantScale quant_scale(float amax_first, float amax_second) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  if (!(amax_first < kInfinity) || !(amax_second < kInfinity)) {  // infinity or NaN
    return {std::numeric_limits<float>::quiet_NaN(), {1, 1}, {0.0f, 0.0f}};
  }
  const float amax = amax_first > amax_second ? amax_first : amax_second;
  if (amax < 0x1p-110f) {  // the inverses below would overflow: such a block counts as zero
    return {0.0f, {1, 1}, {0.0f, 0.0f}};
  }
  QuantScale result{amax / (127.0f * kMaxFactor), {}, {}};
  const float by_half[2] = {amax_first, amax_second};
  for (int half = 0; half < 2; ++half) {
    const float share = kMaxFactor * by_half[half] / amax;  // 0 to kMaxFactor
    int32_t factor = static_cast<int32_t>(share);
    factor += static_cast<float>(factor) < share ? 1 : 0;
    factor = factor < 1 ? 1 : factor;
    result.factors[half] = factor;
    result.inverses[half] = (127.0f * kMaxFactor) / (amax * static_cast<float>(factor));
  }
  return result;
}

// `first` and `second` are the sums of the halves' codes.
[[gnu::always_inline]] inline QuantBlock quant_block(const QuantScale& scale, int32_t first, int32_t second) {
  const int32_t sums[2] = {first * scale.factors[0], second * scale.factors[1]};
  const int32_t total = sums[0] + sums[1];
  return {scale.scale,
          scale.scale * static_cast<float>(total),
          total,
          {static_cast<int16_t>(sums[0]), static_cast<int16_t>(sums[1])},
          {scale.factors[0] * 0x10001, scale.factors[1] * 0x10001},
          {static_cast<float>(scale.factors[0]), static_cast<float>(scale.factors[1])},
          {-first, -second}};
}

// Rows of quantised activations.
struct QuantRows {
  int8_t* codes = nullptr;       // [m, k]
  QuantBlock* blocks = nullptr;  // [m, k / 32]
  int8_t* spread = nullptr;      // scratch of one slot, spread_scratch_size
};

constexpr int kSpreadRows = 4;  // rows of a tile of the AVX2 kernels, which want every four codes 8 times over

// Bytes of scratch that one slot needs to spread the activations of a tile.
constexpr int64_t spread_scratch_size(cpu::Isa isa, int64_t m, int64_t k) {
  return isa == cpu::Isa::kAvx2 ? (m >= kSpreadRows ? kSpreadRows : 1) * k * 8 : 0;
}

struct MatmulPart {
  QuantMatrix raw;  // codes are null once the part is repacked
  MatmulKernel kernel = MatmulKernel::kDecode;
  int64_t n = 0;
  int64_t decode_chunk = 0;  // values of k that kDecode decodes at a time
  int64_t out_begin = 0;     // first column of `out`
  int64_t group_begin = 0;   // first group of this part among those of all parts
  int64_t num_groups = 0;    // ceil(n / group); missing rows of the last one are zeros
  size_t group_bytes = 0;    // of `packed`; 0 if not repacked
  AlignedBuffer packed;
};

struct MatmulWeight::Impl {
  std::vector<MatmulPart> parts;
  int64_t n = 0;
  int64_t k = 0;
  int64_t num_groups = 0;
  Format format = Format::kF32;  // of the first part
  MatmulPrecision precision = MatmulPrecision::kDefault;
  cpu::Isa isa = cpu::Isa::kScalar;  // of the context at preparation: the layout depends on it
  int group = 8;
  int64_t decode_chunk = 0;  // the largest of the parts; 0: none decodes
  int num_slots = 1;         // threads of the pool at preparation; each slot has its own scratch and range of outputs
  std::string layout;
  std::string variant;
  std::vector<cuda::DevicePart> device_parts;  // on CUDA, in the place of `parts`
  Device device{};
};

struct GroupedWeights::Impl {
  std::vector<MatmulWeight> weights;
  AlignedBuffer operands;  // [num_groups] of cuda::Operand, in device memory
};

// One call's rows. Strides count elements.
struct MatmulRows {
  const float* a = nullptr;  // [m, k]
  int64_t a_stride = 0;
  float* out = nullptr;  // [m, n]
  int64_t out_stride = 0;
  const float* bias = nullptr;  // [n] or null
  int64_t m = 0;
  int64_t k = 0;
};

// Values of k decoded at a time: a tile of 2 x 8 rows is 64 KiB, within L2. Matrices whose scales stand apart can only
// be decoded by whole rows.
constexpr int64_t kDecodeChunk = 1024;
constexpr int kDecodeGroups = 2;  // groups decoded together
static_assert(kDecodeChunk % 256 == 0, "a chunk is a whole number of blocks of every format");

constexpr int matmul_group(cpu::Isa isa) { return isa == cpu::Isa::kAvx512 ? 16 : 8; }

// f32 values of scratch that one slot needs for decoded tiles of chunks of at most `chunk` values.
constexpr int64_t decode_scratch_size(int64_t chunk, int group) { return chunk * (kDecodeGroups * group + 1); }

namespace cuda {
void prepare_on_device(std::span<const QuantMatrix> parts, MatmulWeight::Impl& impl, const OpContext& context);
void matmul_rows(const MatmulWeight::Impl& impl, const MatmulRows& rows, const OpContext& context);
void make_operands(GroupedWeights::Impl& impl, const OpContext& context);
void tiled_product(const TiledMatmulArgs& args, const GroupedWeights::Impl& impl, const OpContext& context);
}  // namespace cuda

// In f64 over decoded weights; activations are rounded to int8 where the integer kernels would.
void matmul_reference(const MatmulWeight::Impl& weight, const MatmulRows& rows);

// Quantises rows [begin, end).
SHOAL_DECLARE_FOR_EACH_ISA(void quantize_activations(const MatmulRows& rows, int64_t begin, int64_t end,
                                                     const QuantRows& quant))

// Outputs of groups [begin, end) of a part with integer kernels, all rows.
SHOAL_DECLARE_FOR_EACH_ISA(void matmul_integer_groups(const MatmulPart& part, const MatmulRows& rows,
                                                      const QuantRows& quant, int64_t begin, int64_t end))

// Outputs of groups [begin, end) of one part, all rows. `scratch`: decode_scratch_size values for kDecode.
SHOAL_DECLARE_FOR_EACH_ISA(void matmul_f32_groups(const MatmulPart& part, const MatmulRows& rows, int64_t begin,
                                                  int64_t end, float* scratch))

}  // namespace shoal
