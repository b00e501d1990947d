// The recurrence with vectors along the key axis, and the gates.
//
// A chunk of tokens has its keys, queries and gates prepared in f32; then four rows of the state at a time stay in the
// first-level cache and pass through the chunk. One walk over a row updates it, reads it out and retrieves for the next
// token, so that a state element is loaded and stored once a token. A row's operations depend on nothing but its own
// inputs: any chunk, any slice of rows and any number of them at a time give the same bits.
#include "shoal/cpu/simd.h"
#include "shoal/ops/delta_net/delta_net_problem.h"

namespace shoal::SHOAL_ISA {
namespace {

using delta::Gate;
using delta::Problem;
using delta::Rows;
using delta::Scratch;
using delta::States;

constexpr int kRows = 4;  // of a state at a time: their sums fill the registers of AVX2

template <class T>
SHOAL_INLINE float scalar_at(const T* p) {
  float lanes[kLanes];
  store(lanes, load_partial(p, 1));
  return lanes[0];
}

// f32 out of f32, f16 or bf16 with any stride; `to` is padded with zeros up to `padded`, a multiple of kLanes.
template <class T>
void load_vector(float* to, int64_t padded, const T* from, int64_t stride, int64_t count) {
  for (int64_t i = 0; i < padded; i += kLanes) {
    store(to + i, i < count ? load_lanes(from + i * stride, stride, least(kLanes, count - i)) : zero());
  }
}

template <class T>
void store_vector(T* to, int64_t stride, const float* from, int64_t count) {
  for (int64_t i = 0; i < count; i += kLanes) {
    store_lanes(to + i * stride, stride, least(kLanes, count - i), load(from + i));
  }
}

float softplus(float x) { return (x > 0.0f ? x : 0.0f) + __builtin_log1pf(__builtin_expf(-__builtin_fabsf(x))); }
float sigmoid(float x) { return 1.0f / (1.0f + __builtin_expf(-x)); }

void normalise(float* x, int64_t padded) {
  Floats squares = zero();
  for (int64_t i = 0; i < padded; i += kLanes) {
    const Floats a = load(x + i);
    squares = fma(a, a, squares);
  }
  const Floats factor = splat(1.0f / __builtin_sqrtf(sum(squares) + 1e-12f));
  for (int64_t i = 0; i < padded; i += kLanes) {
    store(x + i, load(x + i) * factor);
  }
}

// In the order in which walk() adds: the first retrieval of a chunk has the bits of one inside it.
SHOAL_INLINE float dot(const float* a, const float* b, int64_t padded) {
  Floats products = zero();
  for (int64_t i = 0; i < padded; i += kLanes) {
    products = fma(load(a + i), load(b + i), products);
  }
  return sum(products);
}

// One state head, rows [begin, end) of its values, with the scratch memory of a thread.
template <class T>
class Head {
 public:
  Head(const Problem& problem, int64_t head, int64_t first_row, int64_t end_row, float* memory)
      : p(problem), h(head), begin(first_row), end(end_row), sizes(problem) {
    const int64_t keys_size = Scratch::kChunk * sizes.key_row;
    const int64_t values_size = Scratch::kChunk * sizes.value_row;
    state = memory;
    keys = state + sizes.value_row * sizes.key_row;
    decayed_keys = p.decay_per_key ? keys + keys_size : keys;
    key_decays = keys + 2 * keys_size;
    queries = keys + 3 * keys_size;
    values = queries + p.num_queries * keys_size;
    deltas = values + values_size;
    outputs = deltas + values_size;
    decays = outputs + p.num_queries * values_size;
    betas = decays + Scratch::kChunk;
  }

  void run(int64_t b) {
    const int64_t length = p.length_of(b);
    for (int64_t slot = 0; p.final.data != nullptr && slot < p.num_empty_slots(length); ++slot) {
      clear_state(b, slot);
    }
    if (length == 0) {
      for (int64_t row = begin; row < end; ++row) {
        load_state(b, row, state);
        store_state(b, row, p.num_windows - 1, state);
      }
      write_capture(b, 0);
      return;
    }
    const int64_t first_with_slot = length - p.num_windows + 1;  // tokens consumed; from there on one at a time
    for (int64_t t = 0; t < length;) {
      const int64_t n = t < first_with_slot ? least(Scratch::kChunk, first_with_slot - t) : 1;
      prepare(b, p.begin_of(b) + t, n);
      const int64_t slot = p.slot_after(t + n, length);
      for (int64_t row = begin; row < end;) {
        const int64_t num_rows = end - row >= kRows ? kRows : 1;
        float* rows = n == length ? state : state + (row - begin) * sizes.key_row;
        for (int64_t i = 0; t == 0 && i < num_rows; ++i) {
          load_state(b, row + i, rows + i * sizes.key_row);
        }
        if (num_rows == kRows) {
          walk_any<kRows>(rows, row, n);
        } else {
          walk_any<1>(rows, row, n);
        }
        for (int64_t i = 0; slot >= 0 && i < num_rows; ++i) {
          store_state(b, row + i, slot, rows + i * sizes.key_row);
        }
        row += num_rows;
      }
      finish(b, p.begin_of(b) + t, n);
      if (t == 0) {
        write_capture(b, p.capture == nullptr ? 0 : p.num_captured(b));
      }
      t += n;
    }
  }

 private:
  template <class S>
  void load_state_of(int64_t b, int64_t row, float* to) const {
    const States& s = p.initial;
    load_vector(to, sizes.key_row, static_cast<const S*>(s.data) + s.at(b, h, row), s.key, p.k_size);
  }
  void load_state(int64_t b, int64_t row, float* to) const {
    if (p.initial.data == nullptr) {
      for (int64_t i = 0; i < sizes.key_row; i += kLanes) {
        store(to + i, zero());
      }
      return;
    }
    switch (p.initial.dtype) {
      case DType::kF32: load_state_of<float>(b, row, to); break;
      case DType::kF16: load_state_of<f16>(b, row, to); break;
      default: load_state_of<bf16>(b, row, to); break;
    }
  }

  template <class S>
  void store_state_of(int64_t b, int64_t row, int64_t slot, const float* from) const {
    const States& s = p.final;
    store_vector(static_cast<S*>(s.data) + slot * p.window_stride + s.at(b, h, row), s.key, from, p.k_size);
  }
  void store_state(int64_t b, int64_t row, int64_t slot, const float* from) const {
    if (p.final.data == nullptr) {
      return;
    }
    switch (p.final.dtype) {
      case DType::kF32: store_state_of<float>(b, row, slot, from); break;
      case DType::kF16: store_state_of<f16>(b, row, slot, from); break;
      default: store_state_of<bf16>(b, row, slot, from); break;
    }
  }
  void clear_state(int64_t b, int64_t slot) {
    for (int64_t i = 0; i < sizes.key_row; i += kLanes) {
      store(keys + i, zero());
    }
    for (int64_t row = begin; row < end; ++row) {
      store_state(b, row, slot, keys);
    }
  }

  float gate_input(const Rows& rows, int64_t row, int64_t i) const {
    const int64_t at = row + i * rows.inner;
    return rows.dtype == DType::kF32 ? static_cast<const float*>(rows.data)[at]
                                     : scalar_at(static_cast<const T*>(rows.data) + at);
  }
  float decay_of(int64_t row, int64_t i) const {  // g, not yet its exponential
    const float x = gate_input(p.decay, row, i);
    if (p.gate == Gate::kNone) {
      return x;
    }
    const float shifted = x + p.dt_bias[h * p.dt_bias_head + i * p.dt_bias_inner];
    const float a = __builtin_expf(p.a_log[h * p.a_log_head]);
    return p.gate == Gate::kSoftplus ? -a * softplus(shifted) : p.gate_lower_bound * sigmoid(a * shifted);
  }

  void load_key_row(float* to, const Rows& rows, int64_t b, int64_t t, int64_t head) const {
    load_vector(to, sizes.key_row, static_cast<const T*>(rows.data) + rows.at(b, t, head), rows.inner, p.k_size);
    if (p.normalise) {
      normalise(to, sizes.key_row);
    }
  }

  // Keys, queries, values and gates of n tokens from t on.
  void prepare(int64_t b, int64_t t, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
      float* key = keys + i * sizes.key_row;
      load_key_row(key, p.key, b, t + i, h / p.states_per_key);
      for (int64_t j = 0; j < p.num_queries; ++j) {
        load_key_row(queries + (i * p.num_queries + j) * sizes.key_row, p.query, b, t + i,
                     h * p.num_queries / p.states_per_query + j);
      }
      const T* value = static_cast<const T*>(p.value.data) + p.value.at(b, t + i, h);
      for (int64_t row = begin; row < end; row += kLanes) {
        store(values + i * sizes.value_row + row - begin,
              load_lanes(value + row * p.value.inner, p.value.inner, least(kLanes, end - row)));
      }
      decays[i] = 1.0f;
      if (p.decay_per_key) {
        prepare_key_decays(b, t + i, i);
      } else if (p.decay.data != nullptr) {
        decays[i] = __builtin_expf(decay_of(p.decay.at(b, t + i, h), 0));
      }
      if (p.beta.data != nullptr) {
        const float beta = gate_input(p.beta, p.beta.at(b, t + i, h), 0);
        betas[i] = p.beta_sigmoid ? sigmoid(beta) : beta;
      }
    }
  }
  void prepare_key_decays(int64_t b, int64_t t, int64_t i) {
    float* decay = key_decays + i * sizes.key_row;
    const float* key = keys + i * sizes.key_row;
    float* decayed = decayed_keys + i * sizes.key_row;
    const int64_t row = p.decay.at(b, t, h);
    for (int64_t k = 0; k < sizes.key_row; ++k) {
      decay[k] = k < p.k_size ? decay_of(row, k) : 0.0f;
    }
    for (int64_t k = 0; k < sizes.key_row; k += kLanes) {
      const Floats e = exp(load(decay + k));
      store(decay + k, e);
      store(decayed + k, e * load(key + k));
    }
  }

  template <int kNum>
  void walk_any(float* rows, int64_t row, int64_t n) {
    if (p.beta.data == nullptr) {
      p.decay_per_key ? walk<kNum, false, true>(rows, row, n) : walk<kNum, false, false>(rows, row, n);
    } else {
      p.decay_per_key ? walk<kNum, true, true>(rows, row, n) : walk<kNum, true, false>(rows, row, n);
    }
  }

  // kNum rows of the state from value channel `row` on, through n tokens.
  template <int kNum, bool kRetrieves, bool kPerKey>
  void walk(float* rows, int64_t row, int64_t n) {
    const int64_t width = sizes.key_row;
    float retrieved[kNum] = {};
    for (int r = 0; kRetrieves && r < kNum; ++r) {
      retrieved[r] = dot(rows + r * width, decayed_keys, width);
    }
    for (int64_t t = 0; t < n; ++t) {
      const int64_t at = t * sizes.value_row + row - begin;
      Floats delta[kNum];
      for (int r = 0; r < kNum; ++r) {
        float d = values[at + r];
        if constexpr (kRetrieves) {
          d = betas[t] * (d - (kPerKey ? retrieved[r] : decays[t] * retrieved[r]));
        }
        deltas[at + r] = d;
        delta[r] = splat(d);
      }
      const float* key = keys + t * width;
      const float* query = queries + t * p.num_queries * width;
      const float* decay = key_decays + t * width;
      const float* next = decayed_keys + (t + 1 < n ? t + 1 : t) * width;
      const Floats one_decay = splat(decays[t]);
      Floats read[kNum];
      Floats ahead[kNum];
      for (int r = 0; r < kNum; ++r) {
        read[r] = zero();
        ahead[r] = zero();
      }
      for (int64_t i = 0; i < width; i += kLanes) {
        const Floats k = load(key + i);
        const Floats q = load(query + i);
        const Floats e = kPerKey ? load(decay + i) : one_decay;
        for (int r = 0; r < kNum; ++r) {
          const Floats s = e * load(rows + r * width + i) + k * delta[r];
          store(rows + r * width + i, s);
          read[r] = fma(s, q, read[r]);
          if constexpr (kRetrieves) {
            ahead[r] = fma(s, load(next + i), ahead[r]);
          }
        }
      }
      float* out = outputs + t * p.num_queries * sizes.value_row + row - begin;
      for (int r = 0; r < kNum; ++r) {
        out[r] = p.scale * sum(read[r]);
        if constexpr (kRetrieves) {
          retrieved[r] = sum(ahead[r]);
        }
      }
      for (int64_t j = 1; j < p.num_queries; ++j) {
        for (int r = 0; r < kNum; ++r) {
          out[j * sizes.value_row + r] = p.scale * dot(rows + r * width, query + j * width, width);
        }
      }
    }
  }

  void finish(int64_t b, int64_t t, int64_t n) const {
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t j = 0; j < p.num_queries; ++j) {
        T* out = static_cast<T*>(p.output.data) + p.output.at(b, t + i, h * p.num_queries + j);
        store_vector(out + begin * p.output.inner, p.output.inner, outputs + (i * p.num_queries + j) * sizes.value_row,
                     end - begin);
      }
    }
  }

  // Factors of the first `num_captured` tokens, which are still in the scratch memory; zeros after them.
  void write_capture(int64_t b, int64_t num_captured) const {
    for (int64_t slot = 0; p.capture != nullptr && slot < p.capture_capacity; ++slot) {
      const bool captured = slot < num_captured;
      if (begin == 0) {
        if (p.decay_per_key) {
          write_factors(b, p.captured_decay(slot, h), captured ? key_decays + slot * sizes.key_row : nullptr, p.k_size);
        } else {
          write_factors(b, p.captured_decay(slot, h), captured ? decays + slot : nullptr, 1);
        }
        if (h % p.states_per_key == 0) {
          write_factors(b, p.captured_key(slot, h / p.states_per_key), captured ? keys + slot * sizes.key_row : nullptr,
                        p.k_size);
        }
      }
      write_factors(b, p.captured_delta(slot, h) + begin, captured ? deltas + slot * sizes.value_row : nullptr,
                    end - begin);
    }
  }
  void write_factors(int64_t b, int64_t at, const float* from, int64_t count) const {
    float* to = p.capture + b * p.capture_sequence + at * p.capture_inner;
    for (int64_t i = 0; i < count; ++i) {
      to[i * p.capture_inner] = from != nullptr ? from[i] : 0.0f;
    }
  }

  const Problem& p;
  int64_t h;
  int64_t begin;
  int64_t end;
  Scratch sizes;
  float* state;         // [end - begin or kRows, key_row]
  float* keys;          // [chunk, key_row]
  float* decayed_keys;  // [chunk, key_row]; the keys themselves unless decays are per key
  float* key_decays;    // [chunk, key_row], if per key
  float* queries;       // [chunk, num_queries, key_row]
  float* values;        // [chunk, value_row], from row `begin` on
  float* deltas;        // as values
  float* outputs;       // [chunk, num_queries, value_row], from row `begin` on
  float* decays;        // [chunk], if one for a head
  float* betas;         // [chunk]
};

template <class T>
void head_of(const Problem& p, int64_t h, int64_t begin, int64_t end, float* scratch) {
  Head<T> head(p, h, begin, end, scratch);
  for (int64_t b = 0; b < p.num_seqs; ++b) {
    head.run(b);
  }
}

template <class T>
void gate_rows(const LinearAttentionGateArgs& args, int64_t begin, int64_t end) {
  const int64_t num_tokens = args.a.shape[1];
  const auto at = [](const TensorView& view, int64_t b, int64_t t) {
    return static_cast<T*>(view.data) + b * view.strides[0] + t * view.strides[1];
  };
  for (int64_t row = begin; row < end; ++row) {
    const int64_t b = row / num_tokens;
    const int64_t t = row % num_tokens;
    for (int64_t h = 0; h < args.a.shape[2]; h += kLanes) {
      const int64_t n = least(kLanes, args.a.shape[2] - h);
      const auto lanes = [&](const TensorView& view) {
        return load_lanes(at(view, b, t) + h * view.strides[2], view.strides[2], n);
      };
      const auto per_head = [&](const TensorView& view) {
        return load_lanes(static_cast<const float*>(view.data) + h * view.strides[0], view.strides[0], n);
      };
      float soft[kLanes];
      store(soft, lanes(args.a) + per_head(args.dt_bias));
      for (float& x : soft) {
        x = softplus(x);
      }
      store_lanes(at(args.decay, b, t) + h * args.decay.strides[2], args.decay.strides[2], n,
                  per_head(args.decay_scale) * load(soft));
      if (args.beta.data != nullptr) {
        const Floats one = splat(1.0f);
        store_lanes(at(args.beta, b, t) + h * args.beta.strides[2], args.beta.strides[2], n,
                    one / (one + exp(zero() - lanes(args.b))));
      }
    }
  }
}

}  // namespace

void recurrence_head(const Problem& p, int64_t h, int64_t begin, int64_t end, float* scratch) {
  switch (p.query.dtype) {
    case DType::kF32: head_of<float>(p, h, begin, end, scratch); break;
    case DType::kF16: head_of<f16>(p, h, begin, end, scratch); break;
    default: head_of<bf16>(p, h, begin, end, scratch); break;
  }
}

void linear_attention_gate_rows(const LinearAttentionGateArgs& args, int64_t begin, int64_t end) {
  switch (args.a.dtype) {
    case DType::kF32: gate_rows<float>(args, begin, end); break;
    case DType::kF16: gate_rows<f16>(args, begin, end); break;
    default: gate_rows<bf16>(args, begin, end); break;
  }
}

}  // namespace shoal::SHOAL_ISA
