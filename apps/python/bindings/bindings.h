// Parts of the module shoal._core. Each function adds its classes and functions to the module.
#pragma once

#include <nanobind/nanobind.h>

#include <string_view>

namespace shoal::python {

void bind_engine(nanobind::module_& module);
void bind_io(nanobind::module_& module);
void bind_ops(nanobind::module_& module);
void bind_spm(nanobind::module_& module);
void bind_system(nanobind::module_& module);

// Text of a file or message as str; bytes that are not UTF-8 become lone surrogates (PEP 383), so that nothing is lost.
nanobind::str to_str(std::string_view text);

}  // namespace shoal::python
