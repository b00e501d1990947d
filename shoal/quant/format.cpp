#include "shoal/quant/format.h"

#include <array>
#include <cmath>
#include <type_traits>

#include "shoal/base/checked.h"
#include "shoal/base/error.h"
#include "shoal/quant/visit_format.h"

namespace shoal {
namespace {

template <class F>
constexpr FormatInfo info_of(Format format) {
  static_assert(F::kBlockSize > 0 && F::kBlockBytes > 0);
  return {format, F::kName, F::kGgmlType, F::kBlockSize, F::kBlockBytes, F::kCanEncode, false};
}

template <class F>
constexpr FormatInfo info_of_scaled(Format format) {
  return {format, F::kName, -1, 8, F::kBits, false, true};
}

constexpr FormatInfo kFormats[] = {
#define SHOAL_FORMAT(Struct, header) info_of<Struct>(Format::k##Struct),
#define SHOAL_SCALED_FORMAT(Struct, header) info_of_scaled<Struct>(Format::k##Struct),
#include "shoal/quant/formats.def"
#undef SHOAL_FORMAT
#undef SHOAL_SCALED_FORMAT
};

// A block has one scale for many values: one that is not finite would spoil its neighbours without a word.
void require_finite(std::string_view name, const float* values, int64_t k) {
  for (int64_t i = 0; i < k; ++i) {
    require(std::isfinite(values[i]), "encode ", name, ": value ", i, " is ", values[i],
            ", a block holds finite values only");
  }
}

}  // namespace

const FormatInfo& info(Format format) {
  const size_t idx = static_cast<size_t>(format);
  SHOAL_ASSERT(idx < std::size(kFormats));
  return kFormats[idx];
}

std::optional<Format> format_from_name(std::string_view name) {
  for (const FormatInfo& entry : kFormats) {
    if (entry.name == name) {
      return entry.format;
    }
  }
  return std::nullopt;
}

std::optional<Format> format_from_ggml_type(uint32_t ggml_type) {
  for (const FormatInfo& entry : kFormats) {
    if (entry.ggml_type >= 0 && static_cast<uint32_t>(entry.ggml_type) == ggml_type) {
      return entry.format;
    }
  }
  return std::nullopt;
}

int64_t row_bytes(Format format, int64_t k) {
  const FormatInfo& entry = info(format);
  require(k >= 0, entry.name, ": a row of ", k, " values");
  if (entry.is_scaled) {
    const std::optional<int64_t> bits = checked_mul<int64_t>(k, entry.block_bytes);
    require(bits.has_value(), entry.name, ": the bits of a row of ", k, " values overflow 64 bits");
    return ceil_div<int64_t>(*bits, 8);
  }
  require(k % entry.block_size == 0, entry.name, ": a row of ", k, " values is not a whole number of blocks of ",
          entry.block_size);
  const std::optional<int64_t> bytes = checked_mul<int64_t>(k / entry.block_size, entry.block_bytes);
  require(bytes.has_value(), entry.name, ": the bytes of a row of ", k, " values overflow 64 bits");
  return *bytes;
}

void decode_row(Format format, const std::byte* row, int64_t k, float* values) {
  require(!info(format).is_scaled, "decode ", info(format).name, ": its scales stand apart from its rows");
  const int64_t bytes = row_bytes(format, k);
  visit_format(format, [&]<class F>() {
    const int64_t num_blocks = bytes / F::kBlockBytes;
    for (int64_t i = 0; i < num_blocks; ++i) {
      F::decode(row + i * F::kBlockBytes, values + i * F::kBlockSize);
    }
  });
}

void encode_row(Format format, const float* values, int64_t k, std::byte* row) {
  require(!info(format).is_scaled, "encode ", info(format).name, ": its scales stand apart from its rows");
  const int64_t bytes = row_bytes(format, k);
  visit_format(format, [&]<class F>() {
    if constexpr (F::kCanEncode) {
      if constexpr (F::kBlockSize > 1) {
        require_finite(F::kName, values, k);
      }
      const int64_t num_blocks = bytes / F::kBlockBytes;
      for (int64_t i = 0; i < num_blocks; ++i) {
        F::encode(values + i * F::kBlockSize, row + i * F::kBlockBytes);
      }
    } else {
      fail(ErrorCode::kUnsupported, "encode ", F::kName, ": this format can be read but not made");
    }
  });
}

void wrong_kind_of_format(Format format) {
  fail(ErrorCode::kInternal, "format ", static_cast<int>(format), " is of another kind than this code handles");
}

}  // namespace shoal
