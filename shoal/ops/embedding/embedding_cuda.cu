// Lookup on the device: a thread decodes a block of the table's format.
#include "shoal/cuda/launch.cuh"
#include "shoal/ops/embedding/embedding_cuda.h"
#include "shoal/quant/visit_format.h"

namespace shoal::cuda {
namespace {

constexpr int kThreads = 64;

// The grids of the iq formats are tables in host memory.
template <class F>
constexpr bool kDecodesOnDevice = F::kName.substr(0, 2) != "iq";

template <class F, class T>
__global__ void __launch_bounds__(kThreads)
    embedding_kernel(T* out, int64_t out_stride, const int32_t* ids, const std::byte* table, int64_t row_bytes,
                     int64_t n, int num_blocks, float scale) {
  begin_kernel();
  const int64_t token = blockIdx.x;
  const int32_t id = ids[token];
  const bool is_known = id >= 0 && id < n;
  for (int block = threadIdx.x; block < num_blocks; block += kThreads) {
    float values[F::kBlockSize] = {};
    if (is_known) {
      F::decode(table + id * row_bytes + static_cast<int64_t>(block) * F::kBlockBytes, values);
    }
    T* to = out + token * out_stride + static_cast<int64_t>(block) * F::kBlockSize;
    for (int i = 0; i < F::kBlockSize; ++i) {
      to[i] = from_float<T>(values[i] * scale);
    }
  }
}

}  // namespace

void embedding(const EmbeddingArgs& args, const OpContext& context) {
  const QuantMatrix& table = args.table;
  const auto num_tokens = static_cast<unsigned>(args.ids.dim(0));
  const FormatInfo& format = info(table.format);
  const auto num_blocks = static_cast<int>(table.k / format.block_size);
  if (num_tokens == 0 || num_blocks == 0) {
    return;
  }
  visit_float(args.out.dtype, [&](auto type) {
    using T = decltype(type);
    visit_format(table.format, [&]<class F>() {
      if constexpr (kDecodesOnDevice<F>) {
        launch(embedding_kernel<F, T>, dim3(num_tokens), dim3(kThreads), 0, context.stream, args.out.as<T>(),
               args.out.stride(0), args.ids.as<const int32_t>(), table.codes, row_bytes(table.format, table.k), table.n,
               num_blocks, args.scale);
      } else {
        fail(ErrorCode::kUnsupported, "embedding: a table of ", format.name, " has no CUDA kernel");
      }
    });
  });
}

}  // namespace shoal::cuda
