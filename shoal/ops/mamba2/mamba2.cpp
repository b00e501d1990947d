// Entry of mamba2_verify: checks, the three phases by reference or kernel, the snapshots of the convolution.
#include "shoal/ops/mamba2/mamba2.h"

#include <cmath>
#include <limits>
#include <vector>

#include "shoal/base/float_bits.h"
#include "shoal/base/text.h"
#include "shoal/cpu/thread_pool.h"
#include "shoal/ops/mamba2/mamba2_problem.h"
#include "shoal/ops/variant.h"
#include "shoal/tensor/matcher.h"

namespace shoal {

SHOAL_DECLARE_FOR_EACH_ISA(void mamba2_convolve(const mamba2::Problem& problem, int64_t begin, int64_t end))
SHOAL_DECLARE_FOR_EACH_ISA(void mamba2_recur(const mamba2::Problem& problem, int64_t head, float* scratch))
SHOAL_DECLARE_FOR_EACH_ISA(void mamba2_normalise(const mamba2::Problem& problem, int64_t t, int64_t group))
namespace mamba2 {
void verify_ref(const Problem& problem);
}

namespace {

using mamba2::kHeadDim;
using mamba2::kStateSize;
using mamba2::kTaps;
using mamba2::Problem;

constexpr std::string_view kOp = "mamba2_verify";
constexpr int64_t kChannelGrain = 128;
constexpr uint16_t kNan = 0x7fc0;  // bf16

void check_attributes(const Mamba2VerifyArgs& a) {
  require(a.heads > 0, kOp, ": heads is ", a.heads, ", expected more than 0");
  require(a.n_groups > 0 && a.heads % a.n_groups == 0, kOp, ": n_groups is ", a.n_groups,
          ", expected a divisor of heads = ", a.heads);
  require(a.heads <= INT32_MAX, kOp, ": heads is ", a.heads, ", too many");
  require(std::isfinite(a.epsilon) && a.epsilon >= 0.0f, kOp, ": epsilon is ", a.epsilon,
          ", expected a finite value of at least 0");
  require(std::isfinite(a.time_step_min) && a.time_step_min >= 0.0f, kOp, ": time_step_min is ", a.time_step_min,
          ", expected a finite value of at least 0");
  for (const auto& [name, value, supported] :
       {std::tuple{"head_dim", a.head_dim, kHeadDim}, {"d_state", a.d_state, kStateSize}}) {
    require(value > 0, kOp, ": ", name, " is ", value, ", expected more than 0");
    if (value != supported) {
      fail(ErrorCode::kUnsupported, kOp, ": ", name, " is ", value, ", only ", supported, " is supported");
    }
  }
}

size_t workspace_values(const Problem& p, int num_threads) {
  return static_cast<size_t>(p.num_rows * (p.num_channels + p.inner_size) + num_threads * kStateSize * kHeadDim);
}

template <class T>
void copy_row(const TensorView& to, const TensorView& from, int64_t row) {
  const int64_t last = to.rank - 1;
  const int64_t middle = to.rank == 4 ? to.dim(2) : 1;
  for (int64_t i = 0; i < to.dim(1); ++i) {
    for (int64_t j = 0; j < middle; ++j) {
      const auto at = [&](const TensorView& view) {
        return view.as<T>() + row * view.stride(0) + i * view.stride(1) + (view.rank == 4 ? j * view.stride(2) : 0);
      };
      for (int64_t k = 0; k < to.dim(static_cast<int>(last)); ++k) {
        at(to)[k * to.stride(static_cast<int>(last))] = at(from)[k * from.stride(static_cast<int>(last))];
      }
    }
  }
}

// Rows without a token of this call.
void preserve(const Problem& p) {
  const Mamba2VerifyArgs& a = p.args;
  for (int64_t row = p.num_rows; row < p.num_slots; ++row) {
    if (a.conv_snapshots.data != a.conv_state.data) {
      copy_row<uint16_t>(a.conv_snapshots, a.conv_state, row);
    }
    if (a.ssm_snapshots.data != a.ssm_state.data) {
      copy_row<float>(a.ssm_snapshots, a.ssm_state, row);
    }
  }
}

void write_conv_snapshots(const Problem& p) {
  const TensorView& in = p.args.conv_state;
  const TensorView& out = p.args.conv_snapshots;
  const TensorView& rows = p.args.projection;
  for (int64_t c = 0; c < p.num_channels; ++c) {
    uint16_t past[3];  // read before its row may be written
    for (int64_t i = 0; i < 3; ++i) {
      past[i] = in.as<uint16_t>()[p.start * in.stride(0) + c * in.stride(1) + i * in.stride(2)];
    }
    for (int64_t t = std::max<int64_t>(0, p.num_rows - p.num_slots); t < p.num_rows; ++t) {
      for (int64_t i = 0; i < 3; ++i) {
        const int64_t pos = t - 2 + i;
        out.as<uint16_t>()[p.slot_of(t) * out.stride(0) + c * out.stride(1) + i * out.stride(2)] =
            pos < 0 ? past[3 + pos] : rows.as<uint16_t>()[pos * rows.stride(0) + (p.inner_size + c) * rows.stride(1)];
      }
    }
  }
}

// xbc and readout where they are wanted, from the intermediate results or as NaN.
void write_intermediates(const Problem& p, bool sound) {
  const Mamba2VerifyArgs& a = p.args;
  for (int64_t t = 0; a.xbc && t < p.num_rows; ++t) {
    for (int64_t c = 0; c < p.num_channels; ++c) {
      a.xbc.as<uint16_t>()[t * a.xbc.stride(0) + c * a.xbc.stride(1)] =
          sound ? f32_to_bf16(p.xbc[t * p.num_channels + c]) : kNan;
    }
  }
  for (int64_t t = 0; a.readout && t < p.num_rows; ++t) {
    for (int64_t i = 0; i < p.inner_size; ++i) {
      a.readout.as<float>()[t * a.readout.stride(0) + i * a.readout.stride(1)] =
          sound ? p.readout[t * p.inner_size + i] : std::numeric_limits<float>::quiet_NaN();
    }
  }
}

void write_nan(const Problem& p) {
  const Mamba2VerifyArgs& a = p.args;
  write_intermediates(p, /*sound=*/false);
  for (int64_t t = 0; t < p.num_rows; ++t) {
    for (int64_t i = 0; i < p.inner_size; ++i) {
      a.Y.as<uint16_t>()[t * a.Y.stride(0) + i * a.Y.stride(1)] = kNan;
    }
  }
  const TensorView& conv = a.conv_snapshots;
  const TensorView& ssm = a.ssm_snapshots;
  for (int64_t row = 0; row < std::min(p.num_rows, p.num_slots); ++row) {
    for (int64_t c = 0; c < p.num_channels; ++c) {
      for (int64_t i = 0; i < 3; ++i) {
        conv.as<uint16_t>()[row * conv.stride(0) + c * conv.stride(1) + i * conv.stride(2)] = kNan;
      }
    }
    for (int64_t h = 0; h < a.heads; ++h) {
      for (int64_t n = 0; n < kStateSize; ++n) {
        for (int64_t i = 0; i < kHeadDim; ++i) {
          ssm.as<float>()[row * ssm.stride(0) + h * ssm.stride(1) + n * ssm.stride(2) + i * ssm.stride(3)] =
              std::numeric_limits<float>::quiet_NaN();
        }
      }
    }
  }
}

void run_kernels(Problem& p, const OpContext& context) {
  require(context.workspace != nullptr, kOp, ": workspace is required");
  Workspace::Scope scope(*context.workspace);
  const int num_threads = context.pool->num_threads();
  float* memory = context.workspace->take<float>(workspace_values(p, num_threads)).data();
  p.xbc = memory + num_threads * kStateSize * kHeadDim;
  p.readout = p.xbc + p.num_rows * p.num_channels;
  const auto convolve = SHOAL_PICK_ISA(context.isa, mamba2_convolve);
  const auto recur = SHOAL_PICK_ISA(context.isa, mamba2_recur);
  const auto normalise = SHOAL_PICK_ISA(context.isa, mamba2_normalise);
  context.pool->parallel_for(p.num_channels, kChannelGrain,
                             [&](int64_t begin, int64_t end, int) { convolve(p, begin, end); });
  context.pool->parallel_for(p.args.heads, 1, [&](int64_t begin, int64_t end, int thread_idx) {
    for (int64_t head = begin; head < end; ++head) {
      recur(p, head, memory + thread_idx * kStateSize * kHeadDim);
    }
  });
  context.pool->parallel_for(p.num_rows * p.args.n_groups, 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) {
      normalise(p, i / p.args.n_groups, i % p.args.n_groups);
    }
  });
  write_conv_snapshots(p);
  write_intermediates(p, /*sound=*/true);
}

}  // namespace

Mamba2VerifyShapes mamba2_verify_shapes(const Mamba2VerifyArgs& a) {
  check_attributes(a);
  const Matcher match(kOp);
  const int64_t inner_size = a.heads * kHeadDim;
  Dim rows{"num_rows"};
  Dim slots{"slots"};
  Dim channels{"channels", inner_size + 2 * a.n_groups * kStateSize};
  Dim inner{"heads * head_dim", inner_size};
  Dim heads{"heads", a.heads};
  match.tensor("projection", a.projection).shape({rows, inner + channels + heads}).type(DType::kBF16);
  require(rows >= 1, kOp, ": projection has shape ", shape_text(a.projection.dims()), ", expected at least one row");
  const Device device = a.projection.device;
  match.tensor("conv_state", a.conv_state).shape({slots, channels, 3}).type(DType::kBF16).device(device);
  require(slots >= 1, kOp, ": conv_state has shape ", shape_text(a.conv_state.dims()), ", expected at least one slot");
  match.tensor("ssm_state", a.ssm_state).shape({slots, heads, kStateSize, kHeadDim}).type(DType::kF32).device(device);
  TensorMatcher weight = match.tensor("conv_weight", a.conv_weight);
  if (a.conv_weight.rank == 3) {
    weight.shape({channels, 1, kTaps});
  } else {
    weight.shape({channels, kTaps});
  }
  weight.type(DType::kBF16).device(device);
  match.tensor("conv_bias", a.conv_bias).shape({channels}).type(DType::kBF16).device(device);
  match.tensor("dt_bias", a.dt_bias).shape({heads}).type(DType::kF32).device(device);
  match.tensor("A_negative", a.A_negative).shape({heads}).type(DType::kF32).device(device);
  match.tensor("D", a.D).shape({heads}).type(DType::kF32).device(device);
  match.tensor("norm_weight", a.norm_weight).shape({inner}).type(DType::kF32).device(device);
  TensorMatcher state_row = match.tensor("state_row", a.state_row);
  if (a.state_row.rank != 0) {
    state_row.shape({1});
  }
  state_row.type(DType::kI32).device(device);
  return {{DType::kBF16, {rows, inner}},
          {DType::kBF16, {slots, channels, 3}},
          {DType::kF32, {slots, heads, kStateSize, kHeadDim}},
          {DType::kBF16, {rows, channels}},
          {DType::kF32, {rows, inner}}};
}

size_t mamba2_verify_workspace_bytes(const Mamba2VerifyArgs& args, int num_threads) {
  mamba2_verify_shapes(args);
  return Workspace::bytes_for<float>(workspace_values(Problem(args, 0), num_threads));
}

void mamba2_verify(const Mamba2VerifyArgs& a, const OpContext& context) {
  const Mamba2VerifyShapes shapes = mamba2_verify_shapes(a);
  const Device device = a.projection.device;
  check_output(kOp, "Y", a.Y, shapes.Y, device);
  check_output(kOp, "conv_snapshots", a.conv_snapshots, shapes.conv_snapshots, device);
  check_output(kOp, "ssm_snapshots", a.ssm_snapshots, shapes.ssm_snapshots, device);
  check_output(kOp, "xbc", a.xbc, shapes.xbc, device, /*optional=*/true);
  check_output(kOp, "readout", a.readout, shapes.readout, device, /*optional=*/true);
  const bool reference = wants_reference(kOp, context.variant);
  Problem p(a, *a.state_row.as<int32_t>());
  if (p.start < 0 || p.start >= p.num_slots) {
    write_nan(p);
  } else if (reference) {
    std::vector<float> xbc(static_cast<size_t>(p.num_rows * p.num_channels));
    std::vector<float> readout(static_cast<size_t>(p.num_rows * p.inner_size));
    p.xbc = xbc.data();
    p.readout = readout.data();
    mamba2::verify_ref(p);
    write_conv_snapshots(p);
    write_intermediates(p, /*sound=*/true);
  } else {
    run_kernels(p, context);
  }
  preserve(p);
}

}  // namespace shoal
