#include "shoal/ops/top_indices.h"

#include <algorithm>
#include <functional>

namespace shoal {

void top_indices(const float* scores, int64_t num_scores, int64_t count, uint64_t* ranks, int32_t* out) {
  for (int64_t i = 0; i < num_scores; ++i) {
    ranks[i] = rank_of(scores[i], static_cast<uint32_t>(i));
  }
  if (count < num_scores) {
    std::nth_element(ranks, ranks + count, ranks + num_scores, std::greater<>());
  }
  std::sort(ranks, ranks + count, std::greater<>());
  for (int64_t i = 0; i < count; ++i) {
    out[i] = static_cast<int32_t>(0xffffffffu - static_cast<uint32_t>(ranks[i]));
  }
}

}  // namespace shoal
