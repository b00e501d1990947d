#include "testkit/testkit.h"

#include <cmath>
#include <sstream>

namespace shoal::testkit {

uint64_t Random::bits() {
  state_ += 0x9e3779b97f4a7c15ull;
  uint64_t z = state_;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}

float Random::uniform(float low, float high) {
  const auto unit = static_cast<float>(bits() >> 40) * 0x1p-24f;
  return low + (high - low) * unit;
}

float Random::normal() {
  // Sum of twelve uniforms: mean 0, deviation 1, no transcendental functions that differ between libraries.
  float sum = -6.0f;
  for (int i = 0; i < 12; ++i) {
    sum += uniform(0.0f, 1.0f);
  }
  return sum;
}

int64_t Random::integer(int64_t low, int64_t high) {
  return low + static_cast<int64_t>(bits() % static_cast<uint64_t>(high - low + 1));
}

std::vector<float> Random::normals(size_t count, float deviation) {
  std::vector<float> values(count);
  for (float& value : values) {
    value = normal() * deviation;
  }
  return values;
}

Comparison compare(std::span<const float> actual, std::span<const float> expected, double rtol, double atol) {
  Comparison result;
  std::ostringstream text;
  if (actual.size() != expected.size()) {
    text << actual.size() << " values, expected " << expected.size();
    result.ok = false;
    result.text = text.str();
    return result;
  }
  double distance = 0.0;
  double norm = 0.0;
  for (size_t i = 0; i < actual.size(); ++i) {
    const double a = actual[i];
    const double e = expected[i];
    const bool same_class = std::isnan(a) == std::isnan(e) && std::isinf(a) == std::isinf(e);
    double excess = 0.0;
    if (!same_class || (std::isinf(a) && a != e)) {
      excess = std::numeric_limits<double>::infinity();
    } else if (std::isfinite(a)) {
      excess = std::abs(a - e) - (atol + rtol * std::abs(e));
      distance += (a - e) * (a - e);
      norm += e * e;
    }
    if (excess > 0.0) {
      ++result.num_bad;
      if (excess > result.worst_excess) {
        result.worst_excess = excess;
        result.worst_idx = i;
      }
    }
  }
  result.relative_distance = std::sqrt(distance / (norm > 0.0 ? norm : 1.0));
  result.ok = result.num_bad == 0;
  if (!result.ok) {
    text << result.num_bad << " of " << actual.size() << " values differ, worst at " << result.worst_idx << ": "
         << actual[result.worst_idx] << ", expected " << expected[result.worst_idx] << " (relative distance "
         << result.relative_distance << ")";
  }
  result.text = text.str();
  return result;
}

}  // namespace shoal::testkit
