// Errors of the whole library: one exception type, a stable code, one clear sentence.
//
// A broken contract (wrong shape, type, device, a bad file) throws Error before any work is done. What a correct caller
// can meet (out of pages, queue full, cancelled) is a value: see result.h. Nothing here prints, exits or aborts.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>

namespace shoal {

enum class ErrorCode {
  kInvalidArgument,  // an argument or option breaks the documented contract
  kModelFormat,      // a model file or folder is malformed or contradicts itself
  kOutOfMemory,      // memory or page budget does not suffice
  kUnsupported,      // valid, but this build or device has no path for it; the message names it
  kIo,               // the operating system refused a read, map or write
  kInternal,         // an invariant of the library is broken: a bug of ours
};

std::string_view to_string(ErrorCode code);

class Error : public std::runtime_error {
 public:
  Error(ErrorCode code, const std::string& message) : std::runtime_error(message), code_(code) {}
  ErrorCode code() const noexcept { return code_; }

 private:
  ErrorCode code_;
};

// Concatenates anything that has an operator<< (std::format is not in every C++20 library yet).
template <class... Args>
std::string concat(const Args&... args) {
  std::ostringstream stream;
  (stream << ... << args);
  return stream.str();
}

template <class... Args>
[[noreturn]] void fail(ErrorCode code, const Args&... args) {
  throw Error(code, concat(args...));
}

// Throws kInvalidArgument unless `condition` holds: for arguments of public functions.
template <class... Args>
void require(bool condition, const Args&... args) {
  if (!condition) [[unlikely]] {
    fail(ErrorCode::kInvalidArgument, args...);
  }
}

[[noreturn]] void assertion_failed(const char* condition, const char* file, int line);

}  // namespace shoal

// For what nobody can cause from outside. Active in release builds too; throws kInternal.
#define SHOAL_ASSERT(condition) \
  ((condition) ? static_cast<void>(0) : ::shoal::assertion_failed(#condition, __FILE__, __LINE__))
