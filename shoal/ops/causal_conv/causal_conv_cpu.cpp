// The convolutions with vectors. The lanes are channels where these are contiguous, else tokens; any other stride is
// gathered. A lane's operations are those of the reference in the same order (products and sums unfused), so only the
// exponential of SiLU tells the instruction sets apart.
#include "shoal/cpu/simd.h"
#include "shoal/ops/causal_conv/causal_conv_problem.h"

namespace shoal::SHOAL_ISA {
namespace {

constexpr int kTile = 4;  // vectors whose sums stand in registers together
// Channels that share a walk over the tokens: their part of a token is long enough for the prefetcher, their weights
// short enough for the first-level cache.
constexpr int kBlock = 512;
constexpr int kVectors = kBlock / kLanes;
constexpr int kHeldTaps = 4;

SHOAL_INLINE Floats rounded(Floats a, float) { return a; }
#if defined(SHOAL_ISA_AVX512)
SHOAL_INLINE Floats rounded(Floats a, f16) { return {_mm512_cvtph_ps(narrow_f16(a))}; }
SHOAL_INLINE Floats rounded(Floats a, bf16) { return widen_bf16(narrow_bf16(a)); }
#elif defined(SHOAL_ISA_AVX2)
SHOAL_INLINE Floats rounded(Floats a, f16) { return {_mm256_cvtph_ps(narrow_f16(a))}; }
SHOAL_INLINE Floats rounded(Floats a, bf16) { return widen_bf16(narrow_bf16(a)); }
#else
template <class T>
SHOAL_INLINE Floats rounded(const Floats& a, T) {
  T lanes[kLanes];
  store(lanes, a);
  return load(lanes);
}
#endif

// load_lanes, but with whole vectors of any stride put together in registers: through memory they would wait for the
// stores of their parts, which was half of the time of a single token.
template <class T>
SHOAL_INLINE Floats gathered(const T* p, int64_t stride, int64_t n) {
  return load_lanes(p, stride, n);
}
#if !defined(SHOAL_ISA_SCALAR)
SHOAL_INLINE __m256 eight(const float* p, int64_t stride) {
  return _mm256_setr_ps(p[0], p[stride], p[2 * stride], p[3 * stride], p[4 * stride], p[5 * stride], p[6 * stride],
                        p[7 * stride]);
}
SHOAL_INLINE Floats gathered(const float* p, int64_t stride, int64_t n) {
  if (stride == 1 || n != kLanes) {
    return load_lanes(p, stride, n);
  }
#if defined(SHOAL_ISA_AVX512)
  const __m512 low = _mm512_castps256_ps512(eight(p, stride));
  return {_mm512_insertf32x8(low, eight(p + 8 * stride, stride), 1)};
#else
  return {eight(p, stride)};
#endif
}
#endif

SHOAL_INLINE Floats silu(Floats a) { return a / (splat(1.0f) + exp(zero() - a)); }

// A sequence with typed pointers to its first token (`past`: to its first state position).
template <class T>
struct Sequence {
  const conv::Problem& p;
  const T* input;
  T* output;
  const T* past;
  int64_t begin;
  int64_t length;

  Sequence(const conv::Problem& problem, int64_t b) : p(problem) {
    const conv::Problem::Span span = p.span(b);
    begin = span.begin;
    length = span.end - span.begin;
    input = static_cast<const T*>(p.input.data) + b * p.input.sequence + begin * p.input.pos;
    output = static_cast<T*>(p.output.data) + b * p.output.sequence + begin * p.output.pos;
    past = static_cast<const T*>(p.past.data);
    past = past == nullptr ? nullptr : past + b * p.past.sequence;
  }

  const T* input_at(int64_t pos, int64_t c) const { return input + pos * p.input.pos + c * p.input.channel; }
  T* output_at(int64_t pos, int64_t c) const { return output + pos * p.output.pos + c * p.output.channel; }
  const T* past_at(int64_t pos, int64_t c) const {  // pos < 0
    return past + (p.state_length + pos) * p.past.pos + c * p.past.channel;
  }

  // n channels from c on at one position, which may lie in the state.
  SHOAL_INLINE Floats channels(int64_t pos, int64_t c, int64_t n) const {
    if (pos >= 0) {
      return gathered(input_at(pos, c), p.input.channel, n);
    }
    return past == nullptr ? zero() : gathered(past_at(pos, c), p.past.channel, n);
  }
  // n positions from pos on of one channel; the first may lie in the state.
  SHOAL_INLINE Floats positions(int64_t pos, int64_t c, int64_t n) const {
    if (pos >= 0) {
      return load_lanes(input_at(pos, c), p.input.pos, n);
    }
    T lanes[kLanes] = {};
    for (int64_t i = 0; i < n; ++i) {
      if (pos + i >= 0) {
        lanes[i] = *input_at(pos + i, c);
      } else if (past != nullptr) {
        lanes[i] = *past_at(pos + i, c);
      }
    }
    return load(lanes);
  }
};

// Weights and bias of up to kBlock channels.
template <class T>
struct Taps {
  const conv::Problem& p;
  int64_t first;
  int64_t end;
  bool held;
  int num_vectors;
  Floats weights[kHeldTaps * kVectors];
  Floats bias[kVectors];

  Taps(const conv::Problem& problem, int64_t begin, int64_t stop)
      : p(problem), first(begin), end(stop), held(problem.kernel_size <= kHeldTaps) {
    num_vectors = static_cast<int>((end - first + kLanes - 1) / kLanes);
    for (int v = 0; v < num_vectors; ++v) {
      const int64_t c = first + v * kLanes;
      bias[v] = p.bias == nullptr
                    ? zero()
                    : load_lanes(static_cast<const T*>(p.bias) + c * p.bias_channel, p.bias_channel, lanes_of(v));
      for (int64_t tap = 0; held && tap < p.kernel_size; ++tap) {
        weights[tap * kVectors + v] = from_memory(tap, v);
      }
    }
  }
  int64_t lanes_of(int v) const {
    const int64_t left = end - first - v * kLanes;
    return left < kLanes ? left : kLanes;
  }
  SHOAL_INLINE Floats weight(int64_t tap, int v) const {
    return held ? weights[tap * kVectors + v] : from_memory(tap, v);
  }
  SHOAL_INLINE Floats from_memory(int64_t tap, int v) const {
    const int64_t c = first + v * kLanes;
    return gathered(static_cast<const T*>(p.weight) + c * p.weight_channel + tap * p.weight_tap, p.weight_channel,
                    lanes_of(v));
  }
};

template <class T>
SHOAL_INLINE void finish(const Sequence<T>& s, int64_t pos, int64_t c, int64_t n, Floats sum) {
  store_lanes(s.output_at(pos, c), s.p.output.channel, n, s.p.silu ? silu(sum) : sum);
}

// Tokens [from, to) of one tile, whatever the strides and wherever the taps reach.
template <class T>
void any_tokens(const Sequence<T>& s, const Taps<T>& taps, int64_t from, int64_t to) {
  for (int64_t pos = from; pos < to; ++pos) {
    for (int v = 0; v < taps.num_vectors; ++v) {
      const int64_t c = taps.first + v * kLanes;
      Floats sum = taps.bias[v];
      for (int64_t tap = 0; tap < s.p.kernel_size; ++tap) {
        const int64_t at = pos - (s.p.kernel_size - 1 - tap) * s.p.dilation;
        sum = sum + taps.weight(tap, v) * s.channels(at, c, taps.lanes_of(v));
      }
      finish(s, pos, c, taps.lanes_of(v), sum);
    }
  }
}

// The same for whole tiles where channels are contiguous and all taps read the input. kTaps is the kernel size, or 0
// for any up to kHeldTaps.
template <int kTaps, class T>
void full_tokens(const Sequence<T>& s, const Taps<T>& taps, int64_t from, int64_t to) {
  const int64_t num_taps = kTaps > 0 ? kTaps : s.p.kernel_size;
  const int64_t step = s.p.dilation * s.p.input.pos;
  for (int64_t pos = from; pos < to; ++pos) {
    const T* oldest = s.input_at(pos, taps.first) - (num_taps - 1) * step;
    T* out = s.output_at(pos, taps.first);
    for (int at = 0; at < taps.num_vectors; at += kTile) {
      Floats sums[kTile];
      for (int v = 0; v < kTile; ++v) {
        sums[v] = taps.bias[at + v];
      }
      for (int64_t tap = 0; tap < num_taps; ++tap) {
        for (int v = 0; v < kTile; ++v) {
          sums[v] = sums[v] + taps.weights[tap * kVectors + at + v] * load(oldest + tap * step + (at + v) * kLanes);
        }
      }
      for (int v = 0; v < kTile; ++v) {
        store(out + (at + v) * kLanes, s.p.silu ? silu(sums[v]) : sums[v]);
      }
    }
  }
}

template <class T>
void over_channels(const Sequence<T>& s, int64_t begin, int64_t end) {
  const int64_t reach = (s.p.kernel_size - 1) * s.p.dilation;
  const bool contiguous = s.p.input.channel == 1 && s.p.output.channel == 1;
  // Blocks of whole tiles, then the rest.
  const int64_t whole = begin + (end - begin) / (kTile * kLanes) * (kTile * kLanes);
  for (int64_t c = begin; c < end;) {
    const int64_t stop = c < whole ? least(c + kBlock, whole) : end;
    const Taps<T> taps(s.p, c, stop);
    const bool full = contiguous && taps.held && c < whole;
    const int64_t first = full ? least(reach, s.length) : s.length;
    any_tokens(s, taps, 0, first);
    if (s.p.kernel_size == 4) {
      full_tokens<4>(s, taps, first, s.length);
    } else {
      full_tokens<0>(s, taps, first, s.length);
    }
    c = stop;
  }
}

template <class T>
void over_tokens(const Sequence<T>& s, int64_t begin, int64_t end) {
  const int64_t num_taps = s.p.kernel_size;
  const bool held = num_taps <= kHeldTaps;
  for (int64_t c = begin; c < end; ++c) {
    const T* bias = static_cast<const T*>(s.p.bias);
    const Floats start = bias == nullptr ? zero() : load_lanes(bias + c * s.p.bias_channel, 0, kLanes);
    const auto weight = [&](int64_t tap) {
      return load_lanes(static_cast<const T*>(s.p.weight) + c * s.p.weight_channel + tap * s.p.weight_tap, 0, kLanes);
    };
    Floats weights[kHeldTaps];
    for (int64_t tap = 0; held && tap < num_taps; ++tap) {
      weights[tap] = weight(tap);
    }
    for (int64_t pos = 0; pos < s.length; pos += kLanes) {
      const int64_t n = least(kLanes, s.length - pos);
      Floats sums = start;
      for (int64_t tap = 0; tap < num_taps; ++tap) {
        const Floats x = s.positions(pos - (num_taps - 1 - tap) * s.p.dilation, c, n);
        sums = sums + (held ? weights[tap] : weight(tap)) * x;
      }
      store_lanes(s.output_at(pos, c), s.p.output.pos, n, s.p.silu ? silu(sums) : sums);
    }
  }
}

// The corrections of n channels from c on: one number where they all are of one group.
template <class T>
SHOAL_INLINE Floats correction(const conv::Problem& p, const T* delta, int64_t c, int64_t n) {
  const int64_t group = c / p.group_size;
  if (p.group_size == 1) {
    return load_lanes(delta + c * p.delta_group, p.delta_group, n);
  }
  T lanes[kLanes] = {};
  if ((c + n - 1) / p.group_size == group) {
    for (T& lane : lanes) {
      lane = delta[group * p.delta_group];
    }
  } else {
    for (int64_t i = 0; i < n; ++i) {
      lanes[i] = delta[(c + i) / p.group_size * p.delta_group];
    }
  }
  return load(lanes);
}

// Four roundings, each its own: every operation rounds to T before the next.
template <class T>
void dynamic_tokens(const Sequence<T>& s, int64_t begin, int64_t end) {
  const conv::Problem& p = s.p;
  for (int64_t c = begin; c < end; c += kBlock) {
    const int64_t stop = least(c + kBlock, end);
    const Taps<T> taps(p, c, stop);
    for (int64_t pos = 0; pos < s.length; ++pos) {
      const T* delta = static_cast<const T*>(p.delta) + (s.begin + pos) * p.delta_token;
      const T* mask_at = static_cast<const T*>(p.mask) + (s.begin + pos) * p.mask_token;
      const Floats mask = load_lanes(mask_at, 0, kLanes);
      for (int v = 0; v < taps.num_vectors; ++v) {
        const int64_t n = taps.lanes_of(v);
        const int64_t at = c + v * kLanes;
        const Floats k_cur = rounded(taps.weight(1, v) + correction(p, delta, at, n), T{});
        const Floats k_prev = rounded(taps.weight(0, v) + correction(p, delta + p.delta_tap, at, n), T{});
        const Floats a_cur = rounded(k_cur * s.channels(pos, at, n), T{});
        const Floats a_prev = rounded(k_prev * s.channels(pos - 1, at, n), T{});
        store_lanes(s.output_at(pos, at), p.output.channel, n, a_cur + rounded(a_prev * mask, T{}));
      }
    }
  }
}

template <class T>
void channels_of(const conv::Problem& p, int64_t b, int64_t begin, int64_t end) {
  const Sequence<T> sequence(p, b);
  if (p.delta != nullptr) {
    dynamic_tokens(sequence, begin, end);
  } else if (p.input.channel != 1 && p.input.pos == 1) {
    over_tokens(sequence, begin, end);
  } else {
    over_channels(sequence, begin, end);
  }
}

}  // namespace

void conv_channels(const conv::Problem& p, int64_t b, int64_t begin, int64_t end) {
  switch (p.dtype) {
    case DType::kF32: channels_of<float>(p, b, begin, end); break;
    case DType::kF16: channels_of<f16>(p, b, begin, end); break;
    default: channels_of<bf16>(p, b, begin, end); break;
  }
}

}  // namespace shoal::SHOAL_ISA
