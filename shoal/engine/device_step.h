// A step on a CUDA device: the batch goes there, the logits come back; nothing in between waits.
//
// Steps in which every sequence has one token (decoding) are recorded as a graph at their second time and launched as
// one from then on: one graph for a number of sequences and a class of context lengths (the columns of the page table,
// rounded up to a power of two, from which the kernels' grids follow).
#pragma once

#include <cstdint>
#include <unordered_map>
#include <utility>

#include "shoal/cuda/device.h"
#include "shoal/model/model.h"

namespace shoal {

class DeviceStep {
 public:
  struct Limits {
    int64_t max_tokens = 0;
    int64_t max_seqs = 0;
    int64_t max_pages = 0;  // of one sequence
    int64_t max_logit_rows = 0;
    int64_t vocab_size = 0;
  };
  DeviceStep(int device_idx, const Limits& limits);

  Stream stream() const { return stream_.get(); }

  // `batch` and `logits` [num_logit_rows, vocab_size] are host memory, the latter best pinned; it is written when this
  // returns.
  void forward(Model& model, const Batch& batch, const ModelMemory& memory, const TensorView& logits,
               const OpContext& context);

 private:
  struct Recorded {
    bool has_run = false;  // once, so that everything is loaded before it is recorded
    cuda::Graph graph;
  };

  Batch upload(const Batch& batch, bool is_decode);

  Limits limits_;
  Device device_;
  cuda::OwnedStream stream_;
  AlignedBuffer arrays_;   // i32, those of a batch at fixed places
  AlignedBuffer staging_;  // the same in pinned host memory
  AlignedBuffer logits_;
  std::unordered_map<int64_t, Recorded> decodes_;
};

}  // namespace shoal
