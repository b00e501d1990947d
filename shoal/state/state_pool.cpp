#include "shoal/state/state_pool.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "shoal/base/checked.h"
#include "shoal/base/error.h"
#include "shoal/cpu/thread_pool.h"

namespace shoal {
namespace {

// Bytes of one slot in one layer.
struct SlotBytes {
  int64_t conv = 0;
  int64_t recurrent = 0;
  int64_t conv_capture = 0;
  int64_t recurrent_capture = 0;
};

[[noreturn]] void too_large() { fail(ErrorCode::kOutOfMemory, "the states do not fit the address space"); }

// Overflow of a product of positive factors means that no machine has the memory.
int64_t product(std::initializer_list<int64_t> factors) {
  int64_t result = 1;
  for (const int64_t factor : factors) {
    const auto next = checked_mul(result, factor);
    if (!next) {
      too_large();
    }
    result = *next;
  }
  return result;
}

int64_t sum(std::initializer_list<int64_t> terms) {
  int64_t result = 0;
  for (const int64_t term : terms) {
    const auto next = checked_add(result, term);
    if (!next) {
      too_large();
    }
    result = *next;
  }
  return result;
}

void check_shape(const StateLayerShape& s, size_t layer_idx) {
  require(s.conv_channels >= 0 && s.conv_reach >= 0 && (s.conv_channels > 0) == (s.conv_reach > 0), "state layer ",
          layer_idx, ": conv_channels and conv_reach must both be positive or both 0, not ", s.conv_channels, " and ",
          s.conv_reach);
  require(s.conv_dtype == DType::kF32 || s.conv_dtype == DType::kF16 || s.conv_dtype == DType::kBF16, "state layer ",
          layer_idx, ": conv_dtype is ", to_string(s.conv_dtype), ", expected float32, float16 or bfloat16");
  if (s.num_heads == 0) {
    return;
  }
  require(s.num_heads > 0 && s.num_key_heads > 0 && s.num_heads % s.num_key_heads == 0, "state layer ", layer_idx,
          ": num_heads must be a multiple of num_key_heads, not ", s.num_heads, " and ", s.num_key_heads);
  require(s.value_size > 0 && s.key_size > 0, "state layer ", layer_idx,
          ": value_size and key_size must be positive, not ", s.value_size, " and ", s.key_size);
}

int64_t decay_width(const StateLayerShape& s) {
  return s.decay_per_key ? product({s.num_heads, s.key_size}) : s.num_heads;
}

// Floats that one captured token of a recurrence takes.
int64_t transition_width(const StateLayerShape& s) {
  return s.num_heads == 0
             ? 0
             : sum({decay_width(s), product({s.num_key_heads, s.key_size}), product({s.num_heads, s.value_size})});
}

SlotBytes slot_bytes(const StateLayerShape& s, int64_t capture_capacity) {
  const auto conv_element = static_cast<int64_t>(size_of(s.conv_dtype));
  SlotBytes bytes;
  bytes.conv = product({s.conv_channels, s.conv_reach, conv_element});
  bytes.conv_capture = product({s.conv_channels, capture_capacity, conv_element});
  if (s.num_heads > 0) {
    bytes.recurrent = product({s.num_heads, s.value_size, s.key_size, int64_t{sizeof(float)}});
    bytes.recurrent_capture = product({transition_width(s), capture_capacity, int64_t{sizeof(float)}});
  }
  return bytes;
}

void check_capacity(int64_t capture_capacity) {
  require(capture_capacity >= 0 && capture_capacity <= StatePool::kMaxCapture, "capture_capacity must be 0 to ",
          StatePool::kMaxCapture, ", not ", capture_capacity);
}

// The last `reach` of state and captured rows, one after the other; in ascending order the state is read before it is
// overwritten.
template <class Bits>
void shift_in(Bits* state, int64_t channels, int64_t reach, const Bits* rows, int64_t num_rows) {
  for (int64_t c = 0; c < channels; ++c) {
    for (int64_t pos = 0; pos < reach; ++pos) {
      const int64_t from = num_rows + pos;
      state[c * reach + pos] = from < reach ? state[c * reach + from] : rows[(from - reach) * channels + c];
    }
  }
}

}  // namespace

StatePool::StatePool(const std::vector<StateLayerShape>& layers, int64_t num_slots, int64_t capture_capacity)
    : capture_capacity_(capture_capacity) {
  require(num_slots >= 1 && num_slots <= std::numeric_limits<StateSlot>::max(), "num_slots must be 1 to ",
          std::numeric_limits<StateSlot>::max(), ", not ", num_slots);
  product({num_slots, bytes_per_slot(layers, capture_capacity)});  // known to fit before anything is allocated
  int64_t scratch_bytes = 0;
  for (const StateLayerShape& shape : layers) {
    const SlotBytes bytes = slot_bytes(shape, capture_capacity);
    const auto memory = [&](int64_t of_slot) { return AlignedBuffer(static_cast<size_t>(num_slots * of_slot)); };
    layers_.push_back({shape, memory(bytes.conv), memory(bytes.recurrent), memory(bytes.conv_capture),
                       memory(bytes.recurrent_capture)});
    scratch_bytes = std::max(scratch_bytes, num_slots * bytes.conv);
  }
  conv_scratch_ = AlignedBuffer(static_cast<size_t>(capture_capacity > 0 ? scratch_bytes : 0));
  in_use_.assign(static_cast<size_t>(num_slots), false);
  for (int64_t slot = num_slots; slot-- > 0;) {
    free_.push_back(static_cast<StateSlot>(slot));
  }
}

int64_t StatePool::bytes_per_slot(const std::vector<StateLayerShape>& layers, int64_t capture_capacity) {
  check_capacity(capture_capacity);
  int64_t total = 0;
  for (size_t layer_idx = 0; layer_idx < layers.size(); ++layer_idx) {
    check_shape(layers[layer_idx], layer_idx);
    const SlotBytes bytes = slot_bytes(layers[layer_idx], capture_capacity);
    total = sum({total, bytes.conv, bytes.recurrent, bytes.conv_capture, bytes.recurrent_capture});
  }
  return total;
}

std::optional<StateSlot> StatePool::acquire() {
  if (free_.empty()) {
    return std::nullopt;
  }
  const StateSlot slot = free_.back();
  free_.pop_back();
  in_use_[static_cast<size_t>(slot)] = true;
  for (const Layer& layer : layers_) {
    const SlotBytes bytes = slot_bytes(layer.shape, 0);
    std::memset(layer.conv.data() + slot * bytes.conv, 0, static_cast<size_t>(bytes.conv));
    std::memset(layer.recurrent.data() + slot * bytes.recurrent, 0, static_cast<size_t>(bytes.recurrent));
  }
  return slot;
}

void StatePool::release(StateSlot slot) {
  check_in_use(slot);
  in_use_[static_cast<size_t>(slot)] = false;
  free_.push_back(slot);
}

void StatePool::copy(StateSlot from, StateSlot to) {
  check_in_use(from);
  check_in_use(to);
  if (from == to) {
    return;
  }
  for (const Layer& layer : layers_) {
    const SlotBytes bytes = slot_bytes(layer.shape, 0);
    std::memcpy(layer.conv.data() + to * bytes.conv, layer.conv.data() + from * bytes.conv,
                static_cast<size_t>(bytes.conv));
    std::memcpy(layer.recurrent.data() + to * bytes.recurrent, layer.recurrent.data() + from * bytes.recurrent,
                static_cast<size_t>(bytes.recurrent));
  }
}

const StatePool::Layer& StatePool::layer(size_t layer_idx) const {
  SHOAL_ASSERT(layer_idx < layers_.size());
  return layers_[layer_idx];
}

void StatePool::check_range(StateSlot slot, int64_t count) const {
  SHOAL_ASSERT(slot >= 0 && count >= 0 && slot + count <= num_slots());
}

void StatePool::check_in_use(StateSlot slot) const {
  check_range(slot, 1);
  SHOAL_ASSERT(in_use_[static_cast<size_t>(slot)]);
}

TensorView StatePool::conv_state(size_t layer_idx, StateSlot slot, int64_t count) const {
  const Layer& own = layer(layer_idx);
  const StateLayerShape& shape = own.shape;
  check_range(slot, count);
  SHOAL_ASSERT(shape.conv_channels > 0);
  return TensorView(own.conv.data() + slot * slot_bytes(shape, 0).conv, shape.conv_dtype,
                    {count, shape.conv_channels, shape.conv_reach});
}

TensorView StatePool::recurrent_state(size_t layer_idx, StateSlot slot, int64_t count) const {
  const Layer& own = layer(layer_idx);
  const StateLayerShape& shape = own.shape;
  check_range(slot, count);
  SHOAL_ASSERT(shape.num_heads > 0);
  return TensorView(own.recurrent.data() + slot * slot_bytes(shape, 0).recurrent, DType::kF32,
                    {count, shape.num_heads, shape.value_size, shape.key_size});
}

TensorView StatePool::conv_capture(size_t layer_idx, StateSlot slot, int64_t count) const {
  const Layer& own = layer(layer_idx);
  const StateLayerShape& shape = own.shape;
  check_range(slot, count);
  SHOAL_ASSERT(shape.conv_channels > 0);
  if (capture_capacity_ == 0) {
    return {};
  }
  return TensorView(own.conv_capture.data() + slot * slot_bytes(shape, capture_capacity_).conv_capture,
                    shape.conv_dtype, {count, capture_capacity_, shape.conv_channels});
}

TensorView StatePool::recurrent_capture(size_t layer_idx, StateSlot slot, int64_t count) const {
  const Layer& own = layer(layer_idx);
  const StateLayerShape& shape = own.shape;
  check_range(slot, count);
  SHOAL_ASSERT(shape.num_heads > 0);
  if (capture_capacity_ == 0) {
    return {};
  }
  return TensorView(own.recurrent_capture.data() + slot * slot_bytes(shape, capture_capacity_).recurrent_capture,
                    DType::kF32, {count, capture_capacity_ * transition_width(shape)});
}

TensorView StatePool::conv_scratch(size_t layer_idx, int64_t count) const {
  const StateLayerShape& shape = layer(layer_idx).shape;
  check_range(0, count);
  SHOAL_ASSERT(shape.conv_channels > 0 && capture_capacity_ > 0);
  return TensorView(conv_scratch_.data(), shape.conv_dtype, {count, shape.conv_channels, shape.conv_reach});
}

void StatePool::commit(StateSlot slot, int64_t num_accepted, cpu::ThreadPool& pool) {
  check_in_use(slot);
  SHOAL_ASSERT(num_accepted >= 0 && num_accepted <= capture_capacity_);
  if (num_accepted == 0) {
    return;
  }
  for (size_t layer_idx = 0; layer_idx < layers_.size(); ++layer_idx) {
    const StateLayerShape& shape = layers_[layer_idx].shape;
    if (shape.conv_channels > 0) {
      commit_conv(layers_[layer_idx], layer_idx, slot, num_accepted);
    }
    if (shape.num_heads > 0) {
      commit_recurrent(layers_[layer_idx], layer_idx, slot, num_accepted, pool);
    }
  }
}

void StatePool::commit_conv(const Layer& layer, size_t layer_idx, StateSlot slot, int64_t num_accepted) {
  SHOAL_ASSERT(capture_capacity_ > 0);
  const StateLayerShape& shape = layer.shape;
  const TensorView state = conv_state(layer_idx, slot);
  const TensorView rows = conv_capture(layer_idx, slot);
  if (size_of(shape.conv_dtype) == 4) {
    shift_in(state.as<uint32_t>(), shape.conv_channels, shape.conv_reach, rows.as<uint32_t>(), num_accepted);
  } else {
    shift_in(state.as<uint16_t>(), shape.conv_channels, shape.conv_reach, rows.as<uint16_t>(), num_accepted);
  }
}

// The operator's own update: exp(g) * S, then + k * delta, each rounded.
void StatePool::commit_recurrent(const Layer& layer, size_t layer_idx, StateSlot slot, int64_t num_accepted,
                                 cpu::ThreadPool& pool) {
  const StateLayerShape& s = layer.shape;
  float* const states = recurrent_state(layer_idx, slot).as<float>();
  const int64_t decay_size = s.decay_per_key ? s.key_size : 1;
  const float* const decays = recurrent_capture(layer_idx, slot).as<float>();
  const float* const keys = decays + capture_capacity_ * decay_width(s);
  const float* const deltas = keys + capture_capacity_ * s.num_key_heads * s.key_size;
  pool.parallel_for(s.num_heads * s.value_size, s.value_size, [&](int64_t begin, int64_t end, int) {
    for (int64_t row = begin; row < end; ++row) {
      float* const state = states + row * s.key_size;
      const int64_t head = row / s.value_size;
      const int64_t key_head = head / (s.num_heads / s.num_key_heads);
      for (int64_t t = 0; t < num_accepted; ++t) {
        const float* decay = decays + (t * s.num_heads + head) * decay_size;
        const float* key = keys + (t * s.num_key_heads + key_head) * s.key_size;
        const float delta = deltas[t * s.num_heads * s.value_size + row];
        if (s.decay_per_key) {
          for (int64_t k = 0; k < s.key_size; ++k) {
            state[k] = state[k] * decay[k] + key[k] * delta;
          }
        } else {
          const float factor = *decay;
          for (int64_t k = 0; k < s.key_size; ++k) {
            state[k] = state[k] * factor + key[k] * delta;
          }
        }
      }
    }
  });
}

}  // namespace shoal
