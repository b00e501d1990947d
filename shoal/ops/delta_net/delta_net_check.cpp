// Checks of GatedDeltaNet and LinearAttention, in the order of their contracts, and the problems that follow.
#include "shoal/ops/delta_net/delta_net_check.h"

#include <cmath>

#include "shoal/base/text.h"
#include "shoal/tensor/matcher.h"

namespace shoal::delta {
namespace {

constexpr std::string_view kNet = "gated_delta_net";
constexpr std::string_view kLinear = "linear_attention";
constexpr int64_t kMaxSlots = 8;

struct Rule {
  bool decay;
  bool retrieval;
};

Rule rule_of(std::string_view op, std::string_view name) {
  require(name == "linear" || name == "gated" || name == "delta" || name == "gated_delta", op, ": update_rule is '",
          printable(name), "', expected linear, gated, delta or gated_delta");
  return {name == "gated" || name == "gated_delta", name == "delta" || name == "gated_delta"};
}

float scale_of(std::string_view op, float scale, int64_t k_size) {
  require(std::isfinite(scale), op, ": scale is ", scale, ", expected a finite value (0: 1 / sqrt(head_size_qk))");
  return scale == 0.0f ? 1.0f / std::sqrt(static_cast<float>(k_size)) : scale;
}

// The members of `view` with the token axis spelled as one or two axes before the others.
Rows rows_of(const TensorView& view, bool with_batch_axis, int head_axes, int64_t head_size) {
  const int lead = with_batch_axis ? 2 : 1;
  Rows rows{view.data, view.dtype, with_batch_axis ? view.stride(0) : 0, view.stride(lead - 1), 0, 0};
  if (head_axes == 2) {
    rows.head = view.stride(lead);
    rows.inner = view.stride(lead + 1);
  } else {  // heads side by side in one axis
    rows.inner = view.stride(lead);
    rows.head = head_size * rows.inner;
  }
  return rows;
}

// Skips the first `count` elements of the last axis.
Rows from_element(Rows rows, int64_t count, int64_t head_size) {
  rows.data = static_cast<std::byte*>(rows.data) + count * rows.inner * static_cast<int64_t>(size_of(rows.dtype));
  rows.head = head_size * rows.inner;
  return rows;
}

void check_attributes(const GatedDeltaNetArgs& a) {
  rule_of(kNet, a.update_rule);
  require(a.gate_activation == "none" || a.gate_activation == "softplus" || a.gate_activation == "qwen" ||
              a.gate_activation == "sigmoid" || a.gate_activation == "kda",
          kNet, ": gate_activation is '", printable(a.gate_activation),
          "', expected none, softplus (qwen) or sigmoid (kda)");
  require(a.beta_activation == "none" || a.beta_activation == "sigmoid", kNet, ": beta_activation is '",
          printable(a.beta_activation), "', expected none or sigmoid");
  require(a.qk_l2_norm == 0 || a.qk_l2_norm == 1, kNet, ": qk_l2_norm is ", a.qk_l2_norm, ", expected 0 or 1");
  require(a.chunk_size > 0, kNet, ": chunk_size is ", a.chunk_size, ", expected more than 0");
  require(std::isfinite(a.gate_lower_bound) && a.gate_lower_bound < 0.0f, kNet, ": gate_lower_bound is ",
          a.gate_lower_bound, ", expected a finite value below 0");
  require(a.state_update_capacity >= 0 && a.state_update_capacity <= kMaxSlots, kNet, ": state_update_capacity is ",
          a.state_update_capacity, ", expected 0 to 8");
}

// Sizes of a call, and whether its token axis is spelled [batch, tokens].
struct Sizes {
  bool with_batch_axis = false;
  int64_t num_tokens = 0;  // of all sequences
  int64_t q_heads = 0;
  int64_t v_heads = 0;
  int64_t k_size = 0;
  int64_t v_size = 0;
  int64_t num_seqs = 0;
};

Sizes sizes_of_packed(const GatedDeltaNetArgs& a) {
  require(a.query.rank == 2 || a.query.rank == 3, kNet, ": query has ", a.query.rank,
          " dimensions, expected 2 or 3 without key and value (packed QKV)");
  Matcher(kNet).tensor("initial_state", a.initial_state).rank(4);
  Sizes s;
  s.with_batch_axis = a.query.rank == 3;
  s.v_heads = a.initial_state.dim(1);
  s.v_size = a.initial_state.dim(2);
  s.k_size = a.initial_state.dim(3);
  const int64_t width = a.query.dim(a.query.rank - 1);
  require(s.v_heads > 0 && s.v_size > 0 && s.k_size > 0, kNet, ": initial_state has shape ",
          shape_text(a.initial_state.dims()), ", expected no empty head");
  const int64_t rest = width - s.v_heads * s.v_size;
  require(rest > 0 && rest % (2 * s.k_size) == 0, kNet, ": query has ", width,
          " packed channels, expected 2 * num_heads_q * head_size_qk + num_heads_v * head_size_v with head_size_qk = ",
          s.k_size, ", num_heads_v = ", s.v_heads, ", head_size_v = ", s.v_size, " (from initial_state)");
  s.q_heads = rest / (2 * s.k_size);
  return s;
}

Sizes sizes_of_separate(const GatedDeltaNetArgs& a) {
  require(a.query.rank == 3 || a.query.rank == 4, kNet, ": query has ", a.query.rank, " dimensions, expected 3 or 4");
  Sizes s;
  s.with_batch_axis = a.query.rank == 4;
  const int lead = a.query.rank - 2;
  s.q_heads = a.query.dim(lead);
  s.k_size = a.query.dim(lead + 1);
  require(s.q_heads > 0 && s.k_size > 0, kNet, ": query has shape ", shape_text(a.query.dims()),
          ", expected no empty head");
  check_output(kNet, "key", a.key, {a.query.dtype, {a.query.dims().begin(), a.query.dims().end()}}, a.query.device);
  Matcher(kNet).tensor("value", a.value).rank(a.query.rank).type(a.query.dtype).device(a.query.device);
  s.v_heads = a.value.dim(lead);
  s.v_size = a.value.dim(lead + 1);
  for (int axis = 0; axis < lead; ++axis) {
    require(a.value.dim(axis) == a.query.dim(axis), kNet, ": value has shape ", shape_text(a.value.dims()),
            ", expected the tokens of query, whose shape is ", shape_text(a.query.dims()));
  }
  require(s.v_heads > 0 && s.v_size > 0, kNet, ": value has shape ", shape_text(a.value.dims()),
          ", expected no empty head");
  return s;
}

int64_t num_seqs_of(const GatedDeltaNetArgs& a, const Sizes& s) {
  if (a.cu_seqlens) {
    require(!s.with_batch_axis, kNet, ": cu_seqlens needs query without a batch axis, but it has ", a.query.rank,
            " dimensions");
    Matcher(kNet).tensor("cu_seqlens", a.cu_seqlens).type(DType::kI32).rank(1).device(a.query.device);
    require(a.cu_seqlens.dim(0) >= 2, kNet, ": cu_seqlens has shape ", shape_text(a.cu_seqlens.dims()),
            ", expected [batch_size + 1] with at least one sequence");
    return a.cu_seqlens.dim(0) - 1;
  }
  if (s.with_batch_axis) {
    return a.query.dim(0);
  }
  require(static_cast<bool>(a.initial_state), kNet,
          ": initial_state is required: without cu_seqlens and without a batch axis only it tells the batch size");
  Matcher(kNet).tensor("initial_state", a.initial_state).rank(4);
  const int64_t num_seqs = a.initial_state.dim(0);
  require(num_seqs > 0 && s.num_tokens % num_seqs == 0, kNet, ": query has ", s.num_tokens,
          " tokens, expected a multiple of the batch size ", num_seqs, " (from initial_state)");
  return num_seqs;
}

Sizes sizes_of(const GatedDeltaNetArgs& a) {
  Matcher(kNet).tensor("query", a.query).types(kFloats);
  require(static_cast<bool>(a.key) == static_cast<bool>(a.value), kNet, ": ", a.key ? "value" : "key",
          " is required (both absent: packed QKV)");
  Sizes s = a.key ? sizes_of_separate(a) : sizes_of_packed(a);
  require(s.v_heads % s.q_heads == 0, kNet, ": ", a.key ? "value" : "initial_state", " has ", s.v_heads,
          " heads, expected a multiple of the ", s.q_heads, " of query");
  s.num_tokens = a.query.dim(0) * (s.with_batch_axis ? a.query.dim(1) : 1);
  require(s.num_tokens > 0, kNet, ": query has shape ", shape_text(a.query.dims()), ", expected at least one token");
  s.num_seqs = num_seqs_of(a, s);
  check_output(kNet, "initial_state", a.initial_state, {DType::kF32, {s.num_seqs, s.v_heads, s.v_size, s.k_size}},
               a.query.device, /*optional=*/true);
  return s;
}

// [tokens] or [batch, tokens], then the given axes.
std::vector<int64_t> token_shape(const GatedDeltaNetArgs& a, const Sizes& s, std::initializer_list<int64_t> inner) {
  std::vector<int64_t> shape = {a.query.dim(0)};
  if (s.with_batch_axis) {
    shape.push_back(a.query.dim(1));
  }
  shape.insert(shape.end(), inner);
  return shape;
}

void check_gates(const GatedDeltaNetArgs& a, const Sizes& s, Problem& p) {
  const Rule rule = rule_of(kNet, a.update_rule);
  for (const auto& [name, view, used] :
       {std::tuple<std::string_view, const TensorView*, bool>{"decay", &a.decay, rule.decay},
        {"beta", &a.beta, rule.retrieval}}) {
    require(static_cast<bool>(*view) == used, kNet, ": ", name, used ? " is required" : " must be absent",
            " with update_rule ", a.update_rule);
    if (used) {
      require(view->dtype == DType::kF32 || view->dtype == a.query.dtype, kNet, ": ", name, " has type ",
              to_string(view->dtype), ", expected float32 or the type of query, ", to_string(a.query.dtype));
    }
  }
  if (rule.decay) {
    const int lead = s.with_batch_axis ? 2 : 1;
    p.decay_per_key = a.decay.rank == lead + 2;
    check_output(
        kNet, "decay", a.decay,
        {a.decay.dtype, p.decay_per_key ? token_shape(a, s, {s.v_heads, s.k_size}) : token_shape(a, s, {s.v_heads})},
        a.query.device);
    p.decay = rows_of(a.decay, s.with_batch_axis, p.decay_per_key ? 2 : 1, 1);
  }
  if (rule.retrieval) {
    check_output(kNet, "beta", a.beta, {rule.decay ? a.decay.dtype : a.beta.dtype, token_shape(a, s, {s.v_heads})},
                 a.query.device);
    p.beta = rows_of(a.beta, s.with_batch_axis, 1, 1);
    p.beta_sigmoid = a.beta_activation == "sigmoid";
  }
  if (a.gate_activation == "none") {
    require(!a.a_log, kNet, ": a_log must be absent with gate_activation none");
    require(!a.dt_bias, kNet, ": dt_bias must be absent with gate_activation none");
    return;
  }
  check_output(kNet, "a_log", a.a_log, {DType::kF32, {s.v_heads}}, a.query.device);
  require(static_cast<bool>(a.dt_bias), kNet, ": dt_bias is required with gate_activation ", a.gate_activation);
  Matcher(kNet).tensor("dt_bias", a.dt_bias).type(DType::kF32).device(a.query.device);
  const bool flat = a.dt_bias.rank == 1;
  const bool per_head = flat && a.dt_bias.dim(0) == s.v_heads;
  const bool per_key =
      p.decay_per_key && ((flat && a.dt_bias.dim(0) == s.v_heads * s.k_size) ||
                          (a.dt_bias.rank == 2 && a.dt_bias.dim(0) == s.v_heads && a.dt_bias.dim(1) == s.k_size));
  require(per_head || per_key, kNet, ": dt_bias has shape ", shape_text(a.dt_bias.dims()), ", expected [", s.v_heads,
          p.decay_per_key ? concat("], [", s.v_heads, ", ", s.k_size, "] or [", s.v_heads * s.k_size) : std::string(),
          "]", p.decay_per_key ? "" : " (per key only with a decay per key)");
  p.gate = a.gate_activation == "softplus" || a.gate_activation == "qwen" ? Gate::kSoftplus : Gate::kSigmoid;
  p.gate_lower_bound = a.gate_lower_bound;
  p.a_log = a.a_log.as<float>();
  p.a_log_head = a.a_log.stride(0);
  p.dt_bias = a.dt_bias.as<float>();
  p.dt_bias_head = a.dt_bias.stride(0) * (flat && !per_head ? s.k_size : 1);
  p.dt_bias_inner = per_head ? 0 : a.dt_bias.stride(a.dt_bias.rank - 1);
}

void check_capture(const GatedDeltaNetArgs& a, const Sizes& s, Problem& p) {
  if (a.state_update_capacity > 0) {
    require(static_cast<bool>(a.capture_count), kNet, ": capture_count is required with state_update_capacity ",
            a.state_update_capacity);
    check_output(kNet, "capture_count", a.capture_count, {DType::kI32, {s.num_seqs}}, a.query.device);
    p.capture_capacity = a.state_update_capacity;
    p.capture_count = a.capture_count.as<int32_t>();
    p.capture_count_stride = a.capture_count.stride(0);
  } else {
    require(!a.capture_count, kNet, ": capture_count must be absent when state_update_capacity is 0");
  }
  if (a.state_update_active) {
    const TensorView& active = a.state_update_active;
    require(active.rank == 0 || (active.rank == 1 && active.dim(0) == 1), kNet, ": state_update_active has shape ",
            shape_text(active.dims()), ", expected [1]");
    require(active.dtype == DType::kI32, kNet, ": state_update_active has type ", to_string(active.dtype),
            ", expected int32");
    require(active.device.type == DeviceType::kCpu, kNet, ": state_update_active must be on the host");
    p.capture_active = *active.as<int32_t>() != 0;
  }
}

States states_of(const TensorView& view, int axis, bool key_major) {
  return {view.data,
          view.dtype,
          view.stride(axis),
          view.stride(axis + 1),
          view.stride(axis + (key_major ? 3 : 2)),
          view.stride(axis + (key_major ? 2 : 3))};
}

}  // namespace

Problem problem_of(const GatedDeltaNetArgs& a, GatedDeltaNetShapes& shapes) {
  check_attributes(a);
  const Sizes s = sizes_of(a);
  Problem p;
  p.num_seqs = s.num_seqs;
  p.num_tokens = a.cu_seqlens ? s.num_tokens : s.num_tokens / s.num_seqs;
  p.num_heads = s.v_heads;
  p.states_per_query = p.states_per_key = s.v_heads / s.q_heads;
  p.k_size = s.k_size;
  p.v_size = s.v_size;
  p.scale = scale_of(kNet, a.scale, s.k_size);
  p.normalise = a.qk_l2_norm == 1;
  if (a.key) {
    p.query = rows_of(a.query, s.with_batch_axis, 2, 0);
    p.key = rows_of(a.key, s.with_batch_axis, 2, 0);
    p.value = rows_of(a.value, s.with_batch_axis, 2, 0);
  } else {
    const Rows packed = rows_of(a.query, s.with_batch_axis, 1, 0);
    p.query = from_element(packed, 0, s.k_size);
    p.key = from_element(packed, s.q_heads * s.k_size, s.k_size);
    p.value = from_element(packed, 2 * s.q_heads * s.k_size, s.v_size);
  }
  check_gates(a, s, p);
  check_capture(a, s, p);
  if (a.initial_state) {
    p.initial = states_of(a.initial_state, 0, /*key_major=*/false);
  }
  if (a.cu_seqlens) {
    p.offsets = a.cu_seqlens.as<int32_t>();
    p.offsets_stride = a.cu_seqlens.stride(0);
  } else if (!s.with_batch_axis) {  // one axis for all: sequence b starts at its b-th part
    for (Rows* rows : {&p.query, &p.key, &p.value, &p.decay, &p.beta}) {
      rows->sequence = p.num_tokens * rows->token;
    }
  }
  const int64_t width = p.decay_width() + s.q_heads * s.k_size + s.v_heads * s.v_size;
  shapes.output = {a.query.dtype, token_shape(a, s, {s.v_heads, s.v_size})};
  shapes.final_state = {DType::kF32, {s.num_seqs, s.v_heads, s.v_size, s.k_size}};
  shapes.state_update = {DType::kF32, {s.num_seqs, a.state_update_capacity * width}, a.state_update_capacity > 0};
  return p;
}

void add_outputs(const GatedDeltaNetArgs& a, const GatedDeltaNetShapes& shapes, Problem& p) {
  check_output(kNet, "output", a.output, shapes.output, a.query.device);
  check_output(kNet, "final_state", a.final_state, shapes.final_state, a.query.device, /*optional=*/true);
  check_output(kNet, "state_update", a.state_update, shapes.state_update, a.query.device, /*optional=*/true);
  const bool with_batch_axis = a.output.rank == 4;
  p.output = rows_of(a.output, with_batch_axis, 2, 0);
  if (!with_batch_axis && p.offsets == nullptr) {
    p.output.sequence = p.num_tokens * p.output.token;
  }
  if (a.final_state) {
    p.final = states_of(a.final_state, 0, /*key_major=*/false);
  }
  if (a.state_update) {
    p.capture = a.state_update.as<float>();
    p.capture_sequence = a.state_update.stride(0);
    p.capture_inner = a.state_update.stride(1);
  }
}

Problem problem_of(const LinearAttentionArgs& a, LinearAttentionShapes& shapes) {
  const Rule rule = rule_of(kLinear, a.update_rule);
  require(a.q_num_heads > 0, kLinear, ": q_num_heads is ", a.q_num_heads, ", expected more than 0");
  require(a.kv_num_heads > 0, kLinear, ": kv_num_heads is ", a.kv_num_heads, ", expected more than 0");
  require(a.q_num_heads % a.kv_num_heads == 0 || a.kv_num_heads % a.q_num_heads == 0, kLinear, ": q_num_heads is ",
          a.q_num_heads, ", expected a multiple or a divisor of kv_num_heads = ", a.kv_num_heads);
  require(a.state_window >= 0 && a.state_window <= kMaxSlots, kLinear, ": state_window is ", a.state_window,
          ", expected 0 to 8");
  const Matcher match(kLinear);
  match.tensor("query", a.query).types(kFloats).rank(3);
  const DType dtype = a.query.dtype;
  const Device device = a.query.device;
  const int64_t batch = a.query.dim(0);
  const int64_t num_tokens = a.query.dim(1);
  require(a.query.dim(2) > 0 && a.query.dim(2) % a.q_num_heads == 0, kLinear, ": query has ", a.query.dim(2),
          " channels, expected a positive multiple of q_num_heads = ", a.q_num_heads);
  Problem p;
  p.k_size = a.query.dim(2) / a.q_num_heads;
  check_output(kLinear, "key", a.key, {dtype, {batch, num_tokens, a.kv_num_heads * p.k_size}}, device);
  match.tensor("value", a.value)
      .shape({batch, num_tokens, a.value.rank == 3 ? a.value.dim(2) : 0})
      .type(dtype)
      .device(device);
  require(a.value.dim(2) > 0 && a.value.dim(2) % a.kv_num_heads == 0, kLinear, ": value has ", a.value.dim(2),
          " channels, expected a positive multiple of kv_num_heads = ", a.kv_num_heads);
  p.v_size = a.value.dim(2) / a.kv_num_heads;
  p.num_seqs = batch;
  p.num_tokens = num_tokens;
  p.num_heads = a.kv_num_heads;
  p.num_queries = std::max<int64_t>(1, a.q_num_heads / a.kv_num_heads);
  p.states_per_query = std::max<int64_t>(1, a.kv_num_heads / a.q_num_heads);
  p.scale = scale_of(kLinear, a.scale, p.k_size);
  p.query = rows_of(a.query, true, 1, p.k_size);
  p.key = rows_of(a.key, true, 1, p.k_size);
  p.value = rows_of(a.value, true, 1, p.v_size);
  shapes.present_state = {a.past_state ? a.past_state.dtype : dtype, {batch, a.kv_num_heads, p.k_size, p.v_size}};
  if (a.state_window > 0) {
    shapes.present_state.shape.insert(shapes.present_state.shape.begin(), a.state_window);
    p.num_windows = a.state_window;
  }
  if (a.past_state) {
    match.tensor("past_state", a.past_state).types(kFloats);
    check_output(kLinear, "past_state", a.past_state, shapes.present_state, device);
    p.initial = states_of(a.past_state, a.state_window > 0 ? 1 : 0, /*key_major=*/true);
    if (a.state_window > 0) {
      p.initial.data = a.past_state.as<std::byte>() + (a.state_window - 1) * a.past_state.stride(0) *
                                                          static_cast<int64_t>(size_of(a.past_state.dtype));
    }
  }
  if (rule.decay) {
    require(static_cast<bool>(a.decay), kLinear, ": decay is required with update_rule ", a.update_rule);
    p.decay_per_key = a.decay.rank == 3 && a.decay.dim(2) != a.kv_num_heads;
    check_output(kLinear, "decay", a.decay,
                 {dtype, {batch, num_tokens, a.kv_num_heads * (p.decay_per_key ? p.k_size : 1)}}, device);
    p.decay = rows_of(a.decay, true, 1, p.decay_per_key ? p.k_size : 1);
  }
  if (rule.retrieval) {
    require(static_cast<bool>(a.beta), kLinear, ": beta is required with update_rule ", a.update_rule);
    const bool shared = a.beta.rank == 3 && a.beta.dim(2) == 1;
    check_output(kLinear, "beta", a.beta, {dtype, {batch, num_tokens, shared ? 1 : a.kv_num_heads}}, device);
    p.beta = rows_of(a.beta, true, 1, shared ? 0 : 1);
  }
  shapes.output = {dtype, {batch, num_tokens, std::max(a.q_num_heads, a.kv_num_heads) * p.v_size}};
  return p;
}

void add_outputs(const LinearAttentionArgs& a, const LinearAttentionShapes& shapes, Problem& p) {
  check_output(kLinear, "output", a.output, shapes.output, a.query.device);
  check_output(kLinear, "present_state", a.present_state, shapes.present_state, a.query.device);
  p.output = rows_of(a.output, true, 1, p.v_size);
  p.final = states_of(a.present_state, a.state_window > 0 ? 1 : 0, /*key_major=*/true);
  p.window_stride = a.state_window > 0 ? a.present_state.stride(0) : 0;
}

}  // namespace shoal::delta
