#include "shoal/base/error.h"

namespace shoal {

std::string_view to_string(ErrorCode code) {
  switch (code) {
    case ErrorCode::kInvalidArgument: return "invalid_argument";
    case ErrorCode::kModelFormat: return "model_format";
    case ErrorCode::kOutOfMemory: return "out_of_memory";
    case ErrorCode::kUnsupported: return "unsupported";
    case ErrorCode::kIo: return "io";
    case ErrorCode::kInternal: return "internal";
  }
  return "unknown";
}

void assertion_failed(const char* condition, const char* file, int line) {
  fail(ErrorCode::kInternal, "internal error: ", condition, " does not hold (", file, ":", line, ")");
}

}  // namespace shoal
