// embedding: by hand, every format and output type on every instruction set bit for bit against ref, rejections.
#include "shoal/ops/embedding/embedding.h"

#include <gtest/gtest.h>

#include <cmath>

#include "shoal/cpu/thread_pool.h"
#include "shoal/tensor/matcher.h"
#include "testkit/guarded_tensor.h"

namespace shoal {
namespace {

using testkit::GuardedTensor;

cpu::ThreadPool& pool() {
  static cpu::ThreadPool pool(2);
  return pool;
}

std::vector<float> run(const QuantMatrix& table, DType dtype, std::vector<int32_t> ids, float scale,
                       const OpContext& context) {
  const int64_t num_tokens = static_cast<int64_t>(ids.size());
  GuardedTensor out(dtype, {num_tokens, table.k}, 3);
  ids.reserve(1);  // so that no tokens have an address, too
  embedding(
      {.out = out.view(), .ids = TensorView(ids.data(), DType::kI32, {num_tokens}), .table = table, .scale = scale},
      context);
  EXPECT_TRUE(out.intact());
  return out.values();
}

std::vector<OpContext> contexts() {
  std::vector<OpContext> list = {{.pool = &pool(), .variant = "ref"}};
  for (const cpu::Isa isa : cpu::available_isas()) {
    list.push_back({.pool = &pool(), .isa = isa});
  }
  return list;
}

TEST(Embedding, ByHand) {
  const std::vector<float> values = {1, 2, 3, 4, 5, 6};
  const QuantMatrix table{Format::kF32, 2, 3, reinterpret_cast<const std::byte*>(values.data())};
  for (const OpContext& context : contexts()) {
    EXPECT_EQ(run(table, DType::kF32, {1, 0, 1}, 2.0f, context), (std::vector<float>{8, 10, 12, 2, 4, 6, 8, 10, 12}));
    EXPECT_EQ(run(table, DType::kF16, {1}, 1.0f, context), (std::vector<float>{4, 5, 6}));
    // One rounding, after scaling: ties to even for 1 and 2; 3.0117 is nearer to 3.0156 than to 3.
    EXPECT_EQ(run(table, DType::kBF16, {0}, 1.00390625f, context), (std::vector<float>{1.0f, 2.0f, 3.015625f}));
  }
}

// Every format whose rows can be encoded; the others are covered by decoding arbitrary bytes.
TEST(Embedding, EveryFormatAndTypeGivesTheBitsOfTheReference) {
  size_t num_formats = 0;
  for (const Format format : {
#define SHOAL_FORMAT(Struct, header) Format::k##Struct,
#include "shoal/quant/formats.def"
#undef SHOAL_FORMAT
       }) {
    const FormatInfo& entry = info(format);
    for (const int64_t num_blocks : {1, 2, 1024 / entry.block_size + 1}) {
      const int64_t hidden = num_blocks * entry.block_size;
      const int64_t bytes = row_bytes(format, hidden);
      testkit::Random random(static_cast<uint64_t>(hidden));
      std::vector<std::byte> codes(static_cast<size_t>(5 * bytes + 1));
      for (int64_t row = 0; row < 5; ++row) {
        std::byte* start = codes.data() + 1 + row * bytes;  // at an odd address
        if (entry.can_encode) {
          encode_row(format, random.normals(static_cast<size_t>(hidden)).data(), hidden, start);
          continue;
        }
        for (int64_t i = 0; i < bytes; ++i) {
          start[i] = static_cast<std::byte>(random.bits() & 0x3b);  // no exponent of all ones: finite scales
        }
      }
      const QuantMatrix table{format, 5, hidden, codes.data() + 1};
      for (const DType dtype : kFloats) {
        const auto expected = run(table, dtype, {4, 0, 2, 2}, 1.7f, {.pool = &pool(), .variant = "ref"});
        for (const cpu::Isa isa : cpu::available_isas()) {
          EXPECT_EQ(run(table, dtype, {4, 0, 2, 2}, 1.7f, {.pool = &pool(), .isa = isa}), expected)
              << entry.name << " " << to_string(dtype) << " " << cpu::to_string(isa);
        }
      }
    }
    ++num_formats;
  }
  EXPECT_GE(num_formats, 22u);
}

TEST(Embedding, ReferenceAgreesWithTheValuesThatWereEncoded) {
  testkit::Random random(5);
  const auto values = random.normals(4 * 256);
  const auto table_of = [&](Format format, std::vector<std::byte>& codes) {
    codes.resize(static_cast<size_t>(4 * row_bytes(format, 256)));
    for (int64_t row = 0; row < 4; ++row) {
      encode_row(format, values.data() + row * 256, 256, codes.data() + row * row_bytes(format, 256));
    }
    return QuantMatrix{format, 4, 256, codes.data()};
  };
  struct Known {
    Format format;
    double rtol, atol;
  };
  for (const Known& known : {Known{Format::kF32, 0, 0}, Known{Format::kF16, 0x1p-11, 0x1p-25},
                             Known{Format::kBF16, 0x1p-8, 0}, Known{Format::kQ8_0, 0x1p-10, 4.5 / 254}}) {
    std::vector<std::byte> codes;
    const auto out = run(table_of(known.format, codes), DType::kF32, {3, 1}, 2.0f, {.pool = &pool(), .variant = "ref"});
    std::vector<float> expected;
    for (const size_t row : {3u, 1u}) {
      for (size_t h = 0; h < 256; ++h) {
        expected.push_back(2.0f * values[row * 256 + h]);
      }
    }
    const auto same = testkit::compare(out, expected, known.rtol, 2 * known.atol);
    EXPECT_TRUE(same) << info(known.format).name << ": " << same.text;
  }
}

TEST(Embedding, NoTokens) {
  const std::vector<float> values = {1, 2};
  const QuantMatrix table{Format::kF32, 1, 2, reinterpret_cast<const std::byte*>(values.data())};
  for (const OpContext& context : contexts()) {
    EXPECT_TRUE(run(table, DType::kF32, {}, 1.0f, context).empty());
  }
}

TEST(Embedding, Rejections) {
  std::vector<std::byte> codes(4 * 64);
  std::vector<int32_t> ids = {0, 3};
  GuardedTensor out(DType::kF32, {2, 16});
  const EmbeddingArgs good{
      .out = out.view(), .ids = TensorView(ids.data(), DType::kI32, {2}), .table = {Format::kF32, 4, 16, codes.data()}};
  const auto error = [&](auto change, std::string_view variant = "ref") {
    EmbeddingArgs args = good;
    change(args);
    return testkit::error_of([&] { embedding(args, {.pool = &pool(), .variant = variant}); });
  };
  EXPECT_EQ(error([](auto&) {}), "");
  EXPECT_EQ(error([](auto& a) { a.table.codes = nullptr; }), "embedding: table is required");
  EXPECT_EQ(error([](auto& a) { a.table.k = 8; }),
            "embedding: out has shape [2, 16], expected [num_tokens, hidden = 8]");
  EXPECT_EQ(error([](auto& a) { a.table.format = Format::kQ8_0; }),
            "q8_0: a row of 16 values is not a whole number of blocks of 32");
  EXPECT_EQ(error([](auto& a) { a.ids.dtype = DType::kI64; }), "embedding: ids has type int64, expected int32");
  EXPECT_EQ(error([](auto& a) { a.ids.shape[0] = 1; }),
            "embedding: ids has shape [1], expected [num_tokens = 2] (from out)");
  EXPECT_EQ(error([](auto& a) { a.out.dtype = DType::kU8; }),
            "embedding: out has type uint8, expected float32 or float16 or bfloat16");
  EXPECT_EQ(error([](auto& a) { a.out.strides[1] = 2; }), "embedding: out must be contiguous in its last dimension");
  EXPECT_EQ(error([](auto& a) {
              a.ids.device = {DeviceType::kCuda, 0};
            }),
            "embedding: ids is on another device than the other arguments");
  EXPECT_EQ(error([](auto& a) { a.scale = NAN; }), "embedding: scale is nan, expected a finite number");
  EXPECT_EQ(error([&](auto& a) { a.table.scales = out.view(); }),
            "embedding: a table of format f32 with scales apart or blocks of 1 values");
  EXPECT_EQ(error([&](auto&) { ids[1] = 4; }), "embedding: ids[1] is 4, outside [0, vocab_size = 4)");
  EXPECT_EQ(error([&](auto&) { ids[1] = -1; }), "embedding: ids[1] is -1, outside [0, vocab_size = 4)");
  EXPECT_EQ(error([&](auto&) { ids[1] = 1; }, "gpu"), "embedding: no variant \"gpu\"; known are ref, cpu");
}

}  // namespace
}  // namespace shoal
