// Number formats against golden files made by the PyPI package `gguf` (tests/golden/make_quant_golden.py), blocks
// worked by hand, and bounds of the error that encoding may make.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <fstream>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "shoal/base/error.h"
#include "shoal/base/float_bits.h"
#include "shoal/quant/format.h"
#include "shoal/quant/iq_grids.h"
#include "shoal/quant/quant_matrix.h"
#include "testkit/testkit.h"

namespace shoal {
namespace {

using testkit::Guarded;
using testkit::Random;

const std::vector<Format> kAllFormats = {
#define SHOAL_FORMAT(Struct, header) Format::k##Struct,
#include "shoal/quant/formats.def"
#undef SHOAL_FORMAT
};

std::vector<Format> encodable_formats(int smallest_block) {
  std::vector<Format> formats;
  for (const Format format : kAllFormats) {
    if (info(format).can_encode && info(format).block_size >= smallest_block) {
      formats.push_back(format);
    }
  }
  return formats;
}

std::string format_name(const testing::TestParamInfo<Format>& parameter) {
  return std::string(info(parameter.param).name);
}

// Blocks with the values that they stand for, or that they were made of.
struct Golden {
  uint32_t num_blocks = 0;
  uint32_t block_bytes = 0;
  uint32_t block_size = 0;
  std::vector<std::byte> blocks;
  std::vector<float> values;
};

Golden read_golden(const std::string& name) {
  const std::string path = concat(SHOAL_TEST_DATA, "/quant/", name, ".bin");
  std::ifstream file(path, std::ios::binary);
  EXPECT_TRUE(file.is_open()) << path;
  Golden golden;
  uint32_t sizes[3] = {};
  file.read(reinterpret_cast<char*>(sizes), sizeof(sizes));
  golden.num_blocks = sizes[0];
  golden.block_bytes = sizes[1];
  golden.block_size = sizes[2];
  golden.blocks.resize(static_cast<size_t>(sizes[0]) * sizes[1]);
  golden.values.resize(static_cast<size_t>(sizes[0]) * sizes[2]);
  file.read(reinterpret_cast<char*>(golden.blocks.data()), static_cast<std::streamsize>(golden.blocks.size()));
  file.read(reinterpret_cast<char*>(golden.values.data()), static_cast<std::streamsize>(golden.values.size() * 4));
  EXPECT_TRUE(file.good()) << path;
  EXPECT_GT(golden.num_blocks, 0u) << path;
  return golden;
}

// The same bits, zeros by sign; any NaN equals any NaN.
testing::AssertionResult same_bits(std::span<const float> actual, std::span<const float> expected) {
  for (size_t i = 0; i < expected.size(); ++i) {
    const bool both_nan = std::isnan(actual[i]) && std::isnan(expected[i]);
    if (!both_nan && std::bit_cast<uint32_t>(actual[i]) != std::bit_cast<uint32_t>(expected[i])) {
      return testing::AssertionFailure() << "value " << i << " is " << actual[i] << ", expected " << expected[i];
    }
  }
  return testing::AssertionSuccess();
}

std::vector<std::byte> encode(Format format, const std::vector<float>& values) {
  std::vector<std::byte> row(static_cast<size_t>(row_bytes(format, static_cast<int64_t>(values.size()))));
  encode_row(format, values.data(), static_cast<int64_t>(values.size()), row.data());
  return row;
}

std::vector<float> decode(Format format, const std::vector<std::byte>& row) {
  std::vector<float> values(row.size() / info(format).block_bytes * info(format).block_size);
  decode_row(format, row.data(), static_cast<int64_t>(values.size()), values.data());
  return values;
}

std::vector<std::byte> bytes_of(std::initializer_list<int> bytes) {
  std::vector<std::byte> result;
  for (const int byte : bytes) {
    result.push_back(static_cast<std::byte>(byte));
  }
  return result;
}

template <class Body>
void expect_error(ErrorCode code, const std::string& message, Body&& body) {
  try {
    body();
    ADD_FAILURE() << "no error, expected: " << message;
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code);
    EXPECT_EQ(std::string(error.what()), message);
  }
}

class EveryFormat : public testing::TestWithParam<Format> {};
class EncodableFormat : public testing::TestWithParam<Format> {};
class EncodableBlock : public testing::TestWithParam<Format> {};  // element types overflow to infinity, as IEEE has it
class GoldenEncoding : public testing::TestWithParam<Format> {};

INSTANTIATE_TEST_SUITE_P(Formats, EveryFormat, testing::ValuesIn(kAllFormats), format_name);
INSTANTIATE_TEST_SUITE_P(Formats, EncodableFormat, testing::ValuesIn(encodable_formats(1)), format_name);
INSTANTIATE_TEST_SUITE_P(Formats, EncodableBlock, testing::ValuesIn(encodable_formats(2)), format_name);
INSTANTIATE_TEST_SUITE_P(Formats, GoldenEncoding,
                         testing::Values(Format::kQ4_0, Format::kQ4_1, Format::kQ5_0, Format::kQ5_1, Format::kQ8_0,
                                         Format::kGGUF_MXFP4),
                         format_name);

// ---- decoding ----

TEST_P(EveryFormat, DecodesGoldenBlocks) {
  const FormatInfo& format = info(GetParam());
  const Golden golden = read_golden(std::string(format.name));
  ASSERT_EQ(golden.block_bytes, static_cast<uint32_t>(format.block_bytes));
  ASSERT_EQ(golden.block_size, static_cast<uint32_t>(format.block_size));
  for (const size_t offset : {0, 1, 3}) {  // blocks lie at any address
    std::vector<std::byte> moved(golden.blocks.size() + offset);
    std::memcpy(moved.data() + offset, golden.blocks.data(), golden.blocks.size());
    Guarded<float> values(golden.values.size());
    decode_row(format.format, moved.data() + offset, static_cast<int64_t>(golden.values.size()), values.data());
    EXPECT_TRUE(same_bits(values.span(), golden.values)) << "offset " << offset;
    EXPECT_TRUE(values.guards_intact());
  }
}

TEST_P(EveryFormat, DecodesRowsOfAMatrix) {
  const FormatInfo& format = info(GetParam());
  const Golden golden = read_golden(std::string(format.name));
  const int64_t n = golden.num_blocks / 2;
  const int64_t k = 2 * format.block_size;
  const QuantMatrix matrix{.format = format.format, .n = n, .k = k, .codes = golden.blocks.data()};
  EXPECT_EQ(matrix.num_bytes(), n * 2 * format.block_bytes);
  EXPECT_EQ(matrix.row(3) - matrix.codes, 3 * 2 * format.block_bytes);
  Guarded<float> values(static_cast<size_t>(3 * k));
  decode_rows(matrix, 2, 5, values.data());
  EXPECT_TRUE(same_bits(values.span(), std::span(golden.values).subspan(static_cast<size_t>(2 * k), values.size())));
  EXPECT_TRUE(values.guards_intact());
  Guarded<float> nothing(1);
  decode_rows(matrix, n, n, nothing.data());
  EXPECT_TRUE(std::isnan(nothing.data()[0]));  // still the poison
}

TEST_P(EveryFormat, EmptyRowIsLegal) {
  Guarded<float> values(1);
  EXPECT_EQ(row_bytes(GetParam(), 0), 0);
  decode_row(GetParam(), nullptr, 0, values.data());
  EXPECT_TRUE(std::isnan(values.data()[0]));
}

TEST(Decode, Q4_0ByHand) {
  // d = 0.5; byte i holds code i for value i and code 15 - i for value i + 16.
  std::vector<std::byte> block = bytes_of({0x00, 0x38});
  for (int i = 0; i < 16; ++i) {
    block.push_back(static_cast<std::byte>(i | (15 - i) << 4));
  }
  const std::vector<float> values = decode(Format::kQ4_0, block);
  for (int i = 0; i < 16; ++i) {
    EXPECT_EQ(values[i], 0.5f * static_cast<float>(i - 8));
    EXPECT_EQ(values[i + 16], 0.5f * static_cast<float>(7 - i));
  }
  EXPECT_EQ(encode(Format::kQ4_0, values), block);
}

TEST(Decode, Q4_1ByHand) {
  // d = 0.25, m = -1: values run from -1 to 2.75.
  std::vector<std::byte> block = bytes_of({0x00, 0x34, 0x00, 0xbc});
  for (int i = 0; i < 16; ++i) {
    block.push_back(static_cast<std::byte>(i | (15 - i) << 4));
  }
  const std::vector<float> values = decode(Format::kQ4_1, block);
  for (int i = 0; i < 16; ++i) {
    EXPECT_EQ(values[i], -1.0f + 0.25f * static_cast<float>(i));
    EXPECT_EQ(values[i + 16], 2.75f - 0.25f * static_cast<float>(i));
  }
  EXPECT_EQ(encode(Format::kQ4_1, values), block);
}

TEST(Decode, Q8_0ByHand) {
  // d = 0.125, codes 127, -127, 0, 1, -1, then 5 for the rest.
  std::vector<std::byte> block = bytes_of({0x00, 0x30, 127, 129, 0, 1, 255});
  block.resize(34, static_cast<std::byte>(5));
  const std::vector<float> values = decode(Format::kQ8_0, block);
  EXPECT_EQ(values[0], 15.875f);
  EXPECT_EQ(values[1], -15.875f);
  EXPECT_EQ(values[2], 0.0f);
  EXPECT_EQ(values[3], 0.125f);
  EXPECT_EQ(values[4], -0.125f);
  for (int i = 5; i < 32; ++i) {
    EXPECT_EQ(values[i], 0.625f);
  }
  EXPECT_EQ(encode(Format::kQ8_0, values), block);
}

TEST(Decode, EveryF16AndBF16) {
  for (uint32_t code = 0; code < 65536; ++code) {
    const uint16_t bits = static_cast<uint16_t>(code);
    float value = 0.0f;
    decode_row(Format::kF16, reinterpret_cast<const std::byte*>(&bits), 1, &value);
    ASSERT_EQ(std::bit_cast<uint32_t>(value), std::bit_cast<uint32_t>(f16_to_f32(bits))) << code;
    decode_row(Format::kBF16, reinterpret_cast<const std::byte*>(&bits), 1, &value);
    ASSERT_EQ(std::bit_cast<uint32_t>(value), code << 16);
  }
}

// The scales that shoal reads as NaN and `gguf` as a number, so that the golden files lack them.
TEST(Decode, NanScales) {
  std::vector<std::byte> mxfp4(17, static_cast<std::byte>(0x31));
  mxfp4[0] = static_cast<std::byte>(255);
  for (const float value : decode(Format::kGGUF_MXFP4, mxfp4)) {
    EXPECT_TRUE(std::isnan(value));
  }
  std::vector<std::byte> nvfp4(36, static_cast<std::byte>(0x31));
  nvfp4[0] = static_cast<std::byte>(0x7f);
  nvfp4[1] = static_cast<std::byte>(0x38);
  nvfp4[2] = static_cast<std::byte>(0xff);  // bit 7 is ignored
  nvfp4[3] = static_cast<std::byte>(0xb8);
  const std::vector<float> values = decode(Format::kGGUF_NVFP4, nvfp4);
  for (int i = 0; i < 64; ++i) {
    if (i / 16 % 2 == 0) {
      EXPECT_TRUE(std::isnan(values[i])) << i;
    } else {
      EXPECT_EQ(values[i], i % 16 < 8 ? 0.5f : 1.5f) << i;
    }
  }
}

uint32_t crc32(std::span<const uint8_t> bytes) {
  uint32_t crc = 0xffffffffu;
  for (const uint8_t byte : bytes) {
    crc ^= byte;
    for (int bit = 0; bit < 8; ++bit) {
      crc = crc >> 1 ^ (crc & 1 ? 0xedb88320u : 0u);
    }
  }
  return ~crc;
}

template <size_t kPoints, size_t kValues>
uint32_t grid_crc32(const iq::Grid<kPoints, kValues>& grid) {
  return crc32({&grid.points[0][0], kPoints * kValues});
}

// Of the tables of `gguf`, printed by make_iq_grids.py before it packs them.
TEST(Decode, GridChecksums) {
  EXPECT_EQ(grid_crc32(iq::kIq2Xxs), 0x9924ff02u);
  EXPECT_EQ(grid_crc32(iq::kIq2Xs), 0xfa1e1bfdu);
  EXPECT_EQ(grid_crc32(iq::kIq2S), 0x25ae5bf1u);
  EXPECT_EQ(grid_crc32(iq::kIq3Xxs), 0x07ba9ed0u);
  EXPECT_EQ(grid_crc32(iq::kIq3S), 0xf576e4f3u);
}

// ---- encoding ----

TEST_P(GoldenEncoding, GivesTheSameBlocks) {
  const FormatInfo& format = info(GetParam());
  const Golden golden = read_golden(concat(format.name, "_encode"));
  Guarded<std::byte> row(golden.blocks.size());
  encode_row(format.format, golden.values.data(), static_cast<int64_t>(golden.values.size()), row.data());
  EXPECT_TRUE(row.guards_intact());
  for (size_t i = 0; i < golden.blocks.size(); ++i) {
    ASSERT_EQ(row.data()[i], golden.blocks[i])
        << "block " << i / format.block_bytes << " byte " << i % format.block_bytes;
  }
}

// Largest relative distance |decoded - x| / |x| over normally distributed values: what the encoders reach, plus 1 %.
double error_bound(Format format) {
  switch (format) {
    case Format::kF32: return 0.0;
    case Format::kF16: return 0.00022;
    case Format::kBF16: return 0.00169;
    case Format::kQ8_0: return 0.00536;
    case Format::kQ6_K: return 0.01732;
    case Format::kQ5_K: return 0.0352;
    case Format::kQ5_1: return 0.0380;
    case Format::kQ5_0: return 0.0428;
    case Format::kQ4_K: return 0.0705;
    case Format::kIQ4_NL: return 0.0736;
    case Format::kIQ4_XS: return 0.0745;
    case Format::kQ4_1: return 0.0783;
    case Format::kQ4_0: return 0.0860;
    case Format::kGGUF_NVFP4: return 0.0972;  // small values lack a scale for the whole matrix
    case Format::kGGUF_MXFP4: return 0.1148;
    case Format::kQ3_K: return 0.1436;
    case Format::kQ2_K: return 0.2668;
    default: return -1.0;  // a new format needs a line here
  }
}

TEST_P(EncodableFormat, ErrorStaysBounded) {
  const Format format = GetParam();
  for (const float deviation : {1.0f, 0.02f}) {
    const std::vector<float> values = Random(7).normals(256 * 64, deviation);
    const double bound = error_bound(format);
    ASSERT_GE(bound, 0.0);
    const testkit::Comparison comparison =
        testkit::compare(decode(format, encode(format, values)), values, 0.0, INFINITY);
    EXPECT_LE(comparison.relative_distance, bound);
    EXPECT_GE(comparison.relative_distance, 0.8 * bound) << "better than the table says: tighten it";
  }
}

TEST_P(EncodableFormat, ZerosStayZeros) {
  const std::vector<float> zeros(512, 0.0f);
  for (const float value : decode(GetParam(), encode(GetParam(), zeros))) {
    ASSERT_EQ(value, 0.0f);
  }
}

TEST_P(EncodableFormat, ConstantsAreKept) {
  for (const float constant : {1.0f, -1.0f, 0.375f, -3.0f}) {
    const std::vector<float> values(256, constant);
    for (const float value : decode(GetParam(), encode(GetParam(), values))) {
      ASSERT_NEAR(value, constant, 0.04f * std::fabs(constant));
    }
  }
}

// Beyond the range of the scales values saturate or vanish; they never turn into infinity or NaN.
TEST_P(EncodableBlock, ExtremeValuesStayFinite) {
  const float largest = std::numeric_limits<float>::max();
  for (const float magnitude : {1e-45f, 1e-38f, 1e-9f, 1e7f, 1e30f, largest}) {
    Random random(3);
    std::vector<float> values(512);
    for (size_t i = 0; i < values.size(); ++i) {
      values[i] = i < 8 ? (i % 2 == 0 ? magnitude : -magnitude) : magnitude * random.uniform(-1.0f, 1.0f);
    }
    for (const float value : decode(GetParam(), encode(GetParam(), values))) {
      ASSERT_TRUE(std::isfinite(value)) << magnitude;
      ASSERT_LE(std::fabs(value), 1.5 * magnitude + 1e-30);
    }
  }
}

// What a block can hold exactly comes back, up to the rounding of the sums that find the scales.
TEST_P(EncodableFormat, RepresentableValuesComeBack) {
  const FormatInfo& format = info(GetParam());
  const std::vector<float> once = decode(GetParam(), encode(GetParam(), Random(11).normals(256 * 16)));
  const std::vector<float> twice = decode(GetParam(), encode(GetParam(), once));
  const testkit::Comparison comparison = testkit::compare(twice, once, 0.0, INFINITY);
  // The scales of Q2_K have 4 bits, and a search that finds another pair of scale and minimum rounds both again.
  EXPECT_LE(comparison.relative_distance, GetParam() == Format::kQ2_K ? 0.02 : format.block_size == 256 ? 0.003 : 1e-6);
}

TEST_P(EncodableFormat, BlocksDoNotSeeTheirNeighbours) {
  const int64_t size = info(GetParam()).block_size;
  const std::vector<float> values = Random(5).normals(static_cast<size_t>(4 * size));
  const std::vector<std::byte> row = encode(GetParam(), values);
  std::vector<std::byte> alone(static_cast<size_t>(info(GetParam()).block_bytes) + 1);
  for (int64_t i = 0; i < 4; ++i) {
    encode_row(GetParam(), values.data() + i * size, size, alone.data() + 1);
    EXPECT_EQ(std::memcmp(alone.data() + 1, row.data() + i * info(GetParam()).block_bytes, alone.size() - 1), 0);
  }
}

TEST(Encode, RejectsWhatABlockCannotHold) {
  std::vector<float> values(64, 1.0f);
  std::vector<std::byte> row(64);
  values[33] = INFINITY;
  expect_error(ErrorCode::kInvalidArgument, "encode q4_0: value 33 is inf, a block holds finite values only",
               [&] { encode_row(Format::kQ4_0, values.data(), 64, row.data()); });
  values[2] = -INFINITY;
  expect_error(ErrorCode::kInvalidArgument, "encode gguf_mxfp4: value 2 is -inf, a block holds finite values only",
               [&] { encode_row(Format::kGGUF_MXFP4, values.data(), 64, row.data()); });
  EXPECT_EQ(row, std::vector<std::byte>(64));  // nothing was written
  EXPECT_EQ(decode(Format::kF16, encode(Format::kF16, values))[33], INFINITY);
}

TEST(Encode, NamesWhatItCannotMake) {
  const std::vector<float> values(256, 1.0f);
  std::vector<std::byte> row(256);
  int num_rejected = 0;
  for (const Format format : kAllFormats) {
    if (!info(format).can_encode) {
      expect_error(ErrorCode::kUnsupported,
                   concat("encode ", info(format).name, ": this format can be read but not made"),
                   [&] { encode_row(format, values.data(), 256, row.data()); });
      ++num_rejected;
    }
  }
  EXPECT_EQ(num_rejected, 5);  // iq2_xxs, iq2_xs, iq2_s, iq3_xxs, iq3_s
}

// ---- tables ----

TEST(Formats, NamesIdsAndSizes) {
  struct Row {
    const char* name;
    int ggml_type, block_size, block_bytes;
  };
  const Row rows[] = {
      {"f32", 0, 1, 4},           {"f16", 1, 1, 2},           {"bf16", 30, 1, 2},       {"q4_0", 2, 32, 18},
      {"q4_1", 3, 32, 20},        {"q5_0", 6, 32, 22},        {"q5_1", 7, 32, 24},      {"q8_0", 8, 32, 34},
      {"q2_k", 10, 256, 84},      {"q3_k", 11, 256, 110},     {"q4_k", 12, 256, 144},   {"q5_k", 13, 256, 176},
      {"q6_k", 14, 256, 210},     {"iq4_nl", 20, 32, 18},     {"iq4_xs", 23, 256, 136}, {"iq2_xxs", 16, 256, 66},
      {"iq2_xs", 17, 256, 74},    {"iq2_s", 22, 256, 82},     {"iq3_xxs", 18, 256, 98}, {"iq3_s", 21, 256, 110},
      {"gguf_mxfp4", 39, 32, 17}, {"gguf_nvfp4", 40, 64, 36},
  };
  for (const Row& row : rows) {
    const std::optional<Format> format = format_from_name(row.name);
    ASSERT_TRUE(format.has_value()) << row.name;
    EXPECT_EQ(format_from_ggml_type(static_cast<uint32_t>(row.ggml_type)), format) << row.name;
    EXPECT_EQ(info(*format).format, *format);
    EXPECT_EQ(info(*format).name, row.name);
    EXPECT_EQ(info(*format).ggml_type, row.ggml_type);
    EXPECT_EQ(info(*format).block_size, row.block_size);
    EXPECT_EQ(info(*format).block_bytes, row.block_bytes);
  }
  EXPECT_EQ(info(Format::kQ4_K).bits_per_value(), 4.5);
  EXPECT_EQ(format_from_name("q4_K"), std::nullopt);
  EXPECT_EQ(format_from_name(""), std::nullopt);
  EXPECT_EQ(format_from_ggml_type(4), std::nullopt);            // q4_2, withdrawn
  EXPECT_EQ(format_from_ggml_type(0xffffffffu), std::nullopt);  // not the -1 of formats that GGUF lacks
}

TEST(Formats, RowBytes) {
  EXPECT_EQ(row_bytes(Format::kF32, 7), 28);
  EXPECT_EQ(row_bytes(Format::kQ4_0, 64), 36);
  EXPECT_EQ(row_bytes(Format::kQ6_K, 1024), 840);
  expect_error(ErrorCode::kInvalidArgument, "q4_k: a row of 100 values is not a whole number of blocks of 256",
               [] { row_bytes(Format::kQ4_K, 100); });
  expect_error(ErrorCode::kInvalidArgument, "q8_0: a row of -32 values", [] { row_bytes(Format::kQ8_0, -32); });
  expect_error(ErrorCode::kInvalidArgument, "f32: the bytes of a row of 4611686018427387904 values overflow 64 bits",
               [] { row_bytes(Format::kF32, int64_t{1} << 62); });
  float value = 0.0f;
  std::byte byte{};
  expect_error(ErrorCode::kInvalidArgument, "q4_0: a row of 1 values is not a whole number of blocks of 32",
               [&] { decode_row(Format::kQ4_0, &byte, 1, &value); });
  expect_error(ErrorCode::kInvalidArgument, "q4_0: a row of 1 values is not a whole number of blocks of 32",
               [&] { encode_row(Format::kQ4_0, &value, 1, &byte); });
}

TEST(Matrix, RejectsRowsItDoesNotHave) {
  const std::byte codes[32] = {};
  float values[8] = {};
  const QuantMatrix matrix{.format = Format::kF32, .n = 4, .k = 2, .codes = codes};
  expect_error(ErrorCode::kInvalidArgument, "decode_rows: rows [3, 5) of a matrix with 4 rows",
               [&] { decode_rows(matrix, 3, 5, values); });
  expect_error(ErrorCode::kInvalidArgument, "decode_rows: rows [-1, 1) of a matrix with 4 rows",
               [&] { decode_rows(matrix, -1, 1, values); });
  expect_error(ErrorCode::kInvalidArgument, "decode_rows: rows [2, 1) of a matrix with 4 rows",
               [&] { decode_rows(matrix, 2, 1, values); });
}

}  // namespace
}  // namespace shoal
