#include "shoal/quant/quantize.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "shoal/base/checked.h"
#include "shoal/base/error.h"
#include "shoal/base/text.h"
#include "shoal/quant/code_stream.h"
#include "shoal/quant/quant_matrix.h"
#include "shoal/quant/visit_format.h"

namespace shoal {
namespace {

constexpr int64_t kDefaultGroup = 32;
constexpr int64_t kSquareBlock = 128;

// [..., n, k] as `num_matrices` matrices.
struct Stack {
  std::vector<int64_t> outer;  // all dimensions but the last two
  int64_t num_matrices = 1;
  int64_t n = 1;
  int64_t k = 0;
  bool has_rows = true;  // false for a single row of rank 1

  int64_t num_rows() const { return num_matrices * n; }
  // [..., rows, columns] for the same stack.
  std::vector<int64_t> shape(int64_t rows, int64_t columns) const {
    std::vector<int64_t> dims = outer;
    if (has_rows) {
      dims.push_back(rows);
    }
    dims.push_back(columns);
    return dims;
  }
};

Stack stack_of(std::string_view function, std::span<const int64_t> shape) {
  require(!shape.empty() && shape.size() <= kMaxRank, function, ": an array of ", shape.size(),
          " dimensions, expected 1 to ", kMaxRank);
  Stack stack;
  int64_t count = 1;
  for (const int64_t extent : shape) {
    const std::optional<int64_t> product = extent < 0 ? std::nullopt : checked_mul<int64_t>(count, extent);
    require(product.has_value() && *product <= INT64_MAX / 64, function, ": shape ", shape_text(shape),
            " is not possible");
    count = extent == 0 ? count : *product;  // later extents are checked as if this one were 1
  }
  stack.k = shape.back();
  stack.has_rows = shape.size() > 1;
  if (stack.has_rows) {
    stack.n = shape[shape.size() - 2];
    stack.outer.assign(shape.begin(), shape.end() - 2);
  }
  for (const int64_t extent : stack.outer) {
    stack.num_matrices *= extent;
  }
  return stack;
}

// Row `row_idx` of an array with any strides, as f32.
void read_row(const TensorView& array, int64_t row_idx, float* values) {
  int64_t offset = 0;
  for (int axis = array.rank - 2; axis >= 0; --axis) {
    offset += row_idx % array.dim(axis) * array.stride(axis);
    row_idx /= array.dim(axis);
  }
  const int64_t stride = array.stride(array.rank - 1);
  for (int64_t i = 0; i < array.dim(array.rank - 1); ++i) {
    values[i] = read_float_scale(array.dtype, array.data, offset + i * stride);
  }
}

void require_finite(const float* values, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    require(std::isfinite(values[i]), "quantize: array has the value ", values[i], ", finite values are needed");
  }
}

float largest_magnitude(const float* values, int64_t count) {
  float amax = 0.0f;
  for (int64_t i = 0; i < count; ++i) {
    amax = std::max(amax, std::fabs(values[i]));
  }
  return amax;
}

float rounded_scale(DType type, float scale) {
  switch (type) {
    case DType::kF16: return f16_to_f32(std::min<uint16_t>(f32_to_f16(scale), 0x7bff));  // the largest, not infinity
    case DType::kBF16: return bf16_to_f32(std::min<uint16_t>(f32_to_bf16(scale), 0x7f7f));
    default: return scale;
  }
}

void store_scale(DType type, void* scales, int64_t idx, float scale) {
  switch (type) {
    case DType::kF16: static_cast<uint16_t*>(scales)[idx] = f32_to_f16(scale); return;
    case DType::kBF16: static_cast<uint16_t*>(scales)[idx] = f32_to_bf16(scale); return;
    default: static_cast<float*>(scales)[idx] = scale; return;
  }
}

// Writes codes and gives the squared error.
double encode_affine(const float* x, int64_t count, float scale, int32_t zero, int32_t largest, int32_t* codes) {
  const float inverse = block::inverse(scale);
  double error = 0.0;
  for (int64_t i = 0; i < count; ++i) {
    const float nearest = std::nearbyint(x[i] * inverse) + static_cast<float>(zero);
    const float code = std::min(std::max(nearest, 0.0f), static_cast<float>(largest));
    codes[i] = static_cast<int32_t>(code);
    const double difference = static_cast<double>((code - static_cast<float>(zero)) * scale) - x[i];
    error += difference * difference;
  }
  return error;
}

// Scales of a symmetric group run from the one that just keeps every value within half a step (the codes on the side of
// the larger magnitude may end early) to the one whose codes end at amax.
float symmetric_scale(const float* x, int64_t count, int32_t zero, DType type, int32_t* codes) {
  float low = 0.0f;
  float high = 0.0f;
  for (int64_t i = 0; i < count; ++i) {
    low = std::min(low, x[i]);
    high = std::max(high, x[i]);
  }
  const auto middle = static_cast<float>(zero);
  const float widest = std::max(high, -low) / (middle - 1.0f);
  const float narrowest = std::max(high / (middle - 0.5f), -low / (middle + 0.5f));
  constexpr int kSteps = 16;
  float best = rounded_scale(type, widest);
  double best_error = encode_affine(x, count, best, zero, 2 * zero - 1, codes);
  for (int step = 0; step < kSteps; ++step) {
    const float candidate = rounded_scale(type, narrowest + (widest - narrowest) * (static_cast<float>(step) / kSteps));
    const double error = encode_affine(x, count, candidate, zero, 2 * zero - 1, codes);
    if (error < best_error) {
      best_error = error;
      best = candidate;
    }
  }
  return best;
}

struct Affine {
  float scale;
  int32_t zero;
};

Affine asymmetric_scale(const float* x, int64_t count, int32_t largest, DType type) {
  float low = 0.0f;  // zero is always a value
  float high = 0.0f;
  for (int64_t i = 0; i < count; ++i) {
    low = std::min(low, x[i]);
    high = std::max(high, x[i]);
  }
  // Each half by itself: the difference of two large values may overflow.
  const auto steps = static_cast<float>(largest);
  const float scale = rounded_scale(type, high / steps - low / steps);
  const float zero = std::nearbyint(-low * block::inverse(scale));
  return {scale, static_cast<int32_t>(std::min(std::max(zero, 0.0f), steps))};
}

template <class F>
QuantParts quantize_affine(const TensorView& array, const Stack& stack, const QuantizeOptions& options) {
  constexpr int kBits = F::kBits;
  constexpr int32_t kZero = 1 << (kBits - 1);
  constexpr int32_t kLargest = (1 << kBits) - 1;
  const int64_t asked = options.block_size.value_or(kDefaultGroup);
  require(asked <= 0 || (asked >= 16 && is_power_of_two(asked)), "quantize: block_size is ", asked,
          ", expected a power of two from 16, or -1 for one scale a row");
  require(options.symmetric || kBits != 3, "quantize: int3 has no zeros, symmetric must be true");
  const int64_t group = asked > 0 ? asked : std::max<int64_t>(stack.k, 1);
  const int64_t groups = asked > 0 ? ceil_div(stack.k, group) : 1;
  const int64_t code_bytes = ceil_div<int64_t>(stack.k * kBits, 8);
  const int64_t zero_bytes = ceil_div<int64_t>(groups * kBits, 8);

  QuantParts parts{.codes = Tensor(DType::kU8, stack.shape(stack.n, code_bytes)),
                   .scales = Tensor(array.dtype, stack.shape(stack.n, groups))};
  std::fill_n(parts.codes.view().as<uint8_t>(), stack.num_rows() * code_bytes, uint8_t{0});
  if (!options.symmetric) {
    parts.zeros = Tensor(DType::kU8, stack.shape(stack.n, zero_bytes));
    std::fill_n(parts.zeros.view().as<uint8_t>(), stack.num_rows() * zero_bytes, uint8_t{0});
  }
  std::vector<float> values(static_cast<size_t>(stack.k));
  std::vector<int32_t> codes(static_cast<size_t>(std::min(group, stack.k)));
  for (int64_t row = 0; row < stack.num_rows(); ++row) {
    read_row(array, row, values.data());
    require_finite(values.data(), stack.k);
    std::byte* out = parts.codes.view().as<std::byte>() + row * code_bytes;
    for (int64_t g = 0; g < groups; ++g) {
      const float* x = values.data() + g * group;
      const int64_t count = std::min(group, stack.k - g * group);
      Affine affine{0.0f, kZero};
      if (options.symmetric) {
        affine.scale = symmetric_scale(x, count, kZero, array.dtype, codes.data());
      } else {
        affine = asymmetric_scale(x, count, kLargest, array.dtype);
        write_code(parts.zeros.view().as<std::byte>() + row * zero_bytes, kBits, g, static_cast<uint32_t>(affine.zero));
      }
      encode_affine(x, count, affine.scale, affine.zero, kLargest, codes.data());
      for (int64_t i = 0; i < count; ++i) {
        write_code(out, kBits, g * group + i, static_cast<uint32_t>(codes[static_cast<size_t>(i)]));
      }
      store_scale(array.dtype, parts.scales.view().data, row * groups + g, affine.scale);
    }
  }
  return parts;
}

// All values of matrix `idx`, checked.
std::vector<float> read_matrix(const TensorView& array, const Stack& stack, int64_t idx) {
  std::vector<float> values(static_cast<size_t>(stack.n * stack.k));
  for (int64_t row = 0; row < stack.n; ++row) {
    read_row(array, idx * stack.n + row, values.data() + row * stack.k);
  }
  require_finite(values.data(), stack.n * stack.k);
  return values;
}

QuantParts quantize_fp8(const TensorView& array, const Stack& stack, const QuantizeOptions& options) {
  const int64_t asked = options.block_size.value_or(-1);
  require(asked == -1 || asked == 0 || asked == kSquareBlock, "quantize: block_size is ", asked,
          ", expected 128 (square blocks), 0 (one scale) or -1 (one a row)");
  constexpr float kLargest = 448.0f;
  const auto scale_of = [](float amax) { return amax > 0.0f ? std::max(amax / kLargest, 0x1p-126f) : 1.0f; };
  // Rows and columns of the blocks that share a scale.
  const int64_t rows = asked == kSquareBlock ? kSquareBlock : 1;
  const int64_t columns = asked == kSquareBlock ? kSquareBlock : std::max<int64_t>(stack.k, 1);
  const int64_t row_blocks = ceil_div(stack.n, rows);
  const int64_t column_blocks = asked == kSquareBlock ? ceil_div(stack.k, columns) : 1;
  QuantParts parts{
      .codes = Tensor(DType::kF8E4M3, stack.shape(stack.n, stack.k)),
      .scales = asked == 0 ? Tensor(DType::kF32, {1}) : Tensor(DType::kF32, stack.shape(row_blocks, column_blocks))};
  float* scales = parts.scales.view().as<float>();
  float whole_amax = 0.0f;
  if (asked == 0) {
    for (int64_t idx = 0; idx < stack.num_matrices; ++idx) {
      const std::vector<float> values = read_matrix(array, stack, idx);
      whole_amax = std::max(whole_amax, largest_magnitude(values.data(), static_cast<int64_t>(values.size())));
    }
    scales[0] = scale_of(whole_amax);
  }
  for (int64_t idx = 0; idx < stack.num_matrices; ++idx) {
    const std::vector<float> values = read_matrix(array, stack, idx);
    uint8_t* codes = parts.codes.view().as<uint8_t>() + idx * stack.n * stack.k;
    for (int64_t rb = 0; rb < row_blocks; ++rb) {
      const int64_t last_row = std::min(stack.n, (rb + 1) * rows);
      for (int64_t cb = 0; cb < column_blocks; ++cb) {
        const int64_t first = cb * columns;
        const int64_t count = std::min(stack.k - first, columns);
        float amax = whole_amax;
        for (int64_t row = rb * rows; asked != 0 && row < last_row; ++row) {
          amax = std::max(amax, largest_magnitude(values.data() + row * stack.k + first, count));
        }
        const float scale = scale_of(amax);
        if (asked != 0) {
          scales[(idx * row_blocks + rb) * column_blocks + cb] = scale;
        }
        for (int64_t row = rb * rows; row < last_row; ++row) {
          for (int64_t i = row * stack.k + first; i < row * stack.k + first + count; ++i) {
            codes[i] = f32_to_e4m3(values[static_cast<size_t>(i)] / scale);
          }
        }
      }
    }
  }
  return parts;
}

// A group of e2m1 codes with the scale whose half is given.
void encode_e2m1(const float* x, int64_t first, int64_t count, float half_scale, std::byte* row) {
  for (int64_t i = 0; i < count; ++i) {
    write_code(row, 4, first + i, half_scale > 0.0f ? block::e2m1_nearest(x[i], half_scale) : 0u);
  }
}

QuantParts quantize_e2m1(Format format, const TensorView& array, const Stack& stack, int64_t group) {
  const int64_t groups = ceil_div(stack.k, group);
  const int64_t code_bytes = ceil_div<int64_t>(stack.k, 2);
  const bool is_nvfp4 = format == Format::kNVFP4;
  QuantParts parts{.codes = Tensor(DType::kU8, stack.shape(stack.n, code_bytes)),
                   .scales = Tensor(is_nvfp4 ? DType::kF8E4M3 : DType::kF8E8M0, stack.shape(stack.n, groups))};
  std::fill_n(parts.codes.view().as<uint8_t>(), stack.num_rows() * code_bytes, uint8_t{0});
  if (is_nvfp4) {
    parts.global_scale =
        Tensor(DType::kF32, stack.outer.empty() ? std::vector<int64_t>{1} : std::vector<int64_t>(stack.outer));
  }
  for (int64_t idx = 0; idx < stack.num_matrices; ++idx) {
    const std::vector<float> values = read_matrix(array, stack, idx);
    float global = 1.0f;
    if (is_nvfp4) {
      const float amax = largest_magnitude(values.data(), static_cast<int64_t>(values.size()));
      global = amax / (6.0f * 448.0f);
      global = global > 0.0f ? global : 1.0f;
      parts.global_scale.view().as<float>()[idx] = global;
    }
    for (int64_t row = 0; row < stack.n; ++row) {
      const int64_t row_idx = idx * stack.n + row;
      std::byte* out = parts.codes.view().as<std::byte>() + row_idx * code_bytes;
      for (int64_t g = 0; g < groups; ++g) {
        const float* x = values.data() + row * stack.k + g * group;
        const int64_t count = std::min(group, stack.k - g * group);
        const float amax = largest_magnitude(x, count);
        const uint32_t code = is_nvfp4 ? f32_to_e4m3(amax / 6.0f / global) : block::e8m0_for(amax);
        const float half_scale =
            is_nvfp4 ? 0.5f * (e4m3_to_f32(static_cast<uint8_t>(code)) * global) : block::e8m0_halved(code);
        parts.scales.view().as<uint8_t>()[row_idx * groups + g] = static_cast<uint8_t>(code);
        encode_e2m1(x, g * group, count, half_scale, out);
      }
    }
  }
  return parts;
}

void require_own_block_size(const FormatInfo& format, int64_t own, const QuantizeOptions& options) {
  const int64_t asked = options.block_size.value_or(0);
  require(asked <= 0 || asked == own, "quantize: block_size is ", asked, ", ", format.name, " has ", own);
  require(options.symmetric, "quantize: symmetric is false, but ", format.name, " has no zeros");
}

QuantParts quantize_rows(Format format, const TensorView& array, const Stack& stack) {
  const FormatInfo& entry = info(format);
  const int64_t bytes = row_bytes(format, stack.k);
  const bool is_plain = entry.block_size == 1;
  const DType type = format == Format::kF32    ? DType::kF32
                     : format == Format::kF16  ? DType::kF16
                     : format == Format::kBF16 ? DType::kBF16
                                               : DType::kU8;
  QuantParts parts{.codes = Tensor(type, stack.shape(stack.n, is_plain ? stack.k : bytes))};
  std::vector<float> values(static_cast<size_t>(stack.k));
  for (int64_t row = 0; row < stack.num_rows(); ++row) {
    read_row(array, row, values.data());
    encode_row(format, values.data(), stack.k, parts.codes.view().as<std::byte>() + row * bytes);
  }
  return parts;
}

// The group size that makes `columns` groups of k values.
int64_t group_from_columns(std::string_view name, int64_t k, int64_t columns) {
  if (columns == 1) {
    return k;
  }
  for (int64_t group = 16; group < k; group *= 2) {
    if (ceil_div(k, group) == columns) {
      return group;
    }
  }
  fail(ErrorCode::kInvalidArgument, "dequantize: scales have ", columns, " columns, no block_size of ", name,
       " gives as many for rows of ", k, " values");
}

void require_part(const FormatInfo& format, std::string_view name, const TensorView& part, bool needed) {
  require(needed || !part, "dequantize: ", name, " are given, ", format.name, " has none");
  require(!needed || static_cast<bool>(part), "dequantize: ", name, " are missing, ", format.name, " needs them");
  if (part) {
    require(part.is_contiguous(), "dequantize: ", name, " must be contiguous");
  }
}

void require_count(std::string_view name, const TensorView& part, int64_t expected) {
  require(part.num_elements() == expected, "dequantize: ", name, " have shape ", shape_text(part.dims()), ", expected ",
          expected, " elements");
}

template <class F>
void check_pad_bits(const QuantPartViews& parts, const Stack& stack, int64_t groups) {
  const int64_t bytes = ceil_div<int64_t>(stack.k * F::kBits, 8);
  const int64_t zero_bytes = ceil_div<int64_t>(groups * F::kBits, 8);
  const bool packed_zeros = parts.zeros && parts.zeros.dtype == DType::kU8;
  for (int64_t row = 0; row < stack.num_rows(); ++row) {
    require(stack.k == 0 || pad_bits(parts.codes.as<const std::byte>() + row * bytes, F::kBits, stack.k) == 0,
            "dequantize: codes have bits behind the last value of row ", row);
    if (packed_zeros && groups > 0) {
      const std::byte* zeros = parts.zeros.as<const std::byte>() + row * zero_bytes;
      require(pad_bits(zeros, F::kBits, groups) == 0, "dequantize: zeros have bits behind the last group of row ", row);
    }
  }
  if (F::kBits == 3 && parts.zeros) {
    const int64_t per_row = packed_zeros ? zero_bytes : groups;
    for (int64_t i = 0; i < stack.num_rows() * groups; ++i) {
      const float zero = packed_zeros
                             ? static_cast<float>(read_code(parts.zeros.as<const std::byte>() + i / groups * per_row,
                                                            F::kBits, i % groups))
                             : read_float_scale(parts.zeros.dtype, parts.zeros.data, i);
      require(zero == F::kDefaultZero, "dequantize: zeros have the value ", zero, ", ", F::kName, " knows only ",
              F::kDefaultZero);
    }
  }
}

template <class F>
void dequantize_scaled(Format format, const QuantPartViews& parts, const Stack& stack, float* values) {
  const FormatInfo& entry = info(format);
  const bool may_lack_scales = F::kSharedScales && parts.global_scale;
  require_part(entry, "scales", parts.scales, parts.scales || !may_lack_scales);
  require_part(entry, "zeros", parts.zeros, F::kHasZeros && parts.zeros);
  require_part(entry, "global_scale", parts.global_scale, !F::kHasZeros && parts.global_scale);

  int64_t group = F::kScaleGroup > 0 ? F::kScaleGroup : stack.k;
  int64_t scales_per_matrix = 0;
  if (parts.scales) {
    const int64_t columns = parts.scales.rank > 0 ? parts.scales.dim(parts.scales.rank - 1) : 1;
    const int64_t count = parts.scales.num_elements();
    if (F::kSharedScales) {
      const int64_t blocks = ceil_div(stack.n, kSquareBlock) * ceil_div(stack.k, kSquareBlock);
      if (count == 1 || count == stack.num_rows()) {
        group = stack.k;
        scales_per_matrix = count == 1 ? 0 : stack.n;
      } else {
        require(count == stack.num_matrices * blocks, "dequantize: scales have shape ", shape_text(parts.scales.dims()),
                ", expected [1], one a row or 128 x 128 blocks");
        group = kSquareBlock;
        scales_per_matrix = blocks;
      }
    } else {
      if (F::kScaleGroup == 0) {
        const bool one_a_row = count == stack.num_rows();
        group = group_from_columns(entry.name, stack.k, one_a_row ? 1 : columns);
      }
      scales_per_matrix = stack.n * (group > 0 ? ceil_div(stack.k, group) : 1);
      require_count("scales", parts.scales, stack.num_matrices * scales_per_matrix);
    }
  }
  const int64_t groups = stack.k > 0 ? ceil_div(stack.k, group) : 1;
  if (parts.zeros) {
    require(parts.zeros.dtype == DType::kU8 || parts.zeros.dtype == DType::kF32 || parts.zeros.dtype == DType::kF16 ||
                parts.zeros.dtype == DType::kBF16,
            "dequantize: zeros have type ", to_string(parts.zeros.dtype), ", expected uint8 or floats");
    const bool packed = parts.zeros.dtype == DType::kU8;
    require_count("zeros", parts.zeros, stack.num_rows() * (packed ? ceil_div<int64_t>(groups * F::kBits, 8) : groups));
  }
  if (parts.global_scale) {
    require(parts.global_scale.dtype == DType::kF32, "dequantize: global_scale has type ",
            to_string(parts.global_scale.dtype), ", expected float32");
    require(parts.global_scale.num_elements() == 1 || parts.global_scale.num_elements() == stack.num_matrices,
            "dequantize: global_scale has shape ", shape_text(parts.global_scale.dims()), ", expected one a matrix");
  }
  check_pad_bits<F>(parts, stack, groups);

  const int64_t bytes = row_bytes(format, stack.k);
  for (int64_t idx = 0; idx < stack.num_matrices; ++idx) {
    QuantMatrix matrix{.format = format,
                       .n = stack.n,
                       .k = stack.k,
                       .codes = parts.codes.as<const std::byte>() + idx * stack.n * bytes,
                       .group_size = group};
    if (parts.scales) {
      matrix.scales = TensorView(
          parts.scales.as<std::byte>() + idx * scales_per_matrix * static_cast<int64_t>(size_of(parts.scales.dtype)),
          parts.scales.dtype, {scales_per_matrix == 0 ? 1 : scales_per_matrix});
    }
    if (parts.zeros) {
      const int64_t count = parts.zeros.num_elements() / stack.num_matrices;
      matrix.zeros =
          TensorView(parts.zeros.as<std::byte>() + idx * count * static_cast<int64_t>(size_of(parts.zeros.dtype)),
                     parts.zeros.dtype, {count});
    }
    if (parts.global_scale) {
      const int64_t at = parts.global_scale.num_elements() == 1 ? 0 : idx;
      matrix.global_scale = TensorView(parts.global_scale.as<float>() + at, DType::kF32, {1});
    }
    decode_rows(matrix, 0, stack.n, values + idx * stack.n * stack.k);
  }
}

}  // namespace

QuantParts quantize(Format format, const TensorView& array, const QuantizeOptions& options) {
  require(static_cast<bool>(array), "quantize: array is required");
  const Stack stack = stack_of("quantize", array.dims());
  require(array.dtype == DType::kF32 || array.dtype == DType::kF16 || array.dtype == DType::kBF16,
          "quantize: array has type ", to_string(array.dtype), ", expected float32 or float16 or bfloat16");
  const FormatInfo& entry = info(format);
  if (!entry.is_scaled) {
    require_own_block_size(entry, entry.block_size, options);
    return quantize_rows(format, array, stack);
  }
  return visit_scaled_format(format, [&]<class F>() {
    if constexpr (F::kHasZeros) {
      return quantize_affine<F>(array, stack, options);
    } else if constexpr (F::kScaleGroup > 0) {
      require_own_block_size(entry, F::kScaleGroup, options);
      return quantize_e2m1(format, array, stack, F::kScaleGroup);
    } else {
      require(options.symmetric, "quantize: symmetric is false, but ", entry.name, " has no zeros");
      return quantize_fp8(array, stack, options);
    }
  });
}

Tensor dequantize(Format format, const QuantPartViews& parts, std::span<const int64_t> shape) {
  const Stack stack = stack_of("dequantize", shape);
  const FormatInfo& entry = info(format);
  require(static_cast<bool>(parts.codes), "dequantize: codes are missing");
  require(parts.codes.is_contiguous(), "dequantize: codes must be contiguous");
  const int64_t bytes = row_bytes(format, stack.k);
  require(static_cast<int64_t>(parts.codes.num_bytes()) == stack.num_rows() * bytes, "dequantize: codes have shape ",
          shape_text(parts.codes.dims()), " of ", to_string(parts.codes.dtype), ", expected ", stack.num_rows(),
          " rows of ", bytes, " bytes");
  Tensor values(DType::kF32, shape);
  float* out = values.view().as<float>();
  if (stack.num_rows() == 0 || stack.k == 0) {
    return values;
  }
  if (entry.is_scaled) {
    visit_scaled_format(format, [&]<class F>() { dequantize_scaled<F>(format, parts, stack, out); });
    return values;
  }
  require_part(entry, "scales", parts.scales, false);
  require_part(entry, "zeros", parts.zeros, false);
  require_part(entry, "global_scale", parts.global_scale, false);
  for (int64_t row = 0; row < stack.num_rows(); ++row) {
    decode_row(format, parts.codes.as<const std::byte>() + row * bytes, stack.k, out + row * stack.k);
  }
  return values;
}

}  // namespace shoal
