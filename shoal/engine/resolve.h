// From the options a user gave to the numbers the engine works with.
#pragma once

#include <cstdint>
#include <optional>

#include "shoal/engine/engine.h"
#include "shoal/model/model.h"
#include "shoal/state/kv_cache.h"

namespace shoal {

constexpr int64_t kDefaultMaxContext = 8192;

struct ResolvedOptions {
  KvType kv_type = KvType::kF16;
  int64_t max_context = 0;
  int64_t num_pages = 0;
  int64_t num_kept_states = 0;  // slots of the prefix cache, for a model with states
};

// Where a model runs: what `device` says, checked. auto: the first CUDA device, where there is one that the other options
// allow, else the CPU. kUnsupported: no such device; kInvalidArgument: no such name.
Device resolve_device(const EngineOptions& options);

// What can be said before the model is read. Throws kInvalidArgument, or kUnsupported, naming the option.
void check_options(const EngineOptions& options);

// `available_bytes`: free memory, nothing where the system does not tell. Throws as check_options does, and
// kOutOfMemory when free memory does not hold one page.
ResolvedOptions resolve_options(const EngineOptions& options, const ModelInfo& model,
                                std::optional<int64_t> available_bytes, Device device = {});

// Free memory of a device, or MemAvailable of /proc/meminfo.
std::optional<int64_t> available_memory_bytes(Device device = {});

// "f32", "f16", "bf16", "int8": as kv_dtype spells them.
std::string_view to_string(KvType type);

}  // namespace shoal
