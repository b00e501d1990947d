#include "shoal/ops/rows/rows.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "shoal/cpu/thread_pool.h"
#include "shoal/ops/on_cuda.h"
#include "shoal/ops/rows/rows_cuda.h"
#include "shoal/tensor/matcher.h"

namespace shoal {
namespace {

constexpr int64_t kTokenGrain = 4;

bool on_cuda(const TensorView& view) { return view.device.type == DeviceType::kCuda; }

// Row `i` of a matrix of f32.
float* row_of(const TensorView& view, int64_t i) { return view.as<float>() + i * view.stride(0); }

void check_indices(std::string_view op, std::string_view name, const TensorView& view, int64_t limit) {
  const int32_t* indices = view.as<const int32_t>();
  for (int64_t i = 0; i < view.num_elements(); ++i) {
    require(indices[i] >= 0 && indices[i] < limit, op, ": ", name, "[", i, "] is ", indices[i], ", outside [0, ", limit,
            ")");
  }
}

}  // namespace

void gather_rows(const GatherRowsArgs& args, const OpContext& context) {
  const Matcher match("gather_rows");
  Dim rows{"num_rows"};
  Dim tokens{"num_tokens"};
  Dim width{"width"};
  const Device device = args.x.device;
  match.tensor("x", args.x).type(DType::kF32).shape({tokens, width}).inner_contiguous();
  match.tensor("rows", args.rows).type(DType::kI32).shape({rows}).contiguous().device(device);
  match.tensor("out", args.out).type(DType::kF32).shape({rows, width}).inner_contiguous().device(device);
  if (on_cuda(args.x)) {
    SHOAL_ON_CUDA("gather_rows", gather_rows(args, context));
    return;
  }
  check_indices("gather_rows", "rows", args.rows, tokens);
  context.pool->parallel_for(rows, kTokenGrain, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) {
      std::memcpy(row_of(args.out, i), row_of(args.x, args.rows.as<const int32_t>()[i]),
                  static_cast<size_t>(width) * sizeof(float));
    }
  });
}

void sort_rows(const SortRowsArgs& args, const OpContext& context) {
  const Matcher match("sort_rows");
  Dim tokens{"num_tokens"};
  Dim top_k{"top_k"};
  const Device device = args.expert_ids.device;
  match.tensor("expert_ids", args.expert_ids).type(DType::kI32).shape({tokens, top_k}).contiguous();
  match.tensor("row_of", args.row_of).type(DType::kI32).shape({tokens, top_k}).contiguous().device(device);
  match.tensor("source", args.source).type(DType::kI32).shape({tokens * top_k}).contiguous().device(device);
  match.tensor("row_begin", args.row_begin).type(DType::kI32).shape({args.num_experts + 1}).contiguous().device(device);
  if (on_cuda(args.expert_ids)) {
    match.tensor("tiles", args.tiles).type(DType::kI32).rank(2).contiguous().device(device);
    require(args.tiles.dim(1) == 4 && args.tile_rows > 0,
            "sort_rows: tiles must be [num_tiles, 4], tile_rows positive");
    SHOAL_ON_CUDA("sort_rows", sort_rows(args, context));
    return;
  }
  require(!args.tiles, "sort_rows: tiles are made on CUDA only");
  check_indices("sort_rows", "expert_ids", args.expert_ids, args.num_experts);
  const auto num_experts = static_cast<size_t>(args.num_experts);
  const int32_t* experts = args.expert_ids.as<const int32_t>();
  auto* row_begin = args.row_begin.as<int32_t>();
  const int64_t count = args.expert_ids.num_elements();
  std::fill_n(row_begin, num_experts + 1, 0);
  // row_begin[e + 1] counts, then runs through the places of e and ends at its end.
  for (int64_t i = 0; i < count; ++i) {
    ++row_begin[experts[i] + 1];
  }
  int32_t begin = 0;
  for (size_t e = 0; e < num_experts; ++e) {
    const int32_t size = row_begin[e + 1];
    row_begin[e + 1] = begin;
    begin += size;
  }
  for (int64_t i = 0; i < count; ++i) {
    const int32_t place = row_begin[experts[i] + 1]++;
    args.row_of.as<int32_t>()[i] = place;
    args.source.as<int32_t>()[place] = static_cast<int32_t>(i / top_k);
  }
}

void combine_rows(const CombineRowsArgs& args, const OpContext& context) {
  const Matcher match("combine_rows");
  Dim tokens{"num_tokens"};
  Dim top_k{"top_k"};
  Dim width{"width"};
  const Device device = args.out.device;
  match.tensor("out", args.out).type(DType::kF32).shape({tokens, width}).inner_contiguous();
  match.tensor("row_of", args.row_of).type(DType::kI32).shape({tokens, top_k}).contiguous().device(device);
  match.tensor("weights", args.weights).type(DType::kF32).shape({tokens, top_k}).contiguous().device(device);
  match.tensor("rows", args.rows).type(DType::kF32).shape({tokens * top_k, width}).inner_contiguous().device(device);
  if (on_cuda(args.out)) {
    SHOAL_ON_CUDA("combine_rows", combine_rows(args, context));
    return;
  }
  check_indices("combine_rows", "row_of", args.row_of, tokens * top_k);
  context.pool->parallel_for(tokens, kTokenGrain, [&](int64_t begin, int64_t end, int) {
    for (int64_t t = begin; t < end; ++t) {
      float* sum = row_of(args.out, t);
      std::fill_n(sum, static_cast<int64_t>(width), 0.0f);
      for (int64_t j = 0; j < top_k; ++j) {
        const float weight = args.weights.as<const float>()[t * top_k + j];
        const float* row = row_of(args.rows, args.row_of.as<const int32_t>()[t * top_k + j]);
        for (int64_t i = 0; i < width; ++i) {
          sum[i] += weight * row[i];
        }
      }
    }
  });
}

void add_gated_rows(const AddGatedRowsArgs& args, const OpContext& context) {
  const Matcher match("add_gated_rows");
  Dim tokens{"num_tokens"};
  Dim width{"width"};
  const Device device = args.out.device;
  match.tensor("out", args.out).type(DType::kF32).shape({tokens, width}).inner_contiguous();
  match.tensor("rows", args.rows).type(DType::kF32).shape({tokens, width}).inner_contiguous().device(device);
  if (args.gates) {
    match.tensor("gates", args.gates).type(DType::kF32).shape({tokens, 1}).contiguous().device(device);
  }
  if (on_cuda(args.out)) {
    SHOAL_ON_CUDA("add_gated_rows", add_gated_rows(args, context));
    return;
  }
  context.pool->parallel_for(tokens, kTokenGrain, [&](int64_t begin, int64_t end, int) {
    for (int64_t t = begin; t < end; ++t) {
      const float share = args.gates ? 1.0f / (1.0f + std::exp(-args.gates.as<const float>()[t])) : 1.0f;
      float* sum = row_of(args.out, t);
      const float* row = row_of(args.rows, t);
      for (int64_t i = 0; i < width; ++i) {
        sum[i] += share * row[i];
      }
    }
  });
}

}  // namespace shoal
