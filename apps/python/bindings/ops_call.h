// How operators reach Python: a call is prepared from arrays and attributes, tells what outputs it needs, and runs on
// memory that the caller gives. Native numpy arrays come as they are (call_plain); other objects and layouts, `out=` and
// what is wrong with an array are for shoal/ops/_call.py and _arrays.py.
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

// What a call has for one of its operator's fields, in their order: an input's view, or an attribute's object (invalid
// where it is absent or None).
struct Value {
  TensorView view{};
  nanobind::object attribute{};
};
using Values = std::vector<Value>;

// Fills the members of an argument struct from the values of a call; without values it only collects the fields.
class Fields {
 public:
  struct Field {
    std::string name;
    std::optional<Layout> layout;  // none: an attribute
    nanobind::object key{};        // the name, made once
  };

  Fields() = default;
  Fields(std::string_view op, Values values) : op_(op), values_(std::move(values)) {}

  void input(const char* name, TensorView& view, Layout layout = Layout::kStrided);
  void attribute(const char* name, int64_t& value);
  void attribute(const char* name, std::optional<int64_t>& value);
  void attribute(const char* name, float& value);
  void attribute(const char* name, std::optional<float>& value);
  void attribute(const char* name, bool& value);
  void attribute(const char* name, std::string_view& value);
  void attribute(const char* name, DType& value);
  void packed_type(const char* name, int64_t& value);  // ggml's id, or its name

  std::vector<Field> take_fields() { return std::move(fields_); }
  std::deque<std::string> take_texts() { return std::move(texts_); }

 private:
  Value next(const char* name, std::optional<Layout> layout);
  bool read(const char* name, const nanobind::object& object, int64_t& value);
  bool read(const char* name, const nanobind::object& object, float& value);
  bool read(const char* name, const nanobind::object& object, std::string_view& value);

  std::string_view op_;
  Values values_;
  size_t num_seen_ = 0;
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
  std::function<std::unique_ptr<Call>(Values values)> prepare;
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
  CallOf(const OperatorTraits<Args>& traits, Values values) : traits_(traits) {
    Fields fields(traits.name, std::move(values));
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
  op.fields = fields.take_fields();
  op.strided_outputs = traits.strided_outputs;
  op.prepare = [&traits](Values values) -> std::unique_ptr<Call> {
    return std::make_unique<CallOf<Args>>(traits, std::move(values));
  };
  operators()[traits.name] = std::move(op);
}

// No scratch memory.
template <class Args>
size_t no_workspace(const Args&, int) {
  return 0;
}

// NotImplemented where the call is not a plain one; else its outputs.
nanobind::object call_plain(const std::string& name, const nanobind::dict& arguments);

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
