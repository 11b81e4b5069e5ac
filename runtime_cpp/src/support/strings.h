#pragma once

#include <sstream>
#include <string>

namespace aotllm {

/// Concatenates the printed forms of its arguments: `cat("got ", 3, " rows")`. For error messages, not hot paths.
template <class... Args>
std::string cat(const Args&... args) {
  std::ostringstream out;
  (out << ... << args);
  return out.str();
}

}  // namespace aotllm
