#include "shoal/base/json.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <limits>
#include <string>

#include "testkit/expect_error.h"

namespace shoal {
namespace {

using testkit::expect_error;

Json parse(std::string_view text) { return Json::parse(text, "test.json"); }

void expect_rejected(std::string_view text, std::string_view message) {
  SCOPED_TRACE(text.substr(0, 100));
  expect_error(ErrorCode::kModelFormat, message, [&] { parse(text); });
}

TEST(Json, ReadsEveryKind) {
  const Json json = parse(R"( { "null": null, "yes": true, "no": false, "int": -12, "double": 2.5,
                               "string": "text", "array": [1, [], {}], "object": {"a": 1} } )");
  ASSERT_TRUE(json.is_object());
  EXPECT_TRUE(json.find("null")->is_null());
  EXPECT_TRUE(json.find("yes")->as_bool("yes"));
  EXPECT_FALSE(json.find("no")->as_bool("no"));
  EXPECT_EQ(json.find("int")->kind(), Json::Kind::kInt);
  EXPECT_EQ(json.find("int")->as_int("int"), -12);
  EXPECT_EQ(json.find("int")->as_double("int"), -12.0);
  EXPECT_EQ(json.find("double")->kind(), Json::Kind::kDouble);
  EXPECT_EQ(json.find("double")->as_double("double"), 2.5);
  EXPECT_EQ(json.find("string")->as_string("string"), "text");
  const Json::Array& array = json.find("array")->as_array("array");
  ASSERT_EQ(array.size(), 3u);
  EXPECT_TRUE(array[1].as_array("").empty());
  EXPECT_TRUE(array[2].as_object("").empty());
  EXPECT_EQ(json.find("object")->find("a")->as_int("a"), 1);
  EXPECT_EQ(json.find("absent"), nullptr);
  EXPECT_EQ(array[0].find("a"), nullptr);
}

TEST(Json, KeepsTheOrderOfMembers) {
  const Json json = parse(R"({"b": 1, "a": 2, "": 3})");
  const Json::Object& object = json.as_object("");
  ASSERT_EQ(object.size(), 3u);
  EXPECT_EQ(object[0].first, "b");
  EXPECT_EQ(object[1].first, "a");
  EXPECT_EQ(object[2].first, "");
}

TEST(Json, CopiesAreDeep) {
  Json original = parse(R"([{"a": "text"}, 1, 2.5, true, null])");
  const Json copy = original;
  original = parse("3");
  EXPECT_EQ(original.as_int(""), 3);
  const Json::Array& array = copy.as_array("");
  ASSERT_EQ(array.size(), 5u);
  EXPECT_EQ(array[0].find("a")->as_string(""), "text");
  EXPECT_EQ(array[1].as_int(""), 1);
  EXPECT_EQ(array[2].as_double(""), 2.5);
  EXPECT_TRUE(array[3].as_bool(""));
  EXPECT_TRUE(array[4].is_null());
  Json itself = copy;
  const Json& alias = itself;
  itself = alias;
  EXPECT_EQ(itself.as_array("").size(), 5u);
}

TEST(Json, Numbers) {
  EXPECT_EQ(parse("0").as_int(""), 0);
  EXPECT_EQ(parse("-0").as_int(""), 0);
  EXPECT_EQ(parse("9223372036854775807").as_int(""), std::numeric_limits<int64_t>::max());
  EXPECT_EQ(parse("-9223372036854775808").as_int(""), std::numeric_limits<int64_t>::min());
  // One more than int64 holds: a double, not an integer any more.
  EXPECT_EQ(parse("9223372036854775808").kind(), Json::Kind::kDouble);
  EXPECT_EQ(parse("9223372036854775808").as_double(""), 0x1p63);
  EXPECT_EQ(parse("-9223372036854775809").as_double(""), -0x1p63);
  EXPECT_EQ(parse("1000000000000000019884624838656").as_double(""), 1e30);
  EXPECT_EQ(parse("1e-6").as_double(""), 1e-6);
  EXPECT_EQ(parse("1E+2").as_double(""), 100.0);
  EXPECT_EQ(parse("0.1e1").as_double(""), 1.0);
  EXPECT_EQ(parse("1.7976931348623157e308").as_double(""), std::numeric_limits<double>::max());
  EXPECT_EQ(parse("4.9e-324").as_double(""), std::numeric_limits<double>::denorm_min());
  EXPECT_EQ(parse("2.2250738585072011e-308").as_double(""), 2.2250738585072011e-308);
  EXPECT_EQ(parse("-0.0").as_double(""), 0.0);
  EXPECT_TRUE(std::signbit(parse("-0.0").as_double("")));
}

TEST(Json, WholeDoublesAreIntegersUpTo53Bits) {
  EXPECT_EQ(parse("1e6").as_int(""), 1000000);
  EXPECT_EQ(parse("-4096.0").as_int(""), -4096);
  EXPECT_EQ(parse("9007199254740992.0").as_int(""), int64_t{1} << 53);
  expect_error(ErrorCode::kModelFormat, "\"heads\" must be an integer, not a number",
               [] { parse("9007199254740994.0").as_int("heads"); });
  expect_error(ErrorCode::kModelFormat, "must be an integer", [] { parse("0.5").as_int("heads"); });
  expect_error(ErrorCode::kModelFormat, "must be an integer", [] { parse("1e300").as_int("heads"); });
}

TEST(Json, NumbersOutsideDouble) {
  expect_rejected("1e400", "line 1, column 1: a number does not fit double precision");
  expect_rejected("[-1e309]", "column 2: a number does not fit");
  expect_rejected("1e99999999999999999999999", "does not fit");
  expect_rejected("0.0001e400", "does not fit");
  expect_rejected("1" + std::string(400, '0'), "does not fit");
  EXPECT_EQ(parse("1e-400").as_double(""), 0.0);
  EXPECT_EQ(parse("-1e-99999999999999999999999").as_double(""), 0.0);
  EXPECT_TRUE(std::signbit(parse("-1e-400").as_double("")));
  EXPECT_EQ(parse("0." + std::string(400, '0') + "1").as_double(""), 0.0);
  EXPECT_EQ(parse("100e-500").as_double(""), 0.0);
  EXPECT_EQ(parse("0e400").as_double(""), 0.0);
  EXPECT_EQ(parse("0.000e999999999999").as_double(""), 0.0);
}

TEST(Json, MalformedNumbers) {
  expect_rejected("01", "a number must not start with 0");
  expect_rejected("-", "the text ends, expected a digit");
  expect_rejected("-a", "expected a digit, found \"a\"");
  expect_rejected("1.", "the text ends, expected a digit");
  expect_rejected("1.e5", "expected a digit, found \"e\"");
  expect_rejected("1e", "the text ends, expected a digit");
  expect_rejected("1e+", "the text ends, expected a digit");
  expect_rejected("+1", "expected a value, found \"+\"");
  expect_rejected(".5", "expected a value, found \".\"");
  expect_rejected("0x10", "text after the end of the value");
  expect_rejected("NaN", "expected a value, found \"N\"");
  expect_rejected("Infinity", "expected a value, found \"I\"");
  expect_rejected("-Infinity", "expected a digit, found \"I\"");
  expect_rejected("1_000", "text after the end");
}

TEST(Json, Strings) {
  EXPECT_EQ(parse(R"("\"\\\/\b\f\n\r\t")").as_string(""), "\"\\/\b\f\n\r\t");
  EXPECT_EQ(parse(R"("\u0041\u00e9\u20AC\ud83d\ude00")").as_string(""), "A\u00e9\u20ac\U0001f600");
  EXPECT_EQ(parse(R"("a\u0000b")").as_string(""), std::string("a\0b", 3));
  EXPECT_EQ(parse("\"\x7f\"").as_string(""), "\x7f");  // allowed unescaped by RFC 8259
  EXPECT_EQ(parse("\"\u00e9\u20ac\U0001f600\U0010ffff\"").as_string(""), "\u00e9\u20ac\U0001f600\U0010ffff");
  EXPECT_EQ(parse(R"("\uffff")").as_string(""), "\xef\xbf\xbf");
}

TEST(Json, MalformedStrings) {
  expect_rejected("\"abc", "the text ends, expected the end of a string");
  expect_rejected("\"a\nb\"", "control character \"\\n\" in a string must be escaped");
  expect_rejected(std::string_view("\"a\0b\"", 5), "control character \"\\x00\"");
  expect_rejected(R"("\x41")", "unknown escape in a string");
  expect_rejected(R"("\")", "the text ends");
  expect_rejected("\"\\", "the text ends, expected an escape");
  expect_rejected(R"("\u12g4")", "expected four hexadecimal digits, found \"g\"");
  expect_rejected(R"("\u12)", "the text ends, expected four hexadecimal digits");
  expect_rejected(R"("\ud800")", "first half of a surrogate pair without the second");
  expect_rejected(R"("\ud800x")", "first half of a surrogate pair without the second");
  expect_rejected(R"("\ud800\u0041")", "first half of a surrogate pair without the second");
  expect_rejected(R"("\ud800\ud800")", "first half of a surrogate pair without the second");
  expect_rejected(R"("\udc00")", "second half of a surrogate pair without the first");
  expect_rejected(R"("\ude00\ud83d")", "second half of a surrogate pair without the first");
}

TEST(Json, InvalidUtf8) {
  for (const std::string_view bytes :
       {"\x80", "\xc0\x80", "\xc1\xbf", "\xc3", "\xc3(", "\xe0\x80\x80", "\xe2\x82", "\xed\xa0\x80", "\xf0\x80\x80\x80",
        "\xf4\x90\x80\x80", "\xf5\x80\x80\x80", "\xf8\x88\x80\x80\x80", "\xff", "\xf0\x9f\x98"}) {
    expect_rejected(concat("\"", bytes, "\""), "invalid UTF-8: byte \"\\x");
    expect_rejected(bytes, "expected a value, found");
  }
  expect_rejected("\xef\xbb\xbf{}", "line 1, column 1: expected a value");  // byte order mark
}

TEST(Json, MalformedStructure) {
  expect_rejected("", "line 1, column 1: the text ends, expected a value");
  expect_rejected("  \n ", "line 2, column 2: the text ends");
  expect_rejected("[1, 2", "the text ends, expected \",\" or \"]\"");
  expect_rejected("[1,]", "line 1, column 4: expected a value, found \"]\"");
  expect_rejected("[,1]", "expected a value, found \",\"");
  expect_rejected("[1 2]", "expected \",\" or \"]\", found \"2\"");
  expect_rejected("[1}", "expected \",\" or \"]\", found \"}\"");
  expect_rejected("{", "the text ends, expected a name or \"}\"");
  expect_rejected("{\"a\"", "the text ends, expected \":\"");
  expect_rejected("{\"a\":", "the text ends, expected a value");
  expect_rejected("{\"a\" 1}", "expected \":\", found \"1\"");
  expect_rejected("{\"a\":1,}", "expected a name, found \"}\"");
  expect_rejected("{a:1}", "expected a name, found \"a\"");
  expect_rejected("{1:1}", "expected a name, found \"1\"");
  expect_rejected("{\"a\":1 \"b\":2}", "expected \",\" or \"}\"");
  expect_rejected("1 2", "column 3: text after the end of the value");
  expect_rejected("[] []", "text after the end");
  expect_rejected("/* c */ 1", "expected a value, found \"/\"");
  expect_rejected("[1] // c", "text after the end");
  expect_rejected("'a'", "expected a value, found \"'\"");
  expect_rejected("tru", "expected a value, found \"t\"");
  expect_rejected("nulll", "text after the end");
  expect_rejected("True", "expected a value");
  expect_rejected("[1\f]", "expected \",\" or \"]\", found \"\\x0c\"");
  expect_rejected("[1\u00a0]", "expected \",\" or \"]\"");  // only the four spaces of the RFC
}

TEST(Json, PositionsCountLinesAndCharacters) {
  expect_rejected("{\n  \"a\": 1,\n  \"b\": x\n}", "test.json, line 3, column 8: expected a value, found \"x\"");
  expect_rejected("[\"\u00e9\u20ac\U0001f600\", x]", "line 1, column 9: expected a value");
  expect_error(ErrorCode::kModelFormat, "odd\\nname.json, line 1, column 1",
               [] { Json::parse("x", "odd\nname.json"); });
}

TEST(Json, DuplicateKeys) {
  expect_rejected(R"({"a": 1, "a": 2})", "column 10: \"a\" is there twice");
  expect_rejected(R"({"x": {"a": 1, "b": 2, "\u0061": 3}})", "\"a\" is there twice");
  // The first repetition is reported, wherever its key sorts.
  expect_rejected("{\"z\": 1, \"z\": 2,\n\"a\": 3, \"a\": 4}", "line 1, column 10: \"z\" is there twice");
  EXPECT_EQ(parse(R"([{"a": 1}, {"a": 2}])").as_array("").size(), 2u);
}

TEST(Json, DepthIsLimited) {
  const auto nested = [](size_t depth) { return std::string(depth, '[') + std::string(depth, ']'); };
  EXPECT_TRUE(parse(nested(64)).is_array());
  expect_rejected(nested(65), "line 1, column 65: nested more than 64 deep");
  std::string objects;
  for (int i = 0; i < 65; ++i) {
    objects += "{\"a\":";
  }
  expect_rejected(objects, "nested more than 64 deep");
  const auto start = std::chrono::steady_clock::now();
  expect_rejected(nested(10'000), "nested more than 64 deep");
  expect_rejected(std::string(10'000'000, '['), "nested more than 64 deep");
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::milliseconds(500));
}

TEST(Json, NumberOfValuesIsLimited) {
  std::string text = "[0";
  for (int i = 0; i < 4'000'000; ++i) {
    text += ",0";
  }
  expect_rejected(text + "]", "more than 4000000 values");
}

TEST(Json, ManyMembersAreReadInTime) {
  std::string text = "{";
  for (int i = 0; i < 100'000; ++i) {
    text += concat(i == 0 ? "" : ",", "\"model.layers.", i, ".weight\":", i);
  }
  const auto start = std::chrono::steady_clock::now();
  EXPECT_EQ(parse(text + "}").as_object("").size(), 100'000u);
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(5));  // quadratic would take minutes
}

TEST(Json, WrongKindsAreNamed) {
  const auto rejected = [](std::string_view message, auto&& access) {
    expect_error(ErrorCode::kModelFormat, message, access);
  };
  rejected("\"x\" must be a boolean, not an integer", [] { parse("1").as_bool("x"); });
  rejected("\"x\" must be an integer, not a string", [] { parse("\"1\"").as_int("x"); });
  rejected("\"x\" must be a number, not null", [] { parse("null").as_double("x"); });
  rejected("\"x\" must be a string, not an array", [] { parse("[]").as_string("x"); });
  rejected("\"x\" must be an array, not an object", [] { parse("{}").as_array("x"); });
  rejected("\"x\" must be an object, not a boolean", [] { parse("true").as_object("x"); });
  rejected("\"\\x1b\" must be", [] { parse("true").as_object("\x1b"); });
}

}  // namespace
}  // namespace shoal
