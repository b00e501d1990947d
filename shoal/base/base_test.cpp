#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <string>

#include "shoal/base/checked.h"
#include "shoal/base/error.h"
#include "shoal/base/file.h"
#include "shoal/base/result.h"
#include "shoal/base/text.h"
#include "testkit/expect_error.h"

namespace shoal {
namespace {

using testkit::expect_error;

TEST(Error, CarriesCodeAndMessage) {
  expect_error(ErrorCode::kUnsupported, "value 3 of x",
               [] { fail(ErrorCode::kUnsupported, "value ", 3, " of ", "x"); });
  expect_error(ErrorCode::kInvalidArgument, "n is 0", [] { require(false, "n is ", 0); });
  EXPECT_NO_THROW(require(true, "never"));
  EXPECT_EQ(to_string(ErrorCode::kModelFormat), "model_format");
}

TEST(Error, AssertionNamesConditionAndPlace) {
  expect_error(ErrorCode::kInternal, "1 + 1 == 3 does not hold (", [] { SHOAL_ASSERT(1 + 1 == 3); });
  expect_error(ErrorCode::kInternal, "base_test.cpp:", [] { SHOAL_ASSERT(false); });
  EXPECT_NO_THROW(SHOAL_ASSERT(true));
}

TEST(Checked, ReportsOverflow) {
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
  EXPECT_EQ(checked_add<int64_t>(kMax - 1, 1), kMax);
  EXPECT_EQ(checked_add<int64_t>(kMax, 1), std::nullopt);
  EXPECT_EQ(checked_add<int64_t>(-kMax, -2), std::nullopt);
  EXPECT_EQ(checked_mul<int64_t>(kMax / 2, 2), kMax - 1);
  EXPECT_EQ(checked_mul<int64_t>(kMax / 2 + 1, 2), std::nullopt);
  EXPECT_EQ(checked_mul<uint64_t>(uint64_t{1} << 63, 2), std::nullopt);
  EXPECT_EQ(checked_mul<uint64_t>(uint64_t{1} << 63, 0), 0u);
  EXPECT_EQ(checked_add<uint8_t>(200, 56), std::nullopt);
  EXPECT_EQ(checked_add<uint8_t>(200, 55), 255);
}

TEST(Checked, Rounding) {
  EXPECT_EQ(ceil_div(0, 4), 0);
  EXPECT_EQ(ceil_div(1, 4), 1);
  EXPECT_EQ(ceil_div(8, 4), 2);
  EXPECT_EQ(ceil_div<int64_t>(std::numeric_limits<int64_t>::max(), 2), int64_t{1} << 62);
  EXPECT_EQ(round_up(33, 32), 64);
  EXPECT_EQ(round_up(32, 32), 32);
  EXPECT_TRUE(is_power_of_two(1));
  EXPECT_TRUE(is_power_of_two(uint64_t{1} << 63));
  EXPECT_FALSE(is_power_of_two(0));
  EXPECT_FALSE(is_power_of_two(-8));
  EXPECT_FALSE(is_power_of_two(12));
}

TEST(Result, HoldsValueOrReason) {
  enum class Reason { kFull };
  Result<std::string, Reason> good(std::string("text"));
  ASSERT_TRUE(good.ok());
  EXPECT_EQ(good.value(), "text");
  expect_error(ErrorCode::kInternal, "!ok()", [&] { static_cast<void>(good.reason()); });
  const Result<std::string, Reason> bad(Reason::kFull);
  ASSERT_FALSE(bad);
  EXPECT_EQ(bad.reason(), Reason::kFull);
  expect_error(ErrorCode::kInternal, "ok()", [&] { static_cast<void>(bad.value()); });
}

TEST(Text, PrintableEscapesWhatTerminalsActOn) {
  EXPECT_EQ(printable("model.layers.0"), "model.layers.0");
  EXPECT_EQ(printable("a\nb\tc\rd"), "a\\nb\\tc\\rd");
  EXPECT_EQ(printable("\x1b[31m"), "\\x1b[31m");
  EXPECT_EQ(printable(std::string_view("a\0b", 3)), "a\\x00b");
  EXPECT_EQ(printable("\x7f"), "\\x7f");
  EXPECT_EQ(printable("say \"hi\\\""), "say \\\"hi\\\\\\\"");
  EXPECT_EQ(printable("\u00e9\u20ac\U0001f600"), "\u00e9\u20ac\U0001f600");
  EXPECT_EQ(printable("\xc2\x9b"), "\\xc2\\x9b");  // U+009B, one character CSI
  EXPECT_EQ(printable("\xc2\xa0"), "\xc2\xa0");
  EXPECT_EQ(printable("\xff\xc3"), "\\xff\\xc3");
  EXPECT_EQ(printable("\xed\xa0\x80"), "\\xed\\xa0\\x80");  // a surrogate is not UTF-8
}

TEST(Text, PrintableCutsAt80Characters) {
  EXPECT_EQ(printable(std::string(80, 'a')), std::string(80, 'a'));
  EXPECT_EQ(printable(std::string(81, 'a')), std::string(80, 'a') + "...");
  std::string wide;
  std::string cut;
  for (int i = 0; i < 100; ++i) {
    wide += "\u20ac";
    cut += i < 80 ? "\u20ac" : "";
  }
  EXPECT_EQ(printable(wide), cut + "...");
}

TEST(Text, Utf8LengthAcceptsExactlyRfc3629) {
  // Every sequence of three bytes against the ranges of the RFC's grammar, written the other way round: by decoding.
  const auto expected = [](std::string_view s) -> size_t {
    const auto b = [&](size_t i) { return static_cast<uint32_t>(static_cast<unsigned char>(s[i])); };
    const auto tail = [&](size_t i) { return i < s.size() && (b(i) >> 6) == 2; };
    if (b(0) < 0x80) {
      return 1;
    }
    if ((b(0) >> 5) == 6 && tail(1)) {
      return ((b(0) & 31) << 6 | (b(1) & 63)) >= 0x80 ? 2 : 0;
    }
    if ((b(0) >> 4) == 14 && tail(1) && tail(2)) {
      const uint32_t code = (b(0) & 15) << 12 | (b(1) & 63) << 6 | (b(2) & 63);
      return code >= 0x800 && (code < 0xd800 || code > 0xdfff) ? 3 : 0;
    }
    if ((b(0) >> 3) == 30 && tail(1) && tail(2) && tail(3)) {
      const uint32_t code = (b(0) & 7) << 18 | (b(1) & 63) << 12 | (b(2) & 63) << 6 | (b(3) & 63);
      return code >= 0x10000 && code <= 0x10ffff ? 4 : 0;
    }
    return 0;
  };
  const unsigned char interesting[] = {0x00, 0x41, 0x7f, 0x80, 0x8f, 0x90, 0x9f, 0xa0, 0xbf, 0xc0, 0xff};
  size_t num_bad = 0;
  for (int lead = 0; lead < 256; ++lead) {
    for (int second = 0; second < 256; ++second) {
      for (const unsigned char third : interesting) {
        for (const unsigned char fourth : interesting) {
          const char bytes[] = {static_cast<char>(lead), static_cast<char>(second), static_cast<char>(third),
                                static_cast<char>(fourth)};
          for (size_t size = 1; size <= 4; ++size) {
            const std::string_view s(bytes, size);
            num_bad += utf8_length(s, 0) != expected(s) ? 1 : 0;
          }
        }
      }
    }
  }
  EXPECT_EQ(num_bad, 0u);
}

TEST(Text, Shapes) {
  EXPECT_EQ(shape_text({}), "[]");
  const int64_t shape[] = {2, 3, -1};
  EXPECT_EQ(shape_text(shape), "[2, 3, -1]");
}

TEST(Text, Bytes) {
  EXPECT_EQ(bytes_text(0), "0 B");
  EXPECT_EQ(bytes_text(999), "999 B");
  EXPECT_EQ(bytes_text(1000), "1.0 kB");
  EXPECT_EQ(bytes_text(98'400'000), "98.4 MB");
  EXPECT_EQ(bytes_text(5'000'000'000'000'000), "5000.0 TB");
}

class FileTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = testing::TempDir() + "shoal_base_XXXXXX";
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  std::filesystem::path write(const std::string& name, std::string_view content) const {
    std::ofstream(folder_ / name, std::ios::binary) << content;
    return folder_ / name;
  }

  std::filesystem::path folder_;
};

std::string content_of(const MappedFile& file) {
  return {reinterpret_cast<const char*>(file.bytes().data()), file.bytes().size()};
}

TEST_F(FileTest, MapsAFile) {
  const std::string content = "bytes\0and more" + std::string(10'000, 'x');
  MappedFile file(write("a", content));
  EXPECT_EQ(content_of(file), content);
  EXPECT_EQ(file.path(), folder_ / "a");
  const std::byte* start = file.bytes().data();
  MappedFile moved = std::move(file);
  EXPECT_EQ(moved.bytes().data(), start);
  MappedFile other(write("b", "other"));
  other = std::move(moved);
  EXPECT_EQ(content_of(other), content);
  EXPECT_EQ(other.path(), folder_ / "a");
}

TEST_F(FileTest, MapsAnEmptyFile) {
  const MappedFile file(write("empty", ""));
  EXPECT_TRUE(file.bytes().empty());
  file.drop(0, 0);
}

TEST_F(FileTest, DroppedPagesAreReadAgain) {
  std::string content(5 * 4096 + 17, '\0');
  for (size_t i = 0; i < content.size(); ++i) {
    content[i] = static_cast<char>(i * 7);
  }
  const MappedFile file(write("a", content));
  EXPECT_EQ(content_of(file), content);
  file.drop(0, content.size());
  file.drop(100, 4096);
  file.drop(content.size(), 0);
  EXPECT_EQ(content_of(file), content);
  expect_error(ErrorCode::kInternal, "does not hold", [&] { file.drop(1, content.size()); });
}

TEST_F(FileTest, RejectsWhatIsNoFile) {
  expect_error(ErrorCode::kInvalidArgument, "cannot open \"", [&] { MappedFile(folder_ / "absent"); });
  expect_error(ErrorCode::kInvalidArgument, "No such file", [&] { MappedFile(folder_ / "absent"); });
  expect_error(ErrorCode::kInvalidArgument, "is not a regular file", [&] { MappedFile{folder_}; });
  write("a", "x");
  expect_error(ErrorCode::kInvalidArgument, "Not a directory", [&] { MappedFile(folder_ / "a" / "b"); });
  expect_error(ErrorCode::kInvalidArgument, "\\x1b", [] { MappedFile("/tmp/\x1b"); });
}

TEST_F(FileTest, ReadsText) {
  EXPECT_EQ(read_text_file(write("a", "text"), 4), "text");
  EXPECT_EQ(read_text_file(write("empty", ""), 0), "");
  expect_error(ErrorCode::kModelFormat, "has 5 bytes, at most 4 are allowed",
               [&] { read_text_file(write("b", "texts"), 4); });
  expect_error(ErrorCode::kInvalidArgument, "cannot open", [&] { read_text_file(folder_ / "absent", 4); });
}

}  // namespace
}  // namespace shoal
