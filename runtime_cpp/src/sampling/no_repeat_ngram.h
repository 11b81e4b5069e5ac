#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "sampling/ban.h"

namespace aotllm {

/// Forbids tokens that would complete a sequence of `size` tokens that the text has already.
class NoRepeatNgram final : public Ban {
 public:
  /// `size` ≥ 1; 1 forbids every token of the text.
  explicit NoRepeatNgram(std::int32_t size);

 private:
  /// One pass over the text: a few microseconds for 4096 tokens.
  void list(std::span<const TokenId> tokens, std::int32_t num_prompt_tokens,
            std::vector<TokenId>& forbidden) const override;

  std::size_t size_;
};

}  // namespace aotllm
