// The CUDA path against `ref` on the same memory: outputs within the rounding of the tensor cores' operands, bytes of the
// cache exactly.
#include <gtest/gtest.h>

#include "shoal/ops/paged_attention/paged_attention_cases.h"
#include "testkit/on_device.h"

namespace shoal {
namespace {

using paged_cases::Case;
using paged_cases::Step;

class PagedAttentionCuda : public testing::TestWithParam<Case> {};

bool is_supported(const Case& c) {
  return c.head_dim <= 256 && c.k_cache != DType::kF32 && (c.v_head_dim != 0 || c.v_cache != DType::kF32);
}

void run_on_device(Step& step) {
  testkit::OnDevice device;
  PagedAttentionArgs args = step.args();
  for (TensorView* view :
       {&args.output, &args.query, &args.key, &args.value, &args.key_cache, &args.value_cache,
        &args.cumulative_sequence_length, &args.past_seqlens, &args.block_table, &args.cos_cache, &args.sin_cache,
        &args.slot_mapping, &args.head_sink, &args.q_norm_weight, &args.k_norm_weight, &args.k_scale, &args.v_scale}) {
    *view = device.copy(*view);
  }
  Workspace workspace(device.allocator());
  OpContext context = device.context();
  workspace.reserve(paged_attention_workspace_bytes(args, 1));
  context.workspace = &workspace;
  paged_attention(args, context);
  device.fetch();
}

TEST_P(PagedAttentionCuda, MatchesRef) {
  SHOAL_NEEDS_DEVICE();
  const Case& c = GetParam();
  Step step(c);
  step.poison_output();
  if (!is_supported(c)) {
    EXPECT_THROW(run_on_device(step), Error);
    return;
  }
  run_on_device(step);
  Step reference(c);
  cpu::ThreadPool pool(1);
  OpContext context;
  context.pool = &pool;
  context.variant = "ref";
  paged_attention(reference.args(), context);
  // Query, weights and, for some caches, keys and values are rounded to bf16; to f16 where all else is f16.
  const bool is_half = c.type == DType::kF16 && c.k_cache != DType::kBF16 && c.v_cache != DType::kBF16;
  const double tolerance = is_half ? 3e-3 : 2e-2;
  const auto result = testkit::compare(step.result(), reference.result(), tolerance, tolerance);
  EXPECT_TRUE(result.ok) << result.text;
  EXPECT_TRUE(step.cache_bytes() == reference.cache_bytes());
  EXPECT_TRUE(step.guards_intact());
}

INSTANTIATE_TEST_SUITE_P(Features, PagedAttentionCuda, testing::ValuesIn(paged_cases::feature_cases()),
                         [](const auto& test) { return test.param.name; });

std::vector<Case> long_cases() {
  std::vector<Case> cases;
  const auto add = [&](const std::string& name, Case c) {
    c.name = name;
    c.seed = cases.size() + 100;
    cases.push_back(c);
  };
  const auto bf16 = [](Case c) {
    c.k_cache = DType::kBF16;
    c.v_cache = DType::kBF16;
    return c;
  };
  add("decode_splits", bf16({.num_heads = 8, .num_kv_heads = 2, .head_dim = 128, .past = {3001, 17}, .lens = {1, 1}}));
  add("verify_splits", bf16({.num_heads = 8, .num_kv_heads = 1, .head_dim = 128, .past = {2047}, .lens = {5}}));
  add("prefill_long", bf16({.num_heads = 4, .num_kv_heads = 1, .head_dim = 128, .past = {511}, .lens = {700}}));
  add("prefill_window",
      bf16({.num_heads = 4, .num_kv_heads = 2, .past = {900}, .lens = {300}, .window = 128, .unmap_below = true}));
  add("decode_window", bf16({.num_heads = 4,
                             .num_kv_heads = 2,
                             .past = {2900},
                             .lens = {1},
                             .window = 512,
                             .sink = true,
                             .unmap_below = true}));
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Long, PagedAttentionCuda, testing::ValuesIn(long_cases()),
                         [](const auto& test) { return test.param.name; });

}  // namespace
}  // namespace shoal
