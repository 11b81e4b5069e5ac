#pragma once

#include <cstdint>
#include <span>

#include "aotllm/sampler.h"
#include "sampling/token_counts.h"

namespace aotllm {

/// Repetition penalty, then frequency and presence penalty. None of them forbids a token, however large.
class Penalties final : public LogitsProcessor {
 public:
  explicit Penalties(const SamplingParams& params);

  ProcessorForm form() const override { return ProcessorForm::kPenalties; }

  /// Costs a few nanoseconds per different token of the text.
  void apply(std::span<float> logits, std::span<const TokenId> tokens, std::int32_t num_prompt_tokens) override;

 private:
  float penalized(float logit, const TokenCounts::Entry& entry) const;

  double repetition_;
  double presence_;
  double frequency_;
  TokenCounts counts_;
};

}  // namespace aotllm
