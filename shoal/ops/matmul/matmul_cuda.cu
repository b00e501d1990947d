// Entry of the CUDA matmul: which kernel, how many blocks.
#include "shoal/ops/matmul/matmul_cuda.h"

#include <algorithm>

#include "shoal/base/checked.h"
#include "shoal/ops/matmul/matmul_cuda_variants.cuh"

namespace shoal::cuda {
namespace {

// Up to 16 rows a product waits for the memory, beyond for the tensor cores.
int64_t tile_rows_for(int64_t rows) {
  return rows <= 8 ? 8 : rows <= 16 ? 16 : rows <= kMiddleRows ? kMiddleRows : kLargeRows;
}

LaunchProduct launch_of(const TileLayout& layout) {
  if (layout.codes == Codes::kF32) {
    return launch_product_f32;
  }
#define SHOAL_VARIANT(kind, columns, minimum)                                                \
  if (layout.codes == Codes::kind && layout.group == columns && layout.has_min == minimum) { \
    return launch_product<Codes::kind, columns, minimum>;                                    \
  }
#include "shoal/ops/matmul/matmul_cuda_variants.def"
#undef SHOAL_VARIANT
  return nullptr;
}

int64_t padded(int64_t k) { return round_up<int64_t>(k, kChunk); }

}  // namespace

int64_t group_tile_rows(int64_t m, int64_t num_groups) {
  const int64_t touched = std::max<int64_t>(1, std::min(m, num_groups));
  return tile_rows_for(ceil_div(m, touched));
}

int64_t max_group_tiles(int64_t m, int64_t num_groups, int64_t tile_rows) {
  return std::min(m, m / tile_rows + std::min(m, num_groups));
}

size_t product_workspace_bytes(int64_t num_sources, int64_t k) {
  return Workspace::bytes_for<__nv_bfloat16>(static_cast<size_t>(num_sources * padded(k)));
}

void product(const DevicePart& weight, const DeviceRows& rows, const DeviceGroups* groups, const OpContext& context) {
  const LaunchProduct launch_product = launch_of(weight.layout);
  if (launch_product == nullptr) {
    fail(ErrorCode::kInternal, "matmul: no CUDA kernel for the layout ", weight.name());
  }
  ProductParams p{};
  p.weight = weight.operand();
  p.a = rows.a;
  p.a_stride = rows.a_stride;
  p.out = rows.out + weight.out_begin;
  p.out_stride = rows.out_stride;
  p.bias = rows.bias == nullptr ? nullptr : rows.bias + weight.out_begin;
  p.bias_stride = rows.bias_stride;
  p.m = static_cast<int>(rows.m);
  p.n = static_cast<int>(weight.n);
  p.k = static_cast<int>(rows.k);
  p.num_chunks = static_cast<int>(ceil_div<int64_t>(rows.k, kChunk));
  int64_t tile_rows = tile_rows_for(rows.m);
  int64_t num_tiles = 0;
  if (groups != nullptr) {
    p.weights = groups->weights;
    p.source = groups->source;
    p.tiles = reinterpret_cast<const int4*>(groups->tiles);
    tile_rows = groups->tile_rows;
    num_tiles = groups->num_tiles;
  } else {
    num_tiles = ceil_div(rows.m, weight.layout.codes == Codes::kF32 ? kLargeRows : tile_rows);
  }
  const Workspace::Scope scope(*context.workspace);
  if (tile_rows >= kMiddleRows && weight.layout.codes != Codes::kF32) {
    auto* staged =
        context.workspace->take<__nv_bfloat16>(static_cast<size_t>(rows.num_sources * padded(rows.k))).data();
    launch_to_bf16(staged, rows.a, rows.a_stride, rows.num_sources, rows.k, context.stream);
    p.a16 = staged;
  }
  launch_product(p, num_tiles, tile_rows, weight.layout.offset, context.stream);
}

}  // namespace shoal::cuda
