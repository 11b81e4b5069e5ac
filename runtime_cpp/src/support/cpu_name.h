#pragma once

#include <string>

namespace aotllm {

/// The CPU's brand, "AMD EPYC 9R14"; "unknown CPU" where it has none.
std::string cpu_brand();

/// "GenuineIntel", "AuthenticAMD", …
std::string cpu_vendor();

}  // namespace aotllm
