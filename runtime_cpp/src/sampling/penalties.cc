#include "sampling/penalties.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace aotllm {

Penalties::Penalties(const SamplingParams& params)
    : repetition_(params.repetition_penalty),
      presence_(params.presence_penalty),
      frequency_(params.frequency_penalty) {}

void Penalties::apply(std::span<float> logits, std::span<const TokenId> tokens, std::int32_t num_prompt_tokens) {
  counts_.follow(tokens, num_prompt_tokens);
  for (const TokenCounts::Entry& entry : counts_.entries()) {
    float& logit = logits[static_cast<std::size_t>(entry.token)];
    // What is forbidden stays so, and what is no number is still to be found out.
    if (entry.in_prompt + entry.in_output > 0 && std::isfinite(logit)) {
      logit = penalized(logit, entry);
    }
  }
}

float Penalties::penalized(float logit, const TokenCounts::Entry& entry) const {
  double value = logit;
  value = value > 0.0 ? value / repetition_ : value * repetition_;
  if (entry.in_output > 0) {
    value -= frequency_ * entry.in_output + presence_;
  }
  constexpr double kLargest = std::numeric_limits<float>::max();
  return static_cast<float>(std::clamp(value, -kLargest, kLargest));
}

}  // namespace aotllm
