#include "aotllm/sampler.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <memory>
#include <set>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "aotllm/errors.h"

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

TEST(Sampler, GreedyTakesTheLargestAndTheLowestIdAmongEquals) {
  EXPECT_EQ(sample({0.0F, 3.0F, -1.0F, 3.0F}, greedy()), 1);
  EXPECT_EQ(sample({-kInf, -kInf, -7.0F}, greedy()), 2);
  EXPECT_EQ(sample({5.0F}, greedy()), 0);
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

TEST(Sampler, AMaskRulesOutTokensBeforeAllElse) {
  const std::vector<float> logits = {1.0F, 5.0F, 3.0F};
  const std::vector<TokenId> tokens = {0};
  const SamplingParams params = greedy();
  LogitsProcessors none;
  Sampler sampler(3);
  const auto masked = [&](std::vector<std::uint32_t> mask) {
    return sampler.sample(logits, {.params = params, .processors = none, .tokens = tokens, .mask = mask});
  };
  EXPECT_EQ(masked({}), 1);
  EXPECT_EQ(masked({0b101}), 2);
  EXPECT_EQ(masked({0b001}), 0);
  EXPECT_EQ(masked({0xFFFFFFFF}), 1);
}

TEST(Sampler, SaysWhoseFaultItIsThatNoTokenIsLeft) {
  const std::vector<TokenId> tokens = {0};
  const std::vector<std::uint32_t> nothing = {0};
  LogitsProcessors none;
  Sampler sampler(2);
  const auto kind = [&](std::vector<float> logits, std::span<const std::uint32_t> mask) {
    const SamplingParams params = greedy();
    try {
      sampler.sample(logits, {.params = params, .processors = none, .tokens = tokens, .mask = mask});
    } catch (const Error& e) {
      return e.kind();
    }
    throw std::logic_error("a token was drawn");
  };
  EXPECT_EQ(kind({0.0F, 1.0F}, nothing), ErrorKind::kInvalidRequest);
  EXPECT_EQ(kind({-kInf, -kInf}, {}), ErrorKind::kInternal);
  EXPECT_EQ(kind({0.0F, kNan}, std::vector<std::uint32_t>{3}), ErrorKind::kInternal);
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

}  // namespace
}  // namespace aotllm
