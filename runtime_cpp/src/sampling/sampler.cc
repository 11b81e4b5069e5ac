#include "aotllm/sampler.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "aotllm/errors.h"
#include "sampling/best_token.h"
#include "sampling/nothing_allowed.h"
#include "sampling/philox.h"
#include "sampling/row_sampling.h"
#include "sampling/token_mask.h"

namespace aotllm {
namespace {

/// The largest `top_k` for which candidates are picked from the logits one by one: beyond it, to sort them all is as
/// good.
constexpr std::int32_t kMaxPicked = 1024;

/// Least (logit - maximum) / temperature of a candidate: what min_p asks for, or what a draw can hit at all.
double lowest_scaled(std::size_t vocab_size, const RowSampling& row) {
  const double unreachable = -53.0 * std::log(2.0) - std::log(static_cast<double>(vocab_size));
  return std::max(unreachable, std::log(static_cast<double>(row.min_p)));
}

/// What is wrong with a row that gave no token: `constrained` logits that are all -inf are the fault of the request.
[[noreturn]] void refuse(std::span<const float> logits, TokenId reason, bool constrained) {
  if (reason == kNothingAllowed) throw nothing_allowed(constrained);
  const auto damaged =
      std::ranges::find_if(logits, [](float logit) { return !(logit < std::numeric_limits<float>::infinity()); });
  throw Error(ErrorKind::kInternal, "the logit of token " + std::to_string(damaged - logits.begin()) + " is " +
                                        (std::isnan(*damaged) ? "NaN" : "+inf") +
                                        "; the engine or its weights are damaged");
}

/// Index of the largest logit, the lowest among equals. Throws where a logit is NaN or +inf, or all are -inf.
std::size_t checked_argmax(std::span<const float> logits) {
  BestToken best;
  best.take(logits, 0);
  if (best.token() < 0) refuse(logits, best.token(), false);
  return static_cast<std::size_t>(best.id);
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
  RowSampling row = row_sampling(context.params);
  row.seed = context.seed;
  row.position = static_cast<std::uint32_t>(context.tokens.size());
  row.sequence_index = context.sequence_index;
  const TokenId token = choose(logits, row, context.params.typical_p);
  if (token < 0) refuse(logits, token, constrained);
  return token;
}

TokenId Sampler::choose(std::span<const float> logits, const RowSampling& row, double typical_p) {
  BestToken best;
  best.take(logits, 0);
  if (best.token() < 0 || row.temperature == 0.0F) return best.token();
  if (row.top_k > 0 && row.top_k <= kMaxPicked) {
    collect_top_k(logits, best.logit, row);
  } else {
    collect_candidates(logits, best.logit, row);
    if (row.top_k > 0) keep_top_k(row.top_k);
  }
  if (row.top_p < 1.0F) {
    keep_top_p(row.top_p);
  }
  if (typical_p < 1.0) {
    keep_typical(typical_p);
  }
  return draw(uniform_draw(row.seed, row.position, row.sequence_index));
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
void Sampler::collect_candidates(std::span<const float> logits, float max_logit, const RowSampling& row) {
  const double lowest = lowest_scaled(logits.size(), row);
  candidates_.clear();
  for (std::size_t i = 0; i < logits.size(); ++i) {
    const double scaled = (static_cast<double>(logits[i]) - max_logit) / row.temperature;
    if (scaled >= lowest) {
      candidates_.push_back({logits[i], static_cast<TokenId>(i), std::exp(scaled)});
    }
  }
}

/// The k most likely of those candidates, most likely first: the same that `collect_candidates` and `keep_top_k` leave,
/// as less likely ones cannot push out others. Exponentials are taken of these alone.
void Sampler::collect_top_k(std::span<const float> logits, float max_logit, const RowSampling& row) {
  const auto k = static_cast<std::size_t>(row.top_k);
  candidates_.clear();  // a heap, the least likely on top
  for (std::size_t i = 0; i < logits.size(); ++i) {
    // Ids ascend: among equals, those that are here are the more likely ones.
    if (candidates_.size() == k && !(logits[i] > candidates_.front().logit)) continue;
    if (candidates_.size() == k) {
      std::ranges::pop_heap(candidates_, more_likely);
      candidates_.pop_back();
    }
    candidates_.push_back({logits[i], static_cast<TokenId>(i), 0.0});
    std::ranges::push_heap(candidates_, more_likely);
  }
  std::ranges::sort_heap(candidates_, more_likely);
  const double lowest = lowest_scaled(logits.size(), row);
  std::size_t count = 0;
  for (Candidate& candidate : candidates_) {
    const double scaled = (static_cast<double>(candidate.logit) - max_logit) / row.temperature;
    if (!(scaled >= lowest)) break;  // nor do those that follow
    candidate.weight = std::exp(scaled);
    ++count;
  }
  candidates_.resize(count);
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
