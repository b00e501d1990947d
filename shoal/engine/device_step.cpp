#include "shoal/engine/device_step.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <span>

#include "shoal/base/checked.h"

namespace shoal {
namespace {

constexpr int64_t kAlignInts = 16;  // places of arrays: multiples of 64 bytes

// Room of every array of a batch, in the order in which upload() writes them.
int64_t num_ints(const DeviceStep::Limits& limits) {
  const auto room = [](int64_t count) { return round_up(count, kAlignInts); };
  return 3 * room(limits.max_tokens) + room(limits.max_seqs + 1) + room(limits.max_seqs) +
         room(limits.max_seqs * limits.max_pages) + room(limits.max_logit_rows);
}

bool is_decode_step(const Batch& batch) {
  const int64_t num_seqs = batch.past_lens.dim(0);
  return batch.token_ids.dim(0) == num_seqs && batch.logit_rows.dim(0) == num_seqs;
}

}  // namespace

DeviceStep::DeviceStep(int device_idx, const Limits& limits) : limits_(limits), device_{DeviceType::kCuda, device_idx} {
  const Allocator device = cuda::allocator(device_idx);
  const auto array_bytes = static_cast<size_t>(num_ints(limits)) * sizeof(int32_t);
  const auto logit_bytes = static_cast<size_t>(limits.max_logit_rows * limits.vocab_size) * sizeof(float);
  arrays_ = AlignedBuffer(array_bytes, device);
  staging_ = AlignedBuffer(array_bytes, cuda::pinned_allocator());
  logits_ = AlignedBuffer(logit_bytes, device);
}

// The arrays of decoding steps keep their places, as a recorded graph needs it; one copy brings them all.
Batch DeviceStep::upload(const Batch& batch, bool is_decode) {
  auto* host = reinterpret_cast<int32_t*>(staging_.data());
  auto* device = reinterpret_cast<int32_t*>(arrays_.data());
  int64_t at = 0;
  const auto put = [&](const TensorView& view, int64_t room) {
    std::memcpy(host + at, view.data, view.num_bytes());
    const TensorView placed(device + at, DType::kI32, view.dims(), device_);
    at += round_up(room, kAlignInts);
    return placed;
  };
  // A decoding step has a token a sequence: its arrays stand closer together, so that less is copied.
  const int64_t token_room = is_decode ? limits_.max_seqs : limits_.max_tokens;
  Batch placed;
  placed.token_ids = put(batch.token_ids, token_room);
  placed.positions = put(batch.positions, token_room);
  placed.slot_mapping = put(batch.slot_mapping, token_room);
  placed.cu_q_lens = put(batch.cu_q_lens, limits_.max_seqs + 1);
  placed.past_lens = put(batch.past_lens, limits_.max_seqs);
  placed.logit_rows = put(batch.logit_rows, is_decode ? limits_.max_seqs : limits_.max_logit_rows);

  const int64_t num_seqs = batch.page_table.dim(0);
  const int64_t width = batch.page_table.dim(1);
  const int64_t columns =
      is_decode
          ? std::min<int64_t>(static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(std::max<int64_t>(width, 1)))),
                              limits_.max_pages)
          : width;
  int32_t* table = host + at;
  for (int64_t i = 0; i < num_seqs; ++i) {
    std::memcpy(table + i * columns, batch.page_table.as<const int32_t>() + i * width,
                static_cast<size_t>(width) * sizeof(int32_t));
    std::fill_n(table + i * columns + width, columns - width, -1);
  }
  placed.page_table = TensorView(device + at, DType::kI32, {num_seqs, columns}, device_);
  at += num_seqs * columns;
  cuda::copy(device, host, static_cast<size_t>(at) * sizeof(int32_t), stream_.get());
  return placed;
}

void DeviceStep::forward(Model& model, const Batch& batch, const ModelMemory& memory, const TensorView& logits,
                         const OpContext& context) {
  cuda::use_device(device_.index);
  const bool is_decode = is_decode_step(batch);
  const Batch placed = upload(batch, is_decode);
  const TensorView device_logits(logits_.data(), DType::kF32, logits.dims(), device_);
  const auto run = [&] { model.forward(placed, memory, device_logits, context); };
  if (is_decode) {
    Recorded& recorded = decodes_[placed.page_table.dim(0) * (limits_.max_pages + 1) + placed.page_table.dim(1)];
    if (recorded.has_run && !recorded.graph) {
      cuda::Graph::begin(stream_.get());
      try {
        run();
      } catch (...) {
        cuda::Graph::abandon(stream_.get());
        throw;
      }
      recorded.graph = cuda::Graph::end(stream_.get());
    }
    if (recorded.graph) {
      recorded.graph.launch(stream_.get());
    } else {
      run();
      recorded.has_run = true;
    }
  } else {
    run();
  }
  if (logits.num_bytes() > 0) {
    cuda::copy(logits.data, logits_.data(), logits.num_bytes(), stream_.get());
  }
  cuda::synchronize(stream_.get());
}

}  // namespace shoal
