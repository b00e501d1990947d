// Reads recurrence/<operator>.json (make_recurrence_golden.py): inputs and outputs of onnxruntime's CPU kernels.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "shoal/base/file.h"
#include "shoal/base/json.h"
#include "shoal/tensor/dtype.h"
#include "testkit/guarded_tensor.h"

namespace shoal::golden {

struct Array {
  DType dtype = DType::kF32;
  std::vector<int64_t> shape;
  std::vector<float> values;
};

struct Case {
  Json attributes;
  std::vector<std::pair<std::string, Array>> inputs;
  std::vector<std::pair<std::string, Array>> outputs;

  int64_t integer(std::string_view name, int64_t otherwise = 0) const {
    const Json* value = attributes.find(name);
    return value == nullptr ? otherwise : value->as_int(name);
  }
  float number(std::string_view name, float otherwise = 0.0f) const {
    const Json* value = attributes.find(name);
    return value == nullptr ? otherwise : static_cast<float>(value->as_double(name));
  }
  std::string_view text(std::string_view name, std::string_view otherwise) const {
    const Json* value = attributes.find(name);
    return value == nullptr ? otherwise : value->as_string(name);
  }
  const Array& output(std::string_view name) const {
    for (const auto& [key, array] : outputs) {
      if (key == name) {
        return array;
      }
    }
    fail(ErrorCode::kInternal, "no golden output ", name);
  }
};

inline std::vector<std::pair<std::string, Array>> arrays_of(const Json& object) {
  std::vector<std::pair<std::string, Array>> arrays;
  for (const auto& [name, json] : object.as_object("tensors")) {
    Array array;
    const std::string& type = json.find("type")->as_string("type");
    array.dtype = type == "float32" ? DType::kF32 : type == "float16" ? DType::kF16 : DType::kI32;
    for (const Json& extent : json.find("shape")->as_array("shape")) {
      array.shape.push_back(extent.as_int("shape"));
    }
    for (const Json& value : json.find("values")->as_array("values")) {
      array.values.push_back(static_cast<float>(value.as_double("values")));
    }
    arrays.emplace_back(name, std::move(array));
  }
  return arrays;
}

inline std::vector<Case> read_cases(const std::string& name) {
  const std::string path = std::string(SHOAL_TEST_DATA) + "/recurrence/" + name + ".json";
  const Json json = Json::parse(read_text_file(path, 1 << 24), name);
  std::vector<Case> cases;
  for (const Json& entry : json.as_array("cases")) {
    cases.push_back({*entry.find("attributes"), arrays_of(*entry.find("inputs")), arrays_of(*entry.find("outputs"))});
  }
  return cases;
}

}  // namespace shoal::golden
