// Times of matmul_nbits on the best instruction set; bench/ops_peers.py compares with ONNX Runtime.
//
//   matmul_nbits_bench [threads] [n = k] [bits,...] [m,...]
#include <algorithm>
#include <cstdlib>
#include <string>
#include <vector>

#include "shoal/cpu/thread_pool.h"
#include "shoal/ops/matmul_nbits/matmul_nbits.h"
#include "testkit/product_bench.h"

namespace shoal {
namespace {

std::vector<int64_t> numbers(const char* text) {
  std::vector<int64_t> values;
  while (*text != 0) {
    char* end = nullptr;
    values.push_back(std::strtoll(text, &end, 10));
    text = *end == ',' ? end + 1 : end;
  }
  return values;
}

void bench(cpu::ThreadPool& pool, int64_t size, int64_t bits, int64_t block_size, int64_t level, int64_t m) {
  const int64_t blocks = size / block_size;
  testkit::Random random(1);
  Tensor b(DType::kU8, {size, blocks, block_size * bits / 8});
  for (uint8_t& byte : b.span<uint8_t>()) {
    byte = static_cast<uint8_t>(random.bits());
  }
  Tensor scales(DType::kF32, {size, blocks});
  std::fill(scales.span<float>().begin(), scales.span<float>().end(), 0.01f);
  Tensor a(DType::kF32, {m, size});
  for (float& value : a.span<float>()) {
    value = random.uniform(-1.0f, 1.0f);
  }
  const Tensor y(DType::kF32, {m, size});
  const MatMulNBitsArgs args{.Y = y,
                             .A = a,
                             .B = b,
                             .scales = scales,
                             .K = size,
                             .N = size,
                             .block_size = block_size,
                             .bits = bits,
                             .accuracy_level = level};
  Workspace workspace(matmul_nbits_workspace_bytes(args));
  const OpContext context{.pool = &pool, .workspace = &workspace, .isa = cpu::default_isa()};
  testkit::report_product(concat("bits ", bits, " block ", block_size, " level ", level), pool, m, size, size,
                          [&] { matmul_nbits(args, context); });
}

}  // namespace
}  // namespace shoal

int main(int argc, char** argv) {
  using namespace shoal;
  cpu::ThreadPool pool(argc > 1 ? std::atoi(argv[1]) : 0);
  const int64_t size = argc > 2 ? std::atoll(argv[2]) : 2048;
  for (const int64_t bits : numbers(argc > 3 ? argv[3] : "4,8,2,3")) {
    for (const int64_t block_size : {32, 128}) {
      for (const int64_t level : {0, 4}) {
        for (const int64_t m : numbers(argc > 4 ? argv[4] : "1,8,512")) {
          bench(pool, size, bits, block_size, level, m);
        }
      }
    }
  }
}
