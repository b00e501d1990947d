// Entry: preparation of weights, checks, split over threads.
#include "shoal/ops/matmul/matmul.h"

#include <algorithm>
#include <initializer_list>
#include <limits>
#include <set>
#include <vector>

#include "shoal/base/checked.h"
#include "shoal/base/text.h"
#include "shoal/cpu/thread_pool.h"
#include "shoal/ops/matmul/matmul_layout.h"
#include "shoal/ops/matmul/matmul_pack.h"
#include "shoal/ops/on_cuda.h"
#include "shoal/tensor/matcher.h"

namespace shoal {
namespace {

constexpr std::string_view kVariants = "i8, f32, ref";

bool is_plain(Format format) { return format == Format::kF32 || format == Format::kF16 || format == Format::kBF16; }

enum class Bytes : uint8_t { kPacked, kCounted };

MatmulKernel select_kernel(const QuantMatrix& raw, MatmulPrecision precision, std::string_view variant, Bytes bytes) {
  if (variant == "ref") {
    return MatmulKernel::kReference;
  }
  if (precision == MatmulPrecision::kDefault && variant != "f32" &&
      (bytes == Bytes::kCounted ? integer_layout(raw.format).has_value() : has_integer_kernel(raw))) {
    return MatmulKernel::kInteger;
  }
  if (variant == "i8") {
    fail(ErrorCode::kUnsupported, "matmul: variant \"i8\" has no kernel for ", info(raw.format).name,
         precision == MatmulPrecision::kExact ? " in exact precision" : "");
  }
  return is_plain(raw.format) ? MatmulKernel::kPlain : MatmulKernel::kDecode;
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

bool is_packed(const MatmulPart& part) {
  return part.kernel == MatmulKernel::kPlain || part.kernel == MatmulKernel::kInteger;
}

std::string layout_of(const MatmulPart& part, int group) {
  return is_packed(part) ? concat(info(part.raw.format).name, "_x", group) : "raw";
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
Format MatmulWeight::format() const { return impl_->format; }
Device MatmulWeight::device() const { return impl_->device; }
std::string_view MatmulWeight::layout() const { return impl_->layout; }
std::string_view MatmulWeight::variant() const { return impl_->variant; }

bool MatmulWeight::owns_bytes() const {
  return std::all_of(impl_->parts.begin(), impl_->parts.end(),
                     [](const MatmulPart& part) { return part.raw.codes == nullptr; });
}

int64_t MatmulWeight::num_bytes() const {
  int64_t sum = 0;
  for (const cuda::DevicePart& part : impl_->device_parts) {
    sum += part.num_bytes();
  }
  for (const MatmulPart& part : impl_->parts) {
    sum += is_packed(part) ? static_cast<int64_t>(part.group_bytes) * part.num_groups : part.raw.num_bytes();
  }
  return sum;
}

namespace {

void check_raw(const QuantMatrix& raw, int64_t k) {
  require(raw.n >= 0 && raw.k >= 0, "matmul: a weight has shape [", raw.n, ", ", raw.k, "]");
  require(raw.k == k, "matmul: joined weights have k = ", k, " and ", raw.k);
  row_bytes(raw.format, raw.k);  // throws unless k is a whole number of blocks
  require(raw.codes != nullptr || raw.n * raw.k == 0, "matmul: a weight has no data");
}

void prepare(std::span<const QuantMatrix> parts, MatmulPrecision precision, const OpContext& context, Bytes bytes,
             MatmulWeight::Impl& impl) {
  require(!parts.empty(), "matmul: no weight given");
  const std::string_view variant = context.variant;
  require(variant.empty() || variant == "i8" || variant == "f32" || variant == "ref", "matmul: variant \"",
          printable(variant), "\" is unknown: ", kVariants);
  impl.k = parts.front().k;
  impl.format = parts.front().format;
  impl.precision = precision;
  impl.device = context.device;
  if (context.device.type == DeviceType::kCuda) {
    for (const QuantMatrix& raw : parts) {
      check_raw(raw, impl.k);
      impl.n += raw.n;
    }
    SHOAL_ASSERT(bytes == Bytes::kPacked);
    SHOAL_ON_CUDA("matmul", prepare_on_device(parts, impl, context));
    return;
  }
  impl.isa = context.isa;
  impl.group = matmul_group(context.isa);
  impl.num_slots = context.pool->num_threads();
  std::set<std::string> layouts;
  std::set<std::string> variants;
  for (const QuantMatrix& raw : parts) {
    check_raw(raw, impl.k);
    MatmulPart part;
    part.raw = raw;
    part.kernel = select_kernel(raw, precision, variant, bytes);
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
    if (is_packed(part)) {
      part.group_bytes = packed_group_bytes(part, raw.k, impl.group);
      if (bytes == Bytes::kPacked) {
        pack_matmul_part(part, raw.k, impl.group, *context.pool);
      }
      part.raw.codes = nullptr;  // no longer read
    }
    impl.n += part.n;
    impl.num_groups += part.num_groups;
    layouts.insert(layout_of(part, impl.group));
    variants.insert(std::string(variant_of(part.kernel)));
    impl.parts.push_back(std::move(part));
  }
  impl.layout = join(layouts);
  impl.variant = join(variants);
}

}  // namespace

MatmulWeight prepare_matmul(std::span<const QuantMatrix> parts, MatmulPrecision precision, const OpContext& context) {
  MatmulWeight weight;
  weight.impl_ = std::make_unique<MatmulWeight::Impl>();
  prepare(parts, precision, context, Bytes::kPacked, *weight.impl_);
  return weight;
}

MatmulWeight plan_matmul(std::span<const QuantMatrix> parts, MatmulPrecision precision, const OpContext& context) {
  MatmulWeight weight;
  weight.impl_ = std::make_unique<MatmulWeight::Impl>();
  prepare(parts, precision, context, Bytes::kCounted, *weight.impl_);
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

size_t matmul_workspace_bytes(const MatmulWeight& weight, int64_t m) {
  if (weight.device().type == DeviceType::kCuda) {
    return tiled_matmul_workspace_bytes(m, weight.k());
  }
  return Scratch(weight.impl(), m).num_bytes();
}

size_t tiled_matmul_workspace_bytes(int64_t num_sources, int64_t k) {
  return SHOAL_ON_CUDA("matmul", product_workspace_bytes(num_sources, k));
}

namespace {

// What is to be computed: rows in groups, a weight for each. Without groups there is one.
struct Job {
  std::span<const MatmulWeight> weights;
  std::span<const int32_t> row_begin;  // of each group, and the end
  MatmulRows rows;                     // of all groups; the bias is the first group's

  const MatmulWeight::Impl& impl(size_t group) const { return weights[group].impl(); }

  MatmulRows rows_of(size_t group) const {
    MatmulRows own = rows;
    own.a += row_begin[group] * rows.a_stride;
    own.out += row_begin[group] * rows.out_stride;
    own.bias = rows.bias == nullptr ? nullptr : rows.bias + static_cast<int64_t>(group) * impl(group).n;
    own.m = row_begin[group + 1] - row_begin[group];
    return own;
  }
};

MatmulRows check_rows(const TensorView& out, const TensorView& a, const MatmulWeight::Impl& impl,
                      const OpContext& context) {
  Dim m{"m"};
  Dim n{"n", impl.n};
  Dim k{"k", impl.k};
  const Matcher matcher("matmul");
  matcher.tensor("a", a).type(DType::kF32).shape({m, k}).inner_contiguous().device(impl.device);
  matcher.tensor("out", out).type(DType::kF32).shape({m, n}).inner_contiguous().device(impl.device);
  require(a.dim(0) <= std::numeric_limits<int32_t>::max(), "matmul: a has ", a.dim(0),
          " rows, at most 2^31 - 1 are supported");
  require(context.variant.empty() || context.variant == impl.variant, "matmul: variant \"", printable(context.variant),
          "\" asked for, but the weight was prepared for \"", impl.variant, "\"");
  return {.a = a.as<const float>(),
          .a_stride = a.stride(0),
          .out = out.as<float>(),
          .out_stride = out.stride(0),
          .m = a.dim(0),
          .k = impl.k};
}

// `shape` is [n], or [num_groups, n].
const float* check_bias(const TensorView& bias, std::initializer_list<int64_t> shape) {
  if (!bias) {
    return nullptr;
  }
  const Matcher matcher("matmul");
  Dim n{"n", *(shape.end() - 1)};
  if (shape.size() == 1) {
    matcher.tensor("bias", bias).type(DType::kF32).shape({n}).contiguous();
  } else {
    Dim num_groups{"num_groups", *shape.begin()};
    matcher.tensor("bias", bias).type(DType::kF32).shape({num_groups, n}).contiguous();
  }
  return bias.as<const float>();
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

// How a group's work is cut: units of (block of rows) x (pair of output groups), in this order. A unit's cost grows with
// its rows and is not nothing for one row, whose weights must be read too.
struct Units {
  int64_t num_pairs = 0;
  int64_t block_rows = 0;
  int64_t count = 0;
  int64_t cost = 0;  // of each

  Units(const MatmulWeight::Impl& impl, int64_t m) {
    num_pairs = ceil_div<int64_t>(impl.num_groups, kDecodeGroups);
    block_rows = num_pairs >= 4 * impl.num_slots ? m : std::min(m, kSplitRows);
    count = m == 0 ? 0 : num_pairs * ceil_div(m, block_rows);
    cost = block_rows + 1;
  }
};

class Runner {
 public:
  Runner(const Job& job, const QuantRows& quant, float* decoded) : job_(job), quant_(quant), decoded_(decoded) {
    for (size_t group = 0; group < job.weights.size(); ++group) {
      const Units units(job.impl(group), job.rows_of(group).m);
      total_cost_ += units.count * units.cost;
    }
  }

  // Each slot gets the units that begin in its share of the cost, which is one range a group.
  void run(const OpContext& context) const {
    const int num_slots = job_.impl(0).num_slots;
    context.pool->parallel_for(num_slots, 1, [&](int64_t begin, int64_t end, int) {
      for (int64_t slot = begin; slot < end; ++slot) {
        run_slot(slot, total_cost_ * slot / num_slots, total_cost_ * (slot + 1) / num_slots);
      }
    });
  }

 private:
  void run_slot(int64_t slot, int64_t cost_begin, int64_t cost_end) const {
    int64_t cost = 0;  // of all groups before
    for (size_t group = 0; group < job_.weights.size() && cost < cost_end; ++group) {
      const Units units(job_.impl(group), job_.rows_of(group).m);
      const int64_t unit_begin =
          std::clamp<int64_t>(ceil_div(std::max<int64_t>(cost_begin - cost, 0), units.cost), 0, units.count);
      const int64_t unit_end = std::clamp<int64_t>(ceil_div(cost_end - cost, units.cost), 0, units.count);
      run_units(group, units, unit_begin, unit_end, slot);
      cost += units.count * units.cost;
    }
  }

  void run_units(size_t group, const Units& units, int64_t unit, int64_t unit_end, int64_t slot) const {
    const MatmulWeight::Impl& impl = job_.impl(group);
    const MatmulRows rows = job_.rows_of(group);
    const int64_t spread_size = spread_scratch_size(impl.isa, job_.rows.m, rows.k);
    float* decoded =
        decoded_ == nullptr ? nullptr : decoded_ + slot * decode_scratch_size(impl.decode_chunk, impl.group);
    while (unit < unit_end) {
      const int64_t pair = unit % units.num_pairs;
      const int64_t count = std::min(unit_end - unit, units.num_pairs - pair);
      const int64_t row_begin = unit / units.num_pairs * units.block_rows;
      const int64_t row_end = std::min(row_begin + units.block_rows, rows.m);
      run_groups(impl, slice(rows, row_begin, row_end),
                 slice(quant_, rows.k, job_.row_begin[group] + row_begin, slot * spread_size), pair * kDecodeGroups,
                 (pair + count) * kDecodeGroups, decoded);
      unit += count;
    }
  }

  const Job& job_;
  const QuantRows& quant_;
  float* decoded_;
  int64_t total_cost_ = 0;
};

void run(const Job& job, const OpContext& context) {
  const MatmulWeight::Impl& impl = job.impl(0);
  if (job.rows.m == 0 || impl.n == 0) {
    return;
  }
  if (impl.k == 0 || impl.variant == "ref") {
    for (size_t group = 0; group < job.weights.size(); ++group) {
      impl.k == 0 ? fill_with_bias(job.rows_of(group), impl.n) : matmul_reference(job.impl(group), job.rows_of(group));
    }
    return;
  }
  const Scratch scratch(impl, job.rows.m);
  if (scratch.num_bytes() == 0) {
    Runner(job, {}, nullptr).run(context);
    return;
  }
  require(context.workspace != nullptr, "matmul: a workspace is required");
  const Workspace::Scope scope(*context.workspace);
  QuantRows quant;
  if (scratch.num_codes > 0) {
    quant.codes = context.workspace->take<int8_t>(static_cast<size_t>(scratch.num_codes)).data();
    quant.blocks = context.workspace->take<QuantBlock>(static_cast<size_t>(scratch.num_blocks)).data();
    quant.spread = context.workspace->take<int8_t>(static_cast<size_t>(scratch.num_spread)).data();
    quantize(impl, job.rows, quant, context);
  }
  float* decoded = nullptr;
  if (scratch.num_decoded > 0) {
    decoded = context.workspace->take<float>(static_cast<size_t>(scratch.num_decoded)).data();
  }
  Runner(job, quant, decoded).run(context);
}

void check_groups(const GroupedMatmulArgs& args, std::span<const MatmulWeight> weights) {
  const MatmulWeight::Impl& first = weights.front().impl();
  for (const MatmulWeight& weight : weights) {
    const MatmulWeight::Impl& impl = weight.impl();
    require(impl.n == first.n && impl.k == first.k && impl.layout == first.layout && impl.variant == first.variant &&
                impl.isa == first.isa && impl.num_slots == first.num_slots && impl.decode_chunk == first.decode_chunk,
            "matmul: the weights of the groups differ in shape, format or preparation");
  }
  const auto& row_begin = args.row_begin;
  require(row_begin.size() == weights.size() + 1 && row_begin.front() == 0 && row_begin.back() == args.a.dim(0) &&
              std::is_sorted(row_begin.begin(), row_begin.end()),
          "matmul: row_begin must ascend from 0 to the rows of a, one more than groups");
}

}  // namespace

void matmul(const MatmulArgs& args, const MatmulWeight& weight, const OpContext& context) {
  MatmulRows rows = check_rows(args.out, args.a, weight.impl(), context);
  rows.bias = check_bias(args.bias, {weight.n()});
  if (weight.device().type == DeviceType::kCuda) {
    SHOAL_ON_CUDA("matmul", matmul_rows(weight.impl(), rows, context));
    return;
  }
  const int32_t row_begin[] = {0, static_cast<int32_t>(rows.m)};
  run({std::span(&weight, 1), row_begin, rows}, context);
}

void grouped_matmul(const GroupedMatmulArgs& args, std::span<const MatmulWeight> weights, const OpContext& context) {
  require(!weights.empty(), "matmul: no weights given");
  MatmulRows rows = check_rows(args.out, args.a, weights.front().impl(), context);
  rows.bias = check_bias(args.bias, {static_cast<int64_t>(weights.size()), weights.front().n()});
  require(weights.front().device().type == DeviceType::kCpu, "matmul: on CUDA groups are tiles: tiled_matmul");
  check_groups(args, weights);
  run({weights, args.row_begin, rows}, context);
}

GroupedWeights::GroupedWeights() = default;
GroupedWeights::~GroupedWeights() = default;
GroupedWeights::GroupedWeights(GroupedWeights&&) noexcept = default;
GroupedWeights& GroupedWeights::operator=(GroupedWeights&&) noexcept = default;

GroupedWeights::GroupedWeights(std::vector<MatmulWeight> weights, const OpContext& context)
    : impl_(std::make_unique<Impl>()) {
  require(!weights.empty(), "matmul: no weights given");
  impl_->weights = std::move(weights);
  SHOAL_ON_CUDA("matmul", make_operands(*impl_, context));
}

int64_t GroupedWeights::num_groups() const { return static_cast<int64_t>(impl_->weights.size()); }
const MatmulWeight& GroupedWeights::weight(int64_t group) const {
  return impl_->weights.at(static_cast<size_t>(group));
}
int64_t GroupedWeights::n() const { return impl_->weights.front().n(); }
int64_t GroupedWeights::k() const { return impl_->weights.front().k(); }

TileCount matmul_tiles(int64_t m, int64_t num_groups) {
  TileCount count;
  count.tile_rows = SHOAL_ON_CUDA("matmul", group_tile_rows(m, num_groups));
  count.num_tiles = SHOAL_ON_CUDA("matmul", max_group_tiles(m, num_groups, count.tile_rows));
  return count;
}

void tiled_matmul(const TiledMatmulArgs& args, const GroupedWeights& weights, const OpContext& context) {
  Dim m{"m"};
  Dim sources{"num_sources"};
  Dim k{"k", weights.k()};
  const Matcher match("matmul");
  const Device device = args.out.device;
  match.tensor("a", args.a).type(DType::kF32).shape({sources, k}).inner_contiguous().device(device);
  match.tensor("out", args.out).type(DType::kF32).shape({m, weights.n()}).inner_contiguous();
  if (args.source) {
    match.tensor("source", args.source).type(DType::kI32).shape({m}).contiguous().device(device);
  } else {
    require(sources.value() == m.value(), "matmul: without source, a needs as many rows as out");
  }
  match.tensor("tiles", args.tiles).type(DType::kI32).rank(2).contiguous().device(device);
  require(args.tiles.dim(1) == 4, "matmul: tiles must be [num_tiles, 4]");
  check_bias(args.bias, {weights.num_groups(), weights.n()});
  SHOAL_ON_CUDA("matmul", tiled_product(args, weights.impl(), context));
}

}  // namespace shoal
