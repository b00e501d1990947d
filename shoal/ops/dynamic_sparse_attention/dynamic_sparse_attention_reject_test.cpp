// Every call that dynamic_sparse_attention must refuse: by its message, and nothing is written.
#include "shoal/ops/dynamic_sparse_attention/dynamic_sparse_attention_cases.h"
#include "testkit/expect_error.h"

namespace shoal {
namespace {

using dynamic_sparse_cases::Case;
using dynamic_sparse_cases::Step;
using testkit::expect_error;

TensorView shaped(const TensorView& view, std::initializer_list<int64_t> shape) {
  return TensorView(view.data, view.dtype, shape);
}

TensorView typed(const TensorView& view, DType type) { return TensorView(view.data, type, view.dims()); }

struct Rejection {
  const char* expected;
  void (*change)(Step&, DynamicSparseAttentionArgs&);
  const Case* c = nullptr;  // null: the plain one
};

TEST(DynamicSparseAttentionRejects, ByNameAndWritesNothing) {
  using A = DynamicSparseAttentionArgs;
  Case local;
  local.local = true;
  Case int8;
  int8.cache = DType::kI8;
  Case rotary;
  rotary.rotary = 1;
  Case growing;
  growing.past_capacity = 9;
  const Rejection rejections[] = {
      {"dynamic_sparse_attention: num_heads is 0", [](Step&, A& a) { a.num_heads = 0; }},
      {"kv_num_heads is -2", [](Step&, A& a) { a.kv_num_heads = -2; }},
      {"num_heads is 4, expected a multiple of kv_num_heads = 3", [](Step&, A& a) { a.kv_num_heads = 3; }},
      {"is_causal is 0, expected 1", [](Step&, A& a) { a.is_causal = 0; }},
      {"scale is -1", [](Step&, A& a) { a.scale = -1.0f; }},
      {"scale is nan", [](Step&, A& a) { a.scale = std::numeric_limits<float>::quiet_NaN(); }},
      {"qk_norm_epsilon is 0", [](Step&, A& a) { a.qk_norm_epsilon = 0.0f; }},
      {"rotary_offset is 4, expected a multiple of 8", [](Step&, A& a) { a.rotary_offset = 4; }},
      {"rotary_offset is -8", [](Step&, A& a) { a.rotary_offset = -8; }},
      {"attention_mode is 'dense'", [](Step&, A& a) { a.attention_mode = "dense"; }},
      {"selected_kv_source is 'both'", [](Step&, A& a) { a.selected_kv_source = "both"; }},
      {"attention_mode selected_only with selected_kv_source auxiliary is not supported",
       [](Step&, A& a) { a.selected_kv_source = "auxiliary"; }},
      {"attention_mode local_plus_selected with selected_kv_source main is not supported",
       [](Step&, A& a) { a.attention_mode = "local_plus_selected"; }},
      {"local_window_size is 0, expected -1 or more than 0", [](Step&, A& a) { a.local_window_size = 0; }},
      {"local_window_size is -1, expected more than 0", [](Step&, A& a) { a.local_window_size = -1; }, &local},
      {"query is required", [](Step&, A& a) { a.query = {}; }},
      {"query has 2 dimensions, expected 3", [](Step&, A& a) { a.query = shaped(a.query, {4, 64}); }},
      {"query has type int32", [](Step&, A& a) { a.query = typed(a.query, DType::kI32); }},
      {"query dimension 2 is 63, expected a multiple of num_heads = 4",
       [](Step&, A& a) {
         a.query = shaped(a.query, {2, 2, 63});
       }},
      {"query dimension 2 is 64, expected a multiple of num_heads + 2 * kv_num_heads = 12",
       [](Step&, A& a) {
         a.num_heads = 8;
         a.key = a.value = {};
       }},
      {"key is required when value is given", [](Step&, A& a) { a.key = {}; }},
      {"value is required when key is given", [](Step&, A& a) { a.value = {}; }},
      {"key has shape [2, 2, 16]",
       [](Step&, A& a) {
         a.key = shaped(a.key, {2, 2, 16});
       }},
      {"key has type float16, expected float32", [](Step&, A& a) { a.key = typed(a.key, DType::kF16); }},
      {"value has shape [1, 2, 32]",
       [](Step&, A& a) {
         a.value = shaped(a.value, {1, 2, 32});
       }},
      {"value has type int8", [](Step&, A& a) { a.value = typed(a.value, DType::kI8); }},
      {"output_bf16 is 1, expected 0 unless query, key and value are float16",
       [](Step&, A& a) { a.output_bf16 = true; }},
      {"past_key is required when past_value is given", [](Step&, A& a) { a.past_key = {}; }},
      {"past_value is required when past_key is given", [](Step&, A& a) { a.past_value = {}; }},
      {"past_key has shape [2, 1, 12, 16]",
       [](Step&, A& a) {
         a.past_key = shaped(a.past_key, {2, 1, 12, 16});
       }},
      {"past_key has type bfloat16, expected float32 or float16 or int8",
       [](Step&, A& a) { a.past_key = typed(a.past_key, DType::kBF16); }},
      {"past_key has type uint8", [](Step&, A& a) { a.past_key = typed(a.past_key, DType::kU8); }},
      {"past_key must be contiguous", [](Step&, A& a) { a.past_key.strides[0] += 1; }},
      {"past_value has shape [2, 2, 11, 16]",
       [](Step&, A& a) {
         a.past_value = shaped(a.past_value, {2, 2, 11, 16});
       }},
      {"past_value has type float16, expected float32",
       [](Step&, A& a) { a.past_value = typed(a.past_value, DType::kF16); }},
      {"total_sequence_length is required", [](Step&, A& a) { a.total_sequence_length = {}; }},
      {"total_sequence_length has shape [2], expected one element",
       [](Step&, A& a) { a.total_sequence_length = shaped(a.seqlens_k, {2}); }},
      {"total_sequence_length has type int64",
       [](Step&, A& a) { a.total_sequence_length = typed(a.total_sequence_length, DType::kI64); }},
      {"total_sequence_length is 1, expected at least the sequence length = 2", [](Step& s, A&) { s.total = 1; }},
      {"total_sequence_length is -3", [](Step& s, A&) { s.total = -3; }},
      {"key_scale must be absent: the cache is not int8", [](Step& s, A& a) { a.key_scale = s.sink; }},
      {"key_scale is required with an int8 cache", [](Step&, A& a) { a.key_scale = {}; }, &int8},
      {"value_scale is required with an int8 cache", [](Step&, A& a) { a.value_scale = {}; }, &int8},
      {"value_scale has shape [31], expected 32 elements",
       [](Step&, A& a) { a.value_scale = shaped(a.value_scale, {31}); }, &int8},
      {"key_scale has type float16", [](Step&, A& a) { a.key_scale = typed(a.key_scale, DType::kF16); }, &int8},
      {"auxiliary_value must be absent without auxiliary_key", [](Step& s, A& a) { a.auxiliary_value = s.past_key; }},
      {"auxiliary_key must be absent with selected_kv_source main",
       [](Step& s, A& a) { a.auxiliary_key = s.auxiliary_key; }},
      {"auxiliary_key is required with selected_kv_source auxiliary",
       [](Step&, A& a) { a.auxiliary_key = a.auxiliary_value = {}; }, &local},
      {"auxiliary_value is required with auxiliary_kv_shared = 0", [](Step&, A& a) { a.auxiliary_value = {}; }, &local},
      {"auxiliary_key has shape [2, 1, 12, 16]",
       [](Step&, A& a) {
         a.auxiliary_key = shaped(a.auxiliary_key, {2, 1, 12, 16});
       },
       &local},
      {"auxiliary_value has shape [2, 2, 5, 16]",
       [](Step&, A& a) {
         a.auxiliary_value = shaped(a.auxiliary_value, {2, 2, 5, 16});
       },
       &local},
      {"auxiliary_key has type int8", [](Step&, A& a) { a.auxiliary_key = typed(a.auxiliary_key, DType::kI8); }, &local},
      {"selected_indices is required", [](Step&, A& a) { a.selected_indices = {}; }},
      {"selected_indices has shape [2, 2, 3]",
       [](Step&, A& a) {
         a.selected_indices = shaped(a.selected_indices, {2, 2, 3});
       }},
      {"selected_indices has shape [3, 3], expected [batch_size * sequence_length = 4",
       [](Step&, A& a) {
         a.selected_indices = shaped(a.selected_indices, {3, 3});
       }},
      {"selected_counts has shape [2, 2]",
       [](Step&, A& a) {
         a.selected_counts = shaped(a.selected_counts, {2, 2});
       }},
      {"selected_counts has type int64", [](Step&, A& a) { a.selected_counts = typed(a.selected_counts, DType::kI64); }},
      {"seqlens_k is required", [](Step&, A& a) { a.seqlens_k = {}; }},
      {"seqlens_k has shape [1]", [](Step&, A& a) { a.seqlens_k = shaped(a.seqlens_k, {1}); }},
      {"committed_length has 3 elements, expected 1 or batch_size = 2",
       [](Step&, A& a) { a.committed_length = shaped(a.selected_counts, {3}); }},
      {"committed_length has 2 dimensions, expected 1",
       [](Step&, A& a) {
         a.committed_length = shaped(a.seqlens_k, {2, 1});
       }},
      {"cos_cache is required when sin_cache", [](Step& s, A& a) { a.sin_cache = s.sin; }},
      {"sin_cache is required when cos_cache", [](Step& s, A& a) { a.cos_cache = s.cos; }},
      {"cos_cache and sin_cache are required with do_rotary = 1", [](Step&, A& a) { a.do_rotary = true; }},
      {"sin_cache has shape [19, 4]",
       [](Step&, A& a) {
         a.sin_cache = shaped(a.sin_cache, {19, 4});
       },
       &rotary},
      {"rotary_offset + rotary_dim is 24, expected at most head_size = 16", [](Step&, A& a) { a.rotary_offset = 16; },
       &rotary},
      {"position_ids has shape [4]", [](Step& s, A& a) { a.position_ids = TensorView(s.past_key.data, DType::kI64, {4}); }},
      {"position_ids has type int32",
       [](Step& s, A& a) {
         a.position_ids = TensorView(s.past_key.data, DType::kI32, {2, 2});
       }},
      {"q_norm_weight is required when k_norm_weight", [](Step& s, A& a) { a.k_norm_weight = s.k_norm; }},
      {"k_norm_weight is required when q_norm_weight", [](Step& s, A& a) { a.q_norm_weight = s.q_norm; }},
      {"k_norm_weight has shape [4]",
       [](Step& s, A& a) {
         a.q_norm_weight = s.q_norm;
         a.k_norm_weight = s.sink;
       }},
      {"head_sink has shape [16], expected [num_heads = 4", [](Step& s, A& a) { a.head_sink = s.q_norm; }},
      {"output is required", [](Step&, A& a) { a.output = {}; }},
      {"output has shape [2, 2, 32]",
       [](Step&, A& a) {
         a.output = shaped(a.output, {2, 2, 32});
       }},
      {"output has type float16", [](Step&, A& a) { a.output = typed(a.output, DType::kF16); }},
      {"present_key is required", [](Step&, A& a) { a.present_key = {}; }},
      {"present_value has shape [2, 2, 11, 16]",
       [](Step&, A& a) {
         a.present_value = shaped(a.present_value, {2, 2, 11, 16});
       }},
      {"present_key must be past_key itself", [](Step&, A& a) { a.present_key = a.past_value; }},
      {"present_value must not be past_value", [](Step&, A& a) { a.present_value.data = a.past_value.data; }, &growing},
      {"validation_status has shape [2]",
       [](Step&, A& a) { a.validation_status = TensorView(a.validation_status.data, DType::kI32, {2}); }},
      {"seqlens_k is on another device", [](Step&, A& a) { a.seqlens_k.device.type = DeviceType::kCuda; }},
  };
  cpu::ThreadPool pool(1);
  for (const Rejection& rejection : rejections) {
    SCOPED_TRACE(rejection.expected);
    Step step(rejection.c == nullptr ? Case{} : *rejection.c);
    DynamicSparseAttentionArgs a = step.args();
    Workspace workspace(dynamic_sparse_attention_workspace_bytes(a, 1));
    const auto bytes_of = [](const TensorView& view) {
      return std::vector<uint8_t>(view.as<uint8_t>(), view.as<uint8_t>() + view.num_bytes());
    };
    const auto before = bytes_of(step.past_key);
    rejection.change(step, a);
    expect_error(ErrorCode::kInvalidArgument, rejection.expected, [&] {
      dynamic_sparse_attention(a, {&pool, &workspace, cpu::default_isa(), ""});
    });
    EXPECT_TRUE(bytes_of(step.past_key) == before);
    const auto output = bytes_of(step.output);
    EXPECT_TRUE(std::all_of(output.begin(), output.end(), [](uint8_t x) { return x == 0xff; }));
    EXPECT_EQ(step.status, -1);
  }
}

TEST(DynamicSparseAttentionRejects, UnknownVariant) {
  Step step(Case{});
  cpu::ThreadPool pool(1);
  Workspace workspace(dynamic_sparse_attention_workspace_bytes(step.args(), 1));
  expect_error(ErrorCode::kInvalidArgument, "fast", [&] {
    dynamic_sparse_attention(step.args(), {&pool, &workspace, cpu::default_isa(), "fast"});
  });
}

}  // namespace
}  // namespace shoal
