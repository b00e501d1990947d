// The exact INT3 chain (profile S): bits against an independent chain over the codes.
#include <gtest/gtest.h>

#include "shoal/cpu/thread_pool.h"
#include "shoal/ops/moe/moe_cases.h"

namespace shoal {
namespace {

using moe_cases::at;
using moe_cases::Call;
using moe_cases::Case;
using testkit::rounded_to;

cpu::ThreadPool& pool() {
  static cpu::ThreadPool pool(2);
  return pool;
}

std::vector<float> run(QMoEArgs args, cpu::Isa isa, std::string_view variant = "") {
  testkit::GuardedTensor output(args.input.dtype, {args.input.dims().begin(), args.input.dims().end()});
  args.output = output.view();
  Workspace workspace(qmoe_workspace_bytes(args, 2));
  qmoe(args, {.pool = &pool(), .workspace = &workspace, .isa = isa, .variant = variant});
  EXPECT_TRUE(output.intact());
  return output.values();
}

// C3: pieces of 32, each summed from 0 by fused multiply-adds, folded in order.
float chain(const moe_cases::Projection& p, int64_t e, int64_t n, const float* x) {
  float acc = 0.0f;
  for (int64_t piece = 0; piece < p.k / 32; ++piece) {
    float sum = 0.0f;
    const int64_t group = ((e * p.n + n) * p.k + piece * 32) / p.group;
    for (int64_t k = piece * 32; k < piece * 32 + 32; ++k) {
      sum = std::fma(x[k], static_cast<float>(p.codes[at((e * p.n + n) * p.k + k)] - p.zero_values[at(group)]), sum);
    }
    acc = std::fma(sum, p.scale_values[at(group)], acc);
  }
  return acc;
}

struct Row {
  std::vector<float> y;
  bool exempt = false;  // an h so near a midpoint that the last bit of exp decides
};

Row expected_row(const Call& call, int64_t t, const std::vector<std::pair<int64_t, float>>& routes) {
  const Case& c = call.c;
  Row row{std::vector<float>(at(c.h)), false};
  const auto staged = [&](const moe_cases::Projection& p, int64_t e, int64_t n, const float* x) {
    return rounded_to(c.dtype, chain(p, e, n, x)) + p.bias_values[at(e * p.n + n)];
  };
  for (const auto& [e, weight] : routes) {
    std::vector<float> h(at(c.i));
    for (int64_t i = 0; i < c.i; ++i) {
      const float g = staged(call.fc1, e, 2 * i, call.x.data() + t * c.h);
      const float v = staged(call.fc1, e, 2 * i + 1, call.x.data() + t * c.h);
      const float value = g * (1.0f / (1.0f + std::exp(-g))) * v;
      h[at(i)] = rounded_to(c.dtype, value);
      const float slack = std::fabs(value) * 0x1p-20f;
      row.exempt = row.exempt || rounded_to(c.dtype, value - slack) != rounded_to(c.dtype, value + slack);
    }
    for (int64_t n = 0; n < c.h; ++n) {
      row.y[at(n)] = std::fma(weight, staged(call.fc2, e, n, h.data()), row.y[at(n)]);
    }
  }
  for (float& y : row.y) {
    y = rounded_to(c.dtype, y);
  }
  return row;
}

void check(const Call& call, int64_t min_rows) {
  const Case& c = call.c;
  std::vector<Row> rows;
  int64_t compared = 0;
  for (int64_t t = 0; t < c.t; ++t) {
    // Two experts and normalised weights: p0 and p1 as the router rounds them.
    std::vector<std::pair<int64_t, float>> routes;
    const float l0 = call.logits[at(t * 2)], l1 = call.logits[at(t * 2 + 1)];
    const float small = std::exp(-std::fabs(l0 - l1));
    const float sum = 1.0f + small;
    const float p0 = 1.0f / sum, p1 = small / sum;
    routes.emplace_back(l0 > l1 ? 0 : 1, p0 / (p0 + p1));
    routes.emplace_back(l0 > l1 ? 1 : 0, p1 / (p0 + p1));
    rows.push_back(expected_row(call, t, routes));
    compared += rows.back().exempt ? 0 : 1;
  }
  EXPECT_GE(compared, min_rows);
  const auto agree = [&](const std::vector<float>& y, std::string_view who) {
    for (int64_t t = 0; t < c.t; ++t) {
      if (!rows[at(t)].exempt) {
        ASSERT_EQ(std::vector<float>(y.begin() + t * c.h, y.begin() + (t + 1) * c.h), rows[at(t)].y)
            << who << " row " << t;
      }
    }
  };
  agree(run(call.args, cpu::Isa::kScalar, "ref"), "ref");
  for (const cpu::Isa isa : cpu::available_isas()) {
    agree(run(call.args, isa), cpu::to_string(isa));
  }
}

Case case_of(int bits1, int bits2, int64_t block, int64_t t, DType dtype = DType::kBF16) {
  return {.name = "int3",
          .dtype = dtype,
          .t = t,
          .h = 128,
          .i = 128,
          .e = 2,
          .bits1 = bits1,
          .bits2 = bits2,
          .block = block,
          .bias = true,
          .seed = static_cast<uint64_t>(t)};
}

TEST(Int3, Chain) {
  for (const auto& [b1, b2] : {std::pair{3, 4}, {3, 3}, {4, 3}}) {
    for (const int64_t block : {32, 64, 128}) {
      for (const int64_t t : {1, 4, 5, 31, 33}) {
        SCOPED_TRACE(concat("int", b1, "/", b2, " block ", block, " T ", t));
        check(Call(case_of(b1, b2, block, t)), t / 3);
      }
    }
  }
  check(Call(case_of(3, 3, 32, 9, DType::kF16)), 1);
}

TEST(Int3, ShortRowsAndZeroPoints) {
  for (const int64_t k : {32, 64, 96}) {
    Case c = case_of(3, 3, 32, 5);
    c.h = k;
    c.i = k;
    c.zeros = true;  // all 4
    check(Call(c), 1);
  }
}

// Activations that tempt an inexact order: one sign, one huge element a piece, all codes equal.
TEST(Int3, HardRows) {
  for (const int kind : {0, 1, 2}) {
    Call call(case_of(3, 4, 32, 8));
    for (int64_t i = 0; i < call.c.t * call.c.h; ++i) {
      float& x = call.x[at(i)];
      x = kind == 0 ? std::fabs(x) : kind == 1 && i % 32 == 7 ? x * 4096.0f : x;
      x = rounded_to(call.c.dtype, kind == 1 ? x * 0x1p-10f : x);
      write_element(call.c.dtype, call.args.input.data, i, x);
    }
    if (kind == 2) {
      std::fill(call.fc1.codes.begin(), call.fc1.codes.end(), 6);
      const std::vector<uint8_t> bytes = moe_cases::pack_rows(call.fc1.codes, call.c.h, 3);
      std::memcpy(call.args.fc1_experts_weights.data, bytes.data(), bytes.size());
    }
    check(call, 1);
  }
}

// Hand-worked packings of the contract: codes 0..7 are 88 c6 fa, eight codes 4 are 24 49 92.
TEST(Int3, Packing) {
  EXPECT_EQ(moe_cases::pack_rows({0, 1, 2, 3, 4, 5, 6, 7}, 8, 3), (std::vector<uint8_t>{0x88, 0xc6, 0xfa}));
  EXPECT_EQ(moe_cases::pack_rows({4, 4, 4, 4, 4, 4, 4, 4}, 8, 3), (std::vector<uint8_t>{0x24, 0x49, 0x92}));
  EXPECT_EQ(moe_cases::pack_rows({0, 4, 7}, 3, 3), (std::vector<uint8_t>{0xe0, 0x01}));
  EXPECT_EQ(moe_cases::pack_rows({0, 1, 2, 3}, 4, 2), (std::vector<uint8_t>{0xe4}));
}

}  // namespace
}  // namespace shoal
