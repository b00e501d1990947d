// What a model needs before it is loaded: told from the shapes of its tensors, nothing is packed.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "shoal/engine/engine.h"
#include "shoal/model/model.h"

namespace shoal {

// Bytes that one sequence of `context` tokens makes resident.
struct MemoryNeed {
  int64_t context = 0;
  int64_t weight_bytes = 0;  // with the rotary tables
  int64_t kv_bytes = 0;
  int64_t state_bytes = 0;      // of the sequence, and of its prompt's end in the prefix cache
  int64_t workspace_bytes = 0;  // scratch memory of the largest step
  int64_t total() const { return weight_bytes + kv_bytes + state_bytes + workspace_bytes; }
};

struct ModelPlan {
  ModelInfo model;
  std::string kv_dtype;                                         // resolved
  std::vector<std::pair<std::string, int64_t>> kv_token_bytes;  // of all layers for each token, by kv_dtype
  int64_t state_slot_bytes = 0;                                 // of all layers, for each sequence
  std::vector<MemoryNeed> needs;                                // one for each context
};

// On the CPU. Throws what loading the model would throw for a file that does not fit, and kInvalidArgument for options or
// contexts out of range; a context beyond the model's own is left out.
ModelPlan plan_model(const EngineOptions& options, std::span<const int64_t> contexts);

}  // namespace shoal
