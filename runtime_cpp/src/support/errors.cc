#include "aotllm/errors.h"

namespace aotllm {

const char* error_kind_name(ErrorKind kind) noexcept {
  switch (kind) {
    case ErrorKind::kInvalidRequest:
      return "invalid_request";
    case ErrorKind::kContextTooLong:
      return "context_too_long";
    case ErrorKind::kOverloaded:
      return "overloaded";
    case ErrorKind::kEngine:
      return "engine";
    case ErrorKind::kEngineIncompatible:
      return "engine_incompatible";
    case ErrorKind::kCancelled:
      return "cancelled";
    case ErrorKind::kInternal:
      return "internal";
  }
  return "internal";
}

}  // namespace aotllm
