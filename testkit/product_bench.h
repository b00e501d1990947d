// Timing of a product with one weight matrix: for benchmarks.
#pragma once

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "shoal/cpu/isa.h"
#include "shoal/cpu/thread_pool.h"
#include "shoal/tensor/tensor.h"
#include "testkit/testkit.h"

namespace shoal::testkit {

inline Tensor filled(DType type, std::initializer_list<int64_t> shape, int byte) {
  Tensor tensor(type, shape);
  std::memset(tensor.view().data, byte, tensor.view().num_bytes());
  return tensor;
}

// Prints the least and the median of several runs of body().
template <class Body>
void report_product(const std::string& name, const cpu::ThreadPool& pool, int64_t m, int64_t n, int64_t k,
                    Body&& body) {
  body();
  std::vector<double> seconds;
  for (int i = 0; i < (m > 64 ? 3 : 15); ++i) {
    const auto start = std::chrono::steady_clock::now();
    body();
    seconds.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  std::sort(seconds.begin(), seconds.end());
  std::printf("%s, %d threads: %s n %lld k %lld m %lld: least %.0f us, median %.0f us, %.1f GFLOP/s\n",
              std::string(cpu::to_string(cpu::default_isa())).c_str(), pool.num_threads(), name.c_str(),
              static_cast<long long>(n), static_cast<long long>(k), static_cast<long long>(m), seconds.front() * 1e6,
              seconds[seconds.size() / 2] * 1e6, 2e-9 * static_cast<double>(m * n * k) / seconds.front());
  std::fflush(stdout);
}

}  // namespace shoal::testkit
