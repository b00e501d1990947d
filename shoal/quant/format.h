// Number formats of weights. One struct per format in quant/<format>.h; quant/formats.def lists them all.
//
// A format says how a row of k values is stored. `Plain` formats are element types; `Block` formats are GGUF's
// self-contained blocks (scales inside). `Scaled` formats are codes alone, an LSB-first
// stream of `bits` each, whose scales (and zero points) stand in tensors of their own: see quant_matrix.h.
//
// Every plain and block struct in formats.def has:
//   static constexpr std::string_view kName;        // "q4_k": the name users type
//   static constexpr int kGgmlType;                 // ggml's type id, -1 if GGUF has none
//   static constexpr int kBlockSize, kBlockBytes;   // values and bytes of one block
//   static void decode(const std::byte* block, float* values);   // exactly kBlockSize values; any alignment
//   static constexpr bool kCanEncode;
//   static void encode(const float* values, std::byte* block);   // if kCanEncode; finite values, for blocks
// Every scaled struct has:
//   static constexpr std::string_view kName;
//   static constexpr int kBits;                  // of a code
//   static constexpr int kScaleGroup;            // values that share a scale; 0: the matrix says (its group_size)
//   static constexpr bool kSharedScales;         // rows may share scales: one for all, or one a square block
//   static constexpr bool kHasZeros;             // zero points may be given; else the zero is kDefaultZero
//   static constexpr float kDefaultZero;         // 0 where codes are signed numbers
//   static float number(uint32_t code);          // what a code stands for before zero and scale
//   static float scale(DType type, const void* scales, int64_t idx);
//
// From a Format to its struct: visit_format.h. A new format is its header, a line in formats.def and its #include
// there.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

namespace shoal {

enum class Format : uint8_t {
#define SHOAL_FORMAT(Struct, header) k##Struct,
#define SHOAL_SCALED_FORMAT(Struct, header) k##Struct,
#include "shoal/quant/formats.def"
#undef SHOAL_FORMAT
#undef SHOAL_SCALED_FORMAT
};

struct FormatInfo {
  Format format;
  std::string_view name;
  int ggml_type;    // -1: not in GGUF
  int block_size;   // values; scaled formats: 8, the fewest that always fill whole bytes
  int block_bytes;  // bytes; scaled formats: bits of a code
  bool can_encode;  // by encode_row
  bool is_scaled;   // scales stand apart: rows alone have no values
  double bits_per_value() const { return 8.0 * block_bytes / block_size; }
};

const FormatInfo& info(Format format);
std::optional<Format> format_from_name(std::string_view name);
std::optional<Format> format_from_ggml_type(uint32_t ggml_type);

// Bytes of a row of k values. kInvalidArgument if k is not a whole number of blocks; a row of a scaled format ends with
// the byte that holds its last code.
int64_t row_bytes(Format format, int64_t k);

// Decodes `k` values of one row to f32, bit for bit as the PyPI package `gguf` does; only the scales that it reads as
// numbers although they are NaN (e8m0 255, e4m3 0x7f) are NaN here. kInvalidArgument if k is not whole blocks.
//
// encode_row is the inverse. Element types round to nearest even. Blocks keep the error small (tested per format) and
// saturate where a scale would overflow; each is encoded on its own, so the bytes do not depend on the row's length.
// kInvalidArgument also for a value that is not finite (blocks only), kUnsupported for a format that cannot be encoded;
// nothing is written then. Both are kInvalidArgument for scaled formats, whose rows are no values without scales: see
// decode_rows (quant_matrix.h) and quantize (quantize.h).
void decode_row(Format format, const std::byte* row, int64_t k, float* values);
void encode_row(Format format, const float* values, int64_t k, std::byte* row);

}  // namespace shoal
