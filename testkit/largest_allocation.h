// Tests that untrusted counts do not reserve memory: the largest single operator new while the object lives.
//
// Replaces the global operator new of the program: include it in exactly one source of a test.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <new>

namespace shoal::testkit {

inline std::atomic<size_t> g_largest_allocation{0};

class LargestAllocation {
 public:
  LargestAllocation() { g_largest_allocation = 0; }
  size_t bytes() const { return g_largest_allocation; }
};

inline void* count_allocation(size_t num_bytes) {
  if (num_bytes > g_largest_allocation) {
    g_largest_allocation = num_bytes;
  }
  if (void* memory = std::malloc(num_bytes == 0 ? 1 : num_bytes)) {
    return memory;
  }
  throw std::bad_alloc();
}

}  // namespace shoal::testkit

void* operator new(size_t num_bytes) { return shoal::testkit::count_allocation(num_bytes); }
void* operator new[](size_t num_bytes) { return shoal::testkit::count_allocation(num_bytes); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, size_t) noexcept { std::free(memory); }
