// matmul_fp4: the reference and every instruction set against sums in f64, exact weights, probing, rejections.
#include "shoal/ops/matmul_fp4/matmul_fp4.h"

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

constexpr float kNumbers[16] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, 0, -0.5f, -1, -1.5f, -2, -3, -4, -6};

struct Problem {
  Problem(int64_t num_rows, int64_t num_outputs, int64_t num_columns, DType dtype, int64_t block = 16,
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
    codes.resize(static_cast<size_t>(n * k));
    b.resize(static_cast<size_t>(n * k / 2 + 1));
    for (size_t i = 0; i < codes.size(); ++i) {
      codes[i] = static_cast<int>(random.integer(0, 15));
      b[1 + i / 2] = static_cast<uint8_t>(b[1 + i / 2] | codes[i] << (i % 2 * 4));
    }
    for (int64_t i = 0; i < n * blocks; ++i) {
      scales.push_back(static_cast<uint8_t>(random.integer(0, 0x7e) | (random.integer(0, 15) == 0 ? 0x80 : 0)));
    }
  }
  // In the order of the contract, rounded to the type of A.
  float weight(int64_t row, int64_t column) const {
    const float scale = e4m3_to_f32(scales[static_cast<size_t>(row * blocks + column / block_size)]);
    const float product = kNumbers[codes[static_cast<size_t>(row * k + column)]] * scale * global;
    return rounded_to(type, product);
  }
  std::vector<double> weights() const {
    std::vector<double> values;
    for (int64_t i = 0; i < n * k; ++i) {
      values.push_back(weight(i / k, i % k));
    }
    return values;
  }
  MatMulFp4Args args() {
    MatMulFp4Args args{.Y = y.view(),
                       .A = a.view(),
                       .B = TensorView(b.data() + 1, DType::kU8, {n, k / 2}),
                       .weight_scale = TensorView(scales.data(), DType::kU8, {n, blocks}),
                       .weight_scale_2 = TensorView(&global, DType::kF32, std::span<const int64_t>{}),
                       .block_size = block_size};
    if (has_bias) {
      args.bias = bias.view();
    }
    return args;
  }

  int64_t m, n, k, block_size, blocks;
  DType type;
  bool has_bias;
  float global = 0.0037f;
  std::vector<int> codes;
  std::vector<uint8_t> b, scales;
  GuardedTensor a, bias, y;
};

struct Runner {
  explicit Runner(int threads = 2) : pool(threads) {}
  void run(const MatMulFp4Args& args, cpu::Isa isa, std::string_view variant = "") {
    workspace.reserve(matmul_fp4_workspace_bytes(args));
    matmul_fp4(args, {.pool = &pool, .workspace = &workspace, .isa = isa, .variant = variant});
  }
  cpu::ThreadPool pool;
  Workspace workspace;
};

Runner& runner() {
  static Runner instance;
  return instance;
}

TEST(MatMulFp4, AgainstTheFormula) {
  for (const DType type : {DType::kF16, DType::kBF16}) {
    for (const auto& [m, n, k, block] : {std::tuple<int64_t, int64_t, int64_t, int64_t>{1, 8, 16, 16},
                                         {1, 33, 130, 16},
                                         {2, 7, 2, 16},
                                         {5, 40, 96, 16},
                                         {8, 24, 288, 16},
                                         {9, 17, 64, 32},
                                         {17, 16, 200, 16},
                                         {3, 20, 150, 24},
                                         {1, 20, 64, 7},
                                         {64, 16, 48, 16}}) {
      Problem problem(m, n, k, type, block, n % 2 == 0);
      const std::vector<float> bias = problem.has_bias ? problem.bias.values() : std::vector<float>{};
      std::vector<std::pair<cpu::Isa, std::string_view>> variants = {{cpu::Isa::kScalar, "ref"}};
      for (const cpu::Isa isa : cpu::available_isas()) {
        variants.emplace_back(isa, "");
      }
      for (const auto& [isa, variant] : variants) {
        runner().run(problem.args(), isa, variant);
        const std::string where = concat(cpu::to_string(isa), variant, " ", m, " ", n, " ", k, " ", block);
        testkit::expect_product(problem.y.values(), testkit::as_doubles(problem.a.values()), problem.weights(), bias, k,
                                type, where);
        EXPECT_TRUE(problem.y.intact()) << where;
        std::memset(problem.y.view().data, 0xff, 2);  // the next one must write it again
      }
    }
  }
}

// One-hot rows give exact weights, from a matrix of rows and from each row alone.
TEST(MatMulFp4, OneHotRowsGiveTheWeights) {
  for (const DType type : {DType::kF16, DType::kBF16}) {
    for (const cpu::Isa isa : cpu::available_isas()) {
      constexpr int64_t kK = 160;
      constexpr int64_t kN = 40;
      Problem problem(kK, kN, kK, type);
      for (int64_t i = 0; i < kK * kK; ++i) {
        write_element(type, problem.a.view().data, i, i / kK == i % kK ? 1.0f : 0.0f);
      }
      runner().run(problem.args(), isa);
      const std::vector<float> all = problem.y.values();
      for (int64_t i = 0; i < kK * kN; ++i) {
        ASSERT_EQ(all[static_cast<size_t>(i)], problem.weight(i % kN, i / kN));
      }
      MatMulFp4Args args = problem.args();
      for (int64_t row = 0; row < kK; row += 7) {
        args.A = problem.a.view().rows(row, row + 1);
        args.Y = problem.y.view().rows(row, row + 1);
        runner().run(args, isa);
      }
      EXPECT_EQ(problem.y.values(), all);
    }
  }
}

TEST(MatMulFp4, RowsDoNotSeeTheirNeighboursNorThreads) {
  Runner three(3);
  for (const cpu::Isa isa : cpu::available_isas()) {
    Problem problem(13, 130, 208, DType::kBF16);
    runner().run(problem.args(), isa);
    const std::vector<float> expected = problem.y.values();
    MatMulFp4Args args = problem.args();
    for (const auto& [begin, end] : {std::pair<int64_t, int64_t>{0, 1}, {1, 3}, {3, 13}}) {
      args.A = problem.a.view().rows(begin, end);
      args.Y = problem.y.view().rows(begin, end);
      three.run(args, isa);
    }
    EXPECT_EQ(problem.y.values(), expected);
  }
}

TEST(MatMulFp4, SpecialScales) {
  for (const cpu::Isa isa : cpu::available_isas()) {
    Problem problem(1, 8, 16, DType::kBF16);
    problem.scales = {0x00, 0x01, 0x7e, 0x7f, 0xff, 0x80, 0x38, 0xb8};  // 0, 2^-9, 448, NaN, NaN, -0, 1, -1
    runner().run(problem.args(), isa);
    const std::vector<float> y = problem.y.values();
    EXPECT_EQ(y[0], 0.0f);
    EXPECT_EQ(y[5], 0.0f);
    EXPECT_TRUE(std::isnan(y[3]) && std::isnan(y[4]));
    EXPECT_TRUE(std::isfinite(y[1]) && std::isfinite(y[2]) && std::isfinite(y[6]) && std::isfinite(y[7]));
  }
}

TEST(MatMulFp4, OptionalInputsAndNoRows) {
  Problem problem(2, 8, 32, DType::kF16);
  runner().run(problem.args(), cpu::Isa::kScalar);
  const std::vector<float> expected = problem.y.values();
  MatMulFp4Args args = problem.args();
  float input_scale = 0.5f;
  args.input_scale = TensorView(&input_scale, DType::kF32, {1});
  args.weight_scale.dtype = DType::kF8E4M3;
  args.weight_scale_2 = TensorView(&problem.global, DType::kF32, {1});
  runner().run(args, cpu::Isa::kScalar);
  EXPECT_EQ(problem.y.values(), expected);
  args.A = TensorView(nullptr, DType::kF16, {0, 32});
  args.Y = TensorView(nullptr, DType::kF16, {0, 8});
  runner().run(args, cpu::Isa::kScalar);
}

TEST(MatMulFp4, Rejections) {
  Problem problem(2, 8, 32, DType::kF16, 16, true);
  using Args = MatMulFp4Args;
  const auto error = [&](std::string_view part, auto change) {
    Args args = problem.args();
    change(args);
    expect_error(ErrorCode::kInvalidArgument, part, [&] { runner().run(args, cpu::Isa::kScalar); });
  };
  float values[2] = {};
  error("matmul_fp4: block_size is 0", [](Args& a) { a.block_size = 0; });
  error("matmul_fp4: A has type float32, expected float16 or bfloat16", [](Args& a) { a.A.dtype = DType::kF32; });
  error("matmul_fp4: A has shape [2, 31], expected [..., K = 32] (from B)", [](Args& a) { a.A.shape[1] = 31; });
  error("matmul_fp4: A is required", [](Args& a) { a.A = {}; });
  error("matmul_fp4: A is not on the CPU", [](Args& a) { a.A.device.type = DeviceType::kCuda; });
  error("matmul_fp4: B has type int8", [](Args& a) { a.B.dtype = DType::kI8; });
  error("matmul_fp4: B has 1 dimensions, expected 2", [](Args& a) { a.B.rank = 1; });
  error("matmul_fp4: B has shape [0, 16]", [](Args& a) { a.B.shape[0] = 0; });
  error("matmul_fp4: B must be contiguous", [](Args& a) { a.B.strides[0] = 17; });
  error("matmul_fp4: weight_scale has shape [8, 2], expected", [](Args& a) { a.block_size = 32; });
  error("matmul_fp4: weight_scale has type float32", [](Args& a) { a.weight_scale.dtype = DType::kF32; });
  error("matmul_fp4: weight_scale is required", [](Args& a) { a.weight_scale = {}; });
  error("matmul_fp4: weight_scale_2 is required", [](Args& a) { a.weight_scale_2 = {}; });
  error("matmul_fp4: weight_scale_2 has shape [2], expected one value",
        [&](Args& a) { a.weight_scale_2 = TensorView(values, DType::kF32, {2}); });
  error("matmul_fp4: weight_scale_2 has type float16", [](Args& a) { a.weight_scale_2.dtype = DType::kF16; });
  error("matmul_fp4: input_scale has shape [2], expected one value",
        [&](Args& a) { a.input_scale = TensorView(values, DType::kF32, {2}); });
  error("matmul_fp4: bias has shape [7]", [](Args& a) { a.bias.shape[0] = 7; });
  error("matmul_fp4: bias has type bfloat16", [](Args& a) { a.bias.dtype = DType::kBF16; });
  error("matmul_fp4: Y has shape [2, 9]", [](Args& a) { a.Y.shape[1] = 9; });
  error("matmul_fp4: Y has type bfloat16", [](Args& a) { a.Y.dtype = DType::kBF16; });
  error("matmul_fp4: Y must have evenly spaced rows", [](Args& a) { a.Y.strides[1] = 2; });
  expect_error(ErrorCode::kInvalidArgument, "matmul_fp4: no variant \"x\"",
               [&] { runner().run(problem.args(), cpu::Isa::kScalar, "x"); });
  for (const float value : problem.y.values()) {
    EXPECT_TRUE(std::isnan(value));  // nothing was written
  }
}

}  // namespace
}  // namespace shoal
