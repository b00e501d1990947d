#include "shoal/io/gguf.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <string>
#include <vector>

#include "shoal/base/error.h"
#include "testkit/expect_error.h"
#include "testkit/largest_allocation.h"
#include "testkit/testkit.h"

namespace shoal::io {
namespace {

using testkit::expect_error;

// Bytes of a file, field by field. Nothing is checked: a test writes what it likes.
class Bytes {
 public:
  template <class T>
  Bytes& put(T value) {
    text_.append(reinterpret_cast<const char*>(&value), sizeof(T));
    return *this;
  }
  Bytes& u32(uint32_t value) { return put(value); }
  Bytes& u64(uint64_t value) { return put(value); }
  Bytes& raw(std::string_view bytes) {
    text_ += bytes;
    return *this;
  }
  Bytes& string(std::string_view bytes) { return u64(bytes.size()).raw(bytes); }
  Bytes& header(uint64_t num_tensors, uint64_t num_entries, uint32_t version = 3) {
    return raw("GGUF").u32(version).u64(num_tensors).u64(num_entries);
  }
  Bytes& entry(std::string_view key, uint32_t type) { return string(key).u32(type); }
  Bytes& string_entry(std::string_view key, std::string_view value) { return entry(key, 8).string(value); }
  Bytes& u16_entry(std::string_view key, uint16_t value) { return entry(key, 2).put(value); }
  Bytes& u32_entry(std::string_view key, uint32_t value) { return entry(key, 4).u32(value); }
  Bytes& array_entry(std::string_view key, uint32_t type, uint64_t count) { return entry(key, 9).u32(type).u64(count); }
  // `dims` innermost first, as in the file.
  Bytes& tensor(std::string_view name, std::vector<uint64_t> dims, uint32_t type, uint64_t offset) {
    string(name).u32(static_cast<uint32_t>(dims.size()));
    for (const uint64_t dim : dims) {
      u64(dim);
    }
    return u32(type).u64(offset);
  }
  Bytes& align(size_t alignment = 32) {
    text_.resize((text_.size() + alignment - 1) / alignment * alignment);
    return *this;
  }
  Bytes& zeros(size_t count) { return raw(std::string(count, '\0')); }

  const std::string& text() const { return text_; }
  std::span<const std::byte> span() const { return std::as_bytes(std::span(text_)); }

 private:
  std::string text_;
};

GgufFile read(std::string_view bytes) { return {std::as_bytes(std::span(bytes)), "test.gguf"}; }

void expect_rejected(std::string_view bytes, std::string_view message, ErrorCode code = ErrorCode::kModelFormat) {
  SCOPED_TRACE(message);
  expect_error(code, message, [&] { read(bytes); });
}

// A file with one entry, whose key and value are already written.
std::string with_entry(const Bytes& entry) { return Bytes().header(0, 1).raw(entry.text()).text(); }

// A file with one tensor description and 256 bytes of data.
std::string with_tensor(const Bytes& tensor) {
  return Bytes().header(1, 0).raw(tensor.text()).align().zeros(256).text();
}

// Something of everything, in few bytes.
std::string small_file() {
  Bytes file;
  file.header(3, 5);
  file.string_entry("general.architecture", "llama");
  file.u32_entry("general.alignment", 16);
  file.array_entry("tokens", 8, 2).string("a").string("bc");
  file.array_entry("scores", 6, 2).put(1.5f).put(-2.0f);
  file.entry("flag", 7).put(uint8_t{1});
  file.tensor("one", {2, 3}, 0, 0);  // f32
  file.tensor("two", {32}, 2, 32);   // q4_0: one block of 18 bytes
  file.tensor("three", {}, 1, 64);   // one f16
  file.align(16);
  for (int i = 0; i < 6; ++i) {
    file.put(static_cast<float>(i));
  }
  file.align(16).zeros(18).align(16);
  file.put(uint16_t{0x3c00});
  return file.text();
}

TEST(Gguf, ReadsEveryValueType) {
  Bytes file;
  file.header(0, 16);
  file.entry("u8", 0).put(uint8_t{255});
  file.entry("i8", 1).put(int8_t{-128});
  file.entry("u16", 2).put(uint16_t{65535});
  file.entry("i16", 3).put(int16_t{-32768});
  file.entry("u32", 4).put(uint32_t{4294967295u});
  file.entry("i32", 5).put(std::numeric_limits<int32_t>::min());
  file.entry("f32", 6).put(1.5f);
  file.entry("yes", 7).put(uint8_t{1});
  file.entry("no", 7).put(uint8_t{0});
  file.string_entry("string", std::string_view("\0\xff any bytes", 12));
  file.string_entry("empty", "");
  file.entry("u64", 10).put(uint64_t{1} << 62);
  file.entry("big", 10).put(uint64_t{1} << 63);
  file.entry("i64", 11).put(std::numeric_limits<int64_t>::min());
  file.entry("f64", 12).put(0.1);
  file.string_entry("odd \n key", "x");
  const GgufFile gguf = read(file.text());
  EXPECT_EQ(gguf.metadata().size(), 16u);
  EXPECT_EQ(gguf.get_int("u8"), 255);
  EXPECT_EQ(gguf.get_int("i8"), -128);
  EXPECT_EQ(gguf.get_int("u16"), 65535);
  EXPECT_EQ(gguf.get_int("i16"), -32768);
  EXPECT_EQ(gguf.get_int("u32"), 4294967295);
  EXPECT_EQ(gguf.get_int("i32"), std::numeric_limits<int32_t>::min());
  EXPECT_EQ(gguf.get_double("f32"), 1.5);
  EXPECT_TRUE(gguf.get_bool("yes", false));
  EXPECT_FALSE(gguf.get_bool("no", true));
  EXPECT_EQ(gguf.get_string("string"), std::string("\0\xff any bytes", 12));
  EXPECT_EQ(gguf.get_string("empty"), "");
  EXPECT_EQ(gguf.get_int("u64"), int64_t{1} << 62);
  EXPECT_EQ(*gguf.find_value("big"), GgufValue(uint64_t{1} << 63));
  EXPECT_EQ(gguf.get_int("i64"), std::numeric_limits<int64_t>::min());
  EXPECT_EQ(gguf.get_double("f64"), 0.1);
  EXPECT_EQ(gguf.get_string("odd \n key"), "x");
  EXPECT_TRUE(gguf.tensors().empty());
}

TEST(Gguf, TypedAccess) {
  const std::string text =
      Bytes().header(0, 3).u32_entry("n", 7).string_entry("s", "x").entry("big", 10).u64(~uint64_t{0}).text();
  const GgufFile gguf = read(text);
  EXPECT_EQ(gguf.get_double("n"), 7.0);  // a whole number is a number
  EXPECT_EQ(gguf.get_int("n", 1), 7);
  EXPECT_EQ(gguf.get_int("absent", 1), 1);
  EXPECT_EQ(gguf.get_double("absent", 0.5), 0.5);
  EXPECT_TRUE(gguf.get_bool("absent", true));
  EXPECT_EQ(gguf.find_value("absent"), nullptr);
  const auto rejected = [](std::string_view message, auto&& access) {
    expect_error(ErrorCode::kModelFormat, message, access);
  };
  rejected("metadata key \"absent\" is missing", [&] { gguf.get_int("absent"); });
  rejected("metadata key \"absent\" is missing", [&] { gguf.get_double("absent"); });
  rejected("metadata key \"\\x1b\" is missing", [&] { gguf.get_string("\x1b"); });
  rejected("metadata key \"n\" is not a string", [&] { gguf.get_string("n"); });
  rejected("metadata key \"s\" is not an integer", [&] { gguf.get_int("s", 1); });
  rejected("metadata key \"big\" is not an integer (of 64 bits with sign)", [&] { gguf.get_int("big"); });
  rejected("metadata key \"s\" is not a number", [&] { gguf.get_double("s", 1.0); });
  rejected("metadata key \"n\" is not a boolean", [&] { gguf.get_bool("n", true); });
}

TEST(Gguf, ReadsArraysOfEveryType) {
  Bytes file;
  file.header(0, 9);
  file.array_entry("u8", 0, 2).put(uint8_t{1}).put(uint8_t{255});
  file.array_entry("i16", 3, 2).put(int16_t{-1}).put(int16_t{2});
  file.array_entry("i32", 5, 1).put(int32_t{-3});
  file.array_entry("f32", 6, 2).put(0.5f).put(-1.0f);
  file.array_entry("f64", 12, 1).put(0.1);
  file.array_entry("bool", 7, 3).put(uint8_t{1}).put(uint8_t{0}).put(uint8_t{1});
  file.array_entry("u64", 10, 1).u64(5);
  file.array_entry("big", 10, 2).u64(5).u64(~uint64_t{0});
  file.array_entry("empty", 8, 0);
  const GgufFile gguf = read(file.text());
  EXPECT_EQ(*gguf.find_value("u8"), GgufValue(std::vector<int64_t>{1, 255}));
  EXPECT_EQ(*gguf.find_value("i16"), GgufValue(std::vector<int64_t>{-1, 2}));
  EXPECT_EQ(*gguf.find_value("i32"), GgufValue(std::vector<int64_t>{-3}));
  EXPECT_EQ(*gguf.find_value("f32"), GgufValue(std::vector<double>{0.5, -1.0}));
  EXPECT_EQ(*gguf.find_value("f64"), GgufValue(std::vector<double>{0.1}));
  EXPECT_EQ(*gguf.find_value("bool"), GgufValue(std::vector<bool>{true, false, true}));
  EXPECT_EQ(*gguf.find_value("u64"), GgufValue(std::vector<int64_t>{5}));
  EXPECT_EQ(*gguf.find_value("big"), GgufValue(std::vector<uint64_t>{5, ~uint64_t{0}}));
  EXPECT_EQ(*gguf.find_value("empty"), GgufValue(std::vector<std::string>{}));
}

TEST(Gguf, ReadsTensors) {
  const std::string text = small_file();
  for (const uint32_t version : {2u, 3u}) {
    std::string file = text;
    std::memcpy(file.data() + 4, &version, 4);
    const GgufFile gguf = read(file);
    ASSERT_EQ(gguf.tensors().size(), 3u);
    const WeightTensor& one = *gguf.find("one");
    EXPECT_EQ(one.name, "one");
    EXPECT_EQ(one.format, Format::kF32);
    EXPECT_EQ(one.shape, (std::vector<int64_t>{3, 2}));  // outermost first
    EXPECT_EQ(one.num_values(), 6);
    EXPECT_EQ(one.num_bytes, 24u);
    float last = 0.0f;
    std::memcpy(&last, one.data + 20, 4);
    EXPECT_EQ(last, 5.0f);
    EXPECT_EQ(reinterpret_cast<const char*>(one.data), file.data() + one.offset);
    const WeightTensor& two = *gguf.find("two");
    EXPECT_EQ(two.format, Format::kQ4_0);
    EXPECT_EQ(two.num_bytes, 18u);
    EXPECT_EQ(two.offset, one.offset + 32);
    const WeightTensor& three = *gguf.find("three");
    EXPECT_EQ(three.num_values(), 1);
    EXPECT_EQ(three.num_bytes, 2u);
    EXPECT_EQ(gguf.total_bytes(), 44u);
    gguf.drop(one);  // bytes in memory: nothing happens
  }
}

TEST(Gguf, EveryTruncationIsRejected) {
  const std::string text = small_file();
  for (size_t size = 0; size < text.size(); ++size) {
    SCOPED_TRACE(size);
    // A copy of its own, so that the address sanitizer sees a read past the end.
    const std::string cut = text.substr(0, size);
    expect_error(ErrorCode::kModelFormat, "\"test.gguf\": ", [&] { read(cut); });
  }
}

TEST(Gguf, NoChangedByteDoesHarm) {
  const std::string text = small_file();
  size_t num_rejected = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    for (const int change : {0x01, 0x80, 0xff, 0x10, 0x00}) {
      std::string changed = text;
      changed[i] = change == 0 ? '\0' : static_cast<char>(changed[i] ^ change);
      try {
        const GgufFile gguf = read(changed);
        for (const auto& [name, tensor] : gguf.tensors()) {
          const auto end = tensor.offset + tensor.num_bytes;
          ASSERT_LE(end, changed.size()) << i;
          ASSERT_GE(tensor.num_values(), 0) << i;
        }
      } catch (const Error& error) {
        ASSERT_NE(error.code(), ErrorCode::kInternal) << i << ": " << error.what();
        ++num_rejected;
      }
    }
  }
  EXPECT_GT(num_rejected, text.size());
}

TEST(Gguf, Header) {
  expect_rejected("", "\"test.gguf\": the file is empty");
  expect_rejected("GG", "the file ends inside the header");
  expect_rejected("GGML0000", "this is neither a GGUF file nor a model folder (it starts with \"GGML\")");
  expect_rejected(std::string_view("\x7f"
                                   "ELF0000"),
                  "(it starts with \"\\x7fELF\")");
  expect_rejected(Bytes().header(0, 0, 1).text(), "GGUF version 1 is not supported, only 2 and 3 are");
  expect_rejected(Bytes().header(0, 0, 4).text(), "GGUF version 4 is not supported");
  expect_rejected(Bytes().header(0, 0, 0x03000000).text(),
                  "GGUF version 50331648 is not supported, only 2 and 3 are (the file is big-endian)");
  EXPECT_TRUE(read(Bytes().header(0, 0).text()).metadata().empty());
}

TEST(Gguf, HugeClaimsAreRefusedWithoutReserving) {
  struct Case {
    std::string bytes;
    std::string message;
  };
  const Bytes tensor = Bytes().tensor("x", {4}, 0, 0);
  const std::vector<Case> cases = {
      {Bytes().header(uint64_t{1} << 60, 0).zeros(4096).text(), "claims 1152921504606846976 tensors"},
      {Bytes().header(~uint64_t{0}, 0).text(), "claims 18446744073709551615 tensors"},
      {Bytes().header(0, uint64_t{1} << 60).zeros(4096).text(), "claims 1152921504606846976 metadata entries"},
      {Bytes().header(0, 1).u64(uint64_t{1} << 63).text() + std::string(100, 'x'), "ends inside a metadata key"},
      {with_entry(Bytes().entry("s", 8).u64(uint64_t{1} << 63).zeros(64)), "ends inside the value of \"s\""},
      {with_entry(Bytes().entry("s", 8).u64(~uint64_t{0}).zeros(64)), "ends inside the value of \"s\""},
      {with_entry(Bytes().array_entry("a", 0, uint64_t{1} << 40).zeros(64)),
       "the array \"a\" claims 1099511627776 values, but the file has only 64 more bytes"},
      {with_entry(Bytes().array_entry("a", 8, uint64_t{1} << 61).zeros(64)), "claims 2305843009213693952 values"},
      {with_entry(Bytes().array_entry("a", 8, 9).zeros(64)), "claims 9 values, but the file has only 64 more bytes"},
      {with_entry(Bytes().array_entry("a", 8, 2).string("x").u64(uint64_t{1} << 62)), "ends inside the array \"a\""},
      {Bytes().header(1, 0).u64(uint64_t{1} << 62).zeros(64).text(), "ends inside a tensor name"},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.message);
    testkit::LargestAllocation largest;
    const auto start = std::chrono::steady_clock::now();
    expect_rejected(c.bytes, c.message);
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::milliseconds(50));
    EXPECT_LT(largest.bytes(), 100'000u);
  }
}

// A sparse file has room for any claim: the absolute limits hold.
TEST(Gguf, LimitsHoldInSparseFiles) {
  const std::string folder = testing::TempDir();
  const auto rejected = [&](const Bytes& start, std::string_view message) {
    SCOPED_TRACE(message);
    const std::filesystem::path path = folder + "shoal_sparse.gguf";
    std::ofstream(path, std::ios::binary) << start.text();
    std::error_code error;
    std::filesystem::resize_file(path, uint64_t{1} << 36, error);
    if (error) {
      GTEST_SKIP() << "no sparse files here: " << error.message();
    }
    testkit::LargestAllocation largest;
    expect_error(ErrorCode::kModelFormat, message, [&] { GgufFile{path}; });
    EXPECT_LT(largest.bytes(), 100'000u);
    std::filesystem::remove(path);
  };
  rejected(Bytes().header((uint64_t{1} << 20) + 1, 0), "claims 1048577 tensors, more than the file can hold");
  rejected(Bytes().header(0, 65537), "claims 65537 metadata entries, more than the file can hold");
  rejected(Bytes().header(0, 1).array_entry("a", 0, (uint64_t{1} << 24) + 1), "the arrays have more than 16777216");
  rejected(Bytes().header(0, 1).entry("s", 8).u64((uint64_t{1} << 28) + 1), "at most 268435456 are allowed");
}

TEST(Gguf, Metadata) {
  expect_rejected(with_entry(Bytes().entry("a", 13).u64(0)), "\"a\" has the unknown value type 13");
  expect_rejected(with_entry(Bytes().entry("a\x1b", 99).u64(0)), "\"a\\x1b\" has the unknown value type 99");
  expect_rejected(with_entry(Bytes().array_entry("a", 13, 0).u64(0)), "array of the unknown value type 13");
  expect_rejected(with_entry(Bytes().array_entry("a", 9, 0).u64(0)), "\"a\" is an array of arrays");
  expect_rejected(with_entry(Bytes().entry("a", 7).put(uint8_t{2})), "\"a\" is a boolean with the value 2");
  expect_rejected(with_entry(Bytes().array_entry("a", 7, 1).put(uint8_t{9})), "boolean with the value 9");
  expect_rejected(with_entry(Bytes().u32_entry("", 1)), "metadata entry 0 has an empty key");
  expect_rejected(with_entry(Bytes().u32_entry(std::string(65536, 'k'), 1)), "a metadata key has 65536 bytes");
  expect_rejected(Bytes().header(0, 2).u32_entry("twice", 1).u32_entry("twice", 1).text(),
                  "metadata key \"twice\" is there twice");
}

TEST(Gguf, Alignment) {
  const auto file = [](const Bytes& entry) {
    return Bytes().header(1, 1).raw(entry.text()).tensor("x", {4}, 0, 0).align(1 << 20).zeros(16).text();
  };
  for (const uint32_t good : {1u, 8u, 32u, 4096u, 1u << 20}) {
    SCOPED_TRACE(good);
    EXPECT_EQ(read(file(Bytes().u32_entry("general.alignment", good))).find("x")->offset % good, 0u);
  }
  for (const uint32_t bad : {0u, 3u, 48u, 1u << 21, ~0u}) {
    expect_rejected(file(Bytes().u32_entry("general.alignment", bad)),
                    concat("\"general.alignment\" must be a power of two up to 1048576, not ", bad));
  }
  expect_rejected(file(Bytes().string_entry("general.alignment", "32")), "must be a power of two up to 1048576");
  expect_rejected(file(Bytes().entry("general.alignment", 5).put(int32_t{-32})), "not -32");
}

TEST(Gguf, TensorDescriptions) {
  const auto rejected = [](const Bytes& tensor, std::string_view message) {
    expect_rejected(with_tensor(tensor), message);
  };
  constexpr uint64_t kBig = uint64_t{1} << 40;
  rejected(Bytes().tensor("", {4}, 0, 0), "a tensor has an empty name");
  EXPECT_NE(read(with_tensor(Bytes().tensor(std::string(255, 'n'), {4}, 0, 0))).find(std::string(255, 'n')), nullptr);
  rejected(Bytes().tensor(std::string(256, 'n'), {4}, 0, 0), "a tensor name has 256 bytes, at most 255 are allowed");
  EXPECT_EQ(read(with_tensor(Bytes().tensor("x", {1, 2, 3, 4}, 0, 0))).find("x")->shape,
            (std::vector<int64_t>{4, 3, 2, 1}));
  rejected(Bytes().tensor("x", {1, 1, 1, 1, 1}, 0, 0), "tensor \"x\" has 5 dimensions, at most 4 are allowed");
  rejected(Bytes().string("x").u32(~0u).zeros(64), "has 4294967295 dimensions");
  rejected(Bytes().tensor("x", {uint64_t{1} << 63}, 0, 0), "has a dimension of 9223372036854775808");
  rejected(Bytes().tensor("x", {kBig, kBig}, 0, 0), "of shape [1099511627776, 1099511627776] does not fit");
  rejected(Bytes().tensor("x", {uint64_t{1} << 62}, 0, 0), "does not fit the address space");  // values fit, bytes not
  rejected(Bytes().tensor("x", {kBig, kBig, 0}, 0, 0), "does not fit the address space");      // strides would overflow
  EXPECT_EQ(read(with_tensor(Bytes().tensor("x", {4, 0}, 0, 0))).find("x")->num_bytes, 0u);
  rejected(Bytes().tensor("x\n", {33}, 2, 0), "tensor \"x\\n\" has rows of 33 values, not whole blocks of 32 (q4_0)");
  rejected(Bytes().tensor("x", {16, 2}, 2, 0), "has rows of 16 values, not whole blocks");
  rejected(Bytes().tensor("x", {}, 2, 0), "has rows of 1 values, not whole blocks");
}

TEST(Gguf, UnsupportedTensorTypes) {
  const auto rejected = [](uint32_t type, std::string_view message) {
    expect_rejected(with_tensor(Bytes().tensor("x", {256}, type, 0)), message, ErrorCode::kUnsupported);
  };
  rejected(31, "tensor \"x\" has type 31, which is not supported");
  rejected(4, "tensor \"x\" has type 4, which is not supported");
  rejected(19, "tensor \"x\" has type 19 (iq1_s), which is not supported");
  rejected(26, "tensor \"x\" has type 26 (i32), which is not supported");
  rejected(~0u, "tensor \"x\" has type 4294967295, which is not supported");
}

TEST(Gguf, TensorPlaces) {
  const auto rejected = [](const Bytes& tensor, std::string_view message) {
    expect_rejected(with_tensor(tensor), message);
  };
  EXPECT_NO_THROW(read(with_tensor(Bytes().tensor("x", {8}, 0, 224))));
  rejected(Bytes().tensor("x", {9}, 0, 224), "tensor \"x\" (36 bytes at offset 224) lies outside the file");
  rejected(Bytes().tensor("x", {8}, 0, 256), "lies outside the file");
  rejected(Bytes().tensor("x", {8}, 0, 16), "tensor \"x\" has offset 16, not a multiple of the alignment 32");
  rejected(Bytes().tensor("x", {8}, 0, ~uint64_t{31}), "lies outside the file");
  rejected(Bytes().tensor("x", {uint64_t{1} << 60}, 0, uint64_t{1} << 63), "lies outside the file");

  const auto two = [](std::string_view second, uint64_t first_at, uint64_t second_at) {
    return Bytes()
        .header(2, 0)
        .tensor("x", {16}, 0, first_at)
        .tensor(second, {8}, 0, second_at)
        .align()
        .zeros(96)
        .text();
  };
  EXPECT_NO_THROW(read(two("y", 0, 64)));
  EXPECT_NO_THROW(read(two("y", 32, 0)));  // in any order
  expect_rejected(two("y", 0, 32), "tensors \"x\" and \"y\" overlap");
  expect_rejected(two("y", 0, 0), "overlap");
  expect_rejected(two("x", 0, 64), "tensor \"x\" is there twice");
}

TEST(Gguf, ReadsManyStringsFast) {
  Bytes file;
  file.header(0, 1).array_entry("tokenizer.ggml.tokens", 8, 262'144);
  for (int i = 0; i < 262'144; ++i) {
    file.string("token" + std::to_string(i));
  }
  double best = 1e9;
  for (int run = 0; run < 5; ++run) {
    const auto start = std::chrono::steady_clock::now();
    const GgufFile gguf(file.span(), "test.gguf");
    best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    ASSERT_EQ(std::get<std::vector<std::string>>(*gguf.find_value("tokenizer.ggml.tokens")).size(), 262'144u);
  }
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  EXPECT_LT(best, 2.0);
#else
  EXPECT_LT(best, 0.1);
#endif
}

class GgufFolder : public testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = testing::TempDir() + "shoal_gguf_XXXXXX";
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  std::filesystem::path write(const std::string& name, std::string_view content) const {
    std::ofstream(folder_ / name, std::ios::binary) << content;
    return folder_ / name;
  }

  // One part of three with a tensor of its own; `entries` are added to the three split.* ones.
  static std::string part(uint16_t idx, std::string_view tensor, uint16_t count = 3, int32_t total = 3,
                          const Bytes& entries = {}, uint64_t num_entries = 0) {
    Bytes file;
    file.header(1, 3 + num_entries).u16_entry("split.no", idx).u16_entry("split.count", count);
    file.entry("split.tensors.count", 5).put(total).raw(entries.text());
    file.tensor(tensor, {1}, 0, 0).align().put(static_cast<float>(idx));
    return file.text();
  }

  void write_parts() const {
    write("m-00001-of-00003.gguf", part(0, "a", 3, 3, Bytes().string_entry("general.architecture", "llama"), 1));
    write("m-00002-of-00003.gguf", part(1, "b"));
    write("m-00003-of-00003.gguf", part(2, "c"));
  }

  void expect_rejected(const std::string& name, std::string_view message) const {
    SCOPED_TRACE(message);
    expect_error(ErrorCode::kModelFormat, message, [&] { GgufFile(folder_ / name); });
  }

  std::filesystem::path folder_;
};

TEST_F(GgufFolder, ReadsAFileAndDropsItsPages) {
  Bytes file;
  file.header(1, 0).tensor("x", {4, 4096}, 0, 0).align();
  for (int i = 0; i < 4 * 4096; ++i) {
    file.put(static_cast<float>(i));
  }
  GgufFile first(write("m.gguf", file.text()));
  const GgufFile gguf = std::move(first);  // the map moves along
  const WeightTensor& x = gguf.get("x", std::vector<int64_t>{4096, 4});
  const auto last = [&] {
    float value = 0.0f;
    std::memcpy(&value, x.data + x.num_bytes - 4, 4);
    return value;
  };
  EXPECT_EQ(last(), 4 * 4096 - 1);
  gguf.drop(x);
  EXPECT_EQ(last(), 4 * 4096 - 1);
}

TEST_F(GgufFolder, MissingAndEmptyFiles) {
  expect_error(ErrorCode::kInvalidArgument, "cannot open \"", [&] { GgufFile(folder_ / "absent.gguf"); });
  expect_error(ErrorCode::kInvalidArgument, "is not a regular file", [&] { GgufFile{folder_}; });
  write("empty.gguf", "");
  expect_rejected("empty.gguf", "\"empty.gguf\": the file is empty");
}

TEST_F(GgufFolder, ReadsSplitFilesFromAnyPart) {
  write_parts();
  for (const char* name : {"m-00001-of-00003.gguf", "m-00002-of-00003.gguf", "m-00003-of-00003.gguf"}) {
    const GgufFile gguf(folder_ / name);
    ASSERT_EQ(gguf.tensors().size(), 3u);
    EXPECT_EQ(gguf.get_string("general.architecture"), "llama");
    EXPECT_EQ(gguf.find("a")->file_idx, 0u);
    const WeightTensor& c = *gguf.find("c");
    EXPECT_EQ(c.file_idx, 2u);
    float value = 0.0f;
    std::memcpy(&value, c.data, 4);
    EXPECT_EQ(value, 2.0f);
    gguf.drop(c);
  }
}

TEST_F(GgufFolder, ASingleFileMayCallItselfSplit) {
  write("m-00001-of-00001.gguf", part(0, "a", 1, 1));
  EXPECT_EQ(GgufFile(folder_ / "m-00001-of-00001.gguf").tensors().size(), 1u);
  write("n-00001-of-00001.gguf", Bytes().header(0, 0).text());
  EXPECT_EQ(GgufFile(folder_ / "n-00001-of-00001.gguf").tensors().size(), 0u);
  write("zero.gguf", part(0, "a", 0, 1));
  EXPECT_EQ(GgufFile(folder_ / "zero.gguf").tensors().size(), 1u);
  // Not the pattern: ordinary names.
  for (const char* name : {"m-00002-of-00001.gguf", "m-00000-of-00001.gguf", "m-0001-of-0003.gguf",
                           "m-0000x-of-00003.gguf", "00001-of-00003.gguf"}) {
    write(name, Bytes().header(0, 0).text());
    EXPECT_NO_THROW(GgufFile(folder_ / name)) << name;
  }
}

TEST_F(GgufFolder, EveryPartMustExist) {
  write_parts();
  std::filesystem::remove(folder_ / "m-00002-of-00003.gguf");
  expect_rejected("m-00003-of-00003.gguf",
                  "\"m-00003-of-00003.gguf\" is part 3 of 3, but \"m-00002-of-00003.gguf\" is missing");
  expect_error(ErrorCode::kInvalidArgument, "cannot open", [&] { GgufFile(folder_ / "m-00002-of-00003.gguf"); });
}

TEST_F(GgufFolder, PartsMustAgree) {
  const auto rejected_with = [&](const std::string& second, std::string_view message) {
    write_parts();
    write("m-00002-of-00003.gguf", second);
    expect_rejected("m-00001-of-00003.gguf", message);
  };
  rejected_with(part(2, "b"),
                "\"m-00002-of-00003.gguf\": the metadata says that this is part 3 of 3, the name says "
                "part 2 of 3");
  rejected_with(part(1, "b", 4), "says that this is part 2 of 4, the name says part 2 of 3");
  rejected_with(Bytes().header(0, 0).text(), "says that this is part 1 of 1, the name says part 2 of 3");
  rejected_with(Bytes().header(0, 1).string_entry("split.count", "3").text(), "\"split.count\" must be an integer");
  rejected_with(part(1, "b", 3, 4), "metadata key \"split.tensors.count\" has another value than in the parts before");
  rejected_with(part(1, "b", 3, 3, Bytes().string_entry("general.architecture", "gpt2"), 1),
                "metadata key \"general.architecture\" has another value");
  rejected_with(part(1, "a"), "\"m-00002-of-00003.gguf\": tensor \"a\" is there twice");
  rejected_with(part(1, "b").substr(0, 100), "\"m-00002-of-00003.gguf\": the file ends inside");
  write_parts();
  write("m-00002-of-00003.gguf", part(1, "b", 3, 3, Bytes().u32_entry("general.alignment", 8), 1));
  EXPECT_NO_THROW(GgufFile(folder_ / "m-00001-of-00003.gguf"));  // every file has its own alignment
}

TEST_F(GgufFolder, AllPartsTogetherHaveTheStatedTensors) {
  for (uint16_t idx = 0; idx < 3; ++idx) {
    write(concat("m-0000", idx + 1, "-of-00003.gguf"), part(idx, std::string(1, static_cast<char>('a' + idx)), 3, 4));
  }
  expect_rejected("m-00001-of-00003.gguf", "the parts have 3 tensors, not as many as \"split.tensors.count\" says");
}

TEST_F(GgufFolder, ASplitPartUnderAnotherNameIsRefused) {
  write("renamed.gguf", part(0, "a"));
  expect_rejected("renamed.gguf", "the metadata says that this is part 1 of 3, the name says part 1 of 1");
  const std::string bytes = part(1, "a");
  expect_error(ErrorCode::kModelFormat, "part 2 of 3", [&] { read(bytes); });
}

}  // namespace
}  // namespace shoal::io
