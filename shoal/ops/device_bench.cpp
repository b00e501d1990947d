// Operators on a CUDA device at the shapes of published models: time, bytes and flops a second, share of what a large copy
// and a large read reach in the same run. JSON, a line each. Buffers rotate past the L2 cache; medians of replays.
//
//   device_bench [FILTER]
#include <algorithm>
#include <cstdio>
#include <functional>
#include <string>
#include <vector>

#include "shoal/cpu/thread_pool.h"
#include "shoal/cuda/device.h"
#include "shoal/ops/activation/activation.h"
#include "shoal/ops/matmul/matmul.h"
#include "shoal/ops/norm/norm.h"
#include "shoal/ops/paged_attention/paged_attention.h"
#include "shoal/ops/rows/rows.h"
#include "shoal/quant/quantize.h"
#include "testkit/testkit.h"

namespace shoal {
namespace {

constexpr int64_t kColdBytes = int64_t{256} << 20;  // rotated over: five times the L2 cache

class Bench {
 public:
  explicit Bench(std::string filter)
      : filter_(std::move(filter)), pool_(0), allocator_(cuda::allocator(0)), workspace_(allocator_) {
    cuda::use_device(0);
    context_.pool = &pool_;
    context_.workspace = &workspace_;
    context_.isa = cpu::default_isa();
    context_.device = allocator_.device;
    context_.stream = stream_.get();
    workspace_.reserve(size_t{2} << 30);
    measure_copy();
  }

  const OpContext& context() const { return context_; }
  bool wants(const std::string& name) const { return name.find(filter_) != std::string::npos; }

  Tensor tensor(DType dtype, std::vector<int64_t> shape) const { return Tensor(dtype, shape, allocator_); }
  // Random bytes that are numbers of about one as f32, bf16 and f16.
  Tensor noise(DType dtype, std::vector<int64_t> shape) {
    Tensor host(dtype, shape);
    auto* bytes = host.view().as<uint8_t>();
    const auto num_bytes = static_cast<int64_t>(host.view().num_bytes());
    pool_.parallel_for(num_bytes, 1 << 20, [&](int64_t begin, int64_t end, int) {
      uint64_t state = static_cast<uint64_t>(begin) * 0x9e3779b97f4a7c15ull + 1;
      for (int64_t i = begin; i < end; ++i) {
        state = state * 6364136223846793005ull + 1442695040888963407ull;
        bytes[i] = static_cast<uint8_t>(state >> 56);
      }
      const int64_t item = static_cast<int64_t>(size_of(dtype));
      for (int64_t i = (begin + item - 1) / item * item + item - 1; item > 1 && i < end; i += item) {
        bytes[i] = static_cast<uint8_t>((bytes[i] & 0x80) | 0x3e);
      }
    });
    return to_device(host);
  }
  Tensor to_device(const Tensor& host) const {
    Tensor placed(host.view().dtype, host.view().dims(), allocator_);
    cuda::copy(placed.view().data, host.view().data, host.view().num_bytes(), context_.stream);
    cuda::synchronize(context_.stream);
    return placed;
  }

  // Times one(i) for i = 0, 1, ...: each call works on other memory, `num_sets` of them.
  void report(const std::string& name, double bytes, double flops, int64_t num_sets,
              const std::function<void(int64_t)>& one) {
    for (int64_t i = 0; i < std::min<int64_t>(num_sets, 3); ++i) {
      one(i);
    }
    cuda::synchronize(context_.stream);
    const int64_t calls = std::max<int64_t>(num_sets, 8);
    cuda::Graph::begin(context_.stream);
    for (int64_t i = 0; i < calls; ++i) {
      one(i % num_sets);
    }
    const cuda::Graph graph = cuda::Graph::end(context_.stream);
    std::vector<double> seconds;
    constexpr int kRuns = 9;
    for (int run = 0; run < kRuns; ++run) {
      graph.launch(context_.stream);  // the host is ahead: the next one is timed
      const cuda::Event begin(context_.stream);
      graph.launch(context_.stream);
      const cuda::Event end(context_.stream);
      cuda::synchronize(context_.stream);
      seconds.push_back(cuda::seconds_between(begin, end) / static_cast<double>(calls));
    }
    std::ranges::sort(seconds);
    const double each = seconds[seconds.size() / 2];
    std::printf("{\"case\": \"%s\", \"us\": %.2f, \"gb_s\": %.0f, \"share_of_copy\": %.3f, \"tflop_s\": %.1f}\n",
                name.c_str(), 1e6 * each, 1e-9 * bytes / each, bytes / each / copy_rate_, 1e-12 * flops / each);
    std::fflush(stdout);
  }

 private:
  void measure_copy() {
    constexpr size_t kBytes = size_t{2} << 30;
    const AlignedBuffer from(kBytes, allocator_);
    const AlignedBuffer to(kBytes, allocator_);
    std::vector<double> seconds;
    for (int run = 0; run < 7; ++run) {
      const cuda::Event begin(context_.stream);
      cuda::copy(to.data(), from.data(), kBytes, context_.stream);
      const cuda::Event end(context_.stream);
      cuda::synchronize(context_.stream);
      seconds.push_back(cuda::seconds_between(begin, end));
    }
    std::ranges::sort(seconds);
    copy_rate_ = 2.0 * kBytes / seconds[seconds.size() / 2];
    std::printf("{\"device\": \"%s\", \"copy_gb_s\": %.0f}\n", cuda::device_info(0).name.c_str(), 1e-9 * copy_rate_);
  }

  std::string filter_;
  cpu::ThreadPool pool_;
  Allocator allocator_;
  cuda::OwnedStream stream_;
  Workspace workspace_;
  OpContext context_;
  double copy_rate_ = 1.0;
};

void bench_matmul(Bench& bench, Format format, int64_t n, int64_t k, std::initializer_list<int64_t> rows) {
  Tensor values(DType::kF32, {n, k});
  testkit::Random random(1);
  for (float& value : values.span<float>()) {
    value = random.uniform(-0.05f, 0.05f);
  }
  const QuantParts parts = quantize(format, values);
  QuantMatrix matrix{.format = format, .n = n, .k = k, .codes = parts.codes.view().as<const std::byte>()};
  matrix.scales = parts.scales;
  matrix.group_size = info(format).is_scaled ? 32 : 0;
  std::vector<MatmulWeight> weights;
  weights.push_back(prepare_matmul({&matrix, 1}, MatmulPrecision::kDefault, bench.context()));
  const int64_t bytes = weights.front().num_bytes();
  for (int64_t i = 1; i < kColdBytes / bytes + 1; ++i) {
    weights.push_back(prepare_matmul({&matrix, 1}, MatmulPrecision::kDefault, bench.context()));
  }
  for (const int64_t m : rows) {
    const std::string name = "matmul " + std::string(info(format).name) + " " + std::to_string(m) + "x" +
                             std::to_string(n) + "x" + std::to_string(k);
    if (!bench.wants(name)) {
      continue;
    }
    const Tensor a = bench.noise(DType::kF32, {m, k});
    const Tensor out = bench.tensor(DType::kF32, {m, n});
    bench.report(name, static_cast<double>(bytes) + 4.0 * static_cast<double>(m * (n + k)),
                 2.0 * static_cast<double>(m * n * k), m > 64 ? 2 : static_cast<int64_t>(weights.size()),
                 [&](int64_t i) { matmul({.out = out, .a = a}, weights[static_cast<size_t>(i)], bench.context()); });
  }
}

void bench_experts(Bench& bench, Format format, int64_t num_experts, int64_t top_k, int64_t n, int64_t k,
                   std::initializer_list<int64_t> tokens) {
  Tensor values(DType::kF32, {n, k});
  testkit::Random random(1);
  for (float& value : values.span<float>()) {
    value = random.uniform(-0.05f, 0.05f);
  }
  const QuantParts parts = quantize(format, values);
  const QuantMatrix matrix{.format = format, .n = n, .k = k, .codes = parts.codes.view().as<const std::byte>()};
  std::vector<MatmulWeight> weights;
  for (int64_t e = 0; e < num_experts; ++e) {
    weights.push_back(prepare_matmul({&matrix, 1}, MatmulPrecision::kDefault, bench.context()));
  }
  const double expert_bytes = static_cast<double>(weights.front().num_bytes());
  const GroupedWeights groups(std::move(weights), bench.context());
  for (const int64_t m : tokens) {
    const std::string name = "experts " + std::string(info(format).name) + " " + std::to_string(num_experts) + " top " +
                             std::to_string(top_k) + " " + std::to_string(m) + "x" + std::to_string(n) + "x" +
                             std::to_string(k);
    if (!bench.wants(name)) {
      continue;
    }
    const int64_t num_rows = m * top_k;
    const TileCount count = matmul_tiles(num_rows, num_experts);
    struct Set {
      Tensor source, tiles;
    };
    std::vector<Set> sets;
    double touched = 0.0;
    const int64_t num_sets = m > 64 ? 1 : num_experts / std::min(num_experts, num_rows) * 2;
    for (int64_t i = 0; i < num_sets; ++i) {
      Tensor ids(DType::kI32, {m, top_k});
      std::vector<bool> used(static_cast<size_t>(num_experts));
      for (int64_t t = 0; t < m; ++t) {
        const int64_t first = random.integer(0, num_experts - 1);
        for (int64_t j = 0; j < top_k; ++j) {  // distinct, spread
          const int64_t e = (first + j * (num_experts / top_k)) % num_experts;
          ids.span<int32_t>()[static_cast<size_t>(t * top_k + j)] = static_cast<int32_t>(e);
          used[static_cast<size_t>(e)] = true;
        }
      }
      touched += static_cast<double>(std::ranges::count(used, true));
      Set set{bench.tensor(DType::kI32, {num_rows}), bench.tensor(DType::kI32, {count.num_tiles, 4})};
      const Tensor row_of = bench.tensor(DType::kI32, {m, top_k});
      const Tensor row_begin = bench.tensor(DType::kI32, {num_experts + 1});
      const Tensor device_ids = bench.to_device(ids);
      sort_rows({.row_of = row_of,
                 .source = set.source,
                 .row_begin = row_begin,
                 .tiles = set.tiles,
                 .expert_ids = device_ids,
                 .num_experts = num_experts,
                 .tile_rows = count.tile_rows},
                bench.context());
      cuda::synchronize(bench.context().stream);
      sets.push_back(std::move(set));
    }
    const Tensor a = bench.noise(DType::kF32, {m, k});
    const Tensor out = bench.tensor(DType::kF32, {num_rows, n});
    bench.report(
        name, touched / static_cast<double>(num_sets) * expert_bytes + 4.0 * static_cast<double>(m * k + num_rows * n),
        2.0 * static_cast<double>(num_rows * n * k), num_sets, [&](int64_t i) {
          const Set& set = sets[static_cast<size_t>(i)];
          tiled_matmul({.out = out, .a = a, .source = set.source, .tiles = set.tiles, .tile_rows = count.tile_rows},
                       groups, bench.context());
        });
  }
}

// A KV cache whose values take `bits`; codes have a scale a channel.
struct CacheKind {
  const char* name;
  DType dtype;
  int64_t bits;
};
constexpr CacheKind kBf16Cache{"bf16", DType::kBF16, 16};
constexpr CacheKind kInt8Cache{"int8", DType::kI8, 8};
constexpr CacheKind kInt4Cache{"int4", DType::kU8, 4};

void bench_attention(Bench& bench, const CacheKind& kind, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim,
                     int64_t past, int64_t rows) {
  const std::string name = std::string("attention ") + kind.name + " " + std::to_string(num_heads) + "/" +
                           std::to_string(num_kv_heads) + "x" + std::to_string(head_dim) + " " + std::to_string(rows) +
                           " after " + std::to_string(past);
  if (!bench.wants(name)) {
    return;
  }
  constexpr int64_t kPage = 32;
  const int64_t kv_len = past + rows;
  const int64_t num_pages = (kv_len + kPage - 1) / kPage;
  const double cache_bytes = 2.0 * static_cast<double>(kv_len * num_kv_heads * head_dim * kind.bits) / 8.0;
  const int64_t width = kind.bits == 4 ? head_dim / 2 : head_dim;
  const int64_t num_sets = rows > 64 ? 1 : std::max<int64_t>(1, static_cast<int64_t>(kColdBytes / cache_bytes) + 1);
  std::vector<Tensor> keys;
  std::vector<Tensor> values;
  for (int64_t i = 0; i < num_sets; ++i) {
    keys.push_back(bench.noise(kind.dtype, {num_pages, kPage, num_kv_heads, width}));
    values.push_back(bench.noise(kind.dtype, {num_pages, kPage, num_kv_heads, width}));
  }
  Tensor table(DType::kI32, {1, num_pages});
  for (int64_t i = 0; i < num_pages; ++i) {
    table.span<int32_t>()[static_cast<size_t>(i)] = static_cast<int32_t>((i * 7919) % num_pages);
  }
  Tensor lens(DType::kI32, {2});
  lens.span<int32_t>()[0] = 0;
  lens.span<int32_t>()[1] = static_cast<int32_t>(rows);
  Tensor pasts(DType::kI32, {1});
  pasts.span<int32_t>()[0] = static_cast<int32_t>(past);
  const Tensor device_table = bench.to_device(table);
  const Tensor device_lens = bench.to_device(lens);
  const Tensor device_pasts = bench.to_device(pasts);
  const Tensor qkv = bench.noise(DType::kF32, {rows, (num_heads + 2 * num_kv_heads) * head_dim});
  const Tensor out = bench.tensor(DType::kF32, {rows, num_heads * head_dim});
  Tensor host_scales(DType::kF32, {num_kv_heads * head_dim});
  std::ranges::fill(host_scales.span<float>(), kind.bits == 4 ? 0.3f : 0.02f);
  const Tensor scales = bench.to_device(host_scales);
  const double pairs = static_cast<double>(rows) * (static_cast<double>(past) + static_cast<double>(rows + 1) / 2.0);
  bench.report(name, cache_bytes, 4.0 * pairs * static_cast<double>(num_heads * head_dim), num_sets, [&](int64_t i) {
    PagedAttentionArgs args;
    args.output = out;
    args.query = qkv;
    args.key_cache = keys[static_cast<size_t>(i)];
    args.value_cache = values[static_cast<size_t>(i)];
    args.cumulative_sequence_length = device_lens;
    args.past_seqlens = device_pasts;
    args.block_table = device_table;
    args.num_heads = num_heads;
    args.kv_num_heads = num_kv_heads;
    if (kind.bits < 16) {
      args.k_scale = scales;
      args.v_scale = scales;
      args.k_quant_type = "PER_CHANNEL";
      args.v_quant_type = "PER_CHANNEL";
    }
    if (kind.bits == 4) {
      args.k_cache_dtype = "int4";
      args.v_cache_dtype = "int4";
    }
    paged_attention(args, bench.context());
  });
}

void bench_norm(Bench& bench, int64_t rows, int64_t hidden) {
  const std::string name = "rms_norm with residual " + std::to_string(rows) + "x" + std::to_string(hidden);
  if (!bench.wants(name)) {
    return;
  }
  const Tensor x = bench.noise(DType::kF32, {rows, hidden});
  const Tensor residual = bench.noise(DType::kF32, {rows, hidden});
  const Tensor weight = bench.noise(DType::kF32, {hidden});
  const Tensor out = bench.tensor(DType::kF32, {rows, hidden});
  bench.report(name, 16.0 * static_cast<double>(rows * hidden), 0.0, 1, [&](int64_t) {
    rms_norm({.out = out, .x = x, .weight = weight, .residual = residual, .residual_out = residual}, bench.context());
  });
}

void bench_gate(Bench& bench, int64_t rows, int64_t width) {
  const std::string name = "swiglu " + std::to_string(rows) + "x" + std::to_string(width);
  if (!bench.wants(name)) {
    return;
  }
  const Tensor gate = bench.noise(DType::kF32, {rows, width});
  const Tensor value = bench.noise(DType::kF32, {rows, width});
  const Tensor out = bench.tensor(DType::kF32, {rows, width});
  bench.report(name, 12.0 * static_cast<double>(rows * width), 0.0, 1, [&](int64_t) {
    gated_activation({.out = out, .gate = gate, .value = value, .kind = Gate::kSilu}, bench.context());
  });
}

void run(const std::string& filter) {
  Bench bench(filter);
  for (const Format format :
       {Format::kQ4_K, Format::kQ4_0, Format::kQ8_0, Format::kQ6_K, Format::kGGUF_MXFP4, Format::kBF16}) {
    bench_matmul(bench, format, 8192, 8192, {1, 8, 16, 32, 4096});
  }
  bench_matmul(bench, Format::kQ4_K, 5120, 2048, {1, 8});
  bench_matmul(bench, Format::kQ4_K, 2048, 4096, {1, 8});
  bench_experts(bench, Format::kQ4_K, 128, 8, 1536, 2048, {1, 2, 8, 512, 8192});
  bench_experts(bench, Format::kQ4_K, 128, 8, 2048, 768, {1, 8, 8192});
  bench_experts(bench, Format::kQ4_K, 256, 8, 3072, 3072, {1, 2, 8, 8192});
  for (const int64_t past : {8191, 65535, 131071}) {
    for (const int64_t rows : {1, 4, 8}) {
      bench_attention(bench, kBf16Cache, 48, 8, 128, past, rows);
    }
  }
  for (const CacheKind& kind : {kInt8Cache, kInt4Cache}) {
    for (const int64_t past : {65535, 131071}) {
      for (const int64_t rows : {1, 8}) {
        bench_attention(bench, kind, 48, 8, 128, past, rows);
      }
    }
  }
  bench_attention(bench, kBf16Cache, 32, 4, 128, 8191, 1);
  bench_attention(bench, kBf16Cache, 48, 8, 128, 0, 8192);
  bench_attention(bench, kBf16Cache, 48, 8, 128, 24576, 8192);
  bench_attention(bench, kBf16Cache, 32, 4, 128, 0, 8192);
  bench_norm(bench, 8192, 4096);
  bench_gate(bench, 8192, 6144);
}

}  // namespace
}  // namespace shoal

int main(int argc, char** argv) {
  try {
    shoal::run(argc > 1 ? argv[1] : "");
  } catch (const std::exception& error) {
    std::fprintf(stderr, "device_bench: %s\n", error.what());
    return 1;
  }
  return 0;
}
