// Finds KV pages again by token content: a radix tree whose edges are whole pages of tokens.
//
// The tree holds one reference to every page it knows. A page's content depends on all tokens before it, so a node's
// identity is the path from the root. `salt` separates tenants: equal tokens under different salts never match.
//
// For a model with convolution or recurrent states a prefix is of use only where the states at its end are known too. The
// tree then keeps some, in slots of the model's StatePool; which ends are worth a slot is the scheduler's choice.
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "shoal/state/page_pool.h"
#include "shoal/state/state_pool.h"

namespace shoal {

struct PrefixMatch {
  std::vector<PageId> pages;       // each retained for the caller
  int64_t num_known_pages = 0;     // pages.size(), or more where the tree has no states at their end
  std::optional<StateSlot> state;  // the tree's, at the end of `pages`: to be copied before the tree changes
};

class PrefixTree {
 public:
  // `states`: of a model that has some; the tree holds at most `max_states` of its slots.
  PrefixTree(PagePool& pool, int64_t page_size, StatePool* states = nullptr, int64_t max_states = 0);
  ~PrefixTree();  // gives all references back
  PrefixTree(const PrefixTree&) = delete;
  PrefixTree& operator=(const PrefixTree&) = delete;

  // The longest known prefix of `tokens` in whole pages; with states, the longest at whose end they are kept.
  PrefixMatch match(std::span<const int32_t> tokens, uint64_t salt = 0);

  // Remembers full pages: pages[i] holds tokens [i * page_size, (i + 1) * page_size). Where the tree already has a page
  // for that content, the caller's reference to its own is exchanged for one to the tree's.
  void insert(std::span<const int32_t> tokens, std::span<PageId> pages, uint64_t salt = 0);

  // Copies the states at the end of `tokens`, whole pages that the tree knows. The least recently used make room.
  void keep_state(std::span<const int32_t> tokens, StateSlot from, uint64_t salt = 0);
  // Forgets them, if they are still there.
  void drop_state(std::span<const int32_t> tokens, uint64_t salt = 0);

  // Forgets least recently used leaves that nobody else holds until `num_pages` are freed or none is left. Returns how
  // many.
  int64_t evict(int64_t num_pages);

  // Pages that evict could free now, also those that become leaves on the way.
  int64_t num_evictable() const;
  int64_t num_cached() const;
  int64_t num_states() const { return static_cast<int64_t>(with_state_.size()); }

 private:
  using NodeIdx = int32_t;
  static constexpr NodeIdx kRoot = -1;  // parent of the first pages; not stored

  // Nodes live in one array: a prompt of 128K tokens is a path of thousands, too deep to destroy by recursion.
  struct Node {
    std::vector<int32_t> tokens;  // [page_size]
    PageId page = -1;             // -1: the node is free
    NodeIdx parent = kRoot;
    int32_t num_children = 0;
    uint64_t salt = 0;
    uint64_t last_used = 0;
    std::optional<StateSlot> state;
    uint64_t state_last_used = 0;
  };

  NodeIdx find_path(std::span<const int32_t> tokens, uint64_t salt) const;
  NodeIdx find(NodeIdx parent, uint64_t salt, std::span<const int32_t> tokens) const;
  NodeIdx add(NodeIdx parent, uint64_t salt, std::span<const int32_t> tokens, PageId page);
  void touch(NodeIdx idx);
  void remove_leaf(NodeIdx idx);
  void release_state(NodeIdx idx);
  std::span<const int32_t> page_of(std::span<const int32_t> tokens, size_t page_idx) const;
  Node& node(NodeIdx idx) { return nodes_[static_cast<size_t>(idx)]; }
  const Node& node(NodeIdx idx) const { return nodes_[static_cast<size_t>(idx)]; }

  PagePool& pool_;
  int64_t page_size_;
  StatePool* states_;
  int64_t max_states_;
  uint64_t clock_ = 0;
  std::vector<Node> nodes_;
  std::vector<NodeIdx> free_nodes_;
  std::unordered_multimap<uint64_t, NodeIdx> children_;  // hash of (parent, salt, tokens)
  std::set<std::pair<uint64_t, NodeIdx>> leaves_;        // (last_used, node): least recently used first
  std::vector<NodeIdx> with_state_;                      // at most max_states_
};

}  // namespace shoal
