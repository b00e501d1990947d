// Times of matmul_fp8 on the best instruction set.
//
//   matmul_fp8_bench [threads] [n = k]
#include <cstdio>
#include <cstdlib>
#include <string>

#include "shoal/cpu/thread_pool.h"
#include "shoal/ops/matmul_fp8/matmul_fp8.h"
#include "testkit/product_bench.h"

int main(int argc, char** argv) {
  using namespace shoal;
  cpu::ThreadPool pool(argc > 1 ? std::atoi(argv[1]) : 0);
  const int64_t size = argc > 2 ? std::atoll(argv[2]) : 2048;
  const Tensor b = testkit::filled(DType::kF8E4M3, {size, size}, 0x35);
  const Tensor scales = testkit::filled(DType::kF32, {size, (size + 127) / 128}, 0x3c);
  for (const int64_t m : {1, 8, 512}) {
    const Tensor a = testkit::filled(DType::kBF16, {m, size}, 0x3c);
    const Tensor y(DType::kBF16, {m, size});
    const MatMulFp8Args args{.Y = y, .A = a, .B = b, .b_scale = scales};
    Workspace workspace(matmul_fp8_workspace_bytes(args));
    const OpContext context{.pool = &pool, .workspace = &workspace, .isa = cpu::default_isa()};
    testkit::report_product("matmul_fp8 bf16", pool, m, size, size, [&] { matmul_fp8(args, context); });
  }
}
