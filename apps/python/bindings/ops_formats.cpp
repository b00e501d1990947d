// quantize and dequantize for shoal.ops: the same two steps as an operator, so that Python owns every array.
#include <cstring>

#include "apps/python/bindings/ops_call.h"
#include "shoal/base/text.h"
#include "shoal/quant/quantize.h"

namespace nb = nanobind;

namespace shoal::python {
namespace {

Format format_of(std::string_view op, std::string_view name) {
  const std::optional<Format> format = format_from_name(name);
  require(format.has_value(), op, ": format is '", printable(name), "', which is no format");
  return *format;
}

void copy_out(const Tensor& from, const TensorView& to) {
  if (to && from.view().num_bytes() > 0) {
    std::memcpy(to.data, from.view().data, from.view().num_bytes());
  }
}

OutputSpec spec_of(const Tensor& tensor) {
  const TensorView& view = tensor.view();
  return {view.dtype, {view.dims().begin(), view.dims().end()}, static_cast<bool>(view)};
}

// "quantize: message" for errors that do not begin so.
template <class Body>
auto named(std::string_view op, Body&& body) {
  try {
    return body();
  } catch (const Error& error) {
    const std::string_view message = error.what();
    fail(error.code(), message.substr(0, op.size()) == op ? "" : concat(op, ": "), message);
  }
}

class Quantize final : public Call {
 public:
  explicit Quantize(Values values) {
    Fields f("quantize", std::move(values));
    fields(f);
    texts_ = f.take_texts();
  }
  void fields(Fields& f) {
    f.input("array", array_);
    f.attribute("format", format_);
    f.attribute("block_size", options_.block_size);
    f.attribute("symmetric", options_.symmetric);
  }
  std::vector<OutputSpec> outputs() override {
    const nb::gil_scoped_release unlock;
    parts_ = named("quantize", [&] { return quantize(format_of("quantize", format_), array_, options_); });
    return {spec_of(parts_.codes), spec_of(parts_.scales), spec_of(parts_.zeros), spec_of(parts_.global_scale)};
  }
  void run(const std::vector<TensorView>& outputs) override {
    copy_out(parts_.codes, outputs[0]);
    copy_out(parts_.scales, outputs[1]);
    copy_out(parts_.zeros, outputs[2]);
    copy_out(parts_.global_scale, outputs[3]);
  }

 private:
  friend Operator quantize_operator();
  Quantize() = default;
  TensorView array_;
  std::string_view format_;
  QuantizeOptions options_;
  QuantParts parts_;
};

class Dequantize final : public Call {
 public:
  explicit Dequantize(Values values) {
    Fields f("dequantize", std::move(values));
    fields(f);
    texts_ = f.take_texts();
  }
  void fields(Fields& f) {
    f.input("codes", parts_.codes, Layout::kContiguous);
    f.input("scales", parts_.scales, Layout::kContiguous);
    f.input("zeros", parts_.zeros, Layout::kContiguous);
    f.input("global_scale", parts_.global_scale, Layout::kContiguous);
    f.input("shape", shape_, Layout::kHost);
    f.attribute("format", format_);
  }
  std::vector<OutputSpec> outputs() override {
    const nb::gil_scoped_release unlock;
    std::vector<int64_t> shape;
    for (int64_t i = 0; i < shape_.num_elements(); ++i) {
      shape.push_back(shape_.as<int32_t>()[i * shape_.stride(0)]);
    }
    array_ = named("dequantize", [&] { return dequantize(format_of("dequantize", format_), parts_, shape); });
    return {spec_of(array_)};
  }
  void run(const std::vector<TensorView>& outputs) override { copy_out(array_, outputs[0]); }

 private:
  friend Operator dequantize_operator();
  Dequantize() = default;
  QuantPartViews parts_;
  TensorView shape_;
  std::string_view format_;
  Tensor array_;
};

Operator quantize_operator() {
  Fields f;
  Quantize call;
  call.fields(f);
  return {
      .outputs = {{"codes"}, {"scales"}, {"zeros"}, {"global_scale"}},
      .fields = f.take_fields(),
      .prepare = [](Values values) -> std::unique_ptr<Call> { return std::make_unique<Quantize>(std::move(values)); }};
}

Operator dequantize_operator() {
  Fields f;
  Dequantize call;
  call.fields(f);
  return {.outputs = {{"array"}}, .fields = f.take_fields(), .prepare = [](Values values) -> std::unique_ptr<Call> {
            return std::make_unique<Dequantize>(std::move(values));
          }};
}

}  // namespace

void add_formats() {
  operators()["quantize"] = quantize_operator();
  operators()["dequantize"] = dequantize_operator();
}

}  // namespace shoal::python
