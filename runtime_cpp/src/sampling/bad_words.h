#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "aotllm/sampler.h"

namespace aotllm {

/// Forbids the last token of a sequence where the text ends with the others. A sequence of one is never generated.
class BadWords final : public LogitsProcessor {
 public:
  /// No sequence is empty.
  explicit BadWords(std::vector<std::vector<TokenId>> sequences);

  void apply(std::span<float> logits, std::span<const TokenId> tokens, std::int32_t num_prompt_tokens) override;

 private:
  std::vector<std::vector<TokenId>> sequences_;
};

}  // namespace aotllm
