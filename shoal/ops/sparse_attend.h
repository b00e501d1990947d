// Attention of one token over a list of candidates that come from several places: what sparse_paged_attention and
// dynamic_sparse_attention have in common. The source is sparse_paged_attention's.
//
// A row's bits depend on its query and on its valid candidates in their order, and on nothing else: invalid candidates
// are left out before tiles are formed.
#pragma once

#include "shoal/cpu/isa.h"
#include "shoal/ops/paged_problem.h"
#include "shoal/tensor/workspace.h"

namespace shoal::sparse {

// Rows of one head size: row r of KV head g starts at data + r * row_bytes + g * head_bytes.
struct RowSource {
  const std::byte* data = nullptr;
  paged::Store store = paged::Store::kF32;  // not kI4
  int64_t row_bytes = 0;
  int64_t head_bytes = 0;         // 0: one head for all
  int64_t channel_bytes = 0;      // from one channel to the next
  const float* scales = nullptr;  // [num_kv_heads, head_dim] of codes
};

struct Source {
  RowSource key;
  RowSource value;
};

struct Candidate {
  const Source* source = nullptr;
  int64_t row = 0;
};

// The valid candidates of one token, in order.
class CandidateList {
 public:
  // The next ones, as many as there are but at most paged::kTile; 0 when there are no more.
  virtual int64_t take(Candidate* out) = 0;

 protected:
  ~CandidateList() = default;
};

// What all units of a call have in common; a unit is a token with the query heads of one KV head.
struct Heads {
  DType type = DType::kF32;  // of the output
  int64_t head_dim = 0;
  int64_t stride = 0;  // head_dim, padded with zeros
  int64_t group = 0;
  float scale = 1.0f;
  float softcap = 0.0f;         // 0: off
  const float* sink = nullptr;  // [num_heads], or null
  int64_t v_head_dim = 0;       // of the output
  bool shared_rows = false;     // values are the first v_head_dim channels of the keys
};

// Memory of one thread.
struct Scratch {
  float* query = nullptr;       // [group, stride], filled by the caller
  float* rows = nullptr;        // [paged::kTile, stride]
  float* k_tile = nullptr;      // [paged::kTile, stride], turned
  float* weights = nullptr;     // [group, paged::kTile]
  float* acc = nullptr;         // [group, stride]
  float* row_values = nullptr;  // [kNumRowValues, group padded]
  float* zeros = nullptr;       // [stride]
  float* angles = nullptr;      // [2, stride], for the caller: a row of the rotary tables
};

Heads make_heads(DType type, int64_t head_dim, int64_t group, float scale, float softcap);
size_t scratch_bytes(const Heads& heads);
Scratch take_scratch(const Heads& heads, Workspace& workspace);

// The output rows of the heads kv_head * group and on: v_head_dim elements each, one after the other. Zero without a
// valid candidate.
SHOAL_DECLARE_FOR_EACH_ISA(void attend(const Heads& heads, int64_t kv_head, CandidateList& list, const Scratch& scratch,
                                       std::byte* output))

using Attend = void (*)(const Heads&, int64_t, CandidateList&, const Scratch&, std::byte*);
Attend pick_attend(cpu::Isa isa);

}  // namespace shoal::sparse
