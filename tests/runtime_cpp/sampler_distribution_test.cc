/// Draws of the sampler against distributions that are computed by definition.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "aotllm/sampler.h"
#include "sampling/processors.h"

namespace aotllm {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

/// One of the draws of `params`, after the text `tokens` of which the first is the prompt.
TokenId sample(const std::vector<float>& logits, const SamplingParams& params, std::uint64_t seed,
               const std::vector<TokenId>& tokens = {0}) {
  const auto vocab_size = static_cast<std::int32_t>(logits.size());
  Sampler sampler(vocab_size);
  LogitsProcessors processors = make_processors(params, {}, vocab_size);
  return sampler.sample(
      logits, {.params = params, .processors = processors, .tokens = tokens, .num_prompt_tokens = 1, .seed = seed});
}

/// Zeroes all but the first of `order` that hold `mass` of the probability.
void keep_mass(std::vector<double>& probabilities, const std::vector<std::size_t>& order, double mass) {
  const double total = std::accumulate(probabilities.begin(), probabilities.end(), 0.0);
  double before = 0.0;
  for (const std::size_t i : order) {
    const double p = probabilities[i];
    probabilities[i] = before >= mass * total - 1e-12 ? 0.0 : p;
    before += p;
  }
}

void normalize(std::vector<double>& probabilities) {
  const double sum = std::accumulate(probabilities.begin(), probabilities.end(), 0.0);
  std::for_each(probabilities.begin(), probabilities.end(), [sum](double& p) { p /= sum; });
}

/// Locally typical sampling as it is defined: tokens whose information is nearest to the entropy.
void keep_typical(std::vector<double>& probabilities, std::vector<std::size_t> order, double mass) {
  std::vector<double> information(probabilities.size(), 0.0);
  double entropy = 0.0;
  for (std::size_t i = 0; i < probabilities.size(); ++i) {
    if (probabilities[i] > 0.0) {
      information[i] = -std::log(probabilities[i]);
      entropy += probabilities[i] * information[i];
    }
  }
  std::erase_if(order, [&](std::size_t i) { return probabilities[i] == 0.0; });
  std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) {
    return std::abs(information[a] - entropy) < std::abs(information[b] - entropy);
  });
  keep_mass(probabilities, order, mass);
}

/// What the filters leave, by definition: over a list sorted by probability, ties by id.
std::vector<double> naive_distribution(const std::vector<float>& logits, const SamplingParams& params) {
  std::vector<std::size_t> order(logits.size());
  std::iota(order.begin(), order.end(), 0U);
  std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) { return logits[a] > logits[b]; });
  std::vector<double> probabilities(logits.size());
  for (std::size_t i = 0; i < logits.size(); ++i) {
    probabilities[i] = std::exp((static_cast<double>(logits[i]) - logits[order[0]]) / params.temperature);
  }
  const double threshold = params.min_p * probabilities[order[0]];
  for (double& p : probabilities) {
    p = p >= threshold ? p : 0.0;
  }
  for (std::size_t i = params.top_k > 0 ? static_cast<std::size_t>(params.top_k) : order.size(); i < order.size();
       ++i) {
    probabilities[order[i]] = 0.0;
  }
  normalize(probabilities);
  if (params.top_p < 1.0) {
    keep_mass(probabilities, order, params.top_p);
    normalize(probabilities);
  }
  if (params.typical_p < 1.0) {
    keep_typical(probabilities, order, params.typical_p);
    normalize(probabilities);
  }
  return probabilities;
}

/// Draws with many seeds agree with `expected`: nothing outside its support, and a chi-square statistic below the mean
/// plus six standard deviations. Seeds are fixed, so that the outcome is too. `processed`: the logits after the
/// processors of `params`, where there are any.
void expect_distribution(const std::vector<float>& logits, const SamplingParams& params, const std::string& what,
                         const std::vector<TokenId>& tokens = {0}, const std::vector<float>& processed = {}) {
  constexpr int kDraws = 4000;
  const std::vector<double> expected = naive_distribution(processed.empty() ? logits : processed, params);
  std::vector<int> counts(logits.size(), 0);
  for (int seed = 0; seed < kDraws; ++seed) {
    ++counts[static_cast<std::size_t>(sample(logits, params, static_cast<std::uint64_t>(seed), tokens))];
  }
  double chi_square = 0.0;
  double rare_expected = 0.0;  // classes that expect fewer than five draws are lumped together
  double rare_count = 0.0;
  int degrees = -1;
  const auto add_class = [&](double count, double mean) {
    chi_square += (count - mean) * (count - mean) / mean;
    ++degrees;
  };
  for (std::size_t i = 0; i < logits.size(); ++i) {
    const double mean = expected[i] * kDraws;
    if (expected[i] == 0.0) {
      EXPECT_EQ(counts[i], 0) << what << ": token " << i << " was filtered, but drawn";
    } else if (mean < 5.0) {
      rare_expected += mean;
      rare_count += counts[i];
    } else {
      add_class(counts[i], mean);
    }
  }
  if (rare_expected >= 5.0) {
    add_class(rare_count, rare_expected);
  }
  EXPECT_LE(chi_square, degrees + 6.0 * std::sqrt(2.0 * std::max(degrees, 1))) << what;
}

TEST(Sampler, DrawsFollowTheDefinitionOfEachFilter) {
  const std::vector<float> logits = {1.0F, 0.5F, 2.0F, -1.0F, 2.0F, 0.0F, -kInf, 1.5F};
  struct Case {
    const char* what;
    double temperature;
    std::int32_t top_k;
    double top_p, min_p, typical_p = 1.0;
  };
  const std::vector<Case> cases = {
      {"plain", 1.0, 0, 1.0, 0.0},
      {"hot", 2.0, 0, 1.0, 0.0},
      {"cold", 0.3, -1, 1.0, 0.0},
      {"nearly greedy", 1e-300, 0, 1.0, 0.0},
      {"top_k 1 of a tie", 1.0, 1, 1.0, 0.0},
      {"top_k 3", 1.0, 3, 1.0, 0.0},
      {"top_k of all", 1.0, 100, 1.0, 0.0},
      {"top_p", 1.0, 0, 0.6, 0.0},
      {"tiny top_p", 1.0, 0, 1e-9, 0.0},
      {"min_p", 1.0, 0, 1.0, 0.3},
      {"min_p 1", 1.0, 0, 1.0, 1.0},
      {"typical_p", 1.0, 0, 1.0, 0.0, 0.5},
      {"tiny typical_p", 1.0, 0, 1.0, 0.0, 1e-9},
      {"typical_p of nearly all", 1.0, 0, 1.0, 0.0, 0.999},
      {"hot typical_p", 2.0, 0, 1.0, 0.0, 0.7},
      {"nearly greedy typical_p", 1e-300, 0, 1.0, 0.0, 0.7},
      {"typical_p after top_p", 1.0, 0, 0.8, 0.0, 0.4},
      {"typical_p after top_k", 1.0, 5, 1.0, 0.0, 0.4},
      {"typical_p after min_p", 1.0, 0, 1.0, 0.2, 0.4},
      {"all", 0.8, 4, 0.7, 0.1},
      {"all and typical_p", 1.5, 6, 0.9, 0.05, 0.6},
  };
  for (const Case& c : cases) {
    SamplingParams params;
    params.temperature = c.temperature;
    params.top_k = c.top_k;
    params.top_p = c.top_p;
    params.min_p = c.min_p;
    params.typical_p = c.typical_p;
    expect_distribution(logits, params, c.what);
  }
}

TEST(Sampler, DrawsFollowTheDefinitionUnderRandomParams) {
  std::mt19937 random(3);
  std::uniform_real_distribution<double> unit(0.0, 1.0);
  std::normal_distribution<float> normal(0.0F, 2.0F);
  for (int trial = 0; trial < 100; ++trial) {
    std::vector<float> logits(1 + random() % 30);
    std::generate(logits.begin(), logits.end(), [&] { return std::round(normal(random) * 4.0F) / 4.0F; });  // with ties
    SamplingParams params;
    params.temperature = 0.1 + 1.9 * unit(random);
    params.top_k = static_cast<std::int32_t>(random() % 12);
    params.top_p = random() % 2 == 0 ? 1.0 : 0.05 + 0.9 * unit(random);
    params.min_p = random() % 2 == 0 ? 0.0 : unit(random) * 0.3;
    params.typical_p = random() % 2 == 0 ? 1.0 : 0.05 + 0.9 * unit(random);
    expect_distribution(logits, params, "trial " + std::to_string(trial));
  }
}

// The most likely token of this distribution tells less than its entropy: typical sampling leaves it out.
TEST(Sampler, TypicalPMayLeaveOutTheMostLikelyToken) {
  std::vector<float> logits(20, 0.0F);
  logits[3] = std::log(10.0F);  // a third of the probability
  SamplingParams params;
  params.typical_p = 0.3;
  for (std::uint64_t seed = 0; seed < 300; ++seed) {
    const TokenId token = sample(logits, params, seed);
    ASSERT_NE(token, 3);
    ASSERT_LE(token, 9);  // nine others hold 9 / 29: the lowest ids
  }
}

TEST(Sampler, DrawsFollowTheProcessedLogits) {
  const std::vector<float> logits = {1.0F, 0.5F, 2.0F, -1.0F, 2.0F, 0.0F, -2.0F, 1.5F};
  const std::vector<TokenId> text = {3, 2, 2, 4, 7};  // 3 is the prompt
  SamplingParams params;
  params.temperature = 0.9;
  params.top_k = 6;
  params.top_p = 0.95;
  params.typical_p = 0.9;
  params.min_p = 0.01;
  params.repetition_penalty = 1.25;
  params.presence_penalty = 0.5;
  params.frequency_penalty = 0.25;
  params.logit_bias = {{0, -0.5}, {6, 3.0}};
  params.bad_words = {{4, 7, 1}, {7, 7, 0}};
  const std::vector<float> processed = {0.5F, -kInf, 2.0F / 1.25F - 1.0F, -1.25F, 2.0F / 1.25F - 0.75F,
                                        0.0F, 1.0F,  1.5F / 1.25F - 0.75F};
  expect_distribution(logits, params, "processed", text, processed);
}

TEST(Sampler, TopPCutsWhereTheNucleusEndsInALargeVocabulary) {
  std::vector<float> logits(5000);
  for (std::size_t i = 0; i < logits.size(); ++i) {
    logits[i] = -1e-4F * static_cast<float>((i * 7919) % logits.size());  // nearly flat, in mixed order
  }
  SamplingParams params;
  params.top_p = 0.5;
  const std::vector<double> expected = naive_distribution(logits, params);
  std::set<TokenId> drawn;
  for (std::uint64_t seed = 0; seed < 3000; ++seed) {
    const TokenId token = sample(logits, params, seed);
    ASSERT_GT(expected[static_cast<std::size_t>(token)], 0.0);
    drawn.insert(token);
  }
  EXPECT_GT(drawn.size(), 1000U);
}

}  // namespace
}  // namespace aotllm
