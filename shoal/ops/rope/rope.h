// Rotary position embedding: frequency tables (with the published context extensions) and the rotation itself.
//
//   half-split:   partner of channel i is (i + rotary_dim/2) mod rotary_dim, column i mod (rotary_dim/2)
//   interleaved:  partner is i xor 1, column i/2
//   out[i] = x[i] * cos[pos, column] -/+ x[partner] * sin[pos, column]   ("-" for the first of each pair)
//
// Shapes    x, out [num_tokens, num_heads, head_dim]; positions [num_tokens] i32; cos, sin [max_pos, rotary_dim/2] f32
// Types     x, out: f32, f16 or bf16, the same
// Layout    last dimension contiguous; out may be x; channels past rotary_offset + rotary_dim are copied
// Numerics  products and sum in f32, one rounding at the store; tables computed in f64, stored f32
// Errors    kInvalidArgument: shapes, types, a position outside [0, max_pos)
// Source    Su et al. 2021; llama3, linear and YaRN scaling as in the published checkpoints' `rope_scaling`
#pragma once

#include <cstdint>
#include <vector>

#include "shoal/ops/context.h"
#include "shoal/tensor/tensor.h"

namespace shoal {

enum class RopeScaling : uint8_t { kNone, kLinear, kLlama3, kYarn };

struct RopeConfig {
  int64_t rotary_dim = 0;  // even
  double theta = 10000.0;
  RopeScaling scaling = RopeScaling::kNone;
  double factor = 1.0;                   // linear, llama3, yarn
  double low_freq_factor = 1.0;          // llama3
  double high_freq_factor = 4.0;         // llama3
  double original_max_positions = 8192;  // llama3, yarn
  double beta_fast = 32.0;               // yarn
  double beta_slow = 1.0;                // yarn
  double attention_factor = 0.0;         // yarn; 0: 0.1 ln(factor) + 1, or the mscale ratio below when given
  double mscale = 0.0;                   // yarn, deepseek
  double mscale_all_dim = 0.0;           // yarn, deepseek
  bool truncate = true;                  // yarn: round the correction range outward to integers
  // GGUF rope_freqs.weight [rotary_dim/2]: inverse frequencies are divided by it; or empty.
  std::vector<float> freq_factors{};
};

struct RopeTables {
  Tensor cos;  // [max_pos, rotary_dim/2] f32
  Tensor sin;  // [max_pos, rotary_dim/2] f32
};

// Tables for positions [0, max_pos); YaRN's attention factor is multiplied in. Frequencies and angles are f64, where
// transformers has f32 (rope_tables.cpp). kInvalidArgument names the value that is out of range.
RopeTables make_rope_tables(const RopeConfig& config, int64_t max_pos);

struct RopeArgs {
  TensorView out;        // [num_tokens, num_heads, head_dim]
  TensorView x;          // [num_tokens, num_heads, head_dim]
  TensorView positions;  // [num_tokens] i32
  TensorView cos;        // [max_pos, rotary_dim/2] f32
  TensorView sin;        // [max_pos, rotary_dim/2] f32
  bool interleaved = false;
  int64_t rotary_offset = 0;  // first rotated channel
};

void rope(const RopeArgs& args, const OpContext& context);

}  // namespace shoal
