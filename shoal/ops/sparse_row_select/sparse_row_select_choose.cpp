#include "shoal/ops/sparse_row_select/sparse_row_select_choose.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>

namespace shoal::row_select {
namespace {

// Ordered as the scores are: -0 below +0, NaN (which has no other key below it) last.
uint32_t key_of(float score) {
  const auto bits = std::bit_cast<uint32_t>(score);
  return std::isnan(score) ? 0 : (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}

}  // namespace

void choose_rows(const float* scores, int64_t visible, int64_t topk, int64_t row_id_offset, uint32_t* keys,
                 int64_t* out) {
  int64_t* const out_end = out + topk;
  if (visible <= topk) {
    for (int64_t row = 0; row < visible; ++row) {
      *out++ = row + row_id_offset;
    }
    std::fill(out, out_end, -1);
    return;
  }
  for (int64_t row = 0; row < visible; ++row) {
    keys[row] = key_of(scores[row]);
  }
  std::nth_element(keys, keys + topk - 1, keys + visible, std::greater<>());
  const uint32_t threshold = keys[topk - 1];
  // What is left of the places once all larger keys have theirs goes to the lowest of the equal ones.
  int64_t num_equal = topk;
  for (int64_t i = 0; i < topk; ++i) {
    num_equal -= keys[i] > threshold ? 1 : 0;
  }
  for (int64_t row = 0; out != out_end; ++row) {
    const uint32_t key = key_of(scores[row]);
    if (key > threshold || (key == threshold && num_equal-- > 0)) {
      *out++ = row + row_id_offset;
    }
  }
}

}  // namespace shoal::row_select
