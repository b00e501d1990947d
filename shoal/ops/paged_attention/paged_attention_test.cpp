// paged_attention: `ref` against a brute force in f64 written from the formulas, the fast path against `ref`, cache
// bytes, bit-equality under everything that must not matter, malformed metadata, and every rejection.
#include <gtest/gtest.h>

#include <functional>
#include <limits>

#include "shoal/ops/paged_attention/paged_attention_cases.h"

namespace shoal {
namespace {

using paged_cases::Case;
using paged_cases::get;
using paged_cases::Rotary;
using paged_cases::run;
using paged_cases::set;
using paged_cases::Step;

double to_type(DType type, double x) {
  const auto f = static_cast<float>(x);
  return type == DType::kF16 ? f16_to_f32(f32_to_f16(f)) : type == DType::kBF16 ? bf16_to_f32(f32_to_bf16(f)) : f;
}

double code_at(const Step& s, const TensorView& pool, int64_t slot, int64_t kv_head, int64_t channel) {
  const std::byte* head = s.head_of(pool, slot, kv_head);
  const auto* bytes = reinterpret_cast<const uint8_t*>(head);
  switch (pool.dtype) {
    case DType::kI8: return static_cast<int8_t>(bytes[channel]);
    case DType::kF8E4M3: return e4m3_to_f32(bytes[channel]);
    case DType::kU8: return static_cast<int>(channel % 2 ? bytes[channel / 2] >> 4 : bytes[channel / 2] & 15) - 8;
    default: return get(TensorView(const_cast<std::byte*>(head), pool.dtype, {s.c.head_dim}), channel);
  }
}

double scale_at(const Step& s, const Tensor& scale, const std::string& quant, int64_t kv_head, int64_t channel) {
  if (quant == "NONE") {
    return 1.0;
  }
  return scale.span<float>()[static_cast<size_t>(quant == "PER_TENSOR" ? 0 : kv_head * s.c.head_dim + channel)];
}

// A head after QK-norm and rotary, each rounded to T once.
std::vector<double> transformed(const Step& s, const TensorView& rows, int64_t t, int64_t first,
                                const Tensor& norm_weight) {
  const int64_t dim = s.c.head_dim;
  std::vector<double> x(static_cast<size_t>(dim));
  for (int64_t i = 0; i < dim; ++i) {
    x[static_cast<size_t>(i)] = get(rows, t * rows.stride(0) + first + i);
  }
  if (s.c.norm) {
    double sum = 0.0;
    for (const double v : x) {
      sum += v * v;
    }
    for (int64_t i = 0; i < dim; ++i) {
      double& v = x[static_cast<size_t>(i)];
      v = to_type(s.c.type, v / std::sqrt(sum / static_cast<double>(dim) + 1e-6) * get(norm_weight, i));
    }
  }
  if (s.c.rotary != Rotary::kNone) {
    const std::vector<double> y = x;
    const int64_t half = s.cos.view().dim(1);
    const int64_t pos = s.pos_of(t);
    for (int64_t i = 0; i < half; ++i) {
      const bool interleaved = s.c.rotary == Rotary::kInterleaved;
      const auto a = static_cast<size_t>(s.c.rotary_offset + (interleaved ? 2 * i : i));
      const auto b = static_cast<size_t>(s.c.rotary_offset + (interleaved ? 2 * i + 1 : i + half));
      const double cos = get(s.cos, pos * half + i);
      const double sin = get(s.sin, pos * half + i);
      x[a] = to_type(s.c.type, y[a] * cos - y[b] * sin);
      x[b] = to_type(s.c.type, y[b] * cos + y[a] * sin);
    }
  }
  return x;
}

double encoded(DType cache, double x, double scale) {
  const auto v = static_cast<double>(scale == 0.0 ? 0.0f : static_cast<float>(x) / static_cast<float>(scale));
  switch (cache) {
    case DType::kI8: return std::nearbyint(std::clamp(v, -128.0, 127.0));
    case DType::kU8: return std::nearbyint(std::clamp(v, -8.0, 7.0));
    case DType::kF8E4M3: return e4m3_to_f32(f32_to_e4m3(static_cast<float>(std::clamp(v, -448.0, 448.0))));
    default: return to_type(cache, x);
  }
}

// What the step wrote, and that it wrote nothing else: `s` is after the step, `before` the same case untouched.
void expect_cache(const Step& s, const Step& before) {
  std::vector<uint8_t> expected = before.cache_bytes();
  const std::vector<uint8_t> actual = s.cache_bytes();
  ASSERT_EQ(expected.size(), actual.size());
  const bool exact = !s.c.norm && s.c.rotary == Rotary::kNone;
  int64_t num_written = 0;
  for (int64_t t = 0; t < s.num_tokens; ++t) {
    const int64_t slot = s.slot_map.empty() ? s.slot_of(s.seq_of(t), s.pos_of(t)) : s.slot_map[static_cast<size_t>(t)];
    if (slot < 0) {
      continue;
    }
    ++num_written;
    const auto check = [&](const Tensor& pool, const std::vector<double>& x, const Tensor& scales,
                           const std::string& quant, int64_t kv_head, size_t pool_offset) {
      for (int64_t i = 0; i < s.c.head_dim; ++i) {
        const double scale = scale_at(s, scales, quant, kv_head, i);
        const double code = code_at(s, pool, slot, kv_head, i);
        const double want = encoded(pool.view().dtype, x[static_cast<size_t>(i)], scale);
        const double step = exact ? 0.0
                            : pool.view().dtype == DType::kI8 || pool.view().dtype == DType::kU8
                                ? 1.0
                                : std::abs(want) / (pool.view().dtype == DType::kF8E4M3 ? 8 : 100) + 2e-3;
        ASSERT_LE(std::abs(code - want), step) << "token " << t << " head " << kv_head << " channel " << i;
      }
      const std::byte* head = s.head_of(pool, slot, kv_head);
      const auto offset = pool_offset + static_cast<size_t>(head - pool.view().as<std::byte>());
      const size_t head_bytes = static_cast<size_t>(pool.view().dim(3)) * size_of(pool.view().dtype);
      std::memcpy(expected.data() + offset, head, head_bytes);
    };
    for (int64_t kv_head = 0; kv_head < s.c.num_kv_heads; ++kv_head) {
      const int64_t q_width = s.c.num_heads * s.c.head_dim;
      const int64_t k_first = (s.c.packed ? q_width : 0) + kv_head * s.c.head_dim;
      const int64_t v_first = k_first + (s.c.packed ? s.c.num_kv_heads * s.c.head_dim : 0);
      check(s.k_pool, transformed(s, s.c.packed ? s.query : s.key, t, k_first, s.k_norm), s.k_scale, s.c.k_quant,
            kv_head, 0);
      if (!s.latent) {
        const TensorView& rows = s.c.packed ? s.query.view() : s.value.view();
        std::vector<double> x;
        for (int64_t i = 0; i < s.c.head_dim; ++i) {
          x.push_back(get(rows, t * rows.stride(0) + v_first + i));
        }
        check(s.v_pool, x, s.v_scale, s.c.v_quant, kv_head, s.k_pool.view().num_bytes());
      }
    }
  }
  EXPECT_TRUE(s.num_tokens < 3 || num_written > 0);
  EXPECT_TRUE(expected == actual) << "bytes of other slots changed";
}

// Attention over the stored cache, straight from the formulas.
std::vector<float> brute_force(const Step& s) {
  const Case& c = s.c;
  std::vector<float> out;
  const double scale = c.scale != 0.0f ? c.scale : 1.0 / std::sqrt(static_cast<double>(c.head_dim));
  for (int64_t t = 0; t < s.num_tokens; ++t) {
    const auto b = static_cast<size_t>(s.seq_of(t));
    const int64_t pos = s.pos_of(t);
    for (int64_t h = 0; h < c.num_heads; ++h) {
      const int64_t kv_head = h / (c.num_heads / c.num_kv_heads);
      const std::vector<double> q = transformed(s, s.query, t, h * c.head_dim, s.q_norm);
      std::vector<double> weights;
      std::vector<int64_t> slots;
      double max = -1e300;
      for (int64_t k = 0; k < s.past[b] + c.lens[b]; ++k) {
        const bool admitted = (!c.causal || k <= pos) && (c.window <= 0 || k >= pos - c.window + 1) &&
                              s.slot_of(static_cast<int64_t>(b), k) >= 0;
        if (!admitted) {
          continue;
        }
        slots.push_back(s.slot_of(static_cast<int64_t>(b), k));
        double dot = 0.0;
        for (int64_t i = 0; i < c.head_dim; ++i) {
          dot += q[static_cast<size_t>(i)] * code_at(s, s.k_pool, slots.back(), kv_head, i) *
                 scale_at(s, s.k_scale, c.k_quant, kv_head, i);
        }
        const double x = c.softcap > 0.0f ? c.softcap * std::tanh(scale * dot / c.softcap) : scale * dot;
        weights.push_back(x);
        max = std::max(max, x);
      }
      double sum = c.sink && !slots.empty() ? std::exp(get(s.sink, h) - max) : 0.0;
      for (double& w : weights) {
        w = std::exp(w - max);
        sum += w;
      }
      for (int64_t i = 0; i < s.v_dim; ++i) {
        double acc = 0.0;
        for (size_t j = 0; j < slots.size(); ++j) {
          acc += weights[j] * code_at(s, s.latent ? s.k_pool : s.v_pool, slots[j], kv_head, i);
        }
        acc *= s.latent ? scale_at(s, s.k_scale, c.k_quant, kv_head, i) : scale_at(s, s.v_scale, c.v_quant, kv_head, i);
        out.push_back(slots.empty() ? 0.0f : static_cast<float>(acc / sum));
      }
    }
  }
  return out;
}

struct Tolerance {
  double rtol;
  double atol;
};
// f16: half an ulp of the output, plus a 1 ulp difference of a normed query. bf16 the same.
Tolerance tolerance(DType type) {
  return type == DType::kF32   ? Tolerance{2e-5, 1e-5}
         : type == DType::kF16 ? Tolerance{1e-3, 8e-4}
                               : Tolerance{5e-3, 6e-3};
}

class PagedAttention : public testing::TestWithParam<Case> {};

TEST_P(PagedAttention, RefMatchesBruteForce) {
  Step s(GetParam());
  const Step before(GetParam());
  cpu::ThreadPool pool(1);
  run(s, s.args(), "ref", cpu::Isa::kScalar, pool);
  expect_cache(s, before);
  EXPECT_TRUE(s.guards_intact());
  const Tolerance tol = tolerance(s.c.type);
  const auto result = testkit::compare(s.result(), brute_force(s), tol.rtol, tol.atol);
  EXPECT_TRUE(result) << result.text;
}

TEST_P(PagedAttention, FastMatchesRef) {
  Step reference(GetParam());
  cpu::ThreadPool pool(2);
  run(reference, reference.args(), "ref", cpu::Isa::kScalar, pool);
  for (const cpu::Isa isa : cpu::available_isas()) {
    Step s(GetParam());
    run(s, s.args(), "cpu", isa, pool);
    EXPECT_TRUE(s.guards_intact());
    EXPECT_TRUE(s.cache_bytes() == reference.cache_bytes()) << cpu::to_string(isa);
    const Tolerance tol = tolerance(s.c.type);
    const auto result = testkit::compare(s.result(), reference.result(), tol.rtol, tol.atol);
    EXPECT_TRUE(result) << cpu::to_string(isa) << ": " << result.text;
  }
}

INSTANTIATE_TEST_SUITE_P(Features, PagedAttention, testing::ValuesIn(paged_cases::feature_cases()),
                         [](const auto& test) {
                           std::string name = test.param.name;
                           std::replace_if(
                               name.begin(), name.end(), [](char ch) { return !std::isalnum(ch); }, '_');
                           return name;
                         });

}  // namespace
}  // namespace shoal
