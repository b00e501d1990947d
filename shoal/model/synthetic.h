// Models of published sizes with random weights, for benchmarks: nothing is read from a disk.
//
//   qwen3-30b-a3b   48 layers, 32/4 heads x 128, 128 experts top-8 of width 768; q4_k
//   gpt-oss-120b    36 layers, 64/8 heads x 64, every other one with a window of 128, sinks, 128 experts top-4 of width
//                   2880 in mxfp4, the rest in q8_0
//   qwen3-tiny      the first with 2 layers and 8 experts: for tests
//
// Tensors of one format share their bytes, so that the host holds no more than the largest.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "shoal/model/model.h"

namespace shoal {

constexpr std::string_view kSyntheticPrefix = "synthetic:";  // of a model's path, before the name

std::vector<std::string> synthetic_names();

// kInvalidArgument lists the names if `name` is none of them.
std::unique_ptr<Model> make_synthetic(std::string_view name, const LoadOptions& options, const OpContext& context);

}  // namespace shoal
