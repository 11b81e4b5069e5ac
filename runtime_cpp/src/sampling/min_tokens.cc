#include "sampling/min_tokens.h"

#include <limits>
#include <utility>

namespace aotllm {

MinTokens::MinTokens(std::int32_t min_tokens, std::vector<TokenId> end_token_ids)
    : min_tokens_(min_tokens), end_token_ids_(std::move(end_token_ids)) {}

void MinTokens::apply(std::span<float> logits, std::span<const TokenId> tokens, std::int32_t num_prompt_tokens) {
  if (static_cast<std::int64_t>(tokens.size()) - num_prompt_tokens >= min_tokens_) {
    return;
  }
  for (const TokenId token : end_token_ids_) {
    logits[static_cast<std::size_t>(token)] = -std::numeric_limits<float>::infinity();
  }
}

}  // namespace aotllm
