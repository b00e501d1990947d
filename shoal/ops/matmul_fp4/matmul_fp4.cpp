// Entry of matmul_fp4: checks, then the reference or the kernels of the instruction set.
#include "shoal/ops/matmul_fp4/matmul_fp4.h"

#include "shoal/base/checked.h"
#include "shoal/base/text.h"
#include "shoal/ops/matmul_fp4/matmul_fp4_problem.h"
#include "shoal/ops/variant.h"
#include "shoal/tensor/matcher.h"

namespace shoal {
namespace {

constexpr std::string_view kOp = "matmul_fp4";

void check_scalar(std::string_view name, const TensorView& view, const Device& device) {
  const Matcher match(kOp);
  match.tensor(name, view).type(DType::kF32).device(device);
  require(view.rank <= 1 && view.num_elements() == 1, kOp, ": ", name, " has shape ", shape_text(view.dims()),
          ", expected one value");
}

MatMulFp4Problem check(const MatMulFp4Args& a) {
  const Matcher match(kOp);
  MatMulFp4Problem p{.args = a};
  require(a.block_size > 0, kOp, ": block_size is ", a.block_size, ", expected a positive number");
  match.tensor("A", a.A).types({DType::kF16, DType::kBF16});
  require(a.A.device.type == DeviceType::kCpu, kOp, ": A is not on the CPU");
  match.tensor("B", a.B).type(DType::kU8).rank(2).contiguous().device(a.A.device);
  p.n = a.B.dim(0);
  p.k = 2 * a.B.dim(1);
  require(p.n > 0 && p.k > 0, kOp, ": B has shape ", shape_text(a.B.dims()), ", expected [N, K / 2], neither 0");
  p.k_blocks = ceil_div(p.k, a.block_size);
  require(a.A.rank >= 1 && a.A.dim(a.A.rank - 1) == p.k, kOp, ": A has shape ", shape_text(a.A.dims()),
          ", expected [..., K = ", p.k, "] (from B)");
  p.m = cpu::num_rows(a.A);
  match.tensor("weight_scale", a.weight_scale)
      .types({DType::kU8, DType::kF8E4M3})
      .shape({p.n, p.k_blocks})
      .contiguous()
      .device(a.A.device);
  check_scalar("weight_scale_2", a.weight_scale_2, a.A.device);
  p.global = *a.weight_scale_2.as<const float>();
  if (a.input_scale) {
    check_scalar("input_scale", a.input_scale, a.A.device);
  }
  if (a.bias) {
    match.tensor("bias", a.bias).type(a.A.dtype).shape({p.n}).contiguous().device(a.A.device);
  }
  match.tensor("Y", a.Y).type(a.A.dtype).rank(a.A.rank).device(a.A.device);
  p.y_stride = cpu::product_row_stride(kOp, a.Y, a.A, p.n);
  return p;
}

}  // namespace

size_t matmul_fp4_workspace_bytes(const MatMulFp4Args& args) {
  const MatMulFp4Problem p = check(args);
  return cpu::product_rows_bytes(p.m, p.k);
}

void matmul_fp4(const MatMulFp4Args& args, const OpContext& context) {
  const MatMulFp4Problem p = check(args);
  const bool reference = wants_reference(kOp, context.variant);
  if (p.m == 0) {
    return;
  }
  if (reference) {
    matmul_fp4_ref(p);
    return;
  }
  const Workspace::Scope scope(*context.workspace);
  const cpu::ProductRows rows = cpu::take_product_rows(*context.workspace, p.m, p.k);
  const auto prepare = SHOAL_PICK_ISA(context.isa, matmul_fp4_prepare);
  const auto outputs = SHOAL_PICK_ISA(context.isa, matmul_fp4_outputs);
  cpu::product_blocks(
      *context.pool, p.m, p.n, p.k,
      [&](int64_t first, int64_t begin, int64_t end) { prepare(p, first, begin, end, rows); },
      [&](int64_t first, int64_t count, int64_t begin, int64_t end) {
        outputs(p, rows.first(count), cpu::product_out(args.Y, p.y_stride, first, p.n, args.bias), begin, end);
      });
}

}  // namespace shoal
