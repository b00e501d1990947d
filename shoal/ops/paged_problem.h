// A checked call of paged_attention, resolved to sizes, formats and plain accessors. Shared by the operators that have
// its prologue or its cache (sparse_paged_attention, dynamic_sparse_attention); the sources are paged_attention's.
//
// Everything here that has a body runs once per call, row or page: vector code calls it, it is compiled once.
#pragma once

#include <cstddef>
#include <cstdint>

#include "shoal/ops/paged_attention/paged_attention.h"

namespace shoal::paged {

constexpr int64_t kTile = 64;       // keys that the inner loops take together
constexpr int64_t kPad = 16;        // rows of f32 scratch are whole vectors of every instruction set
constexpr float kEmpty = -3.0e38f;  // maximum of a row that has no key yet: finite, so that differences are not NaN

// What one cached channel is.
enum class Store : uint8_t { kF32, kF16, kBF16, kI8, kF8, kI4 };

struct CacheSide {
  std::byte* data = nullptr;
  Store store = Store::kF32;
  int64_t head_bytes = 0;   // one head of one token
  int64_t token_bytes = 0;  // all heads of one token
  const TensorView* scale = nullptr;
  bool quantized() const { return scale != nullptr; }
};

// [rows, columns] of T or i32 with any strides; a one-dimensional tensor has one column.
struct Matrix {
  const std::byte* data = nullptr;
  int64_t row_stride = 0;  // bytes
  int64_t column_stride = 0;
};
Matrix matrix_of(const TensorView& view);

struct Problem {
  DType type = DType::kF32;  // T
  int64_t num_tokens = 0;
  int64_t num_seqs = 0;
  int64_t num_heads = 0;
  int64_t num_kv_heads = 0;
  int64_t group = 0;  // query heads of one KV head
  int64_t head_dim = 0;
  int64_t v_head_dim = 0;
  int64_t num_pages = 0;
  int64_t page_size = 0;
  int64_t num_columns = 0;  // M

  bool latent = false;
  bool is_causal = true;
  int64_t window = 0;  // 0: none
  float scale = 1.0f;
  float softcap = 0.0f;  // 0: off

  bool rotary = false;
  bool rotary_interleaved = false;
  int64_t rotary_offset = 0;
  int64_t rotary_dim = 0;
  int64_t max_pos = 0;
  bool norm = false;
  float epsilon = 0.0f;

  Matrix query, key, value;  // [num_tokens, heads * H]
  Matrix cos, sin;
  Matrix q_norm_weight, k_norm_weight, sink;  // sink.data may be null
  Matrix cu, past, table, slots;              // i32; slots.data may be null
  CacheSide k_cache, v_cache;                 // LATENT: v_cache is k_cache
  std::byte* output = nullptr;
  int64_t output_stride = 0;  // bytes
};

// Checks everything that the contract names and resolves it. `shapes_only` skips what needs contents; `op` is the
// operator's name in messages. Tensors are on the CPU, or all on the device of the query if the operator
// `runs_on_devices`; contents are not read there. The result refers to `args`.
Problem check(const PagedAttentionArgs& args, bool shapes_only, std::string_view op = "paged_attention",
              bool runs_on_devices = false);

// Element of an i32 matrix.
int64_t read_index(const Matrix& matrix, int64_t row, int64_t column = 0);

// What the metadata tensors say, safe whatever they contain.
struct Sequence {
  int64_t begin = 0;  // first token
  int64_t end = 0;
  int64_t past = 0;
  bool sound = false;
  int64_t kv_len() const { return past + (end - begin); }
};
Sequence sequence(const Problem& problem, int64_t seq_idx);

// owner[t]: the first sound sequence that claims token t, -1 if none does.
void assign_owners(const Problem& problem, int32_t* owner);

// Page of a position, -1 if it is not mapped.
int64_t page_of(const Problem& problem, int64_t seq_idx, int64_t pos);

// Flat slot that a token's K and V go to, -1 if they are not written.
int64_t write_slot(const Problem& problem, int64_t seq_idx, int64_t token_idx, int64_t pos);

// Admitted positions [begin, end) of a token at `pos`, before unmapped pages are taken out.
struct KeyRange {
  int64_t begin = 0;
  int64_t end = 0;
};
KeyRange key_range(const Problem& problem, const Sequence& seq, int64_t pos);

// Scale of every KV head and channel, [num_kv_heads, head_dim].
void fill_scales(const Problem& problem, const CacheSide& side, float* scales);

// One row of T, i32 or f32 values as f32.
void load_row(DType type, const Matrix& matrix, int64_t row, int64_t first, int64_t count, float* out);
// `count` f32 values rounded to T.
void store_row(DType type, const float* values, int64_t count, std::byte* out);

// Rows of cache formats that have no vector code.
void encode_row(Store store, const float* values, const float* scales, int64_t count, std::byte* out);
void decode_codes(Store store, const std::byte* in, int64_t count, float* out);  // without the scale

// QK-norm and rotary of one head in place, each rounded to T. The bytes of the fast path's prologue.
void norm_head(const Problem& problem, const float* weight, float* head);
void turn_head(const Problem& problem, const float* cos, const float* sin, float* head);  // one row of the tables

// The reference: allocates, one thread.
void run_ref(const Problem& problem);

}  // namespace shoal::paged
