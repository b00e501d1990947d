// Integer arithmetic that reports overflow instead of wrapping: for every count, offset and product read from outside.
#pragma once

#include <concepts>
#include <cstdint>
#include <optional>

namespace shoal {

template <std::integral T>
[[nodiscard]] constexpr std::optional<T> checked_add(T a, T b) {
  T result{};
  return __builtin_add_overflow(a, b, &result) ? std::nullopt : std::optional<T>(result);
}

template <std::integral T>
[[nodiscard]] constexpr std::optional<T> checked_mul(T a, T b) {
  T result{};
  return __builtin_mul_overflow(a, b, &result) ? std::nullopt : std::optional<T>(result);
}

template <std::integral T>
[[nodiscard]] constexpr T ceil_div(T a, T b) {
  return a / b + (a % b != 0 ? 1 : 0);
}

template <std::integral T>
[[nodiscard]] constexpr T round_up(T a, T multiple) {
  return ceil_div(a, multiple) * multiple;
}

template <std::integral T>
[[nodiscard]] constexpr bool is_power_of_two(T a) {
  return a > 0 && (a & (a - 1)) == 0;
}

}  // namespace shoal
