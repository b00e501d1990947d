// Any bytes are either a safetensors image whose tensors can be read, or a kModelFormat error.
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "shoal/base/error.h"
#include "shoal/io/safetensors.h"
#include "tests/fuzz/read_all.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::span<const std::byte> bytes(reinterpret_cast<const std::byte*>(data), size);
  try {
    shoal::io::TensorMap tensors;
    shoal::io::RawMap raw;
    shoal::io::read_safetensors(bytes, "fuzz.safetensors", 0, tensors, raw);
    shoal::fuzz::read_all(tensors, bytes);
    for (const auto& [name, tensor] : raw) {
      shoal::fuzz::expect(!tensors.contains(name) && !tensor.type.empty());
    }
  } catch (const shoal::Error& error) {
    shoal::fuzz::expect(error.code() == shoal::ErrorCode::kModelFormat);
    shoal::fuzz::expect(std::string_view(error.what()).find('\n') == std::string_view::npos);
  }
  return 0;
}
