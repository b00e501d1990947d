#include "shoal/state/page_pool.h"

#include <limits>

#include "shoal/base/error.h"

namespace shoal {

PagePool::PagePool(int64_t num_pages) {
  require(num_pages >= 1 && num_pages <= std::numeric_limits<PageId>::max(), "num_pages must be 1 to ",
          std::numeric_limits<PageId>::max(), ", not ", num_pages);
  ref_counts_.assign(static_cast<size_t>(num_pages), 0);
  free_.reserve(static_cast<size_t>(num_pages));
  for (int64_t page = num_pages; page-- > 0;) {
    free_.push_back(static_cast<PageId>(page));
  }
}

std::optional<PageId> PagePool::allocate() {
  if (free_.empty()) {
    return std::nullopt;
  }
  const PageId page = free_.back();
  free_.pop_back();
  ref_counts_[static_cast<size_t>(page)] = 1;
  return page;
}

void PagePool::retain(PageId page) {
  SHOAL_ASSERT(ref_count(page) > 0);
  ++ref_counts_[static_cast<size_t>(page)];
}

bool PagePool::release(PageId page) {
  SHOAL_ASSERT(ref_count(page) > 0);
  if (--ref_counts_[static_cast<size_t>(page)] > 0) {
    return false;
  }
  free_.push_back(page);
  return true;
}

int32_t PagePool::ref_count(PageId page) const {
  SHOAL_ASSERT(page >= 0 && page < num_pages());
  return ref_counts_[static_cast<size_t>(page)];
}

}  // namespace shoal
