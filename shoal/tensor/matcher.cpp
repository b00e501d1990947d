#include "shoal/tensor/matcher.h"

#include <algorithm>

#include "shoal/base/text.h"

namespace shoal {

TensorMatcher Matcher::tensor(std::string_view name, const TensorView& view) const {
  require(static_cast<bool>(view), op_, ": ", name, " is required");
  return {op_, name, view};
}

TensorMatcher& TensorMatcher::shape(std::initializer_list<Extent> extents) {
  bool matches = static_cast<size_t>(view_.rank) == extents.size();
  if (matches) {
    int axis = 0;
    for (const Extent& extent : extents) {
      const int64_t actual = view_.dim(axis++);
      if (extent.dim_ != nullptr && !extent.dim_->value_) {
        extent.dim_->value_ = actual;
        extent.dim_->from_ = name_;
      }
      matches = matches && actual == (extent.dim_ != nullptr ? extent.dim_->value() : extent.value_);
    }
  }
  if (matches) {
    return *this;
  }
  std::string expected;
  std::string sources;
  for (const Extent& extent : extents) {
    expected += expected.empty() ? "" : ", ";
    if (extent.dim_ == nullptr) {
      expected += std::to_string(extent.value_);
      continue;
    }
    const Dim& dim = *extent.dim_;
    expected += dim.name_;
    if (dim.value_ && dim.from_ != name_) {
      expected += " = " + std::to_string(*dim.value_);
      if (!dim.from_.empty() && sources.find(dim.from_) == std::string::npos) {
        sources += (sources.empty() ? "" : ", ") + dim.from_;
      }
    }
  }
  reject(" has shape ", shape_text(view_.dims()), ", expected [", expected, "]",
         sources.empty() ? "" : " (from " + sources + ")");
}

TensorMatcher& TensorMatcher::types(std::initializer_list<DType> allowed) {
  if (std::find(allowed.begin(), allowed.end(), view_.dtype) == allowed.end()) {
    std::string names;
    for (const DType type : allowed) {
      names += (names.empty() ? "" : " or ") + std::string(to_string(type));
    }
    reject(" has type ", to_string(view_.dtype), ", expected ", names);
  }
  return *this;
}

TensorMatcher& TensorMatcher::rank(int expected) {
  if (view_.rank != expected) {
    reject(" has ", view_.rank, " dimensions, expected ", expected);
  }
  return *this;
}

TensorMatcher& TensorMatcher::contiguous() {
  if (!view_.is_contiguous()) {
    reject(" must be contiguous");
  }
  return *this;
}

TensorMatcher& TensorMatcher::inner_contiguous() {
  if (view_.rank > 0 && view_.dim(view_.rank - 1) > 1 && view_.stride(view_.rank - 1) != 1) {
    reject(" must be contiguous in its last dimension");
  }
  return *this;
}

TensorMatcher& TensorMatcher::device(Device expected) {
  if (!(view_.device == expected)) {
    reject(" is on another device than the other arguments");
  }
  return *this;
}

}  // namespace shoal
