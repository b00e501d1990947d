// The choice among scores, apart from how they came about.
#pragma once

#include <cstdint>

namespace shoal::row_select {

// The first `visible` of scores compete; out has topk entries. `keys` is scratch memory for `visible` values; with
// visible <= topk neither it nor the scores are looked at.
void choose_rows(const float* scores, int64_t visible, int64_t topk, int64_t row_id_offset, uint32_t* keys,
                 int64_t* out);

}  // namespace shoal::row_select
