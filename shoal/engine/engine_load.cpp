// The one place where the engine reads a model from disk. Apart from engine.cpp, so that a program with a model of its
// own does not link every architecture.
#include <algorithm>

#include "shoal/base/checked.h"
#include "shoal/cuda/device.h"
#include "shoal/engine/engine_impl.h"
#include "shoal/engine/plan.h"

namespace shoal {

Engine::Engine(const EngineOptions& options) {
  check_options(options);
  auto threads = std::make_unique<cpu::ThreadPool>(options.threads);
  Workspace workspace;
  OpContext context{threads.get(), &workspace, cpu::default_isa(), {}};
  context.device = resolve_device(options);
  if (context.device.type == DeviceType::kCuda) {
    cuda::use_device(context.device.index);
  }
  LoadOptions load;
  load.exact = options.exact;
  load.max_positions = options.max_context > 0 ? options.max_context : kDefaultMaxContext;
  load.progress = options.load_progress;
  std::unique_ptr<Model> model;
  try {
    model = load_model(options.model, load, context);
  } catch (const Error& error) {
    // auto means the fastest that can run it: where the device has no path for the model, that is the CPU.
    if (options.device != "auto" || context.device.type == DeviceType::kCpu ||
        error.code() != ErrorCode::kUnsupported) {
      throw;
    }
    context.device = {};
    model = load_model(options.model, load, context);
  }
  impl_ = std::make_unique<Impl>(options, std::move(model), std::move(threads));
}

ModelPlan plan_model(const EngineOptions& options, std::span<const int64_t> contexts) {
  EngineOptions on_cpu = options;
  on_cpu.device = "cpu";
  check_options(on_cpu);
  require(!contexts.empty() && std::ranges::min(contexts) >= 1, "a plan needs contexts of at least 1 token");
  cpu::ThreadPool threads(options.threads);
  Workspace workspace;
  const OpContext context{&threads, &workspace, cpu::default_isa(), {}};
  LoadOptions load;
  load.exact = options.exact;
  load.max_positions = 1;  // tables are counted by position
  load.plan_only = true;
  const std::unique_ptr<Model> model = load_model(options.model, load, context);

  ModelPlan plan;
  plan.model = model->info();
  plan.state_slot_bytes = StatePool::bytes_per_slot(plan.model.state_layers, 0);
  for (const KvType type : {KvType::kF32, KvType::kF16, KvType::kBF16, KvType::kI8}) {
    plan.kv_token_bytes.emplace_back(to_string(type), KvCache::bytes_per_page(plan.model.kv_layers, type, 1));
  }
  const int64_t trained = plan.model.max_positions > 0 ? plan.model.max_positions : INT32_MAX;
  for (const int64_t length : contexts) {
    if (length > trained) {
      continue;
    }
    on_cpu.max_context = length;
    const ResolvedOptions resolved = resolve_options(on_cpu, plan.model, std::nullopt);
    const int64_t page_bytes = KvCache::bytes_per_page(plan.model.kv_layers, resolved.kv_type, options.page_size);
    plan.kv_dtype = to_string(resolved.kv_type);
    const int64_t max_tokens = std::min(options.max_batch_tokens, length);
    const auto workspace_bytes =
        static_cast<int64_t>(model->workspace_bytes({.max_tokens = max_tokens,
                                                     .max_logit_rows = 1,
                                                     .max_kv_len = round_up(length, options.page_size),
                                                     .num_threads = threads.num_threads(),
                                                     .max_seqs = 1}));
    plan.needs.push_back({.context = length,
                          .weight_bytes = plan.model.weight_bytes + length * plan.model.position_bytes,
                          .kv_bytes = ceil_div(length, options.page_size) * page_bytes,
                          .state_bytes = plan.state_slot_bytes * (options.prefix_cache ? 2 : 1),
                          .workspace_bytes = workspace_bytes});
  }
  return plan;
}

}  // namespace shoal
