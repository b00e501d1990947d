// paged_attention on contents that no correct caller sends, and on memory that is not what it usually is.
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
using paged_cases::three_sequences;

// Runs every variant on a fresh Step that `change` has altered; `check` sees the result.
void for_each_variant(const Case& c, const std::function<void(Step&, PagedAttentionArgs&)>& change,
                      const std::function<void(const Step&)>& check) {
  std::vector<std::pair<std::string, cpu::Isa>> variants = {{"ref", cpu::Isa::kScalar}};
  for (const cpu::Isa isa : cpu::available_isas()) {
    variants.emplace_back("cpu", isa);
  }
  for (const auto& [variant, isa] : variants) {
    SCOPED_TRACE(variant + " " + std::string(cpu::to_string(isa)));
    cpu::ThreadPool pool(2);
    Step s(c);
    PagedAttentionArgs a = s.args();
    change(s, a);
    run(s, a, variant, isa, pool);
    EXPECT_TRUE(s.guards_intact());
    check(s);
  }
}

std::vector<float> token_rows(const Step& s, int64_t begin, int64_t end) {
  const std::vector<float> all = s.result();
  const int64_t width = s.c.num_heads * s.v_dim;
  return {all.begin() + begin * width, all.begin() + end * width};
}

bool all_zero(const std::vector<float>& rows) {
  return std::all_of(rows.begin(), rows.end(), [](float x) { return x == 0.0f; });
}

TEST(PagedAttentionMalformed, NegativePast) {
  Step plain(three_sequences());
  cpu::ThreadPool pool(1);
  run(plain, plain.args(), "ref", cpu::Isa::kScalar, pool);
  const Step before(three_sequences());
  for (const int32_t past : {-1, std::numeric_limits<int32_t>::min()}) {
    for_each_variant(
        three_sequences(), [&](Step& s, PagedAttentionArgs&) { s.past[1] = past; },
        [&](const Step& s) {
          EXPECT_TRUE(all_zero(token_rows(s, 2, 5)));
          EXPECT_TRUE(testkit::compare(token_rows(s, 0, 2), token_rows(plain, 0, 2), 1e-5, 1e-5));
          EXPECT_TRUE(testkit::compare(token_rows(s, 5, 9), token_rows(plain, 5, 9), 1e-5, 1e-5));
          for (int64_t pos = 7; pos < 10; ++pos) {
            const int64_t slot = before.slot_of(1, pos);
            EXPECT_EQ(std::memcmp(s.head_of(s.k_pool, slot, 0), before.head_of(before.k_pool, slot, 0), 64), 0);
          }
        });
  }
}

TEST(PagedAttentionMalformed, Offsets) {
  const auto none = [](const Step&) {};
  const std::vector<std::vector<int32_t>> wild = {{-3, -2, 1 << 30, 9}, {9, 5, 2, 0}, {0, 100, -100, 9},
                                                  {5, 9, 0, 5},         {0, 9, 0, 9}, {-1, -1, -1, -1}};
  for (const auto& offsets : wild) {
    for_each_variant(
        three_sequences(),
        [&](Step& s, PagedAttentionArgs&) {
          s.cu.assign(offsets.begin(), offsets.end());
          s.cu.resize(4);
        },
        none);
  }
  // Rows that no sequence claims are zero, the others right.
  Step plain(three_sequences());
  cpu::ThreadPool pool(1);
  run(plain, plain.args(), "ref", cpu::Isa::kScalar, pool);
  for_each_variant(
      three_sequences(), [](Step& s, PagedAttentionArgs&) { s.cu[3] = 5; },
      [&](const Step& s) {
        EXPECT_TRUE(all_zero(token_rows(s, 5, 9)));
        EXPECT_TRUE(testkit::compare(token_rows(s, 0, 5), token_rows(plain, 0, 5), 1e-5, 1e-5));
      });
  for_each_variant(
      three_sequences(), [](Step& s, PagedAttentionArgs&) { s.cu[3] = 10; },
      [&](const Step& s) { EXPECT_TRUE(all_zero(token_rows(s, 5, 9))); });
}

TEST(PagedAttentionMalformed, PagesAndSlots) {
#ifdef NDEBUG
  // A wrong page is an unmapped page.
  std::vector<float> expected;
  for (const int32_t page :
       {-1, -2, 1 << 20, std::numeric_limits<int32_t>::min(), std::numeric_limits<int32_t>::max()}) {
    Case c = three_sequences();
    c.past = {70, 40, 3};
    for_each_variant(
        c, [&](Step& s, PagedAttentionArgs&) { s.table[1] = page; },
        [&](const Step& s) {
          if (expected.empty()) {
            expected = s.result();
          }
          const auto result = testkit::compare(s.result(), expected, 1e-5, 1e-5);
          EXPECT_TRUE(result) << page << ": " << result.text;
        });
  }
#endif
  const Step before(three_sequences());
  for (const int32_t slot :
       {-1, -7, 1 << 30, std::numeric_limits<int32_t>::max(), static_cast<int32_t>(before.num_pages * 16)}) {
    for_each_variant(
        three_sequences(),
        [&](Step& s, PagedAttentionArgs& a) {
          s.slot_map.assign(9, slot);
          a.slot_mapping = TensorView(s.slot_map.data(), DType::kI32, {9});
        },
        [&](const Step& s) { EXPECT_TRUE(s.cache_bytes() == before.cache_bytes()); });
  }
}

TEST(PagedAttentionMalformed, PositionsBeyondTheTable) {
  Case c = three_sequences();
  c.extra_columns = 0;
  for (const int32_t past : {47, 48, 1000, std::numeric_limits<int32_t>::max()}) {
    std::vector<float> expected;
    for_each_variant(
        c, [&](Step& s, PagedAttentionArgs&) { s.past[2] = past; },
        [&](const Step& s) {
          expected = expected.empty() ? token_rows(s, 0, 5) : expected;
          EXPECT_TRUE(testkit::compare(token_rows(s, 0, 5), expected, 1e-5, 1e-5));
        });
  }
}

TEST(PagedAttentionMalformed, EverythingUnmapped) {
  for (const bool sink : {false, true}) {
    Case c = three_sequences();
    c.sink = sink;
    const Step before(c);
    for_each_variant(
        c, [&](Step& s, PagedAttentionArgs&) { std::fill(s.table.begin(), s.table.end(), -1); },
        [&](const Step& s) {
          EXPECT_TRUE(all_zero(s.result()));
          EXPECT_TRUE(s.cache_bytes() == before.cache_bytes());
        });
  }
}

TEST(PagedAttentionMalformed, RotaryTableTooShort) {
  Case c = three_sequences();
  c.rotary = Rotary::kHalf;
  std::vector<float> expected;
  for_each_variant(
      c,
      [](Step&, PagedAttentionArgs& a) {
        a.cos_cache = a.cos_cache.rows(0, 3);
        a.sin_cache = a.sin_cache.rows(0, 3);
      },
      [&](const Step& s) {
        expected = expected.empty() ? s.result() : expected;
        EXPECT_TRUE(testkit::compare(s.result(), expected, 1e-5, 1e-5));
      });
}

// NaN in the K and V of a token reaches only the rows that admit it.
TEST(PagedAttentionMasking, NanOfLaterTokensDoesNotShow) {
  for (const DType cache : {DType::kF16, DType::kF32, DType::kBF16, DType::kF8E4M3}) {
    Case c = {.k_cache = cache,
              .v_cache = cache,
              .num_heads = 6,
              .num_kv_heads = 2,
              .head_dim = 32,
              .past = {50},
              .lens = {40}};
    c.k_quant = c.v_quant = cache == DType::kF8E4M3 ? "PER_TENSOR" : "NONE";
    c.scale = 0.1f;
    std::vector<std::vector<uint8_t>> clean;
    for_each_variant(
        c, [](Step&, PagedAttentionArgs&) {}, [&](const Step& s) { clean.push_back(s.output); });
    size_t variant_idx = 0;
    for_each_variant(
        c,
        [](Step& s, PagedAttentionArgs&) {
          for (int64_t i = 0; i < 64; ++i) {
            set(s.value, 20 * 64 + i, std::numeric_limits<float>::quiet_NaN());
            set(s.value, 30 * 64 + i, std::numeric_limits<float>::infinity());
            set(s.key, 25 * 64 + i, std::numeric_limits<float>::quiet_NaN());
          }
        },
        [&](const Step& s) {
          const auto admitted_bytes = static_cast<std::ptrdiff_t>(Step::kGuard) + 20 * 6 * 32 * 4;
          EXPECT_TRUE(std::equal(s.output.begin(), s.output.begin() + admitted_bytes, clean[variant_idx].begin()))
              << to_string(cache);
          for (const float x : token_rows(s, 20, 21)) {
            EXPECT_TRUE(std::isnan(x));
          }
          ++variant_idx;
        });
  }
}

// A token that is not written attends to what the cache holds at its place, not to its own key and value.
TEST(PagedAttentionMasking, SuppressedWriteReadsTheCache) {
  Case c = {.num_heads = 1, .num_kv_heads = 1, .head_dim = 8, .page_size = 16, .past = {0}, .lens = {1}};
  for_each_variant(
      c,
      [](Step& s, PagedAttentionArgs& a) {
        s.fill_slot(s.slot_of(0, 0));
        s.slot_map = {-1};
        a.slot_mapping = TensorView(s.slot_map.data(), DType::kI32, {1});
      },
      [](const Step& s) {
        const TensorView stored(s.head_of(s.v_pool, s.slot_of(0, 0), 0), DType::kF16, {8});
        for (int64_t i = 0; i < 8; ++i) {
          EXPECT_EQ(s.result()[static_cast<size_t>(i)], get(stored, i));
          EXPECT_NE(get(stored, i), get(s.value, i));
        }
      });
}

TEST(PagedAttentionMemory, ZeroTokens) {
  Case c = three_sequences();
  c.lens = {0, 0, 0};
  const Step before(c);
  for_each_variant(
      c, [](Step&, PagedAttentionArgs&) {},
      [&](const Step& s) { EXPECT_TRUE(s.cache_bytes() == before.cache_bytes()); });
}

// Rows with gaps, columns with gaps, index tensors with strides.
TEST(PagedAttentionMemory, Strided) {
  for (const DType type : {DType::kF32, DType::kF16}) {
    Case c = three_sequences();
    c.type = type;
    c.sink = c.norm = true;
    c.rotary = Rotary::kInterleaved;
    std::vector<std::vector<uint8_t>> plain;
    for_each_variant(
        c, [](Step&, PagedAttentionArgs&) {}, [&](const Step& s) { plain.push_back(s.output); });
    size_t variant_idx = 0;
    std::vector<Tensor> memory;
    for_each_variant(
        c,
        [&](Step&, PagedAttentionArgs& a) {
          // A copy of `view` in memory with `gap` elements for each one.
          const auto spread = [&](TensorView& view, int64_t gap) {
            const int64_t columns = view.rank > 1 ? view.dim(1) : view.dim(0);
            const int64_t rows = view.rank > 1 ? view.dim(0) : 1;
            memory.emplace_back(view.dtype, std::initializer_list<int64_t>{rows * (columns * gap + 3)});
            std::memset(memory.back().view().data, 0xff, memory.back().view().num_bytes());
            const size_t item = size_of(view.dtype);
            for (int64_t r = 0; r < rows; ++r) {
              for (int64_t i = 0; i < columns; ++i) {
                std::memcpy(
                    memory.back().view().as<char>() + static_cast<size_t>(r * (columns * gap + 3) + i * gap) * item,
                    view.as<char>() + static_cast<size_t>(r * columns + i) * item, item);
              }
            }
            view.data = memory.back().view().data;
            view.strides = view.rank > 1 ? std::array<int64_t, kMaxRank>{columns * gap + 3, gap}
                                         : std::array<int64_t, kMaxRank>{gap};
          };
          memory.clear();
          spread(a.query, 1);
          spread(a.key, 2);
          spread(a.value, 3);
          for (TensorView* view : {&a.cumulative_sequence_length, &a.past_seqlens, &a.block_table, &a.cos_cache,
                                   &a.sin_cache, &a.head_sink, &a.q_norm_weight, &a.k_norm_weight}) {
            spread(*view, 2);
          }
        },
        [&](const Step& s) { EXPECT_EQ(s.output, plain[variant_idx++]); });
  }
}

TEST(PagedAttentionMemory, CachesAtAnyByte) {
  for (const DType cache : {DType::kF16, DType::kI8, DType::kU8, DType::kF32}) {
    Case c = {.k_cache = cache, .v_cache = cache, .num_heads = 2, .num_kv_heads = 1, .past = {70}, .lens = {1}};
    c.k_quant = c.v_quant = size_of(cache) == 1 ? "PER_CHANNEL" : "NONE";
    std::vector<std::vector<uint8_t>> plain;
    for_each_variant(
        c, [](Step&, PagedAttentionArgs&) {}, [&](const Step& s) { plain.push_back(s.output); });
    for (const int64_t offset : {1, 2, 7}) {
      size_t variant_idx = 0;
      std::vector<char> k_memory;
      std::vector<char> v_memory;
      for_each_variant(
          c,
          [&](Step& s, PagedAttentionArgs& a) {
            const auto move = [&](TensorView& view, std::vector<char>& memory) {
              memory.assign(view.num_bytes() + 8, 0);
              std::memcpy(memory.data() + offset, view.data, view.num_bytes());
              view.data = memory.data() + offset;
            };
            move(a.key_cache, k_memory);
            move(a.value_cache, v_memory);
            static_cast<void>(s);
          },
          [&](const Step& s) { EXPECT_EQ(s.output, plain[variant_idx++]) << offset; });
    }
  }
}

// Rows of output may have gaps, which stay untouched.
TEST(PagedAttentionMemory, StridedOutput) {
  std::vector<float> wide;
  Case c = three_sequences();
  std::vector<std::vector<uint8_t>> plain;
  for_each_variant(
      c, [](Step&, PagedAttentionArgs&) {}, [&](const Step& s) { plain.push_back(s.output); });
  size_t variant_idx = 0;
  for_each_variant(
      c,
      [&](Step&, PagedAttentionArgs& a) {
        wide.assign(9 * 70, -7.0f);
        a.output.data = wide.data();
        a.output.strides[0] = 70;
      },
      [&](const Step&) {
        const auto* expected = reinterpret_cast<const float*>(plain[variant_idx++].data() + Step::kGuard);
        for (size_t t = 0; t < 9; ++t) {
          EXPECT_EQ(std::memcmp(&wide[t * 70], expected + t * 64, 64 * sizeof(float)), 0);
          for (size_t i = 64; i < 70; ++i) {
            EXPECT_EQ(wide[t * 70 + i], -7.0f);
          }
        }
      });
}

// Two tokens with one slot: one of them stays, whole.
TEST(PagedAttentionMemory, SharedSlot) {
  Case c = {.num_heads = 2, .num_kv_heads = 2, .head_dim = 64, .past = {0}, .lens = {40}};
  for_each_variant(
      c,
      [](Step& s, PagedAttentionArgs& a) {
        s.slot_map.assign(40, static_cast<int32_t>(s.slot_of(0, 0)));
        a.slot_mapping = TensorView(s.slot_map.data(), DType::kI32, {40});
      },
      [](const Step& s) {
        for (int64_t i = 0; i < 128; ++i) {
          const std::byte* head = s.head_of(s.k_pool, s.slot_of(0, 0), i / 64);
          EXPECT_EQ(get(TensorView(const_cast<std::byte*>(head), DType::kF16, {64}), i % 64),
                    f16_to_f32(f32_to_f16(get(s.key, 39 * 128 + i))));
        }
      });
}

TEST(PagedAttentionMemory, WorkspaceGrowsWithTheStep) {
  Case c = three_sequences();
  size_t last = 0;
  for (const int32_t len : {1, 5, 60, 300}) {
    c.lens = {len, 1, 1};
    Step s(c);
    const size_t bytes = paged_attention_workspace_bytes(s.args(), 2);
    EXPECT_GT(bytes, last);
    last = bytes;
    PagedAttentionArgs a = s.args();  // shapes are enough
    a.query = TensorView(nullptr, a.query.dtype, a.query.dims());
    a.block_table = TensorView(nullptr, DType::kI32, a.block_table.dims());
    a.key_cache = TensorView(nullptr, a.key_cache.dtype, a.key_cache.dims());
    a.output = {};
    EXPECT_EQ(paged_attention_workspace_bytes(a, 2), bytes);
  }
}

}  // namespace
}  // namespace shoal
