// Entry: the append, the candidates of a token, one unit after the other.
#include "shoal/ops/sparse_paged_attention/sparse_paged_attention.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "shoal/base/checked.h"
#include "shoal/cpu/thread_pool.h"
#include "shoal/ops/sparse_paged_attention/sparse_paged_attention_problem.h"
#include "shoal/ops/variant.h"

namespace shoal {
namespace sparse_paged {
namespace {

// Memory that all threads share.
struct Shared {
  int32_t* owner = nullptr;   // [num_tokens]
  float* keys = nullptr;      // [num_tokens, G, stride], the step's own, normed and turned
  float* k_scales = nullptr;  // [G, H]
  float* v_scales = nullptr;
  float* q_norm_weight = nullptr;  // [H]
  float* k_norm_weight = nullptr;
  float* sink = nullptr;               // [N]
  sparse::Scratch* threads = nullptr;  // [num_threads]
};

sparse::Heads heads_of(const paged::Problem& p) {
  sparse::Heads heads = sparse::make_heads(p.type, p.head_dim, p.group, p.scale, p.softcap);
  heads.v_head_dim = p.v_head_dim;
  heads.shared_rows = p.latent;
  return heads;
}

// Calls visit(pointer, count) for every array.
template <class Visit>
void visit_arrays(const paged::Problem& p, int num_threads, Shared& shared, Visit&& visit) {
  visit(shared.owner, p.num_tokens);
  visit(shared.keys, p.num_tokens * p.num_kv_heads * heads_of(p).stride);
  visit(shared.k_scales, p.k_cache.quantized() ? p.num_kv_heads * p.head_dim : 0);
  visit(shared.v_scales, p.v_cache.quantized() ? p.num_kv_heads * p.head_dim : 0);
  visit(shared.q_norm_weight, p.norm ? p.head_dim : 0);
  visit(shared.k_norm_weight, p.norm ? p.head_dim : 0);
  visit(shared.sink, p.sink.data != nullptr ? p.num_heads : 0);
  visit(shared.threads, num_threads);
}

// QK-norm and rotary of one head at a position.
void transform(const paged::Problem& p, const float* norm_weight, int64_t pos, float* angles, int64_t stride,
               float* head) {
  if (p.norm) {
    paged::norm_head(p, norm_weight, head);
  }
  if (p.rotary) {
    const int64_t row = std::min(pos, p.max_pos - 1);
    paged::load_row(p.type, p.cos, row, 0, p.rotary_dim / 2, angles);
    paged::load_row(p.type, p.sin, row, 0, p.rotary_dim / 2, angles + stride);
    paged::turn_head(p, angles, angles + stride, head);
  }
}

// The valid candidates of one token and KV head.
class Candidates final : public sparse::CandidateList {
 public:
  Candidates(const Problem& problem, const Shared& shared, const sparse::Heads& heads, int64_t seq_idx,
             int64_t token_idx, int64_t kv_head)
      : problem_(problem),
        p_(problem.paged),
        seq_(paged::sequence(p_, seq_idx)),
        seq_idx_(seq_idx),
        selection_row_(problem.by_head ? token_idx * problem.paged.num_kv_heads + kv_head : token_idx) {
    pos_ = seq_.past + token_idx - seq_.begin;
    last_ = p_.is_causal ? pos_ : seq_.kv_len() - 1;
    num_selected_ = std::clamp<int64_t>(paged::read_index(problem.counts, selection_row_), 0, problem.max_selected);
    if (problem.local) {
      local_begin_ = p_.window > 0 ? std::max<int64_t>(0, pos_ - p_.window + 1) : 0;
      next_local_ = local_begin_;
      local_end_ = std::min(last_ + 1, p_.num_columns * p_.page_size);
    }
    cached_.key = cache_rows(p_.k_cache, shared.k_scales);
    cached_.value = cache_rows(p_.v_cache, shared.v_scales);
    // V of this step is read from its input; in LATENT nobody asks.
    current_.key = {reinterpret_cast<const std::byte*>(shared.keys),
                    paged::Store::kF32,
                    p_.num_kv_heads * heads.stride * 4,
                    heads.stride * 4,
                    4,
                    nullptr};
    current_.value = {p_.value.data,          store_of(p_.type),
                      p_.value.row_stride,    p_.head_dim * p_.value.column_stride,
                      p_.value.column_stride, nullptr};
    if (problem.auxiliary) {
      num_rows_ = std::min<int64_t>(paged::read_index(problem.lengths, seq_idx), problem.capacity);
      auxiliary_ = problem.auxiliary_rows;
      auxiliary_.key.data += seq_idx * problem.auxiliary_key_stride;
      auxiliary_.value.data += seq_idx * problem.auxiliary_value_stride;
    }
  }

  int64_t take(sparse::Candidate* out) override {
    int64_t count = 0;
    while (count < paged::kTile && next_local_ < local_end_) {
      count += find(next_local_++, out[count]) ? 1 : 0;
    }
    while (count < paged::kTile && next_selected_ < num_selected_) {
      const int64_t entry = paged::read_index(problem_.selected, selection_row_, next_selected_++);
      if (problem_.auxiliary) {
        if (entry >= 0 && entry < num_rows_) {
          out[count++] = {&auxiliary_, entry};
        }
      } else if (!(problem_.local && entry >= local_begin_ && entry <= last_)) {
        count += find(entry, out[count]) ? 1 : 0;
      }
    }
    return count;
  }

 private:
  static paged::Store store_of(DType type) {
    return type == DType::kF16 ? paged::Store::kF16 : type == DType::kBF16 ? paged::Store::kBF16 : paged::Store::kF32;
  }

  // Whether a row of the cache is the row that was written.
  bool holds_exactly(paged::Store store) const { return store == store_of(p_.type) || store == paged::Store::kF32; }

  sparse::RowSource cache_rows(const paged::CacheSide& side, const float* scales) const {
    return {side.data,
            side.store,
            side.token_bytes,
            side.head_bytes,
            side.head_bytes / p_.head_dim,
            side.quantized() ? scales : nullptr};
  }

  // Where the row of a position of the main cache is read; false if the position is not valid.
  bool find(int64_t pos, sparse::Candidate& out) const {
    if (pos < 0 || pos > last_ || pos >= seq_.kv_len()) {
      return false;
    }
    const int64_t page = paged::page_of(p_, seq_idx_, pos);
    if (page < 0) {
      return false;
    }
    out = {&cached_, page * p_.page_size + pos % p_.page_size};
    if (pos < seq_.past) {
      return true;
    }
    const int64_t token_idx = seq_.begin + pos - seq_.past;
    if (p_.slots.data != nullptr) {
      const int64_t slot = paged::read_index(p_.slots, token_idx);
      if (slot < 0) {
        return true;
      }
      if (slot >= p_.num_pages * p_.page_size) {
        return false;
      }
      out.row = slot;
    }
    if (holds_exactly(p_.k_cache.store)) {
      out = {&current_, token_idx};
    }
    return true;
  }

  const Problem& problem_;
  const paged::Problem& p_;
  paged::Sequence seq_;
  int64_t seq_idx_;
  int64_t selection_row_;
  int64_t pos_ = 0;
  int64_t last_ = 0;  // the last position that the token may see
  int64_t local_begin_ = 0;
  int64_t local_end_ = 0;
  int64_t next_local_ = 0;
  int64_t num_selected_ = 0;
  int64_t next_selected_ = 0;
  int64_t num_rows_ = 0;
  sparse::Source cached_;
  sparse::Source current_;
  sparse::Source auxiliary_;
};

void fill_shared(const paged::Problem& p, const Shared& shared) {
  paged::assign_owners(p, shared.owner);
  if (p.k_cache.quantized()) {
    paged::fill_scales(p, p.k_cache, shared.k_scales);
    paged::fill_scales(p, p.v_cache, shared.v_scales);
  }
  if (p.norm) {
    paged::load_row(p.type, p.q_norm_weight, 0, 0, p.head_dim, shared.q_norm_weight);
    paged::load_row(p.type, p.k_norm_weight, 0, 0, p.head_dim, shared.k_norm_weight);
  }
  if (p.sink.data != nullptr) {
    paged::load_row(p.type, p.sink, 0, 0, p.num_heads, shared.sink);
  }
}

int64_t position(const paged::Problem& p, const Shared& shared, int64_t token_idx) {
  const paged::Sequence seq = paged::sequence(p, shared.owner[token_idx]);
  return seq.past + token_idx - seq.begin;
}

// K and V of KV head `kv_head`, tokens in order: where several have one slot, the last one stays.
void append(const paged::Problem& p, const Shared& shared, const sparse::Heads& heads, int64_t kv_head,
            const sparse::Scratch& scratch) {
  const auto write = [&](const paged::CacheSide& side, const float* scales, const float* values, int64_t slot) {
    paged::encode_row(side.store, values, side.quantized() ? scales + kv_head * p.head_dim : nullptr, p.head_dim,
                      side.data + slot * side.token_bytes + kv_head * side.head_bytes);
  };
  for (int64_t t = 0; t < p.num_tokens; ++t) {
    if (shared.owner[t] < 0) {
      continue;
    }
    const int64_t pos = position(p, shared, t);
    float* key = shared.keys + (t * p.num_kv_heads + kv_head) * heads.stride;
    paged::load_row(p.type, p.key, t, kv_head * p.head_dim, p.head_dim, key);
    transform(p, shared.k_norm_weight, pos, scratch.angles, heads.stride, key);
    const int64_t slot = paged::write_slot(p, shared.owner[t], t, pos);
    if (slot >= 0) {
      write(p.k_cache, shared.k_scales, key, slot);
    }
    if (slot >= 0 && !p.latent) {
      paged::load_row(p.type, p.value, t, kv_head * p.head_dim, p.head_dim, scratch.rows);
      write(p.v_cache, shared.v_scales, scratch.rows, slot);
    }
  }
}

void prepare_queries(const paged::Problem& p, const Shared& shared, const sparse::Heads& heads, int64_t token_idx,
                     int64_t kv_head, const sparse::Scratch& scratch) {
  const int64_t pos = position(p, shared, token_idx);
  for (int64_t r = 0; r < p.group; ++r) {
    float* head = scratch.query + r * heads.stride;
    paged::load_row(p.type, p.query, token_idx, (kv_head * p.group + r) * p.head_dim, p.head_dim, head);
    transform(p, shared.q_norm_weight, pos, scratch.angles, heads.stride, head);
    std::fill(head + p.head_dim, head + heads.stride, 0.0f);
  }
}

void run(const Problem& problem, const OpContext& context) {
  const paged::Problem& p = problem.paged;
  cpu::ThreadPool& pool = *context.pool;
  require(context.workspace != nullptr, kOp, ": a workspace is required");
  const Workspace::Scope scope(*context.workspace);
  Shared shared;
  visit_arrays(p, pool.num_threads(), shared, [&](auto*& pointer, int64_t count) {
    pointer = context.workspace->take<std::remove_reference_t<decltype(*pointer)>>(static_cast<size_t>(count)).data();
  });
  sparse::Heads heads = heads_of(p);
  for (int i = 0; i < pool.num_threads(); ++i) {
    shared.threads[i] = sparse::take_scratch(heads, *context.workspace);
  }
  fill_shared(p, shared);
  heads.sink = p.sink.data != nullptr ? shared.sink : nullptr;

  pool.parallel_for(p.num_kv_heads, 1, [&](int64_t begin, int64_t end, int thread_idx) {
    for (int64_t kv_head = begin; kv_head < end; ++kv_head) {
      append(p, shared, heads, kv_head, shared.threads[thread_idx]);
    }
  });
  const auto attend = sparse::pick_attend(context.isa);
  const int64_t unit_bytes = p.group * p.v_head_dim * static_cast<int64_t>(size_of(p.type));
  pool.parallel_for(p.num_tokens * p.num_kv_heads, 1, [&](int64_t begin, int64_t end, int thread_idx) {
    const sparse::Scratch& scratch = shared.threads[thread_idx];
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t token_idx = unit / p.num_kv_heads;
      const int64_t kv_head = unit % p.num_kv_heads;
      std::byte* output = p.output + token_idx * p.output_stride + kv_head * unit_bytes;
      if (shared.owner[token_idx] < 0) {
        std::memset(output, 0, static_cast<size_t>(unit_bytes));
        continue;
      }
      prepare_queries(p, shared, heads, token_idx, kv_head, scratch);
      Candidates candidates(problem, shared, heads, shared.owner[token_idx], token_idx, kv_head);
      attend(heads, kv_head, candidates, scratch, output);
    }
  });
}

}  // namespace
}  // namespace sparse_paged

SparsePagedAttentionShapes sparse_paged_attention_shapes(const SparsePagedAttentionArgs& args) {
  sparse_paged::Problem problem;
  sparse_paged::check(args, /*shapes_only=*/true, problem);
  const auto like = [](const TensorView& view) {
    return OutputSpec{view.dtype, {view.dims().begin(), view.dims().end()}};
  };
  return {{args.query.dtype, {problem.paged.num_tokens, problem.paged.num_heads * problem.paged.v_head_dim}},
          like(args.key_cache),
          args.value_cache ? like(args.value_cache) : OutputSpec{}};
}

size_t sparse_paged_attention_workspace_bytes(const SparsePagedAttentionArgs& args, int num_threads) {
  require(num_threads > 0, sparse_paged::kOp, ": num_threads is ", num_threads, ", expected more than 0");
  sparse_paged::Problem problem;
  sparse_paged::check(args, /*shapes_only=*/true, problem);
  size_t num_bytes = static_cast<size_t>(num_threads) * sparse::scratch_bytes(sparse_paged::heads_of(problem.paged));
  sparse_paged::Shared shared;
  sparse_paged::visit_arrays(problem.paged, num_threads, shared, [&](auto* pointer, int64_t count) {
    num_bytes += Workspace::bytes_for<std::remove_pointer_t<decltype(pointer)>>(static_cast<size_t>(count));
  });
  return num_bytes;
}

void sparse_paged_attention(const SparsePagedAttentionArgs& args, const OpContext& context) {
  wants_reference(sparse_paged::kOp, context.variant);  // one path for both
  sparse_paged::Problem problem;
  sparse_paged::check(args, /*shapes_only=*/false, problem);
  if (problem.paged.num_tokens > 0) {
    sparse_paged::run(problem, context);
  }
}

}  // namespace shoal
