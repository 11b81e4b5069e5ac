#include "support/json.h"

#include <gtest/gtest.h>

#include <string>

#include "aotllm/errors.h"

namespace aotllm {
namespace {

std::string error_of(const std::string& text, const JsonLimits& limits = {}) {
  try {
    Json::parse(text, "test", limits);
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kEngine);
    return error.what();
  }
  return "";
}

template <class T>
T parsed(const std::string& text) {
  return std::get<T>(Json::parse(text, "test").value());
}

TEST(Json, ReadsEachTypeOfValue) {
  EXPECT_TRUE(Json::parse("null", "test").is_null());
  EXPECT_EQ(parsed<bool>(" true "), true);
  EXPECT_EQ(parsed<bool>("false"), false);
  EXPECT_EQ(parsed<std::int64_t>("-0"), 0);
  EXPECT_EQ(parsed<std::int64_t>("9223372036854775807"), INT64_MAX);
  EXPECT_EQ(parsed<std::int64_t>("-9223372036854775808"), INT64_MIN);
  EXPECT_EQ(parsed<double>("9223372036854775808"), 9223372036854775808.0) << "beyond 64 bits: a double";
  EXPECT_EQ(parsed<double>("1.0"), 1.0);
  EXPECT_EQ(parsed<double>("-2.5e-3"), -2.5e-3);
  EXPECT_EQ(parsed<double>("1E+2"), 100.0);
  EXPECT_EQ(JsonField(Json::parse("[1, [], {}]", "test"), "f").size(), 3u);
  const Json object = Json::parse("{\"b\": 1, \"a\": 2}", "test");
  EXPECT_EQ(std::get<std::int64_t>(object.find("b")->value()), 1);
  EXPECT_EQ(object.find("c"), nullptr);
}

TEST(Json, DecodesStrings) {
  EXPECT_EQ(parsed<std::string>(R"("a\"\\\/\b\f\n\r\t")"), "a\"\\/\b\f\n\r\t");
  EXPECT_EQ(parsed<std::string>(R"("\u0041\u00e9\u20AC")"), "Aé€");
  EXPECT_EQ(parsed<std::string>(R"("\ud83d\ude00")"), "😀");
  EXPECT_EQ(parsed<std::string>(R"("\u0000")"), std::string(1, '\0'));
  EXPECT_EQ(parsed<std::string>("\"é€😀\""), "é€😀");
}

TEST(Json, RefusesMalformedText) {
  const struct {
    const char* text;
    const char* reason;
  } cases[] = {
      {"", "expected a value"},
      {"nul", "expected a value"},
      {"nan", "expected a value"},
      {"Infinity", "expected a value"},
      {"tru", "expected a value"},
      {"'a'", "expected a value"},
      {"01", "text after the end"},
      {"+1", "expected a value"},
      {"-", "expected a value"},
      {"1.", "expected a value"},
      {".5", "expected a value"},
      {"1e", "expected a value"},
      {"0x10", "text after the end"},
      {"1e999", "does not fit a double"},
      {"[1,]", "expected a value"},
      {"[1 2]", "expected ']'"},
      {"[1", "expected ']'"},
      {"{\"a\" 1}", "expected ':'"},
      {"{\"a\":1,}", "expected a string as key"},
      {"{a:1}", "expected a string as key"},
      {"{\"a\":1", "expected '}'"},
      {"{\"a\":1,\"b\":2,\"a\":3}", "key \"a\" twice"},
      {"1 1", "text after the end"},
      {"\"a", "does not end"},
      {"\"\\", "unknown escape"},
      {"\"\\x41\"", "unknown escape"},
      {"\"\\u12\"", "four hex digits"},
      {"\"\\u12G4\"", "four hex digits"},
      {"\"\\u-123\"", "four hex digits"},
      {"\"\\ud800\"", "lone surrogate"},
      {"\"\\ud800\\u0041\"", "lone surrogate"},
      {"\"\\udc00\"", "lone surrogate"},
      {"\"\n\"", "control character"},
      {"\"\xff\"", "invalid UTF-8"},
      {"\"\xc0\xaf\"", "invalid UTF-8"},          // overlong
      {"\"\xe2\x82\"", "invalid UTF-8"},          // cut short
      {"\"\xed\xa0\x80\"", "invalid UTF-8"},      // surrogate
      {"\"\xf4\x90\x80\x80\"", "invalid UTF-8"},  // above U+10FFFF
      {"\xef\xbb\xbf{}", "expected a value"},     // byte order mark
  };
  for (const auto& c : cases) {
    EXPECT_NE(error_of(c.text).find(c.reason), std::string::npos) << c.text << " → " << error_of(c.text);
  }
}

TEST(Json, NamesThePlaceOfAnError) {
  EXPECT_EQ(error_of("{\n  \"a\": 1,\n  \"b\": x\n}"), "test: invalid JSON at line 3, column 8: expected a value");
}

TEST(Json, BoundsDepthAndSize) {
  const auto nested = [](int depth) { return std::string(depth, '[') + std::string(depth, ']'); };
  EXPECT_EQ(error_of(nested(64)), "");
  EXPECT_NE(error_of(nested(65)).find("nested deeper than 64"), std::string::npos);
  EXPECT_NE(error_of(std::string(1 << 20, '[')).find("nested deeper"), std::string::npos);
  EXPECT_NE(error_of("[1,2,3]", {64, 6}).find("larger than 6 bytes"), std::string::npos);
}

TEST(JsonField, NamesPathExpectedAndGot) {
  const Json json = Json::parse(R"({"a": {"n": 3, "s": "x", "list": [1, 2.5], "no": null}})", "test");
  const JsonField a = JsonField(json, "file").at("a");
  EXPECT_EQ(a.at("n").integer(0, 3), 3);
  EXPECT_EQ(a.at("n").number(0, 10), 3.0);
  EXPECT_EQ(a.at("list")[1].number(0, 3), 2.5);
  EXPECT_FALSE(a.optional("no").has_value());
  EXPECT_FALSE(a.optional("absent").has_value());

  const auto message = [](auto&& access) -> std::string {
    try {
      access();
    } catch (const Error& error) {
      return error.what();
    }
    return "no error";
  };
  EXPECT_EQ(message([&] { a.at("n").integer(4, 9); }), "file.a.n: expected an integer in [4, 9], got 3");
  EXPECT_EQ(message([&] { a.at("s").integer(4, 9); }), "file.a.s: expected an integer in [4, 9], got \"x\"");
  EXPECT_EQ(message([&] { a.at("list")[1].integer(0, 9); }), "file.a.list[1]: expected an integer in [0, 9], got 2.5");
  EXPECT_EQ(message([&] { a.at("s").number(0, 1); }), "file.a.s: expected a number in [0, 1], got \"x\"");
  EXPECT_EQ(message([&] { a.at("list").string(); }), "file.a.list: expected a string, got an array of 2");
  EXPECT_EQ(message([&] { a.at("n").size(); }), "file.a.n: expected an array, got 3");
  EXPECT_EQ(message([&] { a.at("n").object(); }), "file.a.n: expected an object, got 3");
  EXPECT_EQ(message([&] { a.at("gone"); }), "file.a: the field \"gone\" is missing");
  EXPECT_EQ(message([&] { a.only({"n", "s", "no"}); }), "file.a: unknown field \"list\"");
}

}  // namespace
}  // namespace aotllm
