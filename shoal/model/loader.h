// Reading a model's tensors into what its layers compute with.
#pragma once

#include <initializer_list>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "shoal/io/checkpoint.h"
#include "shoal/io/weights.h"
#include "shoal/model/model.h"
#include "shoal/ops/matmul/matmul.h"

namespace shoal {

// A weight with its optional bias.
struct Linear {
  MatmulWeight weight;
  Tensor bias;                                      // [n] f32, or absent
  std::vector<std::shared_ptr<const void>> owners;  // of bytes that the weight refers to, where the file is not

  void operator()(const TensorView& in, const TensorView& out, const OpContext& context) const {
    matmul({.out = out, .a = in, .bias = bias}, weight, context);
  }
};

// A matrix of the file, or one that was made from its tensors.
struct LoadedMatrix {
  QuantMatrix matrix;
  const io::WeightTensor* tensor = nullptr;  // whose bytes it reads; none if it was read otherwise
  std::shared_ptr<const void> owner{};       // of bytes that are not the file's
};

// `pattern` with the layer's number in the place of "{}".
std::string layer_name(const std::string& pattern, int64_t layer_idx);

// Reads and prepares tensors of one source. Every tensor is checked against the shape that the config implies:
// kModelFormat names the first that is missing or does not fit.
class Loader {
 public:
  Loader(const io::WeightSource& source, const io::CheckpointScheme& scheme, const LoadOptions& options,
         const OpContext& context);

  bool has(std::string_view name) const { return source_.find(name) != nullptr; }
  bool has_matrix(const std::string& stem) const;

  // Any number of values as f32, `offset` added to each.
  Tensor vector(const std::string& name, std::initializer_list<int64_t> shape, float offset = 0.0f);

  // The values in memory of the context's device.
  Tensor place(Tensor values) const;
  // A table whose rows are looked up, likewise; what it reads stays alive with `owner`. The iq formats, which no kernel
  // decodes, become bf16.
  void place(LoadedMatrix& table) const;

  // "<stem>.weight", or what the checkpoint's scheme has in its place.
  LoadedMatrix matrix(const std::string& stem, int64_t n, int64_t k);
  // Those that one tensor holds, [count, n, k].
  std::vector<LoadedMatrix> stacked(const std::string& name, int64_t count, int64_t n, int64_t k);

  struct Part {
    std::string stem;  // "<stem>.weight", "<stem>.bias"
    int64_t n;
  };
  enum class Bias { kOptional, kRequired };

  // Several matrices with the same input as one.
  Linear linear(std::initializer_list<Part> parts, int64_t k, Bias bias = Bias::kOptional);
  // The same in exact precision, whatever was asked for: a router's.
  Linear exact_linear(std::initializer_list<Part> parts, int64_t k);

  // For each i, the i-th of every list joined and prepared. `owners` receives what must stay alive; bytes of the file
  // that were repacked leave memory.
  std::vector<MatmulWeight> prepare_each(std::span<const std::vector<LoadedMatrix>* const> joined,
                                         std::vector<std::shared_ptr<const void>>& owners);

  // Prepared weights as the groups of a product on the context's device.
  GroupedWeights group(std::vector<MatmulWeight> weights) const { return {std::move(weights), context_}; }

  const io::WeightSource& source() const { return source_; }
  Device device() const { return context_.device; }
  int64_t num_parameters() const { return num_parameters_; }
  int64_t weight_bytes() const { return weight_bytes_; }
  const std::vector<WeightGroup>& weights() const { return weights_; }
  void count_parameters(int64_t count) { num_parameters_ += count; }

 private:
  Linear linear(std::span<const Part> parts, int64_t k, Bias bias, MatmulPrecision precision);
  MatmulWeight prepare(std::span<const LoadedMatrix* const> parts, MatmulPrecision precision);
  void count(const MatmulWeight& weight);
  Tensor join_biases(std::span<const Part> parts, Bias bias);

  const io::WeightSource& source_;
  const io::CheckpointScheme& scheme_;
  MatmulPrecision precision_;
  const OpContext& context_;
  bool plan_only_;
  int64_t num_parameters_ = 0;
  int64_t weight_bytes_ = 0;
  std::vector<WeightGroup> weights_;
};

}  // namespace shoal
