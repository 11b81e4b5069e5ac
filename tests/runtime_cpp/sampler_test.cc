#include "aotllm/sampler.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "aotllm/errors.h"
#include "sampling/philox.h"

namespace aotllm {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

TokenId sample(const std::vector<float>& logits, const SamplingParams& params, std::uint64_t seed = 0,
               std::size_t position = 1) {
  Sampler sampler(static_cast<std::int32_t>(logits.size()));
  LogitsProcessors none;
  const std::vector<TokenId> tokens(position, 0);
  return sampler.sample(logits, {.params = params, .processors = none, .tokens = tokens, .seed = seed});
}

SamplingParams greedy() {
  SamplingParams params;
  params.temperature = 0.0;
  return params;
}

// The published test vectors of Philox4x32-10 (Random123, kat_vectors).
TEST(Philox, MatchesThePublishedVectors) {
  using Four = std::array<std::uint32_t, 4>;
  EXPECT_EQ(philox4x32({0, 0, 0, 0}, {0, 0}), (Four{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(philox4x32({~0U, ~0U, ~0U, ~0U}, {~0U, ~0U}), (Four{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(philox4x32({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
            (Four{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(Philox, DrawsDifferBySeedPositionAndSequence) {
  const std::set<double> draws = {uniform_draw(0, 0, 0), uniform_draw(1, 0, 0),
                                  uniform_draw(std::uint64_t{1} << 32, 0, 0), uniform_draw(0, 1, 0),
                                  uniform_draw(0, 0, 1)};
  EXPECT_EQ(draws.size(), 5U);
  for (const double draw : draws) {
    EXPECT_GE(draw, 0.0);
    EXPECT_LT(draw, 1.0);
  }
}

TEST(Sampler, GreedyTakesTheLargestAndTheLowestIdAmongEquals) {
  EXPECT_EQ(sample({0.0F, 3.0F, -1.0F, 3.0F}, greedy()), 1);
  EXPECT_EQ(sample({-kInf, -kInf, -7.0F}, greedy()), 2);
  EXPECT_EQ(sample({5.0F}, greedy()), 0);
}

/// Ids that the filters leave, by definition: over a list sorted by probability, ties by id.
std::vector<double> naive_distribution(const std::vector<float>& logits, const SamplingParams& params) {
  std::vector<std::size_t> order(logits.size());
  std::iota(order.begin(), order.end(), 0U);
  std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) { return logits[a] > logits[b]; });
  std::vector<double> probabilities(logits.size());
  for (std::size_t i = 0; i < logits.size(); ++i) {
    probabilities[i] = std::exp((static_cast<double>(logits[i]) - logits[order[0]]) / params.temperature);
  }
  const auto normalize = [&] {
    const double sum = std::accumulate(probabilities.begin(), probabilities.end(), 0.0);
    std::for_each(probabilities.begin(), probabilities.end(), [sum](double& p) { p /= sum; });
  };
  const double threshold = params.min_p * probabilities[order[0]];
  for (double& p : probabilities) {
    p = p >= threshold ? p : 0.0;
  }
  for (std::size_t i = params.top_k > 0 ? static_cast<std::size_t>(params.top_k) : order.size(); i < order.size();
       ++i) {
    probabilities[order[i]] = 0.0;
  }
  normalize();
  double mass = 0.0;
  for (const std::size_t i : order) {
    const double p = probabilities[i];
    probabilities[i] = mass >= params.top_p - 1e-12 ? 0.0 : p;
    mass += p;
  }
  normalize();
  return probabilities;
}

/// Draws with many seeds agree with `expected`: nothing outside its support, and a chi-square statistic below the mean
/// plus six standard deviations. Seeds are fixed, so that the outcome is too.
void expect_distribution(const std::vector<float>& logits, const SamplingParams& params, const std::string& what) {
  constexpr int kDraws = 4000;
  const std::vector<double> expected = naive_distribution(logits, params);
  std::vector<int> counts(logits.size(), 0);
  for (int seed = 0; seed < kDraws; ++seed) {
    ++counts[static_cast<std::size_t>(sample(logits, params, static_cast<std::uint64_t>(seed)))];
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
    double top_p, min_p;
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
      {"all", 0.8, 4, 0.7, 0.1},
  };
  for (const Case& c : cases) {
    SamplingParams params;
    params.temperature = c.temperature;
    params.top_k = c.top_k;
    params.top_p = c.top_p;
    params.min_p = c.min_p;
    expect_distribution(logits, params, c.what);
  }
}

TEST(Sampler, DrawsFollowTheDefinitionUnderRandomParams) {
  std::mt19937 random(3);
  std::uniform_real_distribution<double> unit(0.0, 1.0);
  std::normal_distribution<float> normal(0.0F, 2.0F);
  for (int trial = 0; trial < 60; ++trial) {
    std::vector<float> logits(1 + random() % 30);
    std::generate(logits.begin(), logits.end(), [&] { return std::round(normal(random) * 4.0F) / 4.0F; });  // with ties
    SamplingParams params;
    params.temperature = 0.1 + 1.9 * unit(random);
    params.top_k = static_cast<std::int32_t>(random() % 12);
    params.top_p = random() % 2 == 0 ? 1.0 : 0.05 + 0.9 * unit(random);
    params.min_p = random() % 2 == 0 ? 0.0 : unit(random) * 0.3;
    expect_distribution(logits, params, "trial " + std::to_string(trial));
  }
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

TEST(Sampler, ADrawDependsOnSeedAndPositionOnly) {
  const std::vector<float> logits(1000, 0.0F);
  const std::vector<float> others = {9.0F, 1.0F, 3.0F};
  SamplingParams params;
  Sampler sampler(1000);
  LogitsProcessors none;
  const std::vector<TokenId> tokens(17, 4);
  const SamplingContext context = {.params = params, .processors = none, .tokens = tokens, .seed = 42};
  const TokenId alone = sampler.sample(logits, context);
  for (std::uint64_t mate = 0; mate < 20; ++mate) {
    sampler.sample(others, {.params = params, .processors = none, .tokens = tokens, .seed = mate});
    EXPECT_EQ(sampler.sample(logits, context), alone);
  }
  std::set<TokenId> by_position;
  for (std::size_t position = 1; position <= 20; ++position) {
    by_position.insert(sample(logits, params, 42, position));
  }
  EXPECT_GT(by_position.size(), 15U);
}

TEST(Sampler, RefusesLogitsThatAreNoNumbers) {
  const std::vector<std::pair<std::vector<float>, std::string>> cases = {{{0.0F, kNan, 1.0F}, "token 1 is NaN"},
                                                                         {{kNan}, "token 0 is NaN"},
                                                                         {{0.0F, 1.0F, kInf}, "token 2 is +inf"},
                                                                         {{-kInf, -kInf}, "no token is allowed"}};
  for (const double temperature : {0.0, 1.0}) {
    for (const auto& [logits, text] : cases) {
      SamplingParams params;
      params.temperature = temperature;
      try {
        sample(logits, params);
        ADD_FAILURE() << text;
      } catch (const Error& e) {
        EXPECT_EQ(e.kind(), ErrorKind::kInternal);
        EXPECT_NE(std::string(e.what()).find(text), std::string::npos) << e.what();
      }
    }
  }
}

/// Multiplies a logit by `factor` and adds `bias`, so that the order of two of them shows.
class Affine final : public LogitsProcessor {
 public:
  Affine(std::size_t token, float factor, float bias) : token_(token), factor_(factor), bias_(bias) {}
  void apply(std::span<float> logits, std::span<const TokenId> tokens, std::int32_t num_prompt_tokens) override {
    EXPECT_EQ(tokens.size(), 3U);
    EXPECT_EQ(num_prompt_tokens, 2);
    logits[token_] = logits[token_] * factor_ + bias_;
  }

 private:
  std::size_t token_;
  float factor_, bias_;
};

TEST(Sampler, ConstraintsComeBeforePenaltiesAndRawLogitsStay) {
  const std::vector<float> logits = {1.0F, 5.0F};
  LogitsProcessors processors;
  processors.penalties.push_back(std::make_unique<Affine>(0, 3.0F, 0.0F));
  processors.constraints.push_back(std::make_unique<Affine>(0, 1.0F, 1.0F));
  const std::vector<TokenId> tokens = {0, 0, 1};
  const SamplingParams params = greedy();
  Sampler sampler(2);
  // (1 + 1) · 3 = 6 beats 5; 1 · 3 + 1 = 4 would not.
  EXPECT_EQ(
      sampler.sample(logits, {.params = params, .processors = processors, .tokens = tokens, .num_prompt_tokens = 2}),
      0);
  EXPECT_EQ(logits, (std::vector<float>{1.0F, 5.0F}));
}

TEST(Sampler, LogprobsAreThoseOfTheRawLogits) {
  const std::vector<float> logits = {1.0F, 3.0F, -kInf, 3.0F, 2.0F};
  Sampler sampler(5);
  const double log_sum = std::log(std::exp(1.0) + 2 * std::exp(3.0) + std::exp(2.0));
  const TokenLogprobs logprobs = sampler.logprobs(logits, 4, 3);
  EXPECT_EQ(logprobs.token_id, 4);
  EXPECT_NEAR(logprobs.logprob, 2.0 - log_sum, 1e-12);
  ASSERT_EQ(logprobs.top.size(), 3U);
  const std::vector<TokenId> most_likely = {1, 3, 4};
  for (std::size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(logprobs.top[i].first, most_likely[i]);
    EXPECT_NEAR(logprobs.top[i].second, (i < 2 ? 3.0 : 2.0) - log_sum, 1e-12);
  }
  EXPECT_TRUE(sampler.logprobs(logits, 0, 0).top.empty());
  EXPECT_EQ(sampler.logprobs(logits, 0, 5).top.size(), 5U);
}

TEST(Sampler, LogprobsOfHugeLogitsDoNotOverflow) {
  const std::vector<float> logits = {3e38F, 3e38F, -3e38F};
  Sampler sampler(3);
  EXPECT_NEAR(sampler.logprobs(logits, 0, 0).logprob, -std::log(2.0), 1e-12);
}

TEST(SamplingParams, NamesTheFieldThatIsOutOfRange) {
  struct Case {
    const char* param;
    void (*set)(SamplingParams&);
  };
  const std::vector<Case> cases = {
      {"max_tokens", [](SamplingParams& p) { p.max_tokens = 0; }},
      {"max_tokens", [](SamplingParams& p) { p.max_tokens = -1; }},
      {"temperature", [](SamplingParams& p) { p.temperature = -0.1; }},
      {"temperature", [](SamplingParams& p) { p.temperature = 2.1; }},
      {"temperature", [](SamplingParams& p) { p.temperature = std::nan(""); }},
      {"temperature", [](SamplingParams& p) { p.temperature = HUGE_VAL; }},
      {"top_k", [](SamplingParams& p) { p.top_k = -2; }},
      {"top_p", [](SamplingParams& p) { p.top_p = 0.0; }},
      {"top_p", [](SamplingParams& p) { p.top_p = 1.1; }},
      {"top_p", [](SamplingParams& p) { p.top_p = std::nan(""); }},
      {"min_p", [](SamplingParams& p) { p.min_p = -0.1; }},
      {"min_p", [](SamplingParams& p) { p.min_p = 1.1; }},
      {"min_p", [](SamplingParams& p) { p.min_p = std::nan(""); }},
      {"stop_token_ids", [](SamplingParams& p) { p.stop_token_ids = {3, 10}; }},
      {"stop_token_ids", [](SamplingParams& p) { p.stop_token_ids = {-1}; }},
  };
  for (const Case& c : cases) {
    SamplingParams params;
    c.set(params);
    try {
      validate(params, 10);
      ADD_FAILURE() << c.param;
    } catch (const Error& e) {
      EXPECT_EQ(e.kind(), ErrorKind::kInvalidRequest);
      EXPECT_EQ(e.param(), c.param);
      EXPECT_EQ(std::string(e.what()).rfind(c.param, 0), 0U) << e.what();
    }
  }
}

TEST(SamplingParams, TakesTheEndsOfTheRanges) {
  SamplingParams params;
  validate(params, 10);
  params.max_tokens = 1;
  params.temperature = 2.0;
  params.top_k = -1;
  params.top_p = 1.0;
  params.min_p = 1.0;
  params.stop_token_ids = {0, 9};
  validate(params, 10);
  params.temperature = 0.0;
  params.min_p = 0.0;
  params.top_k = std::numeric_limits<std::int32_t>::max();
  validate(params, 10);
}

}  // namespace
}  // namespace aotllm
