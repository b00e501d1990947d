// Entry of rope: checks, then the reference or the kernel of the instruction set over ranges of tokens.
#include "shoal/ops/rope/rope.h"

#include <algorithm>

#include "shoal/cpu/thread_pool.h"
#include "shoal/ops/variant.h"
#include "shoal/tensor/matcher.h"

namespace shoal {

SHOAL_DECLARE_FOR_EACH_ISA(void rope_tokens(const RopeArgs& args, int64_t begin, int64_t end))
void rope_ref(const RopeArgs& args);

namespace {

constexpr int64_t kGrainElements = 16384;  // less is not worth waking a thread for

void check(const RopeArgs& args) {
  const Matcher match("rope");
  Dim tokens{"num_tokens"};
  Dim heads{"num_heads"};
  Dim head_dim{"head_dim"};
  Dim max_pos{"max_pos"};
  Dim num_pairs{"rotary_dim/2"};
  const Device device = args.x.device;
  match.tensor("x", args.x).shape({tokens, heads, head_dim}).types(kFloats).inner_contiguous();
  match.tensor("out", args.out).shape({tokens, heads, head_dim}).type(args.x.dtype).inner_contiguous().device(device);
  match.tensor("positions", args.positions).shape({tokens}).type(DType::kI32).contiguous().device(device);
  match.tensor("cos", args.cos).shape({max_pos, num_pairs}).type(DType::kF32).inner_contiguous().device(device);
  match.tensor("sin", args.sin).shape({max_pos, num_pairs}).type(DType::kF32).inner_contiguous().device(device);
  require(args.rotary_offset >= 0 && args.rotary_offset <= head_dim - 2 * num_pairs, "rope: channels ",
          args.rotary_offset, " to ", args.rotary_offset + 2 * num_pairs, " would be rotated, but head_dim is ",
          head_dim.value());
  const int32_t* positions = args.positions.as<int32_t>();
  for (int64_t t = 0; t < tokens; ++t) {
    require(positions[t] >= 0 && positions[t] < max_pos, "rope: positions[", t, "] is ", positions[t],
            ", outside [0, max_pos = ", max_pos.value(), ")");
  }
}

}  // namespace

void rope(const RopeArgs& args, const OpContext& context) {
  check(args);
  if (wants_reference("rope", context.variant)) {
    rope_ref(args);
    return;
  }
  const auto tokens = SHOAL_PICK_ISA(context.isa, rope_tokens);
  const int64_t grain = std::max<int64_t>(1, kGrainElements / std::max<int64_t>(1, args.x.dim(1) * args.x.dim(2)));
  context.pool->parallel_for(args.x.dim(0), grain, [&](int64_t begin, int64_t end, int) { tokens(args, begin, end); });
}

}  // namespace shoal
