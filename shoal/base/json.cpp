#include "shoal/base/json.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <optional>
#include <system_error>

#include "shoal/base/text.h"

namespace shoal {
namespace {

constexpr int kMaxDepth = 64;
constexpr size_t kMaxValues = 4'000'000;

bool is_digit(char c) { return c >= '0' && c <= '9'; }

void append_utf8(std::string& out, uint32_t code_point) {
  const auto put = [&](uint32_t byte) { out += static_cast<char>(static_cast<unsigned char>(byte)); };
  if (code_point < 0x80) {
    put(code_point);
  } else if (code_point < 0x800) {
    put(0xc0 | (code_point >> 6));
    put(0x80 | (code_point & 0x3f));
  } else if (code_point < 0x10000) {
    put(0xe0 | (code_point >> 12));
    put(0x80 | ((code_point >> 6) & 0x3f));
    put(0x80 | (code_point & 0x3f));
  } else {
    put(0xf0 | (code_point >> 18));
    put(0x80 | ((code_point >> 12) & 0x3f));
    put(0x80 | ((code_point >> 6) & 0x3f));
    put(0x80 | (code_point & 0x3f));
  }
}

// Whether a number that does not fit double is too large (otherwise it is too small). `text` is a valid JSON number
// without sign, not zero: its first significant digit has the place value 10^place, far from 10^0.
bool is_too_large(std::string_view text) {
  constexpr int64_t kFar = int64_t{1} << 40;
  const size_t exponent_at = std::min(text.find_first_of("eE"), text.size());
  const std::string_view digits = text.substr(0, exponent_at);
  const size_t point = std::min(digits.find('.'), digits.size());
  const size_t first = digits.find_first_of("123456789");
  int64_t place = first < point ? static_cast<int64_t>(point - first) - 1
                                : static_cast<int64_t>(point) - static_cast<int64_t>(first);
  int64_t exponent = 0;
  bool negative = false;
  for (const char c : text.substr(exponent_at)) {
    negative = negative || c == '-';
    if (is_digit(c)) {
      exponent = std::min(exponent * 10 + (c - '0'), kFar);
    }
  }
  place += negative ? -exponent : exponent;
  return place > 0;
}

}  // namespace

class JsonParser {
 public:
  JsonParser(std::string_view text, std::string_view source) : text_(text), source_(source) {}

  Json parse() {
    skip_space();
    Json value = parse_value(0);
    skip_space();
    if (at_ != text_.size()) {
      reject(at_, "text after the end of the value");
    }
    return value;
  }

 private:
  [[noreturn]] void reject(size_t at, std::string_view problem) const {
    const std::string_view before = text_.substr(0, at);
    const auto line = std::count(before.begin(), before.end(), '\n') + 1;
    const size_t line_start = before.rfind('\n') + 1;  // npos + 1 is 0
    const auto column = std::count_if(before.begin() + static_cast<std::ptrdiff_t>(line_start), before.end(),
                                      [](char c) { return (static_cast<unsigned char>(c) & 0xc0u) != 0x80u; }) +
                        1;
    fail(ErrorCode::kModelFormat, printable(source_), ", line ", line, ", column ", column, ": ", problem);
  }

  bool more() const { return at_ < text_.size(); }

  char peek(std::string_view expected) const {
    if (!more()) {
      reject(at_, concat("the text ends, expected ", expected));
    }
    return text_[at_];
  }

  void skip_space() {
    while (more() && (text_[at_] == ' ' || text_[at_] == '\n' || text_[at_] == '\r' || text_[at_] == '\t')) {
      ++at_;
    }
  }

  // The character at `at_` as it may be shown.
  std::string shown() const {
    const size_t length = std::max<size_t>(utf8_length(text_, at_), 1);
    return concat("\"", printable(text_.substr(at_, length)), "\"");
  }

  Json parse_value(int depth) {
    if (++num_values_ > kMaxValues) {
      reject(at_, concat("more than ", kMaxValues, " values"));
    }
    Json value;
    switch (peek("a value")) {
      case '{': value.value_ = parse_object(depth + 1); break;
      case '[': value.value_ = parse_array(depth + 1); break;
      case '"': value.value_ = std::make_unique<std::string>(parse_string()); break;
      case 't': take_word("true"), value.value_ = true; break;
      case 'f': take_word("false"), value.value_ = false; break;
      case 'n': take_word("null"); break;
      default: parse_number(value); break;
    }
    return value;
  }

  void take_word(std::string_view word) {
    if (text_.substr(at_, word.size()) != word) {
      reject(at_, concat("expected a value, found ", shown()));
    }
    at_ += word.size();
  }

  void enter(int depth) {
    if (depth > kMaxDepth) {
      reject(at_, concat("nested more than ", kMaxDepth, " deep"));
    }
    ++at_;
    skip_space();
  }

  // After a member: true for a comma, false for the closing bracket.
  bool take_separator(char close, std::string_view expected) {
    skip_space();
    const char c = peek(expected);
    if (c != ',' && c != close) {
      reject(at_, concat("expected ", expected, ", found ", shown()));
    }
    ++at_;
    skip_space();
    return c == ',';
  }

  std::unique_ptr<Json::Array> parse_array(int depth) {
    enter(depth);
    auto array = std::make_unique<Json::Array>();
    if (peek("a value or \"]\"") == ']') {
      ++at_;
      return array;
    }
    do {
      array->push_back(parse_value(depth));
    } while (take_separator(']', "\",\" or \"]\""));
    return array;
  }

  std::unique_ptr<Json::Object> parse_object(int depth) {
    enter(depth);
    auto object = std::make_unique<Json::Object>();
    if (peek("a name or \"}\"") == '}') {
      ++at_;
      return object;
    }
    std::vector<size_t> positions;
    do {
      if (peek("a name") != '"') {
        reject(at_, concat("expected a name, found ", shown()));
      }
      positions.push_back(at_);
      std::string name = parse_string();
      skip_space();
      if (peek("\":\"") != ':') {
        reject(at_, concat("expected \":\", found ", shown()));
      }
      ++at_;
      skip_space();
      object->emplace_back(std::move(name), parse_value(depth));
    } while (take_separator('}', "\",\" or \"}\""));
    reject_duplicates(*object, positions);
    return object;
  }

  // By sorting: a hash table could be flooded by chosen keys.
  void reject_duplicates(const Json::Object& object, const std::vector<size_t>& positions) const {
    std::vector<size_t> order(object.size());
    for (size_t i = 0; i < order.size(); ++i) {
      order[i] = i;
    }
    std::sort(order.begin(), order.end(), [&](size_t a, size_t b) {
      const int compared = object[a].first.compare(object[b].first);
      return compared != 0 ? compared < 0 : a < b;
    });
    size_t duplicate = object.size();
    for (size_t i = 1; i < order.size(); ++i) {
      if (object[order[i - 1]].first == object[order[i]].first) {
        duplicate = std::min(duplicate, order[i]);
      }
    }
    if (duplicate < object.size()) {
      reject(positions[duplicate], concat("\"", printable(object[duplicate].first), "\" is there twice"));
    }
  }

  std::string parse_string() {
    ++at_;
    std::string out;
    while (true) {
      const auto c = static_cast<unsigned char>(peek("the end of a string"));
      if (c == '"') {
        ++at_;
        return out;
      }
      if (c == '\\') {
        parse_escape(out);
        continue;
      }
      if (c < 0x20) {
        reject(at_, concat("control character ", shown(), " in a string must be escaped"));
      }
      const size_t length = utf8_length(text_, at_);
      if (length == 0) {
        reject(at_, concat("invalid UTF-8: byte ", shown()));
      }
      out.append(text_, at_, length);
      at_ += length;
    }
  }

  void parse_escape(std::string& out) {
    constexpr std::string_view kNames = "\"\\/bfnrt";
    constexpr std::string_view kValues = "\"\\/\b\f\n\r\t";
    const size_t start = at_++;
    const char c = peek("an escape");
    if (const size_t idx = kNames.find(c); idx != std::string_view::npos) {
      out += kValues[idx];
      ++at_;
      return;
    }
    if (c != 'u') {
      reject(start, "unknown escape in a string");
    }
    ++at_;
    uint32_t code_point = parse_hex4();
    if (code_point >= 0xdc00 && code_point <= 0xdfff) {
      reject(start, "second half of a surrogate pair without the first");
    }
    if (code_point >= 0xd800 && code_point <= 0xdbff) {
      const bool escaped = text_.substr(at_, 2) == "\\u";
      at_ += escaped ? 2 : 0;
      const uint32_t low = escaped ? parse_hex4() : 0;
      if (low < 0xdc00 || low > 0xdfff) {
        reject(start, "first half of a surrogate pair without the second");
      }
      code_point = 0x10000 + ((code_point - 0xd800) << 10) + (low - 0xdc00);
    }
    append_utf8(out, code_point);
  }

  uint32_t parse_hex4() {
    uint32_t value = 0;
    for (int i = 0; i < 4; ++i) {
      const char c = peek("four hexadecimal digits");
      const bool digit = is_digit(c);
      const char lower = static_cast<char>(c | 0x20);
      if (!digit && (lower < 'a' || lower > 'f')) {
        reject(at_, concat("expected four hexadecimal digits, found ", shown()));
      }
      value = value * 16 + static_cast<uint32_t>(digit ? c - '0' : lower - 'a' + 10);
      ++at_;
    }
    return value;
  }

  void skip_digits() {
    if (!is_digit(peek("a digit"))) {
      reject(at_, concat("expected a digit, found ", shown()));
    }
    while (more() && is_digit(text_[at_])) {
      ++at_;
    }
  }

  void parse_number(Json& value) {
    const size_t start = at_;
    const bool negative = text_[at_] == '-';
    if (!negative && !is_digit(text_[at_])) {
      reject(at_, concat("expected a value, found ", shown()));
    }
    at_ += negative ? 1 : 0;
    const size_t digits = at_;
    skip_digits();
    if (text_[digits] == '0' && at_ > digits + 1) {
      reject(digits, "a number must not start with 0");
    }
    bool whole = true;
    if (more() && text_[at_] == '.') {
      whole = false;
      ++at_;
      skip_digits();
    }
    if (more() && (text_[at_] == 'e' || text_[at_] == 'E')) {
      whole = false;
      ++at_;
      at_ += more() && (text_[at_] == '+' || text_[at_] == '-') ? 1 : 0;
      skip_digits();
    }
    const char* begin = text_.data() + start;
    const char* end = text_.data() + at_;
    int64_t integer = 0;
    if (whole && std::from_chars(begin, end, integer).ec == std::errc()) {
      value.value_ = integer;
      return;
    }
    double number = 0.0;
    if (std::from_chars(begin, end, number).ec != std::errc()) {
      if (is_too_large(text_.substr(digits, at_ - digits))) {
        reject(start, "a number does not fit double precision");
      }
      number = negative ? -0.0 : 0.0;
    }
    value.value_ = number;
  }

  std::string_view text_;
  std::string_view source_;
  size_t at_ = 0;
  size_t num_values_ = 0;
};

namespace {

[[noreturn]] void wrong_kind(std::string_view what, std::string_view expected, Json::Kind actual) {
  fail(ErrorCode::kModelFormat, "\"", printable(what), "\" must be ", expected, ", not ", to_string(actual));
}

}  // namespace

std::string_view to_string(Json::Kind kind) {
  switch (kind) {
    case Json::Kind::kNull: return "null";
    case Json::Kind::kBool: return "a boolean";
    case Json::Kind::kInt: return "an integer";
    case Json::Kind::kDouble: return "a number";
    case Json::Kind::kString: return "a string";
    case Json::Kind::kArray: return "an array";
    case Json::Kind::kObject: return "an object";
  }
  return "unknown";
}

Json::~Json() = default;
Json::Json(Json&&) noexcept = default;
Json& Json::operator=(Json&&) noexcept = default;

Json::Json(const Json& other) {
  switch (other.kind()) {
    case Kind::kNull: break;
    case Kind::kBool: value_ = std::get<bool>(other.value_); break;
    case Kind::kInt: value_ = std::get<int64_t>(other.value_); break;
    case Kind::kDouble: value_ = std::get<double>(other.value_); break;
    case Kind::kString: value_ = std::make_unique<std::string>(other.as_string("")); break;
    case Kind::kArray: value_ = std::make_unique<Array>(other.as_array("")); break;
    case Kind::kObject: value_ = std::make_unique<Object>(other.as_object("")); break;
  }
}

Json& Json::operator=(const Json& other) {
  Json copy(other);
  *this = std::move(copy);
  return *this;
}

Json Json::parse(std::string_view text, std::string_view source) { return JsonParser(text, source).parse(); }

bool Json::as_bool(std::string_view what) const {
  if (const auto* value = std::get_if<bool>(&value_)) {
    return *value;
  }
  wrong_kind(what, "a boolean", kind());
}

int64_t Json::as_int(std::string_view what) const {
  if (const auto* value = std::get_if<int64_t>(&value_)) {
    return *value;
  }
  if (const auto* value = std::get_if<double>(&value_)) {
    if (*value == std::trunc(*value) && std::abs(*value) <= 0x1p53) {
      return static_cast<int64_t>(*value);
    }
  }
  wrong_kind(what, "an integer", kind());
}

double Json::as_double(std::string_view what) const {
  if (const auto* value = std::get_if<double>(&value_)) {
    return *value;
  }
  if (const auto* value = std::get_if<int64_t>(&value_)) {
    return static_cast<double>(*value);
  }
  wrong_kind(what, "a number", kind());
}

const std::string& Json::as_string(std::string_view what) const {
  if (const auto* value = std::get_if<std::unique_ptr<std::string>>(&value_)) {
    return **value;
  }
  wrong_kind(what, "a string", kind());
}

const Json::Array& Json::as_array(std::string_view what) const {
  if (const auto* value = std::get_if<std::unique_ptr<Array>>(&value_)) {
    return **value;
  }
  wrong_kind(what, "an array", kind());
}

const Json::Object& Json::as_object(std::string_view what) const {
  if (const auto* value = std::get_if<std::unique_ptr<Object>>(&value_)) {
    return **value;
  }
  wrong_kind(what, "an object", kind());
}

const Json* Json::find(std::string_view key) const {
  if (!is_object()) {
    return nullptr;
  }
  for (const auto& [name, value] : as_object("")) {
    if (name == key) {
      return &value;
    }
  }
  return nullptr;
}

}  // namespace shoal
