// Embedding lookup from a table in any weight format.
//
//   out[t, h] = scale * table[ids[t], h]
//
// Shapes    out [num_tokens, hidden]; ids [num_tokens] i32; table [vocab_size, hidden]
// Types     out: f32, f16 or bf16; table: any format
// Numerics  decoded and scaled in f32, one rounding at the store
// Errors    kInvalidArgument: shapes, types, an id outside [0, vocab_size)
// CUDA      ids and the table's codes are device memory; an id outside the table gives zeros
#pragma once

#include "shoal/ops/context.h"
#include "shoal/quant/quant_matrix.h"
#include "shoal/tensor/tensor.h"

namespace shoal {

struct EmbeddingArgs {
  TensorView out;     // [num_tokens, hidden]
  TensorView ids;     // [num_tokens] i32
  QuantMatrix table;  // n = vocab_size, k = hidden
  float scale = 1.0f;
};

void embedding(const EmbeddingArgs& args, const OpContext& context);

}  // namespace shoal
