#include "sampling/token_mask.h"

#include <algorithm>
#include <cstddef>
#include <limits>
#include <string>

#include "aotllm/errors.h"

namespace aotllm {

void apply_token_mask(std::span<float> logits, std::span<const std::uint32_t> mask) {
  constexpr std::size_t kBits = 32;
  const std::size_t words = (logits.size() + kBits - 1) / kBits;
  if (mask.size() != words) {
    throw Error(ErrorKind::kInternal, "a token mask has " + std::to_string(mask.size()) + " words; " +
                                          std::to_string(logits.size()) + " tokens need " + std::to_string(words));
  }
  for (std::size_t word = 0; word < words; ++word) {
    if (mask[word] == ~std::uint32_t{0}) {
      continue;  // a grammar inside a string allows nearly all
    }
    const std::size_t first = word * kBits;
    const std::size_t count = std::min(kBits, logits.size() - first);
    for (std::size_t bit = 0; bit < count; ++bit) {
      if ((mask[word] >> bit & 1U) == 0) {
        logits[first + bit] = -std::numeric_limits<float>::infinity();
      }
    }
  }
}

}  // namespace aotllm
