#include "sampling/best_token.h"

#include <algorithm>
#include <array>

namespace aotllm {

void BestToken::take(std::span<const float> logits, TokenId first) {
  // The maximum first, in lanes that the compiler makes vectors of; who holds it is looked for only where it is news.
  constexpr std::size_t kLanes = 16;
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  std::array<float, kLanes> most;
  most.fill(-kInfinity);
  std::array<std::uint32_t, kLanes> beyond{};
  const auto look = [&](std::size_t lane, float value) {
    most[lane] = value > most[lane] ? value : most[lane];
    beyond[lane] |= value < kInfinity ? 0U : 1U;  // of NaN, too
  };
  std::size_t i = 0;
  for (; i + kLanes <= logits.size(); i += kLanes) {
    for (std::size_t lane = 0; lane < kLanes; ++lane) look(lane, logits[i + lane]);
  }
  for (; i < logits.size(); ++i) look(0, logits[i]);
  damaged = damaged || std::ranges::any_of(beyond, [](std::uint32_t lane) { return lane != 0; });

  const float largest = *std::ranges::max_element(most);
  if (largest < logit || largest == -kInfinity) return;
  const auto found = std::ranges::find(logits, largest);
  take(BestToken{largest, first + static_cast<TokenId>(found - logits.begin()), false});
}

void BestToken::take(const BestToken& other) {
  damaged = damaged || other.damaged;
  if (other.id < 0) return;
  if (id < 0 || other.logit > logit || (other.logit == logit && other.id < id)) {
    logit = other.logit;
    id = other.id;
  }
}

}  // namespace aotllm
