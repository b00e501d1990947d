// The feed-forward part of a sparse mixture-of-experts layer.
//
//   s = router(h);  top_k experts e_j with weights w_j
//   out = scale * sum over j of w_j W_down[e_j] gate(W_gate[e_j] h, W_up[e_j] h)  (+ the shared expert's output)
//
// Scores     kSoftmax: softmax over all experts; kSigmoid: 1 / (1 + exp(-s)), the choice by score + selection bias and
//            within the best groups of experts; ties go to the lower expert (moe_router.h)
// Precision  router and shared gate always in f32; experts as the model's other matrices
// Bits       a token's result does not depend on its neighbours: the sum over j is in order of rank
#pragma once

#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "shoal/model/loader.h"
#include "shoal/ops/activation/activation.h"

namespace shoal {

enum class RouterScore : uint8_t { kSoftmax, kSigmoid };

struct ExpertsConfig {
  int64_t num_experts = 0;
  int64_t top_k = 0;
  int64_t expert_hidden = 0;
  RouterScore score = RouterScore::kSoftmax;
  bool normalize = true;   // weights of the chosen experts sum up to one
  float scale = 1.0f;      // of the routed experts' sum
  int64_t num_groups = 1;  // kSigmoid: the choice is among the experts of the best `top_groups` groups
  int64_t top_groups = 1;
  int64_t shared_hidden = 0;  // width of the shared expert that every token goes through; 0: none
  Gate gate = Gate::kSilu;
  float gate_alpha = 1.0f;  // Gate::kClamped
  float gate_limit = std::numeric_limits<float>::infinity();
};

// The routed experts of one layer as the file has them.
struct ExpertMatrices {
  std::vector<LoadedMatrix> gate, up;  // [expert_hidden, hidden] each
  std::vector<LoadedMatrix> down;      // [hidden, expert_hidden]
  Tensor gate_up_bias;                 // [num_experts, 2 expert_hidden] f32, gates first; or absent
  Tensor down_bias;                    // [num_experts, hidden] f32, or absent
};
using ReadExperts = std::function<ExpertMatrices(Loader&, int64_t layer_idx, const ExpertsConfig&, int64_t hidden)>;

// Tensor names; "{}" stands for the layer's number.
struct ExpertsNames {
  std::string router{};          // the stem: "<router>.weight", optionally "<router>.bias"
  std::string selection_bias{};  // the whole name; kSigmoid only, optional in the file
  std::string shared_gate_proj{}, shared_up{}, shared_down{};
  std::string shared_gate{};  // [1, hidden]: scales the shared expert by its sigmoid; empty: there is none
  ReadExperts read{};
};

// One matrix a stem; "[]" stands for the expert's number.
ReadExperts experts_apart(const std::string& gate, const std::string& up, const std::string& down);
// One tensor "<stem>.weight" [num_experts, n, k] a kind, with optional biases "<stem><bias_suffix>" [num_experts, n].
ReadExperts experts_stacked(const std::string& gate, const std::string& up, const std::string& down,
                            const std::string& bias_suffix);

// Whole names of two tensors: [num_experts, 2 expert_hidden, hidden], gates first, and [num_experts, hidden, expert_hidden].
ReadExperts experts_fused(const std::string& gate_up, const std::string& down);

class Experts {
 public:
  Experts(Loader& loader, const ExpertsConfig& config, const ExpertsNames& names, int64_t layer_idx, int64_t hidden);

  size_t workspace_bytes(int64_t num_tokens) const;

  // out, h [num_tokens, hidden] f32; they may not overlap.
  void forward(const TensorView& h, const TensorView& out, const OpContext& context) const;

 private:
  struct Routing {
    TensorView ids, weights;  // [num_tokens, top_k] i32, f32
  };
  // Rows of a tile of tokens, sorted by expert.
  struct Sorted {
    TensorView row_begin;  // [num_experts + 1]
    TensorView row_of;     // [num_tokens, top_k]
    TensorView source;     // [num_tokens * top_k]
    TensorView tiles{};    // on CUDA
  };

  void load_routed(Loader& loader, const ExpertsNames& names, int64_t layer_idx);
  void load_shared(Loader& loader, const ExpertsNames& names, int64_t layer_idx);
  Routing route(const TensorView& h, const OpContext& context) const;
  void route_by_sigmoid(const TensorView& logits, const Routing& routing, const OpContext& context) const;
  Sorted sort(const TensorView& ids, const OpContext& context) const;
  void run_tile(const TensorView& h, const TensorView& out, const Routing& routing, const OpContext& context) const;
  bool is_on_device() const { return device_.type == DeviceType::kCuda; }
  int64_t tile_tokens(int64_t num_tokens) const;
  void add_shared(const TensorView& h, const TensorView& out, const OpContext& context) const;
  void activate(const TensorView& gate_up, const TensorView& out, const OpContext& context) const;

  ExpertsConfig config_;
  int64_t hidden_;
  Linear router_;
  Tensor selection_bias_;  // [num_experts] f32; zeros where kSigmoid has none
  std::vector<MatmulWeight> gate_up_, down_;
  GroupedWeights device_gate_up_, device_down_;  // on CUDA, in their place
  Device device_;
  Tensor gate_up_bias_, down_bias_;
  std::vector<std::shared_ptr<const void>> owners_;
  Linear shared_gate_up_, shared_down_, shared_gate_;
  bool has_shared_gate_ = false;
};

}  // namespace shoal
