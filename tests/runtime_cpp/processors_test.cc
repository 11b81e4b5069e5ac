#include "sampling/processors.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

#include "sampling/token_counts.h"
#include "sampling_support.h"

namespace aotllm {
namespace {

using testing::apply;
using testing::kInf;
using testing::processed;

constexpr std::int32_t kVocabSize = 12;

TEST(Processors, NoneForWhatIsOff) {
  SamplingParams params;
  params.temperature = 0.7;
  params.top_k = 5;
  params.typical_p = 0.5;
  params.stop_token_ids = {3};
  EXPECT_TRUE(make_processors(params, std::vector<TokenId>{2}, kVocabSize).empty());
}

TEST(LogitBias, IsAdded) {
  SamplingParams params;
  params.logit_bias = {{0, -100.0}, {2, 1.5}, {3, 100.0}};
  EXPECT_EQ(processed(params, {1.0F, 1.0F, 1.0F, -kInf}, {0}, 1), (std::vector<float>{-99.0F, 1.0F, 2.5F, -kInf}));
}

TEST(Processors, ABanHoldsAgainstAnyBiasAndPenalty) {
  SamplingParams params;
  params.allowed_token_ids = {0, 1};
  params.bad_words = {{1}};
  params.logit_bias = {{1, 100.0}, {2, 100.0}};
  params.presence_penalty = -2.0;
  params.repetition_penalty = 1e-9;
  EXPECT_EQ(processed(params, {0.0F, 5.0F, 5.0F}, {0, 1, 2}, 1), (std::vector<float>{0.0F, -kInf, -kInf}));
}

SamplingParams everything(std::mt19937& random) {
  const auto token = [&] { return static_cast<TokenId>(random() % kVocabSize); };
  SamplingParams params;
  params.repetition_penalty = 0.5 + 0.25 * static_cast<double>(random() % 8);
  params.presence_penalty = 0.5 * static_cast<double>(random() % 5) - 1.0;
  params.frequency_penalty = 0.25 * static_cast<double>(random() % 5) - 0.5;
  params.no_repeat_ngram_size = static_cast<std::int32_t>(random() % 4);
  params.logit_bias = {{token(), 1.5}, {token(), -2.0}};
  params.bad_words = {{token(), token()}, {token(), token(), token()}};
  params.min_tokens = static_cast<std::int32_t>(random() % 6);
  return params;
}

// Drafts are taken back, preempted requests start over, and any text may be asked about again.
TEST(Processors, WhatWasAskedBeforeDoesNotMatter) {
  std::mt19937 random(11);
  const std::vector<TokenId> eos = {2};
  const std::vector<float> logits = {1, -1, 2, -2, 3, -3, 4, -4, 5, -5, 6, -6};
  for (int trial = 0; trial < 100; ++trial) {
    const SamplingParams params = everything(random);
    LogitsProcessors with_memory = make_processors(params, eos, kVocabSize);
    std::vector<TokenId> tokens(1 + random() % 5, 0);
    auto num_prompt_tokens = static_cast<std::int32_t>(tokens.size());
    for (int call = 0; call < 60; ++call) {
      switch (random() % 8) {
        case 0:  // some are taken back
          tokens.resize(std::max<std::size_t>(static_cast<std::size_t>(num_prompt_tokens), tokens.size() / 2));
          break;
        case 1:  // another token in the middle
          tokens[random() % tokens.size()] = static_cast<TokenId>(random() % kVocabSize);
          break;
        case 2:  // the same text again
          break;
        case 3:  // several at once
          tokens.insert(tokens.end(), 3, static_cast<TokenId>(random() % kVocabSize));
          break;
        case 4:
          num_prompt_tokens = 1 + static_cast<std::int32_t>(random() % tokens.size());
          break;
        default:
          tokens.push_back(static_cast<TokenId>(random() % kVocabSize));
      }
      ASSERT_EQ(apply(with_memory, logits, tokens, num_prompt_tokens),
                processed(params, logits, tokens, num_prompt_tokens, eos))
          << "trial " << trial << ", call " << call;
    }
  }
}

TEST(TokenCounts, AreThoseOfTheLatestText) {
  std::mt19937 random(12);
  TokenCounts counts;
  std::vector<TokenId> text;
  for (int call = 0; call < 500; ++call) {
    if (random() % 3 == 0) {
      text.resize(text.size() - std::min<std::size_t>(text.size(), random() % 6));
    }
    text.push_back(static_cast<TokenId>(random() % 7));
    const auto num_prompt_tokens = static_cast<std::int32_t>(std::min<std::size_t>(text.size(), 4));
    counts.follow(text, num_prompt_tokens);
    ASSERT_LE(counts.entries().size(), 7U);
    std::ptrdiff_t total = 0;
    for (const TokenCounts::Entry& entry : counts.entries()) {
      const auto prompt_end = text.begin() + num_prompt_tokens;
      ASSERT_EQ(entry.in_prompt, std::count(text.begin(), prompt_end, entry.token));
      ASSERT_EQ(entry.in_output, std::count(prompt_end, text.end(), entry.token));
      total += entry.in_prompt + entry.in_output;
    }
    ASSERT_EQ(total, static_cast<std::ptrdiff_t>(text.size()));
  }
}

}  // namespace
}  // namespace aotllm
