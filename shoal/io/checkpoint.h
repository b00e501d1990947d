// Quantised Hugging Face checkpoints: which tensors hold the codes and scales of a layer's matrix, and what their names
// hide. `quantization_config` of config.json says which scheme a checkpoint follows; layers that it leaves alone have a
// plain "<stem>.weight".
//
//   gptq                qweight i32 [k bits / 32, n], packed along k; qzeros i32 [groups, n bits / 32], each zero less
//                       one (not so in checkpoint_format "gptq_v2"); scales [groups, n]; g_idx i32 [k]: the group of
//                       each input, in any order with desc_act
//   awq                 qweight i32 [k, n / 8]: nibble i of a word is output 0, 2, 4, 6, 1, 3, 5, 7 of eight; qzeros i32
//                       [groups, n / 8] alike; scales [groups, n]
//   fp8                 weight e4m3 [n, k]; weight_scale_inv, which multiplies, one for each block of 128 x 128
//   compressed-tensors  pack-quantized:  weight_packed i32 [n, k bits / 32], codes plus 2^(bits - 1); weight_scale [n,
//                                        groups]; weight_zero_point i32 [n bits / 32, groups], packed along n;
//                                        weight_g_idx i32 [k]
//                       int-quantized:   weight i8 [n, k]; weight_scale [n, groups], [n, 1] or [1]
//                       float-quantized: weight e4m3 [n, k]; weight_scale the same, or one a block
//                       nvfp4-pack-quantized: weight_packed u8 [n, k / 2]; weight_scale e4m3 [n, k / 16];
//                                        weight_global_scale f32 [1], which divides
//   modelopt            NVFP4: weight u8 [n, k / 2]; weight_scale e4m3 [n, k / 16]; weight_scale_2, which multiplies
//                       FP8: weight e4m3 [n, k]; weight_scale, one value
//
// Read into the format that computes fastest among those with the same values: 4-bit groups around the middle code are
// q4_0 blocks and 8-bit ones q8_0 blocks where their scales are f16 numbers, other integers stay codes with scales.
// Inputs whose groups are in no order are dequantised to f32.
#pragma once

#include <memory>
#include <string>

#include "shoal/base/json.h"
#include "shoal/io/weights.h"

namespace shoal::io {

// A matrix with what keeps its bytes alive; the file's own where `owner` is empty.
struct OwnedMatrix {
  QuantMatrix matrix;
  std::shared_ptr<const void> owner;
};

class CheckpointScheme {
 public:
  CheckpointScheme() = default;  // nothing is quantised
  // Of a config.json object. kUnsupported names a method, format or width that is not read; "mxfp4" is left to the
  // family that has it.
  explicit CheckpointScheme(const Json& config);

  // Bits of a code; 0 where nothing is quantised.
  int code_bits() const { return bits_; }

  // Whether the layer `stem` has quantised tensors, the codes at least.
  bool covers(const WeightSource& source, const std::string& stem) const;

  // The matrix [n, k] of a layer that is covered. `exact`: the values of the checkpoint; otherwise zeros between codes may
  // be rounded to f16 for a faster format. kModelFormat names a tensor that is missing, has another type or shape, or
  // holds scales that are not finite.
  OwnedMatrix read(const WeightSource& source, const std::string& stem, int64_t n, int64_t k, bool exact) const;

 private:
  enum class Kind : uint8_t { kNone, kGptq, kAwq, kPacked, kInt8, kFp8, kNvfp4Divisor, kNvfp4 };

  const char* marker() const;
  void read_gptq(const Json& config);
  void read_awq(const Json& config);
  void read_compressed(const Json& config);
  void read_modelopt(const Json& config);

  Kind kind_ = Kind::kNone;
  int bits_ = 0;
  int64_t group_size_ = 0;       // along k; 0: whole rows
  bool zeros_less_one_ = false;  // gptq
  const char* scale_name_ = "";  // kFp8: of the tensor
  int64_t scale_block_ = 0;      // kFp8: side of a square block; 0: rows or the whole matrix
};

}  // namespace shoal::io
