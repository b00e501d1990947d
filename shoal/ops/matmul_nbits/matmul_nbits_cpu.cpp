// Kernels of matmul_nbits for one instruction set: how codes become weights, and which product they take part in.
#include "shoal/cpu/code_tiles.h"
#include "shoal/cpu/tile_product.h"
#include "shoal/ops/matmul_nbits/matmul_nbits_integer.h"
#include "shoal/ops/matmul_nbits/matmul_nbits_problem.h"

namespace shoal::SHOAL_ISA {

SHOAL_INLINE float read_one(const float* p) { return *p; }
SHOAL_INLINE float read_one(const bf16* p) { return __builtin_bit_cast(float, static_cast<uint32_t>(p->bits) << 16); }
SHOAL_INLINE float read_one(const f16* p) {
#if defined(SHOAL_ISA_SCALAR)
  return f16_to_f32(p->bits);
#else
  return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(p->bits)));
#endif
}

// How a code becomes a weight. kFolded: fma(code, scale, -zero * scale), the same number where that product is exact
// (a zero that is a power of two, or a scale of 11 bits times a zero of 8) and the fma is one operation.
enum class Form { kFolded, kPlain, kPerColumn };

template <int Bits, Form kForm>
class NBitsWeights {
 public:
  static constexpr int kBits = Bits;
  static constexpr int64_t kChunk = kCodeChunk;
  static constexpr bool kDirect = kForm != Form::kPerColumn;  // that one is rare: less code

  explicit NBitsWeights(const MatMulNBitsProblem& problem)
      : problem_(problem),
        codes_{static_cast<const uint8_t*>(problem.args.B.data), problem.row_bytes, problem.args.N},
        block_shift_(__builtin_ctzll(static_cast<uint64_t>(problem.args.block_size))),
        shift_(problem.args.block_size < kCodeChunk ? block_shift_ : 7) {
    static_assert(kCodeChunk == 1 << 7);
  }

  // Not inlined: it is long, and each of its callers would have a copy.
  [[gnu::noinline]] void load(int slot, int64_t n, int64_t k, int64_t count) {
    load_entries(slot, n, k, count);
    unpack_codes<kBits>(starts_[slot], codes_.row_bytes, k, count, words_[slot]);
  }

  // Scales and zeros alone.
  [[gnu::noinline]] void load_entries(int slot, int64_t n, int64_t k, int64_t count) {
    if (k == 0) {
      start_rows(slot, n);
    }
    if constexpr (kForm == Form::kPerColumn) {
      for (int64_t p = 0; p < count; ++p) {
        const int64_t column = k + (kOrder == nullptr ? p : (p & ~int64_t{31}) + kOrder[p & 31]);
        const int32_t* g_idx = static_cast<const int32_t*>(problem_.args.g_idx.data);
        read_entry(slot, p, column < problem_.args.K ? g_idx[column] : 0);
      }
      return;
    }
    int64_t entry = 0;
    if constexpr (kForm != Form::kPerColumn) {
      entry = read_four_entries(slot, k >> block_shift_, count >> shift_);
    }
    for (; entry << shift_ < count; ++entry) {
      const int64_t block = (k + (entry << shift_)) >> block_shift_;
      read_entry(slot, entry, block < problem_.k_blocks ? block : problem_.k_blocks - 1);
    }
  }

  SHOAL_INLINE void four(int slot, int64_t at, Floats (&w)[4]) const {
    Words codes[4];
    split_bytes(load_words(words_[slot] + at / 4 * kLanes), codes);
    for (int j = 0; j < 4; ++j) {
      const int64_t entry = kForm == Form::kPerColumn ? at + j : at >> shift_;
      const Floats scale = SHOAL_ISA::load(scales_[slot][entry]);
      const Floats zero = SHOAL_ISA::load(zeros_[slot][entry]);
      if constexpr (kForm == Form::kFolded) {
        w[j] = fma(to_floats(codes[j]), scale, zero);
      } else {
        w[j] = (to_floats(codes[j]) - zero) * scale;
      }
    }
  }

  SHOAL_INLINE void expand(int slot, int64_t at, int64_t count, float* tile) const {
    for (int64_t i = 0; i < count; i += 4) {
      Floats w[4];
      four(slot, at + i, w);
      for (int j = 0; j < 4; ++j) {
        store(tile + (i + j) * kLanes, w[j]);
      }
    }
  }

  // For integer products: zeros as they are (kPlain).
  int64_t segment() const { return int64_t{1} << shift_; }
  const uint8_t* const* starts(int slot) const { return starts_[slot]; }
  // Columns k ... k + count - 1 can be read from B as they are, and no unit has codes of two segments.
  bool has_whole_units(int64_t k, int64_t count) const {
    constexpr int64_t kUnitCodes = kUnitBytes * 8 / kBits;
    return segment() >= kUnitCodes && count % kUnitCodes == 0 && (k + count) / 8 * kBits <= codes_.row_bytes;
  }
  const uint32_t* words(int slot) const { return words_[slot]; }
  SHOAL_INLINE Floats scale(int slot, int64_t at) const { return SHOAL_ISA::load(scales_[slot][at >> shift_]); }
  SHOAL_INLINE Floats zero(int slot, int64_t at) const { return SHOAL_ISA::load(zeros_[slot][at >> shift_]); }

 private:
  static constexpr const uint8_t* kOrder = code_order<Bits>();
  static constexpr int64_t kEntries = kForm == Form::kPerColumn ? kCodeChunk : kCodeChunk / 16;

  // What stays the same for all chunks of a group.
  void start_rows(int slot, int64_t n) {
    start_of_rows(codes_, n, starts_[slot]);
    const int64_t last = problem_.args.N - 1;
    for (int lane = 0; lane < kLanes; ++lane) {
      const int64_t row = n + lane < last ? n + lane : last;
      table_rows_[slot][lane] = row * problem_.k_blocks;
      packed_rows_[slot][lane] = row * ((problem_.k_blocks * kBits + 7) / 8);
    }
    if (kForm != Form::kFolded && has_default_zeros()) {
      for (int64_t entry = 0; entry < kEntries; ++entry) {
        store(zeros_[slot][entry], splat(static_cast<float>(1 << (kBits - 1))));
      }
    }
  }

  bool has_default_zeros() const { return problem_.args.zero_points.data == nullptr || kBits == 3; }

  // Column `block` of the slot's rows of a table [N, k_blocks].
  SHOAL_INLINE void read_column(const TensorView& table, int slot, int64_t block, float* values) const {
    switch (table.dtype) {
      case DType::kF32: read_column(static_cast<const float*>(table.data) + block, slot, values); break;
      case DType::kF16: read_column(static_cast<const f16*>(table.data) + block, slot, values); break;
      default: read_column(static_cast<const bf16*>(table.data) + block, slot, values); break;
    }
  }
  template <class T>
  SHOAL_INLINE void read_column(const T* column, int slot, float* values) const {
    for (int lane = 0; lane < kLanes; ++lane) {
      values[lane] = read_one(column + table_rows_[slot][lane]);
    }
  }

  // Scales of entries 0 ... from `block` on, four at a time, as far as that goes: f32 scales with default zeros only,
  // as a transposition. Returns the number read.
  SHOAL_INLINE int64_t read_four_entries(int slot, int64_t block, int64_t num_entries) {
    const MatMulNBitsArgs& args = problem_.args;
    if (args.scales.dtype != DType::kF32 || !has_default_zeros()) {
      return 0;
    }
    const uint8_t* rows[kLanes];
    for (int lane = 0; lane < kLanes; ++lane) {
      rows[lane] =
          reinterpret_cast<const uint8_t*>(static_cast<const float*>(args.scales.data) + table_rows_[slot][lane]);
    }
    int64_t entry = 0;
    for (; entry + 4 <= num_entries && block + entry + 4 <= problem_.k_blocks; entry += 4) {
      Words unit[4];
      transpose_unit(rows, (block + entry) * static_cast<int64_t>(sizeof(float)), unit);
      for (int i = 0; i < 4; ++i) {
        const Floats scales = as_floats(unit[i]);
        store(scales_[slot][entry + i], scales);
        if constexpr (kForm == Form::kFolded) {
          store(zeros_[slot][entry + i], scales * splat(-static_cast<float>(1 << (kBits - 1))));
        }
      }
    }
    return entry;
  }

  // Scales and zeros of `block`.
  [[gnu::noinline]] void read_entry(int slot, int64_t entry, int64_t block) {
    float* scales = scales_[slot][entry];
    float* zeros = zeros_[slot][entry];
    const MatMulNBitsArgs& args = problem_.args;
    read_column(args.scales, slot, block, scales);
    if (has_default_zeros()) {
      if constexpr (kForm == Form::kFolded) {
        store(zeros, SHOAL_ISA::load(scales) * splat(-static_cast<float>(1 << (kBits - 1))));
      }
      return;
    }
    if (problem_.packed_zeros) {
      const uint8_t* bytes = static_cast<const uint8_t*>(args.zero_points.data) + block * kBits / 8;
      const int64_t shift = block * kBits % 8;
      for (int lane = 0; lane < kLanes; ++lane) {
        zeros[lane] = static_cast<float>((bytes[packed_rows_[slot][lane]] >> shift) & ((1 << kBits) - 1));
      }
    } else {
      read_column(args.zero_points, slot, block, zeros);
    }
    if constexpr (kForm == Form::kFolded) {
      store(zeros, (SHOAL_ISA::zero() - SHOAL_ISA::load(zeros)) * SHOAL_ISA::load(scales));
    }
  }

  const MatMulNBitsProblem& problem_;
  CodeRows codes_;
  int block_shift_;  // the block size, as a power of two: a division would cost more than an entry
  int shift_;        // columns that share an entry, as a power of two
  const uint8_t* starts_[kSlots][kLanes];
  int64_t table_rows_[kSlots][kLanes];
  int64_t packed_rows_[kSlots][kLanes];
  alignas(64) uint32_t words_[kSlots][kChunkWords * kLanes];
  alignas(64) float scales_[kSlots][kEntries][kLanes];
  alignas(64) float zeros_[kSlots][kEntries][kLanes];
};

template <int kBits>
static void outputs_of(const MatMulNBitsProblem& p, const cpu::ProductRows& rows, const QuantisedRows& quantised,
                       const cpu::ProductOut& out, int64_t begin, int64_t end) {
  if (p.quantises_rows) {
    NBitsWeights<kBits, Form::kPlain> weights(p);
    integer_outputs(weights, rows, quantised, out, begin, end);
    return;
  }
  if (p.args.g_idx.data != nullptr) {
    NBitsWeights<kBits, Form::kPerColumn> weights(p);
    product_outputs(weights, rows, out, begin, end);
    return;
  }
#if !defined(SHOAL_ISA_SCALAR)
  const bool is_default = p.args.zero_points.data == nullptr || kBits == 3;
  if (is_default || (p.packed_zeros && p.args.scales.dtype != DType::kF32)) {
    NBitsWeights<kBits, Form::kFolded> weights(p);
    product_outputs(weights, rows, out, begin, end);
    return;
  }
#endif
  NBitsWeights<kBits, Form::kPlain> weights(p);
  product_outputs(weights, rows, out, begin, end);
}

void matmul_nbits_outputs(const MatMulNBitsProblem& problem, const cpu::ProductRows& rows,
                          const QuantisedRows& quantised, const cpu::ProductOut& out, int64_t begin, int64_t end) {
  switch (problem.args.bits) {
    case 2: outputs_of<2>(problem, rows, quantised, out, begin, end); return;
    case 3: outputs_of<3>(problem, rows, quantised, out, begin, end); return;
    case 4: outputs_of<4>(problem, rows, quantised, out, begin, end); return;
    default: outputs_of<8>(problem, rows, quantised, out, begin, end); return;
  }
}

void matmul_nbits_prepare(const MatMulNBitsProblem& problem, int64_t first, int64_t begin, int64_t end,
                          const cpu::ProductRows& rows, const QuantisedRows& quantised) {
  const uint8_t* order = problem.args.bits == 2 ? code_order<2>() : problem.args.bits == 4 ? code_order<4>() : nullptr;
  for (int64_t row_idx = begin; row_idx < end; ++row_idx) {
    float* values = rows.values + row_idx * rows.stride;
    prepare_row(problem.args.A, first + row_idx, problem.quantises_rows ? nullptr : order, values);
    if (problem.quantises_rows) {
      quantise_row(problem, rows, quantised, row_idx, order);
    }
  }
}

}  // namespace shoal::SHOAL_ISA
