#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "sampling/ban.h"

namespace aotllm {

/// Forbids the last token of a sequence where the text ends with the others. A sequence of one is never generated.
class BadWords final : public Ban {
 public:
  /// No sequence is empty.
  explicit BadWords(std::vector<std::vector<TokenId>> sequences);

  bool idle(std::span<const TokenId> tokens, std::int32_t num_prompt_tokens) const override;

 private:
  void list(std::span<const TokenId> tokens, std::int32_t num_prompt_tokens,
            std::vector<TokenId>& forbidden) const override;

  std::vector<std::vector<TokenId>> sequences_;
};

}  // namespace aotllm
