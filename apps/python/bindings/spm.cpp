// SpmVocabulary for tokenizer.py: the `tokenizers` library knows SentencePiece merges by rank only, and deriving half a
// million of them from the scores would take seconds at every start.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "apps/python/bindings/bindings.h"
#include "apps/python/bindings/spm_vocabulary.h"

namespace nb = nanobind;
using nb::literals::operator""_a;

namespace shoal::python {
namespace {

std::string_view bytes_of(nb::handle object) {
  char* data = nullptr;
  Py_ssize_t size = 0;
  if (PyBytes_AsStringAndSize(object.ptr(), &data, &size) != 0) {
    throw nb::python_error();
  }
  return {data, static_cast<size_t>(size)};
}

void make_vocabulary(SpmVocabulary* self, const nb::list& pieces, std::vector<float> scores) {
  std::vector<std::string> copies;
  copies.reserve(nb::len(pieces));
  for (const nb::handle piece : pieces) {
    copies.emplace_back(bytes_of(piece));
  }
  new (self) SpmVocabulary(std::move(copies), std::move(scores));
}

std::vector<int32_t> encode(const SpmVocabulary& self, const nb::bytes& text, int32_t unknown_id) {
  const std::string_view view = bytes_of(text);  // bytes are immutable and held by the caller
  const nb::gil_scoped_release unlock;
  return self.encode(view, unknown_id);
}

}  // namespace

void bind_spm(nb::module_& module) {
  nb::class_<SpmVocabulary>(module, "SpmVocabulary")
      .def("__init__", &make_vocabulary, "pieces"_a, "scores"_a)
      .def("encode", &encode, "text"_a, "unknown_id"_a = -1);
}

}  // namespace shoal::python
