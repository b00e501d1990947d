// shoal._core: token ids in, tokens out. Errors of the library become the exceptions of shoal.errors.
#include <nanobind/nanobind.h>

#include "apps/python/bindings/bindings.h"
#include "shoal/base/error.h"

namespace nb = nanobind;

namespace shoal::python {
namespace {

const char* class_name(ErrorCode code) {
  switch (code) {
    case ErrorCode::kInvalidArgument: return "InvalidArgument";
    case ErrorCode::kModelFormat: return "ModelFormatError";
    case ErrorCode::kOutOfMemory: return "OutOfMemory";
    case ErrorCode::kUnsupported: return "Unsupported";
    case ErrorCode::kIo:
    case ErrorCode::kInternal: return "ShoalError";
  }
  return "ShoalError";
}

void raise(ErrorCode code, std::string_view message) {
  try {
    const nb::object type = nb::module_::import_("shoal.errors").attr(class_name(code));
    const nb::object error = type(to_str(message));
    error.attr("code") = to_str(to_string(code));
    PyErr_SetObject(type.ptr(), error.ptr());
  } catch (nb::python_error& error) {
    error.restore();
  }
}

void translate(const std::exception_ptr& pointer, void*) {
  try {
    std::rethrow_exception(pointer);
  } catch (const Error& error) {
    raise(error.code(), error.what());
  } catch (const std::bad_alloc&) {
    raise(ErrorCode::kOutOfMemory, "out of memory");
  }
}

}  // namespace

nb::str to_str(std::string_view text) {
  PyObject* object = PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "surrogateescape");
  if (object == nullptr) {
    throw nb::python_error();
  }
  return nb::steal<nb::str>(object);
}

}  // namespace shoal::python

NB_MODULE(_core, module) {
  nb::register_exception_translator(shoal::python::translate);
  module.attr("version") = SHOAL_VERSION;
  shoal::python::bind_engine(module);
  shoal::python::bind_io(module);
  shoal::python::bind_ops(module);
  shoal::python::bind_spm(module);
  shoal::python::bind_system(module);
}
