// Reference of linear attention: the recurrence token by token, in f64 but for the state, which is f32 after each
// token.
#include <algorithm>
#include <cmath>
#include <vector>

#include "shoal/ops/delta_net/delta_net_problem.h"
#include "shoal/ops/element.h"

namespace shoal::delta {
namespace {

double read(const Rows& rows, int64_t row, int64_t i) {
  return read_element(rows.dtype, rows.data, row + i * rows.inner);
}

double softplus(double x) { return std::max(x, 0.0) + std::log1p(std::exp(-std::fabs(x))); }
double sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }

// exp(g) of a token and head: one value, or one for each key channel.
std::vector<double> decays(const Problem& p, int64_t b, int64_t t, int64_t h) {
  std::vector<double> result(static_cast<size_t>(p.k_size), 1.0);
  for (int64_t i = 0; p.decay.data != nullptr && i < p.k_size; ++i) {
    double g = read(p.decay, p.decay.at(b, t, h), p.decay_per_key ? i : 0);
    if (p.gate != Gate::kNone) {
      const double x = g + p.dt_bias[h * p.dt_bias_head + i * p.dt_bias_inner];
      const double a = std::exp(static_cast<double>(p.a_log[h * p.a_log_head]));
      g = p.gate == Gate::kSoftplus ? -a * softplus(x) : p.gate_lower_bound * sigmoid(a * x);
    }
    result[static_cast<size_t>(i)] = std::exp(g);
  }
  return result;
}

std::vector<double> vector_of(const Problem& p, const Rows& rows, int64_t row) {
  std::vector<double> x;
  double sum_of_squares = 0.0;
  for (int64_t i = 0; i < p.k_size; ++i) {
    x.push_back(read(rows, row, i));
    sum_of_squares += x.back() * x.back();
  }
  for (double& value : x) {
    value *= p.normalise ? 1.0 / std::sqrt(sum_of_squares + 1e-12) : 1.0;
  }
  return x;
}

class Head {
 public:
  Head(const Problem& problem, int64_t seq, int64_t head)
      : p(problem), b(seq), h(head), state(static_cast<size_t>(p.v_size * p.k_size), 0.0f) {
    for (int64_t v = 0; p.initial.data != nullptr && v < p.v_size; ++v) {
      for (int64_t k = 0; k < p.k_size; ++k) {
        at(v, k) = read_element(p.initial.dtype, p.initial.data, p.initial.at(b, h, v) + k * p.initial.key);
      }
    }
  }

  void store(int64_t slot, bool zeros) const {
    for (int64_t v = 0; p.final.data != nullptr && v < p.v_size; ++v) {
      for (int64_t k = 0; k < p.k_size; ++k) {
        write_element(p.final.dtype, p.final.data, slot * p.window_stride + p.final.at(b, h, v) + k * p.final.key,
                      zeros ? 0.0f : state[static_cast<size_t>(v * p.k_size + k)]);
      }
    }
  }

  void step(int64_t t, int64_t captured_slot) {
    const std::vector<double> decay = decays(p, b, t, h);
    const std::vector<double> key = vector_of(p, p.key, p.key.at(b, t, h / p.states_per_key));
    for (int64_t v = 0; v < p.v_size; ++v) {
      double delta = read(p.value, p.value.at(b, t, h), v);
      if (p.beta.data != nullptr) {
        const double beta = read(p.beta, p.beta.at(b, t, h), 0);
        double retrieved = 0.0;
        for (int64_t k = 0; k < p.k_size; ++k) {
          retrieved += decay[static_cast<size_t>(k)] * at(v, k) * key[static_cast<size_t>(k)];
        }
        delta = (p.beta_sigmoid ? sigmoid(beta) : beta) * (delta - retrieved);
      }
      for (int64_t k = 0; k < p.k_size; ++k) {
        at(v, k) = static_cast<float>(decay[static_cast<size_t>(k)] * at(v, k) + key[static_cast<size_t>(k)] * delta);
      }
      if (captured_slot >= 0) {
        capture(p.captured_delta(captured_slot, h) + v, delta);
      }
    }
    for (int64_t k = 0; captured_slot >= 0 && k < p.k_size; ++k) {
      capture(p.captured_key(captured_slot, h / p.states_per_key) + k, key[static_cast<size_t>(k)]);
      if (k == 0 || p.decay_per_key) {
        capture(p.captured_decay(captured_slot, h) + k, decay[static_cast<size_t>(k)]);
      }
    }
    for (int64_t j = 0; j < p.num_queries; ++j) {
      const int64_t query_head = h * p.num_queries / p.states_per_query + j;
      const std::vector<double> query = vector_of(p, p.query, p.query.at(b, t, query_head));
      for (int64_t v = 0; v < p.v_size; ++v) {
        double sum = 0.0;
        for (int64_t k = 0; k < p.k_size; ++k) {
          sum += at(v, k) * query[static_cast<size_t>(k)];
        }
        write_element(p.output.dtype, p.output.data, p.output.at(b, t, h * p.num_queries + j) + v * p.output.inner,
                      static_cast<float>(p.scale * sum));
      }
    }
  }

 private:
  float& at(int64_t v, int64_t k) { return state[static_cast<size_t>(v * p.k_size + k)]; }
  void capture(int64_t i, double value) {
    p.capture[b * p.capture_sequence + i * p.capture_inner] = static_cast<float>(value);
  }

  const Problem& p;
  int64_t b;
  int64_t h;
  std::vector<float> state;  // [v_size, k_size]
};

}  // namespace

void recurrence_ref(const Problem& p) {
  for (int64_t b = 0; b < p.num_seqs; ++b) {
    const int64_t width =
        p.capture_capacity * (p.decay_width() + p.num_key_heads() * p.k_size + p.num_heads * p.v_size);
    for (int64_t i = 0; p.capture != nullptr && i < width; ++i) {
      p.capture[b * p.capture_sequence + i * p.capture_inner] = 0.0f;
    }
    const int64_t length = p.length_of(b);
    const int64_t num_captured = p.capture == nullptr ? 0 : p.num_captured(b);
    for (int64_t h = 0; h < p.num_heads; ++h) {
      Head head(p, b, h);
      for (int64_t slot = 0; slot < p.num_empty_slots(length); ++slot) {
        head.store(slot, /*zeros=*/true);
      }
      for (int64_t t = 0; t < length; ++t) {
        head.step(p.begin_of(b) + t, t < num_captured ? t : -1);
        if (const int64_t slot = p.slot_after(t + 1, length); slot >= 0) {
          head.store(slot, /*zeros=*/false);
        }
      }
      if (length == 0) {
        head.store(p.num_windows - 1, /*zeros=*/false);
      }
    }
  }
}

void gate_ref(const LinearAttentionGateArgs& a) {
  for (int64_t b = 0; b < a.a.dim(0); ++b) {
    for (int64_t t = 0; t < a.a.dim(1); ++t) {
      for (int64_t h = 0; h < a.a.dim(2); ++h) {
        const auto at = [&](const TensorView& view) {
          return b * view.stride(0) + t * view.stride(1) + h * view.stride(2);
        };
        const double x = read_element(a.a.dtype, a.a.data, at(a.a)) + a.dt_bias.as<float>()[h * a.dt_bias.stride(0)];
        const double scale = a.decay_scale.as<float>()[h * a.decay_scale.stride(0)];
        write_element(a.a.dtype, a.decay.data, at(a.decay), static_cast<float>(scale * softplus(x)));
        if (a.beta) {
          write_element(a.a.dtype, a.beta.data, at(a.beta),
                        static_cast<float>(sigmoid(read_element(a.a.dtype, a.b.data, at(a.b)))));
        }
      }
    }
  }
}

}  // namespace shoal::delta
