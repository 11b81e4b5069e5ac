#include <algorithm>
#include <charconv>
#include <cmath>
#include <utility>

#include "aotllm/errors.h"
#include "support/json.h"
#include "support/strings.h"

namespace aotllm {
namespace {

bool is_digit(char c) {
  return c >= '0' && c <= '9';
}

void append_utf8(std::string& out, std::uint32_t code_point) {
  const auto tail = [&](int shift) { out += static_cast<char>(0x80 | ((code_point >> shift) & 0x3F)); };
  if (code_point < 0x80) {
    out += static_cast<char>(code_point);
  } else if (code_point < 0x800) {
    out += static_cast<char>(0xC0 | (code_point >> 6));
    tail(0);
  } else if (code_point < 0x10000) {
    out += static_cast<char>(0xE0 | (code_point >> 12));
    tail(6);
    tail(0);
  } else {
    out += static_cast<char>(0xF0 | (code_point >> 18));
    tail(12);
    tail(6);
    tail(0);
  }
}

/// Bytes of the well-formed UTF-8 sequence at the start of `text` (Unicode 15, table 3-7), or 0.
std::size_t utf8_length(std::string_view text) {
  const auto byte = [&](std::size_t i) { return i < text.size() ? static_cast<std::uint8_t>(text[i]) : 0u; };
  const auto continues = [&](std::size_t i) { return (byte(i) & 0xC0) == 0x80; };
  const unsigned first = byte(0);
  if (first < 0x80) return 1;
  if (first >= 0xC2 && first <= 0xDF) return continues(1) ? 2 : 0;
  if (first >= 0xE0 && first <= 0xEF) {
    const unsigned low = first == 0xE0 ? 0xA0 : 0x80;
    const unsigned high = first == 0xED ? 0x9F : 0xBF;  // no surrogates
    return byte(1) >= low && byte(1) <= high && continues(2) ? 3 : 0;
  }
  if (first >= 0xF0 && first <= 0xF4) {
    const unsigned low = first == 0xF0 ? 0x90 : 0x80;
    const unsigned high = first == 0xF4 ? 0x8F : 0xBF;
    return byte(1) >= low && byte(1) <= high && continues(2) && continues(3) ? 4 : 0;
  }
  return 0;
}

/// Recursive descent over the text; the depth limit bounds the recursion.
class Parser {
 public:
  Parser(std::string_view text, const std::string& what, const JsonLimits& limits)
      : text_(text), what_(what), limits_(limits) {}

  Json document() {
    if (text_.size() > limits_.max_bytes) fail(cat("larger than ", limits_.max_bytes, " bytes"));
    Json json = value(0);
    skip_space();
    if (position_ != text_.size()) fail("text after the end of the value");
    return json;
  }

 private:
  [[noreturn]] void fail(const std::string& reason) const {
    const std::string_view before = text_.substr(0, position_);
    const auto line = 1 + std::count(before.begin(), before.end(), '\n');
    const auto newline = before.rfind('\n');
    const auto column = 1 + before.size() - (newline == before.npos ? 0 : newline + 1);
    throw Error(ErrorKind::kEngine, cat(what_, ": invalid JSON at line ", line, ", column ", column, ": ", reason));
  }

  char peek() const { return position_ < text_.size() ? text_[position_] : '\0'; }

  void skip_space() {
    while (position_ < text_.size() && std::string_view(" \t\n\r").find(text_[position_]) != std::string_view::npos) {
      ++position_;
    }
  }

  bool accept(char c) {
    if (position_ >= text_.size() || text_[position_] != c) return false;
    ++position_;
    return true;
  }

  void expect(char c) {
    if (!accept(c)) fail(cat("expected '", c, "'"));
  }

  void keyword(std::string_view word) {
    if (text_.substr(position_, word.size()) != word) fail("expected a value");
    position_ += word.size();
  }

  Json value(int depth) {
    skip_space();
    switch (peek()) {
      case '{':
        return Json(object(depth + 1));
      case '[':
        return Json(array(depth + 1));
      case '"':
        return Json(string());
      case 't':
        keyword("true");
        return Json(true);
      case 'f':
        keyword("false");
        return Json(false);
      case 'n':
        keyword("null");
        return Json();
      default:
        return Json(number());
    }
  }

  void enter(int depth) {
    if (depth > limits_.max_depth) fail(cat("nested deeper than ", limits_.max_depth, " levels"));
    ++position_;
    skip_space();
  }

  Json::Array array(int depth) {
    enter(depth);
    Json::Array items;
    if (accept(']')) return items;
    do {
      items.push_back(value(depth));
      skip_space();
    } while (accept(','));
    expect(']');
    return items;
  }

  Json::Object object(int depth) {
    enter(depth);
    Json::Object members;
    if (accept('}')) return members;
    do {
      skip_space();
      if (peek() != '"') fail("expected a string as key");
      std::string key = string();
      skip_space();
      expect(':');
      members.push_back({std::move(key), value(depth)});
      skip_space();
    } while (accept(','));
    expect('}');
    std::sort(members.begin(), members.end(), [](const auto& a, const auto& b) { return a.key < b.key; });
    const auto same = [](const auto& a, const auto& b) { return a.key == b.key; };
    const auto twin = std::adjacent_find(members.begin(), members.end(), same);
    if (twin != members.end()) fail(cat("the object has the key \"", twin->key, "\" twice"));
    return members;
  }

  std::string string() {
    expect('"');
    std::string out;
    for (;;) {
      if (position_ >= text_.size()) fail("the string does not end");
      const char c = text_[position_];
      if (c == '"') {
        ++position_;
        return out;
      }
      if (c == '\\') {
        escape(out);
        continue;
      }
      if (static_cast<unsigned char>(c) < 0x20) fail("control character in a string");
      const std::size_t length = utf8_length(text_.substr(position_));
      if (length == 0) fail("invalid UTF-8");
      out.append(text_, position_, length);
      position_ += length;
    }
  }

  void escape(std::string& out) {
    ++position_;  // the backslash
    constexpr std::string_view kNames = "\"\\/bfnrt";
    constexpr std::string_view kValues = "\"\\/\b\f\n\r\t";
    if (accept('u')) return append_utf8(out, escaped_code_point());
    const auto i = position_ < text_.size() ? kNames.find(text_[position_]) : kNames.npos;
    if (i == kNames.npos) fail("unknown escape in a string");
    ++position_;
    out += kValues[i];
  }

  std::uint32_t escaped_code_point() {
    const std::uint32_t high = hex4();
    if (high < 0xD800 || high > 0xDFFF) return high;
    if (high > 0xDBFF || !accept('\\') || !accept('u')) fail("lone surrogate in a string");
    const std::uint32_t low = hex4();
    if (low < 0xDC00 || low > 0xDFFF) fail("lone surrogate in a string");
    return 0x10000 + ((high - 0xD800) << 10) + (low - 0xDC00);
  }

  std::uint32_t hex4() {
    const std::string_view digits = text_.substr(position_, 4);
    std::uint32_t value = 0;
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value, 16);
    if (error != std::errc() || digits.size() != 4 || end != digits.data() + 4) fail("expected four hex digits");
    position_ += 4;
    return value;
  }

  void digits() {
    if (!is_digit(peek())) fail("expected a value");
    while (is_digit(peek())) ++position_;
  }

  Json::Value number() {
    const std::size_t begin = position_;
    accept('-');
    if (!accept('0')) digits();
    bool integer = true;
    if (accept('.')) {
      integer = false;
      digits();
    }
    if (peek() == 'e' || peek() == 'E') {
      integer = false;
      ++position_;
      if (!accept('+')) accept('-');
      digits();
    }
    const std::string_view token = text_.substr(begin, position_ - begin);
    if (integer) {
      std::int64_t value = 0;
      if (std::from_chars(token.data(), token.data() + token.size(), value).ec == std::errc()) return value;
    }
    double value = 0;
    if (std::from_chars(token.data(), token.data() + token.size(), value).ec != std::errc() || !std::isfinite(value)) {
      position_ = begin;
      fail("the number does not fit a double");
    }
    return value;
  }

  std::string_view text_;
  const std::string& what_;
  const JsonLimits& limits_;
  std::size_t position_ = 0;
};

}  // namespace

Json Json::parse(std::string_view text, const std::string& what, const JsonLimits& limits) {
  return Parser(text, what, limits).document();
}

}  // namespace aotllm
