// QK-norm, rotary and the write into the cache; the query is made ready for the dot product. Compiled per instruction
// set; every set gives the bytes of the reference, since nothing here is fused or summed in f32.
#pragma once

#include <cmath>

#include "shoal/ops/paged_attention/paged_attention_plan.h"
#include "shoal/ops/paged_rows.h"

namespace shoal::paged::SHOAL_ISA {

// y = x * (1 / sqrt(mean of x^2 + epsilon)) * weight. The sum is in f64: its order does not show in f32.
inline void normalize_head(const Problem& p, const float* __restrict weight, float* __restrict head) {
  double sums[4] = {0.0, 0.0, 0.0, 0.0};
  for (int64_t i = 0; i < p.head_dim; i += 4) {
    for (int lane = 0; lane < 4; ++lane) {
      sums[lane] += static_cast<double>(head[i + lane]) * static_cast<double>(head[i + lane]);
    }
  }
  const auto mean = static_cast<float>(((sums[0] + sums[1]) + (sums[2] + sums[3])) / static_cast<double>(p.head_dim));
  const auto factor =
      static_cast<float>(1.0 / __builtin_sqrt(static_cast<double>(mean) + static_cast<double>(p.epsilon)));
  for (int64_t i = 0; i < p.head_dim; ++i) {
    head[i] = head[i] * factor * weight[i];
  }
  round_values(p.type, p.head_dim, head);
}

inline void rotate_head(const Problem& p, const float* __restrict cos, const float* __restrict sin,
                        float* __restrict head) {
  const int64_t half = p.rotary_dim / 2;
  float* __restrict x = head + p.rotary_offset;
  if (p.rotary_interleaved) {
    for (int64_t i = 0; i < half; ++i) {
      const float even = x[2 * i];
      const float odd = x[2 * i + 1];
      x[2 * i] = even * cos[i] - odd * sin[i];
      x[2 * i + 1] = odd * cos[i] + even * sin[i];
    }
  } else {
    for (int64_t i = 0; i < half; ++i) {
      const float first = x[i];
      const float second = x[half + i];
      x[i] = first * cos[i] - second * sin[i];
      x[half + i] = second * cos[i] + first * sin[i];
    }
  }
  round_values(p.type, p.rotary_dim, x);
}

struct RotaryRow {
  const float* cos = nullptr;
  const float* sin = nullptr;
};

inline RotaryRow rotary_row(const Plan& plan, int64_t pos, float* scratch) {
  const Problem& p = *plan.problem;
  if (!p.rotary) {
    return {};
  }
  const int64_t half = p.rotary_dim / 2;
  const int64_t row = pos < p.max_pos ? pos : p.max_pos - 1;
  read_values(p.type, p.cos, row, 0, half, scratch);
  read_values(p.type, p.sin, row, 0, half, scratch + plan.k_stride);
  return {scratch, scratch + plan.k_stride};
}

inline void transform_head(const Problem& p, const float* norm_weight, RotaryRow rotary, float* head) {
  if (p.norm) {
    normalize_head(p, norm_weight, head);
  }
  if (p.rotary) {
    rotate_head(p, rotary.cos, rotary.sin, head);
  }
}

// All query heads of a token into plan.query.
inline void prepare_query(const Plan& plan, int64_t token_idx, RotaryRow rotary) {
  const Problem& p = *plan.problem;
  for (int64_t head_idx = 0; head_idx < p.num_heads; ++head_idx) {
    const int64_t kv_head = head_idx / p.group;
    const int64_t row = (kv_head * p.num_tokens + token_idx) * p.group + head_idx % p.group;
    float* __restrict head = plan.query + row * plan.k_stride;
    read_values(p.type, p.query, token_idx, head_idx * p.head_dim, p.head_dim, head);
    transform_head(p, plan.q_norm_weight, rotary, head);
    if (plan.k_fold != nullptr) {
      const float* __restrict fold = plan.k_fold + kv_head * p.head_dim;
      for (int64_t i = 0; i < p.head_dim; ++i) {
        head[i] *= fold[i];
      }
    }
    for (int64_t i = p.head_dim; i < plan.k_stride; ++i) {
      head[i] = 0.0f;
    }
  }
}

// K and V of a token into its slot.
inline void append_token(const Plan& plan, int64_t token_idx, RotaryRow rotary, float* head) {
  const Problem& p = *plan.problem;
  const auto write = [&](const CacheSide& side, const float* scales, int64_t kv_head) {
    write_row(side.store, head, scales == nullptr ? nullptr : scales + kv_head * p.head_dim, p.head_dim,
              side.data + plan.slot[token_idx] * side.token_bytes + kv_head * side.head_bytes);
  };
  for (int64_t kv_head = 0; kv_head < p.num_kv_heads; ++kv_head) {
    read_values(p.type, p.key, token_idx, kv_head * p.head_dim, p.head_dim, head);
    transform_head(p, plan.k_norm_weight, rotary, head);
    write(p.k_cache, plan.k_scales, kv_head);
    if (!p.latent) {
      read_values(p.type, p.value, token_idx, kv_head * p.head_dim, p.head_dim, head);
      write(p.v_cache, plan.v_scales, kv_head);
    }
  }
}

// Part `part` of `num_parts`: a range of the queries, and the pages whose number leaves remainder `part`. A page
// belongs to one part, so that tokens with the same slot are written in order: the last one stays.
void prepare(const Plan& plan, int64_t part, int64_t num_parts) {
  const Problem& p = *plan.problem;
  const int64_t query_begin = p.num_tokens * part / num_parts;
  const int64_t query_end = p.num_tokens * (part + 1) / num_parts;
  float* head = plan.threads[part].head;
  for (int64_t i = 0; i < plan.num_runs; ++i) {
    const Run& run = plan.runs[i];
    for (int64_t t = run.begin; t < run.end; ++t) {
      const bool has_query = t >= query_begin && t < query_end;
      const bool has_slot = plan.slot[t] >= 0 && plan.slot[t] / p.page_size % num_parts == part;
      if (!has_query && !has_slot) {
        continue;
      }
      const RotaryRow rotary = rotary_row(plan, run.pos + (t - run.begin), head + plan.k_stride);
      if (has_query) {
        prepare_query(plan, t, rotary);
      }
      if (has_slot) {
        append_token(plan, t, rotary, head);
      }
    }
  }
}

}  // namespace shoal::paged::SHOAL_ISA
