#include "aotllm/sampler.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "aotllm/errors.h"
#include "sampling/nothing_allowed.h"
#include "sampling/philox.h"
#include "sampling/token_mask.h"

namespace aotllm {
namespace {

/// Index of the largest logit, the lowest among equals. Throws where a logit is NaN or +inf, or all are -inf; the
/// latter is the fault of the request if its logits are `constrained`.
std::size_t checked_argmax(std::span<const float> logits, bool constrained = false) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  std::size_t best = 0;
  for (std::size_t i = 0; i < logits.size(); ++i) {
    if (!(logits[i] < kInfinity)) {  // true of NaN too
      throw Error(ErrorKind::kInternal, "the logit of token " + std::to_string(i) + " is " +
                                            (std::isnan(logits[i]) ? "NaN" : "+inf") +
                                            "; the engine or its weights are damaged");
    }
    if (logits[i] > logits[best]) {
      best = i;
    }
  }
  if (logits.empty() || logits[best] == -kInfinity) {
    throw nothing_allowed(constrained);
  }
  return best;
}

}  // namespace

Sampler::Sampler(std::int32_t vocab_size) {
  candidates_.reserve(static_cast<std::size_t>(vocab_size));
  processed_.reserve(static_cast<std::size_t>(vocab_size));
}

TokenId Sampler::sample(std::span<const float> logits, const SamplingContext& context) {
  const bool constrained = !context.processors.empty() || !context.mask.empty();
  if (constrained) {
    logits = process(logits, context);
  }
  const std::size_t best = checked_argmax(logits, constrained);
  const SamplingParams& params = context.params;
  if (params.temperature == 0.0) {
    return static_cast<TokenId>(best);
  }
  collect_candidates(logits, logits[best], params);
  if (params.top_k > 0) {
    keep_top_k(params.top_k);
  }
  if (params.top_p < 1.0) {
    keep_top_p(params.top_p);
  }
  if (params.typical_p < 1.0) {
    keep_typical(params.typical_p);
  }
  return draw(uniform_draw(context.seed, static_cast<std::uint32_t>(context.tokens.size()), context.sequence_index));
}

/// A copy of `logits` after the mask, the constraints and the penalties.
std::span<const float> Sampler::process(std::span<const float> logits, const SamplingContext& context) {
  processed_.assign(logits.begin(), logits.end());
  if (!context.mask.empty()) {
    apply_token_mask(processed_, context.mask);
  }
  for (const auto* stage : {&context.processors.constraints, &context.processors.penalties}) {
    for (const auto& processor : *stage) {
      processor->apply(processed_, context.tokens, context.num_prompt_tokens);
    }
  }
  return processed_;
}

bool Sampler::more_likely(const Candidate& a, const Candidate& b) {
  return a.logit != b.logit ? a.logit > b.logit : a.id < b.id;
}

/// Candidates in order of ids: those that min_p leaves, and that a draw can hit at all. The tokens left out for the
/// latter have a probability of at most 2^-53 all together, which is the resolution of a draw.
void Sampler::collect_candidates(std::span<const float> logits, float max_logit, const SamplingParams& params) {
  const double unreachable = -53.0 * std::log(2.0) - std::log(static_cast<double>(logits.size()));
  const double lowest = std::max(unreachable, std::log(params.min_p));
  candidates_.clear();
  for (std::size_t i = 0; i < logits.size(); ++i) {
    const double scaled = (static_cast<double>(logits[i]) - max_logit) / params.temperature;
    if (scaled >= lowest) {
      candidates_.push_back({logits[i], static_cast<TokenId>(i), std::exp(scaled)});
    }
  }
}

/// Leaves the k most likely, most likely first.
void Sampler::keep_top_k(std::int32_t k) {
  const auto count = std::min(candidates_.size(), static_cast<std::size_t>(k));
  std::partial_sort(candidates_.begin(), candidates_.begin() + static_cast<std::ptrdiff_t>(count), candidates_.end(),
                    more_likely);
  candidates_.resize(count);
}

/// Leaves the smallest set of most likely candidates that holds `top_p` of their probability, most likely first.
void Sampler::keep_top_p(double top_p) {
  keep_mass(top_p, more_likely);
}

/// Leaves the smallest set that holds `typical_p` of the probability, of the candidates whose information -log p is
/// nearest to its mean, the entropy. As -log p is log Z - logit / temperature, that distance is the one of the logit
/// from the mean logit, up to the factor 1 / temperature.
void Sampler::keep_typical(double typical_p) {
  double total = 0.0;
  double sum = 0.0;
  for (const Candidate& candidate : candidates_) {
    total += candidate.weight;
    sum += candidate.weight * candidate.logit;
  }
  const double mean = sum / total;
  keep_mass(typical_p, [mean](const Candidate& a, const Candidate& b) {
    const double distance_a = std::abs(a.logit - mean);
    const double distance_b = std::abs(b.logit - mean);
    return distance_a != distance_b ? distance_a < distance_b : more_likely(a, b);
  });
}

/// Leaves the first candidates in the order `before`, as few as hold `mass` of the probability, in that order.
template <typename Before>
void Sampler::keep_mass(double mass, Before before) {
  double total = 0.0;
  for (const Candidate& candidate : candidates_) {
    total += candidate.weight;
  }
  // Nearly always a few tokens suffice: sort no more than needed, in portions that grow.
  double kept = 0.0;
  std::size_t sorted = 0;
  for (std::size_t portion = 64; sorted < candidates_.size(); portion *= 4) {
    const std::size_t end = std::min(sorted + portion, candidates_.size());
    std::partial_sort(candidates_.begin() + static_cast<std::ptrdiff_t>(sorted),
                      candidates_.begin() + static_cast<std::ptrdiff_t>(end), candidates_.end(), before);
    for (; sorted < end; ++sorted) {
      kept += candidates_[sorted].weight;
      if (kept >= mass * total) {
        candidates_.resize(sorted + 1);
        return;
      }
    }
  }
}

/// The candidate at `uniform` (in [0, 1)) of the cumulative distribution, in the candidates' order.
TokenId Sampler::draw(double uniform) const {
  double total = 0.0;
  for (const Candidate& candidate : candidates_) {
    total += candidate.weight;
  }
  const double target = uniform * total;
  double cumulative = 0.0;
  for (const Candidate& candidate : candidates_) {
    cumulative += candidate.weight;
    if (cumulative > target) {
      return candidate.id;
    }
  }
  return candidates_.back().id;  // uniform · total rounded up to total
}

TokenLogprobs Sampler::logprobs(std::span<const float> logits, TokenId token, std::int32_t num_top) {
  const double max_logit = logits[checked_argmax(logits)];
  double sum = 0.0;
  for (const float logit : logits) {
    sum += std::exp(static_cast<double>(logit) - max_logit);
  }
  // In this order: the maximum added to the logarithm first would swallow it where logits are huge.
  const double log_sum = std::log(sum);
  const auto logprob = [&](float logit) { return (static_cast<double>(logit) - max_logit) - log_sum; };

  TokenLogprobs result;
  result.token_id = token;
  result.logprob = logprob(logits[static_cast<std::size_t>(token)]);
  if (num_top > 0) {
    candidates_.clear();
    for (std::size_t i = 0; i < logits.size(); ++i) {
      candidates_.push_back({logits[i], static_cast<TokenId>(i), 0.0});
    }
    keep_top_k(num_top);
    for (const Candidate& candidate : candidates_) {
      result.top.emplace_back(candidate.id, logprob(candidate.logit));
    }
  }
  return result;
}

}  // namespace aotllm
