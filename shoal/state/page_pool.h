// Fixed pages of a KV cache, reference-counted. The pool knows page numbers only; memory is KvCache's.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace shoal {

using PageId = int32_t;

class PagePool {
 public:
  // kInvalidArgument unless 1 <= num_pages <= 2^31 - 1.
  explicit PagePool(int64_t num_pages);

  // A page with one reference, or nothing when none is free. The lowest free page is not guaranteed; the order is
  // deterministic.
  std::optional<PageId> allocate();
  void retain(PageId page);
  // Drops one reference; returns true if that freed the page.
  bool release(PageId page);

  int64_t num_pages() const { return static_cast<int64_t>(ref_counts_.size()); }
  int64_t num_free() const { return static_cast<int64_t>(free_.size()); }
  int32_t ref_count(PageId page) const;

 private:
  std::vector<int32_t> ref_counts_;
  std::vector<PageId> free_;
};

}  // namespace shoal
