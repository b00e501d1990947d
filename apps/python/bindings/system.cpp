// What this build and this machine have: for `shoal doctor` and for messages.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <thread>

#include "apps/python/bindings/bindings.h"
#include "shoal/base/text.h"
#include "shoal/cpu/isa.h"
#include "shoal/cuda/device.h"
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

// Those that models can run on.
nb::list cuda_devices() {
  nb::list devices;
  for (int i = 0; i < cuda::device_count(); ++i) {
    const cuda::DeviceInfo info = cuda::device_info(i);
    nb::dict dict;
    dict["name"] = to_str(info.name);
    dict["capability"] = to_str(concat(info.major, ".", info.minor));
    dict["multiprocessors"] = info.num_sms;
    dict["total_bytes"] = info.total_bytes;
    dict["free_bytes"] = info.free_bytes;
    devices.append(dict);
  }
  return devices;
}

}  // namespace

void bind_system(nb::module_& module) {
  module.def("cpu_info", &cpu_info);
  // The instruction set that SHOAL_CPU_ISA forces, or the fastest; raises if the variable is wrong.
  module.def("default_isa", [] { return to_str(cpu::to_string(cpu::default_isa())); });
  module.def("registered_architectures", &registered_architectures);
#if SHOAL_HAVE_CUDA
  module.attr("has_cuda") = true;
#else
  module.attr("has_cuda") = false;
#endif
  module.def("cuda_devices", &cuda_devices);
  module.def("why_no_cuda_device", &cuda::why_no_device);
}

}  // namespace shoal::python
