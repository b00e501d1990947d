#include "shoal/model/experts.h"

#include <algorithm>

#include "shoal/model/views.h"
#include "shoal/ops/moe_router/moe_router.h"
#include "shoal/ops/rows/rows.h"

namespace shoal {
namespace {

// Tokens whose experts run together: enough that each expert has rows to share its weights, few enough that the
// gathered rows stay small.
constexpr int64_t kTileTokens = 512;
constexpr float kNormEpsilon = 1e-20f;  // of the sum of sigmoid scores

std::string expert_name(const std::string& pattern, int64_t layer_idx, int64_t expert_idx) {
  std::string name = layer_name(pattern, layer_idx);
  const size_t at = name.find("[]");
  SHOAL_ASSERT(at != std::string::npos);
  return name.replace(at, 2, std::to_string(expert_idx));
}

size_t take_bytes(int64_t rows, int64_t width) {
  return Workspace::bytes_for<float>(static_cast<size_t>(rows * width));
}

}  // namespace

ReadExperts experts_apart(const std::string& gate, const std::string& up, const std::string& down) {
  return [=](Loader& loader, int64_t layer_idx, const ExpertsConfig& config, int64_t hidden) {
    ExpertMatrices matrices;
    for (int64_t e = 0; e < config.num_experts; ++e) {
      const auto read = [&](const std::string& pattern, int64_t n, int64_t k) {
        return loader.matrix(expert_name(pattern, layer_idx, e), n, k);
      };
      matrices.gate.push_back(read(gate, config.expert_hidden, hidden));
      matrices.up.push_back(read(up, config.expert_hidden, hidden));
      matrices.down.push_back(read(down, hidden, config.expert_hidden));
    }
    return matrices;
  };
}

ReadExperts experts_stacked(const std::string& gate, const std::string& up, const std::string& down,
                            const std::string& bias_suffix) {
  return [=](Loader& loader, int64_t layer_idx, const ExpertsConfig& config, int64_t hidden) {
    const int64_t count = config.num_experts;
    const int64_t width = config.expert_hidden;
    const auto read = [&](const std::string& stem, int64_t n, int64_t k) {
      return loader.stacked(layer_name(stem, layer_idx) + ".weight", count, n, k);
    };
    const auto bias_name = [&](const std::string& stem) { return layer_name(stem, layer_idx) + bias_suffix; };
    ExpertMatrices matrices;
    matrices.gate = read(gate, width, hidden);
    matrices.up = read(up, width, hidden);
    matrices.down = read(down, hidden, width);
    if (loader.has(bias_name(gate))) {
      const Tensor gates = loader.vector(bias_name(gate), {count, width});
      const Tensor ups = loader.vector(bias_name(up), {count, width});
      matrices.gate_up_bias = Tensor(DType::kF32, {count, 2 * width});
      float* joined = matrices.gate_up_bias.span<float>().data();
      for (int64_t e = 0; e < count; ++e) {
        std::copy_n(gates.span<float>().data() + e * width, width, joined + 2 * e * width);
        std::copy_n(ups.span<float>().data() + e * width, width, joined + (2 * e + 1) * width);
      }
      matrices.down_bias = loader.vector(bias_name(down), {count, hidden});
    }
    return matrices;
  };
}

ReadExperts experts_fused(const std::string& gate_up, const std::string& down) {
  return [=](Loader& loader, int64_t layer_idx, const ExpertsConfig& config, int64_t hidden) {
    const int64_t width = config.expert_hidden;
    ExpertMatrices matrices;
    for (LoadedMatrix& both : loader.stacked(layer_name(gate_up, layer_idx), config.num_experts, 2 * width, hidden)) {
      LoadedMatrix gate = both;
      gate.matrix.n = width;
      LoadedMatrix up = gate;
      up.matrix.codes = both.matrix.row(width);
      matrices.gate.push_back(gate);
      matrices.up.push_back(up);
    }
    matrices.down = loader.stacked(layer_name(down, layer_idx), config.num_experts, hidden, width);
    return matrices;
  };
}

Experts::Experts(Loader& loader, const ExpertsConfig& config, const ExpertsNames& names, int64_t layer_idx,
                 int64_t hidden)
    : config_(config), hidden_(hidden), device_(loader.device()) {
  router_ = loader.exact_linear({{layer_name(names.router, layer_idx), config.num_experts}}, hidden);
  if (config.score == RouterScore::kSigmoid) {
    const std::string bias = layer_name(names.selection_bias, layer_idx);
    selection_bias_ = Tensor(DType::kF32, {config.num_experts});
    std::ranges::fill(selection_bias_.span<float>(), 0.0f);
    if (loader.has(bias)) {
      selection_bias_ = loader.vector(bias, {config.num_experts});
    }
    selection_bias_ = loader.place(std::move(selection_bias_));
  }
  load_routed(loader, names, layer_idx);
  if (config.shared_hidden > 0) {
    load_shared(loader, names, layer_idx);
  }
}

void Experts::load_routed(Loader& loader, const ExpertsNames& names, int64_t layer_idx) {
  ExpertMatrices matrices = names.read(loader, layer_idx, config_, hidden_);
  const std::vector<LoadedMatrix>* gate_up[] = {&matrices.gate, &matrices.up};
  const std::vector<LoadedMatrix>* down[] = {&matrices.down};
  gate_up_ = loader.prepare_each(gate_up, owners_);
  down_ = loader.prepare_each(down, owners_);
  if (is_on_device()) {
    device_gate_up_ = loader.group(std::move(gate_up_));
    device_down_ = loader.group(std::move(down_));
  }
  gate_up_bias_ = loader.place(std::move(matrices.gate_up_bias));
  down_bias_ = loader.place(std::move(matrices.down_bias));
}

void Experts::load_shared(Loader& loader, const ExpertsNames& names, int64_t layer_idx) {
  const auto name = [&](const std::string& pattern) { return layer_name(pattern, layer_idx); };
  const int64_t width = config_.shared_hidden;
  shared_gate_up_ = loader.linear({{name(names.shared_gate_proj), width}, {name(names.shared_up), width}}, hidden_);
  shared_down_ = loader.linear({{name(names.shared_down), hidden_}}, width);
  has_shared_gate_ = !names.shared_gate.empty();
  if (has_shared_gate_) {
    shared_gate_ = loader.exact_linear({{name(names.shared_gate), 1}}, hidden_);
  }
}

size_t Experts::workspace_bytes(int64_t num_tokens) const {
  const ExpertsConfig& c = config_;
  const int64_t tile = tile_tokens(num_tokens);
  const int64_t rows = tile * c.top_k;
  const size_t routing = 2 * take_bytes(num_tokens, c.top_k);
  size_t routers = take_bytes(num_tokens, c.num_experts) + matmul_workspace_bytes(router_.weight, num_tokens);
  if (c.score == RouterScore::kSigmoid) {
    routers += 3 * take_bytes(num_tokens, c.num_experts);
  }
  size_t products = 0;
  if (is_on_device()) {
    // Fewer rows may be cut into smaller tiles: never more than there are rows.
    products = take_bytes(rows, 4) + std::max(tiled_matmul_workspace_bytes(tile, hidden_),
                                              tiled_matmul_workspace_bytes(rows, c.expert_hidden));
  } else {
    products = std::max(matmul_workspace_bytes(gate_up_.front(), rows), matmul_workspace_bytes(down_.front(), rows));
  }
  const size_t routed = take_bytes(1, c.num_experts + 1) + 2 * take_bytes(tile, c.top_k) + take_bytes(rows, hidden_) +
                        take_bytes(rows, 2 * c.expert_hidden) + take_bytes(rows, c.expert_hidden) + products;
  size_t shared = 0;
  if (c.shared_hidden > 0) {
    shared = take_bytes(tile, 2 * c.shared_hidden) + take_bytes(tile, c.shared_hidden) + take_bytes(tile, hidden_) +
             take_bytes(tile, 1) +
             std::max(matmul_workspace_bytes(shared_gate_up_.weight, tile),
                      matmul_workspace_bytes(shared_down_.weight, tile));
    if (has_shared_gate_) {
      shared += matmul_workspace_bytes(shared_gate_.weight, tile);
    }
  }
  return routing + std::max({routers, routed, shared});
}

void Experts::forward(const TensorView& h, const TensorView& out, const OpContext& context) const {
  const Workspace::Scope scope(*context.workspace);
  const int64_t num_tokens = h.dim(0);
  const Routing routing = route(h, context);
  const int64_t each = tile_tokens(num_tokens);
  for (int64_t begin = 0; begin < num_tokens; begin += each) {
    const int64_t count = std::min(each, num_tokens - begin);
    const auto tile = [&](const TensorView& view) { return view.rows(begin, begin + count); };
    run_tile(tile(h), tile(out), {tile(routing.ids), tile(routing.weights)}, context);
    if (config_.shared_hidden > 0) {
      add_shared(tile(h), tile(out), context);
    }
  }
}

Experts::Routing Experts::route(const TensorView& h, const OpContext& context) const {
  Workspace& workspace = *context.workspace;
  const int64_t num_tokens = h.dim(0);
  const Routing routing{take({num_tokens, config_.top_k}, workspace, DType::kI32),
                        take({num_tokens, config_.top_k}, workspace)};
  const Workspace::Scope scope(workspace);
  const TensorView logits = take({num_tokens, config_.num_experts}, workspace);
  router_(h, logits, context);
  if (config_.score == RouterScore::kSigmoid) {
    route_by_sigmoid(logits, routing, context);
    return routing;
  }
  route_experts({.expert_ids = routing.ids,
                 .expert_weights = routing.weights,
                 .router_logits = logits,
                 .top_k = config_.top_k,
                 .normalize = config_.normalize,
                 .scale = config_.scale},
                context);
  return routing;
}

void Experts::route_by_sigmoid(const TensorView& logits, const Routing& routing, const OpContext& context) const {
  Workspace& workspace = *context.workspace;
  const int64_t num_tokens = logits.dim(0);
  const auto matrix = [&] { return take({num_tokens, config_.num_experts}, workspace); };
  MoEGroupRouterArgs scores{.selection_scores = matrix(),
                            .router_weights = matrix(),
                            .logits = logits,
                            .expert_bias = selection_bias_,
                            .top_k = config_.top_k,
                            .full_scores = true};
  moe_group_router(scores, context);
  TensorView choice = scores.selection_scores;
  if (config_.num_groups > 1) {
    choice = matrix();
    moe_group_router({.router_probs = choice,
                      .logits = logits,
                      .expert_bias = selection_bias_,
                      .top_k = config_.top_k,
                      .n_group = config_.num_groups,
                      .topk_group = config_.top_groups},
                     context);
  }
  route_packed_experts({.expert_ids = routing.ids,
                        .expert_weights = routing.weights,
                        .router_probs = choice,
                        .router_weights = scores.router_weights,
                        .top_k = config_.top_k,
                        .normalize = config_.normalize,
                        .epsilon = kNormEpsilon,
                        .scale = config_.scale},
                       context);
}

int64_t Experts::tile_tokens(int64_t num_tokens) const {
  return is_on_device() ? num_tokens : std::min(num_tokens, kTileTokens);  // a device wants all the rows it can get
}

Experts::Sorted Experts::sort(const TensorView& ids, const OpContext& context) const {
  Workspace& workspace = *context.workspace;
  const int64_t num_rows = ids.num_elements();
  const auto ints = [&](std::initializer_list<int64_t> shape) { return take(shape, workspace, DType::kI32); };
  Sorted sorted{ints({config_.num_experts + 1}), ints({ids.dim(0), ids.dim(1)}), ints({num_rows})};
  TileCount tiles;
  if (is_on_device()) {
    tiles = matmul_tiles(num_rows, config_.num_experts);
    sorted.tiles = ints({tiles.num_tiles, 4});
  }
  sort_rows({.row_of = sorted.row_of,
             .source = sorted.source,
             .row_begin = sorted.row_begin,
             .tiles = sorted.tiles,
             .expert_ids = ids,
             .num_experts = config_.num_experts,
             .tile_rows = tiles.tile_rows},
            context);
  return sorted;
}

void Experts::run_tile(const TensorView& h, const TensorView& out, const Routing& routing,
                       const OpContext& context) const {
  Workspace& workspace = *context.workspace;
  const Workspace::Scope scope(workspace);
  const int64_t num_rows = h.dim(0) * config_.top_k;
  const Sorted sorted = sort(routing.ids, context);
  const TensorView rows = take({num_rows, hidden_}, workspace);
  const TensorView gate_up = take({num_rows, 2 * config_.expert_hidden}, workspace);
  const TensorView activated = take({num_rows, config_.expert_hidden}, workspace);
  if (is_on_device()) {
    const int64_t tile_rows = matmul_tiles(num_rows, config_.num_experts).tile_rows;
    tiled_matmul({.out = gate_up,
                  .a = h,
                  .source = sorted.source,
                  .tiles = sorted.tiles,
                  .tile_rows = tile_rows,
                  .bias = gate_up_bias_},
                 device_gate_up_, context);
    activate(gate_up, activated, context);
    tiled_matmul({.out = rows, .a = activated, .tiles = sorted.tiles, .tile_rows = tile_rows, .bias = down_bias_},
                 device_down_, context);
  } else {
    const std::span<const int32_t> row_begin(sorted.row_begin.as<const int32_t>(),
                                             static_cast<size_t>(config_.num_experts + 1));
    gather_rows({.out = rows, .x = h, .rows = sorted.source}, context);
    grouped_matmul({.out = gate_up, .a = rows, .row_begin = row_begin, .bias = gate_up_bias_}, gate_up_, context);
    activate(gate_up, activated, context);
    grouped_matmul({.out = rows, .a = activated, .row_begin = row_begin, .bias = down_bias_}, down_, context);
  }
  combine_rows({.out = out, .rows = rows, .row_of = sorted.row_of, .weights = routing.weights}, context);
}

void Experts::activate(const TensorView& gate_up, const TensorView& out, const OpContext& context) const {
  const int64_t width = out.dim(1);
  gated_activation({.out = out,
                    .gate = columns(gate_up, 0, width),
                    .value = columns(gate_up, width, width),
                    .kind = config_.gate,
                    .alpha = config_.gate_alpha,
                    .limit = config_.gate_limit},
                   context);
}

void Experts::add_shared(const TensorView& h, const TensorView& out, const OpContext& context) const {
  Workspace& workspace = *context.workspace;
  const Workspace::Scope scope(workspace);
  const int64_t num_tokens = h.dim(0);
  const TensorView gate_up = take({num_tokens, 2 * config_.shared_hidden}, workspace);
  const TensorView activated = take({num_tokens, config_.shared_hidden}, workspace);
  const TensorView result = take({num_tokens, hidden_}, workspace);
  const TensorView gates = take({num_tokens, 1}, workspace);
  shared_gate_up_(h, gate_up, context);
  activate(gate_up, activated, context);
  shared_down_(activated, result, context);
  if (has_shared_gate_) {
    shared_gate_(h, gates, context);
  }
  add_gated_rows({.out = out, .rows = result, .gates = has_shared_gate_ ? gates : TensorView()}, context);
}

}  // namespace shoal
