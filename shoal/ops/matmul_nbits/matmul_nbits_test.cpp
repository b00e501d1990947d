// matmul_nbits: the reference and every instruction set against sums in f64 straight from the formula, golden files of
// ONNX Runtime (tests/golden/make_matmul_golden.py), exact weights, independence of rows and threads, rejections.
#include "shoal/ops/matmul_nbits/matmul_nbits.h"

#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <iterator>
#include <limits>
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

enum class Zeros { kNone, kPacked, kTyped };

struct Shape {
  int64_t m = 1, n = 8, k = 32;
  int bits = 4;
  int64_t block_size = 32;
  DType type = DType::kF32;
  Zeros zeros = Zeros::kNone;
  bool has_g_idx = false;
  bool has_bias = false;
  int64_t accuracy_level = 0;

  int64_t k_blocks() const { return (k + block_size - 1) / block_size; }
  std::string text() const {
    return concat("m ", m, " n ", n, " k ", k, " bits ", bits, " block ", block_size, " ", to_string(type), " zeros ",
                  static_cast<int>(zeros), " g_idx ", has_g_idx, " bias ", has_bias, " level ", accuracy_level);
  }
};

// A call with all its memory. Every input is kept as plain numbers too.
struct Problem {
  explicit Problem(const Shape& s, uint64_t seed = 1) : shape(s), y(s.type, {s.m, s.n}, 3) {
    Random random(seed);
    const int64_t blocks = s.k_blocks();
    codes.resize(static_cast<size_t>(s.n * blocks * s.block_size));
    for (int& code : codes) {
      code = static_cast<int>(random.integer(0, (1 << s.bits) - 1));
    }
    // One bit at a time: no arithmetic in common with the code under test. At an odd address.
    b.resize(codes.size() * static_cast<size_t>(s.bits) / 8 + 1);
    for (size_t i = 0; i < codes.size(); ++i) {
      for (int bit = 0; bit < s.bits; ++bit) {
        const size_t at = i * static_cast<size_t>(s.bits) + static_cast<size_t>(bit);
        b[1 + at / 8] = static_cast<uint8_t>(b[1 + at / 8] | ((codes[i] >> bit & 1) << (at % 8)));
      }
    }
    for (int64_t i = 0; i < s.n * blocks; ++i) {
      scales.push_back(rounded_to(s.type, random.uniform(-0.05f, 0.1f)));
      const int64_t zero =
          s.zeros == Zeros::kNone || s.bits == 3 ? 1 << (s.bits - 1) : random.integer(0, (1 << s.bits) - 1);
      zeros.push_back(s.zeros == Zeros::kTyped && s.bits != 3
                          ? rounded_to(s.type, random.uniform(0, 1) * static_cast<float>(zero))
                          : static_cast<float>(zero));
    }
    zero_bytes = (blocks * s.bits + 7) / 8;
    packed_zeros.resize(static_cast<size_t>(s.n * zero_bytes));
    for (int64_t i = 0; s.zeros == Zeros::kPacked && i < s.n * blocks; ++i) {
      for (int bit = 0; bit < s.bits; ++bit) {
        const int64_t at = i / blocks * zero_bytes * 8 + i % blocks * s.bits + bit;
        uint8_t& byte = packed_zeros[static_cast<size_t>(at / 8)];
        byte = static_cast<uint8_t>(byte | ((static_cast<int>(zeros[static_cast<size_t>(i)]) >> bit & 1) << (at % 8)));
      }
    }
    for (int64_t k = 0; k < s.k; ++k) {
      g_idx.push_back(static_cast<int32_t>(s.has_g_idx ? random.integer(0, blocks - 1) : k / s.block_size));
    }
    for (int64_t i = 0; i < s.m * s.k; ++i) {
      a.push_back(rounded_to(s.type, random.normal()));
    }
    for (int64_t i = 0; i < s.n; ++i) {
      bias.push_back(rounded_to(s.type, random.normal()));
    }
  }

  double weight(int64_t n, int64_t k) const {
    const size_t block = static_cast<size_t>(n * shape.k_blocks() + g_idx[static_cast<size_t>(k)]);
    const int code = codes[static_cast<size_t>(n * shape.k_blocks() * shape.block_size + k)];
    return (code - static_cast<double>(zeros[block])) * static_cast<double>(scales[block]);
  }

  Tensor typed(const std::vector<float>& values, std::vector<int64_t> dims) const {
    Tensor tensor(shape.type, dims);
    for (size_t i = 0; i < values.size(); ++i) {
      write_element(shape.type, tensor.view().data, static_cast<int64_t>(i), values[i]);
    }
    return tensor;
  }

  // Keeps the tensors of a call alive.
  struct Call {
    Tensor a, scales, zeros, bias;
    MatMulNBitsArgs args;
  };
  Call call() {
    const int64_t blocks = shape.k_blocks();
    Call c{typed(a, {shape.m, shape.k}),
           typed(scales, {shape.n, blocks}),
           typed(zeros, {shape.n, blocks}),
           typed(bias, {shape.n}),
           {}};
    c.args = {.Y = y.view(),
              .A = c.a,
              .B = TensorView(b.data() + 1, DType::kU8, {shape.n, blocks, shape.block_size * shape.bits / 8}),
              .scales = c.scales,
              .K = shape.k,
              .N = shape.n,
              .block_size = shape.block_size,
              .bits = shape.bits,
              .accuracy_level = shape.accuracy_level};
    if (shape.zeros == Zeros::kPacked) {
      c.args.zero_points = TensorView(packed_zeros.data(), DType::kU8, {shape.n, zero_bytes});
    } else if (shape.zeros == Zeros::kTyped) {
      c.args.zero_points = c.zeros;
    }
    if (shape.has_g_idx) {
      c.args.g_idx = TensorView(g_idx.data(), DType::kI32, {shape.k});
    }
    if (shape.has_bias) {
      c.args.bias = c.bias;
    }
    return c;
  }

  // A row as it enters the products.
  std::vector<double> row(int64_t m) const {
    std::vector<double> values;
    for (int64_t k = 0; k < shape.k; ++k) {
      values.push_back(a[static_cast<size_t>(m * shape.k + k)]);
    }
    const bool quantised = shape.accuracy_level == 4 && !shape.has_g_idx;
    for (int64_t first = 0; quantised && first < shape.k; first += shape.block_size) {
      const int64_t last = std::min(shape.k, first + shape.block_size);
      float amax = 0.0f;
      for (int64_t k = first; k < last; ++k) {
        amax = std::max(amax, std::fabs(static_cast<float>(values[static_cast<size_t>(k)])));
      }
      for (int64_t k = first; k < last && amax > 0.0f; ++k) {
        double& value = values[static_cast<size_t>(k)];
        value = std::nearbyint(static_cast<float>(value) * (127.0f / amax)) * static_cast<double>(amax / 127.0f);
      }
    }
    return values;
  }

  Shape shape;
  std::vector<int> codes;
  std::vector<uint8_t> b;
  std::vector<float> scales, zeros, a, bias;
  int64_t zero_bytes = 0;
  std::vector<uint8_t> packed_zeros;
  std::vector<int32_t> g_idx;
  GuardedTensor y;
};

struct Runner {
  explicit Runner(int threads = 2) : pool(threads) {}
  void run(const MatMulNBitsArgs& args, cpu::Isa isa, std::string_view variant = "") {
    workspace.reserve(matmul_nbits_workspace_bytes(args));
    matmul_nbits(args, {.pool = &pool, .workspace = &workspace, .isa = isa, .variant = variant});
  }
  cpu::ThreadPool pool;
  Workspace workspace;
};

Runner& runner() {
  static Runner instance;
  return instance;
}

void expect_close(Problem& problem, const std::vector<float>& actual, const std::string& where) {
  const Shape& s = problem.shape;
  std::vector<double> weights;
  for (int64_t i = 0; i < s.n * s.k; ++i) {
    weights.push_back(problem.weight(i / s.k, i % s.k));
  }
  std::vector<double> rows;
  for (int64_t m = 0; m < s.m; ++m) {
    const std::vector<double> row = problem.row(m);
    rows.insert(rows.end(), row.begin(), row.end());
  }
  testkit::expect_product(actual, rows, weights, s.has_bias ? problem.bias : std::vector<float>{}, s.k, s.type,
                          where + ", " + s.text());
}

void check_everywhere(const Shape& shape, uint64_t seed) {
  std::vector<std::pair<cpu::Isa, std::string_view>> variants = {{cpu::Isa::kScalar, "ref"}};
  for (const cpu::Isa isa : cpu::available_isas()) {
    variants.emplace_back(isa, "");
  }
  for (const auto& [isa, variant] : variants) {
    Problem problem(shape, seed);
    const auto call = problem.call();
    runner().run(call.args, isa, variant);
    expect_close(problem, problem.y.values(), concat(cpu::to_string(isa), variant));
    ASSERT_TRUE(problem.y.intact()) << shape.text();
  }
}

TEST(MatMulNBits, EveryKindOfCallAgainstTheFormula) {
  Random random(11);
  const auto pick = [&](auto values) { return values[static_cast<size_t>(random.integer(0, std::size(values) - 1))]; };
  for (const int bits : {2, 3, 4, 8}) {
    for (int i = 0; i < 48; ++i) {
      Shape s;
      s.bits = bits;
      s.m = pick(std::vector<int64_t>{1, 1, 2, 3, 5, 8, 9});
      s.n = pick(std::vector<int64_t>{1, 7, 8, 15, 24, 33, 40, 64});
      s.k = pick(std::vector<int64_t>{1, 16, 17, 40, 63, 64, 96, 130, 256, 300});
      s.block_size = pick(std::vector<int64_t>{16, 32, 64, 128, 256, 1024});
      s.type = pick(std::vector<DType>{DType::kF32, DType::kF16, DType::kBF16});
      s.zeros = pick(std::vector<Zeros>{Zeros::kNone, Zeros::kPacked, Zeros::kTyped});
      s.has_g_idx = random.integer(0, 3) == 0;
      s.has_bias = random.integer(0, 1) == 0;
      s.accuracy_level = pick(std::vector<int64_t>{0, 0, 1, 2, 3, 4, 4});
      check_everywhere(s, static_cast<uint64_t>(i));
      if (HasFatalFailure()) {
        return;
      }
    }
  }
}

TEST(MatMulNBits, ManyRowsAndOutputs) {
  for (const int64_t m : {16, 17, 64, 300}) {  // 300: two blocks of rows
    for (const int64_t level : {0, 4}) {
      check_everywhere({.m = m, .n = 72, .k = 160, .block_size = 32, .accuracy_level = level}, 5);
    }
  }
  check_everywhere({.m = 1, .n = 1030, .k = 192, .bits = 4, .block_size = 64, .type = DType::kF16}, 6);
  check_everywhere({.m = 2, .n = 64, .k = 2048, .bits = 8, .block_size = 128, .zeros = Zeros::kPacked}, 7);
  check_everywhere({.m = 2, .n = 64, .k = 2048, .bits = 8, .block_size = 128, .accuracy_level = 4}, 7);
}

// Codes and activations of the largest magnitude: sums in narrow integers may not overflow.
TEST(MatMulNBits, ExtremeCodesDoNotOverflow) {
  for (const int bits : {2, 3, 4, 8}) {
    for (const int64_t block_size : {16, 128, 512}) {
      for (const int code : {0, (1 << bits) - 1}) {
        for (const cpu::Isa isa : cpu::available_isas()) {
          Problem problem({.m = 3, .n = 16, .k = 512, .bits = bits, .block_size = block_size, .accuracy_level = 4});
          std::fill(problem.codes.begin(), problem.codes.end(), code);
          std::fill(problem.b.begin(), problem.b.end(), static_cast<uint8_t>(code == 0 ? 0x00 : 0xff));
          for (size_t i = 0; i < problem.a.size(); ++i) {
            problem.a[i] = i < 1024 ? 1.0f : (i % 2 == 0 ? -1.0f : 1.0f);
          }
          const auto call = problem.call();
          runner().run(call.args, isa);
          expect_close(problem, problem.y.values(), std::string(cpu::to_string(isa)));
        }
      }
    }
  }
}

// A = identity: the weights themselves, rounded once.
TEST(MatMulNBits, IdentityGivesTheWeights) {
  for (const int bits : {2, 3, 4, 8}) {
    for (const DType type : {DType::kF32, DType::kF16, DType::kBF16}) {
      for (const Zeros zeros : {Zeros::kNone, Zeros::kPacked, Zeros::kTyped}) {
        for (const bool has_g_idx : {false, true}) {
          for (const cpu::Isa isa : cpu::available_isas()) {
            constexpr int64_t kK = 96;
            Problem problem(
                {.m = kK, .n = 24, .k = kK, .bits = bits, .type = type, .zeros = zeros, .has_g_idx = has_g_idx});
            std::fill(problem.a.begin(), problem.a.end(), 0.0f);
            for (int64_t i = 0; i < kK; ++i) {
              problem.a[static_cast<size_t>(i * kK + i)] = 1.0f;
            }
            auto call = problem.call();
            runner().run(call.args, isa);
            std::vector<float> all = problem.y.values();
            for (int64_t i = 0; i < kK * 24; ++i) {
              // The formula in f32, as the contract has it: a difference, a product.
              const int64_t n = i % 24;
              const size_t block = static_cast<size_t>(n * 3 + problem.g_idx[static_cast<size_t>(i / 24)]);
              const auto code = static_cast<float>(problem.codes[static_cast<size_t>(n * kK + i / 24)]);
              const float weight = (code - problem.zeros[block]) * problem.scales[block];
              ASSERT_EQ(all[static_cast<size_t>(i)], rounded_to(type, weight)) << problem.shape.text();
            }
            // A single row takes another way to the same bits.
            for (const int64_t m : {0, 17, 95}) {
              call.args.A = call.a.view().rows(m, m + 1);
              call.args.Y = problem.y.view().rows(m, m + 1);
              runner().run(call.args, isa);
            }
            EXPECT_EQ(problem.y.values(), all);
          }
        }
      }
    }
  }
}

TEST(MatMulNBits, RowsDoNotSeeTheirNeighboursNorThreads) {
  Runner one(1);
  Runner three(3);
  for (const int bits : {2, 3, 4, 8}) {
    for (const int64_t level : {0, 4}) {
      for (const cpu::Isa isa : cpu::available_isas()) {
        Problem problem({.m = 21, .n = 200, .k = 352, .bits = bits, .type = DType::kF16, .accuracy_level = level});
        auto call = problem.call();
        one.run(call.args, isa);
        const std::vector<float> expected = problem.y.values();
        for (const std::vector<int64_t>& cuts : {std::vector<int64_t>{0, 21}, {0, 1, 3, 8, 21}, {0, 7, 20, 21}}) {
          for (size_t i = 0; i + 1 < cuts.size(); ++i) {
            call.args.A = call.a.view().rows(cuts[i], cuts[i + 1]);
            call.args.Y = problem.y.view().rows(cuts[i], cuts[i + 1]);
            three.run(call.args, isa);
          }
          ASSERT_EQ(problem.y.values(), expected) << problem.shape.text();
        }
      }
    }
  }
}

TEST(MatMulNBits, CodesBehindTheLastColumnAreIgnored) {
  for (const int bits : {2, 3, 4, 8}) {
    for (const int64_t level : {0, 4}) {
      for (const cpu::Isa isa : cpu::available_isas()) {
        Problem problem({.m = 2, .n = 9, .k = 37, .bits = bits, .block_size = 64, .accuracy_level = level});
        const auto call = problem.call();
        runner().run(call.args, isa);
        const std::vector<float> expected = problem.y.values();
        for (int64_t n = 0; n < 9; ++n) {
          for (int64_t bit = 37 * bits; bit < 64 * bits; ++bit) {
            problem.b[static_cast<size_t>(1 + n * 8 * bits + bit / 8)] ^= static_cast<uint8_t>(1 << (bit % 8));
          }
        }
        runner().run(call.args, isa);
        EXPECT_EQ(problem.y.values(), expected);
      }
    }
  }
}

TEST(MatMulNBits, ViewsOfAnyStride) {
  for (const DType type : {DType::kF32, DType::kF16}) {
    for (const cpu::Isa isa : cpu::available_isas()) {
      Problem problem({.m = 12, .n = 16, .k = 64, .type = type});
      auto call = problem.call();
      runner().run(call.args, isa);
      const std::vector<float> expected = problem.y.values();
      // [3, 4, 64] whose last dimension has stride 3 and whose outer two are swapped, one element off alignment.
      Tensor memory(type, {12 * 64 * 3 + 1});
      TensorView a(static_cast<std::byte*>(memory.view().data) + size_of(type), type, {3, 4, 64});
      a.strides = {64 * 3, 3 * 64 * 3, 3};
      for (int64_t i = 0; i < 12 * 64; ++i) {
        write_element(type, a.data, i / 256 * a.strides[0] + i / 64 % 4 * a.strides[1] + i % 64 * 3,
                      problem.a[static_cast<size_t>(i)]);
      }
      Problem again(problem.shape);
      call.args.A = a;
      call.args.Y = TensorView(again.y.view().data, type, {3, 4, 16});
      call.args.Y.strides = {4 * 19, 19, 1};
      runner().run(call.args, isa);
      EXPECT_EQ(again.y.values(), expected);
      EXPECT_TRUE(again.y.intact());
    }
  }
}

TEST(MatMulNBits, InfiniteAndNanActivations) {
  for (const int64_t level : {0, 4}) {
    for (const cpu::Isa isa : cpu::available_isas()) {
      Problem problem({.m = 3, .n = 8, .k = 64, .accuracy_level = level});
      problem.a[5] = std::numeric_limits<float>::quiet_NaN();
      problem.a[64 + 5] = std::numeric_limits<float>::infinity();
      const auto call = problem.call();
      runner().run(call.args, isa);
      const std::vector<float> actual = problem.y.values();
      for (size_t n = 0; n < 8; ++n) {
        EXPECT_TRUE(std::isnan(actual[n]));
        EXPECT_FALSE(std::isfinite(actual[8 + n]));
        EXPECT_TRUE(std::isfinite(actual[16 + n]));
      }
    }
  }
}

TEST(MatMulNBits, NoRows) {
  Problem problem({.m = 1});
  auto call = problem.call();
  call.args.A = TensorView(nullptr, DType::kF32, {2, 0, 32});
  call.args.Y = TensorView(nullptr, DType::kF32, {2, 0, 8});
  EXPECT_EQ(matmul_nbits_workspace_bytes(call.args), 0u);
  runner().run(call.args, cpu::Isa::kScalar);
  call.args.scales.shape[0] = 7;  // still checked
  expect_error(ErrorCode::kInvalidArgument, "matmul_nbits: scales has shape",
               [&] { runner().run(call.args, cpu::Isa::kScalar); });
}

TEST(MatMulNBits, OmittedB) {
  for (const bool has_bias : {false, true}) {
    for (const std::vector<int64_t>& dims : {std::vector<int64_t>{0, 2, 16}, {8, 0, 16}, {8, 2, 0}, {0, 0, 0}}) {
      for (const bool empty_scales : {false, true}) {
        Problem problem({.m = 3,
                         .n = 8,
                         .k = 64,
                         .type = DType::kF16,
                         .zeros = Zeros::kPacked,
                         .has_g_idx = true,
                         .has_bias = has_bias});
        auto call = problem.call();
        call.args.B = TensorView(nullptr, DType::kU8, dims);
        problem.g_idx[3] = 1000;  // contents are not looked at
        if (empty_scales) {
          call.args.scales = TensorView(nullptr, DType::kF16, {0});
          call.args.zero_points = TensorView(nullptr, DType::kU8, {0, 1});
          call.args.g_idx = TensorView(nullptr, DType::kI32, {0});
        }
        runner().run(call.args, cpu::available_isas().back());
        const std::vector<float> actual = problem.y.values();
        for (size_t i = 0; i < actual.size(); ++i) {
          EXPECT_EQ(actual[i], has_bias ? problem.bias[i % 8] : 0.0f);
        }
        EXPECT_TRUE(problem.y.intact());
      }
    }
  }
}

// Cases of tests/golden/matmul/nbits.bin; ONNX Runtime's order of summation is not ours.
TEST(MatMulNBits, OnnxRuntimeGivesTheSame) {
  std::ifstream file(SHOAL_TEST_DATA "/matmul/nbits.bin", std::ios::binary);
  ASSERT_TRUE(file.is_open());
  const std::vector<char> bytes{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  size_t at = 0;
  const auto take = [&](size_t count) {
    const size_t start = at;
    at += count;
    EXPECT_LE(at, bytes.size());
    return bytes.data() + start;
  };
  size_t num_cases = 0;
  for (; at < bytes.size(); ++num_cases) {
    int32_t h[9];
    std::memcpy(h, take(sizeof(h)), sizeof(h));
    Shape s{.m = h[2], .n = h[3], .k = h[4], .bits = h[0], .block_size = h[1]};
    s.type = h[5] != 0 ? DType::kF16 : DType::kF32;
    s.zeros = static_cast<Zeros>(h[6]);
    s.has_g_idx = h[7] != 0;
    s.has_bias = h[8] != 0;
    Problem problem(s);
    auto call = problem.call();
    const auto copy = [&](const TensorView& to) { std::memcpy(to.data, take(to.num_bytes()), to.num_bytes()); };
    copy(call.args.A);
    copy(call.args.B);
    copy(call.args.scales);
    for (const TensorView* view : {&call.args.zero_points, &call.args.g_idx, &call.args.bias}) {
      if (*view) {
        copy(*view);
      }
    }
    std::vector<float> expected(static_cast<size_t>(s.m * s.n));
    std::memcpy(expected.data(), take(expected.size() * 4), expected.size() * 4);
    for (const cpu::Isa isa : cpu::available_isas()) {
      runner().run(call.args, isa);
      const bool is_f16 = s.type == DType::kF16;
      const auto result = testkit::compare(problem.y.values(), expected, is_f16 ? 2e-3 : 1e-5, is_f16 ? 4e-3 : 2e-5);
      EXPECT_TRUE(result) << s.text() << ": " << result.text;
    }
  }
  EXPECT_EQ(num_cases, 15u);
}

TEST(MatMulNBits, Rejections) {
  Problem problem({.m = 2, .n = 8, .k = 96, .zeros = Zeros::kPacked, .has_g_idx = true, .has_bias = true});
  const auto error = [&](std::string_view part, auto change, ErrorCode code = ErrorCode::kInvalidArgument) {
    auto call = problem.call();
    change(call.args);
    expect_error(code, part, [&] { runner().run(call.args, cpu::Isa::kScalar); });
    expect_error(code, part,
                 [&] { matmul_nbits(call.args, {.pool = &runner().pool, .workspace = &runner().workspace}); });
  };
  using Args = MatMulNBitsArgs;
  error("matmul_nbits: K is 0", [](Args& a) { a.K = 0; });
  error("matmul_nbits: N is -1", [](Args& a) { a.N = -1; });
  error("matmul_nbits: block_size is 8", [](Args& a) { a.block_size = 8; });
  error("matmul_nbits: block_size is 48", [](Args& a) { a.block_size = 48; });
  error("matmul_nbits: bits is 1", [](Args& a) { a.bits = 1; });
  error("matmul_nbits: bits is 16", [](Args& a) { a.bits = 16; });
  for (const int64_t bits : {5, 6, 7}) {
    error(
        concat("matmul_nbits: bits is ", bits), [&](Args& a) { a.bits = bits; }, ErrorCode::kUnsupported);
  }
  error("matmul_nbits: accuracy_level is 5", [](Args& a) { a.accuracy_level = 5; });
  error("matmul_nbits: accuracy_level is -1", [](Args& a) { a.accuracy_level = -1; });
  error(
      "matmul_nbits: weight_prepacked is 1", [](Args& a) { a.weight_prepacked = 1; }, ErrorCode::kUnsupported);
  error(
      "matmul_nbits: weight_prepacked is 2", [](Args& a) { a.weight_prepacked = 2; }, ErrorCode::kUnsupported);
  error("matmul_nbits: weight_prepacked is 3", [](Args& a) { a.weight_prepacked = 3; });
  error("matmul_nbits: weight_prepacked is 2, which has no layout for 2 bits", [](Args& a) {
    a.weight_prepacked = 2;
    a.bits = 2;
  });
  error("too large", [](Args& a) { a.N = INT64_MAX / 8; });
  error("matmul_nbits: A is required", [](Args& a) { a.A = {}; });
  error("matmul_nbits: A has type int8", [](Args& a) { a.A.dtype = DType::kI8; });
  error("matmul_nbits: A has shape [2, 95], expected [..., K = 96]", [](Args& a) { a.A.shape[1] = 95; });
  error("matmul_nbits: A has shape []", [](Args& a) { a.A.rank = 0; });
  error("matmul_nbits: A is not on the CPU", [](Args& a) { a.A.device = {DeviceType::kCuda, 0}; });
  error("matmul_nbits: B is required", [](Args& a) { a.B = {}; });
  error("matmul_nbits: B has type int8", [](Args& a) { a.B.dtype = DType::kI8; });
  error("matmul_nbits: B has 2 dimensions, expected 3", [](Args& a) { a.B.rank = 2; });
  error("matmul_nbits: B must be contiguous", [](Args& a) { a.B.strides[0] = 100; });
  error("matmul_nbits: B has shape [8, 3, 16], expected [8, 3, 32]", [](Args& a) {
    a.bits = 8;
    a.zero_points = {};
  });
  error("matmul_nbits: B has shape [0, 2, 16], expected [8, 3, 16]", [](Args& a) {
    a.B.shape[0] = 0;
    a.B.shape[1] = 2;
  });
  error("matmul_nbits: scales is required", [](Args& a) { a.scales = {}; });
  error("matmul_nbits: scales has type float16, expected float32", [](Args& a) { a.scales.dtype = DType::kF16; });
  error("matmul_nbits: scales has shape [8, 2], expected [8, 3]", [](Args& a) {
    a.scales = TensorView(a.scales.data, DType::kF32, {8, 2});
  });
  error("matmul_nbits: scales has shape [0], expected [8, 3]",
        [](Args& a) { a.scales = TensorView(nullptr, DType::kF32, {0}); });
  error("matmul_nbits: zero_points has type float16", [](Args& a) { a.zero_points.dtype = DType::kF16; });
  error("matmul_nbits: zero_points has shape [8, 3], expected [8, 2]", [](Args& a) {
    a.zero_points = TensorView(a.zero_points.data, DType::kU8, {8, 3});
  });
  error("matmul_nbits: zero_points has shape [8, 2], expected [8, 3]", [](Args& a) {
    a.zero_points = TensorView(a.scales.data, DType::kF32, {8, 2});
  });
  error("matmul_nbits: g_idx has type int64", [](Args& a) { a.g_idx.dtype = DType::kI64; });
  error("matmul_nbits: g_idx has shape [95]", [](Args& a) { a.g_idx.shape[0] = 95; });
  error("matmul_nbits: bias has type float16", [](Args& a) { a.bias.dtype = DType::kF16; });
  error("matmul_nbits: bias has shape [7], expected [8]", [](Args& a) { a.bias.shape[0] = 7; });
  error("matmul_nbits: Y is required", [](Args& a) { a.Y = {}; });
  error("matmul_nbits: Y has type float16", [](Args& a) { a.Y.dtype = DType::kF16; });
  error("matmul_nbits: Y has shape [2, 7]", [](Args& a) { a.Y.shape[1] = 7; });
  error("matmul_nbits: Y has 1 dimensions", [](Args& a) { a.Y.rank = 1; });
  error("matmul_nbits: Y must have evenly spaced rows", [](Args& a) { a.Y.strides[1] = 2; });
  for (const int32_t block : {-1, 3}) {
    problem.g_idx[7] = block;
    error(concat("matmul_nbits: g_idx[7] is ", block, ", expected 0 to 2"), [](Args&) {});
  }
  problem.g_idx[7] = 0;
  problem.packed_zeros[3] |= 0x40;
  error("matmul_nbits: zero_points have bits behind the last block of row 1", [](Args&) {});
  for (const float value : problem.y.values()) {
    EXPECT_TRUE(std::isnan(value));  // nothing was written
  }
  auto call = problem.call();
  problem.packed_zeros[3] &= 0x0f;
  expect_error(ErrorCode::kInvalidArgument, "matmul_nbits: no variant \"fast\"; known are ref, cpu",
               [&] { runner().run(call.args, cpu::Isa::kScalar, "fast"); });
}

TEST(MatMulNBits, ThreeBitsKnowOnlyTheZeroFour) {
  for (const Zeros zeros : {Zeros::kPacked, Zeros::kTyped}) {
    Problem problem({.n = 2, .k = 96, .bits = 3, .zeros = zeros});
    const auto call = problem.call();
    runner().run(call.args, cpu::Isa::kScalar);
    problem.packed_zeros[2] = 0x23;
    const float zero = zeros == Zeros::kPacked ? 3.0f : 4.5f;
    call.zeros.span<float>()[3] = 4.5f;
    expect_error(ErrorCode::kInvalidArgument,
                 concat("matmul_nbits: zero_points have the value ", zero, " in row 1, with 3 bits all must be 4"),
                 [&] { runner().run(call.args, cpu::Isa::kScalar); });
    problem.packed_zeros[2] = 0x24;
    problem.packed_zeros[3] |= 0x02;  // 9 bits are used
    if (zeros == Zeros::kPacked) {
      expect_error(ErrorCode::kInvalidArgument, "matmul_nbits: zero_points have bits behind the last block of row 1",
                   [&] { runner().run(call.args, cpu::Isa::kScalar); });
    }
  }
}

}  // namespace
}  // namespace shoal
