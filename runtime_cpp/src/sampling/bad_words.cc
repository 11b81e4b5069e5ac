#include "sampling/bad_words.h"

#include <algorithm>
#include <utility>

namespace aotllm {
namespace {

/// `tokens` end with all of `sequence` but its last token.
bool leads_to(std::span<const TokenId> tokens, const std::vector<TokenId>& sequence) {
  const auto start = std::span(sequence).first(sequence.size() - 1);
  return start.size() <= tokens.size() && std::ranges::equal(start, tokens.last(start.size()));
}

}  // namespace

BadWords::BadWords(std::vector<std::vector<TokenId>> sequences) : sequences_(std::move(sequences)) {}

bool BadWords::idle(std::span<const TokenId> tokens, std::int32_t /*num_prompt_tokens*/) const {
  return std::ranges::none_of(sequences_, [&](const auto& sequence) { return leads_to(tokens, sequence); });
}

void BadWords::list(std::span<const TokenId> tokens, std::int32_t /*num_prompt_tokens*/,
                    std::vector<TokenId>& forbidden) const {
  for (const std::vector<TokenId>& sequence : sequences_) {
    if (leads_to(tokens, sequence)) {
      forbidden.push_back(sequence.back());
    }
  }
}

}  // namespace aotllm
