// What a checked call's contents mean: sequences, pages, slots, rows. Nothing here trusts a value it reads.
#include "shoal/ops/paged_problem.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "shoal/base/float_bits.h"

namespace shoal::paged {
namespace {

// Tensors may start at any byte.
template <class T>
T read(const std::byte* at) {
  T value;
  std::memcpy(&value, at, sizeof(T));
  return value;
}

template <class T>
void write(std::byte* at, T value) {
  std::memcpy(at, &value, sizeof(T));
}

// Round half to even (the default rounding mode), NaN as 0.
int32_t to_code(float value, float low, float high) {
  return std::isnan(value) ? 0 : static_cast<int32_t>(std::nearbyint(std::clamp(value, low, high)));
}

float round_to(DType type, float value) {
  switch (type) {
    case DType::kF16: return f16_to_f32(f32_to_f16(value));
    case DType::kBF16: return bf16_to_f32(f32_to_bf16(value));
    default: return value;
  }
}

}  // namespace

int64_t read_index(const Matrix& matrix, int64_t row, int64_t column) {
  return read<int32_t>(matrix.data + row * matrix.row_stride + column * matrix.column_stride);
}

Sequence sequence(const Problem& problem, int64_t seq_idx) {
  Sequence seq;
  seq.begin = read_index(problem.cu, seq_idx);
  seq.end = read_index(problem.cu, seq_idx + 1);
  seq.past = read_index(problem.past, seq_idx);
  seq.sound = seq.begin >= 0 && seq.begin <= seq.end && seq.end <= problem.num_tokens && seq.past >= 0;
  return seq;
}

void assign_owners(const Problem& problem, int32_t* owner) {
  std::fill_n(owner, problem.num_tokens, -1);
  for (int64_t seq_idx = 0; seq_idx < problem.num_seqs; ++seq_idx) {
    const Sequence seq = sequence(problem, seq_idx);
    for (int64_t t = seq.begin; seq.sound && t < seq.end; ++t) {
      owner[t] = owner[t] < 0 ? static_cast<int32_t>(seq_idx) : owner[t];
    }
  }
}

int64_t page_of(const Problem& problem, int64_t seq_idx, int64_t pos) {
  const int64_t column = pos / problem.page_size;
  if (column >= problem.num_columns) {
    return -1;
  }
  const int64_t page = read_index(problem.table, seq_idx, column);
  return page >= 0 && page < problem.num_pages ? page : -1;
}

int64_t write_slot(const Problem& problem, int64_t seq_idx, int64_t token_idx, int64_t pos) {
  if (pos >= problem.num_columns * problem.page_size) {
    return -1;
  }
  if (problem.slots.data != nullptr) {
    const int64_t slot = read_index(problem.slots, token_idx);
    return slot >= 0 && slot < problem.num_pages * problem.page_size ? slot : -1;
  }
  const int64_t page = page_of(problem, seq_idx, pos);
  return page < 0 ? -1 : page * problem.page_size + pos % problem.page_size;
}

KeyRange key_range(const Problem& problem, const Sequence& seq, int64_t pos) {
  KeyRange range;
  range.end = std::min(problem.is_causal ? pos + 1 : seq.kv_len(), problem.num_columns * problem.page_size);
  range.begin = problem.window > 0 ? std::max<int64_t>(0, pos - problem.window + 1) : 0;
  range.end = std::max(range.end, range.begin);
  return range;
}

void fill_scales(const Problem& problem, const CacheSide& side, float* scales) {
  const TensorView& view = *side.scale;
  const int64_t count = problem.num_kv_heads * problem.head_dim;
  if (view.num_elements() == 1) {
    std::fill_n(scales, count, read<float>(static_cast<const std::byte*>(view.data)));
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    int64_t offset = 0;
    int64_t rest = i;
    for (int axis = view.rank - 1; axis >= 0; --axis) {
      offset += rest % view.dim(axis) * view.stride(axis);
      rest /= view.dim(axis);
    }
    scales[i] = read<float>(static_cast<const std::byte*>(view.data) + offset * 4);
  }
}

void load_row(DType type, const Matrix& matrix, int64_t row, int64_t first, int64_t count, float* out) {
  const std::byte* in = matrix.data + row * matrix.row_stride + first * matrix.column_stride;
  const int64_t step = matrix.column_stride;
  switch (type) {
    case DType::kF16:
      for (int64_t i = 0; i < count; ++i) {
        out[i] = f16_to_f32(read<uint16_t>(in + i * step));
      }
      break;
    case DType::kBF16:
      for (int64_t i = 0; i < count; ++i) {
        out[i] = bf16_to_f32(read<uint16_t>(in + i * step));
      }
      break;
    default:
      for (int64_t i = 0; i < count; ++i) {
        out[i] = read<float>(in + i * step);
      }
      break;
  }
}

void store_row(DType type, const float* values, int64_t count, std::byte* out) {
  switch (type) {
    case DType::kF16: encode_row(Store::kF16, values, nullptr, count, out); break;
    case DType::kBF16: encode_row(Store::kBF16, values, nullptr, count, out); break;
    default: encode_row(Store::kF32, values, nullptr, count, out); break;
  }
}

void encode_row(Store store, const float* values, const float* scales, int64_t count, std::byte* out) {
  const auto scaled = [&](int64_t i) { return scales[i] == 0.0f ? 0.0f : values[i] / scales[i]; };
  switch (store) {
    case Store::kF32: std::memcpy(out, values, static_cast<size_t>(count) * sizeof(float)); break;
    case Store::kF16:
      for (int64_t i = 0; i < count; ++i) {
        write(out + 2 * i, f32_to_f16(values[i]));
      }
      break;
    case Store::kBF16:
      for (int64_t i = 0; i < count; ++i) {
        write(out + 2 * i, f32_to_bf16(values[i]));
      }
      break;
    case Store::kI8:
      for (int64_t i = 0; i < count; ++i) {
        write(out + i, static_cast<int8_t>(to_code(scaled(i), -128.0f, 127.0f)));
      }
      break;
    case Store::kF8:
      for (int64_t i = 0; i < count; ++i) {
        write(out + i, f32_to_e4m3(scaled(i)));
      }
      break;
    case Store::kI4:  // head_dim is even
      for (int64_t i = 0; i < count; i += 2) {
        const int32_t low = to_code(scaled(i), -8.0f, 7.0f) + 8;
        const int32_t high = to_code(scaled(i + 1), -8.0f, 7.0f) + 8;
        write(out + i / 2, static_cast<uint8_t>(low | high << 4));
      }
      break;
  }
}

void decode_codes(Store store, const std::byte* in, int64_t count, float* out) {
  switch (store) {
    case Store::kF32: std::memcpy(out, in, static_cast<size_t>(count) * sizeof(float)); break;
    case Store::kF16:
      for (int64_t i = 0; i < count; ++i) {
        out[i] = f16_to_f32(read<uint16_t>(in + 2 * i));
      }
      break;
    case Store::kBF16:
      for (int64_t i = 0; i < count; ++i) {
        out[i] = bf16_to_f32(read<uint16_t>(in + 2 * i));
      }
      break;
    case Store::kI8:
      for (int64_t i = 0; i < count; ++i) {
        out[i] = static_cast<float>(read<int8_t>(in + i));
      }
      break;
    case Store::kF8:
      for (int64_t i = 0; i < count; ++i) {
        out[i] = e4m3_to_f32(read<uint8_t>(in + i));
      }
      break;
    case Store::kI4:
      for (int64_t i = 0; i < count; ++i) {
        const auto byte = read<uint8_t>(in + i / 2);
        out[i] = static_cast<float>(static_cast<int>(i % 2 == 0 ? byte & 15 : byte >> 4) - 8);
      }
      break;
  }
}

void norm_head(const Problem& p, const float* weight, float* head) {
  double sum = 0.0;
  for (int64_t i = 0; i < p.head_dim; ++i) {
    sum += static_cast<double>(head[i]) * head[i];
  }
  const auto mean = static_cast<float>(sum / static_cast<double>(p.head_dim));
  const auto factor = static_cast<float>(1.0 / std::sqrt(static_cast<double>(mean) + p.epsilon));
  for (int64_t i = 0; i < p.head_dim; ++i) {
    head[i] = round_to(p.type, head[i] * factor * weight[i]);
  }
}

void turn_head(const Problem& p, const float* cos, const float* sin, float* head) {
  const int64_t half = p.rotary_dim / 2;
  for (int64_t i = 0; i < half; ++i) {
    float& x = head[p.rotary_offset + (p.rotary_interleaved ? 2 * i : i)];
    float& y = head[p.rotary_offset + (p.rotary_interleaved ? 2 * i + 1 : half + i)];
    const float turned_x = x * cos[i] - y * sin[i];
    const float turned_y = y * cos[i] + x * sin[i];
    x = round_to(p.type, turned_x);
    y = round_to(p.type, turned_y);
  }
}

}  // namespace shoal::paged
