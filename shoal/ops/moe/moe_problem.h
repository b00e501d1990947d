// Both operators in one form: experts as projections with everything needed to read a weight.
#pragma once

#include <cstddef>
#include <cstdint>

#include "shoal/ops/context.h"
#include "shoal/ops/moe/moe.h"
#include "shoal/quant/format.h"
#include "shoal/tensor/tensor.h"

namespace shoal::moe {

enum class Codes : uint8_t {
  kAffine,       // LSB-first stream of `bits` along k
  kE4M3,         // bytes along k
  kE2M1,         // nibbles along k
  kE2M1Columns,  // nibbles along n: "rows" of the memory are columns k
  kBlocks,       // GGUF
};

// How scales meet the sum over k.
enum class Scaling : uint8_t {
  kPieces,  // acc = fma(sum over a piece, scale, acc)
  kAfter,   // once, after the sum
  kValues,  // in the weight, which is rounded to the activations' type
};

constexpr int64_t kPiece = 32;  // of the chain C3

// One projection of all experts, [num_experts, n, k].
struct Projection {
  Codes codes = Codes::kAffine;
  Scaling scaling = Scaling::kPieces;
  Format format = Format::kF32;  // kBlocks
  int bits = 8;                  // of a code
  int64_t n = 0;
  int64_t k = 0;
  const std::byte* data = nullptr;
  int64_t expert_bytes = 0;  // from one expert to the next
  int64_t row_bytes = 0;     // from one row to the next; kE2M1Columns: from one k to the next

  // Scale of (e, n, k): element e * strides[0] + n / row_group * strides[1] + k / group * strides[2]; none if absent.
  const void* scales = nullptr;
  DType scale_type = DType::kF32;
  int64_t scale_strides[3] = {0, 0, 0};
  int64_t group = 1;      // values along k that share a scale: a power of two, or k
  int64_t row_group = 1;  // rows that share a scale
  const float* global = nullptr;
  int64_t global_stride = 0;
  const uint8_t* zeros = nullptr;
  int64_t zero_expert_bytes = 0;
  int64_t zero_row_bytes = 0;
  int zero_bits = 8;

  TensorView bias{};  // [num_experts, n], optional

  bool present() const { return data != nullptr; }
  int64_t num_groups() const { return (k + group - 1) / group; }
  int64_t piece() const { return group < kPiece ? group : kPiece; }
};

enum class Activation : uint8_t { kRelu, kRelu2, kSilu, kGelu, kIdentity, kSwiglu };
enum class Gate : uint8_t { kNone, kInterleaved, kConcatenated, kSeparate };

struct Problem {
  DType dtype = DType::kF32;  // T
  int64_t num_tokens = 0;
  int64_t hidden = 0;
  int64_t inter = 0;
  int64_t num_experts = 0;
  int64_t num_ranks = 0;  // chosen experts of a token, shared ones included
  bool staged = false;    // profile S
  Activation activation = Activation::kRelu;
  Gate gate = Gate::kNone;
  float alpha = 1.0f;
  float beta = 0.0f;
  float limit = 0.0f;  // infinite: none
  bool limit_after = false;
  bool poison = false;  // a token with a weight that is not finite becomes NaN
  Projection fc1;
  Projection fc2;
  Projection fc3;  // present with Gate::kSeparate

  TensorView input;   // [num_tokens, hidden] or [B, S, hidden]
  TensorView output;  // the same
  int64_t row_tile = 0;
};

// Row `t` of a tensor of rank >= 1 whose leading dimensions are flattened: offset in elements.
inline int64_t row_offset(const TensorView& view, int64_t t) {
  int64_t offset = 0;
  for (int axis = view.rank - 2; axis >= 0; --axis) {
    offset += t % view.dim(axis) * view.stride(axis);
    t /= view.dim(axis);
  }
  return offset;
}

// Routing of tokens [begin, end): writes ids and weights, [end - begin, num_ranks].
using RouteTokens = void (*)(const void* args, int64_t begin, int64_t end, int32_t* ids, float* weights,
                             const OpContext& context);

size_t workspace_bytes(const Problem& problem, int num_threads);
void run(const Problem& problem, const void* args, RouteTokens route, const OpContext& context);

// The definition of right, in loops. ids and weights as from RouteTokens, for all tokens.
void moe_ref(const Problem& problem, const int32_t* ids, const float* weights);

// Scale of row n, group g of expert e, with the expert's global scale; 1 where there is none.
float scale_at(const Projection& projection, int64_t e, int64_t n, int64_t g);
float zero_at(const Projection& projection, int64_t e, int64_t n, int64_t g);

}  // namespace shoal::moe
