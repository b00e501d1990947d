// Entry of embedding: checks, then rows decoded piecewise through a buffer on the stack, since `run` must not allocate.
#include "shoal/ops/embedding/embedding.h"

#include <algorithm>
#include <cmath>

#include "shoal/cpu/thread_pool.h"
#include "shoal/ops/embedding/embedding_cuda.h"
#include "shoal/ops/on_cuda.h"
#include "shoal/ops/variant.h"
#include "shoal/tensor/matcher.h"

namespace shoal {

SHOAL_DECLARE_FOR_EACH_ISA(void embedding_store(const float* values, int64_t count, float scale, DType dtype,
                                                void* out))
void embedding_ref(const EmbeddingArgs& args);

namespace {

constexpr int64_t kGrainElements = 16384;  // less is not worth waking a thread for
constexpr int64_t kPieceSize = 1024;       // a multiple of every block size

void check(const EmbeddingArgs& args) {
  const Matcher match("embedding");
  const QuantMatrix& table = args.table;
  require(table.n >= 0 && table.k >= 0 && (table.codes != nullptr || table.n == 0 || table.k == 0),
          "embedding: table is required");
  Dim tokens{"num_tokens"};
  Dim hidden{"hidden", table.k};
  match.tensor("out", args.out).shape({tokens, hidden}).types(kFloats).inner_contiguous();
  match.tensor("ids", args.ids).shape({tokens}).type(DType::kI32).contiguous().device(args.out.device);
  const FormatInfo& format = info(table.format);
  if (table.scales || table.zeros || table.global_scale || kPieceSize % format.block_size != 0) {
    fail(ErrorCode::kUnsupported, "embedding: a table of format ", format.name, " with scales apart or blocks of ",
         format.block_size, " values");
  }
  row_bytes(table.format, table.k);  // throws unless a row is a whole number of blocks
  require(std::isfinite(args.scale), "embedding: scale is ", args.scale, ", expected a finite number");
  if (args.ids.device.type != DeviceType::kCpu) {
    return;  // ids are only known there: one outside the table reads as zeros
  }
  const int32_t* ids = args.ids.as<int32_t>();
  for (int64_t t = 0; t < tokens; ++t) {
    require(ids[t] >= 0 && ids[t] < table.n, "embedding: ids[", t, "] is ", ids[t],
            ", outside [0, vocab_size = ", table.n, ")");
  }
}

}  // namespace

void embedding(const EmbeddingArgs& args, const OpContext& context) {
  check(args);
  if (args.out.device.type == DeviceType::kCuda) {
    SHOAL_ON_CUDA("embedding", embedding(args, context));
    return;
  }
  if (wants_reference("embedding", context.variant)) {
    embedding_ref(args);
    return;
  }
  const auto store = SHOAL_PICK_ISA(context.isa, embedding_store);
  const QuantMatrix& table = args.table;
  const FormatInfo& format = info(table.format);
  const int64_t out_bytes = static_cast<int64_t>(size_of(args.out.dtype));
  const int64_t grain = std::max<int64_t>(1, kGrainElements / std::max<int64_t>(1, table.k));
  context.pool->parallel_for(args.out.dim(0), grain, [&](int64_t begin, int64_t end, int) {
    float values[kPieceSize];
    for (int64_t t = begin; t < end; ++t) {
      const std::byte* row = table.row(args.ids.as<int32_t>()[t]);
      std::byte* out = args.out.as<std::byte>() + t * args.out.stride(0) * out_bytes;
      for (int64_t h = 0; h < table.k; h += kPieceSize) {
        const int64_t count = std::min(kPieceSize, table.k - h);
        decode_row(table.format, row + h / format.block_size * format.block_bytes, count, values);
        store(values, count, args.scale, args.out.dtype, out + h * out_bytes);
      }
    }
  });
}

}  // namespace shoal
