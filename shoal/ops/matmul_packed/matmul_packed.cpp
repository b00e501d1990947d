// Entry of matmul_packed: checks, then the reference or the kernels of the instruction set.
#include "shoal/ops/matmul_packed/matmul_packed.h"

#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include "shoal/base/checked.h"
#include "shoal/base/text.h"
#include "shoal/ops/matmul_packed/matmul_packed_problem.h"
#include "shoal/ops/variant.h"
#include "shoal/tensor/matcher.h"

namespace shoal {
namespace {

constexpr std::string_view kOp = "matmul_packed";
constexpr int64_t kMostUnroundedRows = 8;

// Types that ggml has and this operator has not.
constexpr std::pair<std::string_view, int64_t> kOtherTypes[] = {
    {"f32", 0},  {"f16", 1},  {"q8_1", 9}, {"q8_k", 15},  {"iq1_s", 19}, {"i8", 24},    {"i16", 25},
    {"i32", 26}, {"i64", 27}, {"f64", 28}, {"iq1_m", 29}, {"bf16", 30},  {"tq1_0", 34}, {"tq2_0", 35},
};

Format format_of(int64_t packed_type) {
  for (const auto& [name, id] : kOtherTypes) {
    if (id == packed_type) {
      fail(ErrorCode::kUnsupported, kOp, ": packed_type is ", packed_type, " (", name, "), which is not supported");
    }
  }
  const std::optional<Format> format = packed_type >= 0 && packed_type <= UINT32_MAX
                                           ? format_from_ggml_type(static_cast<uint32_t>(packed_type))
                                           : std::nullopt;
  require(format.has_value(), kOp, ": packed_type is ", packed_type, ", expected the id of a packed type");
  return *format;
}

PackedActivation activation_of(std::string_view name) {
  if (name == "none") {
    return PackedActivation::kNone;
  }
  if (name == "relu2" || name == "relu_squared") {
    return PackedActivation::kRelu2;
  }
  require(name == "silu", kOp, ": activation_type is \"", printable(name),
          "\", expected none, relu2, relu_squared or silu");
  return PackedActivation::kSilu;
}

MatMulPackedProblem check(const MatMulPackedArgs& a) {
  const Matcher match(kOp);
  MatMulPackedProblem p{.args = a};
  p.format = format_of(a.packed_type);
  p.activation = activation_of(a.activation_type);
  const FormatInfo& format = info(p.format);
  p.block_size = format.block_size;
  p.block_bytes = format.block_bytes;
  require(a.N > 0, kOp, ": N is ", a.N, ", expected a positive number");
  require(a.K > 0 && a.K % p.block_size == 0, kOp, ": K is ", a.K, ", expected a whole number of blocks of ",
          p.block_size, " (", format.name, ")");
  p.row_bytes = row_bytes(p.format, a.K);
  match.tensor("A", a.A).types(kFloats);
  require(a.A.rank >= 1 && a.A.dim(a.A.rank - 1) == a.K, kOp, ": A has shape ", shape_text(a.A.dims()),
          ", expected [..., K = ", a.K, "]");
  require(a.A.device.type == DeviceType::kCpu, kOp, ": A is not on the CPU");
  p.m = cpu::num_rows(a.A);
  p.rounds_weights = !(a.unrounded && p.m <= kMostUnroundedRows) && a.A.dtype != DType::kF32;
  match.tensor("B", a.B).type(DType::kU8).shape({a.N, p.row_bytes}).contiguous().device(a.A.device);
  if (a.global_scale) {
    require(p.format == Format::kGGUF_NVFP4, kOp, ": global_scale is given, but packed_type is ", a.packed_type,
            ", not NVFP4 (40)");
    match.tensor("global_scale", a.global_scale).type(DType::kF32).device(a.A.device);
    require(a.global_scale.rank <= 1 && a.global_scale.num_elements() == 1, kOp, ": global_scale has shape ",
            shape_text(a.global_scale.dims()), ", expected one value");
    p.global = *a.global_scale.as<const float>();
  }
  match.tensor("Y", a.Y).type(a.A.dtype).rank(a.A.rank).device(a.A.device);
  p.y_stride = cpu::product_row_stride(kOp, a.Y, a.A, a.N);
  return p;
}

}  // namespace

int64_t packed_type_from_name(std::string_view name) {
  std::string lower(name.substr(0, 80));
  std::transform(lower.begin(), lower.end(), lower.begin(),
                 [](char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; });
  for (const std::string& candidate : {lower, "gguf_" + lower}) {
    const std::optional<Format> format = format_from_name(candidate);
    if (format && info(*format).ggml_type >= 0) {
      return info(*format).ggml_type;
    }
  }
  for (const auto& [other, id] : kOtherTypes) {
    if (other == lower) {
      return id;
    }
  }
  fail(ErrorCode::kInvalidArgument, kOp, ": packed_type is \"", printable(name), "\", which is no packed type");
}

size_t matmul_packed_workspace_bytes(const MatMulPackedArgs& args) {
  return cpu::product_rows_bytes(check(args).m, args.K);
}

void matmul_packed(const MatMulPackedArgs& args, const OpContext& context) {
  const MatMulPackedProblem p = check(args);
  const bool reference = wants_reference(kOp, context.variant);
  if (p.m == 0) {
    return;
  }
  if (reference) {
    matmul_packed_ref(p);
    return;
  }
  const Workspace::Scope scope(*context.workspace);
  const cpu::ProductRows rows = cpu::take_product_rows(*context.workspace, p.m, args.K);
  const auto prepare = SHOAL_PICK_ISA(context.isa, matmul_packed_prepare);
  const auto outputs = SHOAL_PICK_ISA(context.isa, matmul_packed_outputs);
  cpu::product_blocks(
      *context.pool, p.m, args.N, args.K,
      [&](int64_t first, int64_t begin, int64_t end) { prepare(p, first, begin, end, rows); },
      [&](int64_t first, int64_t count, int64_t begin, int64_t end) {
        cpu::ProductOut out = cpu::product_out(args.Y, p.y_stride, first, args.N, {});
        out.has_factor = static_cast<bool>(args.global_scale);
        out.factor = p.global;
        outputs(p, rows.first(count), out, begin, end);
      });
}

}  // namespace shoal
