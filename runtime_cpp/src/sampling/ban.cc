#include "sampling/ban.h"

#include <limits>

namespace aotllm {

void Ban::apply(std::span<float> logits, std::span<const TokenId> tokens, std::int32_t num_prompt_tokens) {
  forbidden_.clear();
  list(tokens, num_prompt_tokens, forbidden_);
  for (const TokenId token : forbidden_) {
    logits[static_cast<std::size_t>(token)] = -std::numeric_limits<float>::infinity();
  }
}

void Ban::forbid(std::span<std::uint32_t> mask, std::span<const TokenId> tokens, std::int32_t num_prompt_tokens) {
  forbidden_.clear();
  list(tokens, num_prompt_tokens, forbidden_);
  for (const TokenId token : forbidden_) {
    mask[static_cast<std::size_t>(token) / 32] &= ~(std::uint32_t{1} << (token % 32));
  }
}

}  // namespace aotllm
