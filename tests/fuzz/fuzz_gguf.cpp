// Any bytes are either a GGUF file whose tensors can be read, or a kModelFormat or kUnsupported error.
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "shoal/base/error.h"
#include "shoal/io/gguf.h"
#include "tests/fuzz/read_all.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::span<const std::byte> bytes(reinterpret_cast<const std::byte*>(data), size);
  try {
    const shoal::io::GgufFile file(bytes, "fuzz.gguf");
    shoal::fuzz::read_all(file.tensors(), bytes);
    for (const auto& [key, value] : file.metadata()) {
      shoal::fuzz::expect(file.find_value(key) == &value);
    }
  } catch (const shoal::Error& error) {
    shoal::fuzz::expect(error.code() == shoal::ErrorCode::kModelFormat ||
                        error.code() == shoal::ErrorCode::kUnsupported);
    shoal::fuzz::expect(std::string_view(error.what()).find('\n') == std::string_view::npos);
  }
  return 0;
}
