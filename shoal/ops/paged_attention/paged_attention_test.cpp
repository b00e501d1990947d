// paged_attention: `ref` against a brute force in f64 written from the formulas, the fast path against `ref`, cache
// bytes, bit-equality under everything that must not matter, and every rejection.
#include <gtest/gtest.h>

#include <functional>
#include <limits>

#include "shoal/ops/paged_attention/paged_attention_cases.h"
#include "shoal/ops/paged_attention/paged_attention_rejections.h"

namespace shoal {
namespace {

using paged_cases::Case;
using paged_cases::get;
using paged_cases::Rejection;
using paged_cases::rejections;
using paged_cases::Rotary;
using paged_cases::run;
using paged_cases::set;
using paged_cases::Step;
using paged_cases::three_sequences;

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

// ---- what must not change a bit ----

// A sequence in steps of the given lengths. The inputs are those of the one-step case, whatever the chunks.
std::vector<uint8_t> in_chunks(const Case& whole, const std::vector<int64_t>& chunks, cpu::Isa isa,
                               cpu::ThreadPool& pool, std::vector<uint8_t>& cache) {
  Step s(whole);
  const int32_t past = s.past[0];
  const PagedAttentionArgs all = s.args();
  int64_t begin = 0;
  for (const int64_t len : chunks) {
    PagedAttentionArgs a = all;
    std::vector<int32_t> cu = {0, static_cast<int32_t>(len)};
    std::vector<int32_t> now = {static_cast<int32_t>(past + begin)};
    a.cumulative_sequence_length = TensorView(cu.data(), DType::kI32, {2});
    a.past_seqlens = TensorView(now.data(), DType::kI32, {1});
    a.query = all.query.rows(begin, begin + len);
    if (all.key) {
      a.key = all.key.rows(begin, begin + len);
      a.value = all.value.rows(begin, begin + len);
    }
    a.output = all.output.rows(begin, begin + len);
    Workspace workspace(paged_attention_workspace_bytes(a, pool.num_threads()));
    paged_attention(a, {&pool, &workspace, isa, "cpu"});
    begin += len;
  }
  EXPECT_EQ(begin, s.num_tokens);
  cache = s.cache_bytes();
  return s.output;
}

std::vector<Case> exact_cases() {
  std::vector<Case> cases;
  Case c = {.name = "f16", .num_heads = 6, .num_kv_heads = 2, .past = {70}, .lens = {200}};
  cases.push_back(c);
  c = {.name = "window_sink",
       .type = DType::kF16,
       .past = {30},
       .lens = {180},
       .window = 50,
       .sink = true,
       .packed = true};
  c.rotary = Rotary::kHalf;
  cases.push_back(c);
  c = {.name = "int8", .k_cache = DType::kI8, .v_cache = DType::kI8, .k_quant = "PER_CHANNEL", .v_quant = "PER_TENSOR"};
  c.num_heads = 3;
  c.num_kv_heads = 1;
  c.past = {0};
  c.lens = {150};
  cases.push_back(c);
  c.name = "int4_f8";
  c.k_cache = DType::kU8;
  c.v_cache = DType::kF8E4M3;
  c.softcap = 4.0f;
  c.head_dim = 40;
  cases.push_back(c);
  cases.push_back({.name = "spans", .num_heads = 3, .num_kv_heads = 1, .head_dim = 16, .past = {2000}, .lens = {120}});
  cases.push_back({.name = "f32_mha",
                   .k_cache = DType::kF32,
                   .v_cache = DType::kBF16,
                   .num_heads = 2,
                   .num_kv_heads = 2,
                   .head_dim = 32,
                   .past = {1000},
                   .lens = {90}});
  return cases;
}

class PagedAttentionExact : public testing::TestWithParam<Case> {};

TEST_P(PagedAttentionExact, ChunksAndThreads) {
  const int64_t n = GetParam().lens[0];
  const std::vector<std::vector<int64_t>> chunkings = {{n},
                                                       {1, 2, 3, 4, 5, n - 15},
                                                       {n / 2, n - n / 2},
                                                       {64, n - 65, 1},
                                                       std::vector<int64_t>(static_cast<size_t>(n), 1)};
  for (const cpu::Isa isa : cpu::available_isas()) {
    cpu::ThreadPool one(1);
    std::vector<uint8_t> cache;
    const std::vector<uint8_t> expected = in_chunks(GetParam(), {n}, isa, one, cache);
    for (size_t i = 0; i < chunkings.size(); ++i) {
      // Every division on one thread, two of them on two, and on three where long spans are computed apart.
      for (const int num_threads : {1, 2, 3}) {
        if (num_threads > 1 && (i + static_cast<size_t>(num_threads)) % 3 != 0) {
          continue;
        }
        cpu::ThreadPool pool(num_threads);
        std::vector<uint8_t> other;
        EXPECT_EQ(in_chunks(GetParam(), chunkings[i], isa, pool, other), expected)
            << cpu::to_string(isa) << ", " << num_threads << " threads, " << chunkings[i].size() << " chunks";
        EXPECT_TRUE(other == cache);
      }
    }
  }
}

// The rows of a sequence alone, and between neighbours on other pages.
TEST_P(PagedAttentionExact, NeighboursAndPages) {
  cpu::ThreadPool pool(2);
  for (const cpu::Isa isa : cpu::available_isas()) {
    Step alone(GetParam());
    run(alone, alone.args(), "cpu", isa, pool);
    Case wide = GetParam();
    wide.past = {5, GetParam().past[0], 0};
    wide.lens = {3, GetParam().lens[0], 2};
    wide.seed = 77;  // also another order of pages
    Step s(wide);
    s.k_scale = std::move(Step(GetParam()).k_scale);
    s.v_scale = std::move(Step(GetParam()).v_scale);
    s.sink = std::move(Step(GetParam()).sink);
    const Step source(GetParam());
    const auto copy_rows = [&](const Tensor& to, const Tensor& from) {
      if (from.view()) {
        std::memcpy(to.view().rows(3, 3 + source.num_tokens).data, from.view().data, from.view().num_bytes());
      }
    };
    copy_rows(s.query, source.query);
    copy_rows(s.key, source.key);
    copy_rows(s.value, source.value);
    for (int64_t pos = 0; pos < source.past[0]; ++pos) {
      for (int64_t kv_head = 0; kv_head < s.c.num_kv_heads; ++kv_head) {
        for (const auto member : {&Step::k_pool, &Step::v_pool}) {
          std::memcpy(s.head_of(s.*member, s.slot_of(1, pos), kv_head),
                      source.head_of(source.*member, source.slot_of(0, pos), kv_head),
                      static_cast<size_t>((s.*member).view().dim(3)) * size_of((s.*member).view().dtype));
        }
      }
    }
    run(s, s.args(), "cpu", isa, pool);
    const std::vector<float> all = s.result();
    const std::vector<float> expected = alone.result();
    const auto width = static_cast<std::ptrdiff_t>(s.c.num_heads * s.v_dim);
    const std::vector<float> rows(all.begin() + 3 * width, all.end() - 2 * width);
    EXPECT_EQ(rows, expected) << cpu::to_string(isa);
  }
}

TEST_P(PagedAttentionExact, Metadata) {
  cpu::ThreadPool pool(2);
  for (const cpu::Isa isa : cpu::available_isas()) {
    Step plain(GetParam());
    run(plain, plain.args(), "cpu", isa, pool);
    const int32_t q = GetParam().lens[0];
    const int32_t kv = q + GetParam().past[0];
    for (std::vector<int32_t> bounds :
         {std::vector<int32_t>{q, kv}, {q, kv, kv}, {0, 0}, {0, 0, 0}, {1 << 20, 1 << 20}, {1 << 20, 1 << 20, 1}}) {
      Step s(GetParam());
      PagedAttentionArgs a = s.args();
      a.attention_metadata = TensorView(bounds.data(), DType::kI32, {static_cast<int64_t>(bounds.size())});
      run(s, a, "cpu", isa, pool);
      EXPECT_EQ(s.output, plain.output);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, PagedAttentionExact, testing::ValuesIn(exact_cases()),
                         [](const auto& test) { return test.param.name; });

// A window over recycled pages: ceil(W / S) + 1 of them, evicted entries -1, against a cache that keeps everything.
TEST(PagedAttentionRolling, WindowEqualsFullCache) {
  for (const bool quantized : {false, true}) {
    for (const int64_t window : {int64_t{20}, int64_t{33}, int64_t{1000}}) {
      Case c = {.num_heads = 4, .num_kv_heads = 2, .head_dim = 16, .page_size = 16, .past = {0}, .lens = {150}};
      c.window = window;
      c.sink = true;
      if (quantized) {
        c.k_cache = c.v_cache = DType::kI8;
        c.k_quant = c.v_quant = "PER_CHANNEL";
      }
      for (const cpu::Isa isa : cpu::available_isas()) {
        cpu::ThreadPool pool(2);
        std::vector<uint8_t> unused;
        const std::vector<uint8_t> expected = in_chunks(c, std::vector<int64_t>(150, 1), isa, pool, unused);
        Step s(c);
        const PagedAttentionArgs all = s.args();
        const int64_t num_live = std::min<int64_t>(ceil_div(window, c.page_size) + 1, s.num_pages);
        std::vector<int32_t> table(static_cast<size_t>(s.num_columns), -1);
        for (int64_t t = 0; t < 150; ++t) {
          PagedAttentionArgs a = all;
          const int64_t column = t / c.page_size;
          table[static_cast<size_t>(column)] = static_cast<int32_t>(column % num_live);
          if (column >= num_live) {
            table[static_cast<size_t>(column - num_live)] = -1;
          }
          std::vector<int32_t> cu = {0, 1};
          std::vector<int32_t> past = {static_cast<int32_t>(t)};
          std::vector<int32_t> slot = {
              static_cast<int32_t>(table[static_cast<size_t>(column)] * c.page_size + t % c.page_size)};
          a.block_table = TensorView(table.data(), DType::kI32, {1, s.num_columns});
          a.cumulative_sequence_length = TensorView(cu.data(), DType::kI32, {2});
          a.past_seqlens = TensorView(past.data(), DType::kI32, {1});
          a.slot_mapping = TensorView(slot.data(), DType::kI32, {1});
          a.query = all.query.rows(t, t + 1);
          a.key = all.key.rows(t, t + 1);
          a.value = all.value.rows(t, t + 1);
          a.output = all.output.rows(t, t + 1);
          Workspace workspace(paged_attention_workspace_bytes(a, pool.num_threads()));
          paged_attention(a, {&pool, &workspace, isa, "cpu"});
        }
        EXPECT_EQ(s.output, expected) << window;
      }
    }
  }
}

// ---- cache bytes worked by hand ----

// One token, one KV head of 16 channels, every variant: the bytes of its K row.
std::vector<uint8_t> stored_row(DType cache, const std::vector<float>& x, const std::vector<float>& scale) {
  std::vector<uint8_t> first;
  std::vector<std::pair<std::string, cpu::Isa>> variants = {{"ref", cpu::Isa::kScalar}};
  for (const cpu::Isa isa : cpu::available_isas()) {
    variants.emplace_back("cpu", isa);
  }
  for (const auto& [variant, isa] : variants) {
    Case c = {.k_cache = cache, .v_cache = cache, .num_heads = 1, .num_kv_heads = 1, .head_dim = 16, .page_size = 16};
    c.past = {0};
    c.lens = {1};
    c.k_quant = c.v_quant = scale.size() == 1 ? "PER_TENSOR" : "PER_CHANNEL";
    Step s(c);
    std::copy(scale.begin(), scale.end(), s.k_scale.span<float>().begin());
    for (int64_t i = 0; i < 16; ++i) {
      set(s.key, i, x[static_cast<size_t>(i)]);
    }
    cpu::ThreadPool pool(1);
    run(s, s.args(), variant, isa, pool);
    const auto* row = reinterpret_cast<const uint8_t*>(s.head_of(s.k_pool, s.slot_of(0, 0), 0));
    const std::vector<uint8_t> bytes(row, row + s.k_pool.view().dim(3));
    if (first.empty()) {
      first = bytes;
    }
    EXPECT_EQ(bytes, first) << variant << " " << cpu::to_string(isa);
  }
  return first;
}

TEST(PagedAttentionBytes, Int4TiesAndSaturation) {
  const std::vector<float> x = {2.5f, -2.5f, 1.5f, -1.5f, 0.5f, -0.5f, -9.0f, 8.0f,
                                7.0f, -8.0f, 0.0f, 3.49f, 1.0f, -7.5f, 6.5f,  -0.0f};
  // Codes + 8: 10 6 10 6 8 8 0 15 15 0 8 11 9 0 14 8
  EXPECT_EQ(stored_row(DType::kU8, x, {1.0f}), (std::vector<uint8_t>{0x6a, 0x6a, 0x88, 0xf0, 0x0f, 0xb8, 0x09, 0x8e}));
  EXPECT_EQ(stored_row(DType::kU8, std::vector<float>(16, 0.0f), {1.0f}), std::vector<uint8_t>(8, 0x88));
  EXPECT_EQ(stored_row(DType::kU8, x, {0.0f}), std::vector<uint8_t>(8, 0x88));
  const std::vector<float> extremes = {0x1p-24f, -0x1p-24f, 1e10f, -1e10f, 1e10f, 0x1p-24f, 0, 0,
                                       0,        0,         0,     0,      0,     0,        0, 0};
  EXPECT_EQ(stored_row(DType::kU8, extremes, {1e-6f}),
            (std::vector<uint8_t>{0x88, 0x0f, 0x8f, 0x88, 0x88, 0x88, 0x88, 0x88}));
}

TEST(PagedAttentionBytes, Int8DividesAndSaturates) {
  std::vector<float> x = {2.5f,  -2.5f,  0.5f, 1.5f,  127.5f, 126.5f, -128.5f, -1000.0f,
                          1e30f, -1e30f, 0.0f, -0.0f, 3.0f,   -3.0f,  64.0f,   100.49f};
  const auto code = [](int v) { return static_cast<uint8_t>(static_cast<int8_t>(v)); };
  EXPECT_EQ(stored_row(DType::kI8, x, {1.0f}),
            (std::vector<uint8_t>{code(2), code(-2), 0, 2, 127, 126, code(-128), code(-128), 127, code(-128), 0, 0, 3,
                                  code(-3), 64, 100}));
  // A channel with scale 0 stores 0, a negative scale turns the sign, a subnormal one saturates.
  std::vector<float> scales(16, 1.0f);
  scales[0] = 0.0f;
  scales[1] = -1.0f;
  scales[2] = 1e-40f;
  scales[3] = std::numeric_limits<float>::infinity();
  const std::vector<uint8_t> row = stored_row(DType::kI8, x, scales);
  EXPECT_EQ(row[0], 0);
  EXPECT_EQ(row[1], 2);
  EXPECT_EQ(row[2], 127);
  EXPECT_EQ(row[3], 0);
  // x / s and x * (1 / s) give other codes here: 10.5 scales of 0.1f are just below or above the tie.
  testkit::Random random(5);
  int num_differences = 0;
  for (int round = 0; round < 60; ++round) {
    const float s = random.uniform(0.001f, 0.1f);
    for (float& v : x) {
      v = s * (static_cast<float>(random.integer(-100, 100)) + 0.5f);
    }
    const std::vector<uint8_t> bytes = stored_row(DType::kI8, x, {s});
    for (size_t i = 0; i < x.size(); ++i) {
      EXPECT_EQ(bytes[i], code(static_cast<int>(std::nearbyint(x[i] / s))));
      num_differences += bytes[i] != code(static_cast<int>(std::nearbyint(x[i] * (1.0f / s))));
    }
  }
  EXPECT_GT(num_differences, 0) << "the case does not tell division from multiplication";
}

TEST(PagedAttentionBytes, Float8) {
  const std::vector<float> x = {0.0f,      1.0f,  -1.0f, 448.0f, 500.0f, -1e30f,  0x1p-9f, 0x1p-10f,
                                0x1.8p-9f, 17.0f, 19.0f, 18.0f,  464.0f, 1.0625f, 1.1875f, 0x1p-6f};
  EXPECT_EQ(stored_row(DType::kF8E4M3, x, {1.0f}),
            (std::vector<uint8_t>{0x00, 0x38, 0xb8, 0x7e, 0x7e, 0xfe, 0x01, 0x00, 0x02, 0x58, 0x5a, 0x59, 0x7e, 0x38,
                                  0x3a, 0x08}));
  EXPECT_EQ(stored_row(DType::kF8E4M3, x, {0.0f}), std::vector<uint8_t>(16, 0x00));
}

// ---- scales far from ordinary ----

void expect_finite_and_right(Step& s) {
  cpu::ThreadPool pool(2);
  run(s, s.args(), "ref", cpu::Isa::kScalar, pool);
  const std::vector<float> expected = s.result();
  for (const cpu::Isa isa : cpu::available_isas()) {
    run(s, s.args(), "cpu", isa, pool);
    for (const float x : s.result()) {
      ASSERT_TRUE(std::isfinite(x)) << cpu::to_string(isa);
    }
    const auto result = testkit::compare(s.result(), expected, 1e-4, 1e-5);
    EXPECT_TRUE(result) << result.text;
  }
}

TEST(PagedAttentionScales, Extremes) {
  Case c = {.k_cache = DType::kI8, .v_cache = DType::kI8, .k_quant = "PER_CHANNEL", .v_quant = "PER_CHANNEL"};
  c.past = {70};
  c.lens = {3};
  {  // a spread of 1e8
    Step s(c);
    for (int64_t i = 0; i < s.k_scale.view().num_elements(); ++i) {
      s.k_scale.span<float>()[static_cast<size_t>(i)] = i % 2 == 0 ? 1e-10f : 1e-2f;
    }
    expect_finite_and_right(s);
  }
  for (const float scale : {0.0f, -0.01f, 1e-40f}) {
    Step s(c);
    for (float& x : s.k_scale.span<float>()) {
      x = scale;
    }
    for (float& x : s.v_scale.span<float>()) {
      x = scale;
    }
    expect_finite_and_right(s);
  }
  for (const char* quant : {"PER_TENSOR", "PER_CHANNEL"}) {  // the largest scale over codes of 0
    Case large = c;
    large.k_quant = quant;
    large.past = {0};
    large.lens = {5};
    large.scale = 2.0f;
    Step s(large);
    for (float& x : s.k_scale.span<float>()) {
      x = std::numeric_limits<float>::max();
    }
    expect_finite_and_right(s);
  }
}

TEST(PagedAttentionScales, AnyShapeOfChannelScales) {
  Case c = {.k_cache = DType::kI8, .v_cache = DType::kI8, .k_quant = "PER_CHANNEL", .v_quant = "PER_TENSOR"};
  Step plain(c);
  cpu::ThreadPool pool(1);
  run(plain, plain.args(), {}, cpu::default_isa(), pool);
  for (const std::vector<int64_t>& shape : {std::vector<int64_t>{2, 64}, {128}, {1, 2, 1, 64}}) {
    Step s(c);
    PagedAttentionArgs a = s.args();
    a.k_scale = TensorView(s.k_scale.view().data, DType::kF32, shape);
    a.v_scale = TensorView(s.v_scale.view().data, DType::kF32, {1, 1, 1});
    run(s, a, {}, cpu::default_isa(), pool);
    EXPECT_EQ(s.output, plain.output);
  }
}

// ---- rejections ----

TEST(PagedAttentionRejects, EverythingByName) {
  cpu::ThreadPool pool(1);
  for (const Rejection& rejection : rejections()) {
    Step s(rejection.c);
    const std::vector<uint8_t> before = s.cache_bytes();
    PagedAttentionArgs a = s.args();
    rejection.change(s, a);
    s.poison_output();
    const std::vector<uint8_t> poisoned = s.output;
    Workspace workspace(1 << 20);
    try {
      paged_attention(a, {&pool, &workspace, cpu::default_isa(), {}});
      ADD_FAILURE() << "accepted: " << rejection.expected;
    } catch (const Error& error) {
      const std::string message = error.what();
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      EXPECT_EQ(message.rfind("paged_attention: ", 0), 0u) << message;
      EXPECT_NE(message.find(rejection.expected), std::string::npos) << message << "\nexpected: " << rejection.expected;
    }
    EXPECT_EQ(s.cache_bytes(), before);
    EXPECT_EQ(s.output, poisoned);
  }
}

TEST(PagedAttentionRejects, UnknownVariantAndMissingWorkspace) {
  Step s(three_sequences());
  cpu::ThreadPool pool(1);
  const auto message_of = [&](const OpContext& context) {
    try {
      paged_attention(s.args(), context);
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string("accepted");
  };
  Workspace workspace(1 << 20);
  EXPECT_EQ(message_of({&pool, &workspace, cpu::default_isa(), "sm90"}),
            "paged_attention: variant 'sm90' is unknown, expected cpu or ref");
  EXPECT_EQ(message_of({&pool, nullptr, cpu::default_isa(), {}}),
            "paged_attention: a workspace is required by the variant cpu");
}
}  // namespace
}  // namespace shoal
