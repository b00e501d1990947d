// Members of config.json's objects: kModelFormat "config.json: ..." where one is missing, of another type or out of range.
// A member that is null counts as absent.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "shoal/base/json.h"

namespace shoal::io {

bool hf_given(const Json& config, std::string_view key);
int64_t hf_int(const Json& config, std::string_view key, int64_t low, int64_t high);
int64_t hf_int_or(const Json& config, std::string_view key, int64_t fallback, int64_t low, int64_t high);
double hf_double_or(const Json& config, std::string_view key, double fallback);
double hf_positive_or(const Json& config, std::string_view key, double fallback);  // finite too
bool hf_bool_or(const Json& config, std::string_view key, bool fallback);
std::string hf_string_or(const Json& config, std::string_view key, std::string_view fallback);

// `layer_types`, an entry a layer; empty where it is absent.
std::vector<std::string> hf_layer_types(const Json& config, size_t num_layers, std::string_view key = "layer_types");

}  // namespace shoal::io
