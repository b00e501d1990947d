// Entry: preparation of weights, checks, split over threads.
#include "shoal/ops/matmul/matmul.h"

#include <algorithm>
#include <set>
#include <vector>

#include "shoal/base/checked.h"
#include "shoal/base/text.h"
#include "shoal/cpu/thread_pool.h"
#include "shoal/ops/matmul/matmul_layout.h"
#include "shoal/ops/matmul/matmul_pack.h"
#include "shoal/tensor/matcher.h"

namespace shoal {
namespace {

constexpr std::string_view kVariants = "i8, f32, ref";

bool is_plain(Format format) { return format == Format::kF32 || format == Format::kF16 || format == Format::kBF16; }

MatmulKernel select_kernel(Format format, MatmulPrecision precision, std::string_view variant) {
  if (variant == "ref") {
    return MatmulKernel::kReference;
  }
  if (precision == MatmulPrecision::kDefault && variant != "f32" && integer_layout(format)) {
    return MatmulKernel::kInteger;
  }
  if (variant == "i8") {
    fail(ErrorCode::kUnsupported, "matmul: variant \"i8\" has no kernel for ", info(format).name,
         precision == MatmulPrecision::kExact ? " in exact precision" : "");
  }
  return is_plain(format) ? MatmulKernel::kPlain : MatmulKernel::kDecode;
}

std::string_view variant_of(MatmulKernel kernel) {
  switch (kernel) {
    case MatmulKernel::kReference: return "ref";
    case MatmulKernel::kDecode:
    case MatmulKernel::kPlain: return "f32";
    case MatmulKernel::kInteger: return "i8";
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
  const std::string_view variant = context.variant;
  require(variant.empty() || variant == "i8" || variant == "f32" || variant == "ref", "matmul: variant \"",
          printable(variant), "\" is unknown: ", kVariants);
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
    part.kernel = select_kernel(raw.format, precision, variant);
    part.n = raw.n;
    part.out_begin = impl.n;
    part.group_begin = impl.num_groups;
    part.num_groups = ceil_div<int64_t>(raw.n, impl.group);
    if (part.kernel == MatmulKernel::kDecode && raw.n > 0 && raw.k > 0) {
      std::vector<float> row(static_cast<size_t>(raw.k));
      decode_rows(raw, 0, 1, row.data());  // throws if the scales do not fit
      const bool whole_rows = raw.scales || raw.global_scale;
      part.decode_chunk = whole_rows ? raw.k : std::min(raw.k, kDecodeChunk);
      impl.decode_chunk = std::max(impl.decode_chunk, part.decode_chunk);
    }
    if (part.kernel == MatmulKernel::kPlain || part.kernel == MatmulKernel::kInteger) {
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

namespace {

bool quantizes(const MatmulWeight::Impl& impl) {
  return std::any_of(impl.parts.begin(), impl.parts.end(),
                     [](const MatmulPart& part) { return part.kernel == MatmulKernel::kInteger; });
}

// Scratch of a call: quantised activations of all rows; per slot a tile of them spread, and a decoded tile.
struct Scratch {
  int64_t num_codes = 0;
  int64_t num_blocks = 0;
  int64_t num_spread = 0;
  int64_t num_decoded = 0;

  Scratch(const MatmulWeight::Impl& impl, int64_t m) {
    if (quantizes(impl)) {
      num_codes = m * impl.k;
      num_blocks = num_codes / kQuantBlock;
      num_spread = spread_scratch_size(impl.isa, m, impl.k) * impl.num_slots;
    }
    num_decoded = m > 0 ? decode_scratch_size(impl.decode_chunk, impl.group) * impl.num_slots : 0;
  }
  size_t num_bytes() const {
    return Workspace::bytes_for<int8_t>(static_cast<size_t>(num_codes)) +
           Workspace::bytes_for<QuantBlock>(static_cast<size_t>(num_blocks)) +
           Workspace::bytes_for<int8_t>(static_cast<size_t>(num_spread)) +
           Workspace::bytes_for<float>(static_cast<size_t>(num_decoded));
  }
};

}  // namespace

size_t matmul_workspace_bytes(const MatmulWeight& weight, int64_t m) { return Scratch(weight.impl(), m).num_bytes(); }

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

// Rows [begin, end) of a call.
MatmulRows slice(MatmulRows rows, int64_t begin, int64_t end) {
  rows.a += begin * rows.a_stride;
  rows.out += begin * rows.out_stride;
  rows.m = end - begin;
  return rows;
}

QuantRows slice(const QuantRows& quant, int64_t k, int64_t begin, int64_t spread_begin) {
  if (quant.codes == nullptr) {
    return quant;
  }
  return {quant.codes + begin * k, quant.blocks + begin * (k / kQuantBlock), quant.spread + spread_begin};
}

// Outputs of groups [begin, end), counted over all parts.
void run_groups(const MatmulWeight::Impl& impl, const MatmulRows& rows, const QuantRows& quant, int64_t begin,
                int64_t end, float* decoded) {
  for (const MatmulPart& part : impl.parts) {
    const int64_t from = std::max<int64_t>(begin - part.group_begin, 0);
    const int64_t to = std::min(end - part.group_begin, part.num_groups);
    if (from >= to) {
      continue;
    }
    if (part.kernel == MatmulKernel::kInteger) {
      SHOAL_PICK_ISA(impl.isa, matmul_integer_groups)(part, rows, quant, from, to);
    } else {
      SHOAL_PICK_ISA(impl.isa, matmul_f32_groups)(part, rows, from, to, decoded);
    }
  }
}

constexpr int64_t kSerialQuantSize = 4096;  // activations quantised faster (about 2 us) than threads are woken
constexpr int64_t kSplitRows = 64;          // rows of a unit of work, where the outputs alone are too few to share

void quantize(const MatmulWeight::Impl& impl, const MatmulRows& rows, const QuantRows& quant,
              const OpContext& context) {
  const auto body = [&](int64_t begin, int64_t end, int) {
    SHOAL_PICK_ISA(impl.isa, quantize_activations)(rows, begin, end, quant);
  };
  if (rows.m * rows.k <= kSerialQuantSize) {
    body(0, rows.m, 0);
  } else {
    context.pool->parallel_for(rows.m, 1, body);
  }
}

// Work is cut in units, (block of rows) x (pair of groups), and each slot gets a contiguous range of them.
void run_units(const MatmulWeight::Impl& impl, const MatmulRows& rows, const QuantRows& quant, float* decoded,
               const OpContext& context) {
  const int64_t num_pairs = ceil_div<int64_t>(impl.num_groups, kDecodeGroups);
  const int64_t block_rows = num_pairs >= 4 * impl.num_slots ? rows.m : std::min(rows.m, kSplitRows);
  const int64_t num_units = num_pairs * ceil_div(rows.m, block_rows);
  const int64_t spread_size = spread_scratch_size(impl.isa, rows.m, rows.k);
  const auto run_slot = [&](int64_t slot) {
    const int64_t unit_end = num_units * (slot + 1) / impl.num_slots;
    for (int64_t unit = num_units * slot / impl.num_slots; unit < unit_end;) {
      const int64_t pair = unit % num_pairs;
      const int64_t count = std::min(unit_end - unit, num_pairs - pair);
      const int64_t row_begin = unit / num_pairs * block_rows;
      const int64_t row_end = std::min(row_begin + block_rows, rows.m);
      run_groups(impl, slice(rows, row_begin, row_end), slice(quant, rows.k, row_begin, slot * spread_size),
                 pair * kDecodeGroups, (pair + count) * kDecodeGroups,
                 decoded == nullptr ? nullptr : decoded + slot * decode_scratch_size(impl.decode_chunk, impl.group));
      unit += count;
    }
  };
  context.pool->parallel_for(impl.num_slots, 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t slot = begin; slot < end; ++slot) {
      run_slot(slot);
    }
  });
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
  const Scratch scratch(impl, rows.m);
  if (scratch.num_bytes() == 0) {
    run_units(impl, rows, {}, nullptr, context);
    return;
  }
  require(context.workspace != nullptr, "matmul: a workspace is required");
  const Workspace::Scope scope(*context.workspace);
  QuantRows quant;
  if (scratch.num_codes > 0) {
    quant.codes = context.workspace->take<int8_t>(static_cast<size_t>(scratch.num_codes)).data();
    quant.blocks = context.workspace->take<QuantBlock>(static_cast<size_t>(scratch.num_blocks)).data();
    quant.spread = context.workspace->take<int8_t>(static_cast<size_t>(scratch.num_spread)).data();
    quantize(impl, rows, quant, context);
  }
  float* decoded = nullptr;
  if (scratch.num_decoded > 0) {
    decoded = context.workspace->take<float>(static_cast<size_t>(scratch.num_decoded)).data();
  }
  run_units(impl, rows, quant, decoded, context);
}

}  // namespace shoal
