// Entries of linear attention: the checked problem, then the reference or the kernel over heads and rows of their
// states.
#include "shoal/ops/delta_net/delta_net.h"

#include <algorithm>

#include "shoal/base/checked.h"
#include "shoal/cpu/thread_pool.h"
#include "shoal/ops/delta_net/delta_net_check.h"
#include "shoal/ops/variant.h"
#include "shoal/tensor/matcher.h"

namespace shoal {

SHOAL_DECLARE_FOR_EACH_ISA(void recurrence_head(const delta::Problem& problem, int64_t head, int64_t begin, int64_t end,
                                                float* scratch))
SHOAL_DECLARE_FOR_EACH_ISA(void linear_attention_gate_rows(const LinearAttentionGateArgs& args, int64_t begin,
                                                           int64_t end))
namespace delta {
void recurrence_ref(const Problem& problem);
void gate_ref(const LinearAttentionGateArgs& args);
}  // namespace delta

namespace {

constexpr std::string_view kGate = "linear_attention_gate";
constexpr int64_t kSliceRows = 32;  // of a state, where there are too few heads for the threads

size_t workspace_bytes(const delta::Problem& p, int num_threads) {
  const delta::Scratch scratch(p);
  return static_cast<size_t>(num_threads) * Workspace::bytes_for<float>(static_cast<size_t>(scratch.size(p)));
}

void run(const delta::Problem& p, std::string_view op, const OpContext& context) {
  if (wants_reference(op, context.variant)) {
    delta::recurrence_ref(p);
    return;
  }
  require(context.workspace != nullptr, op, ": workspace is required");
  Workspace::Scope scope(*context.workspace);
  const auto size =
      static_cast<int64_t>(Workspace::bytes_for<float>(static_cast<size_t>(delta::Scratch(p).size(p))) / sizeof(float));
  const int num_threads = context.pool->num_threads();
  float* scratch = context.workspace->take<float>(static_cast<size_t>(size * num_threads)).data();
  const auto kernel = SHOAL_PICK_ISA(context.isa, recurrence_head);
  // Rows of a state do not meet, so that slices of them change no bit. A thread has its part of a head in every
  // sequence.
  const int64_t num_slices = p.num_heads % num_threads == 0 ? 1 : ceil_div(p.v_size, kSliceRows);
  const int64_t slice = num_slices == 1 ? p.v_size : kSliceRows;
  context.pool->parallel_for(p.num_heads * num_slices, 1, [&](int64_t begin, int64_t end, int thread_idx) {
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t first = unit % num_slices * slice;
      kernel(p, unit / num_slices, first, std::min(first + slice, p.v_size), scratch + thread_idx * size);
    }
  });
}

}  // namespace

GatedDeltaNetShapes gated_delta_net_shapes(const GatedDeltaNetArgs& args) {
  GatedDeltaNetShapes shapes;
  delta::problem_of(args, shapes);
  return shapes;
}

size_t gated_delta_net_workspace_bytes(const GatedDeltaNetArgs& args, int num_threads) {
  GatedDeltaNetShapes shapes;
  return workspace_bytes(delta::problem_of(args, shapes), num_threads);
}

void gated_delta_net(const GatedDeltaNetArgs& args, const OpContext& context) {
  GatedDeltaNetShapes shapes;
  delta::Problem problem = delta::problem_of(args, shapes);
  delta::add_outputs(args, shapes, problem);
  run(problem, "gated_delta_net", context);
}

LinearAttentionShapes linear_attention_shapes(const LinearAttentionArgs& args) {
  LinearAttentionShapes shapes;
  delta::problem_of(args, shapes);
  return shapes;
}

size_t linear_attention_workspace_bytes(const LinearAttentionArgs& args, int num_threads) {
  LinearAttentionShapes shapes;
  return workspace_bytes(delta::problem_of(args, shapes), num_threads);
}

void linear_attention(const LinearAttentionArgs& args, const OpContext& context) {
  LinearAttentionShapes shapes;
  delta::Problem problem = delta::problem_of(args, shapes);
  delta::add_outputs(args, shapes, problem);
  run(problem, "linear_attention", context);
}

LinearAttentionGateShapes linear_attention_gate_shapes(const LinearAttentionGateArgs& a) {
  const Matcher match(kGate);
  Dim batch{"batch_size"};
  Dim tokens{"num_tokens"};
  Dim heads{"num_heads"};
  match.tensor("a", a.a).types(kFloats).shape({batch, tokens, heads});
  match.tensor("dt_bias", a.dt_bias).shape({heads}).type(DType::kF32).device(a.a.device);
  match.tensor("decay_scale", a.decay_scale).shape({heads}).type(DType::kF32).device(a.a.device);
  if (a.b) {
    match.tensor("b", a.b).shape({batch, tokens, heads}).type(a.a.dtype).device(a.a.device);
  }
  const OutputSpec spec{a.a.dtype, {batch, tokens, heads}};
  return {spec, {spec.dtype, spec.shape, static_cast<bool>(a.b)}};
}

void linear_attention_gate(const LinearAttentionGateArgs& args, const OpContext& context) {
  const LinearAttentionGateShapes shapes = linear_attention_gate_shapes(args);
  check_output(kGate, "decay", args.decay, shapes.decay, args.a.device);
  require(!args.beta || args.b, kGate, ": b is required when beta is wanted");
  check_output(kGate, "beta", args.beta, shapes.beta, args.a.device, /*optional=*/true);
  if (wants_reference(kGate, context.variant)) {
    delta::gate_ref(args);
    return;
  }
  const auto kernel = SHOAL_PICK_ISA(context.isa, linear_attention_gate_rows);
  constexpr int64_t kGrainElements = 4096;  // of softplus and sigmoid; fewer are not worth waking a thread for
  const int64_t grain = std::max<int64_t>(1, kGrainElements / std::max<int64_t>(1, args.a.dim(2)));
  context.pool->parallel_for(args.a.dim(0) * args.a.dim(1), grain,
                             [&](int64_t begin, int64_t end, int) { kernel(args, begin, end); });
}

}  // namespace shoal
