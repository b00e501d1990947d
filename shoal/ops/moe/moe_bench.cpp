// QMoE by format and number of rows, in the geometry of a real layer: time, bytes of touched expert weights a second
// and their share of a plain read, or GFLOP/s where rows are many.
//
//   moe_bench [substring of a case]
#include "shoal/ops/moe/moe.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <set>

#include "shoal/base/float_bits.h"
#include "shoal/cpu/thread_pool.h"
#include "shoal/ops/moe_router/moe_router.h"
#include "testkit/testkit.h"

namespace shoal {
namespace {

struct Format {
  const char* name;
  const char* quant;
  int bits;
  int64_t block;
  int64_t prepacked = -1;
};

// Expert layer of 30 billion parameters: 128 experts of 2048 x 768, 8 chosen. A quarter of them fits small machines.
constexpr int64_t kHidden = 2048, kInter = 768, kExperts = 32, kChosen = 8;

Tensor filled(DType dtype, std::initializer_list<int64_t> shape, testkit::Random& random, int kind) {
  Tensor tensor(dtype, shape);
  const size_t count = static_cast<size_t>(tensor.view().num_elements());
  for (size_t i = 0; i < count; ++i) {
    switch (kind) {
      case 0: tensor.span<uint8_t>()[i] = static_cast<uint8_t>(random.bits() & 0x77u); break;  // codes
      case 1: tensor.span<float>()[i] = 0.01f; break;
      case 2: tensor.span<uint8_t>()[i] = 120; break;
      case 3: tensor.span<uint8_t>()[i] = 0x20; break;
      default: tensor.span<float>()[i] = random.normal(); break;
    }
  }
  return tensor;
}

double read_gb_per_s(cpu::ThreadPool& pool) {
  const std::vector<uint64_t> data(size_t{16} << 20, 1);
  std::vector<uint64_t> sums(64);
  const double seconds = testkit::median_seconds(9, [&] {
    pool.parallel_for(static_cast<int64_t>(data.size()), 4096, [&](int64_t begin, int64_t end, int thread_idx) {
      uint64_t sum = 0;
      for (int64_t i = begin; i < end; ++i) {
        sum += data[static_cast<size_t>(i)];
      }
      sums[static_cast<size_t>(thread_idx)] += sum;
    });
  });
  return 1e-9 * static_cast<double>(data.size() * sizeof(uint64_t)) / seconds;
}

void bench(const Format& f, int64_t tokens, cpu::ThreadPool& pool) {
  testkit::Random random(1);
  const bool fp8 = std::strcmp(f.quant, "fp8") == 0, integer = std::strcmp(f.quant, "int") == 0;
  const bool nv = std::strcmp(f.quant, "nvfp4") == 0;
  const DType activations = f.bits == 3 ? DType::kBF16 : DType::kF32;
  QMoEArgs args;
  std::vector<Tensor> keep;
  const auto take = [&](Tensor tensor) {
    keep.push_back(std::move(tensor));
    return keep.back().view();
  };
  const auto floats = [&](std::initializer_list<int64_t> shape, int kind) {
    Tensor tensor = filled(DType::kF32, shape, random, kind);
    if (activations == DType::kF32) {
      return take(std::move(tensor));
    }
    Tensor half(activations, shape);
    for (int64_t i = 0; i < half.view().num_elements(); ++i) {
      half.span<uint16_t>()[static_cast<size_t>(i)] = f32_to_bf16(tensor.span<float>()[static_cast<size_t>(i)]);
    }
    return take(std::move(half));
  };
  int64_t expert_bytes = 0;
  const auto projection = [&](int64_t n, int64_t k, TensorView& weights, TensorView& scales, TensorView& global) {
    const DType codes = fp8 ? DType::kF8E4M3 : DType::kU8;
    weights = integer || fp8 || f.prepacked == 1 ? take(filled(codes, {kExperts, n, k * f.bits / 8}, random, 0))
                                                 : take(filled(codes, {kExperts, k, n / 2}, random, 0));
    if (integer) {
      scales = floats({kExperts, n, k / f.block}, 1);
    } else if (fp8) {
      scales = take(filled(DType::kF32, {kExperts, n / f.block, k / f.block}, random, 1));
    } else {
      scales = take(filled(nv ? DType::kF8E4M3 : DType::kF8E8M0, {kExperts, n, k / f.block}, random, nv ? 3 : 2));
      global = take(filled(DType::kF32, {kExperts}, random, 1));
    }
    expert_bytes += static_cast<int64_t>(weights.num_bytes() + scales.num_bytes()) / kExperts;
  };
  projection(2 * kInter, kHidden, args.fc1_experts_weights, args.fc1_scales, args.fc1_global_scale);
  projection(kHidden, kInter, args.fc2_experts_weights, args.fc2_scales, args.fc2_global_scale);
  args.input = floats({tokens, kHidden}, 4);
  args.router_probs = floats({tokens, kExperts}, 4);
  Tensor output(activations, {tokens, kHidden});
  args.output = output.view();
  args.k = kChosen;
  args.activation_type = "swiglu";
  args.swiglu_fusion = 1;
  args.normalize_routing_weights = 1;
  args.quant_type = f.quant;
  args.expert_weight_bits = f.bits;
  args.block_size = f.block;
  args.weights_prepacked = f.prepacked;
  Workspace workspace(qmoe_workspace_bytes(args, pool.num_threads()));
  const OpContext context{.pool = &pool, .workspace = &workspace, .isa = cpu::default_isa()};

  Tensor ids(DType::kI32, {tokens, kChosen}), weights(DType::kF32, {tokens, kChosen});
  route_experts({.expert_ids = ids,
                 .expert_weights = weights,
                 .router_logits = args.router_probs,

                 .top_k = kChosen},
                context);
  const std::set<int32_t> touched(ids.span<int32_t>().begin(), ids.span<int32_t>().end());
  const double bytes = static_cast<double>(expert_bytes) * static_cast<double>(touched.size());
  const double seconds = testkit::median_seconds(tokens > 64 ? 3 : 9, [&] { qmoe(args, context); });
  const double flops = 6.0 * static_cast<double>(kHidden * kInter * kChosen * tokens);
  const double read = read_gb_per_s(pool);
  std::printf("%-10s T %4lld  %9.3f ms  %7.2f GB/s %5.1f %% of a read (%.2f GB/s)  %7.1f GFLOP/s\n", f.name,
              static_cast<long long>(tokens), seconds * 1e3, bytes / seconds * 1e-9, bytes / seconds * 1e-7 / read,
              read, flops / seconds * 1e-9);
}

}  // namespace
}  // namespace shoal

int main(int argc, char** argv) {
  using shoal::Format;
  shoal::cpu::ThreadPool pool(argc > 2 ? std::atoi(argv[2]) : 0);
  std::printf("%s, %s, %d threads\n", shoal::cpu::processor_name().c_str(),
              std::string(shoal::cpu::to_string(shoal::cpu::default_isa())).c_str(), pool.num_threads());
  for (const Format& format :
       {Format{"int8", "int", 8, 32}, Format{"int4", "int", 4, 32}, Format{"int3", "int", 3, 32},
        Format{"int2", "int", 2, 64}, Format{"mxfp4", "fp4", 4, 32}, Format{"mxfp4-rows", "fp4", 4, 32, 1},
        Format{"nvfp4", "nvfp4", 4, 16}, Format{"nvfp4-rows", "nvfp4", 4, 16, 1}, Format{"fp8-block", "fp8", 8, 128}}) {
    for (const int64_t tokens : {1, 8, 512}) {
      if (argc < 2 || std::strstr(format.name, argv[1]) != nullptr) {
        shoal::bench(format, tokens, pool);
      }
    }
  }
  return 0;
}
