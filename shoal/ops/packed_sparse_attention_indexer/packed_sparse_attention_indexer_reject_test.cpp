// Every call that packed_sparse_attention_indexer must refuse, by its message.
#include <gtest/gtest.h>

#include <functional>

#include "shoal/ops/indexer_rows.h"
#include "shoal/ops/packed_sparse_attention_indexer/packed_sparse_attention_indexer_cases.h"
#include "shoal/tensor/matcher.h"
#include "testkit/expect_error.h"

namespace shoal::packed_indexer {
namespace {

using testkit::expect_error;

struct Rejections {
  explicit Rejections(const Case& c) : problem(c) { bind(problem, problem.before(), bound); }

  void expect(std::string_view message, const std::function<void(PackedSparseAttentionIndexerArgs&)>& change) {
    PackedSparseAttentionIndexerArgs a = bound.args;
    change(a);
    expect_error(ErrorCode::kInvalidArgument, concat("packed_sparse_attention_indexer: ", message),
                 [&] { packed_sparse_attention_indexer_shapes(a); });
  }

  Case problem;
  Bound bound{};
};

using Args = PackedSparseAttentionIndexerArgs;

TEST(PackedSparseAttentionIndexer, RejectsAttributes) {
  Case c{.past = {3, 6}, .counts = {2, 1}};
  c.fill(1);
  Rejections r(c);
  packed_sparse_attention_indexer_shapes(r.bound.args);
  r.expect("policy_mode is 'dsa', expected qsa or csa", [](Args& a) { a.policy_mode = "dsa"; });
  r.expect("policy_mode is ''", [](Args& a) { a.policy_mode = ""; });
  r.expect("compress_ratio is 0, expected 1 to", [](Args& a) { a.compress_ratio = 0; });
  r.expect("compress_ratio is 1073741825, expected 1 to 1073741824", [](Args& a) { a.compress_ratio = 1073741825; });
  r.expect("state_capacity is 0", [](Args& a) { a.state_capacity = 0; });
  r.expect("epsilon is -1", [](Args& a) { a.epsilon = -1; });
  r.expect("epsilon is nan", [](Args& a) { a.epsilon = kNan; });
  r.expect("scale is inf", [](Args& a) { a.scale = kInf; });
  r.expect("token_budget is required with policy_mode qsa", [](Args& a) { a.token_budget.reset(); });
  r.expect("token_budget is 0", [](Args& a) { a.token_budget = 0; });
  r.expect("token_budget is 6, expected a multiple of compress_ratio = 4", [](Args& a) { a.token_budget = 6; });
  r.expect("token_budget + compress_ratio - 1 is 2147483648, expected 1 to 2147483647", [](Args& a) {
    a.compress_ratio = 3;
    a.token_budget = 2147483646;
  });
  r.expect("state_update_capacity is 9, expected 0 to 8", [](Args& a) { a.state_update_capacity = 9; });
  r.expect("state_update_capacity is -1", [](Args& a) { a.state_update_capacity = -1; });
  r.expect("indexshare_state_policy is 'x', expected default, hold or advance",
           [](Args& a) { a.indexshare_state_policy = "x"; });
  r.expect("indexshare_state_policy is advance, expected default or hold with policy_mode qsa",
           [](Args& a) { a.indexshare_state_policy = "advance"; });
  r.expect("max_output_entries is 10, expected 0 or 11 to", [](Args& a) { a.max_output_entries = 10; });
  r.expect("max_output_entries is -1", [](Args& a) { a.max_output_entries = -1; });
  c.csa = true;
  c.fill(1);
  Rejections s(c);
  packed_sparse_attention_indexer_shapes(s.bound.args);
  s.expect("index_topk is required with policy_mode csa", [](Args& a) { a.index_topk.reset(); });
  s.expect("index_topk is 0", [](Args& a) { a.index_topk = 0; });
  s.expect("head_weight_scale is nan", [](Args& a) { a.head_weight_scale = kNan; });
}

TEST(PackedSparseAttentionIndexer, RejectsArgumentsOfTheOtherPolicy) {
  Case c{.past = {3, 6}, .counts = {2, 1}};
  c.fill(1);
  Rejections qsa(c);
  c.csa = true;
  c.fill(1);
  Rejections csa(c);
  const auto with_qsa = [](std::string_view name) { return concat(name, " must be absent with policy_mode qsa"); };
  const auto with_csa = [](std::string_view name) { return concat(name, " must be absent with policy_mode csa"); };
  qsa.expect(with_qsa("index_topk"), [](Args& a) { a.index_topk = 2; });
  qsa.expect(with_qsa("head_weight_scale"), [](Args& a) { a.head_weight_scale = 1.0f; });
  qsa.expect(with_qsa("gate"), [](Args& a) { a.gate = a.query; });
  qsa.expect(with_qsa("position_bias"), [](Args& a) { a.position_bias = a.query; });
  qsa.expect(with_qsa("head_weights"), [](Args& a) { a.head_weights = a.query; });
  qsa.expect(with_qsa("position_ids"), [&](Args& a) { a.position_ids = csa.bound.args.position_ids; });
  qsa.expect(with_qsa("past_gate_buffer"), [](Args& a) { a.past_gate_buffer = a.past_kv_buffer; });
  csa.expect(with_csa("token_budget"), [](Args& a) { a.token_budget = 8; });
  csa.expect(with_csa("state_update_capacity"), [](Args& a) { a.state_update_capacity = 1; });
  csa.expect(with_csa("state_update_capture_count"),
             [](Args& a) { a.state_update_capture_count = a.past_sequence_lengths; });
  csa.expect(with_csa("state_update_active"), [](Args& a) { a.state_update_active = a.past_sequence_lengths; });
}

TEST(PackedSparseAttentionIndexer, RejectsInputs) {
  Case c{.past = {3, 6}, .counts = {2, 1}};
  c.fill(1);
  Rejections r(c);
  Bound other;
  testkit::BoundTensors& t = other.tensors;
  const auto floats = [&](std::vector<int64_t> shape, DType dtype = DType::kF32) {
    return t.output(dtype, std::move(shape));
  };
  r.expect("query is required", [](Args& a) { a.query = {}; });
  r.expect("query has 1 dimensions, expected 2", [](Args& a) { a.query.rank = 1; });
  r.expect("query has type int32", [](Args& a) { a.query.dtype = DType::kI32; });
  r.expect("query has 17 columns, expected a multiple of 8, the head size", [&](Args& a) {
    a.query = floats({3, 17});
  });
  r.expect("query has 8 columns, expected a multiple of 8, the head size, for at least one head and the key",
           [&](Args& a) {
             a.query = floats({3, 8});
             a.key = {};
           });
  r.expect("query has 0 columns", [&](Args& a) { a.query = floats({3, 0}); });
  r.expect("key has shape [2, 8], expected [num_tokens = 3, head_size = 8]", [&](Args& a) { a.key = floats({2, 8}); });
  r.expect("key has shape [3, 16]", [&](Args& a) { a.key = floats({3, 16}); });
  r.expect("key has type float16, expected float32", [&](Args& a) { a.key = floats({3, 8}, DType::kF16); });
  r.expect("query_norm_weight is required", [](Args& a) { a.query_norm_weight = {}; });
  r.expect("query_norm_weight has type bfloat16", [&](Args& a) { a.query_norm_weight = floats({8}, DType::kBF16); });
  r.expect("query_norm_weight is empty", [&](Args& a) { a.query_norm_weight = floats({0}); });
  r.expect("key_norm_weight has shape [7]", [&](Args& a) { a.key_norm_weight = floats({7}); });
  r.expect("cos_cache has 1 dimensions, expected 2 or 3", [](Args& a) { a.cos_cache.rank = 1; });
  r.expect("cos_cache has type float16", [&](Args& a) { a.cos_cache = floats({64, 4}, DType::kF16); });
  r.expect("cos_cache has shape [3, 64, 4], expected 2 tables", [&](Args& a) { a.cos_cache = floats({3, 64, 4}); });
  r.expect("cos_cache has shape [0, 4], expected at least one position", [&](Args& a) {
    a.cos_cache = a.sin_cache = floats({0, 4});
  });
  r.expect("sin_cache has shape [63, 4], expected that of cos_cache, [64, 4]", [&](Args& a) {
    a.sin_cache = floats({63, 4});
  });
  for (const int64_t width : {0, 3, 10}) {
    r.expect(concat("cos_cache has ", width, " columns, expected an even number of at most 8"), [&](Args& a) {
      a.cos_cache = a.sin_cache = floats({64, width});
    });
  }
  r.expect("cumulative_sequence_lengths has shape [2], expected [3]", [&](Args& a) {
    a.cumulative_sequence_lengths = t.integers({0, 3});
  });
  r.expect("cumulative_sequence_lengths has type float32",
           [&](Args& a) { a.cumulative_sequence_lengths = floats({3}); });
  r.expect("past_sequence_lengths has shape [2, 1]", [&](Args& a) {
    a.past_sequence_lengths = t.integers({0, 0}, {2, 1});
  });
  r.expect("past_sequence_lengths has type float32", [&](Args& a) { a.past_sequence_lengths = floats({2}); });
  r.expect("past_key_state has shape [2, 15, 8], expected [batch_size = 2, state_capacity = 16, head_size = 8]",
           [&](Args& a) {
             a.past_key_state = floats({2, 15, 8});
           });
  r.expect("past_key_state has type bfloat16, expected float32", [&](Args& a) {
    a.past_key_state = floats({2, 16, 8}, DType::kBF16);
  });
  r.expect("past_kv_buffer has shape [2, 3, 8], expected [batch_size = 2, 7, head_size = 8]", [&](Args& a) {
    a.past_kv_buffer = floats({2, 3, 8});
  });
  r.expect("past_kv_buffer has type float16", [&](Args& a) { a.past_kv_buffer = floats({2, 7, 8}, DType::kF16); });
  r.expect("past_state_lengths has shape [2], expected [batch_size = 2, 2]", [&](Args& a) {
    a.past_state_lengths = t.integers({0, 0});
  });
  r.expect("state_update_capture_count is required with state_update_capacity",
           [](Args& a) { a.state_update_capacity = 2; });
  r.expect("state_update_capture_count has shape [1]",
           [&](Args& a) { a.state_update_capture_count = t.integers({1}); });
  r.expect("state_update_active has shape [2], expected [1]", [&](Args& a) {
    a.state_update_active = t.integers({1, 1});
  });
  r.expect("state_update_active has type float32, expected int32",
           [&](Args& a) { a.state_update_active = floats({1}); });
  // An f32 state goes with bf16 only.
  c.dtype = DType::kF16;
  c.fill(1);
  Rejections half(c);
  half.expect("past_key_state has type float32, expected float16", [](Args&) {});
  c.dtype = DType::kF32;
  c.csa = true;
  c.fill(1);
  Rejections s(c);
  s.expect("key is required with policy_mode csa", [](Args& a) { a.key = {}; });
  s.expect("key has shape [3, 8], expected [num_tokens = 3, 2 * head_size = 16]", [&](Args& a) {
    a.key = floats({3, 8});
  });
  s.expect("gate is required", [](Args& a) { a.gate = {}; });
  s.expect("gate has shape [3, 8]", [&](Args& a) { a.gate = floats({3, 8}); });
  s.expect("position_bias is required", [](Args& a) { a.position_bias = {}; });
  s.expect("position_bias has shape [3, 16]", [&](Args& a) { a.position_bias = floats({3, 16}); });
  s.expect("head_weights is required", [](Args& a) { a.head_weights = {}; });
  s.expect("head_weights has shape [3, 3]", [&](Args& a) { a.head_weights = floats({3, 3}); });
  s.expect("position_ids is required", [](Args& a) { a.position_ids = {}; });
  s.expect("position_ids has type int32, expected int64", [&](Args& a) { a.position_ids = t.integers({0, 0, 0}); });
  s.expect("position_ids has shape [2]", [](Args& a) { a.position_ids.shape[0] = 2; });
  s.expect("past_gate_buffer is required", [](Args& a) { a.past_gate_buffer = {}; });
  s.expect("past_gate_buffer has shape [2, 7, 8]", [&](Args& a) { a.past_gate_buffer = floats({2, 7, 8}); });
  s.expect("cos_cache has 5 columns, expected 1 to 4, half the head size", [&](Args& a) {
    a.cos_cache = a.sin_cache = floats({64, 5});
  });
}

TEST(PackedSparseAttentionIndexer, RejectsHalfOfIndexSharing) {
  Case c{.past = {3, 6}, .counts = {2, 1}};
  c.fill(1);
  Rejections r(c);
  const Args plain = r.bound.args;
  share(r.bound, 0, 0);
  packed_sparse_attention_indexer_shapes(r.bound.args);
  const std::pair<const char*, TensorView Args::*> inputs[] = {{"indexshare_mode", &Args::indexshare_mode},
                                                               {"merged_indices", &Args::merged_indices},
                                                               {"merged_counts", &Args::merged_counts},
                                                               {"merged_status", &Args::merged_status}};
  for (const auto& input : inputs) {
    r.expect(concat(input.first, " is required with max_output_entries"), [&](Args& a) { a.*input.second = {}; });
    r.expect(concat(input.first, " must be absent when max_output_entries is 0"), [&](Args& a) {
      const TensorView given = a.*input.second;
      a = plain;
      a.*input.second = given;
    });
  }
  testkit::BoundTensors t;
  r.expect("indexshare_mode is 2, expected 0 or 1", [&](Args& a) { a.indexshare_mode = t.integers({2}); });
  r.expect("indexshare_mode has shape [2]", [&](Args& a) { a.indexshare_mode = t.integers({0, 0}); });
  r.expect("query has 3 rows, expected none with indexshare_mode 1",
           [&](Args& a) { a.indexshare_mode = t.integers({1}); });
  r.expect("merged_indices has shape [1, 12]", [&](Args& a) { a.merged_indices = t.integers(Ints(12, 0), {1, 12}); });
  r.expect("merged_indices has shape [0, 11]", [&](Args& a) { a.merged_indices = t.integers({}, {0, 11}); });
  r.expect("merged_counts has shape [1]", [&](Args& a) { a.merged_counts = t.integers({1}); });
  r.expect("merged_status has shape [1]", [&](Args& a) { a.merged_status = t.integers({1}); });
  Rejections reuse(reuse_case(false, false));
  share(reuse.bound, 1, 3);
  packed_sparse_attention_indexer_shapes(reuse.bound.args);
  reuse.expect("merged_counts has shape [2], expected [batch_size = 3]", [&](Args& a) {
    a.merged_counts = t.integers({1, 1});
  });
  reuse.expect("key has shape [3, 8], expected [num_tokens = 0", [&](Args& a) {
    a.key = t.output(DType::kF32, {3, 8});
  });
  Rejections advance(reuse_case(true, true));
  share(advance.bound, 1, 3);
  packed_sparse_attention_indexer_shapes(advance.bound.args);
  advance.expect("key has shape [0, 16], expected [batch_size = 3", [&](Args& a) {
    a.key = t.output(DType::kF32, {0, 16});
  });
  advance.expect("head_weights has shape [3, 2], expected [0, 2]", [&](Args& a) {
    a.head_weights = t.output(DType::kF32, {3, 2});
  });
}

TEST(PackedSparseAttentionIndexer, RejectsOutputsAndWritesNothing) {
  for (const bool csa : {false, true}) {
    Case c{.csa = csa, .past = {3, 6}, .counts = {2, 1}};
    c.fill(1);
    Bound bound;
    bind(c, c.before(), bound);
    run(bound);
    Args& good = bound.args;
    cpu::ThreadPool pool(1);
    Workspace workspace(packed_sparse_attention_indexer_workspace_bytes(good, 1));
    const auto rejects = [&](std::string_view message, const std::function<void(Args&)>& change) {
      Args a = good;
      change(a);
      std::fill_n(good.selected_counts.as<int32_t>(), 3, 77);
      expect_error(ErrorCode::kInvalidArgument, concat("packed_sparse_attention_indexer: ", message),
                   [&] { packed_sparse_attention_indexer(a, {.pool = &pool, .workspace = &workspace}); });
      EXPECT_EQ(bound.values_of(good.selected_counts), Ints(3, 77));
    };
    rejects("selected_indices is required", [](Args& a) { a.selected_indices = {}; });
    rejects("selected_counts has shape [2]", [](Args& a) { a.selected_counts.shape[0] = 2; });
    rejects("present_key_state has type float16", [](Args& a) { a.present_key_state.dtype = DType::kF16; });
    rejects("present_kv_buffer must be contiguous", [](Args& a) { a.present_kv_buffer.strides[0] += 1; });
    rejects("present_state_lengths is required", [](Args& a) { a.present_state_lengths = {}; });
    rejects("state_update is given, but this call has no such output", [](Args& a) { a.state_update = a.query; });
    rejects("indexshare_status is given, but", [](Args& a) { a.indexshare_status = a.selected_counts; });
    rejects("state_status has shape [3], expected [2]", [](Args& a) { a.state_status = a.selected_counts; });
    rejects("past_key_state must be contiguous to be changed in place", [](Args& a) {
      a.past_key_state.data = a.present_key_state.data;
      a.past_key_state.strides[0] += 1;
    });
    if (csa) {
      const auto message = [](std::string_view present, std::string_view past) {
        return concat(present, " shares memory with ", past, ", which policy_mode csa does not allow");
      };
      rejects(message("present_kv_buffer", "past_kv_buffer"), [](Args& a) { a.present_kv_buffer = a.past_kv_buffer; });
      rejects(message("present_kv_buffer", "past_gate_buffer"),
              [](Args& a) { a.present_kv_buffer = a.past_gate_buffer; });
      rejects(message("present_gate_buffer", "past_gate_buffer"),
              [](Args& a) { a.present_gate_buffer = a.past_gate_buffer; });
      rejects("present_gate_buffer is required", [](Args& a) { a.present_gate_buffer = {}; });
    } else {
      rejects("present_gate_buffer is given", [](Args& a) { a.present_gate_buffer = a.present_kv_buffer; });
    }
    // Optional ones may be absent.
    Args a = good;
    a.state_status = {};
    packed_sparse_attention_indexer(a, {.pool = &pool, .workspace = &workspace});
    expect_error(ErrorCode::kInvalidArgument, "no variant \"fast\"", [&] {
      packed_sparse_attention_indexer(a, {.pool = &pool, .workspace = &workspace, .variant = "fast"});
    });
  }
}

}  // namespace
}  // namespace shoal::packed_indexer
