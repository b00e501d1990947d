// The definition of right: one row at a time, scores and sums in f64. Rounding to T and to the cache types as the
// contract has it, in f32.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "shoal/ops/paged_problem.h"

namespace shoal::paged {
namespace {

void normalize(const Problem& p, const Matrix& weight, std::vector<float>& head) {
  std::vector<float> w(head.size());
  load_row(p.type, weight, 0, 0, p.head_dim, w.data());
  norm_head(p, w.data(), head.data());
}

void rotate(const Problem& p, int64_t pos, std::vector<float>& head) {
  const int64_t half = p.rotary_dim / 2;
  std::vector<float> cos(static_cast<size_t>(half));
  std::vector<float> sin(static_cast<size_t>(half));
  const int64_t row = std::min(pos, p.max_pos - 1);
  load_row(p.type, p.cos, row, 0, half, cos.data());
  load_row(p.type, p.sin, row, 0, half, sin.data());
  turn_head(p, cos.data(), sin.data(), head.data());
}

std::vector<float> load_head(const Problem& p, const Matrix& matrix, int64_t token_idx, int64_t head_idx) {
  std::vector<float> head(static_cast<size_t>(p.head_dim));
  load_row(p.type, matrix, token_idx, head_idx * p.head_dim, p.head_dim, head.data());
  return head;
}

std::vector<float> query_head(const Problem& p, int64_t token_idx, int64_t head_idx, int64_t pos) {
  std::vector<float> head = load_head(p, p.query, token_idx, head_idx);
  if (p.norm) {
    normalize(p, p.q_norm_weight, head);
  }
  if (p.rotary) {
    rotate(p, pos, head);
  }
  return head;
}

std::vector<float> scale_table(const Problem& p, const CacheSide& side) {
  std::vector<float> scales(static_cast<size_t>(p.num_kv_heads * p.head_dim), 1.0f);
  if (side.quantized()) {
    fill_scales(p, side, scales.data());
  }
  return scales;
}

void append(const Problem& p, int64_t token_idx, int64_t slot, int64_t pos, const std::vector<float>& k_scales,
            const std::vector<float>& v_scales) {
  for (int64_t head_idx = 0; head_idx < p.num_kv_heads; ++head_idx) {
    std::vector<float> k = load_head(p, p.key, token_idx, head_idx);
    if (p.norm) {
      normalize(p, p.k_norm_weight, k);
    }
    if (p.rotary) {
      rotate(p, pos, k);
    }
    const auto put = [&](const CacheSide& side, const std::vector<float>& values, const std::vector<float>& scales) {
      encode_row(side.store, values.data(), scales.data() + head_idx * p.head_dim, p.head_dim,
                 side.data + slot * side.token_bytes + head_idx * side.head_bytes);
    };
    put(p.k_cache, k, k_scales);
    if (!p.latent) {
      put(p.v_cache, load_head(p, p.value, token_idx, head_idx), v_scales);
    }
  }
}

void attend(const Problem& p, int64_t seq_idx, int64_t token_idx, int64_t head_idx, int64_t pos,
            const std::vector<float>& k_scales, const std::vector<float>& v_scales) {
  const int64_t kv_head = head_idx / p.group;
  const std::vector<float> q = query_head(p, token_idx, head_idx, pos);
  const KeyRange range = key_range(p, sequence(p, seq_idx), pos);
  std::vector<double> logits;
  std::vector<int64_t> slots;
  std::vector<float> codes(static_cast<size_t>(p.head_dim));
  double max = -std::numeric_limits<double>::infinity();
  for (int64_t k = range.begin; k < range.end; ++k) {
    const int64_t page = page_of(p, seq_idx, k);
    if (page < 0) {
      continue;
    }
    const int64_t slot = page * p.page_size + k % p.page_size;
    decode_codes(p.k_cache.store, p.k_cache.data + slot * p.k_cache.token_bytes + kv_head * p.k_cache.head_bytes,
                 p.head_dim, codes.data());
    double dot = 0.0;
    for (size_t i = 0; i < codes.size(); ++i) {
      const double scale = k_scales[static_cast<size_t>(kv_head * p.head_dim) + i];
      dot += static_cast<double>(q[i]) * (codes[i] * scale);
    }
    double x = p.scale * dot;
    if (p.softcap > 0.0f) {
      x = p.softcap * std::tanh(dot * (static_cast<double>(p.scale) / p.softcap));
    }
    logits.push_back(x);
    slots.push_back(slot);
    max = std::max(max, x);
  }
  double sum = 0.0;
  if (p.sink.data != nullptr) {
    float sink = 0.0f;
    load_row(p.type, p.sink, 0, head_idx, 1, &sink);
    sum = std::exp(sink - max);  // infinite when the sink outweighs every key: the row is 0 then
  }
  std::vector<double> acc(static_cast<size_t>(p.v_head_dim), 0.0);
  for (size_t j = 0; j < logits.size(); ++j) {
    const double weight = std::exp(logits[j] - max);
    sum += weight;
    decode_codes(p.v_cache.store, p.v_cache.data + slots[j] * p.v_cache.token_bytes + kv_head * p.v_cache.head_bytes,
                 p.head_dim, codes.data());
    for (size_t i = 0; i < acc.size(); ++i) {
      acc[i] += weight * (codes[i] * static_cast<double>(v_scales[static_cast<size_t>(kv_head * p.head_dim) + i]));
    }
  }
  std::vector<float> row(acc.size(), 0.0f);
  for (size_t i = 0; i < acc.size() && !logits.empty(); ++i) {
    row[i] = static_cast<float>(acc[i] / sum);
  }
  const int64_t offset = head_idx * p.v_head_dim * static_cast<int64_t>(size_of(p.type));
  store_row(p.type, row.data(), p.v_head_dim, p.output + token_idx * p.output_stride + offset);
}

}  // namespace

void run_ref(const Problem& p) {
  const std::vector<float> k_scales = scale_table(p, p.k_cache);
  const std::vector<float> v_scales = scale_table(p, p.v_cache);
  std::vector<int32_t> owner(static_cast<size_t>(p.num_tokens));
  assign_owners(p, owner.data());
  const auto pos_of = [&](int64_t t) {
    const Sequence seq = sequence(p, owner[static_cast<size_t>(t)]);
    return seq.past + t - seq.begin;
  };
  for (int64_t t = 0; t < p.num_tokens; ++t) {
    const int64_t seq_idx = owner[static_cast<size_t>(t)];
    const int64_t slot = seq_idx < 0 ? -1 : write_slot(p, seq_idx, t, pos_of(t));
    if (slot >= 0) {
      append(p, t, slot, pos_of(t), k_scales, v_scales);
    }
  }
  const std::vector<float> zeros(static_cast<size_t>(p.num_heads * p.v_head_dim), 0.0f);
  for (int64_t t = 0; t < p.num_tokens; ++t) {
    const int64_t seq_idx = owner[static_cast<size_t>(t)];
    if (seq_idx < 0) {
      store_row(p.type, zeros.data(), static_cast<int64_t>(zeros.size()), p.output + t * p.output_stride);
      continue;
    }
    for (int64_t head_idx = 0; head_idx < p.num_heads; ++head_idx) {
      attend(p, seq_idx, t, head_idx, pos_of(t), k_scales, v_scales);
    }
  }
}

}  // namespace shoal::paged
