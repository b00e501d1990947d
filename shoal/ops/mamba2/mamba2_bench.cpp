// Speed of a Mamba-2 mixer of 128 heads in 8 groups, decode and verification.
#include "shoal/ops/mamba2/mamba2.h"
#include "testkit/bandwidth.h"

namespace {

using namespace shoal;

Tensor filled(DType dtype, std::vector<int64_t> shape) {
  Tensor tensor(dtype, shape);
  std::memset(tensor.view().data, 0x3c, tensor.view().num_bytes());
  return tensor;
}

}  // namespace

int main() {
  cpu::ThreadPool pool;
  Workspace workspace(1 << 23);
  const OpContext context{.pool = &pool, .workspace = &workspace, .isa = cpu::default_isa()};
  std::printf("%s, %s, %d threads\n", cpu::processor_name().c_str(), std::string(to_string(context.isa)).c_str(),
              pool.num_threads());
  constexpr int64_t kHeads = 128;
  constexpr int64_t kGroups = 8;
  constexpr int64_t kInner = kHeads * 64;
  constexpr int64_t kChannels = kInner + 2 * kGroups * 128;
  for (const auto& [num_rows, num_slots] : {std::pair{1, 1}, {4, 4}, {64, 1}}) {
    const Tensor projection = filled(DType::kBF16, {num_rows, kInner + kChannels + kHeads});
    const Tensor conv_state = filled(DType::kBF16, {num_slots, kChannels, 3});
    const Tensor ssm_state = filled(DType::kF32, {num_slots, kHeads, 128, 64});
    const Tensor weight = filled(DType::kBF16, {kChannels, 4});
    const Tensor bias = filled(DType::kBF16, {kChannels});
    const Tensor per_head = filled(DType::kF32, {kHeads});
    const Tensor norm = filled(DType::kF32, {kInner});
    const Tensor y = filled(DType::kBF16, {num_rows, kInner});
    int32_t row = 0;
    const Mamba2VerifyArgs args{.Y = y,
                                .conv_snapshots = conv_state,
                                .ssm_snapshots = ssm_state,
                                .projection = projection,
                                .conv_state = conv_state,
                                .ssm_state = ssm_state,
                                .conv_weight = weight,
                                .conv_bias = bias,
                                .dt_bias = per_head,
                                .A_negative = per_head,
                                .D = per_head,
                                .norm_weight = norm,
                                .state_row = TensorView(&row, DType::kI32, {1}),
                                .heads = kHeads,
                                .n_groups = kGroups};
    const auto row_bytes = static_cast<int64_t>(ssm_state.view().num_bytes()) / num_slots;
    testkit::report_bandwidth(concat("mamba2_verify rows ", num_rows, " slots ", num_slots), pool, row_bytes,
                              row_bytes * num_slots, [&] { mamba2_verify(args, context); });
  }
}
