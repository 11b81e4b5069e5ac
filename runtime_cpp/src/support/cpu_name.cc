#include "support/cpu_name.h"

#include <cpuid.h>

#include <array>
#include <cstring>
#include <string_view>

namespace aotllm {

// The brand string of leaves 0x80000002 … 4, without spaces at its ends.
std::string cpu_brand() {
  constexpr unsigned kFirstLeaf = 0x80000002;
  constexpr const char* kUnknown = "unknown CPU";
  std::array<char, 49> text{};
  for (unsigned i = 0; i < 3; ++i) {
    std::array<unsigned, 4> words{};
    if (__get_cpuid(kFirstLeaf + i, &words[0], &words[1], &words[2], &words[3]) == 0) return kUnknown;
    std::memcpy(text.data() + i * sizeof words, words.data(), sizeof words);
  }
  std::string_view name = text.data();
  const std::size_t begin = name.find_first_not_of(' ');
  if (begin == name.npos) return kUnknown;
  name.remove_prefix(begin);
  return std::string(name.substr(0, name.find_last_not_of(' ') + 1));
}

// Leaf 0: EBX, EDX, ECX.
std::string cpu_vendor() {
  std::array<unsigned, 4> words{};
  if (__get_cpuid(0, &words[0], &words[1], &words[2], &words[3]) == 0) return {};
  std::array<char, 12> text{};
  std::memcpy(text.data(), &words[1], 4);
  std::memcpy(text.data() + 4, &words[3], 4);
  std::memcpy(text.data() + 8, &words[2], 4);
  return {text.data(), text.size()};
}

}  // namespace aotllm
