// Times of matmul_packed on the best instruction set.
//
//   matmul_packed_bench [threads] [n = k]
#include <cstdio>
#include <cstdlib>
#include <string>

#include "shoal/cpu/thread_pool.h"
#include "shoal/ops/matmul_packed/matmul_packed.h"
#include "shoal/quant/format.h"
#include "testkit/product_bench.h"

int main(int argc, char** argv) {
  using namespace shoal;
  cpu::ThreadPool pool(argc > 1 ? std::atoi(argv[1]) : 0);
  const int64_t size = argc > 2 ? std::atoll(argv[2]) : 2048;
  for (const Format format : {Format::kQ4_0, Format::kQ4_K, Format::kQ6_K, Format::kIQ2_XXS, Format::kGGUF_MXFP4}) {
    const Tensor b = testkit::filled(DType::kU8, {size, row_bytes(format, size)}, 0x22);
    for (const int64_t m : {1, 8, 512}) {
      const Tensor a = testkit::filled(DType::kBF16, {m, size}, 0x3c);
      const Tensor y(DType::kBF16, {m, size});
      const MatMulPackedArgs args{.Y = y, .A = a, .B = b, .packed_type = info(format).ggml_type, .N = size, .K = size};
      Workspace workspace(matmul_packed_workspace_bytes(args));
      const OpContext context{.pool = &pool, .workspace = &workspace, .isa = cpu::default_isa()};
      testkit::report_product(concat("matmul_packed ", info(format).name), pool, m, size, size,
                              [&] { matmul_packed(args, context); });
    }
  }
}
