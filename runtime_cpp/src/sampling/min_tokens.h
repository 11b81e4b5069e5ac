#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "aotllm/sampler.h"

namespace aotllm {

/// Forbids the tokens that end a request until enough were generated.
class MinTokens final : public LogitsProcessor {
 public:
  MinTokens(std::int32_t min_tokens, std::vector<TokenId> end_token_ids);

  void apply(std::span<float> logits, std::span<const TokenId> tokens, std::int32_t num_prompt_tokens) override;

 private:
  std::int32_t min_tokens_;
  std::vector<TokenId> end_token_ids_;
};

}  // namespace aotllm
