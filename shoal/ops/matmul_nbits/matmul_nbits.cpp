// Entry of matmul_nbits: checks, the omitted projection, then the reference or the kernels of the instruction set.
#include "shoal/ops/matmul_nbits/matmul_nbits.h"

#include <algorithm>
#include <optional>

#include "shoal/base/checked.h"
#include "shoal/base/text.h"
#include "shoal/ops/element.h"
#include "shoal/ops/matmul_nbits/matmul_nbits_problem.h"
#include "shoal/ops/variant.h"
#include "shoal/quant/code_stream.h"
#include "shoal/tensor/matcher.h"

namespace shoal {
namespace {

constexpr std::string_view kOp = "matmul_nbits";

void check_attributes(const MatMulNBitsArgs& a) {
  require(a.K > 0, kOp, ": K is ", a.K, ", expected a positive number");
  require(a.N > 0, kOp, ": N is ", a.N, ", expected a positive number");
  require(a.block_size >= 16 && is_power_of_two(a.block_size), kOp, ": block_size is ", a.block_size,
          ", expected a power of two from 16");
  require(a.bits >= 2 && a.bits <= 8, kOp, ": bits is ", a.bits, ", expected 2, 3, 4 or 8");
  if (a.bits > 4 && a.bits < 8) {
    fail(ErrorCode::kUnsupported, kOp, ": bits is ", a.bits, ", supported are 2, 3, 4 and 8");
  }
  require(a.accuracy_level >= 0 && a.accuracy_level <= 4, kOp, ": accuracy_level is ", a.accuracy_level,
          ", expected 0 to 4");
  require(a.weight_prepacked >= 0 && a.weight_prepacked <= 2, kOp, ": weight_prepacked is ", a.weight_prepacked,
          ", expected 0");
  require(a.weight_prepacked != 2 || a.bits != 2, kOp, ": weight_prepacked is 2, which has no layout for 2 bits");
  if (a.weight_prepacked != 0) {
    fail(ErrorCode::kUnsupported, kOp, ": weight_prepacked is ", a.weight_prepacked,
         ", the layouts of the CUDA kernels are not supported; pass raw weights and 0");
  }
}

// [rows, columns], or flat.
void check_table(std::string_view name, const TensorView& view, int64_t rows, int64_t columns) {
  const bool fits = (view.rank == 2 && view.dim(0) == rows && view.dim(1) == columns) ||
                    (view.rank == 1 && view.dim(0) == rows * columns);
  require(fits, kOp, ": ", name, " has shape ", shape_text(view.dims()), ", expected [", rows, ", ", columns, "]");
}

void check_zero_points(const MatMulNBitsProblem& p) {
  const MatMulNBitsArgs& a = p.args;
  const int bits = static_cast<int>(a.bits);
  const int64_t columns = p.packed_zeros ? ceil_div<int64_t>(p.k_blocks * bits, 8) : p.k_blocks;
  check_table("zero_points", a.zero_points, a.N, columns);
  for (int64_t n = 0; n < a.N; ++n) {
    if (p.packed_zeros) {
      const std::byte* row = a.zero_points.as<const std::byte>() + n * columns;
      require(pad_bits(row, bits, p.k_blocks) == 0, kOp, ": zero_points have bits behind the last block of row ", n,
              ", expected zero padding");
    }
    for (int64_t b = 0; bits == 3 && b < p.k_blocks; ++b) {
      const float zero = p.packed_zeros
                             ? static_cast<float>(read_code(a.zero_points.as<const std::byte>() + n * columns, bits, b))
                             : read_element(a.zero_points.dtype, a.zero_points.data, n * columns + b);
      require(zero == 4.0f, kOp, ": zero_points have the value ", zero, " in row ", n, ", with 3 bits all must be 4");
    }
  }
}

MatMulNBitsProblem check(const MatMulNBitsArgs& a) {
  check_attributes(a);
  const Matcher match(kOp);
  MatMulNBitsProblem p{.args = a};
  p.k_blocks = ceil_div(a.K, a.block_size);
  const std::optional<int64_t> codes = checked_mul(p.k_blocks * a.block_size / 8, a.bits);
  require(codes.has_value() && checked_mul(*codes, a.N).has_value() && a.K <= INT64_MAX / 256, kOp, ": K is ", a.K,
          " and N is ", a.N, ", too large");
  p.row_bytes = *codes;

  match.tensor("A", a.A).types(kFloats);
  require(a.A.rank >= 1 && a.A.dim(a.A.rank - 1) == a.K, kOp, ": A has shape ", shape_text(a.A.dims()),
          ", expected [..., K = ", a.K, "]");
  require(a.A.device.type == DeviceType::kCpu, kOp, ": A is not on the CPU");
  p.m = cpu::num_rows(a.A);

  match.tensor("B", a.B).type(DType::kU8).rank(3).contiguous().device(a.A.device);
  const int64_t expected[3] = {a.N, p.k_blocks, a.block_size * a.bits / 8};
  for (int axis = 0; axis < 3; ++axis) {
    p.is_empty = p.is_empty || a.B.dim(axis) == 0;
    require(a.B.dim(axis) == expected[axis] || a.B.dim(axis) == 0, kOp, ": B has shape ", shape_text(a.B.dims()),
            ", expected ", shape_text(expected));
  }

  match.tensor("scales", a.scales).type(a.A.dtype).contiguous().device(a.A.device);
  if (!(p.is_empty && a.scales.num_elements() == 0)) {
    check_table("scales", a.scales, a.N, p.k_blocks);
  }
  if (a.zero_points) {
    match.tensor("zero_points", a.zero_points).types({DType::kU8, a.A.dtype}).contiguous().device(a.A.device);
    p.packed_zeros = a.zero_points.dtype == DType::kU8;
    if (!p.is_empty) {
      check_zero_points(p);
    }
  }
  if (a.g_idx) {
    match.tensor("g_idx", a.g_idx).type(DType::kI32).contiguous().device(a.A.device);
    if (!(p.is_empty && a.g_idx.num_elements() == 0)) {
      match.tensor("g_idx", a.g_idx).shape({a.K});
    }
    for (int64_t k = 0; !p.is_empty && k < a.K; ++k) {
      const int32_t block = a.g_idx.as<const int32_t>()[k];
      require(block >= 0 && block < p.k_blocks, kOp, ": g_idx[", k, "] is ", block, ", expected 0 to ", p.k_blocks - 1);
    }
  }
  if (a.bias) {
    match.tensor("bias", a.bias).type(a.A.dtype).shape({a.N}).contiguous().device(a.A.device);
  }

  match.tensor("Y", a.Y).type(a.A.dtype).rank(a.A.rank).device(a.A.device);
  p.y_stride = cpu::product_row_stride(kOp, a.Y, a.A, a.N);
  p.quantises_rows = a.accuracy_level == 4 && !a.g_idx;
  return p;
}

// The product with an omitted B: the bias, or zeros.
void fill_with_bias(const MatMulNBitsProblem& p) {
  for (int64_t row = 0; row < p.m; ++row) {
    for (int64_t n = 0; n < p.args.N; ++n) {
      const float value = p.args.bias ? read_element(p.args.bias.dtype, p.args.bias.data, n) : 0.0f;
      write_element(p.args.Y.dtype, p.args.Y.data, row * p.y_stride + n, value);
    }
  }
}

// Rows of one block and their segments.
size_t num_values(const MatMulNBitsProblem& p) {
  return static_cast<size_t>(std::min(p.m, cpu::kProductRows) * round_up(p.args.K, cpu::kProductAlign));
}
int64_t num_segments(const MatMulNBitsProblem& p) {
  return ceil_div(round_up(p.args.K, cpu::kProductAlign), segment_size(p));
}
size_t num_scales(const MatMulNBitsProblem& p) {
  return static_cast<size_t>(std::min(p.m, cpu::kProductRows) * num_segments(p));
}

}  // namespace

size_t matmul_nbits_workspace_bytes(const MatMulNBitsArgs& args) {
  const MatMulNBitsProblem p = check(args);
  const size_t bytes = cpu::product_rows_bytes(p.m, args.K);
  return p.quantises_rows
             ? bytes + Workspace::bytes_for<int8_t>(num_values(p)) + 2 * Workspace::bytes_for<float>(num_scales(p))
             : bytes;
}

void matmul_nbits(const MatMulNBitsArgs& args, const OpContext& context) {
  const MatMulNBitsProblem p = check(args);
  const bool reference = wants_reference(kOp, context.variant);
  if (p.m == 0) {
    return;
  }
  if (p.is_empty) {
    fill_with_bias(p);
    return;
  }
  if (reference) {
    matmul_nbits_ref(p);
    return;
  }
  const Workspace::Scope scope(*context.workspace);
  const cpu::ProductRows rows = cpu::take_product_rows(*context.workspace, p.m, args.K);
  QuantisedRows quantised;
  if (p.quantises_rows) {
    quantised = {.codes = context.workspace->take<int8_t>(num_values(p)).data(),
                 .scales = context.workspace->take<float>(num_scales(p)).data(),
                 .sums = context.workspace->take<float>(num_scales(p)).data(),
                 .num_segments = num_segments(p)};
  }
  const auto prepare = SHOAL_PICK_ISA(context.isa, matmul_nbits_prepare);
  const auto outputs = SHOAL_PICK_ISA(context.isa, matmul_nbits_outputs);
  cpu::product_blocks(
      *context.pool, p.m, args.N, args.K,
      [&](int64_t first, int64_t begin, int64_t end) { prepare(p, first, begin, end, rows, quantised); },
      [&](int64_t first, int64_t count, int64_t begin, int64_t end) {
        const cpu::ProductOut out = cpu::product_out(args.Y, p.y_stride, first, args.N, args.bias);
        outputs(p, rows.first(count), quantised, out, begin, end);
      });
}

}  // namespace shoal
