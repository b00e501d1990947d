// The choice of the largest: the one place where ties, infinities and NaN are ordered.
#pragma once

#include <cmath>
#include <cstdint>

namespace shoal::router {

// Before any other: +inf, finite numbers, -inf, NaN. False for equals, so that who came first stays first.
inline bool before(float a, float b) {
  if (std::isnan(a)) {
    return false;
  }
  return std::isnan(b) || a > b;
}

// Offers candidate `id` to the best ones so far, kept in order. Ascending ids make ties go to the lower id.
class Chosen {
 public:
  // `values` and `ids` have room for `capacity`.
  Chosen(float* values, int32_t* ids, int64_t capacity) : values_(values), ids_(ids), capacity_(capacity) {}

  void offer(float value, int32_t id) {
    if (count_ == capacity_ && !before(value, values_[count_ - 1])) {
      return;
    }
    int64_t place = count_ < capacity_ ? count_++ : count_ - 1;
    for (; place > 0 && before(value, values_[place - 1]); --place) {
      values_[place] = values_[place - 1];
      ids_[place] = ids_[place - 1];
    }
    values_[place] = value;
    ids_[place] = id;
  }

 private:
  float* values_;
  int32_t* ids_;
  int64_t capacity_;
  int64_t count_ = 0;
};

}  // namespace shoal::router
