// The best scores of a row in the order of the sparse attention indexers: a total order, so that every way to find them
// gives the same integers. The source is packed_sparse_attention_indexer's.
//
// Higher scores first, of equal ones the lower index. -0 equals +0; NaN is below -inf.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

namespace shoal {

// Descending order of these is the order above.
inline uint64_t rank_of(float score, uint32_t index) {
  const auto bits = std::bit_cast<uint32_t>(score + 0.0f);  // -0 becomes +0
  const uint32_t key = std::isnan(score) ? 0 : (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
  return uint64_t{key} << 32 | (0xffffffffu - index);
}

// The first `count` of the order, at most num_scores < 2^32, to `out`. `ranks` is scratch memory for num_scores values.
void top_indices(const float* scores, int64_t num_scores, int64_t count, uint64_t* ranks, int32_t* out);

}  // namespace shoal
