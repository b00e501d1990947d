// A model: from a Batch to logits. Architectures are one file each in this folder, composed of layers, registered by
// name.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "shoal/ops/context.h"
#include "shoal/state/kv_cache.h"
#include "shoal/state/state_pool.h"
#include "shoal/tensor/tensor.h"

namespace shoal {

// One step, as everything below the scheduler sees it. Prefill chunk, decode and verification differ in q_len only.
struct Batch {
  TensorView token_ids;     // [num_tokens] i32
  TensorView positions;     // [num_tokens] i32, absolute
  TensorView cu_q_lens;     // [num_seqs + 1] i32
  TensorView past_lens;     // [num_seqs] i32
  TensorView page_table;    // [num_seqs, max_pages] i32, -1: unmapped
  TensorView slot_mapping;  // [num_tokens] i32
  TensorView logit_rows;    // [num_logit_rows] i32: tokens whose logits are wanted
  TensorView state_slots;   // [num_seqs] i32: slots of the StatePool; absent for a model without states
};

// Weights that were prepared alike.
struct WeightGroup {
  std::string format;   // "q4_k"; of several that were joined, the first
  std::string layout;   // MatmulWeight::layout
  std::string variant;  // MatmulWeight::variant
  int64_t count = 0;
  int64_t num_bytes = 0;
};

struct ModelInfo {
  std::string architecture;  // "llama": as config.json or GGUF call it
  std::string name;          // from the file, may be empty
  int64_t num_parameters = 0;
  int64_t num_layers = 0;
  int64_t hidden = 0;
  int64_t vocab_size = 0;           // width of the logits
  int64_t max_positions = 0;        // trained context
  int64_t weight_bytes = 0;         // resident after load
  int64_t position_bytes = 0;       // of rotary tables, for each position of the context
  std::vector<std::string> layers;  // "attention, window 512; experts 8 of 128", "delta net; dense"
  std::vector<WeightGroup> weights;
  Device device{};  // where weights stand and steps run
  std::vector<KvLayerShape> kv_layers;
  std::vector<StateLayerShape> state_layers;  // of convolutions and recurrences; empty: attention is all
};

// What a step reads and changes beside its batch.
struct ModelMemory {
  KvCache& kv;
  StatePool* states = nullptr;  // with one slot a sequence; null for a model without states
};

// The largest step that a workspace must serve.
struct StepLimits {
  int64_t max_tokens = 0;
  int64_t max_logit_rows = 0;
  int64_t max_kv_len = 0;  // columns of the page table times the page size
  int num_threads = 1;
  int64_t max_seqs = 1;  // at most max_tokens count
};

class Model {
 public:
  virtual ~Model() = default;
  virtual const ModelInfo& info() const = 0;

  // Scratch bytes that `forward` needs for every step within the limits.
  virtual size_t workspace_bytes(const StepLimits& limits) const = 0;

  // Appends the batch to the cache, moves the states over it and writes logits [num_logit_rows, vocab_size] f32. Rows of a batch do not influence
  // each other: a row's bits are the same in every batch.
  virtual void forward(const Batch& batch, const ModelMemory& memory, const TensorView& logits,
                       const OpContext& context) = 0;
};

struct LoadOptions {
  bool exact = false;         // f32 activations
  int64_t max_positions = 0;  // rows of the rotary tables; 0: the model's trained context
  bool plan_only = false;  // every tensor is checked and info() and workspace_bytes() tell; forward must not be called
  std::function<void(double fraction)> progress;  // called from the loading thread, 0 to 1
};

// A GGUF file, a Hugging Face folder, or "synthetic:NAME" (synthetic.h). kUnsupported names an architecture that is not registered, kModelFormat what is
// wrong.
std::unique_ptr<Model> load_model(const std::filesystem::path& path, const LoadOptions& options,
                                  const OpContext& context);

// Names that load_model knows, sorted: for documentation and messages.
std::vector<std::string> registered_architectures();

}  // namespace shoal
