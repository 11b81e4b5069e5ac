#include "sampling/logit_bias.h"

namespace aotllm {

LogitBias::LogitBias(const std::map<TokenId, double>& bias) {
  bias_.reserve(bias.size());
  for (const auto& [token, value] : bias) {
    bias_.emplace_back(token, static_cast<float>(value));
  }
}

void LogitBias::apply(std::span<float> logits, std::span<const TokenId>, std::int32_t) {
  for (const auto& [token, value] : bias_) {
    logits[static_cast<std::size_t>(token)] += value;
  }
}

}  // namespace aotllm
