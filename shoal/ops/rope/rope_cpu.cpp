// Rotation of heads with vectors. Products and sums are not fused, so that every instruction set gives the bits of the
// reference.
#include "shoal/cpu/simd.h"
#include "shoal/ops/rope/rope.h"

namespace shoal::SHOAL_ISA {

// One head, half-split; `x` and `out` begin at the first rotated channel.
template <class T>
SHOAL_INLINE void rotate_halves(T* out, const T* x, const float* cos, const float* sin, int64_t num_pairs) {
  int64_t c = 0;
  for (; c + kLanes <= num_pairs; c += kLanes) {
    const Floats a = load(x + c);
    const Floats b = load(x + num_pairs + c);
    const Floats cosine = load(cos + c);
    const Floats sine = load(sin + c);
    store(out + c, a * cosine - b * sine);
    store(out + num_pairs + c, b * cosine + a * sine);
  }
  if (c < num_pairs) {
    const int64_t n = num_pairs - c;
    const Floats a = load_partial(x + c, n);
    const Floats b = load_partial(x + num_pairs + c, n);
    const Floats cosine = load_partial(cos + c, n);
    const Floats sine = load_partial(sin + c, n);
    store_partial(out + c, a * cosine - b * sine, n);
    store_partial(out + num_pairs + c, b * cosine + a * sine, n);
  }
}

// Channels of one head, interleaved: cosines doubled, sines doubled with the sign of the first of each pair turned.
template <class T>
SHOAL_INLINE void rotate_pairs(T* out, const T* x, const float* cos, const float* sin, int64_t num_channels) {
  int64_t i = 0;
  for (; i + kLanes <= num_channels; i += kLanes) {
    const Floats a = load(x + i);
    store(out + i, a * load(cos + i) + swap_pairs(a) * load(sin + i));
  }
  if (i < num_channels) {
    const int64_t n = num_channels - i;
    const Floats a = load_partial(x + i, n);
    store_partial(out + i, a * load_partial(cos + i, n) + swap_pairs(a) * load_partial(sin + i, n), n);
  }
}

template <class T>
static void rotate_token_interleaved(const RopeArgs& args, T* out, const T* x, const float* cos, const float* sin) {
  constexpr int64_t kChunk = 256;  // channels whose doubled table fits the stack; one chunk serves all heads
  const int64_t rotary_dim = 2 * args.cos.shape[1];
  for (int64_t begin = 0; begin < rotary_dim; begin += kChunk) {
    const int64_t count = rotary_dim - begin < kChunk ? rotary_dim - begin : kChunk;
    float cosines[kChunk];
    float sines[kChunk];
    for (int64_t i = 0; i < count; i += 2) {
      const int64_t column = (begin + i) / 2;
      cosines[i] = cosines[i + 1] = cos[column];
      sines[i] = -sin[column];
      sines[i + 1] = sin[column];
    }
    for (int64_t head = 0; head < args.x.shape[1]; ++head) {
      rotate_pairs(out + head * args.out.strides[1] + begin, x + head * args.x.strides[1] + begin, cosines, sines,
                   count);
    }
  }
}

template <class T>
static void copy_other_channels(const RopeArgs& args, T* out, const T* x) {
  const int64_t end = args.rotary_offset + 2 * args.cos.shape[1];
  for (int64_t i = 0; i < args.rotary_offset; ++i) {
    out[i] = x[i];
  }
  for (int64_t i = end; i < args.x.shape[2]; ++i) {
    out[i] = x[i];
  }
}

template <class T>
static void tokens_of(const RopeArgs& args, int64_t begin, int64_t end) {
  const int32_t* positions = static_cast<const int32_t*>(args.positions.data);
  const int64_t num_pairs = args.cos.shape[1];
  for (int64_t t = begin; t < end; ++t) {
    const T* x = static_cast<const T*>(args.x.data) + t * args.x.strides[0];
    T* out = static_cast<T*>(args.out.data) + t * args.out.strides[0];
    const float* cos = static_cast<const float*>(args.cos.data) + positions[t] * args.cos.strides[0];
    const float* sin = static_cast<const float*>(args.sin.data) + positions[t] * args.sin.strides[0];
    if (args.out.data != args.x.data) {
      for (int64_t head = 0; head < args.x.shape[1]; ++head) {
        copy_other_channels(args, out + head * args.out.strides[1], x + head * args.x.strides[1]);
      }
    }
    out += args.rotary_offset;
    x += args.rotary_offset;
    if (args.interleaved) {
      rotate_token_interleaved(args, out, x, cos, sin);
      continue;
    }
    for (int64_t head = 0; head < args.x.shape[1]; ++head) {
      rotate_halves(out + head * args.out.strides[1], x + head * args.x.strides[1], cos, sin, num_pairs);
    }
  }
}

void rope_tokens(const RopeArgs& args, int64_t begin, int64_t end) {
  switch (args.x.dtype) {
    case DType::kF32: tokens_of<float>(args, begin, end); break;
    case DType::kF16: tokens_of<f16>(args, begin, end); break;
    default: tokens_of<bf16>(args, begin, end); break;
  }
}

}  // namespace shoal::SHOAL_ISA
