// Memory throughput of operators that move more than they compute: their rate and its share of a plain copy's, both
// measured in the same run on the same thread pool.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "shoal/cpu/thread_pool.h"
#include "testkit/testkit.h"

namespace shoal::testkit {

// Bytes read and written a second (in 10^9) by copying `num_bytes` bytes.
inline double copy_gb_per_s(cpu::ThreadPool& pool, int64_t num_bytes, int runs) {
  const std::vector<char> from(static_cast<size_t>(num_bytes), 1);
  std::vector<char> to(static_cast<size_t>(num_bytes));
  const double seconds = median_seconds(runs, [&] {
    pool.parallel_for(num_bytes, 65536, [&](int64_t begin, int64_t end, int) {
      std::memcpy(to.data() + begin, from.data() + begin, static_cast<size_t>(end - begin));
    });
  });
  return 2e-9 * static_cast<double>(num_bytes) / seconds;
}

// Prints a line for an operator that reads `read_bytes` and writes `written_bytes`.
template <class Body>
void report_bandwidth(const std::string& name, cpu::ThreadPool& pool, int64_t read_bytes, int64_t written_bytes,
                      Body&& body) {
  constexpr int kRuns = 15;
  const double seconds = median_seconds(kRuns, body);
  const double rate = 1e-9 * static_cast<double>(read_bytes + written_bytes) / seconds;
  const double copy = copy_gb_per_s(pool, (read_bytes + written_bytes) / 2, kRuns);
  std::printf("%-44s %10.1f us %8.2f GB/s %6.1f %% of a copy (%.2f GB/s)\n", name.c_str(), seconds * 1e6, rate,
              100.0 * rate / copy, copy);
}

}  // namespace shoal::testkit
