// Comparison, guard bytes, random inputs and timing: for tests and benchmarks only.
#pragma once

#include <chrono>
#include <cstdint>
#include <cstring>
#include <limits>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

namespace shoal::testkit {

// A small deterministic generator: the same seed gives the same values everywhere (std distributions do not promise
// that).
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15ull + 0x1234567ull) {}
  uint64_t bits();                             // 64 random bits (splitmix64)
  float uniform(float low, float high);        // [low, high)
  float normal();                              // mean 0, deviation 1
  int64_t integer(int64_t low, int64_t high);  // [low, high], both included
  std::vector<float> normals(size_t count, float deviation = 1.0f);

 private:
  uint64_t state_;
};

// Memory for outputs, poisoned and fenced: starts as NaN (all bits set), with guard bytes on both sides.
template <class T>
class Guarded {
 public:
  explicit Guarded(size_t count) : count_(count), bytes_(count * sizeof(T) + 2 * kGuard, 0xff) {
    for (size_t i = 0; i < kGuard; ++i) {
      bytes_[i] = bytes_[bytes_.size() - 1 - i] = kGuardByte;
    }
  }
  T* data() { return reinterpret_cast<T*>(bytes_.data() + kGuard); }
  std::span<T> span() { return {data(), count_}; }
  size_t size() const { return count_; }
  bool guards_intact() const {
    for (size_t i = 0; i < kGuard; ++i) {
      if (bytes_[i] != kGuardByte || bytes_[bytes_.size() - 1 - i] != kGuardByte) {
        return false;
      }
    }
    return true;
  }

 private:
  static constexpr size_t kGuard = 64;
  static constexpr uint8_t kGuardByte = 0xa5;
  size_t count_;
  std::vector<uint8_t> bytes_;
};

// Element-wise |actual - expected| <= atol + rtol |expected|; infinities and NaN must stand at the same places.
struct Comparison {
  bool ok = true;
  size_t num_bad = 0;
  size_t worst_idx = 0;
  double worst_excess = 0.0;       // by how much the tolerance was passed
  double relative_distance = 0.0;  // |actual - expected| / |expected|, whole tensor
  std::string text;                // for the failure message
  explicit operator bool() const { return ok; }
};
Comparison compare(std::span<const float> actual, std::span<const float> expected, double rtol, double atol);

// Median of `runs` timings of body() in seconds, after one warm-up call.
template <class Body>
double median_seconds(int runs, Body&& body) {
  body();
  std::vector<double> seconds;
  for (int i = 0; i < runs; ++i) {
    const auto start = std::chrono::steady_clock::now();
    body();
    seconds.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  for (size_t i = 1; i < seconds.size(); ++i) {
    for (size_t j = i; j > 0 && seconds[j] < seconds[j - 1]; --j) {
      std::swap(seconds[j], seconds[j - 1]);
    }
  }
  return seconds[seconds.size() / 2];
}

}  // namespace shoal::testkit
