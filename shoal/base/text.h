// Text helpers for messages.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace shoal {

// A name taken from a file, made safe to print: control characters, quotes, backslashes and bytes that are not valid
// UTF-8 are escaped (\n, \x1b); more than 80 characters are cut with an ellipsis.
std::string printable(std::string_view name);

// Bytes of the valid UTF-8 sequence (RFC 3629) that starts at s[at], or 0 if there is none. `at` < s.size().
size_t utf8_length(std::string_view s, size_t at);

// "[2, 3, 4]"
std::string shape_text(std::span<const int64_t> shape);

// "98.4 MB": decimal units, as file sizes are usually quoted.
std::string bytes_text(uint64_t num_bytes);

}  // namespace shoal
