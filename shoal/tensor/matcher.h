// Checks of tensor arguments that read like the contract, with named sizes, so that messages come for free:
//
//   Dim tokens{"num_tokens"}, hidden{"hidden"};
//   Matcher check("rms_norm");
//   check.tensor("x", a.x).shape({tokens, hidden}).types(kFloats);
//   check.tensor("weight", a.weight).shape({hidden});
//
//   rms_norm: weight has shape [4096], expected [hidden = 5120] (from x)
//
// Every call throws kInvalidArgument at once when it does not hold.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>

#include "shoal/tensor/tensor.h"

namespace shoal {

// A size that gets its value from the first tensor it is matched with and must agree afterwards.
class Dim {
 public:
  explicit Dim(std::string_view name) : name_(name) {}
  Dim(std::string_view name, int64_t value) : name_(name), value_(value) {}

  int64_t value() const {
    SHOAL_ASSERT(value_.has_value());
    return *value_;
  }
  operator int64_t() const { return value(); }  // NOLINT: a bound Dim is its value

 private:
  friend class TensorMatcher;
  std::string name_;
  std::optional<int64_t> value_;
  std::string from_;  // the tensor that fixed the value
};

// One expected extent: a Dim (bound or checked) or a fixed number.
class Extent {
 public:
  Extent(Dim& dim) : dim_(&dim) {}          // NOLINT: implicit on purpose
  Extent(int64_t value) : value_(value) {}  // NOLINT: implicit on purpose
  Extent(int value) : value_(value) {}      // NOLINT: implicit on purpose

 private:
  friend class TensorMatcher;
  Dim* dim_ = nullptr;
  int64_t value_ = 0;
};

inline constexpr std::initializer_list<DType> kFloats = {DType::kF32, DType::kF16, DType::kBF16};

class TensorMatcher {
 public:
  TensorMatcher(std::string_view op, std::string_view name, const TensorView& view)
      : op_(op), name_(name), view_(view) {}

  TensorMatcher& shape(std::initializer_list<Extent> extents);
  TensorMatcher& types(std::initializer_list<DType> allowed);
  TensorMatcher& type(DType expected) { return types({expected}); }
  TensorMatcher& rank(int expected);
  TensorMatcher& contiguous();
  TensorMatcher& inner_contiguous();  // elements of the last dimension are adjacent; outer strides are free
  TensorMatcher& device(Device expected);

 private:
  template <class... Args>
  [[noreturn]] void reject(const Args&... args) const {
    fail(ErrorCode::kInvalidArgument, op_, ": ", name_, args...);
  }
  std::string_view op_;
  std::string_view name_;
  const TensorView& view_;
};

class Matcher {
 public:
  explicit Matcher(std::string_view op) : op_(op) {}
  // The tensor must be given; ask `if (view)` first for an optional one.
  TensorMatcher tensor(std::string_view name, const TensorView& view) const;

 private:
  std::string_view op_;
};

}  // namespace shoal
