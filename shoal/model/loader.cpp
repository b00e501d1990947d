#include "shoal/model/loader.h"

#include <algorithm>
#include <set>

#include "shoal/base/float_bits.h"
#include "shoal/base/text.h"
#include "shoal/cuda/device.h"

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

Loader::Loader(const io::WeightSource& source, const io::CheckpointScheme& scheme, const LoadOptions& options,
               const OpContext& context)
    : source_(source),
      scheme_(scheme),
      precision_(options.exact ? MatmulPrecision::kExact : MatmulPrecision::kDefault),
      context_(context),
      plan_only_(options.plan_only) {}

bool Loader::has_matrix(const std::string& stem) const { return has(stem + kWeight) || scheme_.covers(source_, stem); }

Tensor Loader::vector(const std::string& name, std::initializer_list<int64_t> shape, float offset) {
  const io::WeightTensor& tensor = source_.get(name, shape);
  Tensor values(DType::kF32, shape);
  const std::span<float> data = values.span<float>();
  decode_row(tensor.format, tensor.data, static_cast<int64_t>(data.size()), data.data());
  for (float& value : data) {
    value += offset;
  }
  num_parameters_ += static_cast<int64_t>(data.size());
  weight_bytes_ += static_cast<int64_t>(data.size_bytes());
  return values;
}

Tensor Loader::place(Tensor values) const {
  if (context_.device.type == DeviceType::kCpu || !values.view()) {
    return values;
  }
  Tensor placed(values.view().dtype, values.view().dims(), cuda::allocator(context_.device.index));
  cuda::copy(placed.view().data, values.view().data, values.view().num_bytes(), context_.stream);
  cuda::synchronize(context_.stream);
  return placed;
}

void Loader::place(LoadedMatrix& table) const {
  if (context_.device.type == DeviceType::kCpu) {
    return;
  }
  const QuantMatrix& matrix = table.matrix;
  Tensor decoded;
  if (info(matrix.format).name.starts_with("iq")) {
    decoded = Tensor(DType::kBF16, {matrix.n, matrix.k});
    std::vector<float> values(static_cast<size_t>(matrix.k));
    for (int64_t row = 0; row < matrix.n; ++row) {
      decode_rows(matrix, row, row + 1, values.data());
      std::ranges::transform(values, decoded.span<uint16_t>().data() + row * matrix.k, f32_to_bf16);
    }
    table.matrix = {
        .format = Format::kBF16, .n = matrix.n, .k = matrix.k, .codes = decoded.view().as<const std::byte>()};
  }
  const auto num_bytes = static_cast<size_t>(table.matrix.num_bytes());
  auto bytes = std::make_shared<AlignedBuffer>(num_bytes, cuda::allocator(context_.device.index));
  cuda::copy(bytes->data(), table.matrix.codes, num_bytes, context_.stream);
  cuda::synchronize(context_.stream);
  table.matrix.codes = bytes->data();
  table.owner = std::move(bytes);
}

LoadedMatrix Loader::matrix(const std::string& stem, int64_t n, int64_t k) {
  if (scheme_.covers(source_, stem)) {
    io::OwnedMatrix read = scheme_.read(source_, stem, n, k, precision_ == MatmulPrecision::kExact);
    num_parameters_ += n * k;
    return {read.matrix, nullptr, std::move(read.owner)};
  }
  const int64_t shape[] = {n, k};
  const io::WeightTensor& tensor = source_.get(stem + kWeight, shape);
  num_parameters_ += n * k;  // fits: there is a tensor of that shape
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

MatmulWeight Loader::prepare(std::span<const LoadedMatrix* const> parts, MatmulPrecision precision) {
  std::vector<QuantMatrix> matrices;
  matrices.reserve(parts.size());
  for (const LoadedMatrix* part : parts) {
    matrices.push_back(part->matrix);
  }
  MatmulWeight weight =
      plan_only_ ? plan_matmul(matrices, precision, context_) : prepare_matmul(matrices, precision, context_);
  count(weight);
  return weight;
}

void Loader::count(const MatmulWeight& weight) {
  weight_bytes_ += weight.num_bytes();
  const std::string_view format = shoal::info(weight.format()).name;
  auto group = std::ranges::find_if(weights_, [&](const WeightGroup& g) {
    return g.format == format && g.layout == weight.layout() && g.variant == weight.variant();
  });
  if (group == weights_.end()) {
    weights_.push_back({std::string(format), std::string(weight.layout()), std::string(weight.variant())});
    group = weights_.end() - 1;
  }
  ++group->count;
  group->num_bytes += weight.num_bytes();
}

std::vector<MatmulWeight> Loader::prepare_each(std::span<const std::vector<LoadedMatrix>* const> joined,
                                               std::vector<std::shared_ptr<const void>>& owners) {
  std::vector<MatmulWeight> weights;
  std::set<const io::WeightTensor*> tensors;  // one may hold many matrices
  for (size_t i = 0; i < joined.front()->size(); ++i) {
    std::vector<const LoadedMatrix*> parts;
    for (const std::vector<LoadedMatrix>* matrices : joined) {
      parts.push_back(&(*matrices)[i]);
      tensors.insert(parts.back()->tensor);
    }
    weights.push_back(prepare(parts, precision_));
    for (const LoadedMatrix* part : parts) {
      if (part->owner && !weights.back().owns_bytes() && !plan_only_) {
        owners.push_back(part->owner);
      }
    }
  }
  tensors.erase(nullptr);
  if (!plan_only_ &&
      std::all_of(weights.begin(), weights.end(), [](const MatmulWeight& w) { return w.owns_bytes(); })) {
    for (const io::WeightTensor* tensor : tensors) {
      source_.drop(*tensor);
    }
  }
  return weights;
}

Linear Loader::linear(std::initializer_list<Part> parts, int64_t k, Bias bias) {
  return linear({parts.begin(), parts.size()}, k, bias, precision_);
}

Linear Loader::exact_linear(std::initializer_list<Part> parts, int64_t k) {
  return linear({parts.begin(), parts.size()}, k, Bias::kOptional, MatmulPrecision::kExact);
}

Linear Loader::linear(std::span<const Part> parts, int64_t k, Bias bias, MatmulPrecision precision) {
  std::vector<LoadedMatrix> loaded;
  std::vector<const LoadedMatrix*> pointers;
  for (const Part& part : parts) {
    loaded.push_back(matrix(part.stem, part.n, k));
  }
  pointers.reserve(loaded.size());
  for (const LoadedMatrix& matrix : loaded) {
    pointers.push_back(&matrix);
  }
  Linear result;
  result.weight = prepare(pointers, precision);
  for (const LoadedMatrix& matrix : loaded) {
    if (!result.weight.owns_bytes()) {
      result.owners.push_back(matrix.owner);
    } else if (matrix.tensor != nullptr) {
      source_.drop(*matrix.tensor);
    }
  }
  result.bias = place(join_biases(parts, bias));
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
