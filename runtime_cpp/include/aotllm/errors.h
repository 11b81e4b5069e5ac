#pragma once

#include <stdexcept>
#include <string>
#include <utility>

namespace aotllm {

/// Kinds of failure; the names are shared with Python's `aotllm.errors` (see `error_kind_name`).
enum class ErrorKind {
  kInvalidRequest,
  kContextTooLong,
  kOverloaded,
  kEngine,              ///< damaged or malformed engine
  kEngineIncompatible,  ///< sound engine, wrong machine or version
  kCancelled,
  kInternal,
};

/// Stable lower-case name, e.g. "engine_incompatible": `AotllmError.kind` in Python.
const char* error_kind_name(ErrorKind kind) noexcept;

/// The one exception type of the runtime. The message says what, got, allowed and what to do.
class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& message, std::string param = {})
      : std::runtime_error(message), kind_(kind), param_(std::move(param)) {}

  ErrorKind kind() const noexcept { return kind_; }

  /// Name of the offending request field, or empty.
  const std::string& param() const noexcept { return param_; }

 private:
  ErrorKind kind_;
  std::string param_;
};

}  // namespace aotllm
