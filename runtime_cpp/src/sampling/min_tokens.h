#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "sampling/ban.h"

namespace aotllm {

/// Forbids the tokens that end a request until enough were generated.
class MinTokens final : public Ban {
 public:
  MinTokens(std::int32_t min_tokens, std::vector<TokenId> end_token_ids);

  bool idle(std::span<const TokenId> tokens, std::int32_t num_prompt_tokens) const override;

 private:
  void list(std::span<const TokenId> tokens, std::int32_t num_prompt_tokens,
            std::vector<TokenId>& forbidden) const override;

  std::int32_t min_tokens_;
  std::vector<TokenId> end_token_ids_;
};

}  // namespace aotllm
