#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace aotllm {

/// Bounds on what `Json::parse` accepts, so that no document can exhaust the stack or the memory.
struct JsonLimits {
  int max_depth = 64;                            ///< nested arrays and objects
  std::size_t max_bytes = std::size_t{1} << 28;  ///< of text
};

/// An immutable JSON value (RFC 8259, strict: UTF-8 only, no duplicate keys, no trailing text).
class Json {
 public:
  struct Member;
  using Array = std::vector<Json>;
  using Object = std::vector<Member>;  ///< sorted by key
  /// Numbers that are written as integers and fit 64 bits are integers; all others are doubles.
  using Value = std::variant<std::nullptr_t, bool, std::int64_t, double, std::string, Array, Object>;

  Json() noexcept;
  explicit Json(Value value);
  Json(Json&&) noexcept;
  Json& operator=(Json&&) noexcept;
  ~Json();

  /// Throws Error(kEngine) with `what` (what the text is, for the message), line, column and reason.
  static Json parse(std::string_view text, const std::string& what, const JsonLimits& limits = {});

  const Value& value() const noexcept { return value_; }
  bool is_null() const noexcept { return std::holds_alternative<std::nullptr_t>(value_); }
  /// "null", "boolean", "integer", "number", "string", "array" or "object".
  const char* type_name() const noexcept;
  /// Member of an object, or nullptr where this is no object or has no such member.
  const Json* find(std::string_view key) const noexcept;

 private:
  Value value_;
};

struct Json::Member {
  std::string key;
  Json value;
};

/// A value and its place in the document. Each accessor throws Error(kEngine) that names the place, what was expected
/// and what was got. The document must outlive the field.
class JsonField {
 public:
  JsonField(const Json& json, std::string path) : json_(&json), path_(std::move(path)) {}

  const Json& json() const noexcept { return *json_; }
  const std::string& path() const noexcept { return path_; }

  std::int64_t integer(std::int64_t min, std::int64_t max) const;
  /// A finite number in [min, max].
  double number(double min, double max) const;
  const std::string& string() const;
  bool boolean() const;
  const Json::Object& object() const;

  std::size_t size() const;                                       ///< of an array
  JsonField operator[](std::size_t i) const;                      ///< element of an array; i < size()
  JsonField at(std::string_view key) const;                       ///< member that must be there
  std::optional<JsonField> optional(std::string_view key) const;  ///< empty where absent or null
  /// Refuses members other than `keys`: a misspelt optional field would be lost in silence.
  void only(std::initializer_list<std::string_view> keys) const;

  /// Throws: this field, what was expected of it and its value.
  [[noreturn]] void fail(const std::string& expected) const;
  [[noreturn]] void fail(const std::string& expected, const std::string& got) const;

 private:
  const Json* json_;
  std::string path_;
};

}  // namespace aotllm
