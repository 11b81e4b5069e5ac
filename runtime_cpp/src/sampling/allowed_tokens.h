#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "aotllm/sampler.h"

namespace aotllm {

/// Forbids all tokens but some.
class AllowedTokens final : public LogitsProcessor {
 public:
  /// `token_ids` are in [0, vocab_size).
  AllowedTokens(std::span<const TokenId> token_ids, std::int32_t vocab_size);

  ProcessorForm form() const override { return ProcessorForm::kBan; }
  void apply(std::span<float> logits, std::span<const TokenId> tokens, std::int32_t num_prompt_tokens) override;
  void forbid(std::span<std::uint32_t> mask, std::span<const TokenId> tokens, std::int32_t num_prompt_tokens) override;

 private:
  std::vector<std::uint32_t> mask_;
};

}  // namespace aotllm
