// JSON (RFC 8259) as a tree, read from untrusted text: config.json, safetensors headers, index files.
//
// Strict: no comments, no trailing commas, no NaN, valid UTF-8 only; nesting at most 64, duplicate keys are an error.
// Errors are kModelFormat with line and column. Numbers keep whether they were integers.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "shoal/base/error.h"

namespace shoal {

class Json {
 public:
  enum class Kind : uint8_t { kNull, kBool, kInt, kDouble, kString, kArray, kObject };
  using Array = std::vector<Json>;
  using Object = std::vector<std::pair<std::string, Json>>;  // in the order of the text

  Json() = default;

  // `source` names the text in messages ("config.json").
  static Json parse(std::string_view text, std::string_view source);

  Kind kind() const;
  bool is_null() const { return kind() == Kind::kNull; }
  bool is_object() const { return kind() == Kind::kObject; }
  bool is_array() const { return kind() == Kind::kArray; }
  bool is_string() const { return kind() == Kind::kString; }
  bool is_number() const { return kind() == Kind::kInt || kind() == Kind::kDouble; }

  // Typed access; kModelFormat naming `what` if the kind is another. as_int takes integers (and doubles that are
  // whole); as_double takes both.
  bool as_bool(std::string_view what) const;
  int64_t as_int(std::string_view what) const;
  double as_double(std::string_view what) const;
  const std::string& as_string(std::string_view what) const;
  const Array& as_array(std::string_view what) const;
  const Object& as_object(std::string_view what) const;

  // Member of an object, nullptr if absent or if this is no object.
  const Json* find(std::string_view key) const;

 private:
  friend class JsonParser;
  Kind kind_ = Kind::kNull;
  bool bool_ = false;
  int64_t int_ = 0;
  double double_ = 0.0;
  std::string string_;
  std::unique_ptr<Array> array_;
  std::unique_ptr<Object> object_;

 public:
  ~Json();
  Json(Json&&) noexcept;
  Json& operator=(Json&&) noexcept;
  Json(const Json&);
  Json& operator=(const Json&);
};

}  // namespace shoal
