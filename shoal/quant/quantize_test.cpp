// Formats whose scales stand apart, and quantize / dequantize in every format: bytes worked by hand, formulas in f64,
// error bounds, rejections.
#include "shoal/quant/quantize.h"

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "shoal/base/float_bits.h"
#include "shoal/quant/code_stream.h"
#include "shoal/quant/quant_matrix.h"
#include "testkit/expect_error.h"
#include "testkit/testkit.h"

namespace shoal {
namespace {

using testkit::expect_error;
using testkit::Random;

constexpr Format kInts[] = {Format::kINT2, Format::kINT3, Format::kINT4, Format::kINT8};

std::vector<Format> every_format() {
  return {
#define SHOAL_FORMAT(Struct, header) Format::k##Struct,
#define SHOAL_SCALED_FORMAT(Struct, header) Format::k##Struct,
#include "shoal/quant/formats.def"
#undef SHOAL_FORMAT
#undef SHOAL_SCALED_FORMAT
  };
}

QuantPartViews views(const QuantParts& parts) { return {parts.codes, parts.scales, parts.zeros, parts.global_scale}; }

Tensor array_of(DType type, std::vector<int64_t> shape, const std::vector<float>& values) {
  Tensor array(type, shape);
  for (size_t i = 0; i < values.size(); ++i) {
    switch (type) {
      case DType::kF16: array.span<uint16_t>()[i] = f32_to_f16(values[i]); break;
      case DType::kBF16: array.span<uint16_t>()[i] = f32_to_bf16(values[i]); break;
      default: array.span<float>()[i] = values[i]; break;
    }
  }
  return array;
}

std::vector<float> floats(const Tensor& tensor) {
  const std::span<float> span = tensor.span<float>();
  return {span.begin(), span.end()};
}

double relative_error(const std::vector<float>& actual, const std::vector<float>& expected) {
  double error = 0.0;
  double norm = 0.0;
  for (size_t i = 0; i < expected.size(); ++i) {
    error += (actual[i] - expected[i]) * static_cast<double>(actual[i] - expected[i]);
    norm += static_cast<double>(expected[i]) * expected[i];
  }
  return std::sqrt(error / norm);
}

std::vector<uint8_t> packed(int bits, const std::vector<uint32_t>& codes) {
  std::vector<uint8_t> bytes((codes.size() * static_cast<size_t>(bits) + 7) / 8);
  for (size_t i = 0; i < codes.size(); ++i) {
    write_code(reinterpret_cast<std::byte*>(bytes.data()), bits, static_cast<int64_t>(i), codes[i]);
  }
  return bytes;
}

// Worked examples.
TEST(CodeStream, GoldenBytes) {
  EXPECT_EQ(packed(3, {0, 1, 2, 3, 4, 5, 6, 7}), (std::vector<uint8_t>{0x88, 0xc6, 0xfa}));
  EXPECT_EQ(packed(3, {0, 4, 7}), (std::vector<uint8_t>{0xe0, 0x01}));
  EXPECT_EQ(packed(3, {4, 4, 4, 4, 4, 4, 4, 4}), (std::vector<uint8_t>{0x24, 0x49, 0x92}));
  EXPECT_EQ(packed(2, {0, 1, 2, 3}), (std::vector<uint8_t>{0xe4}));
  EXPECT_EQ(packed(4, {0xa, 0x5, 0x3}), (std::vector<uint8_t>{0x5a, 0x03}));
}

TEST(CodeStream, ReadsWhatItWroteAndSeesPadBits) {
  Random random(1);
  for (const int bits : {1, 2, 3, 4, 5, 6, 7, 8}) {
    std::vector<uint32_t> codes(37);
    for (uint32_t& code : codes) {
      code = static_cast<uint32_t>(random.integer(0, (1 << bits) - 1));
    }
    std::vector<uint8_t> bytes = packed(bits, codes);
    const auto* row = reinterpret_cast<const std::byte*>(bytes.data());
    for (size_t i = 0; i < codes.size(); ++i) {
      EXPECT_EQ(read_code(row, bits, static_cast<int64_t>(i)), codes[i]);
    }
    EXPECT_EQ(pad_bits(row, bits, 37), 0u);
    bytes.back() |= 0x80;
    EXPECT_EQ(pad_bits(row, bits, 37) != 0, bits != 8);
  }
}

TEST(ScaledFormats, NamesSizesAndRows) {
  EXPECT_EQ(row_bytes(Format::kINT3, 3), 2);
  EXPECT_EQ(row_bytes(Format::kINT3, 32), 12);
  EXPECT_EQ(row_bytes(Format::kINT2, 5), 2);
  EXPECT_EQ(row_bytes(Format::kNVFP4, 16), 8);
  EXPECT_EQ(row_bytes(Format::kFP8_E4M3, 7), 7);
  EXPECT_EQ(info(Format::kINT3).bits_per_value(), 3.0);
  EXPECT_EQ(format_from_name("nvfp4"), Format::kNVFP4);
  EXPECT_EQ(format_from_name("gguf_nvfp4"), Format::kGGUF_NVFP4);
  EXPECT_EQ(format_from_ggml_type(40), Format::kGGUF_NVFP4);
  float value = 0.0f;
  std::byte code{};
  expect_error(ErrorCode::kInvalidArgument, "decode int4: its scales stand apart from its rows",
               [&] { decode_row(Format::kINT4, &code, 1, &value); });
  expect_error(ErrorCode::kInvalidArgument, "encode fp8_e4m3: its scales stand apart from its rows",
               [&] { encode_row(Format::kFP8_E4M3, &value, 1, &code); });
}

// value = (code - zero) * scale for every code, with every kind of zeros.
TEST(DecodeRows, AffineByFormula) {
  for (const Format format : kInts) {
    const int bits = info(format).block_bytes;
    const int64_t k = 70;  // three groups of 32, the last partial
    const int64_t groups = 3;
    Random random(static_cast<uint64_t>(bits));
    const int64_t bytes = row_bytes(format, k);
    std::vector<std::byte> codes(static_cast<size_t>(2 * bytes));
    std::vector<uint32_t> plain_codes;
    for (int64_t row = 0; row < 2; ++row) {
      for (int64_t i = 0; i < k; ++i) {
        plain_codes.push_back(static_cast<uint32_t>(random.integer(0, (1 << bits) - 1)));
        write_code(codes.data() + row * bytes, bits, i, plain_codes.back());
      }
    }
    const Tensor scales = array_of(DType::kF16, {2, groups}, {0.5f, -0.25f, 3.0f, 1.5f, 0.125f, 2.0f});
    const std::vector<uint32_t> zero_codes = {1, 0, 2, 3, 2, 1};
    const int64_t zero_bytes = (groups * bits + 7) / 8;
    std::vector<uint8_t> zeros(static_cast<size_t>(2 * zero_bytes));
    for (int64_t i = 0; i < 6; ++i) {
      write_code(reinterpret_cast<std::byte*>(zeros.data()) + i / 3 * zero_bytes, bits, i % 3,
                 zero_codes[static_cast<size_t>(i)]);
    }
    const Tensor typed = array_of(DType::kBF16, {2, groups}, {1.5f, -2.0f, 0.25f, 7.0f, 0.0f, 1.0f});
    const std::vector<float> typed_values = {1.5f, -2.0f, 0.25f, 7.0f, 0.0f, 1.0f};
    for (const int kind : {0, 1, 2}) {
      QuantMatrix matrix{.format = format, .n = 2, .k = k, .codes = codes.data(), .scales = scales, .group_size = 32};
      if (kind == 1) {
        matrix.zeros = TensorView(zeros.data(), DType::kU8, {2, zero_bytes});
      } else if (kind == 2) {
        matrix.zeros = typed;
      }
      std::vector<float> values(static_cast<size_t>(2 * k));
      decode_rows(matrix, 0, 2, values.data());
      for (int64_t i = 0; i < 2 * k; ++i) {
        const size_t g = static_cast<size_t>(i / k * groups + i % k / 32);
        const double scale = f16_to_f32(scales.span<uint16_t>()[g]);
        const double zero = kind == 0   ? 1 << (bits - 1)
                            : kind == 1 ? static_cast<double>(zero_codes[g])
                                        : static_cast<double>(typed_values[g]);
        EXPECT_EQ(values[static_cast<size_t>(i)], (plain_codes[static_cast<size_t>(i)] - zero) * scale);
      }
    }
  }
}

TEST(DecodeRows, E2M1AndFp8ByHand) {
  const std::vector<uint8_t> bytes = {0x10, 0x32, 0x54, 0x76, 0x98, 0xba, 0xdc, 0xfe};  // codes 0..15, low nibble first
  const std::vector<float> numbers = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, 0, -0.5f, -1, -1.5f, -2, -3, -4, -6};
  const auto* codes = reinterpret_cast<const std::byte*>(bytes.data());
  uint8_t scale = 0x3c;  // e4m3 1.5
  float global = 0.125f;
  std::vector<float> values(16);
  decode_rows({.format = Format::kNVFP4,
               .n = 1,
               .k = 16,
               .codes = codes,
               .scales = TensorView(&scale, DType::kF8E4M3, {1, 1}),
               .global_scale = TensorView(&global, DType::kF32, {1})},
              0, 1, values.data());
  for (size_t i = 0; i < 16; ++i) {
    EXPECT_EQ(values[i], numbers[i] * 1.5f * 0.125f);
  }
  for (const auto& [code, factor] : {std::pair<uint8_t, double>{130, 8.0}, {0, 0x1p-127}}) {
    scale = code;
    decode_rows({.format = Format::kMXFP4,
                 .n = 1,
                 .k = 16,
                 .codes = codes,
                 .scales = TensorView(&scale, DType::kF8E8M0, {1, 1})},
                0, 1, values.data());
    for (size_t i = 0; i < 16; ++i) {
      EXPECT_EQ(values[i], numbers[i] * factor);
    }
  }
  scale = 255;
  decode_rows({.format = Format::kMXFP4, .n = 1, .k = 1, .codes = codes, .scales = TensorView(&scale, DType::kU8, {1})},
              0, 1, values.data());
  EXPECT_TRUE(std::isnan(values[0]));

  const std::vector<uint8_t> fp8 = {0x38, 0xb8, 0x7e, 0x01, 0x7f, 0x00};  // 1, -1, 448, 2^-9, NaN, 0
  QuantMatrix matrix{.format = Format::kFP8_E4M3,
                     .n = 1,
                     .k = 6,
                     .codes = reinterpret_cast<const std::byte*>(fp8.data()),
                     .global_scale = TensorView(&global, DType::kF32, {1})};
  decode_rows(matrix, 0, 1, values.data());
  EXPECT_EQ(std::vector<float>(values.begin(), values.begin() + 4),
            (std::vector<float>{0.125f, -0.125f, 56.0f, 0x1p-12f}));
  EXPECT_TRUE(std::isnan(values[4]));
  EXPECT_EQ(values[5], 0.0f);
}

// Square blocks, rows and the whole matrix: the scale of (n, k) is the one the contract names.
TEST(DecodeRows, Fp8ScaleGrids) {
  constexpr int64_t kN = 5;
  constexpr int64_t kK = 7;
  const std::vector<std::byte> codes(kN * kK, std::byte{0x38});
  std::vector<float> values(kN * kK);
  const auto decode = [&](std::vector<float> scales, int64_t group_size) {
    decode_rows({.format = Format::kFP8_E4M3,
                 .n = kN,
                 .k = kK,
                 .codes = codes.data(),
                 .scales = TensorView(scales.data(), DType::kF32, {static_cast<int64_t>(scales.size())}),
                 .group_size = group_size},
                0, kN, values.data());
  };
  decode({1, 2, 3, 4, 5, 6}, 3);  // 2 x 3 blocks of 3 x 3
  for (int64_t i = 0; i < kN * kK; ++i) {
    EXPECT_EQ(values[static_cast<size_t>(i)], static_cast<float>(1 + i / kK / 3 * 3 + i % kK / 3));
  }
  decode({1, 2, 3, 4, 5}, 0);
  for (int64_t i = 0; i < kN * kK; ++i) {
    EXPECT_EQ(values[static_cast<size_t>(i)], static_cast<float>(1 + i / kK));
  }
  decode({9}, 0);
  EXPECT_EQ(values, std::vector<float>(kN * kK, 9.0f));
  expect_error(ErrorCode::kInvalidArgument, "fp8_e4m3: scales have 4 elements, expected 5 x 3", [&] {
    decode({1, 2, 3, 4}, 3);
  });
}

TEST(DecodeRows, RejectsPartsThatDoNotFit) {
  std::vector<std::byte> codes(64);
  std::vector<float> values(64);
  std::vector<float> floats(8);
  const QuantMatrix good{.format = Format::kINT4,
                         .n = 2,
                         .k = 32,
                         .codes = codes.data(),
                         .scales = TensorView(floats.data(), DType::kF32, {2, 1}),
                         .group_size = 32};
  const auto error = [&](std::string_view part, auto change) {
    QuantMatrix matrix = good;
    change(matrix);
    expect_error(ErrorCode::kInvalidArgument, part, [&] { decode_rows(matrix, 0, 2, values.data()); });
  };
  error("int4: scales are missing", [](QuantMatrix& m) { m.scales = {}; });
  error("int4: scales have 2 elements, expected 2 x 2", [](QuantMatrix& m) { m.group_size = 16; });
  error("int4: zeros have 8 elements, expected 2 x 1",
        [&](QuantMatrix& m) { m.zeros = TensorView(floats.data(), DType::kF32, {8}); });
  error("int4: global_scale is given",
        [&](QuantMatrix& m) { m.global_scale = TensorView(floats.data(), DType::kF32, {1}); });
  error("mxfp4: groups of 16 values, expected 32", [](QuantMatrix& m) {
    m.format = Format::kMXFP4;
    m.group_size = 16;
  });
  error("mxfp4: scales have type float32, expected float8e8m0", [](QuantMatrix& m) { m.format = Format::kMXFP4; });
  error("nvfp4: scales have type float32, expected float8e4m3fn", [](QuantMatrix& m) {
    m.format = Format::kNVFP4;
    m.group_size = 16;
    m.scales.shape[1] = 2;
    m.scales.strides[0] = 2;
  });
}

// Bounds of the whole array's error, |x' - x| / |x|, for normal values: about what the best scales reach, plus a tenth.
struct Bound {
  Format format;
  double relative;
};

TEST(Quantize, ErrorOfNormalValues) {
  constexpr int64_t kN = 64;
  constexpr int64_t kK = 512;
  const std::vector<float> values = Random(3).normals(kN * kK, 0.03f);
  for (const Bound& bound : {Bound{Format::kF32, 0}, Bound{Format::kF16, 2.5e-4}, Bound{Format::kBF16, 2e-3},
                             Bound{Format::kINT2, 0.55}, Bound{Format::kINT3, 0.23}, Bound{Format::kINT4, 0.1},
                             Bound{Format::kINT8, 0.006}, Bound{Format::kFP8_E4M3, 0.03}, Bound{Format::kMXFP4, 0.13},
                             Bound{Format::kNVFP4, 0.11}, Bound{Format::kQ4_0, 0.1}, Bound{Format::kQ8_0, 0.006},
                             Bound{Format::kQ4_K, 0.08}, Bound{Format::kQ6_K, 0.025}}) {
    for (const DType type : {DType::kF32, DType::kF16, DType::kBF16}) {
      const Tensor array = array_of(type, {kN, kK}, values);
      const QuantParts parts = quantize(bound.format, array);
      const Tensor back = dequantize(bound.format, views(parts), array.view().dims());
      const double error = relative_error(floats(back), values);
      EXPECT_LE(error, bound.relative + (type == DType::kF32 ? 0.0 : 3e-3)) << info(bound.format).name;
    }
  }
}

// Every format that can be made gives back its own values: quantize(dequantize(parts)) keeps them.
TEST(Quantize, EveryFormatComesBack) {
  size_t num_formats = 0;
  for (const Format format : every_format()) {
    if (!info(format).can_encode && !info(format).is_scaled) {
      continue;
    }
    ++num_formats;
    const std::vector<int64_t> shape = {2, 3, 512};
    const Tensor array = array_of(DType::kF32, shape, Random(4).normals(2 * 3 * 512));
    const QuantParts parts = quantize(format, array);
    const Tensor back = dequantize(format, views(parts), shape);
    EXPECT_EQ(back.view().rank, 3);
    const double first = relative_error(floats(back), floats(array));
    EXPECT_LT(first, 0.56) << info(format).name;
    const QuantParts again = quantize(format, back);
    const Tensor once_more = dequantize(format, views(again), shape);
    EXPECT_LT(relative_error(floats(once_more), floats(back)), std::max(first * 0.6, 1e-6)) << info(format).name;
  }
  EXPECT_GE(num_formats, 19u);
}

TEST(Quantize, AffineStaysWithinItsBound) {
  for (const Format format : kInts) {
    for (const int64_t block_size : {16, 32, 64, -1}) {
      for (const bool symmetric : {true, false}) {
        if (format == Format::kINT3 && !symmetric) {
          continue;
        }
        constexpr int64_t kN = 7;
        constexpr int64_t kK = 83;  // no multiple of anything
        Random random(static_cast<uint64_t>(block_size + 100));
        std::vector<float> values = random.normals(kN * kK);
        for (int64_t i = 0; i < kK; ++i) {
          values[static_cast<size_t>(i)] = std::fabs(values[static_cast<size_t>(i)]);  // one-sided
          values[static_cast<size_t>(kK + i)] = 0.0f;
        }
        const Tensor array = array_of(DType::kF32, {kN, kK}, values);
        const QuantParts parts = quantize(format, array, {.block_size = block_size, .symmetric = symmetric});
        EXPECT_EQ(static_cast<bool>(parts.zeros.view()), !symmetric);
        const int64_t groups = parts.scales.view().dim(1);
        EXPECT_EQ(groups, block_size < 0 ? 1 : (kK + block_size - 1) / block_size);
        const std::vector<float> back = floats(dequantize(format, views(parts), std::vector<int64_t>{kN, kK}));
        for (int64_t i = 0; i < kN * kK; ++i) {
          const int64_t group = block_size < 0 ? 0 : i % kK / block_size;
          const float scale = parts.scales.span<float>()[static_cast<size_t>(i / kK * groups + group)];
          EXPECT_GE(scale, 0.0f);
          const double bound = (symmetric ? 0.5001 : 1.0001) * scale;
          ASSERT_NEAR(back[static_cast<size_t>(i)], values[static_cast<size_t>(i)], bound)
              << info(format).name << " block_size " << block_size << " value " << i;
        }
      }
    }
  }
}

// The scale rule in f64.
TEST(Quantize, Nvfp4ByTheRule) {
  const std::vector<float> values = Random(6).normals(4 * 40, 2.0f);
  const Tensor array = array_of(DType::kF32, {4, 40}, values);
  const QuantParts parts = quantize(Format::kNVFP4, array);
  double amax = 0.0;
  for (const float value : values) {
    amax = std::max(amax, std::fabs(static_cast<double>(value)));
  }
  const double global = parts.global_scale.span<float>()[0];
  EXPECT_FLOAT_EQ(static_cast<float>(global), static_cast<float>(amax / (6.0 * 448.0)));
  constexpr double kMagnitudes[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  for (int64_t row = 0; row < 4; ++row) {
    for (int64_t g = 0; g < 3; ++g) {
      double block_amax = 0.0;
      const int64_t last = std::min<int64_t>(40, 16 * g + 16);
      for (int64_t i = 16 * g; i < last; ++i) {
        block_amax = std::max(block_amax, std::fabs(static_cast<double>(values[static_cast<size_t>(row * 40 + i)])));
      }
      const uint8_t code = parts.scales.span<uint8_t>()[static_cast<size_t>(row * 3 + g)];
      EXPECT_EQ(code, f32_to_e4m3(static_cast<float>(block_amax / 6.0 / global)));
      for (int64_t i = 16 * g; i < last; ++i) {
        const double x = values[static_cast<size_t>(row * 40 + i)] / (e4m3_to_f32(code) * global);
        uint32_t nearest = 0;
        for (uint32_t m = 1; m < 8; ++m) {
          if (std::fabs(kMagnitudes[m] - std::fabs(x)) < std::fabs(kMagnitudes[nearest] - std::fabs(x))) {
            nearest = m;
          }
        }
        const uint32_t actual = read_code(parts.codes.view().as<std::byte>() + row * 20, 4, i);
        EXPECT_EQ(actual & 7, nearest);
        EXPECT_EQ(actual >> 3, nearest != 0 && x < 0 ? 1u : 0u);
      }
    }
  }
}

TEST(Quantize, Fp8Grids) {
  const std::vector<float> values = Random(7).normals(130 * 140);
  const Tensor array = array_of(DType::kF32, {130, 140}, values);
  for (const auto& [block_size, shape] :
       {std::pair<int64_t, std::vector<int64_t>>{128, {2, 2}}, {-1, {130, 1}}, {0, {1}}}) {
    const QuantParts parts = quantize(Format::kFP8_E4M3, array, {.block_size = block_size});
    EXPECT_EQ(std::vector<int64_t>(parts.scales.view().dims().begin(), parts.scales.view().dims().end()), shape);
    const std::vector<float> back = floats(dequantize(Format::kFP8_E4M3, views(parts), array.view().dims()));
    for (size_t i = 0; i < values.size(); ++i) {
      ASSERT_NEAR(back[i], values[i], std::fabs(values[i]) / 16 + 1e-4);
    }
  }
}

TEST(Quantize, ZerosAndTinyValues) {
  for (const Format format : every_format()) {
    if (!info(format).can_encode && !info(format).is_scaled) {
      continue;
    }
    for (const float value : {0.0f, 1e-42f}) {
      const std::vector<int64_t> shape = {1, 256};
      const Tensor array = array_of(DType::kF32, shape, std::vector<float>(256, value));
      for (const float back : floats(dequantize(format, views(quantize(format, array)), shape))) {
        ASSERT_TRUE(std::fabs(back) <= 2e-42f) << info(format).name << " gave " << back;
      }
    }
  }
}

TEST(Quantize, StridedAndSmallArrays) {
  const std::vector<float> values = Random(8).normals(6 * 8);
  const Tensor array = array_of(DType::kF32, {6, 8}, values);
  TensorView transposed = array.view();
  std::swap(transposed.shape[0], transposed.shape[1]);
  std::swap(transposed.strides[0], transposed.strides[1]);
  const QuantParts parts = quantize(Format::kF32, transposed);
  for (int64_t i = 0; i < 48; ++i) {
    EXPECT_EQ(parts.codes.span<float>()[static_cast<size_t>(i)], values[static_cast<size_t>(i % 6 * 8 + i / 6)]);
  }
  for (const Format format : {Format::kINT3, Format::kFP8_E4M3, Format::kNVFP4, Format::kQ8_0}) {
    for (const std::vector<int64_t>& shape : {std::vector<int64_t>{32}, {0, 32}, {3, 0}, {2, 0, 32}, {2, 2, 1, 32}}) {
      const Tensor small(DType::kF32, shape);
      for (float& value : small.span<float>()) {
        value = 1.0f;
      }
      const std::vector<float> back = floats(dequantize(format, views(quantize(format, small)), shape));
      EXPECT_EQ(back.size(), small.span<float>().size());
      for (const float value : back) {
        EXPECT_NEAR(value, 1.0f, 0.05f) << info(format).name;
      }
    }
  }
}

TEST(Quantize, Rejections) {
  const Tensor array = array_of(DType::kF32, {2, 48}, std::vector<float>(96, 1.0f));
  const auto error = [&](Format format, QuantizeOptions options, std::string_view part) {
    expect_error(ErrorCode::kInvalidArgument, part, [&] { quantize(format, array, options); });
  };
  error(Format::kINT4, {.block_size = 24}, "quantize: block_size is 24, expected a power of two from 16");
  error(Format::kINT4, {.block_size = 8}, "quantize: block_size is 8");
  error(Format::kINT3, {.symmetric = false}, "quantize: int3 has no zeros");
  error(Format::kMXFP4, {.block_size = 16}, "quantize: block_size is 16, mxfp4 has 32");
  error(Format::kNVFP4, {.symmetric = false}, "quantize: symmetric is false, but nvfp4 has no zeros");
  error(Format::kFP8_E4M3, {.block_size = 64}, "quantize: block_size is 64, expected 128");
  error(Format::kQ4_0, {.block_size = 16}, "quantize: block_size is 16, q4_0 has 32");
  error(Format::kQ4_0, {}, "q4_0: a row of 48 values is not a whole number of blocks of 32");
  expect_error(ErrorCode::kInvalidArgument, "quantize: array is required", [] { quantize(Format::kINT4, {}); });
  const Tensor ints(DType::kI32, {2, 2});
  expect_error(ErrorCode::kInvalidArgument, "quantize: array has type int32", [&] { quantize(Format::kF32, ints); });
  expect_error(ErrorCode::kUnsupported, "encode iq2_xxs", [] {
    const Tensor wide = array_of(DType::kF32, {1, 256}, std::vector<float>(256));
    quantize(Format::kIQ2_XXS, wide);
  });
  for (const Format format : {Format::kINT4, Format::kFP8_E4M3, Format::kMXFP4, Format::kNVFP4}) {
    const Tensor bad = array_of(DType::kF32, {1, 32}, std::vector<float>(32, INFINITY));
    expect_error(ErrorCode::kInvalidArgument, "quantize: array has the value inf", [&] { quantize(format, bad); });
  }
}

TEST(Dequantize, Rejections) {
  const std::vector<int64_t> shape = {2, 41};
  const Tensor array = array_of(DType::kF32, shape, Random(9).normals(82));
  const QuantParts parts = quantize(Format::kINT3, array, {.block_size = 16});
  const auto error = [&](std::string_view part, auto change) {
    QuantPartViews bad = views(parts);
    change(bad);
    expect_error(ErrorCode::kInvalidArgument, part, [&] { dequantize(Format::kINT3, bad, shape); });
  };
  error("dequantize: codes are missing", [](QuantPartViews& v) { v.codes = {}; });
  error("dequantize: codes have shape [1, 16]", [](QuantPartViews& v) { v.codes = v.codes.rows(0, 1); });
  error("dequantize: scales are missing", [](QuantPartViews& v) { v.scales = {}; });
  error("dequantize: scales have 7 columns, no block_size of int3", [&](QuantPartViews& v) {
    v.scales = TensorView(v.scales.data, DType::kF32, {2, 7});
  });
  error("dequantize: scales have shape [1, 3], expected 6 elements",
        [](QuantPartViews& v) { v.scales = v.scales.rows(0, 1); });
  error("dequantize: global_scale are given, int3 has none", [](QuantPartViews& v) { v.global_scale = v.scales; });
  uint8_t zeros[4] = {0x24, 0x01, 0x24, 0x01};
  error("dequantize: zeros have shape [3], expected 4 elements",
        [&](QuantPartViews& v) { v.zeros = TensorView(zeros, DType::kU8, {3}); });
  error("dequantize: zeros have type int8", [&](QuantPartViews& v) { v.zeros = TensorView(zeros, DType::kI8, {4}); });
  QuantPartViews with_zeros = views(parts);
  with_zeros.zeros = TensorView(zeros, DType::kU8, {2, 2});
  EXPECT_EQ(floats(dequantize(Format::kINT3, with_zeros, shape)),
            floats(dequantize(Format::kINT3, views(parts), shape)));
  zeros[3] = 0x03;
  error("dequantize: zeros have bits behind the last group of row 1", [&](QuantPartViews& v) {
    v.zeros = TensorView(zeros, DType::kU8, {2, 2});
  });
  zeros[3] = 0x00;
  error("dequantize: zeros have the value 0, int3 knows only 4", [&](QuantPartViews& v) {
    v.zeros = TensorView(zeros, DType::kU8, {2, 2});
  });
  parts.codes.span<uint8_t>()[15] |= 0x80;
  error("dequantize: codes have bits behind the last value of row 0", [](QuantPartViews&) {});

  const Tensor wide = array_of(DType::kF32, {1, 32}, std::vector<float>(32, 1.0f));
  const QuantParts block = quantize(Format::kQ8_0, wide);
  expect_error(ErrorCode::kInvalidArgument, "dequantize: scales are given, q8_0 has none", [&] {
    dequantize(Format::kQ8_0, {.codes = block.codes, .scales = wide}, std::vector<int64_t>{1, 32});
  });
  expect_error(ErrorCode::kInvalidArgument, "dequantize: an array of 0 dimensions",
               [&] { dequantize(Format::kQ8_0, views(block), {}); });
  expect_error(ErrorCode::kInvalidArgument, "dequantize: shape [-1, 32] is not possible", [&] {
    dequantize(Format::kQ8_0, views(block), std::vector<int64_t>{-1, 32});
  });
  const QuantParts fp8 = quantize(Format::kFP8_E4M3, wide);
  expect_error(ErrorCode::kInvalidArgument, "dequantize: scales have shape [2], expected [1], one a row", [&] {
    float scales[2] = {1.0f, 1.0f};
    dequantize(Format::kFP8_E4M3, {.codes = fp8.codes, .scales = TensorView(scales, DType::kF32, {2})},
               std::vector<int64_t>{1, 32});
  });
}

}  // namespace
}  // namespace shoal
