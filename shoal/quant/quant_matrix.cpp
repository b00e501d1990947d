#include "shoal/quant/quant_matrix.h"

#include "shoal/base/error.h"

namespace shoal {

void decode_rows(const QuantMatrix& matrix, int64_t begin, int64_t end, float* values) {
  require(0 <= begin && begin <= end && end <= matrix.n, "decode_rows: rows [", begin, ", ", end, ") of a matrix with ",
          matrix.n, " rows");
  const int64_t bytes = row_bytes(matrix.format, matrix.k);
  for (int64_t n_idx = begin; n_idx < end; ++n_idx) {
    decode_row(matrix.format, matrix.codes + n_idx * bytes, matrix.k, values + (n_idx - begin) * matrix.k);
  }
}

}  // namespace shoal
