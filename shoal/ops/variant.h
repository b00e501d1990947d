// Names of variants for operators that have one fast CPU path beside their reference.
#pragma once

#include <string_view>

#include "shoal/base/error.h"

namespace shoal {

// True for "ref", false for "" and "cpu" (the path of the context's instruction set). kInvalidArgument for other names.
inline bool wants_reference(std::string_view op, std::string_view variant) {
  require(variant.empty() || variant == "ref" || variant == "cpu", op, ": no variant \"", variant,
          "\"; known are ref, cpu");
  return variant == "ref";
}

}  // namespace shoal
