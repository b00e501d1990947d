// The one place where the engine reads a model from disk. Apart from engine.cpp, so that a program with a model of its
// own does not link every architecture.
#include "shoal/cuda/device.h"
#include "shoal/engine/engine_impl.h"

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

}  // namespace shoal
