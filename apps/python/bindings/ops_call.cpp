// Values from Python into argument structs, the process's thread pool, and the classes behind shoal.ops.
#include "apps/python/bindings/ops_call.h"

#include <nanobind/stl/string.h>
#include <unistd.h>

#include <cstdlib>
#include <mutex>

#include "apps/python/bindings/bindings.h"
#include "shoal/base/text.h"
#include "shoal/cpu/thread_pool.h"
#include "shoal/ops/matmul_packed/matmul_packed.h"

namespace nb = nanobind;
using nb::literals::operator""_a;

namespace shoal::python {
namespace {

constexpr DType kTypes[] = {DType::kF32, DType::kF16, DType::kBF16, DType::kF8E4M3, DType::kF8E8M0,
                            DType::kI8,  DType::kU8,  DType::kI32,  DType::kI64,    DType::kBool};

std::optional<DType> dtype_from_name(std::string_view name) {
  for (const DType type : kTypes) {
    if (to_string(type) == name) {
      return type;
    }
  }
  return std::nullopt;
}

// (address, type, shape, strides in elements), as shoal/ops/_arrays.py makes it.
TensorView to_view(std::string_view op, std::string_view name, const nb::tuple& array) {
  const auto dtype_name = nb::cast<std::string>(array[1]);
  const std::optional<DType> dtype = dtype_from_name(dtype_name);
  require(dtype.has_value(), op, ": ", name, " has type ", printable(dtype_name), ", which no operator takes");
  const auto shape = nb::cast<nb::tuple>(array[2]);
  const auto strides = nb::cast<nb::tuple>(array[3]);
  require(shape.size() <= kMaxRank, op, ": ", name, " has ", shape.size(), " dimensions, expected at most ", kMaxRank);
  std::vector<int64_t> extents;
  for (const nb::handle extent : shape) {
    extents.push_back(nb::cast<int64_t>(extent));
  }
  TensorView view(reinterpret_cast<void*>(nb::cast<uintptr_t>(array[0])), *dtype, extents);
  // Without elements any strides mean the same, and numpy's are 0: row-major ones then.
  for (size_t axis = 0; axis < extents.size() && view.num_elements() > 0; ++axis) {
    view.strides[axis] = nb::cast<int64_t>(strides[axis]);
  }
  return view;
}

std::string python_type(nb::handle object) { return nb::cast<std::string>(object.type().attr("__name__")); }

const char* layout_name(Layout layout) {
  switch (layout) {
    case Layout::kStrided: return "strided";
    case Layout::kInner: return "inner";
    case Layout::kContiguous: return "contiguous";
    case Layout::kInPlace: return "in_place";
    case Layout::kHost: return "host";
  }
  return "";
}

struct Process {
  std::mutex mutex;
  std::unique_ptr<cpu::ThreadPool> pool;
  Workspace workspace;
};

int threads_from_environment() {
  const char* text = std::getenv("SHOAL_THREADS");
  if (text == nullptr || *text == '\0') {
    return 0;
  }
  char* end = nullptr;
  const long count = std::strtol(text, &end, 10);
  require(*end == '\0' && count >= 1 && count <= 1024, "SHOAL_THREADS is '", printable(text),
          "', expected a number of threads from 1 to 1024");
  return static_cast<int>(count);
}

// A child of fork() has none of its parent's threads: it gets a pool of its own, and the parent's is left alone.
Process& process() {
  static std::mutex mutex;
  static Process* current = nullptr;
  static pid_t owner = 0;
  const std::lock_guard lock(mutex);
  if (current == nullptr || owner != getpid()) {
    current = new Process;
    owner = getpid();
  }
  return *current;
}

// A call's values from views, which are tuples, and attributes by name.
Values values_of(const std::string& name, const nb::dict& inputs, const nb::dict& attributes) {
  Values values;
  for (const Fields::Field& field : operators().at(name).fields) {
    Value& value = values.emplace_back();
    if (!field.layout.has_value()) {
      const nb::object object = attributes.get(field.key, nb::none());
      value.attribute = object.is_none() ? nb::object{} : object;
    } else if (inputs.contains(field.key)) {
      value.view = to_view(name, field.name, nb::cast<nb::tuple>(inputs[field.key]));
    }
  }
  return values;
}

struct PythonCall {
  std::unique_ptr<Call> call;
  nb::object keep_alive;
};

nb::list output_list(PythonCall& self) {
  nb::list list;
  for (const OutputSpec& spec : self.call->outputs()) {
    if (!spec.present) {
      list.append(nb::none());
      continue;
    }
    nb::list shape;
    for (const int64_t extent : spec.shape) {
      shape.append(extent);
    }
    list.append(nb::make_tuple(to_str(to_string(spec.dtype)), nb::tuple(shape)));
  }
  return list;
}

void run_call(PythonCall& self, const std::string& op, const nb::list& arrays, const nb::list& names) {
  std::vector<TensorView> views;
  for (size_t i = 0; i < arrays.size(); ++i) {
    const nb::object array = arrays[i];
    views.push_back(array.is_none() ? TensorView{}
                                    : to_view(op, nb::cast<std::string>(names[i]), nb::cast<nb::tuple>(array)));
  }
  const nb::gil_scoped_release unlock;
  self.call->run(views);
}

nb::dict describe(const Operator& op) {
  nb::dict uses;
  for (const Fields::Field& field : op.fields) {
    uses[to_str(field.name)] = to_str(field.layout.has_value() ? layout_name(*field.layout) : "attribute");
  }
  nb::list outputs;
  nb::list aliases;
  nb::list on_request;
  for (const Output& output : op.outputs) {
    outputs.append(to_str(output.name));
    aliases.append(to_str(output.alias));
    if (output.on_request) {
      on_request.append(to_str(output.name));
    }
  }
  nb::dict dict;
  dict["uses"] = uses;
  dict["outputs"] = nb::tuple(outputs);
  dict["aliases"] = nb::tuple(aliases);
  dict["on_request"] = nb::tuple(on_request);
  dict["strided_outputs"] = op.strided_outputs;
  return dict;
}

}  // namespace

Value Fields::next(const char* name, std::optional<Layout> layout) {
  if (values_.empty()) {
    fields_.push_back({name, layout});
    return {};
  }
  return values_[num_seen_++];
}

void Fields::input(const char* name, TensorView& view, Layout layout) { view = next(name, layout).view; }

bool Fields::read(const char* name, const nb::object& object, int64_t& value) {
  if (!object.is_valid()) {
    return false;
  }
  const nb::object integer = nb::steal(PyNumber_Index(object.ptr()));  // also numpy's integers; not floats
  if (!integer.is_valid()) {
    PyErr_Clear();
    fail(ErrorCode::kInvalidArgument, op_, ": ", name, " is of type ", python_type(object), ", expected an int");
  }
  value = PyLong_AsLongLong(integer.ptr());
  if (value == -1 && PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    fail(ErrorCode::kInvalidArgument, op_, ": ", name, " does not fit into 64 bits");
  }
  return true;
}

bool Fields::read(const char* name, const nb::object& object, float& value) {
  if (!object.is_valid()) {
    return false;
  }
  const double number = PyNumber_Check(object.ptr()) == 0 ? -1.0 : PyFloat_AsDouble(object.ptr());
  if (PyNumber_Check(object.ptr()) == 0 || PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    fail(ErrorCode::kInvalidArgument, op_, ": ", name, " is of type ", python_type(object), ", expected a float");
  }
  value = static_cast<float>(number);
  return true;
}

bool Fields::read(const char* name, const nb::object& object, std::string_view& value) {
  if (!object.is_valid()) {
    return false;
  }
  Py_ssize_t size = 0;
  const char* text = PyUnicode_Check(object.ptr()) != 0 ? PyUnicode_AsUTF8AndSize(object.ptr(), &size) : nullptr;
  if (text == nullptr) {
    PyErr_Clear();
    fail(ErrorCode::kInvalidArgument, op_, ": ", name, " is of type ", python_type(object), ", expected a str");
  }
  value = texts_.emplace_back(text, static_cast<size_t>(size));
  return true;
}

void Fields::attribute(const char* name, int64_t& value) { read(name, next(name, {}).attribute, value); }

void Fields::attribute(const char* name, std::optional<int64_t>& value) {
  int64_t integer = 0;
  if (read(name, next(name, {}).attribute, integer)) {
    value = integer;
  }
}

void Fields::attribute(const char* name, float& value) { read(name, next(name, {}).attribute, value); }

void Fields::attribute(const char* name, std::optional<float>& value) {
  float number = 0.0f;
  if (read(name, next(name, {}).attribute, number)) {
    value = number;
  }
}

void Fields::attribute(const char* name, bool& value) {
  int64_t integer = value ? 1 : 0;
  attribute(name, integer);
  require(integer == 0 || integer == 1, op_, ": ", name, " is ", integer, ", expected 0 or 1");
  value = integer == 1;
}

void Fields::attribute(const char* name, std::string_view& value) { read(name, next(name, {}).attribute, value); }

void Fields::attribute(const char* name, DType& value) {
  std::string_view text = to_string(value);
  attribute(name, text);
  const std::optional<DType> type = dtype_from_name(text);
  require(type.has_value(), op_, ": ", name, " is '", printable(text), "', expected the name of a type");
  value = *type;
}

void Fields::packed_type(const char* name, int64_t& value) {
  const nb::object object = next(name, {}).attribute;
  if (!object.is_valid() || !nb::isinstance<nb::str>(object)) {
    read(name, object, value);
    return;
  }
  std::string_view text;
  read(name, object, text);
  try {
    value = packed_type_from_name(text);
  } catch (const Error& error) {
    fail(error.code(), op_, ": ", name, ": ", error.what());
  }
}

std::map<std::string, Operator>& operators() {
  static auto* const map = new std::map<std::string, Operator>;  // outlives every module's end
  return *map;
}

void run_with_context(const std::function<size_t(int num_threads)>& workspace_bytes,
                      const std::function<void(const OpContext&)>& body) {
  Process& here = process();
  const std::lock_guard lock(here.mutex);
  if (here.pool == nullptr) {
    here.pool = std::make_unique<cpu::ThreadPool>(threads_from_environment());
  }
  here.workspace.reserve(workspace_bytes(here.pool->num_threads()));
  body({.pool = here.pool.get(), .workspace = &here.workspace, .isa = cpu::default_isa()});
}

TensorView shape_only_view(DType dtype, std::span<const int64_t> shape) {
  alignas(64) static std::byte nothing[64];
  return TensorView(nothing, dtype, shape);
}

void bind_ops(nb::module_& module) {
  add_attention();
  add_convolutions();
  add_experts();
  add_formats();
  add_indexers();
  add_products();
  add_recurrences();
  add_selections();
  add_sparse_attention();
  for (auto& [name, op] : operators()) {
    for (Fields::Field& field : op.fields) {
      field.key = nb::steal(PyUnicode_InternFromString(field.name.c_str()));
    }
  }
  nb::module_ ops = module.def_submodule("ops", "Operators by name; used by shoal.ops.");
  nb::class_<PythonCall>(ops, "Call")
      .def("outputs", &output_list)  // for each output (type, shape), or None where the call has no such output
      .def("run", &run_call, "op"_a, "arrays"_a, "names"_a);
  ops.def("operators", [] {
    nb::dict dict;
    for (const auto& [name, op] : operators()) {
      dict[to_str(name)] = describe(op);
    }
    return dict;
  });
  ops.def("call_plain", &call_plain, "op"_a, "arguments"_a);
  // For `explain`.
  ops.def("default_isa", [] { return to_str(cpu::to_string(cpu::default_isa())); });
  ops.def("isas", [] {
    nb::list list;
    for (const cpu::Isa isa : cpu::available_isas()) {
      list.append(to_str(cpu::to_string(isa)));
    }
    return list;
  });
  nb::list known;
  for (const cpu::Isa isa : {cpu::Isa::kScalar, cpu::Isa::kAvx2, cpu::Isa::kAvx512}) {
    known.append(to_str(cpu::to_string(isa)));
  }
  ops.attr("KNOWN_ISAS") = nb::tuple(known);
  ops.def(
      "prepare",
      [](const std::string& op, const nb::dict& inputs, const nb::dict& attributes, const nb::object& keep_alive) {
        return PythonCall{operators().at(op).prepare(values_of(op, inputs, attributes)), keep_alive};
      },
      "op"_a, "inputs"_a, "attributes"_a, "keep_alive"_a);
}

}  // namespace shoal::python
