#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <set>

#include "shoal/state/kv_cache.h"
#include "shoal/state/page_pool.h"
#include "shoal/state/prefix_tree.h"
#include "testkit/testkit.h"

namespace shoal {
namespace {

template <class Body>
std::string message_of(ErrorCode code, Body&& body) {
  try {
    body();
  } catch (const Error& error) {
    EXPECT_EQ(to_string(error.code()), to_string(code));
    return error.what();
  }
  return "no error";
}

std::vector<int32_t> iota(int32_t begin, int64_t count) {
  std::vector<int32_t> tokens(static_cast<size_t>(count));
  std::iota(tokens.begin(), tokens.end(), begin);
  return tokens;
}

std::vector<PageId> take(PagePool& pool, int64_t count) {
  std::vector<PageId> pages;
  for (int64_t i = 0; i < count; ++i) {
    pages.push_back(pool.allocate().value());
  }
  return pages;
}

void give(PagePool& pool, const std::vector<PageId>& pages) {
  for (const PageId page : pages) {
    pool.release(page);
  }
}

TEST(PagePool, HandsOutEveryPageOnceAndTakesItBack) {
  PagePool pool(3);
  const std::vector<PageId> pages = take(pool, 3);
  EXPECT_EQ(std::set<PageId>(pages.begin(), pages.end()), (std::set<PageId>{0, 1, 2}));
  EXPECT_EQ(pool.allocate(), std::nullopt);
  EXPECT_EQ(pool.num_free(), 0);
  pool.retain(pages[1]);
  EXPECT_FALSE(pool.release(pages[1]));
  EXPECT_EQ(pool.ref_count(pages[1]), 1);
  EXPECT_TRUE(pool.release(pages[1]));
  EXPECT_EQ(pool.num_free(), 1);
  EXPECT_EQ(pool.allocate(), pages[1]);
}

TEST(PagePool, RejectsMisuse) {
  EXPECT_EQ(message_of(ErrorCode::kInvalidArgument, [] { PagePool(0); }), "num_pages must be 1 to 2147483647, not 0");
  EXPECT_EQ(message_of(ErrorCode::kInvalidArgument, [] { PagePool(int64_t{1} << 31); }),
            "num_pages must be 1 to 2147483647, not 2147483648");
  PagePool pool(2);
  EXPECT_THROW(pool.release(0), Error);  // free
  EXPECT_THROW(pool.retain(1), Error);
  EXPECT_THROW(static_cast<void>(pool.ref_count(2)), Error);
  EXPECT_EQ(pool.num_free(), 2);
}

TEST(PrefixTree, FindsTheLongestPrefixInWholePages) {
  PagePool pool(8);
  PrefixTree tree(pool, 4);
  const std::vector<int32_t> tokens = iota(0, 12);
  std::vector<PageId> pages = take(pool, 3);
  tree.insert(tokens, pages);
  EXPECT_EQ(tree.num_cached(), 3);
  EXPECT_EQ(pool.ref_count(pages[0]), 2);

  std::vector<int32_t> other = iota(0, 15);
  other[9] = 99;  // differs in the third page
  EXPECT_EQ(tree.match(other).pages, (std::vector<PageId>{pages[0], pages[1]}));
  EXPECT_EQ(pool.ref_count(pages[0]), 3);
  EXPECT_EQ(pool.ref_count(pages[2]), 2);
  EXPECT_EQ(tree.match(iota(0, 7)).pages, std::vector<PageId>{pages[0]});
  EXPECT_TRUE(tree.match(iota(0, 3)).pages.empty());
  EXPECT_TRUE(tree.match(iota(1, 12)).pages.empty());
  // A page belongs to the whole text before it: the second page alone is not found.
  EXPECT_TRUE(tree.match(iota(4, 8)).pages.empty());
}

TEST(PrefixTree, SaltSeparates) {
  PagePool pool(4);
  PrefixTree tree(pool, 2);
  std::vector<PageId> first = take(pool, 1);
  std::vector<PageId> second = take(pool, 1);
  tree.insert(iota(5, 2), first, 1);
  EXPECT_TRUE(tree.match(iota(5, 2)).pages.empty());
  EXPECT_TRUE(tree.match(iota(5, 2), 2).pages.empty());
  tree.insert(iota(5, 2), second, 2);
  EXPECT_EQ(tree.match(iota(5, 2), 1).pages, first);
  EXPECT_EQ(tree.match(iota(5, 2), 2).pages, second);
}

TEST(PrefixTree, KeepsItsOwnPageForKnownContent) {
  PagePool pool(4);
  PrefixTree tree(pool, 2);
  std::vector<PageId> first = take(pool, 1);
  std::vector<PageId> second = take(pool, 2);
  tree.insert(iota(0, 2), first);
  tree.insert(iota(0, 4), second);
  EXPECT_EQ(second[0], first[0]);  // the caller's own went back to the pool
  EXPECT_EQ(tree.match(iota(0, 4)).pages, second);
  EXPECT_EQ(pool.ref_count(first[0]), 4);
  EXPECT_EQ(pool.num_free(), 2);
}

TEST(PrefixTree, EvictsTheLeastRecentlyUsedLeafThatNobodyHolds) {
  PagePool pool(8);
  PrefixTree tree(pool, 2);
  const std::vector<int32_t> a = {1, 1, 2, 2};
  const std::vector<int32_t> b = {1, 1, 3, 3};
  const std::vector<int32_t> c = {4, 4};
  std::vector<PageId> pa = take(pool, 2);
  std::vector<PageId> pb = take(pool, 2);
  std::vector<PageId> pc = take(pool, 1);
  tree.insert(a, pa);
  tree.insert(b, pb);  // shares the first page with a
  tree.insert(c, pc);
  give(pool, pa);
  give(pool, pb);
  give(pool, pc);
  EXPECT_EQ(tree.num_cached(), 4);
  EXPECT_EQ(tree.num_evictable(), 4);
  EXPECT_EQ(pool.num_free(), 4);

  const std::vector<PageId> held = tree.match(a).pages;  // a is held, so its shared first page is too
  EXPECT_EQ(tree.num_evictable(), 2);
  EXPECT_EQ(tree.evict(1), 1);
  EXPECT_TRUE(tree.match(b).pages.size() == 1);  // b was used before c
  give(pool, {pa[0]});
  EXPECT_EQ(tree.evict(10), 1);
  EXPECT_TRUE(tree.match(c).pages.empty());
  EXPECT_EQ(tree.evict(1), 0);
  give(pool, held);
  EXPECT_EQ(tree.num_evictable(), 2);
  EXPECT_EQ(tree.evict(10), 2);  // the parent becomes a leaf on the way
  EXPECT_EQ(tree.num_cached(), 0);
  EXPECT_EQ(pool.num_free(), 8);
}

TEST(PrefixTree, GivesEverythingBackAtTheEndEvenOfAVeryLongPrompt) {
  constexpr int64_t kPages = 50000;
  PagePool pool(kPages);
  {
    PrefixTree tree(pool, 1);
    std::vector<PageId> pages = take(pool, kPages);
    tree.insert(iota(0, kPages), pages);
    give(pool, pages);
    EXPECT_EQ(pool.num_free(), 0);
    EXPECT_EQ(tree.num_evictable(), kPages);
    EXPECT_EQ(tree.evict(7), 7);
    EXPECT_EQ(tree.match(iota(0, kPages)).pages.size(), static_cast<size_t>(kPages - 7));
    for (PageId page = 0; page < kPages; ++page) {
      if (pool.ref_count(page) == 2) {
        pool.release(page);
      }
    }
  }
  EXPECT_EQ(pool.num_free(), kPages);
}

// A pool whose slots hold one number.
StatePool number_states(int64_t num_slots) { return StatePool({{.conv_channels = 1, .conv_reach = 1}}, num_slots, 0); }
float& number_of(const StatePool& states, StateSlot slot) { return *states.conv_state(0, slot).as<float>(); }

TEST(PrefixTree, AMatchEndsWhereStatesAreKept) {
  PagePool pool(8);
  StatePool states = number_states(3);
  const StateSlot slot = states.acquire().value();
  {
    PrefixTree tree(pool, 2, &states, 2);
    std::vector<PageId> pages = take(pool, 4);
    tree.insert(iota(0, 8), pages, 7);
    PrefixMatch match = tree.match(iota(0, 8), 7);
    EXPECT_TRUE(match.pages.empty());
    EXPECT_EQ(match.num_known_pages, 4);
    EXPECT_FALSE(match.state.has_value());

    number_of(states, slot) = 20.0f;
    tree.keep_state(iota(0, 4), slot, 7);
    number_of(states, slot) = 30.0f;  // a copy was kept
    match = tree.match(iota(0, 8), 7);
    EXPECT_EQ(match.pages, (std::vector<PageId>{pages[0], pages[1]}));
    EXPECT_EQ(match.num_known_pages, 4);
    EXPECT_EQ(number_of(states, match.state.value()), 20.0f);
    EXPECT_EQ(pool.ref_count(pages[1]), 3);
    EXPECT_EQ(pool.ref_count(pages[2]), 2);
    EXPECT_TRUE(tree.match(iota(0, 8), 8).pages.empty());

    tree.drop_state(iota(0, 4), 7);
    tree.drop_state(iota(0, 2), 7);  // has none
    EXPECT_TRUE(tree.match(iota(0, 8), 7).pages.empty());
    EXPECT_EQ(tree.num_states(), 0);
    tree.keep_state(iota(0, 6), slot, 7);
  }
  EXPECT_EQ(states.num_free(), 2);
}

TEST(PrefixTree, TheLeastRecentlyUsedStatesMakeRoom) {
  PagePool pool(8);
  StatePool states = number_states(3);
  const StateSlot slot = states.acquire().value();
  PrefixTree tree(pool, 1, &states, 2);
  std::vector<PageId> pages = take(pool, 3);
  tree.insert(iota(0, 3), pages);
  for (const int64_t length : {1, 2}) {
    number_of(states, slot) = static_cast<float>(length);
    tree.keep_state(iota(0, length), slot);
  }
  EXPECT_EQ(number_of(states, tree.match(iota(0, 1)).state.value()), 1.0f);  // used after the second
  tree.keep_state(iota(0, 3), slot);
  EXPECT_EQ(tree.num_states(), 2);
  EXPECT_EQ(tree.match(iota(0, 2)).pages.size(), 1u);
  EXPECT_EQ(tree.match(iota(0, 3)).pages.size(), 3u);
  EXPECT_EQ(states.num_free(), 0);
}

TEST(PrefixTree, StatesGoWithTheirPage) {
  PagePool pool(2);
  StatePool states = number_states(2);
  const StateSlot slot = states.acquire().value();
  PrefixTree tree(pool, 1, &states, 1);
  std::vector<PageId> pages = take(pool, 2);
  tree.insert(iota(0, 2), pages);
  tree.keep_state(iota(0, 2), slot);
  give(pool, pages);
  EXPECT_EQ(tree.evict(1), 1);
  EXPECT_EQ(tree.num_states(), 0);
  EXPECT_EQ(states.num_free(), 1);
}

// Against a map from (salt, prefix) to page.
TEST(PrefixTree, AgreesWithAMapOfPrefixes) {
  for (uint64_t seed = 0; seed < 20; ++seed) {
    SCOPED_TRACE(seed);
    testkit::Random random(seed);
    PagePool pool(64);
    PrefixTree tree(pool, 2);
    std::map<std::pair<uint64_t, std::vector<int32_t>>, PageId> model;
    for (int step = 0; step < 300; ++step) {
      std::vector<int32_t> tokens(static_cast<size_t>(random.integer(0, 11)));
      for (int32_t& token : tokens) {
        token = static_cast<int32_t>(random.integer(0, 1));
      }
      const auto salt = static_cast<uint64_t>(random.integer(0, 1));
      const auto num_pages = static_cast<int64_t>(tokens.size() / 2);
      const auto prefix = [&](int64_t pages) {
        return std::pair(salt, std::vector<int32_t>(tokens.begin(), tokens.begin() + 2 * pages));
      };
      if (random.integer(0, 2) == 0 && pool.num_free() >= num_pages) {
        std::vector<PageId> pages = take(pool, num_pages);
        tree.insert(tokens, pages, salt);
        for (int64_t i = 0; i < num_pages; ++i) {
          model.try_emplace(prefix(i + 1), pages[static_cast<size_t>(i)]);
        }
        give(pool, pages);
      } else if (random.integer(0, 3) == 0) {
        const std::vector<PageId> free_before = [&] {
          std::vector<PageId> pages;
          for (PageId page = 0; page < 64; ++page) {
            if (pool.ref_count(page) == 0) {
              pages.push_back(page);
            }
          }
          return pages;
        }();
        EXPECT_EQ(tree.evict(3), std::min<int64_t>(3, static_cast<int64_t>(model.size())));
        EXPECT_EQ(pool.num_free() - static_cast<int64_t>(free_before.size()),
                  std::min<int64_t>(3, static_cast<int64_t>(model.size())));
        std::erase_if(model, [&](const auto& entry) { return pool.ref_count(entry.second) == 0; });
        for (const auto& [key, page] : model) {  // only leaves went: no prefix of what is left is missing
          if (key.second.size() > 2) {
            const std::vector<int32_t> parent(key.second.begin(), key.second.end() - 2);
            EXPECT_TRUE(model.contains({key.first, parent}));
          }
        }
      } else {
        std::vector<PageId> expected;
        for (int64_t i = 1; i <= num_pages && model.contains(prefix(i)); ++i) {
          expected.push_back(model.at(prefix(i)));
        }
        EXPECT_EQ(tree.match(tokens, salt).pages, expected);
        give(pool, expected);
      }
      EXPECT_EQ(tree.num_cached(), static_cast<int64_t>(model.size()));
      EXPECT_EQ(pool.num_free() + tree.num_cached(), 64);
      EXPECT_EQ(tree.num_evictable(), tree.num_cached());
    }
  }
}

TEST(KvCache, LaysOutEveryLayer) {
  const std::vector<KvLayerShape> layers = {{2, 8, 8}, {1, 16, 4}};
  for (const auto& [type, dtype] : {std::pair(KvType::kF32, DType::kF32),
                                    {KvType::kF16, DType::kF16},
                                    {KvType::kBF16, DType::kBF16},
                                    {KvType::kI8, DType::kI8}}) {
    const KvCache cache(layers, type, 5, 16);
    ASSERT_EQ(cache.num_layers(), 2u);
    int64_t num_bytes = 0;
    for (size_t i = 0; i < layers.size(); ++i) {
      const KvLayer layer = cache.layer(i);
      EXPECT_EQ(layer.key.dtype, dtype);
      EXPECT_TRUE(std::ranges::equal(layer.key.dims(),
                                     std::vector{int64_t{5}, int64_t{16}, layers[i].num_kv_heads, layers[i].head_dim}));
      EXPECT_TRUE(std::ranges::equal(
          layer.value.dims(), std::vector{int64_t{5}, int64_t{16}, layers[i].num_kv_heads, layers[i].v_head_dim}));
      EXPECT_EQ(reinterpret_cast<uintptr_t>(layer.key.data) % 64, 0u);
      EXPECT_EQ(reinterpret_cast<uintptr_t>(layer.value.data) % 64, 0u);
      EXPECT_EQ(static_cast<bool>(layer.k_scale), type == KvType::kI8);
      num_bytes += static_cast<int64_t>(layer.key.num_bytes() + layer.value.num_bytes());
    }
    EXPECT_EQ(KvCache::bytes_per_page(layers, type, 16) * 5, num_bytes);
  }
}

TEST(KvCache, TakesScalesPerChannelAndPerTensor) {
  const std::vector<KvLayerShape> layers = {{1, 2, 4}};
  const KvCache plain(layers, KvType::kI8, 1, 16);
  EXPECT_EQ(plain.layer(0).k_scale.num_elements(), 1);
  EXPECT_EQ(*plain.layer(0).v_scale.as<float>(), KvCache::kDefaultScale);
  const KvCache cache(layers, KvType::kI8, 1, 16, {{{0.5f, 0.25f}, {2.0f}}});
  EXPECT_EQ(cache.layer(0).k_scale.num_elements(), 2);
  EXPECT_EQ(cache.layer(0).k_scale.as<float>()[1], 0.25f);
  EXPECT_EQ(*cache.layer(0).v_scale.as<float>(), 2.0f);
}

TEST(KvCache, ALayerMayHaveKeysOnly) {
  const std::vector<KvLayerShape> layers = {{1, 48, 0}};
  EXPECT_EQ(KvCache::bytes_per_page(layers, KvType::kF16, 16), 16 * 48 * 2);
  const KvCache cache(layers, KvType::kI8, 2, 16, {{{0.5f}, {}}});
  EXPECT_TRUE(cache.layer(0).key);
  EXPECT_TRUE(cache.layer(0).k_scale);
  EXPECT_FALSE(cache.layer(0).value);
  EXPECT_FALSE(cache.layer(0).v_scale);
}

TEST(KvCache, RejectsWhatItCannotHold) {
  const std::vector<KvLayerShape> layers = {{1, 2, 4}};
  const auto message = [&](KvType type, int64_t pages, int64_t page_size, const std::vector<KvScales>& scales) {
    return message_of(ErrorCode::kInvalidArgument, [&] { KvCache(layers, type, pages, page_size, scales); });
  };
  EXPECT_EQ(message(KvType::kF32, 0, 16, {}), "a KV cache needs positive num_pages and page_size, not 0 and 16");
  EXPECT_EQ(message(KvType::kF16, 1, 16, {{{1.0f}, {1.0f}}}), "KV scales belong to an int8 cache only");
  EXPECT_EQ(message(KvType::kI8, 1, 16, {{{1.0f}, {1.0f}}, {{1.0f}, {1.0f}}}),
            "KV scales are given for 2 layers, expected 1");
  EXPECT_EQ(message(KvType::kI8, 1, 16, {{{1.0f}, {1.0f, 1.0f, 1.0f}}}),
            "KV layer 0: value scales have 3 values, expected 1 or 4");
  EXPECT_EQ(message(KvType::kI8, 1, 16, {{{1.0f, 0.0f}, {1.0f}}}),
            "KV layer 0: key scales must be finite and positive, not 0");
  EXPECT_EQ(message_of(ErrorCode::kInvalidArgument,
                       [] {
                         KvCache::bytes_per_page({{1, 0, 1}}, KvType::kF16, 16);
                       }),
            "KV layer 0: num_kv_heads and head_dim must be positive, v_head_dim not negative, not 1, 0 and 1");
  EXPECT_EQ(message_of(ErrorCode::kOutOfMemory,
                       [&] {
                         KvCache({{int64_t{1} << 30, int64_t{1} << 30, 1}}, KvType::kF32, 64, 64);
                       }),
            "the KV cache does not fit the address space");
}

}  // namespace
}  // namespace shoal
