#include "shoal/base/text.h"

#include <array>
#include <cstdio>

namespace shoal {
namespace {

constexpr size_t kMaxPrintable = 80;

}  // namespace

size_t utf8_length(std::string_view s, size_t at) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(s[i]); };
  const unsigned char lead = byte(at);
  const size_t length = lead < 0x80 ? 1 : lead < 0xc2 ? 0 : lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : lead < 0xf5 ? 4 : 0;
  if (length == 0 || at + length > s.size()) {
    return 0;
  }
  for (size_t i = 1; i < length; ++i) {
    if ((byte(at + i) & 0xc0u) != 0x80u) {
      return 0;
    }
  }
  const bool overlong = (lead == 0xe0 && byte(at + 1) < 0xa0) || (lead == 0xf0 && byte(at + 1) < 0x90);
  const bool beyond = (lead == 0xed && byte(at + 1) >= 0xa0) || (lead == 0xf4 && byte(at + 1) >= 0x90);
  return overlong || beyond ? 0 : length;
}

std::string printable(std::string_view name) {
  std::string out;
  size_t num_chars = 0;
  for (size_t i = 0; i < name.size(); ++num_chars) {
    if (num_chars == kMaxPrintable) {
      out += "...";
      break;
    }
    const auto c = static_cast<unsigned char>(name[i]);
    const size_t length = utf8_length(name, i);
    // U+0080..U+009F are control characters too: terminals act on them.
    const bool c1_control = length == 2 && c == 0xc2 && static_cast<unsigned char>(name[i + 1]) < 0xa0;
    if (length == 0 || c < 0x20 || c == 0x7f || c1_control) {
      std::array<char, 8> hex{};
      std::snprintf(hex.data(), hex.size(), "\\x%02x", c);
      out += c == '\n' ? "\\n" : c == '\t' ? "\\t" : c == '\r' ? "\\r" : hex.data();
      ++i;
      continue;
    }
    if (c == '"' || c == '\\') {
      out += '\\';
    }
    out.append(name, i, length);
    i += length;
  }
  return out;
}

std::string shape_text(std::span<const int64_t> shape) {
  std::string out = "[";
  for (size_t i = 0; i < shape.size(); ++i) {
    out += (i == 0 ? "" : ", ") + std::to_string(shape[i]);
  }
  return out + "]";
}

std::string bytes_text(uint64_t num_bytes) {
  constexpr std::array<const char*, 5> kUnits{"B", "kB", "MB", "GB", "TB"};
  double value = static_cast<double>(num_bytes);
  size_t unit = 0;
  while (value >= 1000.0 && unit + 1 < kUnits.size()) {
    value /= 1000.0;
    ++unit;
  }
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), unit == 0 ? "%.0f %s" : "%.1f %s", value, kUnits[unit]);
  return text.data();
}

}  // namespace shoal
