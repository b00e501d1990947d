// A panel: kLanes outputs of one expert's projection, with their scales, zero points and biases as vectors.
//
// Only for sources that are compiled per instruction set.
#pragma once

#include "shoal/ops/moe/moe_job.h"
#include "shoal/ops/moe/moe_lanes.h"
#include "shoal/quant/format.h"

namespace shoal::SHOAL_ISA {

// Twice the values of e2m1 codes: integers.
constexpr int8_t kE2M1Doubled[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

constexpr int64_t kTileStride = 2 * kLanes;  // a tile of decoded columns is [k, panel, lane]

struct Panel {
  const moe::Projection* projection = nullptr;
  const std::byte* rows[kLanes] = {};  // lanes past the end repeat the last row; kE2M1Columns: all the expert
  const std::byte* columns = nullptr;  // kE2M1Columns: the expert
  int64_t first_row = 0;
  int64_t step = 1;           // rows from lane to lane
  int64_t row_bytes = 0;      // that codes occupy
  bool can_over_read = true;  // 4 bytes past every row
  const std::byte* next = nullptr;
  int group_shift = 0;  // k >> group_shift is the group
  int64_t piece = moe::kPiece;
  const float* scales = nullptr;  // [group, lane]
  const float* zeros = nullptr;   // [group, lane], or one vector for all
  int64_t zero_stride = 0;
  float bias[kLanes] = {};

  int64_t row_of(int64_t lane) const {
    const int64_t row = first_row + lane * step;
    const int64_t last = projection->n - 1;
    return row < last ? row : last;
  }
};

// Tables of the scale bytes; made by the compiler, so that no function of another file is called.
struct ByteTable {
  float value[256];
};
constexpr ByteTable e4m3_table() {
  ByteTable table{};
  for (int i = 0; i < 256; ++i) {
    table.value[i] = e4m3_to_f32(static_cast<uint8_t>(i));
  }
  return table;
}
constexpr ByteTable e8m0_table() {
  ByteTable table{};
  for (int i = 0; i < 256; ++i) {
    table.value[i] = e8m0_to_f32(static_cast<uint8_t>(i));
  }
  return table;
}

SHOAL_INLINE float read_scale(const float* p) { return *p; }
SHOAL_INLINE float read_scale(const f16* p) { return block::f16(reinterpret_cast<const std::byte*>(p)); }
SHOAL_INLINE float read_scale(const bf16* p) { return std::bit_cast<float>(static_cast<uint32_t>(p->bits) << 16); }

SHOAL_INLINE void set_rows(Panel& panel, int64_t expert, int64_t first_row, int64_t step) {
  const moe::Projection& p = *panel.projection;
  panel.first_row = first_row;
  panel.step = step;
  panel.piece = p.piece();
  panel.group_shift = 62;  // one group
  if (p.scaling != moe::Scaling::kAfter && p.codes != moe::Codes::kBlocks) {
    panel.group_shift = __builtin_ctzll(static_cast<unsigned long long>(p.group));
  }
  panel.columns = p.data + expert * p.expert_bytes;
  const bool along_k = p.codes != moe::Codes::kE2M1Columns;
  for (int64_t lane = 0; lane < kLanes; ++lane) {
    panel.rows[lane] = panel.columns + (along_k ? panel.row_of(lane) * p.row_bytes : 0);
  }
  if (along_k) {
    panel.row_bytes = (p.k * p.bits + 7) / 8;
    panel.can_over_read = p.bits != 3 || panel.row_of(kLanes - 1) < p.n - 1;
  }
  for (int64_t lane = 0; lane < kLanes; ++lane) {
    panel.bias[lane] = 0.0f;
    if (p.bias) {
      const int64_t at = expert * p.bias.strides[0] + panel.row_of(lane) * p.bias.strides[1];
      switch (p.bias.dtype) {
        case DType::kF32: panel.bias[lane] = read_scale(p.bias.as<const float>() + at); break;
        case DType::kF16: panel.bias[lane] = read_scale(p.bias.as<const f16>() + at); break;
        default: panel.bias[lane] = read_scale(p.bias.as<const bf16>() + at); break;
      }
    }
  }
}

// Where the panel that follows starts: prefetched while this one is read.
SHOAL_INLINE void set_next(Panel& panel, const std::byte* next) { panel.next = next; }

// Of the numbers of e2m1, whose doubles are integers.
SHOAL_INLINE float scale_factor(const moe::Projection& p) {
  return p.codes == moe::Codes::kE2M1 || p.codes == moe::Codes::kE2M1Columns ? 0.5f : 1.0f;
}

// Groups from `begin` on, one by one.
template <class Read>
SHOAL_INLINE void fill_scales(const Panel& panel, int64_t expert, int64_t begin, float* scales, const Read& read) {
  const moe::Projection& p = *panel.projection;
  const int64_t groups = p.num_groups();
  const float global = p.global != nullptr ? p.global[expert * p.global_stride] : 1.0f;
  for (int64_t lane = 0; lane < kLanes; ++lane) {
    const int64_t row = panel.row_of(lane) / p.row_group;
    const int64_t at = expert * p.scale_strides[0] + row * p.scale_strides[1];
    for (int64_t g = begin; g < groups; ++g) {
      scales[g * kLanes + lane] = read(at + g * p.scale_strides[2]) * global * scale_factor(p);
    }
  }
}

// `begin`: groups whose scales are there already.
SHOAL_INLINE void set_scales(Panel& panel, int64_t expert, int64_t begin, float* scales, float* zeros) {
  static constexpr ByteTable kE4M3 = e4m3_table();
  static constexpr ByteTable kE8M0 = e8m0_table();
  const moe::Projection& p = *panel.projection;
  panel.scales = scales;
  panel.zeros = zeros;
  panel.zero_stride = 0;
  if (p.codes == moe::Codes::kBlocks) {
    return;
  }
  const auto* bytes = static_cast<const uint8_t*>(p.scales);
  if (p.scales == nullptr) {
    fill_scales(panel, expert, begin, scales, [](int64_t) { return 1.0f; });
  } else {
    switch (p.scale_type) {
      case DType::kF32:
        fill_scales(panel, expert, begin, scales, [&](int64_t i) { return static_cast<const float*>(p.scales)[i]; });
        break;
      case DType::kF16:
        fill_scales(panel, expert, begin, scales,
                    [&](int64_t i) { return read_scale(static_cast<const f16*>(p.scales) + i); });
        break;
      case DType::kBF16:
        fill_scales(panel, expert, begin, scales,
                    [&](int64_t i) { return read_scale(static_cast<const bf16*>(p.scales) + i); });
        break;
      case DType::kF8E8M0:
        fill_scales(panel, expert, begin, scales, [&](int64_t i) { return kE8M0.value[bytes[i]]; });
        break;
      default: fill_scales(panel, expert, begin, scales, [&](int64_t i) { return kE4M3.value[bytes[i]]; }); break;
    }
  }
  if (p.codes != moe::Codes::kAffine) {
    store(zeros, zero());
    return;
  }
  if (p.zeros == nullptr) {
    store(zeros, splat(static_cast<float>(1 << (p.bits - 1))));
    return;
  }
  panel.zero_stride = kLanes;
  const uint32_t mask = (1u << p.zero_bits) - 1u;
  for (int64_t lane = 0; lane < kLanes; ++lane) {
    const uint8_t* row = p.zeros + expert * p.zero_expert_bytes + panel.row_of(lane) * p.zero_row_bytes;
    for (int64_t g = 0; g < p.num_groups(); ++g) {
      const int64_t bit = g * p.zero_bits;
      uint32_t window = row[bit / 8];
      if (bit % 8 + p.zero_bits > 8) {  // only then: the next byte may not exist
        window |= static_cast<uint32_t>(row[bit / 8 + 1]) << 8;
      }
      zeros[g * kLanes + lane] = static_cast<float>((window >> (bit % 8)) & mask);
    }
  }
}

SHOAL_INLINE Floats round_to(DType dtype, const Floats& a) {
  return dtype == DType::kF16 ? round_f16(a) : dtype == DType::kBF16 ? round_bf16(a) : a;
}

// GGUF blocks, columns [k_begin, k_end) rounded to `dtype`, into tile. `row` has room for that many columns
// and a vector more.
inline void decode_blocks(const Panel& panel, DType dtype, int64_t k_begin, int64_t k_end, float* tile, float* row) {
  const moe::Projection& p = *panel.projection;
  const int64_t offset = row_bytes(p.format, k_begin);
  for (int64_t lane = 0; lane < kLanes; ++lane) {
    decode_row(p.format, panel.rows[lane] + offset, k_end - k_begin, row);
    for (int64_t k = 0; k < k_end - k_begin; k += kLanes) {
      store(row + k, round_to(dtype, load(row + k)));
    }
    for (int64_t k = 0; k < k_end - k_begin; ++k) {
      tile[k * kTileStride + lane] = row[k];
    }
  }
}

SHOAL_INLINE Floats sigmoid(const Floats& a) { return splat(1.0f) / (splat(1.0f) + exp(splat(0.0f) - a)); }

SHOAL_INLINE Floats activate(moe::Activation activation, const Floats& x) {
  switch (activation) {
    case moe::Activation::kRelu: return if_less(x, zero(), zero(), x);
    case moe::Activation::kRelu2: {
      const Floats r = if_less(x, zero(), zero(), x);
      return r * r;
    }
    case moe::Activation::kSilu: return x / (splat(1.0f) + exp(splat(0.0f) - x));
    case moe::Activation::kGelu: {
      const Floats inner = splat(0.7978845608f) * (x + splat(0.044715f) * x * x * x);  // sqrt(2 / pi)
      return splat(0.5f) * x * (splat(1.0f) + tanh(inner));
    }
    default: return x;
  }
}

SHOAL_INLINE Floats gated(const moe::Problem& problem, const Floats& gate, const Floats& value) {
  if (problem.activation != moe::Activation::kSwiglu) {
    return activate(problem.activation, gate) * value;
  }
  // In this order of operands NaN passes.
  const Floats limit = splat(problem.limit);
  const Floats v = max(splat(-problem.limit), min(limit, value)) + splat(problem.beta);
  const Floats alpha = splat(problem.alpha);
  if (problem.limit_after) {
    return min(limit, gate * sigmoid(alpha * gate)) * v;
  }
  const Floats g = min(limit, gate);
  return g * sigmoid(alpha * g) * v;
}

template <class T>
SHOAL_INLINE void load_row(const T* from, int64_t stride, int64_t count, float* to) {
  if (stride != 1) {
    for (int64_t i = 0; i < count; ++i) {
      to[i] = read_scale(from + i * stride);
    }
    return;
  }
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    store(to + i, load(from + i));
  }
  if (i < count) {
    store_partial(to + i, load_partial(from + i, count - i), count - i);
  }
}

template <class T>
SHOAL_INLINE void store_row(const float* from, int64_t count, T* to, int64_t stride) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    if (stride == 1) {
      store(to + i, load(from + i));
      continue;
    }
    T values[kLanes];
    store(values, load(from + i));
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      to[(i + lane) * stride] = values[lane];
    }
  }
  if (i < count) {
    T values[kLanes];
    store(values, load(from + i));
    for (; i < count; ++i) {
      to[i * stride] = values[i % kLanes];
    }
  }
}

}  // namespace shoal::SHOAL_ISA
