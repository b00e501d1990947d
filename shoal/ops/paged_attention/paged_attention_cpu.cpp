// The fast path of one unit: rows of one sequence and KV head, tile after tile of keys. Compiled per instruction set.
#include "shoal/ops/paged_attention/paged_attention_prologue.h"
#include "shoal/ops/paged_tile.h"

namespace shoal::paged::SHOAL_ISA {
namespace {

constexpr float kLog2E = 1.44269504088896340736f;

// The unit in plain numbers.
struct Work {
  const Plan& plan;
  const Problem& p;
  const Unit& unit;
  const ThreadScratch& scratch;
  Logits logits;
  int64_t num_rows = 0;
  int64_t first_row = 0;  // of plan.query
  const float* query = nullptr;
  float* row_max = nullptr;  // [num_rows], of the span
  float* row_sum = nullptr;
  float* tile_sum = nullptr;
  float* factor = nullptr;
  float* total_max = nullptr;  // of the spans so far
  float* total_sum = nullptr;
};

float bounded(double value) {
  constexpr double kLargest = 3.4e38;
  return static_cast<float>(value < -kLargest ? -kLargest : value > kLargest ? kLargest : value);
}

Work make_work(const Plan& plan, const Unit& unit, const ThreadScratch& scratch) {
  const Problem& p = *plan.problem;
  Work work{plan, p, unit, scratch, {}};
  work.num_rows = unit.row_end - unit.row_begin;
  work.first_row = (unit.kv_head * p.num_tokens + unit.run->begin) * p.group + unit.row_begin;
  work.query = plan.query + work.first_row * plan.k_stride;
  work.row_max = scratch.row_values;
  work.row_sum = work.row_max + kMaxRows;
  work.tile_sum = work.row_sum + kMaxRows;
  work.factor = work.tile_sum + kMaxRows;
  work.total_max = work.factor + kMaxRows;
  work.total_sum = work.total_max + kMaxRows;
  const double scale = static_cast<double>(p.scale) * (plan.k_unit != nullptr ? plan.k_unit[unit.kv_head] : 1.0f);
  work.logits.factor = bounded(scale * kLog2E);
  if (p.softcap > 0.0f) {
    work.logits.cap = p.softcap * kLog2E;
    work.logits.inner = bounded(scale / p.softcap);
  }
  return work;
}

void fill(float* out, int64_t count, float value) {
  for (int64_t i = 0; i < count; ++i) {
    out[i] = value;
  }
}

int64_t at_least(int64_t a, int64_t b) { return a > b ? a : b; }
int64_t at_most(int64_t a, int64_t b) { return a < b ? a : b; }

// Positions that the row at `pos` admits, inside [begin, end). An empty range lies at the end that the row is nearer
// to, so that the ranges of a unit's rows stay in order.
KeyRange admitted(const Work& work, int64_t pos, int64_t begin, int64_t end) {
  const Problem& p = work.p;
  KeyRange range;
  range.end = at_least(begin, at_most(end, p.is_causal ? pos + 1 : work.unit.run->kv_len));
  range.begin = p.window > 0 ? at_most(range.end, at_least(begin, pos - p.window + 1)) : begin;
  return range;
}

int64_t row_pos(const Work& work, int64_t row) {
  return work.unit.run->pos + (work.unit.row_begin + row) / work.p.group;
}

// The keys of one tile: where they are and which of them may be used.
struct Tile {
  int64_t pos = 0;    // of its first key
  int64_t begin = 0;  // keys [begin, end) are admitted by some row
  int64_t end = 0;
  bool mixed = false;  // not by every row
  bool any_unmapped = false;
  alignas(64) float unmapped[kTile];
  const std::byte* k[kTile];  // in the cache; unmapped or outside [begin, end): zeros
  const std::byte* v[kTile];
};

// False if no row admits a key.
bool find_keys(const Work& work, int64_t pos, Tile& tile) {
  const Problem& p = work.p;
  const int64_t limit = at_most(pos + kTile, p.num_columns * p.page_size);
  const KeyRange first = admitted(work, row_pos(work, 0), pos, limit);
  const KeyRange last = admitted(work, row_pos(work, work.num_rows - 1), pos, limit);
  tile.pos = pos;
  tile.begin = first.begin - pos;
  tile.end = last.end - pos;
  tile.mixed = first.begin != last.begin || first.end != last.end;
  tile.any_unmapped = false;
  if (tile.begin >= tile.end) {
    return false;
  }
  bool any_mapped = false;
  const auto* zeros = reinterpret_cast<const std::byte*>(work.scratch.zeros);
  for (int64_t j = 0; j < tile.begin; ++j) {
    tile.k[j] = tile.v[j] = zeros;
  }
  for (int64_t j = tile.end; j < kTile; ++j) {
    tile.k[j] = tile.v[j] = zeros;
  }
  for (int64_t j = tile.begin; j < tile.end;) {
    const int64_t offset = (pos + j) % p.page_size;
    const int64_t run_end = at_most(tile.end, j + p.page_size - offset);
    const int64_t page = page_of(p, work.unit.run->seq_idx, pos + j);
    if (page < 0) {
      if (!tile.any_unmapped) {
        tile.any_unmapped = true;
        fill(tile.unmapped, kTile, 0.0f);
      }
      for (; j < run_end; ++j) {
        tile.k[j] = tile.v[j] = zeros;
        tile.unmapped[j] = 1.0f;
      }
      continue;
    }
    any_mapped = true;
    const int64_t slot = page * p.page_size + offset;
    const std::byte* k = p.k_cache.data + slot * p.k_cache.token_bytes + work.unit.kv_head * p.k_cache.head_bytes;
    const std::byte* v = p.v_cache.data + slot * p.v_cache.token_bytes + work.unit.kv_head * p.v_cache.head_bytes;
    for (; j < run_end; ++j, k += p.k_cache.token_bytes, v += p.v_cache.token_bytes) {
      tile.k[j] = k;
      tile.v[j] = v;
    }
  }
  return any_mapped;
}

// Storages that transpose8 and the sums load by themselves.
bool kernels_read(Store store) { return store != Store::kF8 && store != Store::kI4; }

// int4 reads all bits 0 as -8: zeros are not zero there.
bool is_missing(const Work& work, const std::byte* row) {
  return row == reinterpret_cast<const std::byte*>(work.scratch.zeros);
}

// Keys [begin, end) into scratch.k_tile [kTile / kKeyStep, head_dim, kKeyStep].
void transpose_keys(const Work& work, const Tile& tile, int64_t begin, int64_t end) {
  const Problem& p = work.p;
  const bool in_place = kernels_read(p.k_cache.store);
  for (int64_t j = begin; j < end; j += kLanes) {
    const std::byte* const* rows = tile.k + j;
    float* out = work.scratch.k_tile + j / kKeyStep * kKeyStep * p.head_dim + j % kKeyStep;
    const std::byte* decoded[kLanes];
    if (!in_place) {
      for (int64_t i = 0; i < kLanes; ++i) {
        float* row = work.scratch.rows + i * work.plan.k_stride;
        decoded[i] = rows[i];
        if (!is_missing(work, rows[i])) {
          decode_row(p.k_cache.store, rows[i], p.head_dim, row);
          decoded[i] = reinterpret_cast<const std::byte*>(row);
        }
      }
      rows = decoded;
    }
    visit_store(in_place ? p.k_cache.store : Store::kF32, [&]<Store kStore>() {
      for (int64_t c = 0; c < p.head_dim; c += 8) {
        Floats channels[8];
        transpose8<kStore>(rows, c, channels);
        for (int i = 0; i < 8; ++i) {
          store(out + (c + i) * kKeyStep, channels[i]);
        }
      }
    });
  }
}

// V rows [begin, end) as f32 into scratch.v_tile [kTile, v_stride].
void decode_values(const Work& work, const Tile& tile, const std::byte** rows) {
  const Problem& p = work.p;
  const int64_t stride = work.plan.v_stride;
  const int64_t channels = (p.v_head_dim + 7) / 8 * 8;  // at most head_dim
  for (int64_t j = tile.begin; j < tile.end; ++j) {
    float* row = work.scratch.v_tile + j * stride;
    rows[j] = reinterpret_cast<const std::byte*>(row);
    int64_t filled = 0;
    if (!is_missing(work, tile.v[j])) {
      decode_row(p.v_cache.store, tile.v[j], channels, row);
      filled = channels;
    }
    fill(row + filled, stride - filled, 0.0f);
  }
}

void prefetch_rows(const std::byte* const* rows, int64_t begin, int64_t end, int64_t bytes) {
  for (int64_t j = begin; j < end; ++j) {
    for (int64_t offset = 0; offset < bytes; offset += 64) {
      __builtin_prefetch(rows[j] + offset);
    }
  }
}

void weigh_tile(const Work& work, const Tile& tile) {
  for (int64_t r = 0; r < work.num_rows; ++r) {
    const KeyRange keys = admitted(work, row_pos(work, r), tile.pos, tile.pos + tile.end);
    const RowMask mask = {keys.begin - tile.pos, keys.end - tile.pos, tile.any_unmapped ? tile.unmapped : nullptr};
    work.factor[r] = work.row_max[r];
    work.tile_sum[r] = weigh_row(work.logits, mask, work.scratch.weights + r * kTile, work.row_max[r]);
  }
  // Rows past the last are scratch: they keep the vectors whole.
  for (int64_t r = 0; r < work.num_rows; r += kLanes) {
    const Floats factor = exp2_below(load(work.factor + r) - load(work.row_max + r));
    store(work.factor + r, factor);
    store(work.row_sum + r, load(work.row_sum + r) * factor + load(work.tile_sum + r));
  }
}

// acc += weights * V. A V row may be infinite or NaN where only some rows admit it: weight 0 would not hide it.
void add_tile(const Work& work, const Tile& tile, Store store, const std::byte* const* values) {
  const ThreadScratch& scratch = work.scratch;
  const int64_t stride = work.plan.v_stride;
  const bool may_poison = tile.mixed && work.p.v_cache.store != Store::kI8 && work.p.v_cache.store != Store::kI4;
  if (may_poison && has_non_finite(values, tile.begin, tile.end, stride)) {
    for (int64_t r = 0; r < work.num_rows; ++r) {
      const KeyRange keys = admitted(work, row_pos(work, r), tile.pos, tile.pos + tile.end);
      add_values<Store::kF32>(scratch.weights + r * kTile, work.factor + r, 1, values, keys.begin - tile.pos,
                              keys.end - tile.pos, stride, scratch.acc + r * stride);
    }
    return;
  }
  visit_store(store, [&]<Store kStore>() {
    add_values<kStore>(scratch.weights, work.factor, work.num_rows, values, tile.begin, tile.end, stride, scratch.acc);
  });
}

// `next` is the tile after this one if it has keys, to be fetched while this one is computed.
void attend_tile(const Work& work, const Tile& tile, const Tile* next) {
  const Problem& p = work.p;
  const ThreadScratch& scratch = work.scratch;
  // Keys are always turned into scratch first: reading them in place was not faster, even for one row. Values of a few
  // rows are read in place.
  const bool few = work.num_rows <= 2 * kRowTile;
  if (few) {
    prefetch_rows(tile.v, tile.begin, tile.end, p.v_cache.head_bytes);
  }
  const int64_t begin = tile.begin / kKeyStep * kKeyStep;
  const int64_t end = (tile.end + kKeyStep - 1) / kKeyStep * kKeyStep;
  transpose_keys(work, tile, begin, end);
  scores_of_tile(work.query, work.num_rows, work.plan.k_stride, p.head_dim, scratch.k_tile, begin, end,
                 scratch.weights);
  weigh_tile(work, tile);
  if (few && next != nullptr) {
    prefetch_rows(next->k, next->begin, next->end, p.k_cache.head_bytes);
  }
  if (few && !tile.mixed && kernels_read(p.v_cache.store) && p.v_head_dim % kPad == 0) {
    return add_tile(work, tile, p.v_cache.store, tile.v);
  }
  const std::byte* values[kTile];
  decode_values(work, tile, values);
  add_tile(work, tile, Store::kF32, values);
}

void start_rows(const Work& work, float* max, float* sum, float* acc) {
  fill(max, kMaxRows, kEmpty);
  fill(sum, kMaxRows, 0.0f);
  fill(acc, work.num_rows * work.plan.v_stride, 0.0f);
}

// The keys of one span into row_max, row_sum and acc.
void run_span(const Work& work, int64_t span) {
  start_rows(work, work.row_max, work.row_sum, work.scratch.acc);
  // Lanes past the last row and keys that no tile has yet: computed with whole vectors, never used.
  fill(work.tile_sum, kMaxRows, 0.0f);
  fill(work.factor, kMaxRows, 0.0f);
  fill(work.scratch.weights, work.num_rows * kTile, 0.0f);
  fill(work.scratch.zeros, work.plan.k_stride, 0.0f);
  Tile tiles[2];
  constexpr int64_t kNumTiles = kSpan / kTile;
  bool has_keys = find_keys(work, span * kSpan, tiles[0]);
  for (int64_t i = 0; i < kNumTiles; ++i) {
    Tile& next = tiles[(i + 1) % 2];
    const bool next_has_keys = i + 1 < kNumTiles && find_keys(work, span * kSpan + (i + 1) * kTile, next);
    if (has_keys) {
      attend_tile(work, tiles[i % 2], next_has_keys ? &next : nullptr);
    }
    has_keys = next_has_keys;
  }
}

// total = total and this span, both brought to the larger maximum.
void merge_span(const Work& work, const float* max_values, const float* sums, const float* acc) {
  const int64_t stride = work.plan.v_stride;
  for (int64_t r = 0; r < work.num_rows; ++r) {
    const Floats old_max = splat(work.total_max[r]);
    const Floats span_max = splat(max_values[r]);
    const Floats new_max = max(old_max, span_max);
    const Floats old_factor = exp2_below(old_max - new_max);
    const Floats span_factor = exp2_below(span_max - new_max);
    const Floats new_sum = splat(work.total_sum[r]) * old_factor + splat(sums[r]) * span_factor;
    work.total_max[r] = largest(new_max);
    work.total_sum[r] = largest(new_sum);
    float* total = work.scratch.total + r * stride;
    for (int64_t i = 0; i < stride; i += kLanes) {
      store(total + i, load(total + i) * old_factor + load(acc + r * stride + i) * span_factor);
    }
  }
}

// Sink, division, V scale and the one rounding to T.
void finish_rows(const Work& work) {
  const Problem& p = work.p;
  const int64_t item = static_cast<int64_t>(size_of(p.type));
  for (int64_t r = 0; r < work.num_rows; ++r) {
    const int64_t row = work.unit.row_begin + r;
    const int64_t head_idx = work.unit.kv_head * p.group + row % p.group;
    float* values = work.scratch.total + r * work.plan.v_stride;
    double sum = work.total_sum[r];
    if (work.plan.sink != nullptr) {
      sum += __builtin_exp2(static_cast<double>(work.plan.sink[head_idx]) * 1.4426950408889634 -
                            static_cast<double>(work.total_max[r]));
    }
    const float inverse = work.total_sum[r] == 0.0f ? 0.0f : static_cast<float>(1.0 / sum);
    for (int64_t i = 0; i < p.v_head_dim; ++i) {
      values[i] *= inverse;
    }
    if (work.plan.v_scales != nullptr) {
      const float* scales = work.plan.v_scales + work.unit.kv_head * p.head_dim;
      for (int64_t i = 0; i < p.v_head_dim; ++i) {
        values[i] *= scales[i];
      }
    }
    for (int64_t i = 0; i < p.v_head_dim; ++i) {
      values[i] += 0.0f;  // -0 becomes 0: a tile of masked keys adds 0, a tile that is left out adds nothing
    }
    std::byte* out =
        p.output + (work.unit.run->begin + row / p.group) * p.output_stride + head_idx * p.v_head_dim * item;
    if (p.v_head_dim % 8 == 0) {
      write_row(plain_store(p.type), values, nullptr, p.v_head_dim, out);
    } else {
      store_row(p.type, values, p.v_head_dim, out);
    }
  }
}

}  // namespace

void attend_unit(const Plan& plan, const Unit& unit, const ThreadScratch& scratch) {
  const Work work = make_work(plan, unit, scratch);
  start_rows(work, work.total_max, work.total_sum, scratch.total);
  const SpanRange spans = span_range(plan, unit);
  for (int64_t span = spans.begin; span < spans.end; ++span) {
    run_span(work, span);
    merge_span(work, work.row_max, work.row_sum, scratch.acc);
  }
  finish_rows(work);
}

void attend_span(const Plan& plan, const Unit& unit, int64_t span_idx, const ThreadScratch& scratch) {
  const SpanRange spans = span_range(plan, unit);
  if (spans.begin + span_idx >= spans.end) {
    return;
  }
  const Work work = make_work(plan, unit, scratch);
  run_span(work, spans.begin + span_idx);
  const int64_t first = span_idx * plan.num_rows() + work.first_row;
  for (int64_t r = 0; r < work.num_rows; ++r) {
    plan.partial_max[first + r] = work.row_max[r];
    plan.partial_sum[first + r] = work.row_sum[r];
  }
  std::memcpy(plan.partial_acc + first * plan.v_stride, scratch.acc,
              static_cast<size_t>(work.num_rows * plan.v_stride) * sizeof(float));
}

void merge_unit(const Plan& plan, const Unit& unit, const ThreadScratch& scratch) {
  const Work work = make_work(plan, unit, scratch);
  start_rows(work, work.total_max, work.total_sum, scratch.total);
  const SpanRange spans = span_range(plan, unit);
  for (int64_t span_idx = 0; span_idx < spans.end - spans.begin; ++span_idx) {
    const int64_t first = span_idx * plan.num_rows() + work.first_row;
    merge_span(work, plan.partial_max + first, plan.partial_sum + first, plan.partial_acc + first * plan.v_stride);
  }
  finish_rows(work);
}

}  // namespace shoal::paged::SHOAL_ISA
