// Speed of the recurrence of Qwen3-Next's linear-attention layers (16 key heads, 32 value heads of 128 x 128), prefill,
// verification and decode. A decode moves the whole state in and out of memory; the work is 8 operations a state
// element and token.
#include "shoal/ops/delta_net/delta_net.h"

#include "shoal/base/float_bits.h"
#include "testkit/bandwidth.h"

namespace {

using namespace shoal;

constexpr int64_t kKeyHeads = 16;
constexpr int64_t kHeads = 32;
constexpr int64_t kSize = 128;

Tensor filled(DType dtype, std::vector<int64_t> shape, float deviation) {
  Tensor tensor(dtype, shape);
  testkit::Random random(1);
  for (int64_t i = 0; i < tensor.view().num_elements(); ++i) {
    const float value = random.uniform(-deviation, deviation);
    if (dtype == DType::kF32) {
      tensor.view().as<float>()[i] = value;
    } else {
      tensor.view().as<uint16_t>()[i] = f32_to_bf16(value);
    }
  }
  return tensor;
}

}  // namespace

int main() {
  cpu::ThreadPool pool;
  Workspace workspace(1 << 22);
  const OpContext context{.pool = &pool, .workspace = &workspace, .isa = cpu::default_isa()};
  std::printf("%s, %s, %d threads\n", cpu::processor_name().c_str(), std::string(to_string(context.isa)).c_str(),
              pool.num_threads());
  for (const bool per_key : {false, true}) {
    for (const int64_t num_tokens : {1, 4, 64, 256}) {
      const Tensor query = filled(DType::kBF16, {1, num_tokens, kKeyHeads, kSize}, 1.0f);
      const Tensor value = filled(DType::kBF16, {1, num_tokens, kHeads, kSize}, 1.0f);
      const Tensor output = filled(DType::kBF16, {1, num_tokens, kHeads, kSize}, 1.0f);
      const Tensor decay = per_key ? filled(DType::kF32, {1, num_tokens, kHeads, kSize}, 1.0f)
                                   : filled(DType::kF32, {1, num_tokens, kHeads}, 1.0f);
      const Tensor beta = filled(DType::kF32, {1, num_tokens, kHeads}, 1.0f);
      const Tensor state = filled(DType::kF32, {1, kHeads, kSize, kSize}, 0.1f);
      const Tensor per_head = filled(DType::kF32, {kHeads}, 1.0f);
      const GatedDeltaNetArgs args{.output = output,
                                   .final_state = state,
                                   .query = query,
                                   .key = query,
                                   .value = value,
                                   .decay = decay,
                                   .beta = beta,
                                   .initial_state = state,
                                   .a_log = per_head,
                                   .dt_bias = per_head,
                                   .gate_activation = per_key ? "kda" : "softplus",
                                   .beta_activation = "sigmoid",
                                   .qk_l2_norm = 1};
      const double seconds = testkit::median_seconds(num_tokens > 64 ? 3 : 11, [&] { gated_delta_net(args, context); });
      const double elements = static_cast<double>(kHeads * kSize * kSize);
      std::printf("gated_delta_net bf16 %-10s tokens %4lld %10.1f us %8.2f us/token %7.2f GFLOP/s, state %6.2f GB/s\n",
                  per_key ? "per key" : "per head", static_cast<long long>(num_tokens), seconds * 1e6,
                  seconds * 1e6 / static_cast<double>(num_tokens),
                  8e-9 * elements * static_cast<double>(num_tokens) / seconds, 8e-9 * elements / seconds);
    }
  }
}
