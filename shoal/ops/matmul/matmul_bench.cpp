// Products of the shapes of small language models: time, bytes and operations a second, and the share of the bandwidth
// that plain reading reaches in the same run.
//
//   matmul_bench [threads] [m,m,...] [filter of "name format"]
#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

#include "shoal/cpu/thread_pool.h"
#include "shoal/ops/matmul/matmul.h"
#include "shoal/ops/matmul/matmul_cases.h"

namespace shoal {
namespace {

struct Shape {
  const char* name;
  int64_t k;
  std::vector<int64_t> n;
};

const std::vector<Shape> kShapes = {
    {"qkv", 576, {576, 192, 192}}, {"attn_out", 576, {576}},  {"gate_up", 576, {1536, 1536}},
    {"down", 1536, {576}},         {"lm_head", 576, {49152}}, {"square", 4096, {4096}},
};

double read_bandwidth(cpu::ThreadPool& pool) {
  const std::vector<uint64_t> data(size_t{256} << 17, 1);
  std::vector<uint64_t> sums(64 * 16);
  const double seconds = testkit::median_seconds(5, [&] {
    pool.parallel_for(static_cast<int64_t>(data.size()), 8, [&](int64_t begin, int64_t end, int thread_idx) {
      uint64_t sum[8] = {};
      for (int64_t i = begin; i < end; i += 8) {
        for (int j = 0; j < 8; ++j) {
          sum[j] += data[static_cast<size_t>(i + j)];
        }
      }
      for (const uint64_t part : sum) {
        sums[static_cast<size_t>(thread_idx % 64 * 16)] += part;
      }
    });
  });
  return static_cast<double>(data.size() * 8) / seconds;
}

// Copies of one weight that together exceed any cache, so that few rows read memory, as decode steps of a model do.
constexpr int64_t kMaxColdRows = 8;
constexpr int64_t kColdBytes = int64_t{192} << 20;

void bench(const Shape& shape, Format format, const std::vector<int64_t>& row_counts, double bandwidth,
           cpu::ThreadPool& pool) {
  if (shape.k % info(format).block_size != 0) {
    return;
  }
  Workspace workspace;
  OpContext context{.pool = &pool, .workspace = &workspace, .isa = cpu::default_isa()};
  std::vector<testkit::RandomMatrix> raw;
  std::vector<QuantMatrix> parts;
  int64_t num_outputs = 0;
  for (const int64_t n : shape.n) {
    raw.emplace_back(format, n, shape.k, static_cast<uint64_t>(n));
    num_outputs += n;
  }
  parts.reserve(raw.size());
  for (const testkit::RandomMatrix& matrix : raw) {
    parts.push_back(matrix.matrix());
  }
  std::vector<MatmulWeight> copies;
  int64_t num_bytes = 0;
  for (int64_t bytes = 0; bytes < kColdBytes; bytes += num_bytes) {
    copies.push_back(prepare_matmul(parts, MatmulPrecision::kDefault, context));
    num_bytes = copies.back().num_bytes();
  }
  for (const int64_t m : row_counts) {
    Tensor a(DType::kF32, {m, shape.k});
    Tensor out(DType::kF32, {m, num_outputs});
    testkit::Random random(7);
    for (float& value : a.span<float>()) {
      value = random.normal();
    }
    workspace.reserve(matmul_workspace_bytes(copies[0], m));
    const size_t num_copies = m <= kMaxColdRows ? copies.size() : 1;
    const double seconds = testkit::median_seconds(m > 64 ? 3 : 11,
                                                   [&] {
                                                     for (size_t i = 0; i < num_copies; ++i) {
                                                       matmul({.out = out, .a = a, .bias = {}}, copies[i], context);
                                                     }
                                                   }) /
                           static_cast<double>(num_copies);
    const double bytes_per_s = static_cast<double>(num_bytes) / seconds;
    std::printf("%-9s %-6s k %-5lld n %-6lld m %-4lld %10.1f us %7.2f GB/s (%3.0f %% of reading) %8.1f GOP/s\n",
                shape.name, std::string(info(format).name).c_str(), static_cast<long long>(shape.k),
                static_cast<long long>(num_outputs), static_cast<long long>(m), seconds * 1e6, bytes_per_s * 1e-9,
                100 * bytes_per_s / bandwidth, 2e-9 * static_cast<double>(m * num_outputs * shape.k) / seconds);
    std::fflush(stdout);
  }
}

int run(int argc, char** argv) {
  cpu::ThreadPool pool(argc > 1 ? std::atoi(argv[1]) : 0);
  std::vector<int64_t> row_counts;
  for (const char* at = argc > 2 ? argv[2] : "1,8,512"; *at != 0;) {
    char* end = nullptr;
    row_counts.push_back(std::strtoll(at, &end, 10));
    at = *end == ',' ? end + 1 : end;
  }
  const std::string_view filter = argc > 3 ? argv[3] : "";
  const double bandwidth = read_bandwidth(pool);
  std::printf("%s, %s, %d threads, read %.2f GB/s\n", cpu::processor_name().c_str(),
              std::string(cpu::to_string(cpu::default_isa())).c_str(), pool.num_threads(), bandwidth * 1e-9);
  for (const Shape& shape : kShapes) {
    for (const Format format :
         {Format::kQ4_1, Format::kQ4_0, Format::kQ8_0, Format::kQ4_K, Format::kQ6_K, Format::kF16}) {
      if (concat(shape.name, " ", info(format).name).find(filter) != std::string::npos) {
        bench(shape, format, row_counts, bandwidth, pool);
      }
    }
  }
  return 0;
}

}  // namespace
}  // namespace shoal

int main(int argc, char** argv) { return shoal::run(argc, argv); }
