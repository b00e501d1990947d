#include "shoal/io/hf_config.h"

#include <cmath>

#include "shoal/base/error.h"
#include "shoal/base/text.h"

namespace shoal::io {
namespace {

const Json& member(const Json& config, std::string_view key) {
  const Json* value = config.find(key);
  if (value == nullptr || value->is_null()) {
    fail(ErrorCode::kModelFormat, "config.json: \"", key, "\" is missing");
  }
  return *value;
}

}  // namespace

bool hf_given(const Json& config, std::string_view key) {
  const Json* value = config.find(key);
  return value != nullptr && !value->is_null();
}

int64_t hf_int(const Json& config, std::string_view key, int64_t low, int64_t high) {
  const int64_t value = member(config, key).as_int(concat("config.json: \"", key, "\""));
  if (value < low || value > high) {
    fail(ErrorCode::kModelFormat, "config.json: \"", key, "\" is ", value, ", expected ", low, " to ", high);
  }
  return value;
}

int64_t hf_int_or(const Json& config, std::string_view key, int64_t fallback, int64_t low, int64_t high) {
  return hf_given(config, key) ? hf_int(config, key, low, high) : fallback;
}

double hf_double_or(const Json& config, std::string_view key, double fallback) {
  return hf_given(config, key) ? config.find(key)->as_double(concat("config.json: \"", key, "\"")) : fallback;
}

double hf_positive_or(const Json& config, std::string_view key, double fallback) {
  const double value = hf_double_or(config, key, fallback);
  if (!(value > 0.0) || !std::isfinite(value)) {
    fail(ErrorCode::kModelFormat, "config.json: \"", key, "\" is ", value, ", expected a positive number");
  }
  return value;
}

bool hf_bool_or(const Json& config, std::string_view key, bool fallback) {
  return hf_given(config, key) ? config.find(key)->as_bool(concat("config.json: \"", key, "\"")) : fallback;
}

std::string hf_string_or(const Json& config, std::string_view key, std::string_view fallback) {
  return hf_given(config, key) ? config.find(key)->as_string(concat("config.json: \"", key, "\""))
                               : std::string(fallback);
}

std::vector<std::string> hf_layer_types(const Json& config, size_t num_layers, std::string_view key) {
  std::vector<std::string> types;
  if (!hf_given(config, key)) {
    return types;
  }
  const std::string what = "config.json: " + std::string(key);
  for (const Json& type : config.find(key)->as_array(what)) {
    types.push_back(type.as_string(what));
  }
  if (types.size() != num_layers) {
    fail(ErrorCode::kModelFormat, what, " has ", types.size(), " entries for ", num_layers, " layers");
  }
  return types;
}

}  // namespace shoal::io
