// dynamic_sparse_attention against f64 by the formulas, its caches, its status codes, what must not matter.
#include "shoal/ops/dynamic_sparse_attention/dynamic_sparse_attention_cases.h"

namespace shoal {
namespace {

using dynamic_sparse_cases::Case;
using dynamic_sparse_cases::Ints;
using dynamic_sparse_cases::kMax;
using dynamic_sparse_cases::kMin;
using dynamic_sparse_cases::Step;
using dynamic_sparse_cases::Values;

bool same(double a, double b, double step) { return std::abs(a - b) <= step || (std::isnan(a) && std::isnan(b)); }

void check(const Case& c) {
  SCOPED_TRACE(testing::Message() << c);
  for (const cpu::Isa isa : cpu::available_isas()) {
    Step step(c);
    const Step::Expected expected = step.expected();
    step.run(isa);
    const bool narrow = step.type == DType::kBF16 || c.type == DType::kBF16;
    const bool half = step.type == DType::kF16 || c.type == DType::kF16;
    const double rtol = narrow ? 5e-3 : half ? 2e-3 : 2e-5;
    const double atol = narrow ? 6e-3 : half ? 2e-3 : 1e-5;
    const auto result = testkit::compare(step.result(), expected.output, rtol, atol);
    EXPECT_TRUE(result) << cpu::to_string(isa) << ": " << result.text;
    EXPECT_TRUE(step.intact());
    // After a norm or a rotation an ulp of T, or one code.
    const bool exact = !c.norm && c.rotary == 0;
    const Values keys = step.cache_values(step.present_key, 0);
    const Values values = step.cache_values(step.present_value, 1);
    for (size_t i = 0; i < keys.size(); ++i) {
      const double ulp = exact ? 0.0 : std::abs(expected.keys[i]) / 100 + (c.cache == DType::kI8 ? 0.041 : 2e-5);
      ASSERT_TRUE(same(keys[i], expected.keys[i], ulp)) << "key " << i << " " << keys[i] << " " << expected.keys[i];
      ASSERT_TRUE(same(values[i], expected.values[i], 0.0)) << "value " << i;
    }
  }
}

std::vector<Case> feature_cases() {
  std::vector<Case> cases;
  const auto add = [&](Case c, const std::string& name) {
    c.name = name;
    c.seed = cases.size() + 1;
    cases.push_back(c);
  };
  const auto typed = [](Case c, DType type) {
    c.type = c.value = c.cache = type;
    return c;
  };
  Case base;
  base.selected = {{0, 3, 9, 10, 3, -1, 1000000, kMin, kMax, 11, 12}, {2}, {}, {6, 5, 4, 0, 7}};
  for (const DType type : {DType::kF32, DType::kF16, DType::kBF16}) {
    for (const bool local : {false, true}) {
      Case c = typed(base, type);
      c.local = local;
      const std::string name = concat(to_string(type), local ? "_local" : "_selected");
      add(c, name);
      c.sink = true;
      c.shared = local;
      c.scale = 0.4f;
      add(c, name + "_sink");
      c.smooth = true;
      c.sink = type == DType::kF16;
      c.both = true;
      add(c, name + "_smooth");
      c.cache = DType::kI8;
      add(c, name + "_int8");
      c.cache = DType::kF16;
      add(c, name + "_cache16");
      c = typed(base, type);
      c.local = local;
      c.packed = true;
      c.norm = true;
      c.padding = 5;
      add(c, name + "_packed_norm");
      c.rotary = local ? 2 : 1;
      c.packed = false;
      add(c, name + "_rotary");
      c.rotary_offset = 8;
      c.positions = {3, 19, 0, 7};
      c.cache = DType::kI8;
      add(c, name + "_positions_int8");
      c.cache = type;
      c.positions = {-1, 20, 5, int64_t{1} << 40};
      add(c, name + "_bad_positions");
      c = typed(base, type);
      c.local = local;
      c.past_capacity = -1;
      add(c, name + "_no_past");
      c.past_capacity = 9;
      add(c, name + "_growing");
      c.past_capacity = 0;
      c.seqlens_k = {1, 1};
      add(c, name + "_empty_past");
    }
  }
  for (const int64_t head_dim : {1, 3, 7, 12, 20, 64, 256}) {
    Case c = typed(base, head_dim % 2 ? DType::kF16 : DType::kF32);
    c.head_dim = head_dim;
    c.num_heads = 6;
    c.norm = true;
    add(c, concat("head_dim_", head_dim));
    c.cache = DType::kI8;
    add(c, concat("head_dim_", head_dim, "_int8"));
  }
  Case bf16 = typed(base, DType::kF16);
  bf16.output_bf16 = true;
  bf16.sink = bf16.norm = bf16.local = true;
  bf16.rotary = 1;
  add(bf16, "output_bf16");
  bf16.packed = true;
  add(bf16, "output_bf16_packed");
  Case mixed = base;
  mixed.value = DType::kF16;
  mixed.cache = DType::kF16;
  mixed.local = mixed.sink = true;
  add(mixed, "value16");
  // Sequences that do not fit: nothing of the main cache is read, rows that land inside are written.
  for (const bool local : {false, true}) {
    Case c = base;
    c.local = local;
    c.seqlens_k = {0, 13};
    add(c, concat("inconsistent_", local));
    c.seqlens_k = {-1, 12};
    add(c, concat("inconsistent_edge_", local));
    c.seqlens_k = {kMin, kMax};
    add(c, concat("inconsistent_far_", local));
  }
  Case wide = base;
  wide.seqlens_k = {299};
  wide.seq_len = 3;
  wide.total = wide.past_capacity = 300;
  for (const int32_t count : {63, 64, 65, 128, 257}) {
    Ints entries;
    for (int32_t i = 0; i < count; ++i) {
      entries.push_back(i * 11 % 297);
    }
    wide.selected = {entries};
    add(wide, concat("entries_", count));
  }
  wide.local = true;
  wide.window = 100;
  wide.auxiliary_length = 297;
  add(wide, "long_window");
  return cases;
}

class DynamicSparseAttention : public testing::TestWithParam<Case> {};

TEST_P(DynamicSparseAttention, MatchesTheFormulas) { check(GetParam()); }

INSTANTIATE_TEST_SUITE_P(Features, DynamicSparseAttention, testing::ValuesIn(feature_cases()),
                         [](const auto& test) { return test.param.name; });

// ---- validation_status ----

TEST(DynamicSparseAttentionStatus, Codes) {
  using A = DynamicSparseAttentionArgs;
  static Ints committed;
  static std::vector<int64_t> positions;
  const struct {
    int32_t code;
    const char* what;
    bool local;
    DType cache;
    void (*change)(Step&, A&);
  } cases[] = {
      {0, "sound", false, DType::kF32, [](Step&, A&) {}},
      {0, "sound auxiliary", true, DType::kF32, [](Step&, A&) {}},
      {0, "sound int8", false, DType::kI8, [](Step&, A&) {}},
      {1, "negative count", false, DType::kF32, [](Step& s, A&) { s.counts[1] = -1; }},
      {1, "count past the columns", false, DType::kF32, [](Step& s, A&) { s.counts[3] = 5; }},
      {2, "padding", false, DType::kF32, [](Step& s, A&) { s.indices[3] = 0; }},
      {2, "padding below -1", false, DType::kF32, [](Step& s, A&) { s.indices[3] = -2; }},
      {3, "negative entry", false, DType::kF32, [](Step& s, A&) { s.indices[1] = -1; }},
      {4, "beyond the sequence", false, DType::kF32, [](Step& s, A&) { s.indices[8] = 7; }},
      {4, "beyond the auxiliary cache", true, DType::kF32, [](Step& s, A&) { s.indices[1] = 6; }},
      {0, "an auxiliary row after the position", true, DType::kF32, [](Step& s, A&) { s.indices[9] = 5; }},
      {5, "seen before", false, DType::kF32, [](Step& s, A&) { s.indices[2] = 0; }},
      {5, "seen before, then another", false, DType::kF32,
       [](Step& s, A&) {
         s.indices[1] = 0;
         s.indices[2] = -1;
       }},
      {3, "another, then seen before", false, DType::kF32,
       [](Step& s, A&) {
         s.indices[1] = -1;
         s.indices[2] = 0;
       }},
      {6, "after the position", false, DType::kF32, [](Step& s, A&) { s.indices[0] = 10; }},
      {7, "shorter than the step", false, DType::kF32, [](Step& s, A&) { s.c.seqlens_k[1] = 0; }},
      {7, "longer than the cache", false, DType::kF32, [](Step& s, A&) { s.c.seqlens_k[1] = 12; }},
      {7, "longer than total_sequence_length", false, DType::kF32, [](Step& s, A&) { s.c.seqlens_k[1] = 11; }},
      {8, "position", false, DType::kF32,
       [](Step& s, A& a) {
         a.cos_cache = s.cos;
         a.sin_cache = s.sin;
         a.do_rotary = true;
         positions = {0, 1, 2, 20};
         a.position_ids = TensorView(positions.data(), DType::kI64, {2, 2});
       }},
      {0, "position without rotary", false, DType::kF32,
       [](Step&, A& a) {
         positions = {0, 1, 2, 20};
         a.position_ids = TensorView(positions.data(), DType::kI64, {2, 2});
       }},
      {0, "cursors", false, DType::kF32,
       [](Step&, A& a) {
         committed = {9, 5};
         a.committed_length = TensorView(committed.data(), DType::kI32, {2});
       }},
      {9, "cursor", false, DType::kF32,
       [](Step&, A& a) {
         committed = {9, 4};
         a.committed_length = TensorView(committed.data(), DType::kI32, {2});
       }},
      {9, "one cursor without a dimension", false, DType::kF32,
       [](Step&, A& a) {
         committed = {9};
         a.committed_length = TensorView(committed.data(), DType::kI32, std::span<const int64_t>());
       }},
      {9, "one cursor for two lengths", false, DType::kF32,
       [](Step&, A& a) {
         committed = {9};
         a.committed_length = TensorView(committed.data(), DType::kI32, {1});
       }},
      {9, "cursor beyond the cache", false, DType::kF32,
       [](Step& s, A& a) {
         committed = {11, 5};
         s.c.seqlens_k[0] = 12;
         a.committed_length = TensorView(committed.data(), DType::kI32, {2});
       }},
      {10, "scale of 0", false, DType::kI8, [](Step& s, A&) { s.scales[4] = 0.0f; }},
      {10, "negative scale", false, DType::kI8, [](Step& s, A&) { s.scales[32] = -0.1f; }},
      {10, "infinite scale", false, DType::kI8,
       [](Step& s, A&) { s.scales[0] = std::numeric_limits<float>::infinity(); }},
      {10, "scale of NaN", false, DType::kI8,
       [](Step& s, A&) { s.scales[7] = std::numeric_limits<float>::quiet_NaN(); }},
      {1, "of the first row that has one", false, DType::kF32,
       [](Step& s, A&) {
         s.counts[1] = 9;
         s.indices[8] = -1;
       }},
  };
  for (const auto& entry : cases) {
    SCOPED_TRACE(entry.what);
    Case c;
    c.local = entry.local;
    c.cache = entry.cache;
    c.selected = {{0, 3, 5}, {1}, {4, 2, 3}, {0, 5}};
    Step step(c);
    // A fourth column of padding.
    step.indices = {0, 3, 5, -1, 1, -1, -1, -1, 4, 2, 3, -1, 0, 5, -1, -1};
    step.max_selected = 4;
    DynamicSparseAttentionArgs a = step.args();
    entry.change(step, a);
    step.run(a, cpu::default_isa());
    EXPECT_EQ(step.status, entry.code);
    DynamicSparseAttentionArgs without = a;
    without.validation_status = {};
    const std::vector<float> result = step.result();
    Step again(c);
    step.run(without, cpu::default_isa());
    EXPECT_TRUE(testkit::compare(step.result(), result, 0.0, 0.0).num_bad == 0) << "the status changed the result";
  }
}

// ---- what must not matter ----

TEST(DynamicSparseAttentionSame, ThreadsInvalidEntriesNeighboursAndChunks) {
  for (const bool local : {false, true}) {
    for (const cpu::Isa isa : cpu::available_isas()) {
      Case c;
      c.local = local;
      c.seqlens_k = {80};
      c.seq_len = 5;
      c.total = c.past_capacity = 90;
      c.window = 70;
      c.auxiliary_length = 80;
      c.rotary = 1;
      Ints entries;
      for (int32_t i = 0; i < 79; ++i) {
        entries.push_back(i * 7 % 80);
      }
      c.selected = {entries, {3, 1}};
      Step one(c);
      one.run(isa, 1);
      Step three(c);
      three.run(isa, 3);
      EXPECT_EQ(one.result(), three.result());
      Case holes = c;
      for (Ints& row : holes.selected) {
        Ints more;
        for (const int32_t entry : row) {
          more.insert(more.end(), {-3, entry, 500});
        }
        row = more;
      }
      Step with_holes(holes);
      with_holes.run(isa);
      EXPECT_EQ(one.result(), with_holes.result());
      // Token by token.
      Step step(c);
      const DynamicSparseAttentionArgs all = step.args();
      std::vector<float> result;
      for (int64_t s = 0; s < 5; ++s) {
        DynamicSparseAttentionArgs a = all;
        Ints length = {static_cast<int32_t>(76 + s)};
        const auto token = [&](const TensorView& view) {
          TensorView part = view;
          part.shape[1] = 1;
          part.data = view.as<std::byte>() + s * view.stride(1) * static_cast<int64_t>(size_of(view.dtype));
          return part;
        };
        a.query = token(all.query);
        a.key = token(all.key);
        a.value = token(all.value);
        a.output = token(all.output);
        a.selected_indices = all.selected_indices.rows(s, s + 1);
        a.selected_counts = all.selected_counts.rows(s, s + 1);
        a.seqlens_k = TensorView(length.data(), DType::kI32, {1});
        step.run(a, isa);
      }
      EXPECT_EQ(one.result(), step.result());
      EXPECT_TRUE(std::memcmp(one.past_key.data, step.past_key.data, one.past_key.num_bytes()) == 0);
    }
  }
}

TEST(DynamicSparseAttentionSame, NoTokens) {
  for (const int64_t seq_len : {0, 1}) {
    Case c;
    c.seq_len = seq_len;
    c.seqlens_k = seq_len == 0 ? Ints{4} : Ints{};
    c.past_capacity = seq_len == 0 ? -1 : 12;
    c.total = 5;
    check(c);
  }
}

}  // namespace
}  // namespace shoal
