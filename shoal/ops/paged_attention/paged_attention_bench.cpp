// Speed of paged_attention on the shapes of real models, as text: median and best time, GFLOP/s, GB/s of cache read,
// and the share of the f32 peak of the processor time that was used (which stays meaningful on a busy machine).
//
//   paged_attention_bench [part of a case's name] [threads]
#include <time.h>

#include <cstdio>
#include <string>

#include "shoal/ops/paged_attention/paged_attention_cases.h"

namespace shoal {
namespace {

using paged_cases::Case;
using paged_cases::Step;

// Processor time of all threads, in seconds.
double cpu_seconds() {
  timespec time{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}

// What one core can do in a second of processor time: twelve independent chains of fused multiply-adds.
double peak_gflops(cpu::Isa isa) {
  double best = 1e9;
#if defined(__x86_64__)
  constexpr int64_t kRounds = 1'000'000;
  for (int run = 0; run < 9; ++run) {
    const double start = cpu_seconds();
    for (int64_t i = 0; i < kRounds; ++i) {
#define SHOAL_FMA(n, reg) "vfmadd231ps %%" reg "mm15, %%" reg "mm14, %%" reg "mm" #n "\n\t"
#define SHOAL_FMAS(reg) \
  SHOAL_FMA(0, reg)     \
  SHOAL_FMA(1, reg)     \
  SHOAL_FMA(2, reg)     \
  SHOAL_FMA(3, reg)     \
  SHOAL_FMA(4, reg)     \
  SHOAL_FMA(5, reg)     \
  SHOAL_FMA(6, reg) SHOAL_FMA(7, reg) SHOAL_FMA(8, reg) SHOAL_FMA(9, reg) SHOAL_FMA(10, reg) SHOAL_FMA(11, reg)
#define SHOAL_CLOBBERS \
  "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm14", "xmm15"
      if (isa == cpu::Isa::kAvx512) {
        asm volatile(SHOAL_FMAS("z")::: SHOAL_CLOBBERS);
      } else {
        asm volatile(SHOAL_FMAS("y")::: SHOAL_CLOBBERS);
      }
    }
    best = std::min(best, cpu_seconds() - start);
  }
  return 12.0 * (isa == cpu::Isa::kAvx512 ? 32.0 : 16.0) * static_cast<double>(kRounds) / best * 1e-9;
#else
  static_cast<void>(isa);
  return 0.0;
#endif
}

double admitted_pairs(const Step& s) {
  double pairs = 0.0;
  for (int64_t t = 0; t < s.num_tokens; ++t) {
    const int64_t keys = s.pos_of(t) + 1;
    pairs += static_cast<double>(s.c.window > 0 ? std::min(keys, s.c.window) : keys);
  }
  return pairs * static_cast<double>(s.c.num_heads);
}

// Bytes of K and V that the step's sequences hold inside their windows, each once.
double cache_bytes(const Step& s) {
  double keys = 0.0;
  for (size_t b = 0; b < s.past.size(); ++b) {
    const int64_t len = s.past[b] + s.c.lens[b];
    keys += static_cast<double>(s.c.window > 0 ? std::min(len, s.c.window + s.c.lens[b]) : len);
  }
  const auto bytes = [](const Tensor& pool) {
    return pool.view().dim(3) * static_cast<int64_t>(size_of(pool.view().dtype));
  };
  return keys * static_cast<double>(s.c.num_kv_heads * (bytes(s.k_pool) + (s.latent ? 0 : bytes(s.v_pool))));
}

std::vector<Case> bench_cases() {
  std::vector<Case> cases;
  const auto add = [&](const std::string& name, Case c) {
    c.name = name;
    cases.push_back(c);
  };
  const Case smollm = {.num_heads = 9, .num_kv_heads = 3, .head_dim = 64, .rotary = paged_cases::Rotary::kHalf};
  const Case gemma = {.num_heads = 4,
                      .num_kv_heads = 1,
                      .head_dim = 256,
                      .window = 512,
                      .norm = true,
                      .rotary = paged_cases::Rotary::kHalf};
  const auto step = [](Case c, std::vector<int32_t> past, std::vector<int32_t> lens) {
    c.past = std::move(past);
    c.lens = std::move(lens);
    return c;
  };
  for (const int32_t tokens : {512, 2048}) {
    add(concat("smollm2_prefill_", tokens), step(smollm, {0}, {tokens}));
    add(concat("gemma3_prefill_", tokens), step(gemma, {0}, {tokens}));
  }
  add("smollm2_chunk_512_at_1536", step(smollm, {1536}, {512}));
  for (const int32_t context : {128, 1024, 8192}) {
    add(concat("smollm2_decode_", context), step(smollm, {context}, {1}));
  }
  add("smollm2_decode_batch8_1024", step(smollm, std::vector<int32_t>(8, 1024), std::vector<int32_t>(8, 1)));
  add("smollm2_verify5_4096", step(smollm, {4096}, {5}));
  Case int8 = smollm;
  int8.k_cache = int8.v_cache = DType::kI8;
  int8.k_quant = int8.v_quant = "PER_CHANNEL";
  add("smollm2_int8_decode_8192", step(int8, {8192}, {1}));
  add("gemma3_decode_1024", step(gemma, {1024}, {1}));
  Case global = gemma;
  global.window = -1;
  add("gemma3_global_decode_8192", step(global, {8192}, {1}));
  Case large = {.num_heads = 32, .num_kv_heads = 8, .head_dim = 128};
  add("h128_decode_4096", step(large, {4096}, {1}));
  add("h128_prefill_512", step(large, {0}, {512}));
  Case mla = {.num_heads = 128, .num_kv_heads = 1, .head_dim = 576, .v_head_dim = 512, .scale = 0.0722f};
  add("latent_decode_1024", step(mla, {1024}, {1}));
  return cases;
}

int bench(const std::string& filter, int num_threads) {
  cpu::ThreadPool pool(num_threads);
  const cpu::Isa isa = cpu::default_isa();
  if (isa == cpu::Isa::kScalar) {
    std::printf("the scalar instruction set has no peak to compare with\n");
  }
  const double peak = isa == cpu::Isa::kScalar ? 0.0 : peak_gflops(isa);
  std::printf("%s, %s, %d threads, peak %.1f GFLOP/s a core (f32 fma)\n", cpu::processor_name().c_str(),
              std::string(cpu::to_string(isa)).c_str(), pool.num_threads(), peak);
  std::printf("%-30s %10s %10s %10s %10s %8s %7s\n", "case", "median us", "best us", "cpu us", "GFLOP/s", "GB/s",
              "peak");
  for (const Case& c : bench_cases()) {
    if (c.name.find(filter) == std::string::npos) {
      continue;
    }
    Step s(c);
    const PagedAttentionArgs args = s.args();
    Workspace workspace(paged_attention_workspace_bytes(args, pool.num_threads()));
    double best = 1e9;
    double best_cpu = 1e9;
    const double median = testkit::median_seconds(s.num_tokens > 256 ? 5 : 50, [&] {
      const double cpu_start = cpu_seconds();
      const auto start = std::chrono::steady_clock::now();
      paged_attention(args, {&pool, &workspace, isa, {}});
      best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
      best_cpu = std::min(best_cpu, cpu_seconds() - cpu_start);
    });
    const double gflop = admitted_pairs(s) * 2.0 * static_cast<double>(s.c.head_dim + s.v_dim) * 1e-9;
    std::printf("%-30s %10.1f %10.1f %10.1f %10.1f %8.2f %6.1f%%\n", c.name.c_str(), median * 1e6, best * 1e6,
                best_cpu * 1e6, gflop / best, cache_bytes(s) / best * 1e-9,
                peak == 0.0 ? 0.0 : 100.0 * gflop / best_cpu / peak);
  }
  return 0;
}

}  // namespace
}  // namespace shoal

int main(int argc, char** argv) { return shoal::bench(argc > 1 ? argv[1] : "", argc > 2 ? std::stoi(argv[2]) : 0); }
