// Times of matmul_fp4 on the best instruction set.
//
//   matmul_fp4_bench [threads] [n = k]
#include <cstdio>
#include <cstdlib>
#include <string>

#include "shoal/cpu/thread_pool.h"
#include "shoal/ops/matmul_fp4/matmul_fp4.h"
#include "testkit/product_bench.h"

int main(int argc, char** argv) {
  using namespace shoal;
  cpu::ThreadPool pool(argc > 1 ? std::atoi(argv[1]) : 0);
  const int64_t size = argc > 2 ? std::atoll(argv[2]) : 2048;
  const Tensor b = testkit::filled(DType::kU8, {size, size / 2}, 0x35);
  const Tensor scales = testkit::filled(DType::kU8, {size, (size + 15) / 16}, 0x3c);
  float global = 0.01f;
  for (const DType type : {DType::kF16, DType::kBF16}) {
    for (const int64_t m : {1, 8, 512}) {
      const Tensor a = testkit::filled(type, {m, size}, 0x3c);
      const Tensor y(type, {m, size});
      const MatMulFp4Args args{
          .Y = y, .A = a, .B = b, .weight_scale = scales, .weight_scale_2 = TensorView(&global, DType::kF32, {1})};
      Workspace workspace(matmul_fp4_workspace_bytes(args));
      const OpContext context{.pool = &pool, .workspace = &workspace, .isa = cpu::default_isa()};
      testkit::report_product(concat("matmul_fp4 ", to_string(type)), pool, m, size, size,
                              [&] { matmul_fp4(args, context); });
    }
  }
}
