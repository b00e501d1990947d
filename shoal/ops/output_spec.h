// Type and shape of an output that follow from the inputs: for callers that allocate outputs, and for the checks of the
// outputs that were given.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string_view>
#include <vector>

#include "shoal/base/error.h"
#include "shoal/base/text.h"
#include "shoal/tensor/tensor.h"

namespace shoal {

struct OutputSpec {
  DType dtype = DType::kF32;
  std::vector<int64_t> shape{};
  bool present = true;  // false: this call has no such output
};

// kInvalidArgument unless `view` is what `spec` says. An optional output may be absent although the call has it.
inline void check_output(std::string_view op, std::string_view name, const TensorView& view, const OutputSpec& spec,
                         Device device, bool optional = false) {
  if (!spec.present) {
    require(!view, op, ": ", name, " is given, but this call has no such output");
    return;
  }
  if (!view && optional) {
    return;
  }
  require(static_cast<bool>(view), op, ": ", name, " is required");
  const std::span<const int64_t> dims = view.dims();
  require(std::equal(dims.begin(), dims.end(), spec.shape.begin(), spec.shape.end()), op, ": ", name, " has shape ",
          shape_text(dims), ", expected ", shape_text(spec.shape));
  require(view.dtype == spec.dtype, op, ": ", name, " has type ", to_string(view.dtype), ", expected ",
          to_string(spec.dtype));
  require(view.device == device, op, ": ", name, " is on another device than the other arguments");
}

}  // namespace shoal
