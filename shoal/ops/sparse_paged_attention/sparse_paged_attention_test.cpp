// sparse_paged_attention against f64 by the formulas: every source of a row, the table of tests of the contract, what
// must not change a bit, malformed contents, every rejection.
#include <gtest/gtest.h>

#include "shoal/ops/paged_attention/paged_attention.h"
#include "shoal/ops/sparse_paged_attention/sparse_paged_attention_cases.h"
#include "testkit/expect_error.h"

namespace shoal {
namespace {

using sparse_paged_cases::Case;
using sparse_paged_cases::run;
using sparse_paged_cases::Step;
using testkit::expect_error;
using Ints = std::vector<int32_t>;

constexpr int32_t kMin = std::numeric_limits<int32_t>::min();
constexpr int32_t kMax = std::numeric_limits<int32_t>::max();

struct Tolerance {
  double rtol;
  double atol;
};
// The contract's; f32 far below it.
Tolerance tolerance(DType type) {
  return type == DType::kF32   ? Tolerance{2e-5, 1e-5}
         : type == DType::kF16 ? Tolerance{2e-3, 2e-3}
                               : Tolerance{5e-3, 6e-3};
}

// Runs a case on every instruction set and compares output and caches with the formulas.
void check(const Case& c) {
  SCOPED_TRACE(testing::Message() << c);
  cpu::ThreadPool pool(2);
  for (const cpu::Isa isa : cpu::available_isas()) {
    Step step(c);
    const Step::Expected expected = step.expected();
    run(step, step.args(), isa, pool);
    const Tolerance tol = tolerance(c.type);
    const auto result = testkit::compare(step.result(), expected.output, tol.rtol, tol.atol);
    EXPECT_TRUE(result) << cpu::to_string(isa) << ": " << result.text;
    EXPECT_TRUE(step.intact());
    const bool exact = !c.norm && c.rotary == 0;  // else an ulp of T, or one code
    const auto k_values = step.cache_values(step.k_cache, true);
    const auto v_values = step.cache_values(step.v_cache, false);
    for (size_t i = 0; i < k_values.size(); ++i) {
      const bool same = std::isnan(expected.k_cache[i]) ? std::isnan(k_values[i])
                        : exact                         ? k_values[i] == expected.k_cache[i]
                                : std::abs(k_values[i] - expected.k_cache[i]) <= 0.051 + std::abs(k_values[i]) / 100;
      ASSERT_TRUE(same) << "key_cache " << i << ": " << k_values[i] << ", expected " << expected.k_cache[i];
      ASSERT_TRUE(v_values[i] == expected.v_cache[i] || (std::isnan(v_values[i]) && std::isnan(expected.v_cache[i])))
          << "value_cache " << i;
    }
  }
}

std::vector<uint8_t> output_of(Step& step, cpu::Isa isa, int num_threads = 2) {
  cpu::ThreadPool pool(num_threads);
  run(step, step.args(), isa, pool);
  const auto* bytes = step.output.as<uint8_t>();
  return {bytes, bytes + static_cast<size_t>(step.num_tokens * step.output.stride(0)) * size_of(step.c.type)};
}

// ---- features ----

std::vector<Case> feature_cases() {
  std::vector<Case> cases;
  const auto add = [&](Case c, const std::string& name) {
    c.name = name;
    c.seed = cases.size() + 1;
    cases.push_back(c);
  };
  // Two sequences; positions before, of and after the step, garbage, duplicates, unmapped pages (columns 3 and 5).
  Case base;
  base.table = {{2, 0, 4, -1, 3, -1}, {1, 5, 99, kMin, -1, -1}};
  base.past = {30, 3};
  base.lens = {3, 4};
  base.auxiliary_lengths = {5, 2};
  base.selected = {
      {0, 30, 31, 32, 5, 5, -1, 1000000, kMin, kMax, 40, 50}, {1, 3, 4, 6, 6, 20, 33}, {}, {2, 2, 2, 3}, {-1, -7}};
  add(base, "selected_main");
  for (const int variant : {0, 1, 2, 3, 4, 5, 6, 7}) {
    Case c = base;
    c.local = variant % 2 == 1;
    c.auxiliary = variant / 2 > 0;
    c.shared = variant / 2 == 2;
    c.auxiliary_heads = variant / 2 == 3 ? c.num_kv_heads : 1;
    c.window = variant % 3 == 0 ? -1 : 4;
    add(c, concat("mode_", variant));
    c.causal = false;
    add(c, concat("mode_", variant, "_bidirectional"));
    c.cache = DType::kI8;
    c.quant = variant % 2 ? "PER_CHANNEL" : "PER_TENSOR";
    c.type = variant % 3 == 0 ? DType::kBF16 : variant % 3 == 1 ? DType::kF16 : DType::kF32;
    c.sink = true;
    add(c, concat("mode_", variant, "_int8"));
  }
  for (const DType type : {DType::kF32, DType::kF16, DType::kBF16}) {
    for (const int rotary : {0, 1, 2}) {
      Case c = base;
      c.type = type;
      c.cache = rotary == 2 ? DType::kF32 : type;
      c.rotary = rotary;
      c.norm = rotary != 1;
      c.packed = rotary == 2;
      c.softcap = rotary == 0 ? 1.5f : 0.0f;
      c.scale = rotary == 0 ? 0.3f : 0.0f;
      c.sink = rotary == 1;
      c.head_dim = 40;
      c.rotary_offset = rotary == 2 ? 16 : 0;
      c.local = true;
      c.window = 6;
      c.padding = 3;
      add(c, concat(to_string(type), "_rotary", rotary));
    }
  }
  for (const int64_t group : {1, 2, 3, 7, 12, 20}) {
    Case c = base;
    c.num_heads = 2 * group;
    c.head_dim = 24;
    c.local = group % 2 == 0;
    add(c, concat("group_", group));
  }
  Case slots = base;
  slots.slots = {35, -1, 35, 80, 96, kMax, kMin};  // 35 twice; 80: a page of nobody; from 96 on beyond the pool
  slots.local = true;
  add(slots, "slots");
  slots.causal = false;
  slots.cache = DType::kI8;
  slots.quant = "PER_TENSOR";
  add(slots, "slots_int8");
  Case latent = base;
  latent.num_kv_heads = 1;
  latent.head_dim = 32;
  latent.v_head_dim = 9;
  latent.scale = 0.3f;
  latent.rotary = 2;
  latent.rotary_dim = 16;
  latent.rotary_offset = 16;
  for (const DType cache : {DType::kF32, DType::kF16, DType::kBF16, DType::kI8}) {
    latent.type = DType::kF32;
    latent.cache = cache;
    latent.quant = cache == DType::kI8 ? "PER_CHANNEL" : "NONE";
    add(latent, concat("latent_", static_cast<int>(cache)));
  }
  Case narrow = base;
  narrow.type = DType::kF32;
  add(narrow, "f16_under_f32");
  narrow.cache = DType::kBF16;
  narrow.local = true;
  add(narrow, "bf16_under_f32");
  Case by_head = base;
  by_head.by_head = true;
  add(by_head, "by_head");
  by_head.local = true;
  by_head.window = 2;
  add(by_head, "by_head_local");
  Case nothing = base;
  nothing.selected = {};
  nothing.sink = true;
  add(nothing, "no_selection");
  nothing.local = true;
  add(nothing, "local_only");
  Case odd = base;
  odd.lens = {0, 0};
  odd.past = {30, 0};
  add(odd, "no_tokens");
  return cases;
}

class SparsePagedAttention : public testing::TestWithParam<Case> {};

TEST_P(SparsePagedAttention, MatchesTheFormulas) { check(GetParam()); }

INSTANTIATE_TEST_SUITE_P(Features, SparsePagedAttention, testing::ValuesIn(feature_cases()),
                         [](const auto& test) { return test.param.name; });

// ---- the contract's table ----

Case production_case(int64_t rows) {
  Case c;
  c.num_heads = 24;
  c.num_kv_heads = 2;
  c.head_dim = 256;
  c.num_pages = 5;
  c.past = {15};
  c.lens = {static_cast<int32_t>(rows)};
  c.softcap = 2.0f;
  c.sink = true;
  c.window = 4;
  c.auxiliary_capacity = 259;
  c.auxiliary_lengths = {257};
  Ints all = {-1, 1000000};
  for (int32_t i = 0; i < 255; ++i) {
    all.push_back(i * 7 % 90);
  }
  c.selected = {all, Ints(all.begin(), all.begin() + 9), {}};
  return c;
}

class SparsePagedAttentionProduction : public testing::TestWithParam<int> {};

TEST_P(SparsePagedAttentionProduction, Geometry) {
  const int mode = GetParam();
  for (const int64_t rows : {1, 2, 3, 4, 6, 8, 32}) {
    Case c = production_case(rows);
    c.name = concat("mode ", mode, ", ", rows, " rows");
    c.local = mode % 2 == 1;
    c.auxiliary = mode / 2 > 0;
    c.shared = mode / 2 == 2;
    c.type = rows == 4 ? DType::kBF16 : rows == 6 ? DType::kF32 : DType::kF16;
    c.cache = c.type;
    check(c);
  }
}

INSTANTIATE_TEST_SUITE_P(Modes, SparsePagedAttentionProduction, testing::Range(0, 6));

TEST(SparsePagedAttentionTable, AliasedAppendIsExact) {
  Case c;
  c.selected = {{15}, {16}, {17}};
  Step step(c);
  for (int64_t i = 0; i < step.query.num_elements(); ++i) {
    write_element(c.type, step.query.data, i, 0.0f);
  }
  const Step::Expected expected = step.expected();
  cpu::ThreadPool pool(1);
  SparsePagedAttentionArgs a = step.args();
  a.key_cache_out = a.key_cache;
  a.value_cache_out = a.value_cache;
  run(step, a, cpu::default_isa(), pool);
  const std::vector<float> result = step.result();
  for (int64_t t = 0; t < 3; ++t) {
    for (int64_t i = 0; i < step.width; ++i) {
      const int64_t g = i / c.head_dim / 2;
      EXPECT_EQ(result[static_cast<size_t>(t * step.width + i)],
                read_element(c.type, step.value.data, t * step.kv_width + g * c.head_dim + i % c.head_dim));
    }
  }
  const auto k_values = step.cache_values(step.k_cache, true);
  for (size_t i = 0; i < k_values.size(); ++i) {
    ASSERT_TRUE(k_values[i] == expected.k_cache[i] || (std::isnan(k_values[i]) && std::isnan(expected.k_cache[i])));
  }
}

TEST(SparsePagedAttentionTable, UnalignedBuffers) {
  for (const bool auxiliary : {false, true}) {
    Case c = production_case(3);
    c.auxiliary = auxiliary;
    c.local = true;
    Step aligned(c);
    c.misaligned = 1;
    Step moved(c);
    for (const cpu::Isa isa : cpu::available_isas()) {
      EXPECT_EQ(output_of(aligned, isa), output_of(moved, isa));
    }
    EXPECT_TRUE(moved.intact());
  }
}

// The three answers to "is this token of the step readable": cached, dropped, dropped. The cached row differs from the
// token's own.
TEST(SparsePagedAttentionTable, SlotRules) {
  for (const DType cache : {DType::kF16, DType::kI8}) {
    Case c;
    c.cache = cache;
    c.quant = "PER_TENSOR";
    c.lens = {1};
    c.selected = {{15}};
    const auto value_of = [&](Ints slots, std::vector<Ints> table) {
      c.slots = std::move(slots);
      c.table = std::move(table);
      Step step(c);
      const Step::Expected expected = step.expected();
      cpu::ThreadPool pool(1);
      run(step, step.args(), cpu::default_isa(), pool);
      const auto result = testkit::compare(step.result(), expected.output, 2e-3, 2e-3);
      EXPECT_TRUE(result) << result.text;
      return step.result()[0];
    };
    const Ints row = {2, 0, 4, 1, 3, -1};
    const int32_t own_slot = 2 * 16 + 15;
    const float written = value_of({own_slot}, {row});
    const float cached = value_of({-1}, {row});
    EXPECT_NE(written, 0.0f);
    EXPECT_NE(cached, 0.0f);
    EXPECT_NE(written, cached);
    EXPECT_EQ(value_of({16 * 6}, {row}), 0.0f);                     // past the pool
    EXPECT_EQ(value_of({own_slot}, {{-1, 0, 4, 1, 3, -1}}), 0.0f);  // unmapped, although the slot was written
    EXPECT_EQ(value_of({5}, {row}), written);                       // elsewhere: still the token's own
  }
}

// int8: the token of this step is seen through its codes, those of the explicit slot.
TEST(SparsePagedAttentionTable, QuantisedCurrentToken) {
  for (const std::string quant : {"PER_TENSOR", "PER_CHANNEL"}) {
    Case c;
    c.cache = DType::kI8;
    c.type = DType::kF32;
    c.quant = quant;
    c.lens = {1};
    c.slots = {7};
    c.selected = {{15}};
    Step step(c);
    cpu::ThreadPool pool(1);
    run(step, step.args(), cpu::default_isa(), pool);
    const auto v_values = step.cache_values(step.v_cache, false);
    const std::vector<float> result = step.result();
    for (int64_t i = 0; i < step.width; ++i) {
      const int64_t channel = i / c.head_dim / 2 * c.head_dim + i % c.head_dim;
      const double x = read_element(c.type, step.value.data, channel);
      const auto n = static_cast<size_t>(7 * step.kv_width + channel);
      EXPECT_FLOAT_EQ(result[static_cast<size_t>(i)], static_cast<float>(v_values[n]));
      const double scale = step.channel_scales[static_cast<size_t>(quant == "PER_TENSOR" ? channel : 0)];
      EXPECT_LE(std::abs(v_values[n] - std::clamp(x, -128 * std::abs(scale), 127 * std::abs(scale))), std::abs(scale));
    }
  }
}

TEST(SparsePagedAttentionTable, Tiles) {
  for (const int32_t count : {63, 64, 65, 127, 128, 129, 257}) {
    for (const bool invalid_first : {false, true}) {
      Case c;
      c.name = concat(count, invalid_first ? " after a tile of nothing" : " candidates");
      c.head_dim = 32;
      c.past = {60};
      c.lens = {2};
      c.sink = invalid_first;
      Ints entries(invalid_first ? 64 : 0, -1);
      for (int32_t i = 0; i < count; ++i) {
        entries.push_back(i * 13 % 64);
      }
      c.selected = {entries, {}};
      check(c);
    }
  }
}

TEST(SparsePagedAttentionTable, SinkOnlyIsZero) {
  Case c;
  c.sink = true;
  c.selected = {{-1, 500}};
  Step step(c);
  output_of(step, cpu::default_isa());
  for (const float x : step.result()) {
    EXPECT_EQ(x, 0.0f);
    EXPECT_FALSE(std::signbit(x));
  }
}

TEST(SparsePagedAttentionTable, MoreThan65535Units) {
  Case c;
  c.num_heads = 2;
  c.num_kv_heads = 2;
  c.head_dim = 8;
  c.page_size = 64;
  c.num_pages = 600;
  c.table = {{}};
  for (int32_t i = 0; i < 520; ++i) {
    c.table[0].push_back(519 - i);
  }
  c.lens = {33000};
  c.past = {0};
  c.selected = {{0}, {1, 0}, {}};
  check(c);
}

// A call sees what the metadata holds now.
TEST(SparsePagedAttentionTable, ReplayWithOtherContents) {
  Case c;
  c.selected = {{1, 2, 3}, {4, 5, 6}, {0, 16, 15}};
  Step step(c);
  cpu::ThreadPool pool(1);
  run(step, step.args(), cpu::default_isa(), pool);
  step.counts = {1, 3, 2};
  step.indices = {9, -1, 3, 15, 0, 1, 17, 2, 8};
  const Step::Expected expected = step.expected();
  run(step, step.args(), cpu::default_isa(), pool);
  const auto result = testkit::compare(step.result(), expected.output, 2e-3, 2e-3);
  EXPECT_TRUE(result) << result.text;
}

// ---- what must not matter ----

// The prologue is paged_attention's, byte for byte; with everything selected so is the attention.
TEST(SparsePagedAttentionSame, CachesAndOutputOfPagedAttention) {
  for (const Case& feature : feature_cases()) {
    if (!feature.slots.empty() || feature.auxiliary || !feature.local || feature.lens[0] == 0) {
      continue;
    }
    SCOPED_TRACE(testing::Message() << feature);
    Case c = feature;
    c.selected = {};
    Step sparse(c);
    Step dense(c);
    cpu::ThreadPool pool(2);
    const SparsePagedAttentionArgs s = dense.args();
    PagedAttentionArgs a;
    a.output = s.output;
    a.query = s.query;
    a.key = s.key;
    a.value = s.value;
    a.key_cache = s.key_cache;
    a.value_cache = s.value_cache;
    a.cumulative_sequence_length = s.cumulative_sequence_length;
    a.past_seqlens = s.past_seqlens;
    a.block_table = s.block_table;
    a.cos_cache = s.cos_cache;
    a.sin_cache = s.sin_cache;
    a.head_sink = s.head_sink;
    a.q_norm_weight = s.q_norm_weight;
    a.k_norm_weight = s.k_norm_weight;
    a.k_scale = s.k_scale;
    a.v_scale = s.v_scale;
    a.num_heads = s.num_heads;
    a.kv_num_heads = s.kv_num_heads;
    a.scale = s.scale;
    a.softcap = s.softcap;
    a.local_window_size = s.local_window_size;
    a.is_causal = s.is_causal;
    a.do_rotary = s.do_rotary;
    a.rotary_interleaved = s.rotary_interleaved;
    a.rotary_offset = s.rotary_offset;
    a.k_quant_type = s.k_quant_type;
    a.v_quant_type = s.v_quant_type;
    Workspace workspace(paged_attention_workspace_bytes(a, pool.num_threads()));
    paged_attention(a, {&pool, &workspace, cpu::default_isa(), ""});
    run(sparse, sparse.args(), cpu::default_isa(), pool);
    EXPECT_TRUE(sparse.cache_bytes() == dense.cache_bytes());
    const Tolerance tol = tolerance(c.type);
    const auto result = testkit::compare(sparse.result(), dense.result(), tol.rtol, tol.atol);
    EXPECT_TRUE(result) << result.text;
  }
}

TEST(SparsePagedAttentionSame, ThreadsInvalidEntriesAndNeighbours) {
  for (const cpu::Isa isa : cpu::available_isas()) {
    for (const bool local : {false, true}) {
      Case c = production_case(5);
      c.num_heads = 6;
      c.head_dim = 32;
      c.local = local;
      Step one(c);
      const std::vector<uint8_t> expected = output_of(one, isa, 1);
      Step three(c);
      EXPECT_EQ(output_of(three, isa, 3), expected);
      // Entries that are not valid in between.
      Case sparse = c;
      for (Ints& row : sparse.selected) {
        Ints wide;
        for (const int32_t entry : row) {
          wide.insert(wide.end(), {-3, entry, 4000});
        }
        row = wide;
      }
      Step with_holes(sparse);
      EXPECT_EQ(output_of(with_holes, isa), expected);
      // A second sequence behind the first.
      Case pair = c;
      pair.lens = {5, 2};
      pair.past = {15, 0};
      pair.num_pages = 6;
      pair.table.push_back({5, -1, -1, -1, -1, -1});
      pair.auxiliary_lengths = {257, 1};
      Step two(pair);
      for (const auto& [to, from] : {std::pair{two.query, one.query}, {two.key, one.key}, {two.value, one.value}}) {
        std::memcpy(to.data, from.data, from.num_bytes());
      }
      std::memcpy(two.sink.data, one.sink.data, one.sink.num_bytes());
      for (const auto& [to, from] : {std::pair{two.k_cache, one.k_cache}, {two.v_cache, one.v_cache}}) {
        std::memcpy(to.data, from.data, from.num_bytes());
      }
      std::vector<uint8_t> both = output_of(two, isa);
      both.resize(expected.size());
      EXPECT_EQ(both, expected);
    }
  }
}

// The step token by token gives the bits of the whole step.
TEST(SparsePagedAttentionSame, Chunks) {
  for (const DType cache : {DType::kF16, DType::kI8}) {
    Case c;
    c.cache = cache;
    c.quant = "PER_CHANNEL";
    c.lens = {6};
    c.local = true;
    c.window = 3;
    c.rotary = 1;
    c.selected = {{0, 15, 16, 17, 18, 19, 20}, {3, 9, 16}};
    for (const cpu::Isa isa : cpu::available_isas()) {
      Step whole(c);
      const std::vector<uint8_t> expected = output_of(whole, isa);
      Step step(c);
      cpu::ThreadPool pool(1);
      const SparsePagedAttentionArgs all = step.args();
      for (int64_t t = 0; t < 6; ++t) {
        SparsePagedAttentionArgs a = all;
        Ints cu = {0, 1};
        Ints past = {static_cast<int32_t>(15 + t)};
        a.cumulative_sequence_length = TensorView(cu.data(), DType::kI32, {2});
        a.past_seqlens = TensorView(past.data(), DType::kI32, {1});
        for (const auto member :
             {&SparsePagedAttentionArgs::query, &SparsePagedAttentionArgs::key, &SparsePagedAttentionArgs::value,
              &SparsePagedAttentionArgs::output, &SparsePagedAttentionArgs::selected_indices,
              &SparsePagedAttentionArgs::selected_counts}) {
          a.*member = (all.*member).rows(t, t + 1);
        }
        run(step, a, isa, pool);
      }
      const auto* bytes = step.output.as<uint8_t>();
      EXPECT_TRUE(std::equal(expected.begin(), expected.end(), bytes));
      EXPECT_TRUE(step.cache_bytes() == whole.cache_bytes());
    }
  }
}

TEST(SparsePagedAttentionSame, MetadataAndStrides) {
  Case c = production_case(4);
  c.local = true;
  c.auxiliary = true;
  c.auxiliary_heads = 2;
  Step plain(c);
  const std::vector<uint8_t> expected = output_of(plain, cpu::default_isa());
  Step step(c);
  SparsePagedAttentionArgs a = step.args();
  Ints bounds = {1 << 20, 0, 1, 0, kMax};
  a.attention_metadata = TensorView(bounds.data(), DType::kI32, {5});
  // The auxiliary cache with its two head dimensions exchanged in memory and every second channel used.
  std::vector<uint16_t> wide(static_cast<size_t>(2 * a.auxiliary_key.num_elements()));
  TensorView turned = a.auxiliary_key;
  turned.data = wide.data();
  turned.strides[3] = 2;
  turned.strides[1] = 2 * c.head_dim;
  turned.strides[2] = 2 * c.head_dim * c.auxiliary_capacity;
  turned.strides[0] = 2 * turned.strides[2];
  for (int64_t row = 0; row < c.auxiliary_capacity; ++row) {
    for (int64_t i = 0; i < 2 * c.head_dim; ++i) {
      const int64_t to = row * turned.strides[1] + i / c.head_dim * turned.strides[2] + i % c.head_dim * 2;
      wide[static_cast<size_t>(to)] = a.auxiliary_key.as<uint16_t>()[row * a.auxiliary_key.stride(1) + i];
    }
  }
  a.auxiliary_key = turned;
  cpu::ThreadPool pool(1);
  run(step, a, cpu::default_isa(), pool);
  EXPECT_TRUE(std::equal(expected.begin(), expected.end(), step.output.as<uint8_t>()));
}

// ---- malformed contents ----

TEST(SparsePagedAttentionMalformed, OffsetsPastsCountsAndLengths) {
  Case c;
  c.table = {{2, 0, 4, 1, 3, -1}, {5, -1, -1, -1, -1, -1}};
  c.past = {15, 2};
  c.lens = {3, 2};
  c.auxiliary_lengths = {5, 5};
  c.selected = {{0, 15, 16, 1}};
  for (const bool auxiliary : {false, true}) {
    c.auxiliary = auxiliary;
    c.local = auxiliary;
    Step good(c);
    const std::vector<uint8_t> expected = output_of(good, cpu::default_isa());
    const size_t row_bytes = static_cast<size_t>(good.width) * size_of(c.type);
    const auto is_zero = [&](const std::vector<uint8_t>& bytes, size_t from, size_t to) {
      return std::all_of(bytes.begin() + static_cast<std::ptrdiff_t>(from * row_bytes),
                         bytes.begin() + static_cast<std::ptrdiff_t>(to * row_bytes), [](uint8_t x) { return x == 0; });
    };
    const auto same = [&](const std::vector<uint8_t>& bytes, size_t from, size_t to) {
      return std::equal(bytes.begin() + static_cast<std::ptrdiff_t>(from * row_bytes),
                        bytes.begin() + static_cast<std::ptrdiff_t>(to * row_bytes),
                        expected.begin() + static_cast<std::ptrdiff_t>(from * row_bytes));
    };
    for (const int32_t wrong : {-1, 2, 6, kMin, kMax}) {  // the end of the second sequence
      Step step(c);
      step.cu = {0, 3, wrong};
      const auto bytes = output_of(step, cpu::default_isa());
      EXPECT_TRUE(same(bytes, 0, 3) && is_zero(bytes, 3, 5)) << wrong;
    }
    for (const int32_t wrong : {-1, kMin}) {
      Step step(c);
      step.c.past[1] = wrong;
      const auto bytes = output_of(step, cpu::default_isa());
      EXPECT_TRUE(same(bytes, 0, 3) && is_zero(bytes, 3, 5)) << wrong;
    }
    Step far(c);  // every position of the step is past the table: nothing is written, nothing of it is seen
    far.c.past[1] = kMax;
    const std::vector<uint8_t> before = far.cache_bytes();
    const auto bytes = output_of(far, cpu::default_isa());
    EXPECT_TRUE(same(bytes, 0, 3));
    for (const int32_t count : {-5, kMin, 4, 5, kMax}) {
      Step step(c);
      step.counts = {4, 4, 4, 4, count};
      const auto other = output_of(step, cpu::default_isa());
      EXPECT_TRUE(same(other, 0, 4)) << count;
      EXPECT_EQ(same(other, 4, 5), count > 0) << count;
    }
    for (const int32_t length : {-3, 0, 8, kMax}) {
      Step step(c);
      step.c.auxiliary_lengths[1] = length;
      EXPECT_TRUE(same(output_of(step, cpu::default_isa()), 0, 3)) << length;
    }
    Step ids(c);
    std::replace(ids.table.begin() + 6, ids.table.end(), 5, kMax);
    EXPECT_TRUE(same(output_of(ids, cpu::default_isa()), 0, 3));
  }
}

// ---- rejections ----

struct Rejection {
  const char* expected;
  void (*change)(SparsePagedAttentionArgs&);
};

TensorView shaped(const TensorView& view, std::initializer_list<int64_t> shape) {
  return TensorView(view.data, view.dtype, shape);
}

TensorView typed(const TensorView& view, DType type) { return TensorView(view.data, type, view.dims()); }

TEST(SparsePagedAttentionRejects, ByNameAndWritesNothing) {
  using A = SparsePagedAttentionArgs;
  static Ints bounds = {1, 1, 1, 1, 1, 1};
  const std::vector<Rejection> main = {
      {"sparse_paged_attention: num_heads is 0", [](A& a) { a.num_heads = 0; }},
      {"kv_num_heads is 0", [](A& a) { a.kv_num_heads = 0; }},
      {"num_heads is 4, expected a multiple of kv_num_heads = 3", [](A& a) { a.kv_num_heads = 3; }},
      {"scale is", [](A& a) { a.scale = std::numeric_limits<float>::infinity(); }},
      {"softcap is", [](A& a) { a.softcap = -1.0f; }},
      {"qk_norm_epsilon is 0", [](A& a) { a.qk_norm_epsilon = 0.0f; }},
      {"rotary_offset is 4", [](A& a) { a.rotary_offset = 4; }},
      {"attention_mode is 'dense', expected selected_only or local_plus_selected",
       [](A& a) { a.attention_mode = "dense"; }},
      {"selected_kv_source is 'both', expected main or auxiliary", [](A& a) { a.selected_kv_source = "both"; }},
      {"auxiliary_cache_layout is 'paged', expected contiguous", [](A& a) { a.auxiliary_cache_layout = "paged"; }},
      {"kv_cache_layout is 'LATENT', expected SEPARATE", [](A& a) { a.kv_cache_layout = "LATENT"; }},
      {"selected_indices has shape [3, 1, 3], expected [num_tokens = 3, max_selected_entries]",
       [](A& a) {
         a.selected_indices = shaped(a.selected_indices, {a.selected_indices.dim(0), 1, a.selected_indices.dim(1)});
       }},
      {"query is required", [](A& a) { a.query = {}; }},
      {"query has type int32", [](A& a) { a.query = typed(a.query, DType::kI32); }},
      {"key is required when value is given", [](A& a) { a.key = {}; }},
      {"value is required when key is given", [](A& a) { a.value = {}; }},
      {"key_cache is required", [](A& a) { a.key_cache = {}; }},
      {"value_cache is required", [](A& a) { a.value_cache = {}; }},
      {"key_cache has type bfloat16, expected float16 or int8 or float32",
       [](A& a) { a.key_cache = typed(a.key_cache, DType::kBF16); }},
      {"key_cache has type uint8", [](A& a) { a.key_cache = typed(a.key_cache, DType::kU8); }},
      {"value_cache has type bfloat16, expected float16 as key_cache",
       [](A& a) { a.value_cache = typed(a.value_cache, DType::kBF16); }},
      {"k_quant_type is NONE",
       [](A& a) {
         a.key_cache = typed(a.key_cache, DType::kI8);
         a.value_cache = typed(a.value_cache, DType::kI8);
       }},
      {"k_scale is required",
       [](A& a) {
         a.key_cache = typed(a.key_cache, DType::kI8);
         a.value_cache = typed(a.value_cache, DType::kI8);
         a.k_quant_type = "PER_TENSOR";
       }},
      {"v_quant_type is PER_CHANNEL, expected NONE", [](A& a) { a.v_quant_type = "PER_CHANNEL"; }},
      {"k_scale must be absent", [](A& a) { a.k_scale = TensorView(bounds.data(), DType::kF32, {1}); }},
      {"block_size (key_cache dimension 1) is 8",
       [](A& a) {
         a.key_cache = shaped(a.key_cache, {12, 8, 2, 16});
         a.value_cache = shaped(a.value_cache, {12, 8, 2, 16});
       }},
      {"key_cache must be contiguous", [](A& a) { a.key_cache.strides[0] += 1; }},
      {"block_table has shape [6, 1]",
       [](A& a) {
         a.block_table = shaped(a.block_table, {6, 1});
       }},
      {"past_seqlens is required", [](A& a) { a.past_seqlens = {}; }},
      {"slot_mapping has shape [2]", [](A& a) { a.slot_mapping = shaped(a.selected_counts, {2}); }},
      {"cos_cache and sin_cache are required with do_rotary", [](A& a) { a.do_rotary = true; }},
      {"head_sink has shape [3]", [](A& a) { a.head_sink = shaped(a.query, {3}); }},
      {"selected_indices is required", [](A& a) { a.selected_indices = {}; }},
      {"selected_indices has shape [9], expected", [](A& a) { a.selected_indices = shaped(a.selected_indices, {9}); }},
      {"selected_indices has shape [2, 3], expected [num_tokens = 3",
       [](A& a) {
         a.selected_indices = shaped(a.selected_indices, {2, 3});
       }},
      {"selected_indices has type int64", [](A& a) { a.selected_indices = typed(a.selected_indices, DType::kI64); }},
      {"selected_counts is required", [](A& a) { a.selected_counts = {}; }},
      {"selected_counts has shape [1, 3]",
       [](A& a) {
         a.selected_counts = shaped(a.selected_counts, {1, 3});
       }},
      {"selected_counts has shape [2]", [](A& a) { a.selected_counts = shaped(a.selected_counts, {2}); }},
      {"auxiliary_key must be absent with selected_kv_source main", [](A& a) { a.auxiliary_key = a.key_cache; }},
      {"auxiliary_value must be absent with selected_kv_source main", [](A& a) { a.auxiliary_value = a.key_cache; }},
      {"auxiliary_lengths must be absent with selected_kv_source main",
       [](A& a) { a.auxiliary_lengths = a.past_seqlens; }},
      {"auxiliary_key is required with selected_kv_source auxiliary", [](A& a) { a.selected_kv_source = "auxiliary"; }},
      {"attention_metadata has 3 elements, expected 5",
       [](A& a) { a.attention_metadata = TensorView(bounds.data(), DType::kI32, {3}); }},
      {"attention_metadata has 2 dimensions",
       [](A& a) {
         a.attention_metadata = TensorView(bounds.data(), DType::kI32, {5, 1});
       }},
      {"attention_metadata[2] is -7",
       [](A& a) {
         static Ints negative = {1, 1, -7, 1, 1};
         a.attention_metadata = TensorView(negative.data(), DType::kI32, {5});
       }},
      {"key_cache_out must be key_cache itself", [](A& a) { a.key_cache_out = a.value_cache; }},
      {"value_cache_out must be value_cache itself", [](A& a) { a.value_cache_out = a.key_cache; }},
      {"output is required", [](A& a) { a.output = {}; }},
      {"output has shape [3, 32]",
       [](A& a) {
         a.output = shaped(a.output, {3, 32});
       }},
      {"selected_counts is on another device", [](A& a) { a.selected_counts.device.type = DeviceType::kCuda; }},
      {"block_table is on another device", [](A& a) { a.block_table.device.type = DeviceType::kCuda; }},
  };
  const std::vector<Rejection> auxiliary = {
      {"auxiliary_lengths is required with selected_kv_source auxiliary", [](A& a) { a.auxiliary_lengths = {}; }},
      {"auxiliary_value is required", [](A& a) { a.auxiliary_value = {}; }},
      {"auxiliary_value must be absent with auxiliary_kv_shared = 1", [](A& a) { a.auxiliary_kv_shared = true; }},
      {"auxiliary_key has shape [1, 7, 2, 8]",
       [](A& a) {
         a.auxiliary_key = shaped(a.auxiliary_key, {1, 7, 2, 8});
       }},
      {"auxiliary_key has shape [7, 1, 16]",
       [](A& a) {
         a.auxiliary_key = shaped(a.auxiliary_key, {7, 1, 16});
       }},
      {"auxiliary_key dimension 2 is 7, expected 1 or kv_num_heads = 2",
       [](A& a) {
         a.auxiliary_key = shaped(a.auxiliary_key, {1, 1, 7, 16});
       }},
      {"auxiliary_value has shape [1, 6, 1, 16]",
       [](A& a) {
         a.auxiliary_value = shaped(a.auxiliary_value, {1, 6, 1, 16});
       }},
      {"auxiliary_key has type bfloat16, expected float16",
       [](A& a) { a.auxiliary_key = typed(a.auxiliary_key, DType::kBF16); }},
      {"auxiliary_lengths has shape [2]", [](A& a) { a.auxiliary_lengths = shaped(a.auxiliary_lengths, {2}); }},
      {"auxiliary_key is on another device", [](A& a) { a.auxiliary_key.device.type = DeviceType::kCuda; }},
  };
  cpu::ThreadPool pool(1);
  for (const bool with_auxiliary : {false, true}) {
    for (const Rejection& rejection : with_auxiliary ? auxiliary : main) {
      SCOPED_TRACE(rejection.expected);
      Case c;
      c.selected = {{0, 1, 2}};
      c.auxiliary = with_auxiliary;
      Step step(c);
      const std::vector<uint8_t> before = step.cache_bytes();
      SparsePagedAttentionArgs a = step.args();
      Workspace workspace(sparse_paged_attention_workspace_bytes(a, 1));
      rejection.change(a);
      expect_error(ErrorCode::kInvalidArgument, rejection.expected, [&] {
        sparse_paged_attention(a, {&pool, &workspace, cpu::default_isa(), ""});
      });
      EXPECT_TRUE(step.cache_bytes() == before);
      const auto* bytes = step.output.as<uint8_t>();
      EXPECT_TRUE(std::all_of(bytes, bytes + step.output.num_bytes(), [](uint8_t x) { return x == 0xff; }));
    }
  }
}

TEST(SparsePagedAttentionRejects, UnknownVariant) {
  Case c;
  Step step(c);
  cpu::ThreadPool pool(1);
  Workspace workspace(sparse_paged_attention_workspace_bytes(step.args(), 1));
  expect_error(ErrorCode::kInvalidArgument, "fast", [&] {
    sparse_paged_attention(step.args(), {&pool, &workspace, cpu::default_isa(), "fast"});
  });
}

}  // namespace
}  // namespace shoal
