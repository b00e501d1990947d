// States and captures: copies of samples, bit for bit. In place the copy is a shift towards the front, done in
// ascending order; the window's last slot, which is the one that is read, is written last.
#include <algorithm>

#include "shoal/ops/causal_conv/causal_conv_problem.h"

namespace shoal::conv {
namespace {

template <class Bits>
void write_states_of(const Problem& p, int64_t b, int64_t begin, int64_t end) {
  const Problem::Span span = p.span(b);
  const int64_t length = span.end - span.begin;
  const Bits* input = static_cast<const Bits*>(p.input.data) + b * p.input.sequence + span.begin * p.input.pos;
  const Bits* past = static_cast<const Bits*>(p.past.data);
  for (int64_t slot = 0; slot < p.num_windows; ++slot) {
    Bits* present = static_cast<Bits*>(p.present.data) + slot * p.window_stride + b * p.present.sequence;
    const int64_t num_consumed = length - p.num_windows + 1 + slot;
    const bool is_last = slot + 1 == p.num_windows;
    for (int64_t pos = 0; pos < p.state_length; ++pos) {
      Bits* to = present + pos * p.present.pos;
      const int64_t from = num_consumed + pos;  // in past and input, one after the other
      if (num_consumed <= 0 && !is_last) {
        for (int64_t c = begin; c < end; ++c) {
          to[c * p.present.channel] = 0;
        }
      } else if (from >= p.state_length) {
        const Bits* source = input + (from - p.state_length) * p.input.pos;
        for (int64_t c = begin; c < end; ++c) {
          to[c * p.present.channel] = source[c * p.input.channel];
        }
      } else {
        for (int64_t c = begin; c < end; ++c) {
          to[c * p.present.channel] =
              past == nullptr ? Bits{0} : past[b * p.past.sequence + from * p.past.pos + c * p.past.channel];
        }
      }
    }
  }
  if (p.capture.data == nullptr) {
    return;
  }
  int64_t num_captured = std::min(p.capture_capacity, length);
  if (p.capture_count != nullptr) {
    num_captured = std::clamp<int64_t>(p.capture_count[b * p.capture_count_stride], 0, num_captured);
  }
  Bits* capture = static_cast<Bits*>(p.capture.data) + b * p.capture.sequence;
  for (int64_t slot = 0; slot < p.capture_capacity; ++slot) {
    for (int64_t c = begin; c < end; ++c) {
      capture[slot * p.capture.pos + c * p.capture.channel] =
          slot < num_captured ? input[slot * p.input.pos + c * p.input.channel] : Bits{0};
    }
  }
}

}  // namespace

void write_states(const Problem& problem, int64_t b, int64_t begin, int64_t end) {
  if (size_of(problem.dtype) == 4) {
    write_states_of<uint32_t>(problem, b, begin, end);
  } else {
    write_states_of<uint16_t>(problem, b, begin, end);
  }
}

}  // namespace shoal::conv
