// The usual call at little cost: arrays of numpy itself in native types, laid out as the operator wants them, and new
// outputs. Everything else is left to shoal/ops/_call.py, also what is wrong with an array and must be named.
#include "apps/python/bindings/ops_call.h"

#include <algorithm>

namespace nb = nanobind;

namespace shoal::python {
namespace {

struct NumpyType {
  char format;  // of the buffer protocol
  DType dtype;
  nb::object type;
};

// Kept for good: it must outlive every call.
struct Numpy {
  nb::object ndarray;
  nb::object empty;
  std::vector<NumpyType> types;

  Numpy() {
    const nb::module_ numpy = nb::module_::import_("numpy");
    ndarray = numpy.attr("ndarray");
    empty = numpy.attr("empty");
    const nb::object type = numpy.attr("dtype");
    for (const auto& [format, dtype] : {std::pair{'f', DType::kF32},
                                        {'e', DType::kF16},
                                        {'b', DType::kI8},
                                        {'B', DType::kU8},
                                        {'i', DType::kI32},
                                        {'l', DType::kI64},
                                        {'q', DType::kI64},
                                        {'?', DType::kBool}}) {
      types.push_back({format, dtype, type(nb::str(std::string(to_string(dtype)).c_str()))});
    }
  }
  const NumpyType* find(const char* format) const {
    for (const NumpyType& known : types) {
      if (format != nullptr && format[0] == known.format && format[1] == '\0') {
        return &known;
      }
    }
    return nullptr;
  }
  const NumpyType* find(DType dtype) const {
    for (const NumpyType& known : types) {
      if (known.dtype == dtype) {
        return &known;
      }
    }
    return nullptr;
  }
};

const Numpy& numpy() {
  static const auto* const instance = new Numpy;
  return *instance;
}

// The memory of the arrays of a call, held until its end.
class Buffers {
 public:
  explicit Buffers(size_t most) { buffers_.reserve(most); }
  ~Buffers() {
    for (Py_buffer& buffer : buffers_) {
      PyBuffer_Release(&buffer);
    }
  }
  Buffers(const Buffers&) = delete;
  Buffers& operator=(const Buffers&) = delete;

  bool empty() const { return buffers_.empty(); }

  // False where the array is not plain or not so laid out.
  bool add(nb::handle array, Layout layout, TensorView& view) {
    if (array.type().ptr() != numpy().ndarray.ptr()) {
      return false;
    }
    Py_buffer buffer;
    if (PyObject_GetBuffer(array.ptr(), &buffer, PyBUF_RECORDS_RO) != 0) {
      PyErr_Clear();
      return false;
    }
    buffers_.push_back(buffer);
    const NumpyType* type = numpy().find(buffer.format);
    const auto itemsize = static_cast<int64_t>(buffer.itemsize);
    if (type == nullptr || itemsize != static_cast<int64_t>(size_of(type->dtype)) || buffer.ndim > kMaxRank ||
        reinterpret_cast<uintptr_t>(buffer.buf) % static_cast<uintptr_t>(itemsize) != 0) {
      return false;
    }
    int64_t shape[kMaxRank];
    std::copy_n(buffer.shape, buffer.ndim, shape);
    view = TensorView(buffer.buf, type->dtype, std::span<const int64_t>(shape, static_cast<size_t>(buffer.ndim)));
    // Without elements any strides mean the same, and numpy's are 0: row-major ones then.
    for (int axis = 0; axis < buffer.ndim && buffer.len > 0; ++axis) {
      if (buffer.strides[axis] % itemsize != 0) {
        return false;
      }
      view.strides[static_cast<size_t>(axis)] = buffer.strides[axis] / itemsize;
    }
    switch (layout) {
      case Layout::kStrided: return true;
      case Layout::kInner: return view.rank == 0 || view.dim(view.rank - 1) <= 1 || view.stride(view.rank - 1) == 1;
      case Layout::kContiguous: return view.is_contiguous();
      default: return false;
    }
  }

 private:
  std::vector<Py_buffer> buffers_;
};

// The values of a call by field; false where one is not plain.
bool take_values(const Operator& op, const nb::dict& arguments, Buffers& buffers, Values& values) {
  values.resize(op.fields.size());
  for (size_t i = 0; i < values.size(); ++i) {
    const Fields::Field& field = op.fields[i];
    const nb::handle object = PyDict_GetItemWithError(arguments.ptr(), field.key.ptr());
    if (!object.is_valid() || object.is_none()) {
      continue;
    }
    if (field.layout.has_value()) {
      if (!buffers.add(object, *field.layout, values[i].view)) {
        return false;
      }
    } else if (field.name == "dtype" && !nb::isinstance<nb::str>(object)) {
      return false;
    } else {
      values[i].attribute = nb::borrow(object);
    }
  }
  return !buffers.empty();
}

nb::object not_plain() { return nb::borrow(Py_NotImplemented); }

}  // namespace

nb::object call_plain(const std::string& name, const nb::dict& arguments) {
  const Operator& op = operators().at(name);
  const nb::object out = arguments.get("out", nb::none());
  Buffers buffers(op.fields.size() + op.outputs.size());
  Values values;
  if (!out.is_none() || !take_values(op, arguments, buffers, values)) {
    return not_plain();
  }
  const std::unique_ptr<Call> call = op.prepare(std::move(values));
  const std::vector<OutputSpec> specs = call->outputs();
  std::vector<TensorView> views(specs.size());
  nb::list results;
  for (size_t i = 0; i < specs.size(); ++i) {
    if (!specs[i].present || op.outputs[i].on_request) {
      results.append(nb::none());
      continue;
    }
    const NumpyType* type = numpy().find(specs[i].dtype);
    if (type == nullptr) {
      return not_plain();
    }
    nb::list shape;
    for (const int64_t extent : specs[i].shape) {
      shape.append(extent);
    }
    const nb::object array = numpy().empty(nb::tuple(shape), type->type);
    if (!buffers.add(array, Layout::kContiguous, views[i])) {
      return not_plain();
    }
    results.append(array);
  }
  {
    const nb::gil_scoped_release unlock;
    call->run(views);
  }
  return results.size() == 1 ? nb::object(results[0]) : nb::object(nb::tuple(results));
}

}  // namespace shoal::python
