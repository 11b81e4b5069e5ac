#include "support/json.h"

#include <algorithm>
#include <utility>

#include "aotllm/errors.h"
#include "support/strings.h"

namespace aotllm {
namespace {

/// The value as an error message shows it: scalars in full, containers by size.
std::string describe(const Json& json) {
  struct Describe {
    std::string operator()(std::nullptr_t) const { return "null"; }
    std::string operator()(bool v) const { return v ? "true" : "false"; }
    std::string operator()(std::int64_t v) const { return std::to_string(v); }
    std::string operator()(double v) const { return cat(v); }
    std::string operator()(const std::string& v) const {
      return v.size() <= 60 ? cat('"', v, '"') : cat('"', v.substr(0, 60), "…\" (", v.size(), " bytes)");
    }
    std::string operator()(const Json::Array& v) const { return cat("an array of ", v.size()); }
    std::string operator()(const Json::Object& v) const { return cat("an object of ", v.size()); }
  };
  return std::visit(Describe{}, json.value());
}

}  // namespace

Json::Json() noexcept : value_(nullptr) {}
Json::Json(Value value) : value_(std::move(value)) {}
Json::Json(Json&&) noexcept = default;
Json& Json::operator=(Json&&) noexcept = default;
Json::~Json() = default;

const char* Json::type_name() const noexcept {
  constexpr const char* kNames[] = {"null", "boolean", "integer", "number", "string", "array", "object"};
  static_assert(std::size(kNames) == std::variant_size_v<Value>);
  return kNames[value_.index()];
}

const Json* Json::find(std::string_view key) const noexcept {
  const auto* members = std::get_if<Object>(&value_);
  if (members == nullptr) return nullptr;
  const auto it = std::lower_bound(members->begin(), members->end(), key,
                                   [](const Member& member, std::string_view k) { return member.key < k; });
  return it != members->end() && it->key == key ? &it->value : nullptr;
}

void JsonField::fail(const std::string& expected) const {
  fail(expected, describe(*json_));
}

void JsonField::fail(const std::string& expected, const std::string& got) const {
  throw Error(ErrorKind::kEngine, cat(path_, ": expected ", expected, ", got ", got));
}

std::int64_t JsonField::integer(std::int64_t min, std::int64_t max) const {
  const auto* v = std::get_if<std::int64_t>(&json_->value());
  if (v == nullptr || *v < min || *v > max) fail(cat("an integer in [", min, ", ", max, "]"));
  return *v;
}

double JsonField::number(double min, double max) const {
  const auto* integer = std::get_if<std::int64_t>(&json_->value());
  const auto* real = std::get_if<double>(&json_->value());
  const double v = integer != nullptr ? static_cast<double>(*integer) : real != nullptr ? *real : min - 1;
  if ((integer == nullptr && real == nullptr) || !(v >= min && v <= max)) {
    fail(cat("a number in [", min, ", ", max, "]"));
  }
  return v;
}

const std::string& JsonField::string() const {
  const auto* v = std::get_if<std::string>(&json_->value());
  if (v == nullptr) fail("a string");
  return *v;
}

bool JsonField::boolean() const {
  const auto* v = std::get_if<bool>(&json_->value());
  if (v == nullptr) fail("true or false");
  return *v;
}

const Json::Object& JsonField::object() const {
  const auto* v = std::get_if<Json::Object>(&json_->value());
  if (v == nullptr) fail("an object");
  return *v;
}

std::size_t JsonField::size() const {
  const auto* v = std::get_if<Json::Array>(&json_->value());
  if (v == nullptr) fail("an array");
  return v->size();
}

JsonField JsonField::operator[](std::size_t i) const {
  return JsonField(std::get<Json::Array>(json_->value()).at(i), cat(path_, '[', i, ']'));
}

JsonField JsonField::at(std::string_view key) const {
  object();
  const Json* member = json_->find(key);
  if (member == nullptr) throw Error(ErrorKind::kEngine, cat(path_, ": the field \"", key, "\" is missing"));
  return JsonField(*member, cat(path_, '.', key));
}

std::optional<JsonField> JsonField::optional(std::string_view key) const {
  object();
  const Json* member = json_->find(key);
  if (member == nullptr || member->is_null()) return std::nullopt;
  return JsonField(*member, cat(path_, '.', key));
}

void JsonField::only(std::initializer_list<std::string_view> keys) const {
  for (const Json::Member& member : object()) {
    if (std::find(keys.begin(), keys.end(), member.key) == keys.end()) {
      throw Error(ErrorKind::kEngine, cat(path_, ": unknown field \"", member.key, "\""));
    }
  }
}

}  // namespace aotllm
