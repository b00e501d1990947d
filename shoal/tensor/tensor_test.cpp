#include "shoal/tensor/tensor.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <utility>

#include "shoal/tensor/dtype.h"
#include "shoal/tensor/matcher.h"
#include "shoal/tensor/workspace.h"
#include "testkit/expect_error.h"

// Under the address sanitizer too, an impossible allocation fails instead of ending the process.
extern "C" const char* __asan_default_options() { return "allocator_may_return_null=1"; }

namespace shoal {
namespace {

using testkit::expect_error;

template <class Body>
void expect_invalid(std::string_view message, Body&& body) {
  expect_error(ErrorCode::kInvalidArgument, message, body);
}

TEST(DType, SizesAndNames) {
  EXPECT_EQ(size_of(DType::kF32), 4u);
  EXPECT_EQ(size_of(DType::kBF16), 2u);
  EXPECT_EQ(size_of(DType::kF8E4M3), 1u);
  EXPECT_EQ(size_of(DType::kI64), 8u);
  EXPECT_EQ(to_string(DType::kF8E4M3), "float8e4m3fn");
}

TEST(TensorView, ContiguousStrides) {
  float data[24] = {};
  const TensorView view(data, DType::kF32, {2, 3, 4});
  EXPECT_EQ(view.rank, 3);
  EXPECT_EQ(view.stride(0), 12);
  EXPECT_EQ(view.stride(1), 4);
  EXPECT_EQ(view.stride(2), 1);
  EXPECT_EQ(view.num_elements(), 24);
  EXPECT_EQ(view.num_bytes(), 96u);
  EXPECT_TRUE(view.is_contiguous());
  EXPECT_EQ(view.as<float>(), data);
}

TEST(TensorView, AbsentEmptyAndScalar) {
  EXPECT_FALSE(TensorView());
  const TensorView empty(nullptr, DType::kF32, {0, 4});
  EXPECT_TRUE(empty);
  EXPECT_EQ(empty.num_elements(), 0);
  EXPECT_TRUE(empty.is_contiguous());
  float value = 1.0f;
  const TensorView scalar(&value, DType::kF32, {});
  EXPECT_EQ(scalar.num_elements(), 1);
  EXPECT_TRUE(scalar.is_contiguous());
}

TEST(TensorView, ContiguityIgnoresStridesThatDoNotMatter) {
  float data[24] = {};
  TensorView view(data, DType::kF32, {1, 3, 4});
  view.strides[0] = 999;  // one row: its stride is never used
  EXPECT_TRUE(view.is_contiguous());
  view.strides[1] = 8;
  EXPECT_FALSE(view.is_contiguous());
  view.shape[2] = 0;  // no elements
  EXPECT_TRUE(view.is_contiguous());
}

TEST(TensorView, Rows) {
  float data[12] = {};
  TensorView view(data, DType::kF32, {3, 4});
  const TensorView rows = view.rows(1, 3);
  EXPECT_EQ(rows.dim(0), 2);
  EXPECT_EQ(rows.dim(1), 4);
  EXPECT_EQ(rows.data, data + 4);
  EXPECT_EQ(view.rows(3, 3).num_elements(), 0);
  TensorView strided(data, DType::kF32, {2, 4});
  strided.strides[0] = 8;
  EXPECT_EQ(strided.rows(1, 2).data, data + 8);
  expect_error(ErrorCode::kInternal, "does not hold", [&] { static_cast<void>(view.rows(1, 4)); });
  expect_error(ErrorCode::kInternal, "does not hold", [&] { static_cast<void>(view.rows(2, 1)); });
  expect_error(ErrorCode::kInternal, "does not hold", [&] { static_cast<void>(view.dim(2)); });
}

TEST(TensorView, RankIsLimited) {
  float data = 0.0f;
  EXPECT_NO_THROW(TensorView(&data, DType::kF32, {1, 1, 1, 1, 1, 1}));
  expect_invalid("7 dimensions, at most 6", [&] { TensorView(&data, DType::kF32, {1, 1, 1, 1, 1, 1, 1}); });
}

TEST(Tensor, OwnsAlignedMemory) {
  Tensor tensor(DType::kF16, {3, 5});
  EXPECT_EQ(reinterpret_cast<uintptr_t>(tensor.view().data) % 64, 0u);
  EXPECT_EQ(tensor.span<uint16_t>().size(), 15u);
  tensor.span<uint16_t>()[14] = 7;
  const void* memory = tensor.view().data;
  const Tensor moved = std::move(tensor);
  EXPECT_EQ(moved.view().data, memory);
  EXPECT_EQ(moved.span<uint16_t>()[14], 7);
  EXPECT_TRUE(Tensor(DType::kF32, {0, 5}).view());
}

TEST(Tensor, RejectsImpossibleShapes) {
  expect_invalid("[2, -1] has a negative dimension", [] { Tensor(DType::kF32, {2, -1}); });
  expect_invalid("does not fit the address space", [] { Tensor(DType::kF32, {int64_t{1} << 40, int64_t{1} << 40}); });
  expect_error(ErrorCode::kOutOfMemory, "cannot allocate",
               [] { AlignedBuffer(std::numeric_limits<size_t>::max() - 100); });
  expect_error(ErrorCode::kOutOfMemory, "cannot allocate", [] { AlignedBuffer(std::numeric_limits<size_t>::max()); });
}

TEST(Matcher, BindsAndChecksNamedSizes) {
  float data[24] = {};
  const TensorView x(data, DType::kF32, {2, 8});
  const TensorView good(data, DType::kF32, {8});
  const TensorView bad(data, DType::kF32, {4});
  Dim tokens{"num_tokens"};
  Dim hidden{"hidden"};
  const Matcher check("rms_norm");
  check.tensor("x", x).shape({tokens, hidden}).types(kFloats).contiguous();
  EXPECT_EQ(tokens, 2);
  EXPECT_EQ(hidden.value(), 8);
  EXPECT_NO_THROW(check.tensor("weight", good).shape({hidden}));
  expect_invalid("rms_norm: weight has shape [4], expected [hidden = 8] (from x)",
                 [&] { check.tensor("weight", bad).shape({hidden}); });
}

TEST(Matcher, FixedAndGivenSizes) {
  float data[24] = {};
  const TensorView x(data, DType::kF32, {2, 3});
  const Matcher check("op");
  Dim heads{"num_heads", 4};
  expect_invalid("op: x has shape [2, 3], expected [num_heads = 4, 3]", [&] {
    check.tensor("x", x).shape({heads, 3});
  });
  expect_invalid("op: x has shape [2, 3], expected [2, 4]", [&] { check.tensor("x", x).shape({2, int64_t{4}}); });
  Dim rows{"rows"};
  expect_invalid("op: x has shape [2, 3], expected [rows]", [&] { check.tensor("x", x).shape({rows}); });
  Dim side{"side"};
  expect_invalid("op: x has shape [2, 3], expected [side, side]", [&] { check.tensor("x", x).shape({side, side}); });
  expect_error(ErrorCode::kInternal, "value_.has_value()", [] { static_cast<void>(Dim("unbound").value()); });
}

TEST(Matcher, NamesEverySourceOnce) {
  float data[24] = {};
  const TensorView a(data, DType::kF32, {2, 3});
  const TensorView b(data, DType::kF32, {4});
  const TensorView c(data, DType::kF32, {3, 3, 4});
  Dim m{"m"};
  Dim n{"n"};
  Dim k{"k"};
  const Matcher check("op");
  check.tensor("a", a).shape({m, n});
  check.tensor("b", b).shape({k});
  expect_invalid("op: c has shape [3, 3, 4], expected [m = 2, n = 3, k = 4] (from a, b)", [&] {
    check.tensor("c", c).shape({m, n, k});
  });
}

TEST(Matcher, TypesRankLayoutAndDevice) {
  float data[24] = {};
  TensorView x(data, DType::kI32, {2, 3});
  const Matcher check("op");
  expect_invalid("op: x has type int32, expected float32 or float16 or bfloat16",
                 [&] { check.tensor("x", x).types(kFloats); });
  expect_invalid("op: x has type int32, expected int64", [&] { check.tensor("x", x).type(DType::kI64); });
  expect_invalid("op: x has 2 dimensions, expected 3", [&] { check.tensor("x", x).rank(3); });
  expect_invalid("op: x is on another device", [&] { check.tensor("x", x).device({DeviceType::kCuda, 0}); });
  EXPECT_NO_THROW(check.tensor("x", x).type(DType::kI32).rank(2).device({}).contiguous().inner_contiguous());
  x.strides[0] = 5;
  EXPECT_NO_THROW(check.tensor("x", x).inner_contiguous());
  expect_invalid("op: x must be contiguous", [&] { check.tensor("x", x).contiguous(); });
  x.strides[1] = 2;
  expect_invalid("op: x must be contiguous in its last dimension", [&] { check.tensor("x", x).inner_contiguous(); });
  x.shape[1] = 1;
  EXPECT_NO_THROW(check.tensor("x", x).inner_contiguous());
  expect_invalid("op: y is required", [&] { check.tensor("y", TensorView()); });
}

TEST(Workspace, HandsOutAlignedSpans) {
  Workspace workspace(1024);
  EXPECT_EQ(workspace.capacity(), 1024u);
  const auto a = workspace.take<float>(3);
  const auto b = workspace.take<double>(8);
  EXPECT_EQ(a.size(), 3u);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(a.data()) % 64, 0u);
  EXPECT_EQ(reinterpret_cast<std::byte*>(b.data()) - reinterpret_cast<std::byte*>(a.data()), 64);
  EXPECT_EQ(Workspace::bytes_for<float>(3), 64u);
  EXPECT_EQ(Workspace::bytes_for<double>(9), 128u);
  EXPECT_EQ(Workspace::bytes_for<float>(0), 0u);
}

TEST(Workspace, ScopeGivesBack) {
  Workspace workspace(256);
  const auto outer = workspace.take<std::byte>(64);
  std::byte* first = nullptr;
  {
    const Workspace::Scope scope(workspace);
    first = workspace.take<std::byte>(128).data();
    const Workspace::Scope inner(workspace);
    static_cast<void>(workspace.take<std::byte>(64));
    expect_error(ErrorCode::kInternal, "workspace of 256 bytes is too small: 256 used, 1 more values of 1 bytes needed",
                 [&] { static_cast<void>(workspace.take<std::byte>(1)); });
  }
  EXPECT_EQ(workspace.take<std::byte>(192).data(), first);
  EXPECT_EQ(first - outer.data(), 64);
}

TEST(Workspace, TooLargeCountsDoNotWrap) {
  Workspace workspace(256);
  for (const size_t count : {std::numeric_limits<size_t>::max(), std::numeric_limits<size_t>::max() / 4,
                             std::numeric_limits<size_t>::max() / 4 + 2, size_t{1} << 62}) {
    expect_error(ErrorCode::kInternal, "is too small", [&] { static_cast<void>(workspace.take<float>(count)); });
  }
}

TEST(Workspace, ReserveGrowsBetweenSteps) {
  Workspace workspace;
  EXPECT_EQ(workspace.capacity(), 0u);
  workspace.reserve(128);
  workspace.reserve(64);
  EXPECT_EQ(workspace.capacity(), 128u);
  static_cast<void>(workspace.take<std::byte>(1));
  expect_error(ErrorCode::kInternal, "used_ == 0", [&] { workspace.reserve(256); });
}

}  // namespace
}  // namespace shoal
