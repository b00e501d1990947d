// Finds KV pages again by token content: a radix tree whose edges are whole pages of tokens.
//
// The tree holds one reference to every page it knows. A page's content depends on all tokens before it, so a node's
// identity is the path from the root. `salt` separates tenants: equal tokens under different salts never match.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "shoal/state/page_pool.h"

namespace shoal {

class PrefixTree {
 public:
  PrefixTree(PagePool& pool, int64_t page_size);
  ~PrefixTree();  // gives all references back
  PrefixTree(const PrefixTree&) = delete;
  PrefixTree& operator=(const PrefixTree&) = delete;

  // The longest known prefix of `tokens` in whole pages. Every page returned is retained for the caller.
  std::vector<PageId> match(std::span<const int32_t> tokens, uint64_t salt = 0);

  // Remembers full pages: pages[i] holds tokens [i * page_size, (i + 1) * page_size). Where the tree already has a page
  // for that content, it keeps its own.
  void insert(std::span<const int32_t> tokens, std::span<const PageId> pages, uint64_t salt = 0);

  // Forgets least recently used leaves that nobody else holds until `num_pages` are freed or none is left. Returns how
  // many.
  int64_t evict(int64_t num_pages);

  // Pages that evict could free now, also those that become leaves on the way.
  int64_t num_evictable() const;
  int64_t num_cached() const;

 private:
  struct Node;
  PagePool& pool_;
  int64_t page_size_;
  uint64_t clock_ = 0;
  std::unique_ptr<Node> root_;
};

}  // namespace shoal
