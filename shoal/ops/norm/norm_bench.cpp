// Throughput of rms_norm on the best instruction set.
#include "shoal/ops/norm/norm.h"
#include "testkit/bandwidth.h"

int main() {
  using namespace shoal;
  cpu::ThreadPool pool;
  const OpContext context{.pool = &pool, .isa = cpu::default_isa()};
  std::printf("%s, %s, %d threads\n", cpu::processor_name().c_str(), std::string(to_string(context.isa)).c_str(),
              pool.num_threads());
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const int64_t num_tokens : {1, 512}) {
      for (const bool with_residual : {false, true}) {
        constexpr int64_t kHidden = 4096;
        const Tensor x(dtype, {num_tokens, kHidden});
        const Tensor residual(dtype, {num_tokens, kHidden});
        const Tensor out(dtype, {num_tokens, kHidden});
        const Tensor weight(DType::kF32, {kHidden});
        for (const Tensor* tensor : {&x, &residual, &out, &weight}) {
          std::memset(tensor->view().data, 0x3c, tensor->view().num_bytes());
        }
        RmsNormArgs args{.out = out, .x = x, .weight = weight};
        if (with_residual) {
          args.residual = residual;
          args.residual_out = residual;
        }
        const int64_t bytes = static_cast<int64_t>(x.view().num_bytes()) * (with_residual ? 2 : 1);
        testkit::report_bandwidth(concat("rms_norm ", to_string(dtype), " [", num_tokens, ", ", kHidden, "]",
                                         with_residual ? " residual" : ""),
                                  pool, bytes, bytes, [&] { rms_norm(args, context); });
      }
    }
  }
}
