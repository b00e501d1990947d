// Reference of matmul_nbits: the formula, with sums in f64.
#include <cmath>
#include <vector>

#include "shoal/ops/element.h"
#include "shoal/ops/matmul_nbits/matmul_nbits_problem.h"
#include "shoal/quant/code_stream.h"

namespace shoal {
namespace {

float zero_of(const MatMulNBitsProblem& p, int64_t n, int64_t block) {
  const MatMulNBitsArgs& a = p.args;
  if (!a.zero_points) {
    return p.default_zero();
  }
  if (!p.packed_zeros) {
    return read_element(a.zero_points.dtype, a.zero_points.data, n * p.k_blocks + block);
  }
  const int64_t row_bytes = ceil_div<int64_t>(p.k_blocks * a.bits, 8);
  return static_cast<float>(
      read_code(a.zero_points.as<const std::byte>() + n * row_bytes, static_cast<int>(a.bits), block));
}

// A row of A in f64, rounded to int8 where the kernels do so.
std::vector<double> row_of(const MatMulNBitsProblem& p, int64_t row) {
  const TensorView& a = p.args.A;
  const int64_t start = cpu::row_offset(a, row);
  std::vector<float> values(static_cast<size_t>(p.args.K));
  for (size_t k = 0; k < values.size(); ++k) {
    values[k] = read_element(a.dtype, a.data, start + static_cast<int64_t>(k) * a.stride(a.rank - 1));
  }
  std::vector<double> result(values.begin(), values.end());
  const auto block_size = static_cast<size_t>(p.args.block_size);
  for (size_t first = 0; p.quantises_rows && first < values.size(); first += block_size) {
    const size_t last = std::min(values.size(), first + block_size);
    float amax = 0.0f;
    bool finite = true;
    for (size_t k = first; k < last; ++k) {
      finite = finite && std::isfinite(values[k]);
      amax = std::max(amax, std::fabs(values[k]));
    }
    const RowScale scale = row_scale(finite ? amax : INFINITY);
    for (size_t k = first; k < last; ++k) {
      const float code = finite ? std::nearbyint(values[k] * scale.inverse) : 0.0f;
      result[k] = static_cast<double>(code) * scale.scale;
    }
  }
  return result;
}

}  // namespace

void matmul_nbits_ref(const MatMulNBitsProblem& p) {
  const MatMulNBitsArgs& a = p.args;
  std::vector<float> weights(static_cast<size_t>(a.N * a.K));
  for (int64_t n = 0; n < a.N; ++n) {
    const std::byte* codes = a.B.as<const std::byte>() + n * p.row_bytes;
    for (int64_t k = 0; k < a.K; ++k) {
      const int64_t block = a.g_idx ? a.g_idx.as<const int32_t>()[k] : k / a.block_size;
      const auto code = static_cast<float>(read_code(codes, static_cast<int>(a.bits), k));
      const float scale = read_element(a.scales.dtype, a.scales.data, n * p.k_blocks + block);
      weights[static_cast<size_t>(n * a.K + k)] = (code - zero_of(p, n, block)) * scale;
    }
  }
  for (int64_t row = 0; row < p.m; ++row) {
    const std::vector<double> values = row_of(p, row);
    for (int64_t n = 0; n < a.N; ++n) {
      double sum = 0.0;
      for (int64_t k = 0; k < a.K; ++k) {
        sum += values[static_cast<size_t>(k)] * static_cast<double>(weights[static_cast<size_t>(n * a.K + k)]);
      }
      if (a.bias) {
        sum += static_cast<double>(read_element(a.bias.dtype, a.bias.data, n));
      }
      write_element(a.Y.dtype, a.Y.data, row * p.y_stride + n, static_cast<float>(sum));
    }
  }
}

}  // namespace shoal
