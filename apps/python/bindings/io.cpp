// Model files: GGUF metadata and tensors, folders of safetensors. Reading only.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <memory>
#include <variant>

#include "apps/python/bindings/bindings.h"
#include "shoal/io/checkpoint.h"
#include "shoal/io/gguf.h"
#include "shoal/io/safetensors.h"

namespace nb = nanobind;
using nb::literals::operator""_a;

namespace shoal::python {
namespace {

nb::object to_python(bool value) { return nb::bool_(value); }
nb::object to_python(int64_t value) { return nb::int_(value); }
nb::object to_python(uint64_t value) { return nb::int_(value); }
nb::object to_python(double value) { return nb::float_(value); }
nb::object to_python(const std::string& value) { return to_str(value); }

// Filled by index: a vocabulary has hundreds of thousands of entries, and `append` costs twice as much.
template <class T>
nb::object to_python(const std::vector<T>& values) {
  nb::object list = nb::steal(PyList_New(static_cast<Py_ssize_t>(values.size())));
  if (!list.is_valid()) {
    throw nb::python_error();
  }
  Py_ssize_t i = 0;
  for (const auto& value : values) {
    PyList_SET_ITEM(list.ptr(), i++, to_python(static_cast<const T&>(value)).release().ptr());
  }
  return list;
}

nb::dict metadata_dict(const io::GgufFile& file) {
  nb::dict dict;
  for (const auto& [key, value] : file.metadata()) {
    dict[to_str(key)] = std::visit([](const auto& v) { return to_python(v); }, value);
  }
  return dict;
}

nb::dict tensor_dict(std::string_view name, std::string_view format, const std::vector<int64_t>& extents,
                     uint64_t num_bytes) {
  nb::list shape;
  for (const int64_t extent : extents) {
    shape.append(extent);
  }
  nb::dict dict;
  dict["name"] = to_str(name);
  dict["format"] = to_str(format);
  dict["shape"] = shape;
  dict["bytes"] = num_bytes;
  return dict;
}

nb::list tensor_list(const io::WeightSource& source) {
  nb::list list;
  for (const auto& [name, tensor] : source.tensors()) {
    list.append(tensor_dict(name, info(tensor.format).name, tensor.shape, tensor.num_bytes));
  }
  for (const auto& [name, tensor] : source.raw_tensors()) {
    list.append(tensor_dict(name, tensor.type, tensor.shape, tensor.num_bytes));
  }
  return list;
}

template <class Source>
void open_source(Source* self, const std::string& path) {
  const nb::gil_scoped_release unlock;
  new (self) Source(std::filesystem::path(path));
}

}  // namespace

void bind_io(nb::module_& module) {
  nb::class_<io::GgufFile>(module, "GgufFile")
      .def("__init__", &open_source<io::GgufFile>, "path"_a)
      .def("metadata", &metadata_dict)
      .def("tensors", [](const io::GgufFile& self) { return tensor_list(self); })
      .def("total_bytes", &io::GgufFile::total_bytes);
  nb::class_<io::ModelFolder>(module, "ModelFolder")
      .def("__init__", &open_source<io::ModelFolder>, "path"_a)
      .def("tensors", [](const io::ModelFolder& self) { return tensor_list(self); })
      .def("total_bytes", &io::ModelFolder::total_bytes)
      // Bits of a quantised layer's codes, 0 where nothing is quantised; Unsupported names a scheme that is not read.
      .def("code_bits", [](const io::ModelFolder& self) { return io::CheckpointScheme(self.config()).code_bits(); });
}

}  // namespace shoal::python
