#pragma once

#include <limits>
#include <span>

#include "aotllm/model_runner.h"

namespace aotllm {

/// The largest of the logits taken so far, the lowest id among equals.
struct BestToken {
  float logit = -std::numeric_limits<float>::infinity();
  TokenId id = -1;       ///< -1 = all are -inf
  bool damaged = false;  ///< a logit is NaN or +inf

  /// Logits of tokens first, first + 1, …
  void take(std::span<const float> logits, TokenId first);
  void take(const BestToken& other);

  /// The token, kDamagedRow or kNothingAllowed.
  TokenId token() const { return damaged ? kDamagedRow : (id < 0 ? kNothingAllowed : id); }
};

}  // namespace aotllm
