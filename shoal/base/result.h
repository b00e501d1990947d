// Result<T, E>: a value, or the reason there is none. For outcomes that a correct caller can meet.
#pragma once

#include <utility>
#include <variant>

#include "shoal/base/error.h"

namespace shoal {

template <class T, class E>
class [[nodiscard]] Result {
 public:
  Result(T value) : state_(std::in_place_index<0>, std::move(value)) {}    // NOLINT: implicit on purpose
  Result(E reason) : state_(std::in_place_index<1>, std::move(reason)) {}  // NOLINT: implicit on purpose

  bool ok() const noexcept { return state_.index() == 0; }
  explicit operator bool() const noexcept { return ok(); }

  T& value() {
    SHOAL_ASSERT(ok());
    return std::get<0>(state_);
  }
  const T& value() const {
    SHOAL_ASSERT(ok());
    return std::get<0>(state_);
  }
  const E& reason() const {
    SHOAL_ASSERT(!ok());
    return std::get<1>(state_);
  }

 private:
  std::variant<T, E> state_;
};

}  // namespace shoal
