// JSON (RFC 8259) as a tree, read from untrusted text: config.json, safetensors headers, index files.
//
// Strict: no comments, no trailing commas, no NaN, no byte order mark, valid UTF-8 only, no lone surrogates; nesting at
// most 64, at most 4 million values, duplicate keys are an error. Errors are kModelFormat with line and column (both
// from 1, columns count characters).
//
// Numbers keep whether they were integers: digits without point or exponent that fit int64 are kInt. Larger integers
// are kDouble ("model_max_length": 1000000000000000019884624838656 is common). A number beyond the range of double is
// an error, one too small for it is zero.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "shoal/base/error.h"

namespace shoal {

class Json {
 public:
  enum class Kind : uint8_t { kNull, kBool, kInt, kDouble, kString, kArray, kObject };
  using Array = std::vector<Json>;
  using Object = std::vector<std::pair<std::string, Json>>;  // in the order of the text

  Json() noexcept = default;
  ~Json();
  Json(Json&&) noexcept;
  Json& operator=(Json&&) noexcept;
  Json(const Json&);
  Json& operator=(const Json&);

  // `source` names the text in messages ("config.json").
  static Json parse(std::string_view text, std::string_view source);

  Kind kind() const { return static_cast<Kind>(value_.index()); }
  bool is_null() const { return kind() == Kind::kNull; }
  bool is_object() const { return kind() == Kind::kObject; }
  bool is_array() const { return kind() == Kind::kArray; }
  bool is_string() const { return kind() == Kind::kString; }
  bool is_number() const { return kind() == Kind::kInt || kind() == Kind::kDouble; }

  // Typed access; kModelFormat naming `what` if the kind is another. as_int takes integers and doubles that are whole
  // and at most 2^53 in magnitude (1e6); as_double takes both.
  bool as_bool(std::string_view what) const;
  int64_t as_int(std::string_view what) const;
  double as_double(std::string_view what) const;
  const std::string& as_string(std::string_view what) const;
  const Array& as_array(std::string_view what) const;
  const Object& as_object(std::string_view what) const;

  // Member of an object, nullptr if absent or if this is no object. Linear: meant for objects with few members.
  const Json* find(std::string_view key) const;

 private:
  friend class JsonParser;
  // In the order of Kind. Strings and containers stand apart so that a number in a large array costs 16 bytes.
  std::variant<std::monostate, bool, int64_t, double, std::unique_ptr<std::string>, std::unique_ptr<Array>,
               std::unique_ptr<Object>>
      value_;
};

std::string_view to_string(Json::Kind kind);

}  // namespace shoal
