// matmul_packed: golden files of the PyPI package `gguf` (tests/golden/make_matmul_golden.py) for every packed type,
// the reference and every instruction set against sums in f64, activations, rejections.
#include "shoal/ops/matmul_packed/matmul_packed.h"

#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "shoal/cpu/thread_pool.h"
#include "shoal/quant/format.h"
#include "testkit/expect_error.h"
#include "testkit/guarded_tensor.h"
#include "testkit/product_check.h"
#include "testkit/testkit.h"

namespace shoal {
namespace {

using testkit::expect_error;
using testkit::GuardedTensor;
using testkit::Random;
using testkit::rounded_to;

struct Runner {
  explicit Runner(int threads = 2) : pool(threads) {}
  void run(const MatMulPackedArgs& args, cpu::Isa isa, std::string_view variant = "") {
    workspace.reserve(matmul_packed_workspace_bytes(args));
    matmul_packed(args, {.pool = &pool, .workspace = &workspace, .isa = isa, .variant = variant});
  }
  cpu::ThreadPool pool;
  Workspace workspace;
};

Runner& runner() {
  static Runner instance;
  return instance;
}

std::vector<std::pair<cpu::Isa, std::string_view>> all_variants() {
  std::vector<std::pair<cpu::Isa, std::string_view>> variants = {{cpu::Isa::kScalar, "ref"}};
  for (const cpu::Isa isa : cpu::available_isas()) {
    variants.emplace_back(isa, "");
  }
  return variants;
}

TEST(MatMulPacked, GoldenProductsOfEveryType) {
  std::ifstream file(SHOAL_TEST_DATA "/matmul/packed.bin", std::ios::binary);
  ASSERT_TRUE(file.is_open());
  const std::vector<char> bytes{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  size_t at = 0;
  const auto take = [&](void* to, size_t count) {
    ASSERT_LE(at + count, bytes.size());
    std::memcpy(to, bytes.data() + at, count);
    at += count;
  };
  size_t num_cases = 0;
  for (; at < bytes.size() && !HasFatalFailure(); ++num_cases) {
    int32_t header[4];
    take(header, sizeof(header));
    const auto [type, m, n, k] = std::array<int64_t, 4>{header[0], header[1], header[2], header[3]};
    const std::optional<Format> format = format_from_ggml_type(static_cast<uint32_t>(type));
    ASSERT_TRUE(format.has_value());
    Tensor a(DType::kF16, {m, k});
    std::vector<std::byte> b(static_cast<size_t>(n * row_bytes(*format, k) + 1));  // at an odd address
    std::vector<double> exact(static_cast<size_t>(m * n));
    std::vector<double> rounded(exact.size());
    take(a.view().data, a.view().num_bytes());
    take(b.data() + 1, b.size() - 1);
    take(exact.data(), exact.size() * 8);
    take(rounded.data(), rounded.size() * 8);
    for (const bool unrounded : {false, true}) {
      for (const auto& [isa, variant] : all_variants()) {
        GuardedTensor y(DType::kF16, {m, n});
        runner().run({.Y = y.view(),
                      .A = a,
                      .B = TensorView(b.data() + 1, DType::kU8, {n, row_bytes(*format, k)}),
                      .packed_type = type,
                      .N = n,
                      .K = k,
                      .unrounded = unrounded},
                     isa, variant);
        const std::vector<float> actual = y.values();
        const std::vector<double>& expected = unrounded ? exact : rounded;
        for (size_t i = 0; i < expected.size(); ++i) {
          EXPECT_NEAR(actual[i], expected[i], std::fabs(expected[i]) * 0x1.02p-11 + 3e-5)
              << info(*format).name << " " << cpu::to_string(isa) << variant << " unrounded " << unrounded;
        }
        EXPECT_TRUE(y.intact());
      }
    }
  }
  EXPECT_EQ(num_cases, 19u);
}

struct Problem {
  Problem(Format packed, int64_t num_rows, int64_t num_outputs, int64_t num_columns, DType dtype)
      : format(packed),
        m(num_rows),
        n(num_outputs),
        k(num_columns),
        type(dtype),
        a(dtype, {m, k}, Random(1).normals(static_cast<size_t>(m * k))),
        y(dtype, {m, n}, 3),
        b(static_cast<size_t>(n * row_bytes(packed, k) + 1)) {
    for (int64_t row = 0; row < n; ++row) {
      encode_row(format, Random(static_cast<uint64_t>(row)).normals(static_cast<size_t>(k), 0.1f).data(), k,
                 b.data() + 1 + row * row_bytes(format, k));
    }
  }
  std::vector<double> weights(bool rounds) const {
    std::vector<float> values(static_cast<size_t>(n * k));
    for (int64_t row = 0; row < n; ++row) {
      decode_row(format, b.data() + 1 + row * row_bytes(format, k), k, values.data() + row * k);
    }
    std::vector<double> result;
    for (const float value : values) {
      result.push_back(rounds ? rounded_to(type, value) : value);
    }
    return result;
  }
  MatMulPackedArgs args() {
    return {.Y = y.view(),
            .A = a.view(),
            .B = TensorView(b.data() + 1, DType::kU8, {n, row_bytes(format, k)}),
            .packed_type = info(format).ggml_type,
            .N = n,
            .K = k};
  }

  Format format;
  int64_t m, n, k;
  DType type;
  GuardedTensor a, y;
  std::vector<std::byte> b;
};

TEST(MatMulPacked, ShapesAndTypes) {
  for (const Format format : {Format::kQ4_0, Format::kQ4_K, Format::kGGUF_MXFP4, Format::kGGUF_NVFP4}) {
    for (const DType type : {DType::kF32, DType::kF16, DType::kBF16}) {
      for (const auto& [m, n, blocks] :
           {std::tuple<int64_t, int64_t, int64_t>{1, 8, 1}, {2, 33, 3}, {8, 16, 2}, {9, 7, 2}, {17, 20, 1}}) {
        for (const bool unrounded : {false, true}) {
          Problem problem(format, m, n, blocks * std::max(64, info(format).block_size), type);
          for (const auto& [isa, variant] : all_variants()) {
            MatMulPackedArgs args = problem.args();
            args.unrounded = unrounded;
            runner().run(args, isa, variant);
            const bool rounds = !(unrounded && m <= 8);
            testkit::expect_product(problem.y.values(), testkit::as_doubles(problem.a.values()),
                                    problem.weights(rounds), {}, problem.k, type,
                                    concat(info(format).name, " ", cpu::to_string(isa), variant));
            ASSERT_TRUE(problem.y.intact());
          }
        }
      }
    }
  }
}

TEST(MatMulPacked, GlobalScaleMultipliesTheSum) {
  float global = 37.5f;
  for (const auto& [isa, variant] : all_variants()) {
    Problem problem(Format::kGGUF_NVFP4, 3, 9, 128, DType::kF16);
    MatMulPackedArgs args = problem.args();
    args.global_scale = TensorView(&global, DType::kF32, std::span<const int64_t>{});
    runner().run(args, isa, variant);
    testkit::expect_product(problem.y.values(), testkit::as_doubles(problem.a.values()), problem.weights(true), {}, 128,
                            DType::kF16, std::string(cpu::to_string(isa)), 37.5);
  }
}

// The activation sees the rounded value and is rounded itself.
TEST(MatMulPacked, Activations) {
  for (const DType type : {DType::kF32, DType::kF16, DType::kBF16}) {
    for (const auto& [isa, variant] : all_variants()) {
      Problem problem(Format::kQ8_0, 5, 37, 64, type);
      MatMulPackedArgs args = problem.args();
      runner().run(args, isa, variant);
      const std::vector<float> plain = problem.y.values();
      for (const std::string_view name : {"relu2", "relu_squared", "silu"}) {
        args.activation_type = name;
        runner().run(args, isa, variant);
        const std::vector<float> actual = problem.y.values();
        for (size_t i = 0; i < plain.size(); ++i) {
          const double y = plain[i];
          const double expected = name == "silu" ? y / (1 + std::exp(-y)) : y < 0 ? 0 : y * y;
          ASSERT_NEAR(actual[i], expected, std::fabs(expected) * (testkit::rounding_of(type) * 1.01 + 4e-7) + 6e-8)
              << name;
        }
        ASSERT_TRUE(problem.y.intact());
      }
    }
  }
}

TEST(MatMulPacked, RowsDoNotSeeTheirNeighboursNorThreads) {
  Runner three(3);
  for (const cpu::Isa isa : cpu::available_isas()) {
    Problem problem(Format::kQ6_K, 13, 100, 512, DType::kBF16);
    runner().run(problem.args(), isa);
    const std::vector<float> expected = problem.y.values();
    MatMulPackedArgs args = problem.args();
    for (const auto& [begin, end] : {std::pair<int64_t, int64_t>{0, 1}, {1, 3}, {3, 13}}) {
      args.A = problem.a.view().rows(begin, end);
      args.Y = problem.y.view().rows(begin, end);
      three.run(args, isa);
    }
    EXPECT_EQ(problem.y.values(), expected);
  }
}

TEST(MatMulPacked, NanBlocksSpoilTheirOutputsOnly) {
  for (const DType type : {DType::kF16, DType::kBF16}) {
    for (const auto& [isa, variant] : all_variants()) {
      Problem problem(Format::kQ8_0, 2, 9, 64, type);
      problem.b[static_cast<size_t>(1 + 4 * row_bytes(Format::kQ8_0, 64))] = std::byte{0xff};
      problem.b[static_cast<size_t>(2 + 4 * row_bytes(Format::kQ8_0, 64))] = std::byte{0x7f};  // NaN with every bit set
      runner().run(problem.args(), isa, variant);
      const std::vector<float> y = problem.y.values();
      for (size_t i = 0; i < y.size(); ++i) {
        EXPECT_EQ(std::isnan(y[i]), i % 9 == 4) << cpu::to_string(isa) << variant;
      }
    }
  }
}

TEST(MatMulPacked, NamesOfTypes) {
  for (const auto& [name, id] : {std::pair<std::string_view, int64_t>{"Q4_0", 2},
                                 {"q4_1", 3},
                                 {"Q5_0", 6},
                                 {"Q5_1", 7},
                                 {"Q8_0", 8},
                                 {"Q2_K", 10},
                                 {"Q3_K", 11},
                                 {"q4_k", 12},
                                 {"Q5_K", 13},
                                 {"Q6_K", 14},
                                 {"IQ2_XXS", 16},
                                 {"IQ2_XS", 17},
                                 {"IQ3_XXS", 18},
                                 {"IQ4_NL", 20},
                                 {"IQ3_S", 21},
                                 {"IQ2_S", 22},
                                 {"IQ4_XS", 23},
                                 {"MXFP4", 39},
                                 {"nvfp4", 40},
                                 {"gguf_mxfp4", 39},
                                 {"Q8_1", 9}}) {
    EXPECT_EQ(packed_type_from_name(name), id) << name;
  }
  for (const std::string_view name : {"int4", "fp8_e4m3", "", "Q4"}) {
    expect_error(ErrorCode::kInvalidArgument, concat("matmul_packed: packed_type is \"", name, "\""),
                 [&] { packed_type_from_name(name); });
  }
}

TEST(MatMulPacked, NoRows) {
  Problem problem(Format::kQ8_0, 1, 8, 64, DType::kF32);
  MatMulPackedArgs args = problem.args();
  args.A = TensorView(nullptr, DType::kF32, {3, 0, 64});
  args.Y = TensorView(nullptr, DType::kF32, {3, 0, 8});
  runner().run(args, cpu::Isa::kScalar);
}

TEST(MatMulPacked, Rejections) {
  Problem problem(Format::kQ8_0, 2, 8, 64, DType::kF16);
  using Args = MatMulPackedArgs;
  const auto error = [&](std::string_view part, auto change, ErrorCode code = ErrorCode::kInvalidArgument) {
    Args args = problem.args();
    change(args);
    expect_error(code, part, [&] { runner().run(args, cpu::Isa::kScalar); });
  };
  float values[2] = {1.0f, 1.0f};
  for (const auto& [id, name] :
       {std::pair<int64_t, std::string_view>{9, "q8_1"}, {0, "f32"}, {30, "bf16"}, {19, "iq1_s"}}) {
    error(
        concat("matmul_packed: packed_type is ", id, " (", name, ")"), [&](Args& a) { a.packed_type = id; },
        ErrorCode::kUnsupported);
  }
  for (const int64_t id : {-1, 4, 41, 1000}) {
    error(concat("matmul_packed: packed_type is ", id), [&](Args& a) { a.packed_type = id; });
  }
  error("matmul_packed: activation_type is \"gelu\"", [](Args& a) { a.activation_type = "gelu"; });
  error("matmul_packed: N is 0", [](Args& a) { a.N = 0; });
  error("matmul_packed: K is 48, expected a whole number of blocks of 32 (q8_0)", [](Args& a) { a.K = 48; });
  error("matmul_packed: K is 0", [](Args& a) { a.K = 0; });
  error("matmul_packed: A has type int8", [](Args& a) { a.A.dtype = DType::kI8; });
  error("matmul_packed: A has shape [2, 63]", [](Args& a) { a.A.shape[1] = 63; });
  error("matmul_packed: A is required", [](Args& a) { a.A = {}; });
  error("matmul_packed: A is not on the CPU", [](Args& a) { a.A.device.type = DeviceType::kCuda; });
  error("matmul_packed: B has type int8", [](Args& a) { a.B.dtype = DType::kI8; });
  error("matmul_packed: B has shape [8, 68], expected [9, 68]", [](Args& a) { a.N = 9; });
  error("matmul_packed: B has shape [8, 68], expected [8, 36]", [](Args& a) { a.packed_type = 2; });
  error("matmul_packed: B must be contiguous", [](Args& a) { a.B.strides[0] = 100; });
  error("matmul_packed: global_scale is given, but packed_type is 8, not NVFP4 (40)",
        [&](Args& a) { a.global_scale = TensorView(values, DType::kF32, {1}); });
  error("matmul_packed: Y has shape [2, 9]", [](Args& a) { a.Y.shape[1] = 9; });
  error("matmul_packed: Y has type float32", [](Args& a) { a.Y.dtype = DType::kF32; });
  Problem nvfp4(Format::kGGUF_NVFP4, 1, 8, 64, DType::kF16);
  Args args = nvfp4.args();
  args.global_scale = TensorView(values, DType::kF32, {2});
  expect_error(ErrorCode::kInvalidArgument, "matmul_packed: global_scale has shape [2], expected one value",
               [&] { runner().run(args, cpu::Isa::kScalar); });
  args.global_scale = TensorView(values, DType::kF16, {1});
  expect_error(ErrorCode::kInvalidArgument, "matmul_packed: global_scale has type float16",
               [&] { runner().run(args, cpu::Isa::kScalar); });
  expect_error(ErrorCode::kInvalidArgument, "matmul_packed: no variant \"x\"",
               [&] { runner().run(problem.args(), cpu::Isa::kScalar, "x"); });
  for (const float value : problem.y.values()) {
    EXPECT_TRUE(std::isnan(value));  // nothing was written
  }
}

}  // namespace
}  // namespace shoal
