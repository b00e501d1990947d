// Throughput of embedding on the best instruction set: rows spread over a table of 32,768.
#include "shoal/ops/embedding/embedding.h"
#include "testkit/bandwidth.h"

int main() {
  using namespace shoal;
  cpu::ThreadPool pool;
  const OpContext context{.pool = &pool, .isa = cpu::default_isa()};
  std::printf("%s, %s, %d threads\n", cpu::processor_name().c_str(), std::string(to_string(context.isa)).c_str(),
              pool.num_threads());
  constexpr int64_t kVocabSize = 32768;
  constexpr int64_t kHidden = 2048;
  for (const Format format : {Format::kBF16, Format::kQ8_0, Format::kQ6_K}) {
    const std::vector<std::byte> codes(static_cast<size_t>(kVocabSize * row_bytes(format, kHidden)), std::byte{0x3c});
    const QuantMatrix table{format, kVocabSize, kHidden, codes.data()};
    for (const int64_t num_tokens : {1, 512}) {
      const Tensor out(DType::kF32, {num_tokens, kHidden});
      const Tensor ids(DType::kI32, {num_tokens});
      for (int64_t t = 0; t < num_tokens; ++t) {
        ids.view().as<int32_t>()[t] = static_cast<int32_t>(t * 7919 % kVocabSize);
      }
      testkit::report_bandwidth(concat("embedding ", info(format).name, " [", num_tokens, ", ", kHidden, "]"), pool,
                                num_tokens * row_bytes(format, kHidden), static_cast<int64_t>(out.view().num_bytes()),
                                [&] { embedding({.out = out, .ids = ids, .table = table}, context); });
    }
  }
}
