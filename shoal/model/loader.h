// Reading a model's tensors into what its layers compute with.
#pragma once

#include <initializer_list>
#include <span>
#include <string>
#include <vector>

#include "shoal/io/weights.h"
#include "shoal/model/model.h"
#include "shoal/ops/matmul/matmul.h"

namespace shoal {

// A weight with its optional bias.
struct Linear {
  MatmulWeight weight;
  Tensor bias;  // [n] f32, or absent

  void operator()(const TensorView& in, const TensorView& out, const OpContext& context) const {
    matmul({.out = out, .a = in, .bias = bias}, weight, context);
  }
};

// A matrix of the file, or one that was made from its tensors.
struct LoadedMatrix {
  QuantMatrix matrix;
  const io::WeightTensor* tensor = nullptr;  // whose bytes it reads; none if `matrix` was made
};

// `pattern` with the layer's number in the place of "{}".
std::string layer_name(const std::string& pattern, int64_t layer_idx);

// Reads and prepares tensors of one source. Every tensor is checked against the shape that the config implies:
// kModelFormat names the first that is missing or does not fit.
class Loader {
 public:
  Loader(const io::WeightSource& source, const LoadOptions& options, const OpContext& context);

  bool has(std::string_view name) const { return source_.find(name) != nullptr; }

  // Any number of values as f32, `offset` added to each.
  Tensor vector(const std::string& name, std::initializer_list<int64_t> shape, float offset = 0.0f);

  LoadedMatrix matrix(const std::string& name, int64_t n, int64_t k);
  // Matrix `idx` of `count` that one tensor holds, [count, n, k].
  std::vector<LoadedMatrix> stacked(const std::string& name, int64_t count, int64_t n, int64_t k);

  struct Part {
    std::string stem;  // "<stem>.weight", "<stem>.bias"
    int64_t n;
  };
  enum class Bias { kOptional, kRequired };

  // Several matrices with the same input as one.
  Linear linear(std::initializer_list<Part> parts, int64_t k, Bias bias = Bias::kOptional);
  // The same in exact precision, whatever was asked for: a router's.
  Linear exact_linear(const Part& part, int64_t k);

  // Joined matrices with the same input, prepared; tensors that were repacked may be dropped afterwards.
  MatmulWeight prepare(std::span<const QuantMatrix> parts);
  void drop(const io::WeightTensor& tensor) { source_.drop(tensor); }

  const io::WeightSource& source() const { return source_; }
  int64_t num_parameters() const { return num_parameters_; }
  int64_t weight_bytes() const { return weight_bytes_; }
  void count_parameters(int64_t count) { num_parameters_ += count; }

 private:
  Linear linear(std::span<const Part> parts, int64_t k, Bias bias, MatmulPrecision precision);
  MatmulWeight prepare(std::span<const QuantMatrix> parts, MatmulPrecision precision);
  Tensor join_biases(std::span<const Part> parts, Bias bias);

  const io::WeightSource& source_;
  MatmulPrecision precision_;
  const OpContext& context_;
  int64_t num_parameters_ = 0;
  int64_t weight_bytes_ = 0;
};

}  // namespace shoal
