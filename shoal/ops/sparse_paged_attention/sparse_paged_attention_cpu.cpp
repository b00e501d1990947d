// One unit: rows of candidates are widened to f32 a tile at a time, wherever they come from. Compiled per instruction
// set.
#include "shoal/ops/paged_tile.h"
#include "shoal/ops/sparse_attend.h"

namespace shoal::sparse::SHOAL_ISA {
namespace {

using namespace paged::SHOAL_ISA;
using paged::kEmpty;
using paged::kTile;
using paged::Store;

constexpr float kLog2E = 1.44269504088896340736f;

void fill(float* out, int64_t count, float value) {
  for (int64_t i = 0; i < count; ++i) {
    out[i] = value;
  }
}

int64_t bytes_of(Store store) { return store == Store::kF32 ? 4 : store == Store::kI8 || store == Store::kF8 ? 1 : 2; }

float bounded(double value) {
  constexpr double kLargest = 3.4e38;
  return static_cast<float>(value < -kLargest ? -kLargest : value > kLargest ? kLargest : value);
}

// One row as f32 values; reads no byte of another.
void read_row(const Heads& heads, const RowSource& source, int64_t row, int64_t kv_head, float* __restrict out) {
  const std::byte* in = source.data + row * source.row_bytes + kv_head * source.head_bytes;
  if (source.channel_bytes != bytes_of(source.store)) {
    for (int64_t i = 0; i < heads.head_dim; ++i) {
      paged::decode_codes(source.store, in + i * source.channel_bytes, 1, out + i);
    }
  } else if (heads.head_dim % 8 == 0) {
    decode_row(source.store, in, heads.head_dim, out);
  } else {
    paged::decode_codes(source.store, in, heads.head_dim, out);
  }
  if (source.scales != nullptr) {
    const float* __restrict scales = source.scales + kv_head * heads.head_dim;
    for (int64_t i = 0; i < heads.head_dim; ++i) {
      out[i] *= scales[i];
    }
  }
  fill(out + heads.head_dim, heads.stride - heads.head_dim, 0.0f);
}

// [count, stride] to [kTile / kKeyStep, stride, kKeyStep]; `end` >= count is in whole steps.
void turn_keys(const Heads& heads, const Scratch& scratch, int64_t count, int64_t end) {
  for (int64_t j = 0; j < end; j += kLanes) {
    const std::byte* rows[kLanes];
    for (int64_t i = 0; i < kLanes; ++i) {
      rows[i] =
          reinterpret_cast<const std::byte*>(j + i < count ? scratch.rows + (j + i) * heads.stride : scratch.zeros);
    }
    float* out = scratch.k_tile + j / kKeyStep * kKeyStep * heads.stride + j % kKeyStep;
    for (int64_t c = 0; c < heads.stride; c += 8) {
      Floats channels[8];
      transpose8<Store::kF32>(rows, c, channels);
      for (int i = 0; i < 8; ++i) {
        store(out + (c + i) * kKeyStep, channels[i]);
      }
    }
  }
}

struct RowValues {
  float* max;
  float* sum;
  float* tile_sum;
  float* factor;
};

void weigh_tile(const Heads& heads, const Logits& logits, const Scratch& scratch, const RowValues& values,
                int64_t count) {
  for (int64_t r = 0; r < heads.group; ++r) {
    values.factor[r] = values.max[r];
    values.tile_sum[r] = weigh_row(logits, {0, count, nullptr}, scratch.weights + r * kTile, values.max[r]);
  }
  // Rows past the last are scratch: they keep the vectors whole.
  for (int64_t r = 0; r < heads.group; r += kLanes) {
    const Floats factor = exp2_below(load(values.factor + r) - load(values.max + r));
    store(values.factor + r, factor);
    store(values.sum + r, load(values.sum + r) * factor + load(values.tile_sum + r));
  }
}

// Sink, division and the one rounding to T.
void finish(const Heads& heads, int64_t kv_head, const Scratch& scratch, const RowValues& values, std::byte* output) {
  const int64_t row_bytes = heads.v_head_dim * static_cast<int64_t>(size_of(heads.type));
  for (int64_t r = 0; r < heads.group; ++r) {
    float* __restrict row = scratch.acc + r * heads.stride;
    double sum = values.sum[r];
    if (heads.sink != nullptr) {
      sum += __builtin_exp2(static_cast<double>(heads.sink[kv_head * heads.group + r]) * 1.4426950408889634 -
                            static_cast<double>(values.max[r]));
    }
    const float inverse = values.sum[r] == 0.0f ? 0.0f : static_cast<float>(1.0 / sum);
    for (int64_t i = 0; i < heads.v_head_dim; ++i) {
      row[i] *= inverse;
    }
    if (heads.v_head_dim % 8 == 0) {
      write_row(plain_store(heads.type), row, nullptr, heads.v_head_dim, output + r * row_bytes);
    } else {
      paged::store_row(heads.type, row, heads.v_head_dim, output + r * row_bytes);
    }
  }
}

}  // namespace

void attend(const Heads& heads, int64_t kv_head, CandidateList& list, const Scratch& scratch, std::byte* output) {
  const int64_t padded = (heads.group + paged::kPad - 1) / paged::kPad * paged::kPad;
  const RowValues values = {scratch.row_values, scratch.row_values + padded, scratch.row_values + 2 * padded,
                            scratch.row_values + 3 * padded};
  fill(values.max, padded, kEmpty);
  fill(values.sum, 3 * padded, 0.0f);
  fill(scratch.acc, heads.group * heads.stride, 0.0f);
  fill(scratch.weights, heads.group * kTile, 0.0f);
  fill(scratch.zeros, heads.stride, 0.0f);
  Logits logits;
  logits.factor = bounded(static_cast<double>(heads.scale) * kLog2E);
  if (heads.softcap > 0.0f) {
    logits.cap = heads.softcap * kLog2E;
    logits.inner = bounded(static_cast<double>(heads.scale) / heads.softcap);
  }
  Candidate tile[kTile];
  const std::byte* rows[kTile];
  for (int64_t j = 0; j < kTile; ++j) {
    rows[j] = reinterpret_cast<const std::byte*>(scratch.rows + j * heads.stride);
  }
  for (int64_t count = list.take(tile); count > 0; count = list.take(tile)) {
    const int64_t end = (count + kKeyStep - 1) / kKeyStep * kKeyStep;
    for (int64_t j = 0; j < count; ++j) {
      read_row(heads, tile[j].source->key, tile[j].row, kv_head, scratch.rows + j * heads.stride);
    }
    turn_keys(heads, scratch, count, end);
    scores_of_tile(scratch.query, heads.group, heads.stride, heads.stride, scratch.k_tile, 0, end, scratch.weights);
    weigh_tile(heads, logits, scratch, values, count);
    for (int64_t j = 0; j < count && !heads.shared_rows; ++j) {
      read_row(heads, tile[j].source->value, tile[j].row, kv_head, scratch.rows + j * heads.stride);
    }
    add_values<Store::kF32>(scratch.weights, values.factor, heads.group, rows, 0, count, heads.stride, scratch.acc);
  }
  finish(heads, kv_head, scratch, values, output);
}

}  // namespace shoal::sparse::SHOAL_ISA
