// Tokens of one sequence go in groups whose queries and scores fit a fixed amount of memory; for each group the visible
// rows of the cache are widened a tile at a time and scored against all its tokens.
#include "shoal/ops/sparse_row_select/sparse_row_select.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <tuple>

#include "shoal/base/text.h"
#include "shoal/cpu/thread_pool.h"
#include "shoal/ops/element.h"
#include "shoal/ops/latent_rows.h"
#include "shoal/ops/sparse_row_select/sparse_row_select_choose.h"
#include "shoal/ops/variant.h"
#include "shoal/tensor/matcher.h"

namespace shoal {
namespace {

constexpr std::string_view kName = "sparse_row_select";
constexpr int64_t kTileRows = 64;
constexpr int64_t kCopyGrain = 64;                  // cache rows
constexpr int64_t kGroupFloats = int64_t{1} << 21;  // queries and scores of a group, unless one token needs more
constexpr int64_t kLanes = 32;                      // rows that are scored together; divides kTileRows

struct Sizes {
  explicit Sizes(const SparseRowSelectArgs& a)
      : batch(a.query.dim(0)),
        num_tokens(a.query.dim(1)),
        capacity(a.past_cache.dim(1)),
        query_width(a.num_heads * a.head_dim),
        group_size(std::clamp<int64_t>(kGroupFloats / (query_width + capacity), 1, std::max<int64_t>(num_tokens, 1))) {}
  int64_t batch;
  int64_t num_tokens;
  int64_t capacity;
  int64_t query_width;
  int64_t group_size;
};

struct Memory {
  std::span<float> queries;  // [group_size, N, d]
  std::span<float> scores;   // [group_size, capacity]
  std::span<float> tiles;    // a thread each: [kTileRows, d]
  std::span<uint32_t> keys;  // a thread each: [capacity]
};

int64_t at(const TensorView& view, int64_t b) { return view.as<const int64_t>()[b * view.stride(0)]; }

int64_t visible_rows(const SparseRowSelectArgs& a, int64_t b, int64_t s) {
  const int64_t past = std::min(at(a.past_lens, b), std::numeric_limits<int64_t>::max() / 2);
  return std::clamp<int64_t>((past + s + 1) / a.ratio, 0, a.past_cache.dim(1));
}

template <class Bits>
void copy_elements(const TensorView& from, int64_t b, int64_t row, Bits* to) {
  const Bits* source = from.as<const Bits>() + b * from.stride(0) + row * from.stride(1);
  for (int64_t c = 0; c < from.dim(2); ++c) {
    to[c] = source[c * from.stride(2)];
  }
}

void copy_row(const TensorView& from, int64_t b, int64_t row, const TensorView& cache, int64_t slot) {
  const int64_t first = (b * cache.dim(1) + slot) * cache.dim(2);
  if (size_of(cache.dtype) == 4) {
    copy_elements(from, b, row, cache.as<uint32_t>() + first);
  } else {
    copy_elements(from, b, row, cache.as<uint16_t>() + first);
  }
}

// Rows [begin, end) of the cache of sequence b.
void update_cache(const SparseRowSelectArgs& a, int64_t b, int64_t begin, int64_t end) {
  const bool in_place = a.present_cache.data == a.past_cache.data;
  const int64_t first = at(a.first_slot, b);
  const int64_t last = at(a.last_slot, b);
  const int64_t num_rows = a.rows.dim(1);
  for (int64_t slot = begin; slot < end; ++slot) {
    // Without overflow: first >= slot - num_rows + 1 bounds slot - first.
    if (slot >= first && slot <= last && first > slot - num_rows) {
      copy_row(a.rows, b, slot - first, a.present_cache, slot);
    } else if (!in_place) {
      copy_row(a.past_cache, b, slot, a.present_cache, slot);
    }
  }
}

void prepare_query(const SparseRowSelectArgs& a, int64_t b, int64_t s, int64_t head, float* q) {
  latent::load_row(a.query.dtype, a.query.data,
                   b * a.query.stride(0) + s * a.query.stride(1) + head * a.head_dim * a.query.stride(2),
                   a.query.stride(2), a.head_dim, q);
  if (a.rope_head_dim > 0) {
    const int64_t angle = (b * a.query.dim(1) + s) * a.rope_head_dim;
    latent::rotate_pairs(q + a.head_dim - a.rope_head_dim, a.cos.as<const float>() + angle, 1,
                         a.sin.as<const float>() + angle, 1, a.rope_head_dim);
  }
  if (a.simulate_rotated_fp4) {
    latent::simulate_rotated_fp4(a.query.dtype, q, a.head_dim);
  }
}

// Rows of the cache as f32, channel by channel: [d, kTileRows], zeros where there is no row.
void load_tile(const TensorView& cache, int64_t first_row, int64_t count, float* tile) {
  const int64_t width = cache.dim(2);
  std::fill(tile, tile + width * kTileRows, 0.0f);
  for (int64_t row = 0; row < count; ++row) {
    for (int64_t i = 0; i < width; ++i) {
      tile[i * kTileRows + row] = read_element(cache.dtype, cache.data, (first_row + row) * width + i);
    }
  }
}

// Products of a head with kLanes rows of a tile: sums that advance together, each in the order of the channels.
void multiply(const float* q, const float* tile, int64_t width, float* products) {
  float sums[kLanes] = {};
  for (int64_t i = 0; i < width; ++i) {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      sums[lane] += q[i] * tile[i * kTileRows + lane];
    }
  }
  std::copy(sums, sums + kLanes, products);
}

// Scores of the first `count` rows of a tile for one token.
void score_rows(const SparseRowSelectArgs& a, int64_t b, int64_t s, const float* queries, const float* tile,
                int64_t count, float* scores) {
  std::fill(scores, scores + count, 0.0f);
  const int64_t first_weight = (b * a.query.dim(1) + s) * a.num_heads;
  for (int64_t head = 0; head < a.num_heads; ++head) {
    const float weight = read_element(a.weights.dtype, a.weights.data, first_weight + head) * a.scale;
    for (int64_t row = 0; row < count; row += kLanes) {
      float products[kLanes];
      multiply(queries + head * a.head_dim, tile + row, a.head_dim, products);
      for (int64_t lane = 0; lane < std::min(kLanes, count - row); ++lane) {
        scores[row + lane] += (products[lane] > 0.0f ? products[lane] : 0.0f) * weight;
      }
    }
  }
}

// Tokens [begin, end) of sequence b.
void select_group(const SparseRowSelectArgs& a, const OpContext& context, int64_t b, int64_t begin, int64_t end,
                  const Memory& memory) {
  const Sizes sizes(a);
  // Later tokens see no fewer rows: those from here on need scores.
  int64_t first_scored = begin;
  while (first_scored < end && visible_rows(a, b, first_scored) <= a.topk) {
    ++first_scored;
  }
  const auto queries_of = [&](int64_t s) { return memory.queries.data() + (s - begin) * sizes.query_width; };
  const auto scores_of = [&](int64_t s) { return memory.scores.data() + (s - begin) * sizes.capacity; };
  if (first_scored < end) {
    context.pool->parallel_for((end - first_scored) * a.num_heads, 1, [&](int64_t from, int64_t to, int) {
      for (int64_t i = from; i < to; ++i) {
        const int64_t s = first_scored + i / a.num_heads;
        const int64_t head = i % a.num_heads;
        prepare_query(a, b, s, head, queries_of(s) + head * a.head_dim);
      }
    });
    context.pool->parallel_for(visible_rows(a, b, end - 1), kTileRows, [&](int64_t from, int64_t to, int thread_idx) {
      float* tile = memory.tiles.data() + thread_idx * kTileRows * a.head_dim;
      for (int64_t row = from; row < to; row += kTileRows) {
        const int64_t num_rows = std::min(kTileRows, to - row);
        load_tile(a.present_cache, b * sizes.capacity + row, num_rows, tile);
        for (int64_t s = first_scored; s < end; ++s) {
          const int64_t count = std::min(num_rows, visible_rows(a, b, s) - row);
          if (count > 0) {
            score_rows(a, b, s, queries_of(s), tile, count, scores_of(s) + row);
          }
        }
      }
    });
  }
  context.pool->parallel_for(end - begin, 1, [&](int64_t from, int64_t to, int thread_idx) {
    for (int64_t s = begin + from; s < begin + to; ++s) {
      row_select::choose_rows(scores_of(s), visible_rows(a, b, s), a.topk, a.row_id_offset,
                              memory.keys.data() + thread_idx * sizes.capacity,
                              a.selection.as<int64_t>() + (b * sizes.num_tokens + s) * a.topk);
    }
  });
}

void check_attributes(const SparseRowSelectArgs& a) {
  for (const auto& [name, value] : {std::pair{"num_heads", a.num_heads}, {"head_dim", a.head_dim}}) {
    require(value >= 1 && value <= INT32_MAX, kName, ": ", name, " is ", value, ", expected 1 to ", INT32_MAX);
  }
  require(a.rope_head_dim >= 0 && a.rope_head_dim <= a.head_dim && a.rope_head_dim % 2 == 0, kName,
          ": rope_head_dim is ", a.rope_head_dim, ", expected an even number from 0 to head_dim = ", a.head_dim);
  require(a.ratio >= 1, kName, ": ratio is ", a.ratio, ", expected at least 1");
  require(a.topk >= 1, kName, ": topk is ", a.topk, ", expected at least 1");
  require(a.row_id_offset >= 1, kName, ": row_id_offset is ", a.row_id_offset, ", expected at least 1");
  require(!a.simulate_rotated_fp4 || latent::fits_rotated_fp4(a.head_dim), kName,
          ": simulate_rotated_fp4 needs head_dim to be a power of two of at least ", latent::kFp4Block, ", not ",
          a.head_dim);
}

void check_count(std::string_view name, const TensorView& view, int64_t expected) {
  require(view.num_elements() == expected, kName, ": ", name, " has shape ", shape_text(view.dims()), ", expected ",
          expected, " elements");
}

}  // namespace

SparseRowSelectShapes sparse_row_select_shapes(const SparseRowSelectArgs& a) {
  check_attributes(a);
  const Matcher match(kName);
  Dim batch{"batch_size"};
  Dim tokens{"sequence_length"};
  Dim capacity{"capacity"};
  Dim num_rows{"num_rows"};
  match.tensor("query", a.query).types(kFloats).shape({batch, tokens, a.num_heads * a.head_dim});
  const DType dtype = a.query.dtype;
  const Device device = a.query.device;
  match.tensor("rows", a.rows).type(dtype).shape({batch, num_rows, a.head_dim}).device(device);
  match.tensor("first_slot", a.first_slot).type(DType::kI64).shape({batch, 1}).device(device);
  match.tensor("last_slot", a.last_slot).type(DType::kI64).shape({batch, 1}).device(device);
  match.tensor("past_cache", a.past_cache).type(dtype).shape({batch, capacity, a.head_dim}).device(device);
  match.tensor("weights", a.weights).type(dtype).contiguous().device(device);
  check_count("weights", a.weights, batch * tokens * a.num_heads);
  if (a.rope_head_dim > 0) {
    match.tensor("cos", a.cos).type(DType::kF32).contiguous().device(device);
    match.tensor("sin", a.sin).type(DType::kF32).contiguous().device(device);
    check_count("cos", a.cos, batch * tokens * a.rope_head_dim);
    check_count("sin", a.sin, batch * tokens * a.rope_head_dim);
  }
  match.tensor("past_lens", a.past_lens).type(DType::kI64).shape({batch}).device(device);
  require(a.topk <= capacity, kName, ": topk is ", a.topk, ", but past_cache has a capacity of ", capacity.value());
  require(a.row_id_offset <= std::numeric_limits<int64_t>::max() - capacity, kName, ": row_id_offset is ",
          a.row_id_offset, ", too large for 64 bits with a capacity of ", capacity.value());
  return {.selection = {DType::kI64, {batch, tokens, a.topk}}, .present_cache = {dtype, {batch, capacity, a.head_dim}}};
}

size_t sparse_row_select_workspace_bytes(const SparseRowSelectArgs& a, int num_threads) {
  const Sizes sizes(a);
  return Workspace::bytes_for<float>(static_cast<size_t>(sizes.group_size * sizes.query_width)) +
         Workspace::bytes_for<float>(static_cast<size_t>(sizes.group_size * sizes.capacity)) +
         Workspace::bytes_for<float>(static_cast<size_t>(num_threads * kTileRows * a.head_dim)) +
         Workspace::bytes_for<uint32_t>(static_cast<size_t>(num_threads * sizes.capacity));
}

void sparse_row_select(const SparseRowSelectArgs& a, const OpContext& context) {
  const SparseRowSelectShapes shapes = sparse_row_select_shapes(a);
  const Matcher match(kName);
  check_output(kName, "selection", a.selection, shapes.selection, a.query.device);
  check_output(kName, "present_cache", a.present_cache, shapes.present_cache, a.query.device);
  match.tensor("selection", a.selection).contiguous();
  match.tensor("present_cache", a.present_cache).contiguous();
  wants_reference(kName, context.variant);  // one path for both

  const Sizes sizes(a);
  context.pool->parallel_for(sizes.batch * sizes.capacity, kCopyGrain, [&](int64_t begin, int64_t end, int) {
    while (begin < end) {
      const int64_t b = begin / sizes.capacity;
      const int64_t count = std::min(end, (b + 1) * sizes.capacity) - begin;
      update_cache(a, b, begin - b * sizes.capacity, begin - b * sizes.capacity + count);
      begin += count;
    }
  });
  const Workspace::Scope scope(*context.workspace);
  const int64_t num_threads = context.pool->num_threads();
  const auto take = [&](int64_t count) { return context.workspace->take<float>(static_cast<size_t>(count)); };
  Memory memory;
  memory.queries = take(sizes.group_size * sizes.query_width);
  memory.scores = take(sizes.group_size * sizes.capacity);
  memory.tiles = take(num_threads * kTileRows * a.head_dim);
  memory.keys = context.workspace->take<uint32_t>(static_cast<size_t>(num_threads * sizes.capacity));
  for (int64_t b = 0; b < sizes.batch; ++b) {
    for (int64_t begin = 0; begin < sizes.num_tokens; begin += sizes.group_size) {
      select_group(a, context, b, begin, std::min(begin + sizes.group_size, sizes.num_tokens), memory);
    }
  }
}

}  // namespace shoal
