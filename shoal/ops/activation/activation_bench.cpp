// Throughput of gated_activation on the best instruction set.
#include "shoal/ops/activation/activation.h"
#include "testkit/bandwidth.h"

int main() {
  using namespace shoal;
  cpu::ThreadPool pool;
  const OpContext context{.pool = &pool, .isa = cpu::default_isa()};
  std::printf("%s, %s, %d threads\n", cpu::processor_name().c_str(), std::string(to_string(context.isa)).c_str(),
              pool.num_threads());
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const Gate kind : {Gate::kSilu, Gate::kGeluTanh, Gate::kGelu, Gate::kRelu}) {
      for (const int64_t num_tokens : {1, 256}) {
        constexpr int64_t kWidth = 8192;
        const Tensor out(dtype, {num_tokens, kWidth});
        const Tensor gate(dtype, {num_tokens, kWidth});
        const Tensor value(dtype, {num_tokens, kWidth});
        for (const Tensor* tensor : {&out, &gate, &value}) {
          std::memset(tensor->view().data, 0x3c, tensor->view().num_bytes());
        }
        const GatedActivationArgs args{.out = out, .gate = gate, .value = value, .kind = kind};
        const int64_t bytes = static_cast<int64_t>(out.view().num_bytes());
        testkit::report_bandwidth(
            concat("gate ", static_cast<int>(kind), " ", to_string(dtype), " [", num_tokens, ", ", kWidth, "]"), pool,
            2 * bytes, bytes, [&] { gated_activation(args, context); });
      }
    }
  }
}
