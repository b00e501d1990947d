// Products with quantised weights for shoal.ops.
#include "apps/python/bindings/ops_call.h"
#include "shoal/ops/matmul_fp4/matmul_fp4.h"
#include "shoal/ops/matmul_fp8/matmul_fp8.h"
#include "shoal/ops/matmul_nbits/matmul_nbits.h"
#include "shoal/ops/matmul_packed/matmul_packed.h"

namespace shoal::python {
namespace {

using NBits = MatMulNBitsArgs;
using Packed = MatMulPackedArgs;
using Fp4 = MatMulFp4Args;
using Fp8 = MatMulFp8Args;

// Y [..., num_outputs] in A's type. The operator's own check wants to see Y, so it sees one without memory.
template <class Args>
std::vector<OutputSpec> product_specs(Args& a, int64_t num_outputs, size_t (*workspace_bytes)(const Args&)) {
  OutputSpec spec{a.A.dtype, {a.A.dims().begin(), a.A.dims().end()}};
  if (!spec.shape.empty()) {
    spec.shape.back() = num_outputs;
  }
  a.Y = shape_only_view(spec.dtype, spec.shape);
  workspace_bytes(a);  // checks
  return {spec};
}

int64_t num_rows(const TensorView& b) { return b.rank > 0 ? b.dim(0) : 0; }

const OperatorTraits<NBits> kNBits{
    .name = "matmul_nbits",
    .fields =
        [](NBits& a, Fields& f) {
          f.input("A", a.A);
          f.input("B", a.B, Layout::kContiguous);
          f.input("scales", a.scales, Layout::kContiguous);
          f.input("zero_points", a.zero_points, Layout::kContiguous);
          f.input("g_idx", a.g_idx, Layout::kContiguous);
          f.input("bias", a.bias, Layout::kContiguous);
          f.attribute("K", a.K);
          f.attribute("N", a.N);
          f.attribute("block_size", a.block_size);
          f.attribute("bits", a.bits);
          f.attribute("accuracy_level", a.accuracy_level);
          f.attribute("weight_prepacked", a.weight_prepacked);
        },
    .specs = [](NBits& a) { return product_specs(a, a.N, matmul_nbits_workspace_bytes); },
    .workspace = [](const NBits& a, int) { return matmul_nbits_workspace_bytes(a); },
    .run = matmul_nbits,
    .outputs = {{{"Y"}, &NBits::Y}},
};

const OperatorTraits<Packed> kPacked{
    .name = "matmul_packed",
    .fields =
        [](Packed& a, Fields& f) {
          f.input("A", a.A);
          f.input("B", a.B, Layout::kContiguous);
          f.input("global_scale", a.global_scale, Layout::kContiguous);
          f.packed_type("packed_type", a.packed_type);
          f.attribute("N", a.N);
          f.attribute("K", a.K);
          f.attribute("activation_type", a.activation_type);
          f.attribute("unrounded", a.unrounded);
        },
    .specs = [](Packed& a) { return product_specs(a, a.N, matmul_packed_workspace_bytes); },
    .workspace = [](const Packed& a, int) { return matmul_packed_workspace_bytes(a); },
    .run = matmul_packed,
    .outputs = {{{"Y"}, &Packed::Y}},
};

const OperatorTraits<Fp4> kFp4{
    .name = "matmul_fp4",
    .fields =
        [](Fp4& a, Fields& f) {
          f.input("A", a.A);
          f.input("B", a.B, Layout::kContiguous);
          f.input("weight_scale", a.weight_scale, Layout::kContiguous);
          f.input("weight_scale_2", a.weight_scale_2, Layout::kContiguous);
          f.input("input_scale", a.input_scale, Layout::kContiguous);
          f.input("bias", a.bias, Layout::kContiguous);
          f.attribute("block_size", a.block_size);
        },
    .specs = [](Fp4& a) { return product_specs(a, num_rows(a.B), matmul_fp4_workspace_bytes); },
    .workspace = [](const Fp4& a, int) { return matmul_fp4_workspace_bytes(a); },
    .run = matmul_fp4,
    .outputs = {{{"Y"}, &Fp4::Y}},
};

const OperatorTraits<Fp8> kFp8{
    .name = "matmul_fp8",
    .fields =
        [](Fp8& a, Fields& f) {
          f.input("A", a.A);
          f.input("B", a.B, Layout::kContiguous);
          f.input("b_scale", a.b_scale, Layout::kContiguous);
          f.input("a_scale", a.a_scale, Layout::kContiguous);
          f.input("bias", a.bias, Layout::kContiguous);
          f.attribute("block_size", a.block_size);
        },
    .specs = [](Fp8& a) { return product_specs(a, num_rows(a.B), matmul_fp8_workspace_bytes); },
    .workspace = [](const Fp8& a, int) { return matmul_fp8_workspace_bytes(a); },
    .run = matmul_fp8,
    .outputs = {{{"Y"}, &Fp8::Y}},
};

}  // namespace

void add_products() {
  add_operator(kNBits);
  add_operator(kPacked);
  add_operator(kFp4);
  add_operator(kFp8);
}

}  // namespace shoal::python
