#include "shoal/model/loader.h"

#include <algorithm>

#include "shoal/base/text.h"

namespace shoal {
namespace {

constexpr const char* kWeight = ".weight";
constexpr const char* kBias = ".bias";

}  // namespace

std::string layer_name(const std::string& pattern, int64_t layer_idx) {
  std::string name = pattern;
  const size_t at = name.find("{}");
  SHOAL_ASSERT(at != std::string::npos);
  return name.replace(at, 2, std::to_string(layer_idx));
}

Loader::Loader(const io::WeightSource& source, const LoadOptions& options, const OpContext& context)
    : source_(source),
      precision_(options.exact ? MatmulPrecision::kExact : MatmulPrecision::kDefault),
      context_(context) {}

Tensor Loader::vector(const std::string& name, std::initializer_list<int64_t> shape, float offset) {
  const io::WeightTensor& tensor = source_.get(name, shape);
  Tensor values(DType::kF32, shape);
  const std::span<float> data = values.span<float>();
  decode_row(tensor.format, tensor.data, static_cast<int64_t>(data.size()), data.data());
  for (float& value : data) {
    value += offset;
  }
  num_parameters_ += static_cast<int64_t>(data.size());
  return values;
}

LoadedMatrix Loader::matrix(const std::string& name, int64_t n, int64_t k) {
  const int64_t shape[] = {n, k};
  const io::WeightTensor& tensor = source_.get(name, shape);
  num_parameters_ += n * k;
  return {io::as_matrix(tensor, n, k), &tensor};
}

std::vector<LoadedMatrix> Loader::stacked(const std::string& name, int64_t count, int64_t n, int64_t k) {
  const int64_t shape[] = {count, n, k};
  const io::WeightTensor& tensor = source_.get(name, shape);
  num_parameters_ += count * n * k;
  std::vector<LoadedMatrix> matrices;
  for (int64_t i = 0; i < count; ++i) {
    const QuantMatrix matrix{
        .format = tensor.format, .n = n, .k = k, .codes = tensor.data + i * n * row_bytes(tensor.format, k)};
    matrices.push_back({matrix, &tensor});
  }
  return matrices;
}

MatmulWeight Loader::prepare(std::span<const QuantMatrix> parts) { return prepare(parts, precision_); }

MatmulWeight Loader::prepare(std::span<const QuantMatrix> parts, MatmulPrecision precision) {
  MatmulWeight weight = prepare_matmul(parts, precision, context_);
  weight_bytes_ += weight.num_bytes();
  return weight;
}

Linear Loader::linear(std::initializer_list<Part> parts, int64_t k, Bias bias) {
  return linear({parts.begin(), parts.size()}, k, bias, precision_);
}

Linear Loader::exact_linear(const Part& part, int64_t k) {
  return linear({&part, 1}, k, Bias::kOptional, MatmulPrecision::kExact);
}

Linear Loader::linear(std::span<const Part> parts, int64_t k, Bias bias, MatmulPrecision precision) {
  std::vector<LoadedMatrix> loaded;
  std::vector<QuantMatrix> matrices;
  for (const Part& part : parts) {
    loaded.push_back(matrix(part.stem + kWeight, part.n, k));
    matrices.push_back(loaded.back().matrix);
  }
  Linear result;
  result.weight = prepare(matrices, precision);
  if (result.weight.owns_bytes()) {
    for (const LoadedMatrix& matrix : loaded) {
      drop(*matrix.tensor);
    }
  }
  result.bias = join_biases(parts, bias);
  return result;
}

// Absent where no part has one; parts without one get zeros.
Tensor Loader::join_biases(std::span<const Part> parts, Bias bias) {
  const auto has_bias = [&](const Part& part) { return has(part.stem + kBias); };
  if (bias == Bias::kOptional && std::none_of(parts.begin(), parts.end(), has_bias)) {
    return {};
  }
  int64_t n = 0;
  for (const Part& part : parts) {
    n += part.n;
  }
  Tensor joined(DType::kF32, {n});
  float* values = joined.span<float>().data();
  for (const Part& part : parts) {
    if (bias == Bias::kRequired || has_bias(part)) {
      const Tensor own = vector(part.stem + kBias, {part.n});
      std::copy_n(own.span<float>().data(), part.n, values);
    } else {
      std::fill_n(values, part.n, 0.0f);
    }
    values += part.n;
  }
  return joined;
}

}  // namespace shoal
