#include "shoal/quant/quant_matrix.h"

#include "shoal/base/checked.h"
#include "shoal/base/error.h"
#include "shoal/quant/code_stream.h"
#include "shoal/quant/visit_format.h"

namespace shoal {
namespace {

// Where the scale of row n, group g stands.
struct ScaleGrid {
  int64_t group_size = 1;  // columns that share a scale
  int64_t groups = 1;      // ceil(k / group_size)
  int64_t row_group = 1;   // rows that share a scale
  int64_t row_stride = 0;  // scales from one row group to the next; 0: all share one
  int64_t at(int64_t n_idx, int64_t group) const { return n_idx / row_group * row_stride + group; }
};

template <class F>
ScaleGrid scale_grid(const QuantMatrix& m) {
  const int64_t own = F::kScaleGroup > 0 ? F::kScaleGroup : m.group_size;
  require(m.group_size == 0 || m.group_size == own, F::kName, ": groups of ", m.group_size, " values, expected ", own);
  ScaleGrid grid;
  grid.group_size = own > 0 ? own : (m.k > 0 ? m.k : 1);
  grid.groups = ceil_div(m.k, grid.group_size);
  if (!m.scales) {
    require(F::kSharedScales && m.global_scale, F::kName, ": scales are missing");
    return grid;
  }
  require(m.scales.is_contiguous(), F::kName, ": scales must be contiguous");
  const int64_t count = m.scales.num_elements();
  if (count == m.n * grid.groups) {
    grid.row_stride = grid.groups;
  } else if (F::kSharedScales && count == ceil_div(m.n, grid.group_size) * grid.groups) {
    grid.row_group = grid.group_size;
    grid.row_stride = grid.groups;
  } else if (F::kSharedScales && count == 1) {
    grid.group_size = m.k > 0 ? m.k : 1;
    grid.groups = 1;
  } else {
    fail(ErrorCode::kInvalidArgument, F::kName, ": scales have ", count, " elements, expected ", m.n, " x ",
         grid.groups);
  }
  return grid;
}

template <class F>
void check_zeros(const QuantMatrix& m, const ScaleGrid& grid) {
  if (!m.zeros) {
    return;
  }
  require(F::kHasZeros, F::kName, ": zeros are given, this format has none");
  require(m.zeros.is_contiguous(), F::kName, ": zeros must be contiguous");
  const int64_t columns = m.zeros.dtype == DType::kU8 ? ceil_div<int64_t>(grid.groups * F::kBits, 8) : grid.groups;
  require(m.zeros.num_elements() == m.n * columns, F::kName, ": zeros have ", m.zeros.num_elements(),
          " elements, expected ", m.n, " x ", columns);
}

template <class F>
float zero_of(const QuantMatrix& m, const ScaleGrid& grid, int64_t n_idx, int64_t group) {
  if (!m.zeros) {
    return F::kDefaultZero;
  }
  if (m.zeros.dtype == DType::kU8) {
    const int64_t bytes = ceil_div<int64_t>(grid.groups * F::kBits, 8);
    return static_cast<float>(read_code(m.zeros.as<const std::byte>() + n_idx * bytes, F::kBits, group));
  }
  return read_float_scale(m.zeros.dtype, m.zeros.data, n_idx * grid.groups + group);
}

template <class F>
void decode_scaled_rows(const QuantMatrix& m, int64_t begin, int64_t end, float* values) {
  const ScaleGrid grid = scale_grid<F>(m);
  check_zeros<F>(m, grid);
  float global = 1.0f;
  if (m.global_scale) {
    require(!F::kHasZeros, F::kName, ": global_scale is given, this format has none");
    require(m.global_scale.dtype == DType::kF32 && m.global_scale.num_elements() == 1, F::kName,
            ": global_scale must be one float32");
    global = *m.global_scale.as<const float>();
  }
  const int64_t bytes = row_bytes(m.format, m.k);
  for (int64_t n_idx = begin; n_idx < end; ++n_idx) {
    const std::byte* row = m.codes + n_idx * bytes;
    for (int64_t group = 0; group < grid.groups; ++group) {
      const float scale = m.scales ? F::scale(m.scales.dtype, m.scales.data, grid.at(n_idx, group)) : 1.0f;
      const float zero = zero_of<F>(m, grid, n_idx, group);
      const int64_t last = (group + 1) * grid.group_size < m.k ? (group + 1) * grid.group_size : m.k;
      for (int64_t i = group * grid.group_size; i < last; ++i) {
        *values++ = (F::number(read_code(row, F::kBits, i)) - zero) * scale * global;
      }
    }
  }
}

}  // namespace

void decode_rows(const QuantMatrix& matrix, int64_t begin, int64_t end, float* values) {
  require(0 <= begin && begin <= end && end <= matrix.n, "decode_rows: rows [", begin, ", ", end, ") of a matrix with ",
          matrix.n, " rows");
  if (info(matrix.format).is_scaled) {
    visit_scaled_format(matrix.format, [&]<class F>() { decode_scaled_rows<F>(matrix, begin, end, values); });
    return;
  }
  const int64_t bytes = row_bytes(matrix.format, matrix.k);
  for (int64_t n_idx = begin; n_idx < end; ++n_idx) {
    decode_row(matrix.format, matrix.codes + n_idx * bytes, matrix.k, values + (n_idx - begin) * matrix.k);
  }
}

}  // namespace shoal
