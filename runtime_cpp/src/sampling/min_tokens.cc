#include "sampling/min_tokens.h"

#include <utility>

namespace aotllm {

MinTokens::MinTokens(std::int32_t min_tokens, std::vector<TokenId> end_token_ids)
    : min_tokens_(min_tokens), end_token_ids_(std::move(end_token_ids)) {}

bool MinTokens::idle(std::span<const TokenId> tokens, std::int32_t num_prompt_tokens) const {
  return static_cast<std::int64_t>(tokens.size()) - num_prompt_tokens >= min_tokens_;
}

void MinTokens::list(std::span<const TokenId> tokens, std::int32_t num_prompt_tokens,
                     std::vector<TokenId>& forbidden) const {
  if (!idle(tokens, num_prompt_tokens)) {
    forbidden.insert(forbidden.end(), end_token_ids_.begin(), end_token_ids_.end());
  }
}

}  // namespace aotllm
