// Entry: the outgoing caches, the entries of a token, one unit after the other, the status.
#include "shoal/ops/dynamic_sparse_attention/dynamic_sparse_attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "shoal/cpu/thread_pool.h"
#include "shoal/ops/dynamic_sparse_attention/dynamic_sparse_attention_problem.h"
#include "shoal/ops/variant.h"

namespace shoal {
namespace dynamic_sparse {
namespace {

// Memory that all threads share.
struct Shared {
  float* key_scales = nullptr;  // [G, H]
  float* value_scales = nullptr;
  float* q_norm_weight = nullptr;  // [H]
  float* k_norm_weight = nullptr;
  float* sink = nullptr;               // [N]
  int32_t* codes = nullptr;            // [B * S]
  int32_t* entries = nullptr;          // [num_threads, M]
  sparse::Scratch* threads = nullptr;  // [num_threads]
};

sparse::Heads heads_of(const Problem& p, float scale) {
  const float applied = scale != 0.0f ? scale : static_cast<float>(1.0 / std::sqrt(static_cast<double>(p.head_dim)));
  return sparse::make_heads(p.type, p.head_dim, p.group(), applied, /*softcap=*/0.0f);
}

// Calls visit(pointer, count) for every array.
template <class Visit>
void visit_arrays(const Problem& p, int num_threads, Shared& shared, Visit&& visit) {
  visit(shared.key_scales, p.quantized ? p.num_kv_heads * p.head_dim : 0);
  visit(shared.value_scales, p.quantized ? p.num_kv_heads * p.head_dim : 0);
  visit(shared.q_norm_weight, p.head.norm ? p.head_dim : 0);
  visit(shared.k_norm_weight, p.head.norm ? p.head_dim : 0);
  visit(shared.sink, p.has_sink ? p.num_heads : 0);
  visit(shared.codes, p.num_rows());
  visit(shared.entries, num_threads * p.max_selected);
  visit(shared.threads, num_threads);
}

// Where a sequence stands.
struct Sequence {
  int64_t total = 0;
  bool sound = false;  // S <= total <= C
};

Sequence sequence(const Problem& p, int64_t seq_idx) {
  const int64_t total = paged::read_index(p.lengths, seq_idx) + 1;
  return {total, total >= p.seq_len && total <= p.capacity};
}

int64_t rotary_position(const Problem& p, int64_t seq_idx, int64_t s) {
  if (p.positions.data == nullptr) {
    return sequence(p, seq_idx).total - p.seq_len + s;
  }
  int64_t position = 0;
  std::memcpy(&position, p.positions.data + seq_idx * p.positions.row_stride + s * p.positions.column_stride,
              sizeof(position));
  return position;
}

bool has_angle(const Problem& p, int64_t position) { return position >= 0 && position < p.head.max_pos; }

// QK-norm and rotary of one head.
void transform(const Problem& p, const float* norm_weight, int64_t seq_idx, int64_t s, const sparse::Heads& heads,
               float* angles, float* head) {
  if (p.head.norm) {
    paged::norm_head(p.head, norm_weight, head);
  }
  const int64_t position = p.head.rotary ? rotary_position(p, seq_idx, s) : -1;
  if (has_angle(p, position)) {
    paged::load_row(p.cos.type, p.cos.first, position, 0, p.head.rotary_dim / 2, angles);
    paged::load_row(p.sin.type, p.sin.first, position, 0, p.head.rotary_dim / 2, angles + heads.stride);
    paged::turn_head(p.head, angles, angles + heads.stride, head);
  }
}

// The outgoing caches, [B, G, C, H].
struct Cache {
  explicit Cache(const Problem& p)
      : store(p.cache_type == DType::kF16    ? paged::Store::kF16
              : p.cache_type == DType::kBF16 ? paged::Store::kBF16
              : p.cache_type == DType::kI8   ? paged::Store::kI8
                                             : paged::Store::kF32),
        item_bytes(static_cast<int64_t>(size_of(p.cache_type))),
        row_bytes(p.head_dim * item_bytes),
        head_bytes(p.capacity * row_bytes),
        batch_bytes(p.num_kv_heads * head_bytes) {}
  sparse::RowSource rows(const TensorView& cache, int64_t seq_idx, const float* scales) const {
    return {cache.as<const std::byte>() + seq_idx * batch_bytes, store, row_bytes, head_bytes, item_bytes, scales};
  }
  paged::Store store;
  int64_t item_bytes;
  int64_t row_bytes;
  int64_t head_bytes;
  int64_t batch_bytes;
};

// The valid entries of one token.
class Candidates final : public sparse::CandidateList {
 public:
  Candidates(const DynamicSparseAttentionArgs& args, const Problem& p, const Shared& shared, int64_t row)
      : p_(p), row_(row), num_selected_(std::clamp<int64_t>(paged::read_index(p.counts, row), 0, p.max_selected)) {
    const int64_t seq_idx = row / p.seq_len;
    const Sequence seq = sequence(p, seq_idx);
    const Cache cache(p);
    main_ = {cache.rows(args.present_key, seq_idx, p.quantized ? shared.key_scales : nullptr),
             cache.rows(args.present_value, seq_idx, p.quantized ? shared.value_scales : nullptr)};
    const int64_t pos = seq.sound ? seq.total - p.seq_len + row % p.seq_len : -1;
    if (p.local) {
      next_local_ = std::max<int64_t>(0, pos - p.window + 1);
      local_end_ = pos + 1;
      auxiliary_ = p.auxiliary;
      auxiliary_.key.data += seq_idx * p.auxiliary_key_stride;
      auxiliary_.value.data += seq_idx * p.auxiliary_value_stride;
    }
    selectable_ = p.local ? p.auxiliary_length : pos + 1;
  }

  int64_t take(sparse::Candidate* out) override {
    int64_t count = 0;
    while (count < paged::kTile && next_local_ < local_end_) {
      out[count++] = {&main_, next_local_++};
    }
    while (count < paged::kTile && next_selected_ < num_selected_) {
      const int64_t entry = paged::read_index(p_.selected, row_, next_selected_++);
      if (entry >= 0 && entry < selectable_) {
        out[count++] = {p_.local ? &auxiliary_ : &main_, entry};
      }
    }
    return count;
  }

 private:
  const Problem& p_;
  int64_t row_;
  int64_t num_selected_;
  int64_t next_local_ = 0;
  int64_t local_end_ = 0;
  int64_t next_selected_ = 0;
  int64_t selectable_ = 0;  // entries below it are valid
  sparse::Source main_;
  sparse::Source auxiliary_;
};

// ---- the step's rows into the caches ----

// What past holds for one KV head, then zeros.
void start_head(const Problem& p, const TensorView& past, const TensorView& present, int64_t head_idx,
                int64_t row_bytes) {
  std::byte* to = present.as<std::byte>() + head_idx * p.capacity * row_bytes;
  const auto kept = static_cast<size_t>(p.past_capacity * row_bytes);
  if (kept > 0) {
    std::memcpy(to, past.as<std::byte>() + head_idx * p.past_capacity * row_bytes, kept);
  }
  std::memset(to + kept, 0, static_cast<size_t>((p.capacity - p.past_capacity) * row_bytes));
}

void append(const DynamicSparseAttentionArgs& args, const Problem& p, const Shared& shared, const sparse::Heads& heads,
            int64_t seq_idx, int64_t kv_head, const sparse::Scratch& scratch) {
  const Cache cache(p);
  const int64_t head_idx = seq_idx * p.num_kv_heads + kv_head;
  if (p.grows) {
    start_head(p, args.past_key, args.present_key, head_idx, cache.row_bytes);
    start_head(p, args.past_value, args.present_value, head_idx, cache.row_bytes);
  }
  const auto write = [&](const TensorView& present, const float* scales, int64_t pos, const float* values) {
    paged::encode_row(cache.store, values, p.quantized ? scales + kv_head * p.head_dim : nullptr, p.head_dim,
                      present.as<std::byte>() + head_idx * cache.head_bytes + pos * cache.row_bytes);
  };
  const int64_t first = sequence(p, seq_idx).total - p.seq_len;
  for (int64_t s = std::max<int64_t>(0, -first); s < p.seq_len && first + s < p.capacity; ++s) {
    float* head = scratch.rows;
    paged::load_row(p.key.type, p.key.of(seq_idx), s, kv_head * p.head_dim, p.head_dim, head);
    transform(p, shared.k_norm_weight, seq_idx, s, heads, scratch.angles, head);
    write(args.present_key, shared.key_scales, first + s, head);
    paged::load_row(p.value.type, p.value.of(seq_idx), s, kv_head * p.head_dim, p.head_dim, head);
    write(args.present_value, shared.value_scales, first + s, head);
  }
}

void prepare_queries(const Problem& p, const Shared& shared, const sparse::Heads& heads, int64_t row, int64_t kv_head,
                     const sparse::Scratch& scratch) {
  const int64_t seq_idx = row / p.seq_len;
  const int64_t s = row % p.seq_len;
  for (int64_t r = 0; r < heads.group; ++r) {
    float* head = scratch.query + r * heads.stride;
    paged::load_row(p.query.type, p.query.of(seq_idx), s, (kv_head * heads.group + r) * p.head_dim, p.head_dim, head);
    transform(p, shared.q_norm_weight, seq_idx, s, heads, scratch.angles, head);
    std::fill(head + p.head_dim, head + heads.stride, 0.0f);
  }
}

// ---- validation_status ----

enum Status : int32_t {
  kOk = 0,
  kCount = 1,
  kPadding = 2,
  kNegative = 3,
  kOutOfBounds = 4,
  kDuplicate = 5,
  kNotCausal = 6,
  kLength = 7,
  kPosition = 8,
  kCursor = 9,
  kScale = 10,
};

// The code of a row; `sorted` is memory for its entries.
int32_t status_of_row(const Problem& p, int64_t row, int32_t* sorted) {
  const int64_t seq_idx = row / p.seq_len;
  const int64_t s = row % p.seq_len;
  const Sequence seq = sequence(p, seq_idx);
  if (!seq.sound || seq.total > p.total_length) {
    return kLength;
  }
  if (p.head.rotary && !has_angle(p, rotary_position(p, seq_idx, s))) {
    return kPosition;
  }
  const int64_t count = paged::read_index(p.counts, row);
  if (count < 0 || count > p.max_selected) {
    return kCount;
  }
  const int64_t pos = seq.total - p.seq_len + s;
  const int64_t source_length = p.local ? p.auxiliary_length : seq.total;
  int32_t code = kOk;
  int64_t num_good = 0;
  for (int64_t i = 0; i < p.max_selected && code == kOk; ++i) {
    const int64_t entry = paged::read_index(p.selected, row, i);
    if (i >= count) {
      code = entry == -1 ? kOk : kPadding;
    } else if (entry < 0) {
      code = kNegative;
    } else if (entry >= source_length) {
      code = kOutOfBounds;
    } else if (!p.local && entry > pos) {
      code = kNotCausal;
    } else {
      sorted[num_good++] = static_cast<int32_t>(entry);
    }
  }
  // A second occurrence stands before the entry that `code` is about.
  std::sort(sorted, sorted + num_good);
  return std::adjacent_find(sorted, sorted + num_good) != sorted + num_good ? kDuplicate : code;
}

int32_t status_of_call(const Problem& p, const Shared& shared) {
  for (int64_t i = 0; p.quantized && i < p.num_kv_heads * p.head_dim; ++i) {
    for (const float scale : {shared.key_scales[i], shared.value_scales[i]}) {
      if (!(scale > 0.0f) || !std::isfinite(scale)) {
        return kScale;
      }
    }
  }
  for (int64_t seq_idx = 0; p.committed.data != nullptr && seq_idx < p.batch; ++seq_idx) {
    const int64_t committed = paged::read_index(p.committed, seq_idx);
    const Sequence seq = sequence(p, seq_idx);
    if (!seq.sound || committed < 0 || committed + p.seq_len != seq.total) {
      return kCursor;
    }
  }
  const int32_t* const codes = shared.codes;
  const int32_t* const end = codes + p.num_rows();
  const int32_t* first = std::find_if(codes, end, [](int32_t code) { return code != kOk; });
  return first == end ? int32_t{kOk} : *first;
}

// ---- the call ----

void load_vector(const Rows& rows, int64_t count, float* out) {
  paged::load_row(rows.type, rows.first, 0, 0, count, out);
}

void fill_shared(const DynamicSparseAttentionArgs& args, const Problem& p, const Shared& shared) {
  if (p.quantized) {
    paged::Problem sizes;
    sizes.num_kv_heads = p.num_kv_heads;
    sizes.head_dim = p.head_dim;
    const auto fill = [&](const TensorView& view, float* scales) {
      paged::CacheSide side;
      side.scale = &view;
      paged::fill_scales(sizes, side, scales);
    };
    fill(args.key_scale, shared.key_scales);
    fill(args.value_scale, shared.value_scales);
  }
  if (p.head.norm) {
    load_vector(p.q_norm_weight, p.head_dim, shared.q_norm_weight);
    load_vector(p.k_norm_weight, p.head_dim, shared.k_norm_weight);
  }
  if (p.sink.first.data != nullptr) {
    load_vector(p.sink, p.num_heads, shared.sink);
  } else if (p.has_sink) {
    std::fill_n(shared.sink, p.num_heads, 0.0f);
  }
}

void run(const DynamicSparseAttentionArgs& args, const Problem& p, const OpContext& context) {
  cpu::ThreadPool& pool = *context.pool;
  require(context.workspace != nullptr, kOp, ": a workspace is required");
  const Workspace::Scope scope(*context.workspace);
  Shared shared;
  visit_arrays(p, pool.num_threads(), shared, [&](auto*& pointer, int64_t count) {
    pointer = context.workspace->take<std::remove_reference_t<decltype(*pointer)>>(static_cast<size_t>(count)).data();
  });
  sparse::Heads heads = heads_of(p, args.scale);
  heads.sink = p.has_sink ? shared.sink : nullptr;
  for (int i = 0; i < pool.num_threads(); ++i) {
    shared.threads[i] = sparse::take_scratch(heads, *context.workspace);
  }
  fill_shared(args, p, shared);

  pool.parallel_for(p.batch * p.num_kv_heads, 1, [&](int64_t begin, int64_t end, int thread_idx) {
    for (int64_t i = begin; i < end; ++i) {
      append(args, p, shared, heads, i / p.num_kv_heads, i % p.num_kv_heads, shared.threads[thread_idx]);
    }
  });
  const sparse::Attend attend = sparse::pick_attend(context.isa);
  const auto item_bytes = static_cast<int64_t>(size_of(p.type));
  pool.parallel_for(p.num_rows() * p.num_kv_heads, 1, [&](int64_t begin, int64_t end, int thread_idx) {
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t row = unit / p.num_kv_heads;
      const int64_t kv_head = unit % p.num_kv_heads;
      prepare_queries(p, shared, heads, row, kv_head, shared.threads[thread_idx]);
      Candidates candidates(args, p, shared, row);
      const int64_t element = row / p.seq_len * args.output.stride(0) + row % p.seq_len * args.output.stride(1) +
                              kv_head * heads.group * p.head_dim;
      attend(heads, kv_head, candidates, shared.threads[thread_idx],
             args.output.as<std::byte>() + element * item_bytes);
    }
  });
  if (args.validation_status) {
    pool.parallel_for(p.num_rows(), 16, [&](int64_t begin, int64_t end, int thread_idx) {
      for (int64_t row = begin; row < end; ++row) {
        shared.codes[row] = status_of_row(p, row, shared.entries + thread_idx * p.max_selected);
      }
    });
    const int32_t status = status_of_call(p, shared);
    std::memcpy(args.validation_status.data, &status, sizeof(status));
  }
}

}  // namespace
}  // namespace dynamic_sparse

DynamicSparseAttentionShapes dynamic_sparse_attention_shapes(const DynamicSparseAttentionArgs& args) {
  return dynamic_sparse::shapes_of(args, dynamic_sparse::check(args));
}

size_t dynamic_sparse_attention_workspace_bytes(const DynamicSparseAttentionArgs& args, int num_threads) {
  require(num_threads > 0, dynamic_sparse::kOp, ": num_threads is ", num_threads, ", expected more than 0");
  const dynamic_sparse::Problem problem = dynamic_sparse::check(args);
  size_t num_bytes =
      static_cast<size_t>(num_threads) * sparse::scratch_bytes(dynamic_sparse::heads_of(problem, args.scale));
  dynamic_sparse::Shared shared;
  dynamic_sparse::visit_arrays(problem, num_threads, shared, [&](auto* pointer, int64_t count) {
    num_bytes += Workspace::bytes_for<std::remove_pointer_t<decltype(pointer)>>(static_cast<size_t>(count));
  });
  return num_bytes;
}

void dynamic_sparse_attention(const DynamicSparseAttentionArgs& args, const OpContext& context) {
  wants_reference(dynamic_sparse::kOp, context.variant);  // one path for both
  const dynamic_sparse::Problem problem = dynamic_sparse::check(args);
  dynamic_sparse::check_outputs(args, problem);
  dynamic_sparse::run(args, problem, context);
}

}  // namespace shoal
