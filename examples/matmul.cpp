// One operator on memory of our own: a product with 4-bit weights, in blocks of 32 with one scale each.
#include <cstdio>
#include <vector>

#include "shoal/cpu/thread_pool.h"
#include "shoal/ops/matmul_nbits/matmul_nbits.h"

int main() {
  constexpr int64_t kRows = 2, kK = 64, kN = 3, kBlock = 32;
  std::vector<float> a(kRows * kK, 0.5f), y(kRows * kN);
  std::vector<uint8_t> codes(kN * kK / 2, 0x9a);  // codes 10 and 9: weights 2 and 1 after the zero of 8
  std::vector<float> scales(kN * kK / kBlock, 0.25f);

  shoal::cpu::ThreadPool pool;
  const shoal::MatMulNBitsArgs args{
      .Y = {y.data(), shoal::DType::kF32, {kRows, kN}},
      .A = {a.data(), shoal::DType::kF32, {kRows, kK}},
      .B = {codes.data(), shoal::DType::kU8, {kN, kK / kBlock, kBlock / 2}},
      .scales = {scales.data(), shoal::DType::kF32, {kN, kK / kBlock}},
      .K = kK,
      .N = kN,
      .block_size = kBlock,
  };
  shoal::Workspace workspace(shoal::matmul_nbits_workspace_bytes(args));
  shoal::matmul_nbits(args, {.pool = &pool, .workspace = &workspace, .isa = shoal::cpu::default_isa()});
  for (int64_t row = 0; row < kRows; ++row) {
    std::printf("%g %g %g\n", y[row * kN], y[row * kN + 1], y[row * kN + 2]);
  }
}
