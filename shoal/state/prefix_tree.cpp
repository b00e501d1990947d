#include "shoal/state/prefix_tree.h"

#include <algorithm>

#include "shoal/base/checked.h"
#include "shoal/base/error.h"

namespace shoal {
namespace {

// A hash only finds candidates: tokens are always compared, so that a collision cannot show a tenant another's pages.
uint64_t hash_of(int32_t parent, uint64_t salt, std::span<const int32_t> tokens) {
  const auto mix = [](uint64_t state, uint64_t value) {
    state = (state ^ value) * 0x9e3779b97f4a7c15ull;
    return state ^ (state >> 32);
  };
  uint64_t state = mix(mix(0x243f6a8885a308d3ull, static_cast<uint32_t>(parent)), salt);
  for (const int32_t token : tokens) {
    state = mix(state, static_cast<uint32_t>(token));
  }
  return state;
}

}  // namespace

PrefixTree::PrefixTree(PagePool& pool, int64_t page_size, StatePool* states, int64_t max_states)
    : pool_(pool), page_size_(page_size), states_(states), max_states_(max_states) {
  require(page_size >= 1, "page_size must be at least 1, not ", page_size);
}

PrefixTree::~PrefixTree() {
  for (const Node& entry : nodes_) {
    if (entry.page >= 0) {
      pool_.release(entry.page);
    }
    if (entry.state) {
      states_->release(*entry.state);
    }
  }
}

std::span<const int32_t> PrefixTree::page_of(std::span<const int32_t> tokens, size_t page_idx) const {
  const auto size = static_cast<size_t>(page_size_);
  return tokens.subspan(page_idx * size, size);
}

PrefixTree::NodeIdx PrefixTree::find(NodeIdx parent, uint64_t salt, std::span<const int32_t> tokens) const {
  const auto [begin, end] = children_.equal_range(hash_of(parent, salt, tokens));
  for (auto it = begin; it != end; ++it) {
    const Node& candidate = node(it->second);
    if (candidate.parent == parent && candidate.salt == salt && std::ranges::equal(candidate.tokens, tokens)) {
      return it->second;
    }
  }
  return kRoot;
}

PrefixTree::NodeIdx PrefixTree::find_path(std::span<const int32_t> tokens, uint64_t salt) const {
  NodeIdx idx = kRoot;
  for (size_t page_idx = 0; page_idx < tokens.size() / static_cast<size_t>(page_size_); ++page_idx) {
    idx = find(idx, salt, page_of(tokens, page_idx));
    if (idx == kRoot) {
      break;
    }
  }
  return idx;
}

PrefixTree::NodeIdx PrefixTree::add(NodeIdx parent, uint64_t salt, std::span<const int32_t> tokens, PageId page) {
  NodeIdx idx = 0;
  if (free_nodes_.empty()) {
    idx = static_cast<NodeIdx>(nodes_.size());
    nodes_.emplace_back();
  } else {
    idx = free_nodes_.back();
    free_nodes_.pop_back();
  }
  Node& entry = node(idx);
  entry.tokens.assign(tokens.begin(), tokens.end());
  entry.page = page;
  entry.parent = parent;
  entry.num_children = 0;
  entry.salt = salt;
  entry.last_used = clock_;
  pool_.retain(page);
  children_.emplace(hash_of(parent, salt, tokens), idx);
  leaves_.emplace(entry.last_used, idx);
  if (parent != kRoot && node(parent).num_children++ == 0) {
    leaves_.erase({node(parent).last_used, parent});
  }
  return idx;
}

void PrefixTree::touch(NodeIdx idx) {
  Node& entry = node(idx);
  if (entry.num_children == 0) {
    leaves_.erase({entry.last_used, idx});
    leaves_.emplace(clock_, idx);
  }
  entry.last_used = clock_;
}

PrefixMatch PrefixTree::match(std::span<const int32_t> tokens, uint64_t salt) {
  ++clock_;
  PrefixMatch found;
  NodeIdx parent = kRoot;
  NodeIdx last_with_state = kRoot;
  size_t num_pages = 0;  // that are of use
  for (size_t page_idx = 0; page_idx < tokens.size() / static_cast<size_t>(page_size_); ++page_idx) {
    const NodeIdx idx = find(parent, salt, page_of(tokens, page_idx));
    if (idx == kRoot) {
      break;
    }
    touch(idx);
    found.pages.push_back(node(idx).page);
    if (states_ == nullptr || node(idx).state) {
      num_pages = found.pages.size();
      last_with_state = idx;
    }
    parent = idx;
  }
  found.num_known_pages = static_cast<int64_t>(found.pages.size());
  found.pages.resize(num_pages);
  for (const PageId page : found.pages) {
    pool_.retain(page);
  }
  if (states_ != nullptr && last_with_state != kRoot) {
    found.state = node(last_with_state).state;
    node(last_with_state).state_last_used = clock_;
  }
  return found;
}

void PrefixTree::insert(std::span<const int32_t> tokens, std::span<PageId> pages, uint64_t salt) {
  SHOAL_ASSERT(tokens.size() >= pages.size() * static_cast<size_t>(page_size_));
  ++clock_;
  NodeIdx parent = kRoot;
  for (size_t page_idx = 0; page_idx < pages.size(); ++page_idx) {
    const auto content = page_of(tokens, page_idx);
    NodeIdx idx = find(parent, salt, content);
    if (idx == kRoot) {
      idx = add(parent, salt, content, pages[page_idx]);
    } else {
      touch(idx);
    }
    pool_.retain(node(idx).page);
    pool_.release(pages[page_idx]);
    pages[page_idx] = node(idx).page;
    parent = idx;
  }
}

void PrefixTree::keep_state(std::span<const int32_t> tokens, StateSlot from, uint64_t salt) {
  const NodeIdx idx = find_path(tokens, salt);
  SHOAL_ASSERT(states_ != nullptr && idx != kRoot);
  if (max_states_ == 0) {
    return;
  }
  Node& entry = node(idx);
  entry.state_last_used = ++clock_;
  if (entry.state) {
    return;  // of the same tokens, so the same bits
  }
  if (num_states() == max_states_) {
    release_state(*std::ranges::min_element(with_state_, {}, [&](NodeIdx i) { return node(i).state_last_used; }));
  }
  entry.state = states_->acquire();
  SHOAL_ASSERT(entry.state.has_value());  // max_states of the pool's slots are the tree's
  states_->copy(from, *entry.state);
  with_state_.push_back(idx);
}

void PrefixTree::drop_state(std::span<const int32_t> tokens, uint64_t salt) {
  const NodeIdx idx = find_path(tokens, salt);
  if (idx != kRoot && node(idx).state) {
    release_state(idx);
  }
}

void PrefixTree::release_state(NodeIdx idx) {
  states_->release(*node(idx).state);
  node(idx).state.reset();
  std::erase(with_state_, idx);
}

void PrefixTree::remove_leaf(NodeIdx idx) {
  Node& entry = node(idx);
  SHOAL_ASSERT(entry.num_children == 0);
  leaves_.erase({entry.last_used, idx});
  const auto [begin, end] = children_.equal_range(hash_of(entry.parent, entry.salt, entry.tokens));
  children_.erase(std::find_if(begin, end, [&](const auto& child) { return child.second == idx; }));
  if (entry.parent != kRoot && --node(entry.parent).num_children == 0) {
    leaves_.emplace(node(entry.parent).last_used, entry.parent);
  }
  pool_.release(entry.page);
  entry.page = -1;
  if (entry.state) {
    release_state(idx);
  }
  free_nodes_.push_back(idx);
}

int64_t PrefixTree::evict(int64_t num_pages) {
  int64_t num_freed = 0;
  for (auto it = leaves_.begin(); it != leaves_.end() && num_freed < num_pages;) {
    const NodeIdx idx = it->second;
    if (pool_.ref_count(node(idx).page) > 1) {
      ++it;
      continue;
    }
    // The parent may become a leaf: older than this one or equally old, so it may stand before `it`.
    const NodeIdx parent = node(idx).parent;
    ++it;
    remove_leaf(idx);
    ++num_freed;
    if (parent != kRoot && node(parent).num_children == 0) {
      const auto parent_it = leaves_.find({node(parent).last_used, parent});
      if (it == leaves_.end() || *parent_it < *it) {
        it = parent_it;
      }
    }
  }
  return num_freed;
}

int64_t PrefixTree::num_evictable() const {
  // Held by somebody else, or above such a page.
  std::vector<bool> pinned(nodes_.size(), false);
  int64_t num_pinned = 0;
  for (const Node& entry : nodes_) {
    if (entry.page < 0 || pool_.ref_count(entry.page) == 1) {
      continue;
    }
    for (auto idx = static_cast<NodeIdx>(&entry - nodes_.data()); idx != kRoot && !pinned[static_cast<size_t>(idx)];
         idx = node(idx).parent) {
      pinned[static_cast<size_t>(idx)] = true;
      ++num_pinned;
    }
  }
  return num_cached() - num_pinned;
}

int64_t PrefixTree::num_cached() const { return static_cast<int64_t>(children_.size()); }

}  // namespace shoal
