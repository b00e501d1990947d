// MoEPacked: checks of inputs and attributes, and the problem they describe.
#include <array>
#include <vector>

#include "shoal/base/text.h"
#include "shoal/ops/moe/moe.h"
#include "shoal/ops/moe/moe_problem.h"
#include "shoal/ops/moe_router/moe_router.h"
#include "shoal/tensor/matcher.h"

namespace shoal {
namespace {

constexpr std::string_view kName = "moe_packed";
constexpr int64_t kMaxLegacyExperts = 16;  // chosen ones
constexpr int64_t kMaxChosenExperts = 32;

Format format_of(std::string_view name, int64_t type) {
  require(type >= 0 && type <= INT32_MAX, kName, ": ", name, " is ", type, ", expected the id of a packed type");
  const auto format = format_from_ggml_type(static_cast<uint32_t>(type));
  if (!format.has_value() || info(*format).block_size == 1) {
    fail(ErrorCode::kUnsupported, kName, ": ", name, " ", type, format.has_value() ? " (" : "",
         format.has_value() ? info(*format).name : "", format.has_value() ? ")" : "",
         " is no packed type that is known");
  }
  return *format;
}

moe::Projection projection_of(std::string_view part, const TensorView& weights, int64_t type, int64_t num_experts,
                              int64_t n, int64_t k, Device device) {
  moe::Projection p;
  p.codes = moe::Codes::kBlocks;
  p.scaling = moe::Scaling::kValues;
  p.format = format_of(concat(part, "_type"), type);
  p.n = n;
  p.k = k;
  p.group = k;
  const FormatInfo& format = info(p.format);
  const std::string name = concat(part, "_experts_weights");
  require(k % format.block_size == 0, kName, ": ", name, " has rows of ", k, " values, expected whole blocks of ",
          format.block_size, " (", format.name, ")");
  Matcher(kName)
      .tensor(name, weights)
      .type(DType::kU8)
      .shape({num_experts, n, row_bytes(p.format, k)})
      .device(device)
      .inner_contiguous();
  p.data = weights.as<const std::byte>();
  p.expert_bytes = weights.stride(0);
  p.row_bytes = weights.stride(1);
  return p;
}

moe::Problem check(const MoEPackedArgs& a) {
  moe::Problem p;
  const Matcher match(kName);
  match.tensor("input", a.input).types(kFloats);
  require(a.input.rank >= 1, kName, ": input has no dimension, expected [..., hidden_size]");
  const Device device = a.input.device;
  p.dtype = a.input.dtype;
  p.hidden = a.input.dim(a.input.rank - 1);
  p.num_tokens = 1;
  for (int axis = 0; axis < a.input.rank - 1; ++axis) {
    p.num_tokens *= a.input.dim(axis);
  }
  const bool squared = a.activation_type == "relu2" || a.activation_type == "relu_squared";
  require(squared || a.activation_type == "swiglu", kName, ": activation_type is '", printable(a.activation_type),
          "', expected swiglu or relu2");
  p.activation = squared ? moe::Activation::kRelu2 : moe::Activation::kSilu;
  p.gate = squared ? moe::Gate::kNone : moe::Gate::kSeparate;

  Dim experts{"num_experts"};
  match.tensor("router_probs", a.router_probs).types(kFloats).shape({p.num_tokens, experts}).device(device);
  p.num_experts = experts;
  if (a.router_weights) {
    match.tensor("router_weights", a.router_weights)
        .type(a.router_probs.dtype)
        .shape({p.num_tokens, experts})
        .device(device);
  } else {
    require(a.routing_epsilon == 0.0f, kName, ": routing_epsilon is ", a.routing_epsilon,
            ", which needs router_weights");
    require(a.routed_scaling_factor == 1.0f, kName, ": routed_scaling_factor is ", a.routed_scaling_factor,
            ", which needs router_weights");
  }
  require(a.routing_epsilon >= 0.0f, kName, ": routing_epsilon is ", a.routing_epsilon, ", expected at least 0");
  require(a.normalize_routing_weights == 0 || a.normalize_routing_weights == 1, kName,
          ": normalize_routing_weights is ", a.normalize_routing_weights, ", expected 0 or 1");
  const int64_t most = std::min(a.router_weights ? kMaxChosenExperts : kMaxLegacyExperts, p.num_experts);
  require(a.k >= 1 && a.k <= most, kName, ": k is ", a.k, ", expected 1 to ", most);
  p.num_ranks = a.k;
  require(p.num_tokens <= INT32_MAX / p.num_ranks, kName, ": input has ", p.num_tokens,
          " rows, too many with k = ", a.k);

  require(static_cast<bool>(a.gate_experts_weights), kName, ": gate_experts_weights is required");
  match.tensor("gate_experts_weights", a.gate_experts_weights).rank(3);
  p.inter = a.gate_experts_weights.dim(1);
  require(p.hidden >= 1 && p.inter >= 1, kName, ": input and gate_experts_weights must not have sizes of 0");
  p.fc1 = projection_of("gate", a.gate_experts_weights, a.gate_type, p.num_experts, p.inter, p.hidden, device);
  if (squared) {
    require(!a.up_experts_weights, kName, ": up_experts_weights must be absent with activation_type relu2");
  } else {
    require(static_cast<bool>(a.up_experts_weights), kName, ": up_experts_weights is required with swiglu");
    p.fc3 = projection_of("up", a.up_experts_weights, a.up_type, p.num_experts, p.inter, p.hidden, device);
  }
  p.fc2 = projection_of("down", a.down_experts_weights, a.down_type, p.num_experts, p.hidden, p.inter, device);
  p.poison = true;
  p.input = a.input;
  p.output = a.output;
  return p;
}

OutputSpec spec_of(const TensorView& input) {
  return {input.dtype, std::vector<int64_t>(input.dims().begin(), input.dims().end())};
}

void route(const void* args, int64_t begin, int64_t end, int32_t* ids, float* weights, const OpContext& context) {
  const auto& a = *static_cast<const MoEPackedArgs*>(args);
  const int64_t count = end - begin;
  route_packed_experts({.expert_ids = TensorView(ids, DType::kI32, {count, a.k}),
                        .expert_weights = TensorView(weights, DType::kF32, {count, a.k}),
                        .router_probs = a.router_probs.rows(begin, end),
                        .router_weights = a.router_weights ? a.router_weights.rows(begin, end) : TensorView(),
                        .top_k = a.k,
                        .normalize = a.normalize_routing_weights == 1,
                        .epsilon = a.routing_epsilon,
                        .scale = a.routed_scaling_factor},
                       context);
}

}  // namespace

OutputSpec moe_packed_shapes(const MoEPackedArgs& args) {
  check(args);
  return spec_of(args.input);
}

size_t moe_packed_workspace_bytes(const MoEPackedArgs& args, int num_threads) {
  return moe::workspace_bytes(check(args), num_threads);
}

void moe_packed(const MoEPackedArgs& args, const OpContext& context) {
  const moe::Problem problem = check(args);
  check_output(kName, "output", args.output, spec_of(args.input), args.input.device);
  moe::run(problem, &args, route, context);
}

}  // namespace shoal
