#include "shoal/ops/matmul/matmul.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>

#include "shoal/base/error.h"
#include "shoal/cpu/thread_pool.h"
#include "shoal/ops/matmul/matmul_cases.h"

namespace shoal {
namespace {

using testkit::Codes;
using testkit::Guarded;
using testkit::Random;
using testkit::RandomMatrix;

constexpr MatmulPrecision kPrecisions[] = {MatmulPrecision::kDefault, MatmulPrecision::kExact};
constexpr Format kIntegerFormats[] = {
    Format::kQ4_0, Format::kQ4_1, Format::kQ5_0, Format::kQ5_1,   Format::kQ8_0,   Format::kQ2_K,      Format::kQ3_K,
    Format::kQ4_K, Format::kQ5_K, Format::kQ6_K, Format::kIQ4_NL, Format::kIQ4_XS, Format::kGGUF_MXFP4};

struct Machine {
  explicit Machine(cpu::Isa isa = cpu::available_isas().back(), int num_threads = 1) : pool(num_threads), isa(isa) {}
  OpContext context(std::string_view variant = {}) {
    return {.pool = &pool, .workspace = &workspace, .isa = isa, .variant = variant};
  }
  cpu::ThreadPool pool;
  Workspace workspace;
  cpu::Isa isa;
};

// Rows [m, size] with poison between them and guards around.
struct Rows {
  Rows(int64_t m, int64_t size, int64_t pad)
      : m(m), size(size), stride(size + pad), data(static_cast<size_t>(m * stride)) {}
  TensorView view(int64_t begin, int64_t end) {
    TensorView v(data.data() + begin * stride, DType::kF32, {end - begin, size});
    v.strides[0] = stride;
    return v;
  }
  TensorView view() { return view(0, m); }
  float* row(int64_t i) { return data.data() + i * stride; }
  std::span<const float> span(int64_t i) { return {row(i), static_cast<size_t>(size)}; }
  bool intact() {
    for (int64_t i = 0; i < m; ++i) {
      for (int64_t j = size; j < stride; ++j) {
        if (!std::isnan(row(i)[j])) {
          return false;
        }
      }
    }
    return data.guards_intact();
  }
  int64_t m, size, stride;
  Guarded<float> data;
};

Rows random_rows(int64_t m, int64_t k, uint64_t seed) {
  Rows rows(m, k, 3);
  Random random(seed);
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = 0; j < k; ++j) {
      rows.row(i)[j] = random.normal();
    }
  }
  return rows;
}

bool same_bits(std::span<const float> x, std::span<const float> y) {
  return x.size() == y.size() && std::memcmp(x.data(), y.data(), x.size_bytes()) == 0;
}

// With a workspace of exactly the promised size.
void run(Machine& machine, const MatmulWeight& weight, TensorView out, TensorView a, TensorView bias = {}) {
  machine.workspace = Workspace(matmul_workspace_bytes(weight, a.dim(0)));
  matmul({.out = out, .a = a, .bias = bias}, weight, machine.context());
}

Rows product(Machine& machine, const MatmulWeight& weight, Rows& a, TensorView bias = {}) {
  Rows out(a.m, weight.n(), 5);
  run(machine, weight, out.view(), a.view(), bias);
  EXPECT_TRUE(out.intact());
  return out;
}

// f32 sums of k terms: rounding grows like a walk, sqrt(k) ulps of the largest partial sum.
void expect_close(Rows& actual, Rows& expected, double largest, int64_t k) {
  const double atol = 4 * 0x1p-24 * std::sqrt(static_cast<double>(k)) * largest;
  for (int64_t i = 0; i < actual.m; ++i) {
    const auto comparison = testkit::compare(actual.span(i), expected.span(i), 1e-6, atol);
    ASSERT_TRUE(comparison) << "row " << i << ": " << comparison.text;
  }
}

// Largest sum of |a w| over the outputs: what rounding errors are relative to.
double largest_sum(Rows& a, std::span<const QuantMatrix> parts) {
  double largest = 0.0;
  for (const QuantMatrix& part : parts) {
    std::vector<float> w(static_cast<size_t>(part.k));
    for (int64_t n = 0; n < part.n; ++n) {
      decode_rows(part, n, n + 1, w.data());
      for (int64_t m = 0; m < a.m; ++m) {
        double sum = 0.0;
        for (int64_t i = 0; i < part.k; ++i) {
          sum += std::abs(static_cast<double>(a.row(m)[i]) * static_cast<double>(w[static_cast<size_t>(i)]));
        }
        largest = std::max(largest, sum);
      }
    }
  }
  return largest;
}

std::string case_name(cpu::Isa isa, Format format, MatmulPrecision precision, int64_t n, int64_t k) {
  return concat(cpu::to_string(isa), " ", info(format).name, precision == MatmulPrecision::kExact ? " exact" : "",
                " n ", n, " k ", k);
}

// The reference once for the most rows; every other number of rows, and every row alone, has the same bits.
void check_shape(Machine& machine, Format format, MatmulPrecision precision, int64_t n, int64_t k) {
  SCOPED_TRACE(case_name(machine.isa, format, precision, n, k));
  const RandomMatrix matrix(format, n, k, static_cast<uint64_t>(n + k));
  const std::span<const QuantMatrix> parts(&matrix.matrix(), 1);
  const MatmulWeight weight = prepare_matmul(parts, precision, machine.context());
  const MatmulWeight reference = prepare_matmul(parts, precision, machine.context("ref"));
  const int64_t most = n * k > 20000 ? 17 : 64;
  Rows a = random_rows(most, k, static_cast<uint64_t>(k));
  Rows out = product(machine, weight, a);
  Rows expected = product(machine, reference, a);
  expect_close(out, expected, largest_sum(a, parts), k);
  for (const int64_t m : {0, 1, 2, 3, 5, 8, 9, 17}) {
    Rows fewer(m, n, 1);
    const int64_t begin = most - m;
    run(machine, weight, fewer.view(), a.view(begin, most));
    EXPECT_TRUE(fewer.intact());
    for (int64_t i = 0; i < m; ++i) {
      ASSERT_TRUE(same_bits(fewer.span(i), out.span(begin + i))) << m << " rows, row " << i;
    }
  }
}

class MatmulFormats : public testing::TestWithParam<Format> {};

TEST_P(MatmulFormats, AgainstReferenceAndSameBitsForAnyNumberOfRows) {
  const Format format = GetParam();
  const int64_t block = info(format).block_size;
  const bool plain = block == 1;
  for (const cpu::Isa isa : cpu::available_isas()) {
    Machine machine(isa);
    for (const MatmulPrecision precision : kPrecisions) {
      for (const int64_t n : {1, 7, 8, 9, 33, 64}) {
        check_shape(machine, format, precision, n, plain ? 37 : block);
      }
      for (const int64_t num_blocks : {2, 3, 9}) {
        check_shape(machine, format, precision, 17, plain ? 32 * num_blocks + 1 : block * num_blocks);
      }
      if (HasFatalFailure()) {
        return;
      }
    }
    // Enough outputs for tiles of spread activations, several chunks of weights.
    check_shape(machine, format, MatmulPrecision::kDefault, 201, 256);
    // Past one decoded chunk of k.
    check_shape(machine, format, MatmulPrecision::kExact, 9, block > 32 ? 1280 : 1056);
  }
}

std::string test_name(const testing::TestParamInfo<Format>& test) { return std::string(info(test.param).name); }

INSTANTIATE_TEST_SUITE_P(All, MatmulFormats, testing::ValuesIn(testkit::all_formats()), test_name);

// Brute force over hand-made q8_0 blocks: the reference itself, with its rounding of the activations.
TEST(Matmul, ReferenceAgainstBruteForce) {
  constexpr int64_t kN = 3;
  constexpr int64_t kK = 64;
  Random random(5);
  std::vector<std::byte> bytes(static_cast<size_t>(row_bytes(Format::kQ8_0, kK) * kN));
  double w[kN][kK];
  for (int64_t n = 0; n < kN; ++n) {
    for (int64_t b = 0; b < kK / 32; ++b) {
      std::byte* block = bytes.data() + (n * 2 + b) * 34;
      const float d = 0.25f * static_cast<float>(n + 1 + b);
      const uint16_t half = f32_to_f16(d);
      std::memcpy(block, &half, 2);
      for (int i = 0; i < 32; ++i) {
        const int64_t code = random.integer(-128, 127);
        block[2 + i] = static_cast<std::byte>(code);
        w[n][b * 32 + i] = static_cast<double>(d) * static_cast<double>(code);
      }
    }
  }
  const QuantMatrix matrix{.format = Format::kQ8_0, .n = kN, .k = kK, .codes = bytes.data()};
  Rows a = random_rows(4, kK, 6);
  Machine machine;
  for (const MatmulPrecision precision : kPrecisions) {
    const MatmulWeight reference = prepare_matmul({&matrix, 1}, precision, machine.context("ref"));
    EXPECT_EQ(reference.variant(), "ref");
    Rows out = product(machine, reference, a);
    for (int64_t m = 0; m < a.m; ++m) {
      for (int64_t n = 0; n < kN; ++n) {
        double sum = 0.0;
        for (int64_t b = 0; b < kK; b += 32) {
          float amax[2] = {0.0f, 0.0f};  // of the block's halves
          for (int64_t i = b; i < b + 32; ++i) {
            float& half = amax[(i - b) / 16];
            half = std::max(half, std::abs(a.row(m)[i]));
          }
          const float top = std::max(amax[0], amax[1]);
          for (int64_t i = b; i < b + 32; ++i) {
            const float factor = std::max(1.0f, std::ceil(16.0f * amax[(i - b) / 16] / top));
            const float inverse = 127.0f * 16.0f / (top * factor);
            const double rounded = static_cast<double>(top / (127.0f * 16.0f)) * static_cast<double>(factor) *
                                   static_cast<double>(std::nearbyint(a.row(m)[i] * inverse));
            sum += (precision == MatmulPrecision::kExact ? static_cast<double>(a.row(m)[i]) : rounded) * w[n][i];
          }
        }
        EXPECT_EQ(out.row(m)[n], static_cast<float>(sum));
      }
    }
  }
}

TEST(Matmul, WorkedByHand) {
  // W = [1 2 3; -4 5 6], a = [1 0.5 -1; 2 0 1], bias = [10 20].
  const float w[] = {1, 2, 3, -4, 5, 6};
  const float a[] = {1, 0.5f, -1, 2, 0, 1};
  const float bias[] = {10, 20};
  for (const cpu::Isa isa : cpu::available_isas()) {
    Machine machine(isa);
    const QuantMatrix matrix{.format = Format::kF32, .n = 2, .k = 3, .codes = reinterpret_cast<const std::byte*>(w)};
    const MatmulWeight weight = prepare_matmul({&matrix, 1}, MatmulPrecision::kDefault, machine.context());
    Guarded<float> out(4);
    run(machine, weight, TensorView(out.data(), DType::kF32, {2, 2}),
        TensorView(const_cast<float*>(a), DType::kF32, {2, 3}), TensorView(const_cast<float*>(bias), DType::kF32, {2}));
    EXPECT_EQ(out.data()[0], 9.0f);
    EXPECT_EQ(out.data()[1], 12.5f);
    EXPECT_EQ(out.data()[2], 15.0f);
    EXPECT_EQ(out.data()[3], 18.0f);
    EXPECT_TRUE(out.guards_intact());
  }
}

// Sums that would leave int16 or int32 if a kernel added too many before widening.
TEST(Matmul, ExtremeCodesAndActivations) {
  for (const cpu::Isa isa : cpu::available_isas()) {
    Machine machine(isa);
    for (const Format format : kIntegerFormats) {
      const int64_t k = std::max(64, info(format).block_size);
      for (const Codes codes : {Codes::kLowest, Codes::kHighest, Codes::kRandom}) {
        SCOPED_TRACE(concat(cpu::to_string(isa), " ", info(format).name, " codes ", static_cast<int>(codes)));
        const RandomMatrix matrix(format, 9, k, 3, codes);
        const std::span<const QuantMatrix> parts(&matrix.matrix(), 1);
        Rows a(6, k, 0);
        for (int64_t i = 0; i < k; ++i) {
          a.row(0)[i] = 1.0f;
          a.row(1)[i] = -1.0f;
          a.row(2)[i] = i % 2 == 0 ? 1.0f : -1.0f;
          a.row(3)[i] = i % 4 < 2 ? 1e30f : -1e30f;
          a.row(4)[i] = i % 32 < 16 ? 1e-30f : -1e-30f;
          a.row(5)[i] = 0.0f;
        }
        const MatmulWeight weight = prepare_matmul(parts, MatmulPrecision::kDefault, machine.context());
        EXPECT_EQ(weight.variant(), "i8");
        const MatmulWeight reference = prepare_matmul(parts, MatmulPrecision::kDefault, machine.context("ref"));
        Rows out = product(machine, weight, a);
        Rows expected = product(machine, reference, a);
        for (int64_t m = 0; m < a.m; ++m) {
          // f32 rounding of terms of size |a| |w| against the sum: relative to the whole row.
          const double size = std::abs(static_cast<double>(a.row(m)[0])) * static_cast<double>(k) * 8;
          const auto comparison = testkit::compare(out.span(m), expected.span(m), 1e-6, size * 0x1p-22);
          EXPECT_TRUE(comparison) << "row " << m << ": " << comparison.text;
        }
      }
    }
  }
}

TEST(Matmul, SameBitsOnEveryInstructionSet) {
  for (const Format format : kIntegerFormats) {
    const RandomMatrix matrix(format, 19, 512, 8);
    Rows a = random_rows(5, 512, 9);
    Machine scalar(cpu::Isa::kScalar);
    Rows expected =
        product(scalar, prepare_matmul({&matrix.matrix(), 1}, MatmulPrecision::kDefault, scalar.context()), a);
    for (const cpu::Isa isa : cpu::available_isas()) {
      Machine machine(isa);
      Rows out =
          product(machine, prepare_matmul({&matrix.matrix(), 1}, MatmulPrecision::kDefault, machine.context()), a);
      for (int64_t m = 0; m < a.m; ++m) {
        EXPECT_TRUE(same_bits(out.span(m), expected.span(m))) << cpu::to_string(isa) << " " << info(format).name;
      }
    }
  }
}

TEST(Matmul, ActivationsThatAreNotFiniteReachTheOutput) {
  for (const cpu::Isa isa : cpu::available_isas()) {
    Machine machine(isa);
    for (const Format format : testkit::all_formats()) {
      for (const MatmulPrecision precision : kPrecisions) {
        const RandomMatrix matrix(format, 9, 256, 11);
        const MatmulWeight weight = prepare_matmul({&matrix.matrix(), 1}, precision, machine.context());
        Rows a = random_rows(4, 256, 12);
        const float infinity = std::numeric_limits<float>::infinity();
        a.row(0)[100] = std::numeric_limits<float>::quiet_NaN();
        a.row(1)[255] = infinity;
        a.row(2)[0] = -infinity;
        Rows out = product(machine, weight, a);
        for (int64_t n = 0; n < 9; ++n) {
          SCOPED_TRACE(case_name(isa, format, precision, n, 256));
          EXPECT_FALSE(std::isfinite(out.row(0)[n]));
          EXPECT_FALSE(std::isfinite(out.row(1)[n]));
          EXPECT_FALSE(std::isfinite(out.row(2)[n]));
          EXPECT_TRUE(std::isfinite(out.row(3)[n]));
        }
      }
    }
  }
}

struct Joined {
  RandomMatrix q{Format::kQ4_1, 24, 256, 1};
  RandomMatrix k{Format::kQ8_0, 9, 256, 2};
  RandomMatrix v{Format::kQ6_K, 17, 256, 3};
  RandomMatrix other{Format::kIQ2_S, 5, 256, 4};
  RandomMatrix plain{Format::kF16, 12, 256, 5};
  std::vector<QuantMatrix> parts{q.matrix(), k.matrix(), v.matrix(), other.matrix(), plain.matrix()};
};

TEST(Matmul, JoinedPartsOfMixedFormatsWithBias) {
  const Joined joined;
  for (const cpu::Isa isa : cpu::available_isas()) {
    Machine machine(isa, 2);
    for (const MatmulPrecision precision : kPrecisions) {
      const MatmulWeight weight = prepare_matmul(joined.parts, precision, machine.context());
      EXPECT_EQ(weight.n(), 67);
      EXPECT_EQ(weight.variant(), precision == MatmulPrecision::kExact ? "f32" : "f32+i8");
      EXPECT_FALSE(weight.owns_bytes());
      Rows a = random_rows(9, 256, 13);
      Rows bias = random_rows(1, 67, 14);
      const TensorView bias_view(bias.row(0), DType::kF32, {67});
      Rows out = product(machine, weight, a, bias_view);
      Rows expected = product(machine, prepare_matmul(joined.parts, precision, machine.context("ref")), a, bias_view);
      expect_close(out, expected, largest_sum(a, joined.parts), 256);
      // The parts alone give the same bits beside each other.
      Rows without = product(machine, weight, a);
      int64_t column = 0;
      for (const QuantMatrix& part : joined.parts) {
        Rows alone = product(machine, prepare_matmul({&part, 1}, precision, machine.context()), a);
        for (int64_t m = 0; m < a.m; ++m) {
          EXPECT_TRUE(same_bits(alone.span(m),
                                without.span(m).subspan(static_cast<size_t>(column), static_cast<size_t>(part.n))));
        }
        column += part.n;
      }
    }
  }
}

TEST(Matmul, SameBitsForAnyNumberOfThreads) {
  const Joined joined;
  Rows a = random_rows(130, 256, 15);
  for (const cpu::Isa isa : cpu::available_isas()) {
    for (const MatmulPrecision precision : kPrecisions) {
      Machine one(isa, 1);
      Rows expected = product(one, prepare_matmul(joined.parts, precision, one.context()), a);
      for (const int num_threads : {2, 3}) {
        Machine machine(isa, num_threads);
        // Prepared with one number of threads, run with another.
        const MatmulWeight weight = prepare_matmul(joined.parts, precision, machine.context());
        for (Machine* runner : {&machine, &one}) {
          Rows out = product(*runner, weight, a);
          for (int64_t m = 0; m < a.m; ++m) {
            ASSERT_TRUE(same_bits(out.span(m), expected.span(m))) << num_threads << " threads, row " << m;
          }
        }
      }
    }
  }
}

// Such rows can only be decoded whole: also more values than a chunk of the block formats has.
TEST(Matmul, FormatsWhoseScalesStandApart) {
  constexpr int64_t kN = 19;
  constexpr int64_t kK = 1056;
  const RandomMatrix codes(Format::kINT4, kN, kK, 21);
  Random random(22);
  std::vector<float> scales(kN * kK / 32);
  for (float& scale : scales) {
    scale = random.uniform(0.05f, 0.2f);
  }
  QuantMatrix matrix = codes.matrix();
  matrix.scales = TensorView(scales.data(), DType::kF32, {kN, kK / 32});
  matrix.group_size = 32;
  const RandomMatrix beside(Format::kQ4_0, 9, kK, 23);
  const QuantMatrix parts[] = {matrix, beside.matrix()};
  for (const cpu::Isa isa : cpu::available_isas()) {
    Machine machine(isa, 2);
    for (const MatmulPrecision precision : kPrecisions) {
      Rows a = random_rows(5, kK, 24);
      Rows out = product(machine, prepare_matmul(parts, precision, machine.context()), a);
      Rows expected = product(machine, prepare_matmul(parts, precision, machine.context("ref")), a);
      expect_close(out, expected, largest_sum(a, parts), kK);
    }
  }
  Machine machine;
  matrix.scales = TensorView(scales.data(), DType::kF32, {kN, 1});
  EXPECT_THROW(prepare_matmul({&matrix, 1}, MatmulPrecision::kDefault, machine.context()), Error);
}

TEST(Matmul, GroupsHaveTheBitsOfTheirOwnProducts) {
  constexpr int64_t kN = 72;
  constexpr int64_t kK = 256;
  const std::vector<std::vector<int32_t>> ends = {{0, 0, 1, 1, 1, 9, 9, 10},
                                                  {0, 0, 0, 0, 0, 0, 0, 1},
                                                  {1, 2, 3, 4, 5, 6, 7, 8},
                                                  {0, 150, 150, 153, 153, 160, 200, 200}};
  for (const cpu::Isa isa : cpu::available_isas()) {
    for (const Format format : {Format::kQ4_K, Format::kQ4_0, Format::kBF16, Format::kQ2_K, Format::kGGUF_MXFP4}) {
      Machine machine(isa, 3);
      std::vector<RandomMatrix> matrices;
      std::vector<MatmulWeight> weights;
      for (uint64_t group = 0; group < ends.front().size(); ++group) {
        matrices.emplace_back(format, kN, kK, 100 + group);
        weights.push_back(prepare_matmul({&matrices.back().matrix(), 1}, MatmulPrecision::kDefault, machine.context()));
      }
      std::vector<float> bias = Random(5).normals(weights.size() * kN);
      const TensorView biases(bias.data(), DType::kF32, {static_cast<int64_t>(weights.size()), kN});
      for (const std::vector<int32_t>& end : ends) {
        std::vector<int32_t> row_begin{0};
        row_begin.insert(row_begin.end(), end.begin(), end.end());
        Rows a = random_rows(end.back(), kK, 6);
        Rows out(end.back(), kN, 7);
        machine.workspace = Workspace(matmul_workspace_bytes(weights.front(), end.back()));
        grouped_matmul({.out = out.view(), .a = a.view(), .row_begin = row_begin, .bias = biases}, weights,
                       machine.context());
        for (size_t group = 0; group < weights.size(); ++group) {
          for (int32_t m = row_begin[group]; m < row_begin[group + 1]; ++m) {
            Rows alone = random_rows(1, kK, 8);
            std::copy_n(a.row(m), kK, alone.row(0));
            Rows expected =
                product(machine, weights[group], alone, TensorView(bias.data() + group * kN, DType::kF32, {kN}));
            ASSERT_TRUE(same_bits({out.row(m), kN}, {expected.row(0), kN})) << info(format).name << " row " << m;
          }
        }
      }
    }
  }
}

TEST(Matmul, EmptyShapes) {
  Machine machine;
  const RandomMatrix none(Format::kQ4_1, 0, 64, 1);
  const MatmulWeight no_outputs = prepare_matmul({&none.matrix(), 1}, MatmulPrecision::kDefault, machine.context());
  Rows a = random_rows(3, 64, 1);
  Rows out = product(machine, no_outputs, a);
  EXPECT_EQ(no_outputs.n(), 0);

  const QuantMatrix no_terms{.format = Format::kF32, .n = 2, .k = 0};
  const MatmulWeight empty_sum = prepare_matmul({&no_terms, 1}, MatmulPrecision::kDefault, machine.context());
  float bias[] = {3.0f, 4.0f};
  Rows nothing(2, 0, 1);
  Rows sums = product(machine, empty_sum, nothing, TensorView(bias, DType::kF32, {2}));
  EXPECT_EQ(sums.row(1)[0], 3.0f);
  EXPECT_EQ(sums.row(1)[1], 4.0f);
}

TEST(Matmul, LayoutIsNamedAndAsSmallAsTheFile) {
  for (const cpu::Isa isa : cpu::available_isas()) {
    Machine machine(isa);
    const std::string group = isa == cpu::Isa::kAvx512 ? "16" : "8";
    for (const Format format : kIntegerFormats) {
      const RandomMatrix matrix(format, 64, 1024, 1);
      const MatmulWeight weight = prepare_matmul({&matrix.matrix(), 1}, MatmulPrecision::kDefault, machine.context());
      EXPECT_EQ(weight.layout(), concat(info(format).name, "_x", group));
      EXPECT_EQ(weight.format(), format);
      EXPECT_TRUE(weight.owns_bytes());
      // Packed scales grow to bytes: q4_k and q5_k from 144 and 176 bytes by 4, iq4_xs from 136 by 10, q3_k from 110 by 4;
      // mxfp4's to f16.
      EXPECT_LE(static_cast<double>(weight.num_bytes()), 1.08 * static_cast<double>(matrix.matrix().num_bytes()));
    }
    const RandomMatrix matrix(Format::kQ4_0, 64, 1024, 1);
    const MatmulWeight exact = prepare_matmul({&matrix.matrix(), 1}, MatmulPrecision::kExact, machine.context());
    EXPECT_EQ(exact.layout(), "raw");
    EXPECT_FALSE(exact.owns_bytes());
    EXPECT_EQ(exact.num_bytes(), matrix.matrix().num_bytes());
  }
}

TEST(Matmul, Mxfp4ScalesOutsideF16AreDecoded) {
  Machine machine;
  RandomMatrix matrix(Format::kGGUF_MXFP4, 16, 64, 1);
  const auto kernel = [&](int row, int scale, int codes) {
    std::vector<std::byte> bytes(matrix.matrix().codes, matrix.matrix().codes + matrix.matrix().num_bytes());
    std::byte* block = bytes.data() + row * 2 * 17;
    block[0] = static_cast<std::byte>(scale);
    std::fill_n(block + 1, 16, static_cast<std::byte>(codes));
    QuantMatrix raw = matrix.matrix();
    raw.codes = bytes.data();
    MatmulWeight weight = prepare_matmul({&raw, 1}, MatmulPrecision::kDefault, machine.context());
    const std::string variant(weight.variant());
    Rows a = random_rows(2, 64, 3);
    Rows out = product(machine, weight, a);
    Rows expected = product(machine, prepare_matmul({&raw, 1}, MatmulPrecision::kDefault, machine.context("ref")), a);
    if (scale != 255) {
      expect_close(out, expected, largest_sum(a, {&raw, 1}), 64);
    } else {
      EXPECT_TRUE(std::isnan(out.row(0)[row]));
    }
    return variant;
  };
  EXPECT_EQ(kernel(3, 104, 0x77), "i8");
  EXPECT_EQ(kernel(3, 143, 0x77), "i8");
  EXPECT_EQ(kernel(3, 103, 0x10), "f32");
  EXPECT_EQ(kernel(3, 144, 0x10), "f32");
  EXPECT_EQ(kernel(3, 0, 0x88), "i8");  // minus zeros
  EXPECT_EQ(kernel(3, 255, 0x00), "f32");
}

TEST(Matmul, Float32VariantLeavesActivationsAlone) {
  Machine machine;
  const RandomMatrix matrix(Format::kQ4_0, 16, 64, 1);
  Rows a = random_rows(3, 64, 2);
  Rows exact = product(machine, prepare_matmul({&matrix.matrix(), 1}, MatmulPrecision::kExact, machine.context()), a);
  const MatmulWeight weight = prepare_matmul({&matrix.matrix(), 1}, MatmulPrecision::kDefault, machine.context("f32"));
  EXPECT_EQ(weight.variant(), "f32");
  Rows out = product(machine, weight, a);
  EXPECT_TRUE(same_bits(out.span(2), exact.span(2)));
}

void expect_error(ErrorCode code, const std::string& message, const std::function<void()>& body) {
  try {
    body();
    FAIL() << "no error, expected: " << message;
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code);
    EXPECT_EQ(error.what(), message);
  }
}

TEST(Matmul, RejectsWeights) {
  Machine machine;
  const RandomMatrix matrix(Format::kQ4_0, 16, 64, 1);
  const auto prepare = [&](std::vector<QuantMatrix> parts, std::string_view variant = {},
                           MatmulPrecision precision = MatmulPrecision::kDefault) {
    return [&machine, parts, variant, precision] { prepare_matmul(parts, precision, machine.context(variant)); };
  };
  expect_error(ErrorCode::kInvalidArgument, "matmul: no weight given", prepare({}));
  QuantMatrix longer = matrix.matrix();
  longer.k = 32;
  expect_error(ErrorCode::kInvalidArgument, "matmul: joined weights have k = 64 and 32",
               prepare({matrix.matrix(), longer}));
  QuantMatrix negative = matrix.matrix();
  negative.n = -1;
  expect_error(ErrorCode::kInvalidArgument, "matmul: a weight has shape [-1, 64]", prepare({negative}));
  QuantMatrix absent = matrix.matrix();
  absent.codes = nullptr;
  expect_error(ErrorCode::kInvalidArgument, "matmul: a weight has no data", prepare({absent}));
  expect_error(ErrorCode::kInvalidArgument, "matmul: variant \"fast\" is unknown: i8, f32, ref",
               prepare({matrix.matrix()}, "fast"));
  expect_error(ErrorCode::kUnsupported, "matmul: variant \"i8\" has no kernel for q4_0 in exact precision",
               prepare({matrix.matrix()}, "i8", MatmulPrecision::kExact));
  const RandomMatrix other(Format::kF16, 16, 64, 1);
  expect_error(ErrorCode::kUnsupported, "matmul: variant \"i8\" has no kernel for f16",
               prepare({other.matrix()}, "i8"));
  QuantMatrix partial = matrix.matrix();
  partial.k = 48;
  EXPECT_THROW(prepare({partial})(), Error);
}

TEST(Matmul, RejectsGroups) {
  Machine machine;
  const RandomMatrix matrix(Format::kQ4_0, 16, 64, 1);
  const RandomMatrix narrow(Format::kQ4_0, 8, 64, 1);
  const auto prepare = [&](const RandomMatrix& raw) {
    return prepare_matmul({&raw.matrix(), 1}, MatmulPrecision::kDefault, machine.context());
  };
  std::vector<MatmulWeight> weights;
  weights.push_back(prepare(matrix));
  weights.push_back(prepare(matrix));
  Rows a = random_rows(3, 64, 2);
  Rows out(3, 16, 3);
  machine.workspace = Workspace(matmul_workspace_bytes(weights.front(), 3));
  const auto call = [&](std::vector<int32_t> row_begin) {
    grouped_matmul({.out = out.view(), .a = a.view(), .row_begin = row_begin}, weights, machine.context());
  };
  const std::string order = "matmul: row_begin must ascend from 0 to the rows of a, one more than groups";
  for (const std::vector<int32_t>& row_begin :
       {std::vector<int32_t>{0, 3}, {0, 2, 4}, {1, 2, 3}, {0, 4, 3}, {0, 1, 2, 3}}) {
    expect_error(ErrorCode::kInvalidArgument, order, [&] { call(row_begin); });
  }
  weights.back() = prepare(narrow);
  expect_error(ErrorCode::kInvalidArgument, "matmul: the weights of the groups differ in shape, format or preparation",
               [&] {
                 call({0, 1, 3});
               });
  weights.clear();
  expect_error(ErrorCode::kInvalidArgument, "matmul: no weights given", [&] { call({0}); });
}

TEST(Matmul, RejectsArguments) {
  Machine machine;
  const RandomMatrix matrix(Format::kQ4_0, 16, 64, 1);
  const MatmulWeight weight = prepare_matmul({&matrix.matrix(), 1}, MatmulPrecision::kDefault, machine.context());
  Rows a = random_rows(3, 64, 2);
  Rows out(3, 16, 0);
  machine.workspace = Workspace(matmul_workspace_bytes(weight, 3));
  const auto call = [&](const MatmulArgs& args, std::string_view variant = {}) {
    return [&machine, &weight, args, variant] { matmul(args, weight, machine.context(variant)); };
  };
  const auto invalid = ErrorCode::kInvalidArgument;
  expect_error(invalid, "matmul: a is required", call({.out = out.view(), .a = {}, .bias = {}}));
  Rows shorter = random_rows(3, 32, 2);
  expect_error(invalid, "matmul: a has shape [3, 32], expected [m, k = 64]",
               call({.out = out.view(), .a = shorter.view(), .bias = {}}));
  expect_error(invalid, "matmul: out has shape [2, 16], expected [m = 3, n = 16] (from a)",
               call({.out = out.view(0, 2), .a = a.view(), .bias = {}}));
  TensorView half = a.view();
  half.dtype = DType::kF16;
  expect_error(invalid, "matmul: a has type float16, expected float32",
               call({.out = out.view(), .a = half, .bias = {}}));
  TensorView gaps = a.view();
  gaps.strides[1] = 2;
  expect_error(invalid, "matmul: a must be contiguous in its last dimension",
               call({.out = out.view(), .a = gaps, .bias = {}}));
  expect_error(invalid, "matmul: bias has shape [64], expected [n = 16]",
               call({.out = out.view(), .a = a.view(), .bias = TensorView(a.row(0), DType::kF32, {64})}));
  expect_error(invalid, "matmul: variant \"ref\" asked for, but the weight was prepared for \"i8\"",
               call({.out = out.view(), .a = a.view(), .bias = {}}, "ref"));
  OpContext without = machine.context();
  without.workspace = nullptr;
  expect_error(invalid, "matmul: a workspace is required",
               [&] { matmul({.out = out.view(), .a = a.view(), .bias = {}}, weight, without); });
  machine.workspace = Workspace(matmul_workspace_bytes(weight, 3) - 1);
  EXPECT_THROW(call({.out = out.view(), .a = a.view(), .bias = {}})(), Error);
}

}  // namespace
}  // namespace shoal
