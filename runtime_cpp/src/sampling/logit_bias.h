#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <utility>
#include <vector>

#include "aotllm/sampler.h"

namespace aotllm {

/// Adds to the logits of some tokens.
class LogitBias final : public LogitsProcessor {
 public:
  explicit LogitBias(const std::map<TokenId, double>& bias);

  void apply(std::span<float> logits, std::span<const TokenId> tokens, std::int32_t num_prompt_tokens) override;

 private:
  std::vector<std::pair<TokenId, float>> bias_;
};

}  // namespace aotllm
