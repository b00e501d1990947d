// matmul_fp8: the reference and every instruction set against sums in f64, exact weights, rounding of A, rejections.
#include "shoal/ops/matmul_fp8/matmul_fp8.h"

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "shoal/cpu/thread_pool.h"
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

// Every number of e4m3 from the words of the contract, by code.
double e4m3_number(int code) {
  const int exponent = code >> 3 & 15;
  const double mantissa = code & 7;
  const double magnitude = exponent == 0 ? mantissa * 0x1p-9 : (1 + mantissa / 8) * std::exp2(exponent - 7);
  return (code & 0x80) != 0 ? -magnitude : magnitude;
}

// Nearest number, ties to the even code, saturating: by search.
double nearest_e4m3(double value) {
  int best = 0;
  for (int code = 1; code <= 0x7e; ++code) {
    const double gain =
        std::fabs(e4m3_number(best) - std::fabs(value)) - std::fabs(e4m3_number(code) - std::fabs(value));
    if (gain > 0 || (gain == 0 && code % 2 == 0)) {
      best = code;
    }
  }
  return std::copysign(e4m3_number(best), value);
}

struct Problem {
  Problem(int64_t num_rows, int64_t num_outputs, int64_t num_columns, DType dtype, int64_t block = 128,
          bool with_bias = false)
      : m(num_rows),
        n(num_outputs),
        k(num_columns),
        block_size(block),
        blocks((k + block - 1) / block),
        type(dtype),
        has_bias(with_bias),
        a(dtype, {m, k}, Random(1).normals(static_cast<size_t>(m * k))),
        bias(dtype, {n}, Random(2).normals(static_cast<size_t>(n))),
        y(dtype, {m, n}, 3) {
    Random random(static_cast<uint64_t>(k + n));
    for (int64_t i = 0; i < n * k + 1; ++i) {
      b.push_back(static_cast<uint8_t>(random.integer(0, 0x7e) | random.integer(0, 1) << 7));
    }
    for (int64_t i = 0; i < n * blocks; ++i) {
      scales.push_back(random.uniform(-0.001f, 0.01f));
    }
  }
  double weight(int64_t row, int64_t column) const {
    return static_cast<float>(e4m3_number(b[static_cast<size_t>(1 + row * k + column)])) *
           scales[static_cast<size_t>(row * blocks + column / block_size)];
  }
  std::vector<double> weights() const {
    std::vector<double> values;
    for (int64_t i = 0; i < n * k; ++i) {
      values.push_back(weight(i / k, i % k));
    }
    return values;
  }
  std::vector<double> rows() {
    std::vector<double> values;
    for (const float value : a.values()) {
      values.push_back(a_scale == 0.0f ? value
                                       : rounded_to(type, static_cast<float>(nearest_e4m3(value / a_scale)) * a_scale));
    }
    return values;
  }
  MatMulFp8Args args() {
    MatMulFp8Args args{.Y = y.view(),
                       .A = a.view(),
                       .B = TensorView(b.data() + 1, DType::kF8E4M3, {n, k}),
                       .b_scale = TensorView(scales.data(), DType::kF32, {n, blocks}),
                       .block_size = block_size};
    if (a_scale != 0.0f) {
      args.a_scale = TensorView(&a_scale, DType::kF32, {1});
    }
    if (has_bias) {
      args.bias = bias.view();
    }
    return args;
  }

  int64_t m, n, k, block_size, blocks;
  DType type;
  bool has_bias;
  float a_scale = 0.0f;  // 0: not given
  std::vector<uint8_t> b;
  std::vector<float> scales;
  GuardedTensor a, bias, y;
};

struct Runner {
  explicit Runner(int threads = 2) : pool(threads) {}
  void run(const MatMulFp8Args& args, cpu::Isa isa, std::string_view variant = "") {
    workspace.reserve(matmul_fp8_workspace_bytes(args));
    matmul_fp8(args, {.pool = &pool, .workspace = &workspace, .isa = isa, .variant = variant});
  }
  cpu::ThreadPool pool;
  Workspace workspace;
};

Runner& runner() {
  static Runner instance;
  return instance;
}

TEST(MatMulFp8, AgainstTheFormula) {
  for (const DType type : {DType::kF16, DType::kBF16}) {
    for (const float a_scale : {0.0f, 0.0123f, 0.001f}) {  // with the last, large values saturate
      for (const auto& [m, n, k, block] : {std::tuple<int64_t, int64_t, int64_t, int64_t>{1, 8, 16, 128},
                                           {1, 33, 300, 128},
                                           {2, 7, 1, 128},
                                           {5, 40, 96, 32},
                                           {9, 17, 130, 64},
                                           {3, 20, 150, 24},
                                           {1, 20, 70, 7},
                                           {64, 16, 48, 16}}) {
        Problem problem(m, n, k, type, block, n % 2 == 0);
        problem.a_scale = a_scale;
        const std::vector<float> bias = problem.has_bias ? problem.bias.values() : std::vector<float>{};
        std::vector<std::pair<cpu::Isa, std::string_view>> variants = {{cpu::Isa::kScalar, "ref"}};
        for (const cpu::Isa isa : cpu::available_isas()) {
          variants.emplace_back(isa, "");
        }
        for (const auto& [isa, variant] : variants) {
          runner().run(problem.args(), isa, variant);
          const std::string where = concat(cpu::to_string(isa), variant, " ", m, " ", n, " ", k, " ", block);
          testkit::expect_product(problem.y.values(), problem.rows(), problem.weights(), bias, k, type, where);
          EXPECT_TRUE(problem.y.intact()) << where;
          std::memset(problem.y.view().data, 0xff, 2);  // the next one must write it again
        }
      }
    }
  }
}

// Every code, in a matrix of rows and in each row alone.
TEST(MatMulFp8, OneHotRowsGiveTheWeights) {
  for (const DType type : {DType::kF16, DType::kBF16}) {
    for (const cpu::Isa isa : cpu::available_isas()) {
      constexpr int64_t kK = 128;
      constexpr int64_t kN = 24;
      Problem problem(kK, kN, kK, type, 32);
      for (int i = 0; i < 254; ++i) {
        problem.b[static_cast<size_t>(1 + i)] = static_cast<uint8_t>(i < 127 ? i : i + 1);
      }
      for (int64_t i = 0; i < kK * kK; ++i) {
        write_element(type, problem.a.view().data, i, i / kK == i % kK ? 1.0f : 0.0f);
      }
      runner().run(problem.args(), isa);
      const std::vector<float> all = problem.y.values();
      for (int64_t i = 0; i < kK * kN; ++i) {
        ASSERT_EQ(all[static_cast<size_t>(i)], rounded_to(type, static_cast<float>(problem.weight(i % kN, i / kN))));
      }
      MatMulFp8Args args = problem.args();
      for (int64_t row = 0; row < kK; row += 5) {
        args.A = problem.a.view().rows(row, row + 1);
        args.Y = problem.y.view().rows(row, row + 1);
        runner().run(args, isa);
      }
      EXPECT_EQ(problem.y.values(), all);
    }
  }
}

TEST(MatMulFp8, NanCodesSpoilTheirOutputsOnly) {
  for (const cpu::Isa isa : cpu::available_isas()) {
    for (const int64_t m : {1, 3}) {
      Problem problem(m, 12, 40, DType::kBF16);
      problem.b[static_cast<size_t>(1 + 2 * 40 + 39)] = 0x7f;
      problem.b[static_cast<size_t>(1 + 5 * 40)] = 0xff;
      runner().run(problem.args(), isa);
      const std::vector<float> y = problem.y.values();
      for (size_t i = 0; i < y.size(); ++i) {
        EXPECT_EQ(std::isnan(y[i]), i % 12 == 2 || i % 12 == 5);
      }
    }
  }
}

TEST(MatMulFp8, RowsDoNotSeeTheirNeighboursNorThreads) {
  Runner three(3);
  for (const cpu::Isa isa : cpu::available_isas()) {
    Problem problem(13, 130, 208, DType::kF16);
    runner().run(problem.args(), isa);
    const std::vector<float> expected = problem.y.values();
    MatMulFp8Args args = problem.args();
    for (const auto& [begin, end] : {std::pair<int64_t, int64_t>{0, 1}, {1, 3}, {3, 13}}) {
      args.A = problem.a.view().rows(begin, end);
      args.Y = problem.y.view().rows(begin, end);
      three.run(args, isa);
    }
    EXPECT_EQ(problem.y.values(), expected);
  }
}

TEST(MatMulFp8, NoRows) {
  Problem problem(1, 8, 32, DType::kF16);
  MatMulFp8Args args = problem.args();
  args.A = TensorView(nullptr, DType::kF16, {0, 32});
  args.Y = TensorView(nullptr, DType::kF16, {0, 8});
  runner().run(args, cpu::Isa::kScalar);
}

TEST(MatMulFp8, Rejections) {
  Problem problem(2, 8, 200, DType::kF16, 128, true);
  problem.a_scale = 1.0f;
  using Args = MatMulFp8Args;
  const auto error = [&](std::string_view part, auto change) {
    Args args = problem.args();
    change(args);
    expect_error(ErrorCode::kInvalidArgument, part, [&] { runner().run(args, cpu::Isa::kScalar); });
  };
  float values[2] = {};
  error("matmul_fp8: block_size is -1", [](Args& a) { a.block_size = -1; });
  error("matmul_fp8: A has type float32, expected float16 or bfloat16", [](Args& a) { a.A.dtype = DType::kF32; });
  error("matmul_fp8: A has shape [2, 199], expected [..., K = 200] (from B)", [](Args& a) { a.A.shape[1] = 199; });
  error("matmul_fp8: A is required", [](Args& a) { a.A = {}; });
  error("matmul_fp8: A is not on the CPU", [](Args& a) { a.A.device.type = DeviceType::kCuda; });
  error("matmul_fp8: B has type uint8, expected float8e4m3fn", [](Args& a) { a.B.dtype = DType::kU8; });
  error("matmul_fp8: B has shape [8, 0]", [](Args& a) { a.B.shape[1] = 0; });
  error("matmul_fp8: B must be contiguous", [](Args& a) { a.B.strides[0] = 300; });
  error("matmul_fp8: b_scale has shape [8, 2], expected", [](Args& a) { a.block_size = 64; });
  error("matmul_fp8: b_scale has type float16", [](Args& a) { a.b_scale.dtype = DType::kF16; });
  error("matmul_fp8: b_scale is required", [](Args& a) { a.b_scale = {}; });
  error("matmul_fp8: a_scale has shape [2], expected one value",
        [&](Args& a) { a.a_scale = TensorView(values, DType::kF32, {2}); });
  error("matmul_fp8: a_scale has type float16", [](Args& a) { a.a_scale.dtype = DType::kF16; });
  error("matmul_fp8: bias has shape [7]", [](Args& a) { a.bias.shape[0] = 7; });
  error("matmul_fp8: Y has shape [2, 9]", [](Args& a) { a.Y.shape[1] = 9; });
  error("matmul_fp8: Y has type bfloat16", [](Args& a) { a.Y.dtype = DType::kBF16; });
  expect_error(ErrorCode::kInvalidArgument, "matmul_fp8: no variant \"x\"",
               [&] { runner().run(problem.args(), cpu::Isa::kScalar, "x"); });
  for (const float value : problem.y.values()) {
    EXPECT_TRUE(std::isnan(value));  // nothing was written
  }
}

}  // namespace
}  // namespace shoal
