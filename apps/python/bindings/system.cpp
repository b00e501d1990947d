// What this build and this machine have: for `shoal doctor` and for messages.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <thread>

#include "apps/python/bindings/bindings.h"
#include "shoal/cpu/isa.h"
#include "shoal/model/model.h"
#include "shoal/quant/format.h"

namespace nb = nanobind;

namespace shoal::python {
namespace {

nb::dict cpu_info() {
  nb::list isas;
  for (const cpu::Isa isa : cpu::available_isas()) {
    isas.append(to_str(cpu::to_string(isa)));
  }
  nb::dict dict;
  dict["processor"] = to_str(cpu::processor_name());
  dict["isas"] = isas;
  dict["threads"] = std::thread::hardware_concurrency();
  return dict;
}

}  // namespace

void bind_system(nb::module_& module) {
  module.def("cpu_info", &cpu_info);
  // The instruction set that SHOAL_CPU_ISA forces, or the fastest; raises if the variable is wrong.
  module.def("default_isa", [] { return to_str(cpu::to_string(cpu::default_isa())); });
  module.def("registered_architectures", &registered_architectures);
#if defined(SHOAL_CUDA)
  module.attr("has_cuda") = true;
#else
  module.attr("has_cuda") = false;
#endif
}

}  // namespace shoal::python
