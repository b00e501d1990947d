// Reference of the convolutions: the formulas, element by element.
#include <cmath>

#include "shoal/ops/causal_conv/causal_conv_problem.h"
#include "shoal/ops/element.h"

namespace shoal::conv {
namespace {

float rounded(DType dtype, float value) {
  uint32_t storage = 0;
  write_element(dtype, &storage, 0, value);
  return read_element(dtype, &storage, 0);
}

// Input `pos` of a sequence that starts at token `begin`; before it, the state.
float sample(const Problem& p, int64_t b, int64_t begin, int64_t pos, int64_t c) {
  if (pos >= 0) {
    return read_element(p.dtype, p.input.data,
                        b * p.input.sequence + (begin + pos) * p.input.pos + c * p.input.channel);
  }
  if (p.past.data == nullptr) {
    return 0.0f;
  }
  return read_element(p.dtype, p.past.data,
                      b * p.past.sequence + (p.state_length + pos) * p.past.pos + c * p.past.channel);
}

float weight(const Problem& p, int64_t c, int64_t tap) {
  return read_element(p.dtype, p.weight, c * p.weight_channel + tap * p.weight_tap);
}

float static_taps(const Problem& p, int64_t b, int64_t begin, int64_t pos, int64_t c) {
  float sum = p.bias != nullptr ? read_element(p.dtype, p.bias, c * p.bias_channel) : 0.0f;
  for (int64_t tap = 0; tap < p.kernel_size; ++tap) {
    sum += weight(p, c, tap) * sample(p, b, begin, pos - (p.kernel_size - 1 - tap) * p.dilation, c);
  }
  return p.silu ? sum / (1.0f + std::exp(-sum)) : sum;
}

float dynamic_taps(const Problem& p, int64_t b, int64_t begin, int64_t pos, int64_t c) {
  const int64_t token = begin + pos;
  const int64_t delta = token * p.delta_token + c / p.group_size * p.delta_group;
  const auto product = [&](int64_t tap, int64_t correction, int64_t at) {
    const float k = rounded(p.dtype, weight(p, c, tap) + read_element(p.dtype, p.delta, delta + correction));
    return rounded(p.dtype, k * sample(p, b, begin, at, c));
  };
  const float current = product(1, 0, pos);
  const float previous = product(0, p.delta_tap, pos - 1);
  const float mask = read_element(p.dtype, p.mask, token * p.mask_token);
  return current + rounded(p.dtype, previous * mask);
}

}  // namespace

void conv_ref(const Problem& p) {
  for (int64_t b = 0; b < p.num_seqs; ++b) {
    const Problem::Span span = p.span(b);
    if (!span.sound) {
      continue;
    }
    for (int64_t pos = 0; pos < span.end - span.begin; ++pos) {
      for (int64_t c = 0; c < p.channels; ++c) {
        const float y =
            p.delta != nullptr ? dynamic_taps(p, b, span.begin, pos, c) : static_taps(p, b, span.begin, pos, c);
        write_element(p.dtype, p.output.data,
                      b * p.output.sequence + (span.begin + pos) * p.output.pos + c * p.output.channel, y);
      }
    }
    write_states(p, b, 0, p.channels);
  }
}

}  // namespace shoal::conv
