// Throughput of rope on the best instruction set, in place.
#include "shoal/ops/rope/rope.h"
#include "testkit/bandwidth.h"

int main() {
  using namespace shoal;
  cpu::ThreadPool pool;
  const OpContext context{.pool = &pool, .isa = cpu::default_isa()};
  std::printf("%s, %s, %d threads\n", cpu::processor_name().c_str(), std::string(to_string(context.isa)).c_str(),
              pool.num_threads());
  constexpr int64_t kHeads = 32;
  constexpr int64_t kHeadDim = 128;
  const RopeTables tables = make_rope_tables({.rotary_dim = kHeadDim}, 1024);
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const bool interleaved : {false, true}) {
      for (const int64_t num_tokens : {1, 512}) {
        const Tensor x(dtype, {num_tokens, kHeads, kHeadDim});
        std::memset(x.view().data, 0x3c, x.view().num_bytes());
        const Tensor positions(DType::kI32, {num_tokens});
        for (int64_t t = 0; t < num_tokens; ++t) {
          positions.view().as<int32_t>()[t] = static_cast<int32_t>(t);
        }
        const RopeArgs args{
            .out = x, .x = x, .positions = positions, .cos = tables.cos, .sin = tables.sin, .interleaved = interleaved};
        const int64_t bytes = static_cast<int64_t>(x.view().num_bytes());
        testkit::report_bandwidth(concat("rope ", to_string(dtype), " [", num_tokens, ", 32, 128]",
                                         interleaved ? " interleaved" : " half-split"),
                                  pool, bytes, bytes, [&] { rope(args, context); });
      }
    }
  }
}
