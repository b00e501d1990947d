// Kernels of matmul_packed for one instruction set: blocks are decoded row by row, 256 columns at a time (whole blocks
// of every format), then transposed into the tile.
#include "shoal/cpu/code_tiles.h"
#include "shoal/cpu/tile_product.h"
#include "shoal/ops/matmul_packed/matmul_packed_problem.h"
#include "shoal/quant/visit_format.h"

namespace shoal::SHOAL_ISA {

using DecodeBlocks = void (*)(const std::byte* blocks, int64_t num_blocks, float* values);

template <class F>
static void decode_blocks(const std::byte* blocks, int64_t num_blocks, float* values) {
  for (int64_t i = 0; i < num_blocks; ++i) {
    F::decode(blocks + i * F::kBlockBytes, values + i * F::kBlockSize);
  }
}

// Rounds in place, `count` a multiple of kLanes; NaN stays NaN.
template <class T>
static void round_values(float* values, int64_t count) {
  for (int64_t i = 0; i < count; i += kLanes) {
    T narrow[kLanes];
    store(narrow, load(values + i));
    store(values + i, load(narrow));
  }
}

class PackedWeights {
 public:
  static constexpr int64_t kChunk = 256;
  static constexpr bool kDirect = false;

  explicit PackedWeights(const MatMulPackedProblem& problem)
      : problem_(problem),
        decode_(visit_format(problem.format, []<class F>() -> DecodeBlocks { return &decode_blocks<F>; })) {}

  void load(int slot, int64_t n, int64_t k, int64_t count) {
    for (int lane = 0; lane < kLanes; ++lane) {
      const int64_t row = n + lane < problem_.args.N ? n + lane : problem_.args.N - 1;
      const std::byte* blocks = static_cast<const std::byte*>(problem_.args.B.data) + row * problem_.row_bytes +
                                k / problem_.block_size * problem_.block_bytes;
      float* values = values_[slot][lane];
      decode_(blocks, count / problem_.block_size, values);
      if (problem_.rounds_weights && problem_.args.A.dtype == DType::kF16) {
        round_values<f16>(values, count);
      } else if (problem_.rounds_weights) {
        round_values<bf16>(values, count);
      }
    }
  }

  void expand(int slot, int64_t at, int64_t count, float* tile) const {
    const uint8_t* rows[kLanes];
    for (int lane = 0; lane < kLanes; ++lane) {
      rows[lane] = reinterpret_cast<const uint8_t*>(values_[slot][lane] + at);
    }
    for (int64_t i = 0; i < count; i += 4) {  // a unit is 16 bytes: 4 values
      Words unit[4];
      transpose_unit(rows, i * 4, unit);
      for (int j = 0; j < 4; ++j) {
        store(tile + (i + j) * kLanes, as_floats(unit[j]));
      }
    }
  }

 private:
  const MatMulPackedProblem& problem_;
  DecodeBlocks decode_;
  alignas(64) float values_[kTileGroups][kLanes][kChunk];
};

template <class T>
static void activate(PackedActivation activation, T* y, int64_t count) {
  for (int64_t i = 0; i < count; i += kLanes) {
    const int64_t lanes = count - i;
    const Floats x = lanes >= kLanes ? load(y + i) : load_partial(y + i, lanes);
    const Floats positive = max(zero(), x);  // NaN passes in this order
    const Floats result =
        activation == PackedActivation::kRelu2 ? positive * positive : x / (splat(1.0f) + exp(zero() - x));
    if (lanes >= kLanes) {
      store(y + i, result);
    } else {
      store_partial(y + i, result, lanes);
    }
  }
}

void matmul_packed_outputs(const MatMulPackedProblem& problem, const cpu::ProductRows& rows, const cpu::ProductOut& out,
                           int64_t begin, int64_t end) {
  PackedWeights weights(problem);
  product_outputs(weights, rows, out, begin, end);
  if (problem.activation == PackedActivation::kNone) {
    return;
  }
  for (int64_t row_idx = 0; row_idx < rows.count; ++row_idx) {
    const int64_t at = row_idx * out.stride + begin;
    switch (out.type) {
      case DType::kF32: activate(problem.activation, static_cast<float*>(out.data) + at, end - begin); break;
      case DType::kF16: activate(problem.activation, static_cast<f16*>(out.data) + at, end - begin); break;
      default: activate(problem.activation, static_cast<bf16*>(out.data) + at, end - begin); break;
    }
  }
}

void matmul_packed_prepare(const MatMulPackedProblem& problem, int64_t first, int64_t begin, int64_t end,
                           const cpu::ProductRows& rows) {
  for (int64_t row_idx = begin; row_idx < end; ++row_idx) {
    prepare_row(problem.args.A, first + row_idx, nullptr, rows.values + row_idx * rows.stride);
  }
}

}  // namespace shoal::SHOAL_ISA
