// Any text either parses or is a kModelFormat error; what parses can be walked and copied.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "shoal/base/error.h"
#include "shoal/base/json.h"
#include "shoal/base/text.h"

namespace {

void expect(bool condition) {
  if (!condition) {
    std::abort();
  }
}

void expect_utf8(std::string_view text) {
  for (size_t i = 0; i < text.size();) {
    const size_t length = shoal::utf8_length(text, i);
    expect(length > 0);
    i += length;
  }
}

size_t walk(const shoal::Json& json, int depth) {
  expect(depth <= 64);
  size_t num_values = 1;
  switch (json.kind()) {
    case shoal::Json::Kind::kString: expect_utf8(json.as_string("")); break;
    case shoal::Json::Kind::kArray:
      for (const shoal::Json& item : json.as_array("")) {
        num_values += walk(item, depth + 1);
      }
      break;
    case shoal::Json::Kind::kObject:
      for (const auto& [name, value] : json.as_object("")) {
        expect_utf8(name);
        num_values += walk(value, depth + 1);
      }
      break;
    case shoal::Json::Kind::kInt: expect(json.as_int("") == json.as_int("")); break;
    case shoal::Json::Kind::kDouble: expect(json.as_double("") - json.as_double("") == 0.0); break;  // finite
    default: break;
  }
  return num_values;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try {
    const shoal::Json json = shoal::Json::parse({reinterpret_cast<const char*>(data), size}, "fuzz.json");
    const shoal::Json copy = json;
    expect(walk(json, 0) == walk(copy, 0));
  } catch (const shoal::Error& error) {
    expect(error.code() == shoal::ErrorCode::kModelFormat);
    expect_utf8(error.what());
  }
  return 0;
}
