// Calibration capture of QMoE: samples of a run as files, for a quantiser to learn from.
//
// One object a node. It is for CUDA runs of nvfp4 nodes with a name: a CPU run never captures. Copying tensors to the
// host is the caller's.
//
// File, little-endian: "QMOECAP1", u32 header bytes (to the end of the name's padding), u32 version 1, u32 element type
// (10 f16, 16 bf16), u32 invocation, u64 tokens, u32 rows, u32 H, u32 I, u32 E, u32 k, u32 number of tensors, u32 bytes
// of name, name, padding to 8; then for each tensor: u32 id, u32 type, u32 rank, u64 dims[rank], u64 bytes, data,
// padding to
// 8. Types are ONNX's: 1 f32, 6 i32, 10, 16. Ids: 1 input [rows, H], 2 router logits [rows, E], 3 expert ids i32
// [rows, k], 4 weights f32 [rows, k], 5 FC2's input [rows * k, I].
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "shoal/tensor/tensor.h"

namespace shoal::moe {

// Host tensors of one run, contiguous; the first rows_of(num_tokens) tokens.
struct CaptureSample {
  int64_t num_tokens = 0;    // of the run
  TensorView input;          // [rows, H], f16 or bf16
  TensorView router_logits;  // [rows, E], the same type
  TensorView expert_ids;     // [rows, k] i32
  TensorView weights;        // [rows, k] f32
  TensorView fc2_input;      // [rows * k, I], type of input
};

class Capture {
 public:
  static constexpr int64_t kFewestTokens = 16;  // runs below it neither write nor count
  static constexpr int64_t kMaxRows = 128;
  static constexpr int kMaxInvocations = 16;

  Capture(std::string directory, std::string node_name);

  // Whether a run of that many tokens is to be written.
  bool wants(int64_t num_tokens) const;
  static int64_t rows_of(int64_t num_tokens) { return num_tokens < kMaxRows ? num_tokens : kMaxRows; }

  // Writes a file that did not exist, readable by its owner alone, and returns its path: sanitised name, process id,
  // two-digit invocation. kIo with the path if that fails, with nothing of the file left behind; a file that existed
  // is left as it is.
  std::string write(const CaptureSample& sample);

 private:
  std::string directory_;
  std::string node_name_;
  int num_written_ = 0;
};

}  // namespace shoal::moe
