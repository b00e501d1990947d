// QMoE: checks of inputs and attributes, in the order of the schema, and the problem they describe.
#include <array>
#include <cmath>
#include <string>
#include <vector>

#include "shoal/base/checked.h"
#include "shoal/base/text.h"
#include "shoal/ops/moe/moe.h"
#include "shoal/ops/moe/moe_problem.h"
#include "shoal/ops/moe_router/moe_router.h"
#include "shoal/quant/code_stream.h"
#include "shoal/tensor/matcher.h"

namespace shoal {
namespace {

constexpr std::string_view kName = "qmoe";
constexpr int64_t kSmallestSize = 16;  // of H and I
constexpr int64_t kMxBlock = 32;
constexpr int64_t kNvBlock = 16;

enum class Quant : uint8_t { kInt, kFp8, kMx, kNv };

// The inputs of one projection and how messages call them.
struct Inputs {
  std::string_view prefix;  // "fc1"
  const TensorView& weights;
  const TensorView& scales;
  const TensorView& bias;
  const TensorView& zeros;
  const TensorView& global;
  int64_t bits;
  std::string name(std::string_view part) const { return concat(prefix, part); }
};

struct Checked {
  moe::Problem problem;
  Quant quant = Quant::kInt;
  int64_t block = 0;  // 0: none
};

void check_flag(std::string_view name, int64_t value) {
  require(value == 0 || value == 1, kName, ": ", name, " is ", value, ", expected 0 or 1");
}

Quant quant_of(const QMoEArgs& a) {
  if (a.quant_type == "int") return Quant::kInt;
  if (a.quant_type == "fp8") return Quant::kFp8;
  if (a.quant_type == "fp4" || a.quant_type == "wfp4afp8") return Quant::kMx;
  if (a.quant_type == "nvfp4") return Quant::kNv;
  fail(ErrorCode::kInvalidArgument, kName, ": quant_type is '", printable(a.quant_type),
       "', expected int, fp4, nvfp4, fp8 or wfp4afp8");
}

void check_bits(const QMoEArgs& a, Quant quant) {
  const auto check = [&](std::string_view name, int64_t bits) {
    const bool fits = quant == Quant::kInt   ? bits == 2 || bits == 3 || bits == 4 || bits == 8
                      : quant == Quant::kFp8 ? bits == 8
                                             : bits == 4;
    require(fits, kName, ": ", name, " is ", bits, ", expected ",
            quant == Quant::kInt   ? "2, 3, 4 or 8"
            : quant == Quant::kFp8 ? "8"
                                   : "4",
            " with quant_type ", a.quant_type);
  };
  check("expert_weight_bits", a.expert_weight_bits);
  for (const auto& [name, bits] : {std::pair{"fc1_expert_weight_bits", a.fc1_expert_weight_bits},
                                   {"fc2_expert_weight_bits", a.fc2_expert_weight_bits},
                                   {"fc3_expert_weight_bits", a.fc3_expert_weight_bits}}) {
    if (bits.has_value()) {
      check(name, *bits);
    }
  }
}

int64_t block_of(const QMoEArgs& a, Quant quant) {
  const auto reject = [&](std::string_view expected) {
    fail(ErrorCode::kInvalidArgument, kName, ": block_size is ", a.block_size, ", expected ", expected,
         " with quant_type ", a.quant_type);
  };
  if (quant == Quant::kMx || quant == Quant::kNv) {
    const int64_t own = quant == Quant::kMx ? kMxBlock : kNvBlock;
    if (a.block_size > 0 && a.block_size != own) {
      reject(concat("-1 or ", own));
    }
    return own;
  }
  if (a.block_size <= 0) {
    return 0;
  }
  if (a.block_size < 16 || !is_power_of_two(a.block_size)) {
    reject("-1 or a power of two of at least 16");
  }
  return a.block_size;
}

moe::Activation activation_of(std::string_view name) {
  using moe::Activation;
  for (const auto& [known, activation] : {std::pair{"relu", Activation::kRelu},
                                          {"relu2", Activation::kRelu2},
                                          {"silu", Activation::kSilu},
                                          {"gelu", Activation::kGelu},
                                          {"identity", Activation::kIdentity},
                                          {"swiglu", Activation::kSwiglu},
                                          {"geglu", Activation::kGelu}}) {
    if (name == known) {
      return activation;
    }
  }
  fail(ErrorCode::kInvalidArgument, kName, ": activation_type is '", printable(name),
       "', expected relu, gelu, silu, swiglu, identity, relu2 or geglu");
}

bool is_gated(const QMoEArgs& a) { return a.activation_type == "swiglu" || a.activation_type == "geglu"; }

moe::Gate gate_of(const QMoEArgs& a, Quant quant, int64_t block) {
  require(a.swiglu_fusion >= 0 && a.swiglu_fusion <= 2, kName, ": swiglu_fusion is ", a.swiglu_fusion,
          ", expected 0, 1 or 2");
  const bool has_fc3 = static_cast<bool>(a.fc3_experts_weights);
  if (a.activation_type == "geglu") {
    require(quant == Quant::kInt, kName, ": activation_type geglu needs quant_type int, not ", a.quant_type);
    require(a.swiglu_fusion != 0, kName, ": swiglu_fusion is 0, expected 1 or 2 with activation_type geglu");
    require(!has_fc3, kName, ": fc3_experts_weights must be absent with activation_type geglu");
  }
  if (!has_fc3) {
    for (const auto& [name, view] : {std::pair{"fc3_scales", &a.fc3_scales},
                                     {"fc3_experts_bias", &a.fc3_experts_bias},
                                     {"fc3_zero_points", &a.fc3_zero_points}}) {
      require(!*view, kName, ": ", name, " is given without fc3_experts_weights");
    }
    if (!is_gated(a)) {
      return moe::Gate::kNone;
    }
    return a.swiglu_fusion == 2 ? moe::Gate::kConcatenated : moe::Gate::kInterleaved;
  }
  require(quant == Quant::kInt || (quant == Quant::kFp8 && block > 0), kName, ": fc3_experts_weights with quant_type ",
          a.quant_type, quant == Quant::kFp8 ? " needs a block_size" : " is not possible");
  require(!is_gated(a) || a.swiglu_fusion == 0, kName, ": fc3_experts_weights must be absent with swiglu_fusion ",
          a.swiglu_fusion, ", whose value is in fc1_experts_weights");
  return moe::Gate::kSeparate;
}

void check_attributes(const QMoEArgs& a, Quant quant) {
  check_flag("normalize_routing_weights", a.normalize_routing_weights);
  check_flag("use_sparse_mixer", a.use_sparse_mixer);
  check_flag("swiglu_limit_after_activation", a.swiglu_limit_after_activation);
  require(a.weights_prepacked >= -1 && a.weights_prepacked <= 1, kName, ": weights_prepacked is ", a.weights_prepacked,
          ", expected -1, 0 or 1");
  require(quant != Quant::kInt || a.weights_prepacked != 1, kName,
          ": weights_prepacked 1 names a private layout of quant_type int, only raw weights (-1, 0) are known");
  require(a.swiglu_limit_after_activation == 0 || a.activation_type == "swiglu", kName,
          ": swiglu_limit_after_activation needs activation_type swiglu, not ", a.activation_type);
  require(!std::isnan(a.swiglu_limit), kName, ": swiglu_limit is not a number");
  require(a.row_tile_size >= 0, kName, ": row_tile_size is ", a.row_tile_size, ", expected at least 0");
}

void check_int3(const QMoEArgs& a, DType dtype, int64_t block) {
  constexpr std::string_view kWith = " with 3-bit weights";
  require(a.activation_type == "swiglu", kName, ": activation_type is ", a.activation_type, ", expected swiglu", kWith);
  require(a.swiglu_fusion == 1, kName, ": swiglu_fusion is ", a.swiglu_fusion, ", expected 1", kWith);
  require(block == 32 || block == 64 || block == 128, kName, ": block_size is ", a.block_size,
          ", expected 32, 64 or 128", kWith);
  require(dtype != DType::kF32, kName, ": input has type float32, expected float16 or bfloat16", kWith);
}

void check_routing(const QMoEArgs& a, int64_t num_experts) {
  require(a.num_shared_experts >= 0 && a.num_shared_experts < num_experts, kName, ": num_shared_experts is ",
          a.num_shared_experts, ", expected 0 to ", num_experts - 1);
  require(a.num_shared_experts == 0 || a.use_sparse_mixer == 0, kName,
          ": num_shared_experts excludes use_sparse_mixer");
  require(a.num_shared_experts == 0 || !a.router_weights, kName, ": num_shared_experts excludes router_weights");
  const int64_t num_routed = num_experts - a.num_shared_experts;
  require(a.k >= 1 && a.k <= num_routed, kName, ": k is ", a.k, ", expected 1 to ", num_routed);
  if (a.use_sparse_mixer == 1) {
    require(a.k == 2, kName, ": use_sparse_mixer needs k = 2, not ", a.k);
    require(num_experts == 8 || num_experts == 16, kName, ": use_sparse_mixer needs 8 or 16 experts, not ",
            num_experts);
  }
}

void check_weight_memory(std::string_view name, const TensorView& view) {
  const int last = view.rank - 1;
  require(view.stride(last) == 1 || view.dim(last) <= 1, kName, ": ", name,
          " must be contiguous in its last dimension");
}

// The first row of a packed tensor [E, N, bytes] with bits beyond its last code is an error.
void check_pad_bits(std::string_view name, const TensorView& view, int64_t bits, int64_t num_codes) {
  if (num_codes * bits % 8 == 0) {
    return;
  }
  for (int64_t e = 0; e < view.dim(0); ++e) {
    for (int64_t n = 0; n < view.dim(1); ++n) {
      const auto* row = view.as<const std::byte>() + e * view.stride(0) + n * view.stride(1);
      require(pad_bits(row, static_cast<int>(bits), num_codes) == 0, kName, ": ", name, "[", e, ", ", n,
              "] has bits set beyond its last code");
    }
  }
}

void check_zeros_are_four(std::string_view name, const TensorView& view, int64_t groups) {
  for (int64_t e = 0; e < view.dim(0); ++e) {
    for (int64_t n = 0; n < view.dim(1); ++n) {
      const auto* row = view.as<const std::byte>() + e * view.stride(0) + n * view.stride(1);
      for (int64_t g = 0; g < groups; ++g) {
        require(read_code(row, 3, g) == 4, kName, ": ", name, "[", e, ", ", n, "] has the zero point ",
                read_code(row, 3, g), ", expected 4 with 3 bits");
      }
    }
  }
}

class Projector {
 public:
  Projector(const Checked& checked, Device device) : checked_(checked), device_(device) {}

  // Checks the inputs of a projection [E, n, k] and describes it.
  moe::Projection operator()(const QMoEArgs& a, const Inputs& in, int64_t n, int64_t k) const {
    moe::Projection p;
    p.n = n;
    p.k = k;
    p.bits = static_cast<int>(in.bits);
    switch (checked_.quant) {
      case Quant::kInt: describe_int(in, p); break;
      case Quant::kFp8: describe_fp8(in, p); break;
      default: describe_e2m1(a, in, p); break;
    }
    if (in.bias) {
      match_.tensor(in.name("_experts_bias"), in.bias)
          .type(checked_.problem.dtype)
          .shape({checked_.problem.num_experts, n})
          .device(device_);
      p.bias = in.bias;
    }
    return p;
  }

 private:
  int64_t num_experts() const { return checked_.problem.num_experts; }

  void set_weights(const Inputs& in, moe::Projection& p) const {
    check_weight_memory(in.name("_experts_weights"), in.weights);
    p.data = in.weights.as<const std::byte>();
    p.expert_bytes = in.weights.stride(0);
    p.row_bytes = in.weights.stride(1);
  }

  void set_scales(const TensorView& view, moe::Projection& p) const {
    p.scales = view.data;
    p.scale_type = view.dtype;
    for (int axis = 0; axis < view.rank; ++axis) {
      p.scale_strides[axis] = view.stride(axis);
    }
  }

  void reject_global(const Inputs& in, std::string_view why) const {
    require(!in.global, kName, ": ", in.prefix, "_global_scale must be absent ", why);
  }

  void set_global(const Inputs& in, moe::Projection& p) const {
    match_.tensor(in.name("_global_scale"), in.global).type(DType::kF32).shape({num_experts()}).device(device_);
    p.global = in.global.as<const float>();
    p.global_stride = in.global.stride(0);
  }

  void describe_int(const Inputs& in, moe::Projection& p) const {
    p.codes = moe::Codes::kAffine;
    const std::string weights = in.name("_experts_weights");
    match_.tensor(weights, in.weights)
        .type(DType::kU8)
        .shape({num_experts(), p.n, ceil_div<int64_t>(p.k * p.bits, 8)})
        .device(device_);
    set_weights(in, p);
    check_pad_bits(weights, in.weights, p.bits, p.k);
    reject_global(in, "with quant_type int");
    const std::string scales = in.name("_scales");
    require(static_cast<bool>(in.scales), kName, ": ", scales, " is required with quant_type int");
    require(in.scales.dtype == checked_.problem.dtype, kName, ": ", scales, " has type ", to_string(in.scales.dtype),
            "; scales must match the activation type ", to_string(checked_.problem.dtype));
    if (checked_.block == 0) {
      p.scaling = moe::Scaling::kAfter;
      p.group = p.k;
      match_.tensor(scales, in.scales).shape({num_experts(), p.n}).device(device_);
      require(!in.zeros, kName, ": ", in.prefix, "_zero_points must be absent without block_size");
    } else {
      require(p.k % checked_.block == 0, kName, ": block_size is ", checked_.block, ", which does not divide ", p.k,
              ", the columns of ", weights);
      p.scaling = moe::Scaling::kPieces;
      p.group = checked_.block;
      match_.tensor(scales, in.scales).shape({num_experts(), p.n, p.num_groups()}).device(device_);
      describe_zeros(in, p);
    }
    set_scales(in.scales, p);
  }

  void describe_zeros(const Inputs& in, moe::Projection& p) const {
    if (!in.zeros) {
      return;
    }
    const std::string name = in.name("_zero_points");
    require(checked_.block >= 32, kName, ": ", name, " needs a block_size of at least 32, not ", checked_.block);
    const int64_t groups = p.num_groups();
    const int64_t packed = ceil_div<int64_t>(groups * p.bits, 8);
    match_.tensor(name, in.zeros).type(DType::kU8).rank(3).device(device_);
    const bool whole_bytes = p.bits == 4 && in.zeros.dim(2) == groups && packed != groups;
    p.zero_bits = whole_bytes ? 8 : p.bits;
    match_.tensor(name, in.zeros).shape({num_experts(), p.n, whole_bytes ? groups : packed});
    check_weight_memory(name, in.zeros);
    check_pad_bits(name, in.zeros, p.zero_bits, groups);
    if (p.bits == 3) {
      check_zeros_are_four(name, in.zeros, groups);
    }
    p.zeros = in.zeros.as<const uint8_t>();
    p.zero_expert_bytes = in.zeros.stride(0);
    p.zero_row_bytes = in.zeros.stride(1);
  }

  void reject_zeros(const Inputs& in, std::string_view quant_type) const {
    require(!in.zeros, kName, ": ", in.prefix, "_zero_points must be absent with quant_type ", quant_type);
  }

  void describe_fp8(const Inputs& in, moe::Projection& p) const {
    p.codes = moe::Codes::kE4M3;
    reject_zeros(in, "fp8");
    const std::string weights = in.name("_experts_weights");
    match_.tensor(weights, in.weights).type(DType::kF8E4M3).rank(3).device(device_);
    const TensorView& w = in.weights;
    require(w.dim(1) == p.n && w.dim(2) == p.k, kName, ": ", weights, " has shape ", shape_text(w.dims()),
            ", expected row-major [", num_experts(), ", ", p.n, ", ", p.k, "]");
    match_.tensor(weights, w).shape({num_experts(), p.n, p.k});
    set_weights(in, p);
    const std::string scales = in.name("_scales");
    if (checked_.block > 0) {
      p.scaling = moe::Scaling::kValues;
      p.group = checked_.block;
      p.row_group = checked_.block;
      reject_global(in, "with quant_type fp8 and a block_size");
      require(static_cast<bool>(in.scales), kName, ": ", scales, " is required with quant_type fp8 and a block_size");
      match_.tensor(scales, in.scales)
          .types(kFloats)
          .shape({num_experts(), ceil_div(p.n, checked_.block), p.num_groups()})
          .device(device_);
      set_scales(in.scales, p);
      return;
    }
    p.scaling = moe::Scaling::kAfter;
    p.group = p.k;
    if (!in.scales) {
      require(static_cast<bool>(in.global), kName, ": ", in.prefix,
              "_global_scale is required with quant_type fp8, or ", scales, " in its place");
      set_global(in, p);
      return;
    }
    reject_global(in, concat("with ", scales));
    match_.tensor(scales, in.scales).types(kFloats).device(device_);
    if (in.scales.rank == 3) {
      match_.tensor(scales, in.scales).shape({num_experts(), p.n, 1});
    } else {
      match_.tensor(scales, in.scales).shape({num_experts(), p.n});
    }
    set_scales(in.scales, p);
  }

  void describe_e2m1(const QMoEArgs& a, const Inputs& in, moe::Projection& p) const {
    reject_zeros(in, a.quant_type);
    const std::string weights = in.name("_experts_weights");
    match_.tensor(weights, in.weights).type(DType::kU8).rank(3).device(device_);
    require(p.n % 2 == 0, kName, ": ", weights, " has ", p.n, " outputs, expected an even number");
    require(p.k % checked_.block == 0, kName, ": block_size is ", checked_.block, ", which does not divide ", p.k,
            ", the inputs of ", weights);
    const bool rows = a.weights_prepacked == 1;
    if (rows && in.weights.dim(1) == p.n && in.weights.dim(2) == p.k / 2) {
      match_.tensor(weights, in.weights).shape({num_experts(), p.n, p.k / 2});
      set_weights(in, p);
    } else {
      match_.tensor(weights, in.weights).shape({num_experts(), p.k, p.n / 2});
      set_weights(in, p);
      if (rows) {  // bytes of [E, N, K / 2] under the other form's shape
        require(in.weights.is_contiguous(), kName, ": ", weights, " must be contiguous with weights_prepacked 1");
        p.row_bytes = p.k / 2;
      }
    }
    p.codes = rows ? moe::Codes::kE2M1 : moe::Codes::kE2M1Columns;
    p.scaling = moe::Scaling::kPieces;
    p.group = checked_.block;
    const std::string scales = in.name("_scales");
    require(static_cast<bool>(in.scales), kName, ": ", scales, " is required with quant_type ", a.quant_type);
    match_.tensor(scales, in.scales)
        .type(checked_.quant == Quant::kMx ? DType::kF8E8M0 : DType::kF8E4M3)
        .shape({num_experts(), p.n, p.num_groups()})
        .device(device_);
    set_scales(in.scales, p);
    require(static_cast<bool>(in.global), kName, ": ", in.prefix, "_global_scale is required with quant_type ",
            a.quant_type);
    set_global(in, p);
  }

  const Checked& checked_;
  Device device_;
  Matcher match_{kName};
};

void check_act_scales(const QMoEArgs& a, const moe::Problem& problem) {
  const bool allowed = a.quant_type == "wfp4afp8";
  const Matcher match(kName);
  for (const auto& [name, view] : {std::pair{"fc1_act_scale", &a.fc1_act_scale}, {"fc2_act_scale", &a.fc2_act_scale}}) {
    if (*view) {
      require(allowed, kName, ": ", name, " must be absent with quant_type ", a.quant_type);
      match.tensor(name, *view).type(DType::kF32).rank(1);
      if (view->dim(0) != 1) {
        match.tensor(name, *view).shape({problem.num_experts});
      }
    }
  }
  struct Blocks {
    std::string_view name;
    const TensorView& view;
    int64_t columns;
  };
  for (const Blocks& blocks : {Blocks{"fc1_act_block_scale", a.fc1_act_block_scale, problem.hidden},
                               Blocks{"fc2_act_block_scale", a.fc2_act_block_scale, problem.inter}}) {
    if (blocks.view) {
      require(allowed, kName, ": ", blocks.name, " must be absent with quant_type ", a.quant_type);
      Dim rows{"rows_padded"};
      match.tensor(blocks.name, blocks.view)
          .type(DType::kF8E8M0)
          .shape({problem.num_experts, rows, blocks.columns / kMxBlock});
    }
  }
}

// I, from the weights of FC1: the checks of the shapes follow and settle whether that was right.
int64_t inter_of(const QMoEArgs& a, Quant quant, moe::Gate gate) {
  const TensorView& w = a.fc1_experts_weights;
  const bool columns = (quant == Quant::kMx || quant == Quant::kNv) &&
                       !(a.weights_prepacked == 1 && a.fc1_scales && a.fc1_scales.rank == 3 &&
                         w.dim(1) == a.fc1_scales.dim(1) && w.dim(2) * 2 == a.input.dim(a.input.rank - 1));
  const int64_t n = columns ? w.dim(2) * 2 : w.dim(1);
  const bool fused = gate == moe::Gate::kInterleaved || gate == moe::Gate::kConcatenated;
  require(!fused || n % 2 == 0, kName, ": fc1_experts_weights has ", n, " outputs, expected an even number with ",
          a.activation_type);
  return fused ? n / 2 : n;
}

Checked check(const QMoEArgs& a) {
  Checked checked;
  moe::Problem& p = checked.problem;
  checked.quant = quant_of(a);
  p.activation = activation_of(a.activation_type);
  check_bits(a, checked.quant);
  checked.block = block_of(a, checked.quant);
  check_attributes(a, checked.quant);
  p.gate = gate_of(a, checked.quant, checked.block);

  const Matcher match(kName);
  match.tensor("input", a.input).types(kFloats);
  require(a.input.rank == 2 || a.input.rank == 3, kName, ": input has ", a.input.rank, " dimensions, expected 2 or 3");
  const Device device = a.input.device;
  p.dtype = a.input.dtype;
  p.hidden = a.input.dim(a.input.rank - 1);
  p.num_tokens = a.input.rank == 2 ? a.input.dim(0) : a.input.dim(0) * a.input.dim(1);
  Dim experts{"num_experts"};
  match.tensor("router_probs", a.router_probs).type(p.dtype).shape({p.num_tokens, experts}).device(device);
  p.num_experts = experts;
  require(p.num_experts >= 1, kName, ": router_probs has no experts");
  if (a.router_weights) {
    match.tensor("router_weights", a.router_weights).type(p.dtype).shape({p.num_tokens, experts}).device(device);
  }
  check_routing(a, p.num_experts);
  p.num_ranks = a.k + a.num_shared_experts;
  require(p.num_tokens <= INT32_MAX / p.num_ranks, kName, ": input has ", p.num_tokens,
          " rows, too many with k = ", a.k);

  const int64_t fc1_bits = a.fc1_expert_weight_bits.value_or(a.expert_weight_bits);
  const int64_t fc2_bits = a.fc2_expert_weight_bits.value_or(a.expert_weight_bits);
  const bool fused = p.gate == moe::Gate::kInterleaved || p.gate == moe::Gate::kConcatenated;
  const int64_t fc3_bits = a.fc3_expert_weight_bits.value_or(fused ? fc1_bits : a.expert_weight_bits);
  require(!fused || fc3_bits == fc1_bits, kName, ": fc3_expert_weight_bits is ", fc3_bits, ", expected ", fc1_bits,
          " as of fc1 with a fused value");
  const bool has_int3 = fc1_bits == 3 || fc2_bits == 3 || (p.gate == moe::Gate::kSeparate && fc3_bits == 3);
  if (has_int3) {
    check_int3(a, p.dtype, checked.block);
  }
  p.staged = has_int3 || (checked.quant == Quant::kFp8 && checked.block > 0);

  match.tensor("fc1_experts_weights", a.fc1_experts_weights).rank(3);
  match.tensor("fc2_experts_weights", a.fc2_experts_weights).rank(3);
  p.inter = inter_of(a, checked.quant, p.gate);
  require(p.hidden >= kSmallestSize, kName, ": input has ", p.hidden, " columns, expected at least ", kSmallestSize);
  require(p.inter >= kSmallestSize, kName, ": fc1_experts_weights gives an inter_size of ", p.inter,
          ", expected at least ", kSmallestSize);
  const Projector project(checked, device);
  const TensorView absent;
  p.fc1 = project(
      a,
      {"fc1", a.fc1_experts_weights, a.fc1_scales, a.fc1_experts_bias, a.fc1_zero_points, a.fc1_global_scale, fc1_bits},
      fused ? 2 * p.inter : p.inter, p.hidden);
  p.fc2 = project(
      a,
      {"fc2", a.fc2_experts_weights, a.fc2_scales, a.fc2_experts_bias, a.fc2_zero_points, a.fc2_global_scale, fc2_bits},
      p.hidden, p.inter);
  if (p.gate == moe::Gate::kSeparate) {
    p.fc3 = project(
        a, {"fc3", a.fc3_experts_weights, a.fc3_scales, a.fc3_experts_bias, a.fc3_zero_points, absent, fc3_bits},
        p.inter, p.hidden);
  }
  check_act_scales(a, p);

  p.alpha = a.activation_alpha;
  p.beta = a.activation_beta;
  p.limit = a.swiglu_limit;
  p.limit_after = a.swiglu_limit_after_activation == 1;
  p.input = a.input;
  p.output = a.output;
  p.row_tile = a.row_tile_size;
  return checked;
}

OutputSpec spec_of(const TensorView& input) {
  return {input.dtype, std::vector<int64_t>(input.dims().begin(), input.dims().end())};
}

void route(const void* args, int64_t begin, int64_t end, int32_t* ids, float* weights, const OpContext& context) {
  const auto& a = *static_cast<const QMoEArgs*>(args);
  const int64_t count = end - begin;
  const int64_t columns = a.k + a.num_shared_experts;
  route_experts({.expert_ids = TensorView(ids, DType::kI32, {count, columns}),
                 .expert_weights = TensorView(weights, DType::kF32, {count, columns}),
                 .router_logits = a.router_probs.rows(begin, end),
                 .router_weights = a.router_weights ? a.router_weights.rows(begin, end) : TensorView(),
                 .top_k = a.k,
                 .normalize = a.normalize_routing_weights == 1,
                 .sparse_mixer = a.use_sparse_mixer == 1,
                 .num_shared = a.num_shared_experts},
                context);
}

}  // namespace

OutputSpec qmoe_shapes(const QMoEArgs& args) {
  check(args);
  return spec_of(args.input);
}

size_t qmoe_workspace_bytes(const QMoEArgs& args, int num_threads) {
  return moe::workspace_bytes(check(args).problem, num_threads);
}

void qmoe(const QMoEArgs& args, const OpContext& context) {
  const Checked checked = check(args);
  check_output(kName, "output", args.output, spec_of(args.input), args.input.device);
  moe::run(checked.problem, &args, route, context);
}

}  // namespace shoal
