#include "sampling/bad_words.h"

#include <algorithm>
#include <limits>
#include <utility>

namespace aotllm {

BadWords::BadWords(std::vector<std::vector<TokenId>> sequences) : sequences_(std::move(sequences)) {}

void BadWords::apply(std::span<float> logits, std::span<const TokenId> tokens, std::int32_t) {
  for (const std::vector<TokenId>& sequence : sequences_) {
    const auto start = std::span(sequence).first(sequence.size() - 1);
    if (start.size() <= tokens.size() && std::ranges::equal(start, tokens.last(start.size()))) {
      logits[static_cast<std::size_t>(sequence.back())] = -std::numeric_limits<float>::infinity();
    }
  }
}

}  // namespace aotllm
