// Throughput of the convolutions of Qwen3-Next's linear-attention layers (8192 channels, 4 taps, SiLU).
#include "shoal/ops/causal_conv/causal_conv.h"
#include "testkit/bandwidth.h"

namespace {

using namespace shoal;

constexpr int64_t kChannels = 8192;
constexpr int64_t kTaps = 4;

Tensor filled(DType dtype, std::vector<int64_t> shape) {
  Tensor tensor(dtype, shape);
  std::memset(tensor.view().data, 0x3c, tensor.view().num_bytes());
  return tensor;
}

}  // namespace

int main() {
  cpu::ThreadPool pool;
  const OpContext context{.pool = &pool, .isa = cpu::default_isa()};
  std::printf("%s, %s, %d threads\n", cpu::processor_name().c_str(), std::string(to_string(context.isa)).c_str(),
              pool.num_threads());
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const int64_t num_tokens : {1, 4, 512}) {
      const Tensor input = filled(dtype, {num_tokens, kChannels});
      const Tensor output = filled(dtype, {num_tokens, kChannels});
      const Tensor weight = filled(dtype, {kChannels, 1, kTaps});
      const Tensor state = filled(dtype, {1, kChannels, kTaps - 1});
      std::vector<int32_t> offsets = {0, static_cast<int32_t>(num_tokens)};
      const auto bytes = static_cast<int64_t>(input.view().num_bytes());
      const VarlenCausalConvWithStateArgs packed{
          .output = output,
          .final_state = state,
          .input = input,
          .weight = weight,
          .cumulative_sequence_length = TensorView(offsets.data(), DType::kI32, {2}),
          .initial_state = state,
          .activation = "silu"};
      testkit::report_bandwidth(concat("varlen_causal_conv ", to_string(dtype), " [", num_tokens, ", 8192]"), pool,
                                bytes, bytes, [&] { varlen_causal_conv_with_state(packed, context); });
      const std::vector<int64_t> first = {1, kChannels, num_tokens};
      const CausalConvWithStateArgs batch{.output = TensorView(output.view().data, dtype, first),
                                          .present_state = state,
                                          .input = TensorView(input.view().data, dtype, first),
                                          .weight = weight,
                                          .past_state = state,
                                          .activation = "silu"};
      testkit::report_bandwidth(concat("causal_conv ", to_string(dtype), " [1, 8192, ", num_tokens, "]"), pool, bytes,
                                bytes, [&] { causal_conv_with_state(batch, context); });
    }
  }
}
