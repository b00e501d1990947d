// Entry: preparation of weights, checks, split over threads.
#include "shoal/ops/matmul/matmul.h"

#include <algorithm>
#include <set>

#include "shoal/base/checked.h"
#include "shoal/base/text.h"
#include "shoal/cpu/thread_pool.h"
#include "shoal/ops/matmul/matmul_layout.h"
#include "shoal/ops/matmul/matmul_pack.h"
#include "shoal/tensor/matcher.h"

namespace shoal {
namespace {

constexpr std::string_view kVariants = "ref, f32";

bool is_plain(Format format) { return format == Format::kF32 || format == Format::kF16 || format == Format::kBF16; }

MatmulKernel select_kernel(Format format, std::string_view variant) {
  if (variant == "ref") {
    return MatmulKernel::kReference;
  }
  return is_plain(format) ? MatmulKernel::kPlain : MatmulKernel::kDecode;
}

std::string_view variant_of(MatmulKernel kernel) {
  switch (kernel) {
    case MatmulKernel::kReference: return "ref";
    case MatmulKernel::kDecode:
    case MatmulKernel::kPlain: return "f32";
  }
  return "";
}

std::string layout_of(const MatmulPart& part, int group) {
  return part.packed.size() == 0 ? "raw" : concat(info(part.raw.format).name, "_x", group);
}

std::string join(const std::set<std::string>& names) {
  std::string text;
  for (const std::string& name : names) {
    text += (text.empty() ? "" : "+") + name;
  }
  return text;
}

}  // namespace

MatmulWeight::MatmulWeight() = default;
MatmulWeight::~MatmulWeight() = default;
MatmulWeight::MatmulWeight(MatmulWeight&&) noexcept = default;
MatmulWeight& MatmulWeight::operator=(MatmulWeight&&) noexcept = default;

int64_t MatmulWeight::n() const { return impl_->n; }
int64_t MatmulWeight::k() const { return impl_->k; }
Format MatmulWeight::format() const { return impl_->parts.front().raw.format; }
std::string_view MatmulWeight::layout() const { return impl_->layout; }
std::string_view MatmulWeight::variant() const { return impl_->variant; }

bool MatmulWeight::owns_bytes() const {
  return std::all_of(impl_->parts.begin(), impl_->parts.end(),
                     [](const MatmulPart& part) { return part.raw.codes == nullptr; });
}

int64_t MatmulWeight::num_bytes() const {
  int64_t sum = 0;
  for (const MatmulPart& part : impl_->parts) {
    sum += part.raw.codes == nullptr ? static_cast<int64_t>(part.packed.size()) : part.raw.num_bytes();
  }
  return sum;
}

MatmulWeight prepare_matmul(std::span<const QuantMatrix> parts, MatmulPrecision precision, const OpContext& context) {
  require(!parts.empty(), "matmul: no weight given");
  require(context.variant.empty() || context.variant == "ref" || context.variant == "f32", "matmul: variant \"",
          printable(context.variant), "\" is unknown: ", kVariants);
  MatmulWeight weight;
  weight.impl_ = std::make_unique<MatmulWeight::Impl>();
  MatmulWeight::Impl& impl = *weight.impl_;
  impl.k = parts.front().k;
  impl.precision = precision;
  impl.isa = context.isa;
  impl.group = matmul_group(context.isa);
  impl.num_slots = context.pool->num_threads();
  std::set<std::string> layouts;
  std::set<std::string> variants;
  for (const QuantMatrix& raw : parts) {
    require(raw.n >= 0 && raw.k >= 0, "matmul: a weight has shape [", raw.n, ", ", raw.k, "]");
    require(raw.k == impl.k, "matmul: joined weights have k = ", impl.k, " and ", raw.k);
    row_bytes(raw.format, raw.k);  // throws unless k is a whole number of blocks
    require(raw.codes != nullptr || raw.n * raw.k == 0, "matmul: a weight has no data");
    MatmulPart part;
    part.raw = raw;
    part.kernel = select_kernel(raw.format, context.variant);
    part.n = raw.n;
    part.out_begin = impl.n;
    part.group_begin = impl.num_groups;
    part.num_groups = ceil_div<int64_t>(raw.n, impl.group);
    if (part.kernel == MatmulKernel::kPlain) {
      pack_matmul_part(part, raw.k, impl.group, *context.pool);
    }
    impl.n += part.n;
    impl.num_groups += part.num_groups;
    layouts.insert(layout_of(part, impl.group));
    variants.insert(std::string(variant_of(part.kernel)));
    impl.parts.push_back(std::move(part));
  }
  impl.layout = join(layouts);
  impl.variant = join(variants);
  return weight;
}

size_t matmul_workspace_bytes(const MatmulWeight& weight, int64_t m) {
  const MatmulWeight::Impl& impl = weight.impl();
  const bool decodes = std::any_of(impl.parts.begin(), impl.parts.end(),
                                   [](const MatmulPart& part) { return part.kernel == MatmulKernel::kDecode; });
  const auto slot_size = static_cast<size_t>(decode_scratch_size(impl.group));
  return decodes && m > 0 ? Workspace::bytes_for<float>(slot_size * static_cast<size_t>(impl.num_slots)) : 0;
}

namespace {

MatmulRows check(const MatmulArgs& args, const MatmulWeight::Impl& impl, const OpContext& context) {
  Dim m{"m"};
  Dim n{"n", impl.n};
  Dim k{"k", impl.k};
  const Matcher matcher("matmul");
  matcher.tensor("a", args.a).type(DType::kF32).shape({m, k}).inner_contiguous();
  matcher.tensor("out", args.out).type(DType::kF32).shape({m, n}).inner_contiguous();
  if (args.bias) {
    matcher.tensor("bias", args.bias).type(DType::kF32).shape({n}).inner_contiguous();
  }
  require(context.variant.empty() || context.variant == impl.variant, "matmul: variant \"", printable(context.variant),
          "\" asked for, but the weight was prepared for \"", impl.variant, "\"");
  return {.a = args.a.as<const float>(),
          .a_stride = args.a.stride(0),
          .out = args.out.as<float>(),
          .out_stride = args.out.stride(0),
          .bias = args.bias ? args.bias.as<const float>() : nullptr,
          .m = args.a.dim(0),
          .k = impl.k};
}

void fill_with_bias(const MatmulRows& rows, int64_t n) {
  for (int64_t m = 0; m < rows.m; ++m) {
    for (int64_t i = 0; i < n; ++i) {
      rows.out[m * rows.out_stride + i] = rows.bias != nullptr ? rows.bias[i] : 0.0f;
    }
  }
}

// Groups [begin, end) counted over all parts.
void run_groups(const MatmulWeight::Impl& impl, const MatmulRows& rows, int64_t begin, int64_t end, float* scratch) {
  for (const MatmulPart& part : impl.parts) {
    const int64_t from = std::max<int64_t>(begin - part.group_begin, 0);
    const int64_t to = std::min(end - part.group_begin, part.num_groups);
    if (from < to) {
      SHOAL_PICK_ISA(impl.isa, matmul_f32_groups)(part, rows, from, to, scratch);
    }
  }
}

}  // namespace

void matmul(const MatmulArgs& args, const MatmulWeight& weight, const OpContext& context) {
  const MatmulWeight::Impl& impl = weight.impl();
  const MatmulRows rows = check(args, impl, context);
  if (rows.m == 0 || impl.n == 0) {
    return;
  }
  if (impl.k == 0) {
    fill_with_bias(rows, impl.n);
    return;
  }
  if (impl.variant == "ref") {
    matmul_reference(impl, rows);
    return;
  }
  const size_t scratch_bytes = matmul_workspace_bytes(weight, rows.m);
  require(scratch_bytes == 0 || context.workspace != nullptr, "matmul: a workspace is required");
  float* scratch = nullptr;
  Workspace none;
  const Workspace::Scope scope(scratch_bytes > 0 ? *context.workspace : none);
  if (scratch_bytes > 0) {
    scratch = context.workspace->take<float>(scratch_bytes / sizeof(float)).data();
  }
  // Whole pairs of groups a slot, so that tiles are full; sums do not depend on it.
  const int64_t num_slots = impl.num_slots;
  const int64_t step = round_up(ceil_div(impl.num_groups, num_slots), int64_t{kDecodeGroups});
  context.pool->parallel_for(num_slots, 1, [&](int64_t slot_begin, int64_t slot_end, int) {
    for (int64_t slot = slot_begin; slot < slot_end; ++slot) {
      run_groups(impl, rows, std::min(slot * step, impl.num_groups), std::min((slot + 1) * step, impl.num_groups),
                 scratch == nullptr ? nullptr : scratch + slot * decode_scratch_size(impl.group));
    }
  });
}

}  // namespace shoal
