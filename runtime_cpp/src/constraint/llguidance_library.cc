#include "constraint/llguidance_library.h"

#include <dlfcn.h>

#include <cstdlib>

#include "aotllm/errors.h"
#include "support/strings.h"

namespace aotllm::llguidance {
namespace {

constexpr char kSupported[] = "llguidance>=1.8,<2";

[[noreturn]] void refuse(const std::string& why) {
  throw Error(ErrorKind::kEngineIncompatible, cat("constrained output needs the Python package ", kSupported, ", but ",
                                                  why, ". Install it with: pip install '", kSupported, "'"));
}

template <typename Function>
void find(void* library, const std::string& path, const char* name, Function& function) {
  void* symbol = dlsym(library, name);
  if (symbol == nullptr) {
    refuse(cat(path, " has no function ", name));
  }
  function = reinterpret_cast<Function>(symbol);
}

/// "1.9.1" of "llguidance@1.9.1 derivre@0.3.13 …".
std::string version_of(const std::string& text) {
  constexpr char kPrefix[] = "llguidance@";
  const std::size_t start = text.find(kPrefix);
  if (start == std::string::npos) {
    return {};
  }
  const std::size_t begin = start + sizeof(kPrefix) - 1;
  return text.substr(begin, text.find_first_not_of("0123456789.", begin) - begin);
}

bool is_supported(const std::string& version) {
  char* end = nullptr;
  const long major = std::strtol(version.c_str(), &end, 10);
  const long minor = *end == '.' ? std::strtol(end + 1, nullptr, 10) : -1;
  return major == 1 && minor >= 8;
}

}  // namespace

Library::Library(const std::string& path) {
  // Never closed: Rust keeps thread-local state with destructors, and attempts may still run (see GrammarLimits).
  void* library = dlopen(path.c_str(), RTLD_LAZY | RTLD_LOCAL);
  if (library == nullptr) {
    const char* why = dlerror();
    refuse(cat("its library cannot be loaded: ", why != nullptr ? why : path.c_str()));
  }
  find(library, path, "llg_get_version", get_version);
  version = version_of(get_version());
  if (!is_supported(version)) {
    refuse(cat(path, " is version ", version.empty() ? get_version() : version));
  }
  find(library, path, "llg_new_tokenizer_v2", new_tokenizer_v2);
  find(library, path, "llg_free_tokenizer", free_tokenizer);
  find(library, path, "llg_constraint_init_set_defaults", constraint_init_set_defaults);
  find(library, path, "llg_new_matcher", new_matcher);
  find(library, path, "llg_clone_matcher", clone_matcher);
  find(library, path, "llg_free_matcher", free_matcher);
  find(library, path, "llg_matcher_compute_mask_into", matcher_compute_mask_into);
  find(library, path, "llg_matcher_consume_token", matcher_consume_token);
  find(library, path, "llg_matcher_consume_tokens", matcher_consume_tokens);
  find(library, path, "llg_matcher_compute_ff_tokens", matcher_compute_ff_tokens);
  find(library, path, "llg_matcher_is_stopped", matcher_is_stopped);
  find(library, path, "llg_matcher_is_error", matcher_is_error);
  find(library, path, "llg_matcher_get_error", matcher_get_error);
}

}  // namespace aotllm::llguidance
