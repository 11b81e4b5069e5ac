// Any text: parsed, or refused with Error(kEngine).

#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "aotllm/errors.h"
#include "support/json.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  try {
    aotllm::Json::parse({reinterpret_cast<const char*>(data), size}, "fuzz");
  } catch (const aotllm::Error& error) {
    if (error.kind() != aotllm::ErrorKind::kEngine) std::abort();
  }
  return 0;
}
