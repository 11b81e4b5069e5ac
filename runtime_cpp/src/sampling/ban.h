#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "aotllm/sampler.h"

namespace aotllm {

/// A processor that forbids tokens, which it can list.
class Ban : public LogitsProcessor {
 public:
  ProcessorForm form() const final { return ProcessorForm::kBan; }
  void apply(std::span<float> logits, std::span<const TokenId> tokens, std::int32_t num_prompt_tokens) final;
  void forbid(std::span<std::uint32_t> mask, std::span<const TokenId> tokens, std::int32_t num_prompt_tokens) final;

 protected:
  /// Appends what must not follow `tokens` to `forbidden`; a token may be there twice.
  virtual void list(std::span<const TokenId> tokens, std::int32_t num_prompt_tokens,
                    std::vector<TokenId>& forbidden) const = 0;

 private:
  std::vector<TokenId> forbidden_;  ///< of a call; kept for its memory
};

}  // namespace aotllm
