#pragma once

#include <stdexcept>

#include "aotllm/errors.h"

namespace aotllm::testing {

/// The kind of the Error that `call` throws; throws std::logic_error where it throws none.
template <typename Call>
ErrorKind error_kind_of(Call call) {
  try {
    call();
  } catch (const Error& e) {
    return e.kind();
  }
  throw std::logic_error("no error");
}

}  // namespace aotllm::testing
