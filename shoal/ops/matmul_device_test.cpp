// The CUDA matmul against f64 products of the decoded weights. Activations are bf16 numbers, so that with few rows
// nothing is rounded but sums, and a misplaced bit of a layout shows.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "shoal/base/float_bits.h"
#include "shoal/ops/matmul/matmul.h"
#include "shoal/ops/rows/rows.h"
#include "shoal/quant/quantize.h"
#include "testkit/on_device.h"
#include "testkit/testkit.h"

namespace shoal {
namespace {

struct Weights {
  QuantParts parts;
  QuantMatrix matrix;
  std::vector<float> values;  // decoded, [n, k]
};

Weights make_weights(Format format, int64_t n, int64_t k, testkit::Random& random, QuantizeOptions options = {}) {
  Tensor values(DType::kF32, {n, k});
  for (float& value : values.span<float>()) {
    value = random.normal() * 0.05f;
  }
  Weights weights;
  weights.parts = quantize(format, values, options);
  QuantMatrix& m = weights.matrix;
  m.format = format;
  m.n = n;
  m.k = k;
  m.codes = weights.parts.codes.view().as<const std::byte>();
  m.scales = weights.parts.scales;
  m.zeros = weights.parts.zeros;
  m.global_scale = weights.parts.global_scale;
  if (info(format).is_scaled) {
    const int64_t group = format == Format::kNVFP4 ? 16 : format == Format::kFP8_E4M3 ? 0 : 32;  // fp8: one a row
    m.group_size = options.block_size.value_or(group);
  }
  weights.values.resize(static_cast<size_t>(n * k));
  decode_rows(m, 0, n, weights.values.data());
  return weights;
}

Tensor make_rows(int64_t m, int64_t k, testkit::Random& random) {
  Tensor rows(DType::kF32, {m, k});
  for (float& value : rows.span<float>()) {
    value = bf16_to_f32(f32_to_bf16(random.normal()));
  }
  return rows;
}

Tensor poisoned(int64_t m, int64_t n) {
  Tensor out(DType::kF32, {m, n});
  std::ranges::fill(out.span<float>(), std::numeric_limits<float>::quiet_NaN());
  return out;
}

// What was rounded on the way, besides sums in f32.
enum class Rounded : uint8_t { kNothing, kScales, kWeights };

// Scales of two levels become one f16 (half an ulp, 2^-12, of scale and minimum, which are up to eight times a weight);
// with many rows weights are rounded to bf16.
Rounded rounded_by(Format format, const MatmulWeight& weight, bool many_rows) {
  const bool is_stored_as_bf16 = weight.layout() == "bf16" && format != Format::kBF16;
  if (is_stored_as_bf16 || (many_rows && format != Format::kBF16)) {
    return Rounded::kWeights;
  }
  switch (format) {
    case Format::kQ2_K:
    case Format::kQ3_K:
    case Format::kQ4_K:
    case Format::kQ5_K:
    case Format::kQ6_K:
    case Format::kNVFP4:
    case Format::kINT4: return Rounded::kScales;                                    // INT4: scale times zero
    default: return info(format).is_scaled ? Rounded::kScales : Rounded::kNothing;  // f32 scales become f16
  }
}

void expect_row(const float* out, const float* a, const std::vector<float>& w, int64_t n, int64_t k, const float* bias,
                Rounded rounded) {
  for (int64_t j = 0; j < n; ++j) {
    double sum = bias == nullptr ? 0.0 : bias[j];
    double squares = 0.0;
    double total = std::abs(sum);
    for (int64_t i = 0; i < k; ++i) {
      const double product = static_cast<double>(a[i]) * w[static_cast<size_t>(j * k + i)];
      sum += product;
      squares += product * product;
      total += std::abs(product);
    }
    const double share = rounded == Rounded::kNothing ? 0.0 : rounded == Rounded::kScales ? 3e-3 : 0.02;
    const double tolerance = share * std::sqrt(squares) + 1e-5 * total + 1e-6;
    ASSERT_LE(std::abs(out[j] - sum), tolerance) << "output " << j << ": " << out[j] << ", expected " << sum;
  }
}

struct FormatCase {
  Format format;
  int64_t k;
  QuantizeOptions options{};
};

class MatmulCuda : public testing::TestWithParam<FormatCase> {};

std::vector<FormatCase> format_cases() {
  std::vector<FormatCase> cases;
  for (const Format format : {Format::kF32, Format::kF16, Format::kBF16}) {
    cases.push_back({format, 100});
  }
  for (const Format format :
       {Format::kQ4_0, Format::kQ4_1, Format::kQ5_0, Format::kQ5_1, Format::kQ8_0, Format::kIQ4_NL, Format::kGGUF_MXFP4,
        Format::kMXFP4, Format::kNVFP4, Format::kFP8_E4M3}) {
    cases.push_back({format, 1440});  // a last chunk of 32 columns
  }
  for (const Format format : {Format::kQ2_K, Format::kQ3_K, Format::kQ4_K, Format::kQ5_K, Format::kQ6_K}) {
    cases.push_back({format, 1280});
  }
  for (const Format format : {Format::kINT2, Format::kINT3, Format::kINT4, Format::kINT8}) {
    cases.push_back({format, 640, {.block_size = 32}});
    cases.push_back({format, 640, {.block_size = 128}});
  }
  cases.push_back({Format::kINT4, 640, {.block_size = 64, .symmetric = false}});
  cases.push_back({Format::kINT8, 640, {.block_size = 32, .symmetric = false}});  // stored as bf16
  return cases;
}

TEST_P(MatmulCuda, MatchesF64) {
  SHOAL_NEEDS_DEVICE();
  const auto& [format, k, options] = GetParam();
  constexpr int64_t kOutputs = 141;  // no whole tile
  testkit::Random random(7);
  testkit::OnDevice device;
  const Weights weights = make_weights(format, kOutputs, k, random, options);
  const MatmulWeight prepared = prepare_matmul({&weights.matrix, 1}, MatmulPrecision::kDefault, device.context());
  Tensor bias(DType::kF32, {kOutputs});
  for (float& value : bias.span<float>()) {
    value = random.normal();
  }
  for (const int64_t m : {1, 7, 8, 11, 32, 33, 200}) {
    SCOPED_TRACE(testing::Message() << prepared.layout() << ", m = " << m);
    const Tensor rows = make_rows(m, k, random);
    const Tensor out = poisoned(m, kOutputs);
    const TensorView device_out = device.copy(out);
    const bool has_bias = m % 2 == 1;
    matmul({.out = device_out, .a = device.copy(rows), .bias = has_bias ? device.copy(bias) : TensorView()}, prepared,
           device.context());
    device.fetch();
    for (int64_t i = 0; i < m; ++i) {
      expect_row(out.span<float>().data() + i * kOutputs, rows.span<float>().data() + i * k, weights.values, kOutputs,
                 k, has_bias ? bias.span<float>().data() : nullptr, rounded_by(format, prepared, m > 16));
      if (HasFatalFailure()) {
        return;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Formats, MatmulCuda, testing::ValuesIn(format_cases()), [](const auto& test) {
  std::string name(shoal::info(test.param.format).name);
  if (test.param.options.block_size) {
    name += "_g" + std::to_string(*test.param.options.block_size) + (test.param.options.symmetric ? "" : "_zeros");
  }
  return name;
});

TEST(MatmulCudaJoined, PartsOfTwoFormats) {
  SHOAL_NEEDS_DEVICE();
  constexpr int64_t kInputs = 512;
  testkit::Random random(3);
  testkit::OnDevice device;
  const Weights first = make_weights(Format::kQ4_K, 48, kInputs, random);
  const Weights second = make_weights(Format::kQ4_K, 40, kInputs, random);
  const Weights third = make_weights(Format::kQ6_K, 24, kInputs, random);
  const QuantMatrix parts[] = {first.matrix, second.matrix, third.matrix};
  const MatmulWeight prepared = prepare_matmul(parts, MatmulPrecision::kDefault, device.context());
  EXPECT_EQ(prepared.layout(), "u4_g32_min+u6_g16");
  std::vector<float> values = first.values;
  values.insert(values.end(), second.values.begin(), second.values.end());
  values.insert(values.end(), third.values.begin(), third.values.end());
  for (const int64_t m : {3, 150}) {
    const Tensor rows = make_rows(m, kInputs, random);
    const Tensor out = poisoned(m, 112);
    matmul({.out = device.copy(out), .a = device.copy(rows)}, prepared, device.context());
    device.fetch();
    for (int64_t i = 0; i < m; ++i) {
      expect_row(out.span<float>().data() + i * 112, rows.span<float>().data() + i * kInputs, values, 112, kInputs,
                 nullptr, rounded_by(Format::kQ4_K, prepared, m > 16));
    }
  }
}

TEST(MatmulCudaExact, F32WeightsAndProducts) {
  SHOAL_NEEDS_DEVICE();
  testkit::Random random(5);
  testkit::OnDevice device;
  const Weights weights = make_weights(Format::kF32, 37, 260, random);
  const MatmulWeight prepared = prepare_matmul({&weights.matrix, 1}, MatmulPrecision::kExact, device.context());
  EXPECT_EQ(prepared.layout(), "f32");
  for (const int64_t m : {1, 9, 300}) {
    Tensor rows(DType::kF32, {m, 260});
    for (float& value : rows.span<float>()) {
      value = random.normal();
    }
    const Tensor out = poisoned(m, 37);
    matmul({.out = device.copy(out), .a = device.copy(rows)}, prepared, device.context());
    device.fetch();
    for (int64_t i = 0; i < m; ++i) {
      expect_row(out.span<float>().data() + i * 37, rows.span<float>().data() + i * 260, weights.values, 37, 260,
                 nullptr, Rounded::kNothing);
    }
  }
}

// Experts: rows sorted on the device, tiles of every size, skewed routing with empty experts.
TEST(MatmulCudaTiled, GroupsOfRows) {
  SHOAL_NEEDS_DEVICE();
  constexpr int64_t kExperts = 9;
  constexpr int64_t kInputs = 256;
  constexpr int64_t kOutputs = 72;
  testkit::Random random(11);
  for (const Format format : {Format::kQ4_K, Format::kGGUF_MXFP4}) {
    testkit::OnDevice device;
    std::vector<Weights> weights;
    std::vector<MatmulWeight> prepared;
    for (int64_t e = 0; e < kExperts; ++e) {
      weights.push_back(make_weights(format, kOutputs, kInputs, random));
      prepared.push_back(prepare_matmul({&weights.back().matrix, 1}, MatmulPrecision::kDefault, device.context()));
    }
    const GroupedWeights groups(std::move(prepared), device.context());
    Tensor bias(DType::kF32, {kExperts, kOutputs});
    for (float& value : bias.span<float>()) {
      value = random.normal();
    }
    for (const int64_t num_tokens : {1, 3, 40, 150, 700}) {
      constexpr int64_t kTopK = 2;
      const int64_t num_rows = num_tokens * kTopK;
      SCOPED_TRACE(testing::Message() << info(format).name << ", tokens " << num_tokens);
      Tensor ids(DType::kI32, {num_tokens, kTopK});
      for (int64_t t = 0; t < num_tokens; ++t) {
        const auto id = static_cast<int32_t>(random.integer(0, 2) == 0 ? random.integer(0, 5) : 2);
        ids.span<int32_t>()[static_cast<size_t>(t * kTopK)] = id;
        ids.span<int32_t>()[static_cast<size_t>(t * kTopK + 1)] = (id + 1) % kExperts;
      }
      const Tensor row_of(DType::kI32, {num_tokens, kTopK});
      const Tensor source(DType::kI32, {num_rows});
      const Tensor row_begin(DType::kI32, {kExperts + 1});
      const TileCount count = matmul_tiles(num_rows, kExperts);
      const Tensor tiles(DType::kI32, {count.num_tiles, 4});
      const TensorView device_source = device.copy(source);
      const TensorView device_tiles = device.copy(tiles);
      sort_rows({.row_of = device.copy(row_of),
                 .source = device_source,
                 .row_begin = device.copy(row_begin),
                 .tiles = device_tiles,
                 .expert_ids = device.copy(ids),
                 .num_experts = kExperts,
                 .tile_rows = count.tile_rows},
                device.context());
      const Tensor rows = make_rows(num_tokens, kInputs, random);
      const Tensor out = poisoned(num_rows, kOutputs);
      tiled_matmul({.out = device.copy(out),
                    .a = device.copy(rows),
                    .source = device_source,
                    .tiles = device_tiles,
                    .tile_rows = count.tile_rows,
                    .bias = device.copy(bias)},
                   groups, device.context());
      device.fetch();

      const Tensor want_row_of(DType::kI32, {num_tokens, kTopK});
      const Tensor want_source(DType::kI32, {num_rows});
      const Tensor want_begin(DType::kI32, {kExperts + 1});
      OpContext host = device.context();
      host.device = {};
      sort_rows({.row_of = want_row_of,
                 .source = want_source,
                 .row_begin = want_begin,
                 .expert_ids = ids,
                 .num_experts = kExperts},
                host);
      const auto equal = [](const Tensor& x, const Tensor& y) {
        return std::ranges::equal(x.span<int32_t>(), y.span<int32_t>());
      };
      ASSERT_TRUE(equal(row_of, want_row_of));
      ASSERT_TRUE(equal(source, want_source));
      ASSERT_TRUE(equal(row_begin, want_begin));
      for (int64_t t = 0; t < num_tokens; ++t) {
        for (int64_t j = 0; j < kTopK; ++j) {
          const auto at = static_cast<size_t>(t * kTopK + j);
          const auto expert = static_cast<size_t>(ids.span<int32_t>()[at]);
          expect_row(out.span<float>().data() + row_of.span<int32_t>()[at] * kOutputs,
                     rows.span<float>().data() + t * kInputs, weights[expert].values, kOutputs, kInputs,
                     bias.span<float>().data() + static_cast<int64_t>(expert) * kOutputs,
                     rounded_by(format, groups.weight(0), count.tile_rows > 16));
          if (HasFatalFailure()) {
            return;
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace shoal
