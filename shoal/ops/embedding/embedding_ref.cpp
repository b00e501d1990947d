// Reference of embedding: a whole row decoded, then scaled value by value.
#include <vector>

#include "shoal/ops/element.h"
#include "shoal/ops/embedding/embedding.h"

namespace shoal {

void embedding_ref(const EmbeddingArgs& args) {
  std::vector<float> row(static_cast<size_t>(args.table.k));
  for (int64_t t = 0; t < args.out.dim(0); ++t) {
    decode_row(args.table.format, args.table.row(args.ids.as<int32_t>()[t]), args.table.k, row.data());
    for (int64_t h = 0; h < args.table.k; ++h) {
      write_element(args.out.dtype, args.out.data, t * args.out.stride(0) + h,
                    args.scale * row[static_cast<size_t>(h)]);
    }
  }
}

}  // namespace shoal
