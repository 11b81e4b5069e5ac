#include "sampling/allowed_tokens.h"

#include <algorithm>
#include <functional>

#include "sampling/token_mask.h"

namespace aotllm {

AllowedTokens::AllowedTokens(std::span<const TokenId> token_ids, std::int32_t vocab_size)
    : mask_((static_cast<std::size_t>(vocab_size) + 31) / 32, 0) {
  for (const TokenId token : token_ids) {
    mask_[static_cast<std::size_t>(token) / 32] |= std::uint32_t{1} << (token % 32);
  }
}

void AllowedTokens::apply(std::span<float> logits, std::span<const TokenId>, std::int32_t) {
  apply_token_mask(logits, mask_);
}

void AllowedTokens::forbid(std::span<std::uint32_t> mask, std::span<const TokenId>, std::int32_t) {
  std::ranges::transform(mask, mask_, mask.begin(), std::bit_and<>());
}

}  // namespace aotllm
