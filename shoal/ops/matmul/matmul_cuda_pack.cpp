// Weights into the tiles of matmul_cuda.h: on the host, then one copy.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>

#include "shoal/base/checked.h"
#include "shoal/base/float_bits.h"
#include "shoal/base/text.h"
#include "shoal/cpu/thread_pool.h"
#include "shoal/cuda/device.h"
#include "shoal/ops/element.h"
#include "shoal/ops/matmul/matmul_cuda.h"
#include "shoal/ops/matmul/matmul_layout.h"
#include "shoal/ops/matmul/matmul_pack.h"
#include "shoal/quant/block.h"
#include "shoal/quant/fp8_e4m3.h"
#include "shoal/quant/gguf_mxfp4.h"
#include "shoal/quant/k_scales.h"

namespace shoal::cuda {
namespace {

constexpr int kGroupColumns = 32;
constexpr int kLanesOfRow = 4;

// 32 columns of a row: codes, and for each half scale and minimum. weight = scale (code - offset) or scale code + min.
struct RowGroup {
  uint8_t codes[kGroupColumns];
  float scale[2];
  float min[2];
};

TileLayout affine(int bits, int group, bool has_min, int offset) {
  constexpr Codes kByBits[] = {Codes::kU2, Codes::kU2, Codes::kU2, Codes::kU3, Codes::kU4,
                               Codes::kU5, Codes::kU6, Codes::kU8, Codes::kU8};
  return {kByBits[bits], group, has_min, has_min ? 0 : offset};
}

// The layout that holds a matrix as it is; none: its values are rounded to bf16.
std::optional<TileLayout> layout_of(const QuantMatrix& m) {
  const auto whole_groups = [&](int least) {
    const int64_t group = m.group_size == 0 ? m.k : m.group_size;
    return group % least == 0 || group >= m.k;
  };
  switch (m.format) {
    case Format::kQ4_0: return affine(4, 32, false, 8);
    case Format::kQ4_1:
    case Format::kQ4_K: return affine(4, 32, true, 0);
    case Format::kQ5_0: return affine(5, 32, false, 16);
    case Format::kQ5_1:
    case Format::kQ5_K: return affine(5, 32, true, 0);
    case Format::kQ8_0:
    case Format::kIQ4_NL:
    case Format::kIQ4_XS: return affine(8, 32, false, 128);
    case Format::kQ2_K: return affine(2, 16, true, 0);
    case Format::kQ3_K: return affine(3, 16, false, 4);
    case Format::kQ6_K: return affine(6, 16, false, 32);
    case Format::kGGUF_MXFP4: return TileLayout{Codes::kE2M1, 32, false, 0};
    case Format::kMXFP4: return TileLayout{Codes::kE2M1, 32, false, 0};
    case Format::kNVFP4: return TileLayout{Codes::kE2M1, 16, false, 0};
    case Format::kINT2:
    case Format::kINT3:
    case Format::kINT8: {
      const int bits = info(m.format).block_bytes;
      if (m.zeros || !whole_groups(kGroupColumns)) {
        return std::nullopt;
      }
      return affine(bits, 32, false, 1 << (bits - 1));
    }
    case Format::kINT4:
      if (!whole_groups(kGroupColumns)) {
        return std::nullopt;
      }
      return m.zeros ? affine(4, 32, true, 0) : affine(4, 32, false, 8);
    default: return std::nullopt;
  }
}

float element(const TensorView& view, int64_t idx) {
  switch (view.dtype) {
    case DType::kF8E8M0: return 2.0f * block::e8m0_halved(static_cast<uint8_t>(view.as<const uint8_t>()[idx]));
    case DType::kF8E4M3: return e4m3_to_f32(view.as<const uint8_t>()[idx]);
    default: return read_element(view.dtype, view.data, idx);
  }
}

// Scaled formats: codes are an LSB-first stream, scales [n, groups].
void read_scaled(const QuantMatrix& m, const TileLayout& layout, int64_t row, int64_t first, RowGroup& out) {
  const int bits = info(m.format).block_bytes;
  const int64_t count = std::min<int64_t>(kGroupColumns, m.k - first);
  const std::byte* codes = m.row(row);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t bit = (first + i) * bits;
    uint32_t word = static_cast<uint32_t>(codes[bit / 8]);
    if (bit % 8 + bits > 8) {
      word |= static_cast<uint32_t>(codes[bit / 8 + 1]) << 8;
    }
    out.codes[i] = static_cast<uint8_t>(word >> (bit % 8) & ((1u << bits) - 1));
  }
  int64_t group_size = m.group_size;
  if (layout.codes == Codes::kE2M1) {
    group_size = layout.group;
  } else if (group_size == 0) {
    group_size = m.k;
  }
  const int64_t groups = ceil_div(m.k, group_size);
  const float global = m.global_scale ? element(m.global_scale, 0) : 1.0f;
  for (int half = 0; half < 2; ++half) {
    const int64_t column = std::min(first + 16 * half, m.k - 1);
    const int64_t idx = row * groups + column / group_size;
    out.scale[half] = element(m.scales, idx) * global;
    if (layout.has_min) {
      float zero = 0.0f;
      if (m.zeros.dtype == DType::kU8) {
        const int64_t row_bytes = ceil_div<int64_t>(groups * bits, 8);
        const int64_t bit = column / group_size * bits;
        const auto* zeros = m.zeros.as<const uint8_t>() + row * row_bytes;
        zero = static_cast<float>(zeros[bit / 8] >> (bit % 8) & ((1 << bits) - 1));
      } else {
        zero = element(m.zeros, idx);
      }
      out.min[half] = -zero * out.scale[half];
    }
  }
}

void read_block(const QuantMatrix& m, int64_t row, int64_t first, RowGroup& out) {
  const FormatInfo& format = info(m.format);
  const std::byte* block = m.row(row) + first / format.block_size * format.block_bytes;
  const int sub = static_cast<int>(first % format.block_size) / kGroupColumns;
  unpack_codes(m.format, block, sub, out.codes);
  const auto scales = [&](float first_half, float second_half) {
    out.scale[0] = first_half;
    out.scale[1] = second_half;
  };
  const auto mins = [&](float first_half, float second_half) {
    out.min[0] = first_half;
    out.min[1] = second_half;
  };
  const auto f16 = [&](int at) { return block::f16(block + at); };
  const auto signed_byte = [&](int at) { return static_cast<float>(block::i8(block + at)); };
  switch (m.format) {
    case Format::kQ4_1:
    case Format::kQ5_1: mins(f16(2), f16(2)); [[fallthrough]];
    case Format::kQ4_0:
    case Format::kQ5_0: scales(f16(0), f16(0)); return;
    case Format::kQ8_0:
      for (uint8_t& code : out.codes) {
        code = static_cast<uint8_t>(code ^ 0x80);
      }
      scales(f16(0), f16(0));
      return;
    case Format::kIQ4_NL:
    case Format::kIQ4_XS: {
      for (uint8_t& code : out.codes) {
        code = static_cast<uint8_t>(kIq4Table[code] + 128);
      }
      float scale = f16(0);
      if (m.format == Format::kIQ4_XS) {
        const uint32_t low = block::u8(block + 4 + sub / 2) >> (4 * (sub % 2)) & 15;
        const uint32_t high = block::u16(block + 2) >> (2 * sub) & 3;
        scale *= static_cast<float>(static_cast<int>(low | high << 4) - 32);
      }
      scales(scale, scale);
      return;
    }
    case Format::kQ2_K:
      for (int half = 0; half < 2; ++half) {
        const uint32_t pair = block::u8(block + 2 * sub + half);
        out.scale[half] = f16(80) * static_cast<float>(pair & 15);
        out.min[half] = -f16(82) * static_cast<float>(pair >> 4);
      }
      return;
    case Format::kQ3_K:
      for (int half = 0; half < 2; ++half) {
        out.scale[half] = f16(108) * static_cast<float>(static_cast<int32_t>(q3_k_scale(block, 2 * sub + half)));
      }
      return;
    case Format::kQ4_K:
    case Format::kQ5_K: {
      const float scale = f16(0) * static_cast<float>(block::k_scale(block + 4, sub));
      const float min = -f16(2) * static_cast<float>(block::k_min(block + 4, sub));
      scales(scale, scale);
      mins(min, min);
      return;
    }
    case Format::kQ6_K: scales(f16(208) * signed_byte(192 + 2 * sub), f16(208) * signed_byte(193 + 2 * sub)); return;
    case Format::kGGUF_MXFP4: {
      const float scale = 2.0f * block::e8m0_halved(block::u8(block));
      scales(scale, scale);
      return;
    }
    default: fail(ErrorCode::kInternal, "matmul: no device layout for ", format.name);
  }
}

void read_group(const QuantMatrix& m, const TileLayout& layout, int64_t row, int64_t first, RowGroup& out) {
  out = {};
  if (info(m.format).is_scaled) {
    read_scaled(m, layout, row, first, out);
  } else {
    read_block(m, row, first, out);
  }
}

// Where the bits of a lane's value v of a group stand in a plane of `bits` bits.
void put_bits(std::byte* plane, int bits, int row, int lane, int group, int v, uint32_t code) {
  const int lane_bytes = 4 * bits;  // 16, 8, 4
  int word = 0;
  int shift = 16 * (v % 2);
  const int pair = v / 2;
  switch (bits) {
    case 4:
      word = group;
      shift += 4 * pair;
      break;
    case 2:
      word = group / 2;
      shift += 2 * (4 * (group % 2) + pair);
      break;
    default: shift += 4 * group + pair; break;
  }
  std::byte* at = plane + row / 8 * (32 * lane_bytes) + (kLanesOfRow * (row % 8) + lane) * lane_bytes + 4 * word;
  block::store_u32(at, block::u32(at) | code << shift);
}

// Column 0-31 of a group: which lane holds it, as which value.
constexpr int lane_of(int column) { return column % 16 / 4; }
constexpr int value_of(int column) { return column / 16 * 4 + column % 4; }

void put_codes(const TileLayout& layout, int row, int group, const uint8_t* codes, std::byte* tile) {
  for (int column = 0; column < kGroupColumns; ++column) {
    const uint32_t code = codes[column];
    const int lane = lane_of(column);
    const int v = value_of(column);
    const auto put = [&](int plane_begin, int bits, uint32_t part) {
      put_bits(tile + plane_begin, bits, row, lane, group, v, part & ((1u << bits) - 1));
    };
    switch (layout.codes) {
      case Codes::kU2: put(0, 2, code); break;
      case Codes::kU3:
        put(0, 2, code);
        put(512, 1, code >> 2);
        break;
      case Codes::kU5:
        put(0, 4, code);
        put(1024, 1, code >> 4);
        break;
      case Codes::kU6:
        put(0, 4, code);
        put(1024, 2, code >> 4);
        break;
      case Codes::kU8:
        put(0, 4, code);
        put(1024, 4, code >> 4);
        break;
      default: put(0, 4, code); break;
    }
  }
}

// Host images of one part, a row block at a time.
struct Image {
  const QuantMatrix& matrix;
  const TileLayout& layout;
  int64_t num_chunks;
  float inverse_factor;
  std::byte* codes;
  std::byte* scales;

  void fill_row_block(int64_t block_idx) const {
    std::byte* tiles = codes + block_idx * num_chunks * layout.tile_bytes();
    std::byte* scale_tiles = scales + block_idx * num_chunks * layout.scale_tile_bytes();
    std::memset(tiles, 0, static_cast<size_t>(num_chunks * layout.tile_bytes()));
    std::memset(scale_tiles, 0, static_cast<size_t>(num_chunks * layout.scale_tile_bytes()));
    std::vector<float> values(layout.codes == Codes::kBF16 ? static_cast<size_t>(matrix.k) : 0);
    for (int row = 0; row < kTileRows && block_idx * kTileRows + row < matrix.n; ++row) {
      const int64_t n_idx = block_idx * kTileRows + row;
      if (layout.codes == Codes::kBF16) {
        decode_rows(matrix, n_idx, n_idx + 1, values.data());
        fill_plain_row(row, values.data(), tiles);
        continue;
      }
      for (int64_t first = 0; first < matrix.k; first += kGroupColumns) {
        RowGroup group;
        read_group(matrix, layout, n_idx, first, group);
        const int64_t chunk = first / kChunk;
        const int idx = static_cast<int>(first % kChunk) / kGroupColumns;
        put_codes(layout, row, idx, group.codes, tiles + chunk * layout.tile_bytes());
        put_scales(row, idx, group, scale_tiles + chunk * layout.scale_tile_bytes());
      }
    }
  }

 private:
  void fill_plain_row(int row, const float* values, std::byte* tiles) const {
    for (int64_t i = 0; i < matrix.k; ++i) {
      const int column = static_cast<int>(i % kGroupColumns);
      const int group = static_cast<int>(i % kChunk) / kGroupColumns;
      std::byte* at = tiles + i / kChunk * layout.tile_bytes() + group * 1024 + row / 8 * 512 +
                      (kLanesOfRow * (row % 8) + lane_of(column)) * 16 + value_of(column) * 2;
      block::store_u16(at, f32_to_bf16(values[i]));
    }
  }

  void put_scales(int row, int group, const RowGroup& from, std::byte* tile) const {
    const int count = kGroupColumns / layout.group;  // scales of these columns: 1 or 2
    const int stride = layout.has_min ? 4 : 2;
    for (int i = 0; i < count; ++i) {
      std::byte* at = tile + (row * (kChunk / layout.group) + group * count + i) * stride;
      block::store_f16(at, from.scale[i] * inverse_factor);
      if (layout.has_min) {
        block::store_f16(at + 2, from.min[i] * inverse_factor);
      }
    }
  }
};

// The largest scale or minimum; NaN if one is.
float largest_scale(const QuantMatrix& m, const TileLayout& layout, const OpContext& context) {
  std::vector<float> largest(static_cast<size_t>(m.n), 0.0f);
  context.pool->parallel_for(m.n, 16, [&](int64_t begin, int64_t end, int) {
    for (int64_t row = begin; row < end; ++row) {
      float& amax = largest[static_cast<size_t>(row)];
      for (int64_t first = 0; first < m.k; first += kGroupColumns) {
        RowGroup group;
        read_group(m, layout, row, first, group);
        for (const float value : {group.scale[0], group.scale[1], group.min[0], group.min[1]}) {
          amax = std::fabs(value) <= amax ? amax : std::fabs(value);  // NaN stays
        }
      }
    }
  });
  float amax = 0.0f;
  for (const float value : largest) {
    amax = value <= amax ? amax : value;
  }
  return amax;
}

// Brings the largest scale to 2^14 or a little less.
float factor_for(float amax) {
  constexpr int kTarget = 14;
  return amax > 0.0f && std::isfinite(amax) ? std::ldexp(1.0f, std::ilogb(amax) - kTarget + 1) : 1.0f;
}

DevicePart pack_f32(const QuantMatrix& m, const OpContext& context) {
  const auto num_bytes = static_cast<size_t>(m.n * m.k) * sizeof(float);
  DevicePart part;
  part.layout = {Codes::kF32, 32, false, 0};
  part.n = m.n;
  part.codes = AlignedBuffer(num_bytes, allocator(context.device.index));
  const AlignedBuffer image(num_bytes);
  context.pool->parallel_for(m.n, 16, [&](int64_t begin, int64_t end, int) {
    decode_rows(m, begin, end, reinterpret_cast<float*>(image.data()) + begin * m.k);
  });
  copy(part.codes.data(), image.data(), num_bytes, context.stream);
  synchronize(context.stream);
  return part;
}

// Matrices [begin, end) as one part.
DevicePart pack_tiles(std::span<const QuantMatrix> matrices, const TileLayout& layout, const OpContext& context) {
  const int64_t num_chunks = ceil_div<int64_t>(matrices.front().k, kChunk);
  float amax = 0.0f;
  int64_t num_blocks = 0;
  DevicePart part;
  part.layout = layout;
  for (const QuantMatrix& m : matrices) {
    if (layout.has_scales()) {
      amax = std::max(amax, largest_scale(m, layout, context));
    }
    num_blocks += ceil_div<int64_t>(m.n, kTileRows);
    part.n += m.n;
  }
  part.factor = factor_for(amax);
  const auto code_bytes = static_cast<size_t>(num_blocks * num_chunks * layout.tile_bytes());
  const auto scale_bytes = static_cast<size_t>(num_blocks * num_chunks * layout.scale_tile_bytes());
  const AlignedBuffer codes(code_bytes);
  const AlignedBuffer scales(scale_bytes);
  int64_t first = 0;
  for (const QuantMatrix& m : matrices) {
    const Image image{m,
                      layout,
                      num_chunks,
                      1.0f / part.factor,
                      codes.data() + first * num_chunks * layout.tile_bytes(),
                      scales.data() + first * num_chunks * layout.scale_tile_bytes()};
    const int64_t count = ceil_div<int64_t>(m.n, kTileRows);
    context.pool->parallel_for(count, 1, [&](int64_t begin, int64_t end, int) {
      for (int64_t block_idx = begin; block_idx < end; ++block_idx) {
        image.fill_row_block(block_idx);
      }
    });
    first += count;
  }
  const Allocator device = allocator(context.device.index);
  part.codes = AlignedBuffer(code_bytes, device);
  copy(part.codes.data(), codes.data(), code_bytes, context.stream);
  if (layout.has_scales()) {
    part.scales = AlignedBuffer(scale_bytes, device);
    copy(part.scales.data(), scales.data(), scale_bytes, context.stream);
  }
  synchronize(context.stream);
  return part;
}

bool starts_aligned(const float* p, int64_t stride) {
  return reinterpret_cast<uintptr_t>(p) % 16 == 0 && stride % 4 == 0;
}

}  // namespace

std::string DevicePart::name() const {
  constexpr std::string_view kNames[] = {"f32", "bf16", "u2", "u3", "u4", "u5", "u6", "u8", "e2m1"};
  const std::string_view codes_name = kNames[static_cast<size_t>(layout.codes)];
  return layout.has_scales() ? concat(codes_name, "_g", layout.group, layout.has_min ? "_min" : "")
                             : std::string(codes_name);
}

namespace {

std::vector<DevicePart> pack_device_parts(std::span<const QuantMatrix> matrices, bool exact, const OpContext& context) {
  std::vector<DevicePart> parts;
  int64_t out_begin = 0;
  const auto add = [&](DevicePart part) {
    part.out_begin = out_begin;
    out_begin += part.n;
    parts.push_back(std::move(part));
  };
  const auto layout_for = [](const QuantMatrix& m) {
    return layout_of(m).value_or(TileLayout{Codes::kBF16, kGroupColumns, false, 0});
  };
  for (size_t i = 0; i < matrices.size();) {
    require(matrices[i].k % 4 == 0, "matmul: on CUDA k must be a multiple of 4, not ", matrices[i].k);
    if (exact) {
      add(pack_f32(matrices[i++], context));
      continue;
    }
    // Neighbours in one layout become one part, as long as a tile does not straddle them.
    const TileLayout layout = layout_for(matrices[i]);
    size_t end = i + 1;
    while (end < matrices.size() && layout_for(matrices[end]) == layout && matrices[end - 1].n % kTileRows == 0) {
      ++end;
    }
    add(pack_tiles(matrices.subspan(i, end - i), layout, context));
    i = end;
  }
  return parts;
}

}  // namespace

void prepare_on_device(std::span<const QuantMatrix> parts, MatmulWeight::Impl& impl, const OpContext& context) {
  impl.device_parts = pack_device_parts(parts, impl.precision == MatmulPrecision::kExact, context);
  for (const DevicePart& part : impl.device_parts) {
    if (impl.layout.find(part.name()) == std::string::npos) {
      impl.layout += (impl.layout.empty() ? "" : "+") + part.name();
    }
  }
  impl.variant = "cuda_" + impl.layout;
}

void matmul_rows(const MatmulWeight::Impl& impl, const MatmulRows& rows, const OpContext& context) {
  if (rows.m == 0 || impl.n == 0) {
    return;
  }
  require(starts_aligned(rows.a, rows.a_stride), "matmul: on CUDA rows of a must start at multiples of 16 bytes");
  require(context.workspace != nullptr, "matmul: a workspace is required");
  for (const DevicePart& part : impl.device_parts) {
    product(part,
            {.a = rows.a,
             .a_stride = rows.a_stride,
             .out = rows.out,
             .out_stride = rows.out_stride,
             .bias = rows.bias,
             .m = rows.m,
             .k = rows.k,
             .num_sources = rows.m},
            nullptr, context);
  }
}

void make_operands(GroupedWeights::Impl& impl, const OpContext& context) {
  std::vector<Operand> operands;
  const MatmulWeight::Impl& first = impl.weights.front().impl();
  for (const MatmulWeight& weight : impl.weights) {
    const MatmulWeight::Impl& own = weight.impl();
    if (own.device_parts.size() != 1 || own.layout != first.layout) {
      fail(ErrorCode::kUnsupported, "matmul: the experts' weights are joined of several layouts (", own.layout,
           "), which has no CUDA kernel");
    }
    require(own.n == first.n && own.k == first.k, "matmul: the weights of a group differ in shape");
    operands.push_back(own.device_parts.front().operand());
  }
  const size_t num_bytes = operands.size() * sizeof(Operand);
  impl.operands = AlignedBuffer(num_bytes, allocator(context.device.index));
  copy(impl.operands.data(), operands.data(), num_bytes, context.stream);
  synchronize(context.stream);
}

void tiled_product(const TiledMatmulArgs& args, const GroupedWeights::Impl& impl, const OpContext& context) {
  const DevicePart& part = impl.weights.front().impl().device_parts.front();
  const auto* a = args.a.as<const float>();
  if (args.out.dim(0) == 0) {
    return;
  }
  require(starts_aligned(a, args.a.stride(0)), "matmul: on CUDA rows of a must start at multiples of 16 bytes");
  const DeviceGroups groups{.weights = reinterpret_cast<const Operand*>(impl.operands.data()),
                            .source = args.source ? args.source.as<const int32_t>() : nullptr,
                            .tiles = args.tiles.as<const int32_t>(),
                            .num_tiles = args.tiles.dim(0),
                            .tile_rows = args.tile_rows};
  product(part,
          {.a = a,
           .a_stride = args.a.stride(0),
           .out = args.out.as<float>(),
           .out_stride = args.out.stride(0),
           .bias = args.bias ? args.bias.as<const float>() : nullptr,
           .bias_stride = part.n,
           .m = args.out.dim(0),
           .k = args.a.dim(1),
           .num_sources = args.a.dim(0)},
          &groups, context);
}

}  // namespace shoal::cuda
