#include "shoal/ops/matmul/matmul.h"

#include <gtest/gtest.h>

#include <cmath>

#include "shoal/cpu/thread_pool.h"
#include "shoal/ops/matmul/matmul_cases.h"

namespace shoal {
namespace {

using testkit::Codes;
using testkit::Guarded;
using testkit::Random;
using testkit::RandomMatrix;

struct Machine {
  explicit Machine(cpu::Isa isa = cpu::available_isas().back(), int num_threads = 1) : pool(num_threads), isa(isa) {}
  OpContext context(std::string_view variant = {}) {
    return {.pool = &pool, .workspace = &workspace, .isa = isa, .variant = variant};
  }
  cpu::ThreadPool pool;
  Workspace workspace;
  cpu::Isa isa;
};

// Rows [m, size] with `pad` poisoned values after each.
struct Strided {
  Strided(int64_t m, int64_t size, int64_t pad)
      : m(m), size(size), stride(size + pad), data(static_cast<size_t>(m * stride)) {}
  TensorView view(int64_t begin = 0, int64_t end = -1) {
    const int64_t num_rows = (end < 0 ? m : end) - begin;
    TensorView v(data.data() + begin * stride, DType::kF32, {num_rows, size});
    v.strides[0] = stride;
    return v;
  }
  std::span<const float> row(int64_t i) { return {data.data() + i * stride, static_cast<size_t>(size)}; }
  bool pads_intact() {
    for (int64_t i = 0; i < m; ++i) {
      for (int64_t j = size; j < stride; ++j) {
        if (!std::isnan(data.data()[i * stride + j])) {
          return false;
        }
      }
    }
    return data.guards_intact();
  }
  int64_t m, size, stride;
  Guarded<float> data;
};

Strided random_rows(int64_t m, int64_t k, uint64_t seed, int64_t pad = 3) {
  Strided rows(m, k, pad);
  Random random(seed);
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = 0; j < k; ++j) {
      rows.data.data()[i * rows.stride + j] = random.normal();
    }
  }
  return rows;
}

void run(Machine& machine, const MatmulWeight& weight, TensorView out, TensorView a, TensorView bias = {}) {
  machine.workspace = Workspace(matmul_workspace_bytes(weight, a.dim(0)));
  matmul({.out = out, .a = a, .bias = bias}, weight, machine.context());
}

// Every row alone and together gives the reference's values and the same bits.
void check(Machine& machine, std::span<const QuantMatrix> parts, MatmulPrecision precision, int64_t m,
           TensorView bias = {}) {
  const MatmulWeight weight = prepare_matmul(parts, precision, machine.context());
  const MatmulWeight reference = prepare_matmul(parts, precision, machine.context("ref"));
  Strided a = random_rows(m, weight.k(), static_cast<uint64_t>(m + weight.k()));
  Strided out(m, weight.n(), 5);
  run(machine, weight, out.view(), a.view(), bias);
  Strided expected(m, weight.n(), 0);
  run(machine, reference, expected.view(), a.view(), bias);
  EXPECT_TRUE(out.pads_intact());
  // f32 sums of k products of size up to about 4: the error grows with the root of k.
  const double atol = 2e-6 * std::sqrt(static_cast<double>(weight.k())) * 4;
  for (int64_t i = 0; i < m; ++i) {
    const auto comparison = testkit::compare(out.row(i), expected.row(i), 1e-5, atol);
    ASSERT_TRUE(comparison) << "row " << i << ": " << comparison.text;
    Strided alone(1, weight.n(), 0);
    run(machine, weight, alone.view(), a.view(i, i + 1), bias);
    ASSERT_EQ(std::memcmp(alone.row(0).data(), out.row(i).data(), alone.row(0).size_bytes()), 0) << "row " << i;
  }
}

TEST(Matmul, EveryFormatAgainstReference) {
  for (const cpu::Isa isa : cpu::available_isas()) {
    Machine machine(isa, 2);
    for (const Format format : testkit::all_formats()) {
      for (const auto precision : {MatmulPrecision::kDefault, MatmulPrecision::kExact}) {
        const int block = info(format).block_size;
        for (const int64_t m : {0, 1, 2, 3, 5, 9}) {
          for (const int64_t n : {1, 8, 33}) {
            SCOPED_TRACE(concat(cpu::to_string(isa), " ", info(format).name, " exact ",
                                precision == MatmulPrecision::kExact, " m ", m, " n ", n));
            const RandomMatrix matrix(format, n, block * (n == 8 ? 5 : 1), static_cast<uint64_t>(n));
            check(machine, {&matrix.matrix(), 1}, precision, m);
            if (HasFatalFailure()) {
              return;
            }
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace shoal
