// How operators reach Python: a call is prepared from arrays and attributes by name, tells what outputs it needs, and
// runs on memory that the caller gives. The conversion from Python objects to Array is in shoal/ops/_arrays.py.
//
//   template <class Fields> void fields(XArgs& a, Fields& f) { f.input("x", a.x); f.attribute("n", a.n); }
//
// says everything about a call but its outputs; `add_operator` makes the rest of it.
#pragma once

#include <nanobind/nanobind.h>

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "shoal/ops/context.h"
#include "shoal/ops/output_spec.h"
#include "shoal/tensor/tensor.h"

namespace shoal::python {

// What an input's memory must be like. The Python side copies an input that is not so, but never one that is changed.
enum class Layout {
  kStrided,     // any strides
  kInner,       // the last dimension contiguous
  kContiguous,  // all of it
  kInPlace,     // changed in place: writable, never copied, returned as an output; its layout is the operator's check
  kHost,        // read on the host: also a Python number or a list of them
};

// Fills the members of an argument struct from Python values by name; without values it only collects the fields.
class Fields {
 public:
  struct Field {
    std::string name;
    std::string use;  // strided, inner, contiguous, in_place, host; attribute
  };

  Fields() = default;
  Fields(std::string_view op, nanobind::dict inputs, nanobind::dict attributes)
      : op_(op), inputs_(std::move(inputs)), attributes_(std::move(attributes)) {}

  void input(const char* name, TensorView& view, Layout layout = Layout::kStrided);
  void attribute(const char* name, int64_t& value);
  void attribute(const char* name, std::optional<int64_t>& value);
  void attribute(const char* name, float& value);
  void attribute(const char* name, std::optional<float>& value);
  void attribute(const char* name, bool& value);
  void attribute(const char* name, std::string_view& value);
  void attribute(const char* name, DType& value);
  void packed_type(const char* name, int64_t& value);  // ggml's id, or its name

  const std::vector<Field>& fields() const { return fields_; }
  std::deque<std::string> take_texts() { return std::move(texts_); }

 private:
  nanobind::object find_attribute(const char* name);  // invalid where absent or None

  std::string_view op_;
  nanobind::dict inputs_;
  nanobind::dict attributes_;
  std::vector<Field> fields_;
  std::deque<std::string> texts_;  // what string_view attributes point to
};

struct Output {
  std::string name;
  std::string alias{};      // the input whose memory it may be (a state), or is (a cache changed in place)
  bool on_request = false;  // made only if `out=` has memory for it
};

class Call {
 public:
  virtual ~Call() = default;
  virtual std::vector<OutputSpec> outputs() = 0;
  virtual void run(const std::vector<TensorView>& outputs) = 0;

 protected:
  std::deque<std::string> texts_;
};

struct Operator {
  std::vector<Output> outputs;
  std::vector<Fields::Field> fields;
  bool strided_outputs = false;  // outputs may have any strides
  std::function<std::unique_ptr<Call>(nanobind::dict inputs, nanobind::dict attributes)> prepare;
};

std::map<std::string, Operator>& operators();

// Runs `body` without the interpreter lock on the process's thread pool and workspace, one call at a time.
void run_with_context(const std::function<size_t(int num_threads)>& workspace_bytes,
                      const std::function<void(const OpContext&)>& body);

// A view of the right type and shape whose memory is never touched: for checks that want to see an output.
TensorView shape_only_view(DType dtype, std::span<const int64_t> shape);

template <class Args>
struct OperatorTraits {
  std::string name;
  void (*fields)(Args&, Fields&);
  // Checks inputs and attributes.
  std::vector<OutputSpec> (*specs)(Args&);
  size_t (*workspace)(const Args&, int num_threads);
  void (*run)(const Args&, const OpContext&);
  std::vector<std::pair<Output, TensorView Args::*>> outputs;
  bool strided_outputs = false;
};

template <class Args>
class CallOf final : public Call {
 public:
  CallOf(const OperatorTraits<Args>& traits, nanobind::dict inputs, nanobind::dict attributes) : traits_(traits) {
    Fields fields(traits.name, std::move(inputs), std::move(attributes));
    traits.fields(args_, fields);
    texts_ = fields.take_texts();
  }
  std::vector<OutputSpec> outputs() override { return traits_.specs(args_); }
  void run(const std::vector<TensorView>& outputs) override {
    for (size_t i = 0; i < outputs.size(); ++i) {
      args_.*traits_.outputs[i].second = outputs[i];
    }
    run_with_context([this](int num_threads) { return traits_.workspace(args_, num_threads); },
                     [this](const OpContext& context) { traits_.run(args_, context); });
  }

 private:
  const OperatorTraits<Args>& traits_;
  Args args_;
};

// `traits` must live as long as the module.
template <class Args>
void add_operator(const OperatorTraits<Args>& traits) {
  Operator op;
  for (const auto& [output, member] : traits.outputs) {
    op.outputs.push_back(output);
  }
  Args args;
  Fields fields;
  traits.fields(args, fields);
  op.fields = fields.fields();
  op.strided_outputs = traits.strided_outputs;
  op.prepare = [&traits](nanobind::dict inputs, nanobind::dict attributes) -> std::unique_ptr<Call> {
    return std::make_unique<CallOf<Args>>(traits, std::move(inputs), std::move(attributes));
  };
  operators()[traits.name] = std::move(op);
}

// No scratch memory.
template <class Args>
size_t no_workspace(const Args&, int) {
  return 0;
}

// One for each folder of operators.
void add_attention();
void add_convolutions();
void add_experts();
void add_formats();
void add_indexers();
void add_products();
void add_recurrences();
void add_selections();
void add_sparse_attention();

}  // namespace shoal::python
