/// What forbids tokens: allowed_token_ids, bad_words, no_repeat_ngram_size, min_tokens, masks.

#include <gtest/gtest.h>

#include <random>
#include <set>
#include <vector>

#include "aotllm/errors.h"
#include "sampling/token_mask.h"
#include "sampling_support.h"

namespace aotllm {
namespace {

using testing::banned;
using testing::kInf;
using Ids = std::set<TokenId>;
using Text = std::vector<TokenId>;

TEST(AllowedTokens, ForbidsTheOthers) {
  SamplingParams params;
  params.allowed_token_ids = {2, 0, 2};
  EXPECT_EQ(banned(params, 4, {1}, 1), (Ids{1, 3}));
  for (const std::int32_t vocab_size : {31, 32, 33, 64, 65}) {  // around the words of the mask
    params.allowed_token_ids = {vocab_size - 1};
    const Ids ids = banned(params, vocab_size, {1}, 1);
    EXPECT_EQ(ids.size(), static_cast<std::size_t>(vocab_size - 1));
    EXPECT_FALSE(ids.contains(vocab_size - 1));
  }
}

TEST(BadWords, ForbidTheLastTokenWhereTheOthersArePrefixed) {
  struct Case {
    const char* what;
    std::vector<Text> words;
    Text text;
    Ids expected;
  };
  const std::vector<Case> cases = {
      {"one token: always", {{3}}, {1}, {3}},
      {"the start is there", {{1, 2, 3}}, {0, 1, 2}, {3}},
      {"the start is not at the end", {{1, 2, 3}}, {1, 2, 0}, {}},
      {"half of the start", {{1, 2, 3}}, {0, 1}, {}},
      {"the text is the start", {{1, 2, 3}}, {1, 2}, {3}},
      {"longer than the text", {{1, 2, 3}}, {2}, {}},
      {"of a repeated token", {{1, 1, 1}}, {0, 1, 1, 1}, {1}},
      {"several with one start", {{1, 2}, {1, 3}, {0, 1, 2}}, {0, 1}, {2, 3}},
  };
  for (const Case& c : cases) {
    SamplingParams params;
    params.bad_words = c.words;
    EXPECT_EQ(banned(params, 5, c.text, 1), c.expected) << c.what;
  }
}

TEST(NoRepeatNgram, LiteralTable) {
  struct Case {
    std::int32_t size;
    Text text;
    Ids expected;
  };
  const std::vector<Case> cases = {{1, {2, 4, 2}, {2, 4}},
                                   {2, {1, 2, 1}, {2}},
                                   {2, {1, 2, 1, 3, 1}, {2, 3}},
                                   {2, {1, 2, 3}, {}},
                                   {2, {1}, {}},
                                   {2, {1, 1}, {1}},
                                   {3, {1, 2, 3, 1, 2}, {3}},
                                   {3, {1, 2, 3, 2, 1}, {}},
                                   {3, {1, 1, 1}, {1}},
                                   {3, {1, 2}, {}},
                                   {4, {1, 2, 3, 4, 1, 2}, {}},
                                   {4, {1, 2, 3, 4, 1, 2, 3}, {4}},
                                   {2147483647, {1, 1, 1, 1, 1}, {}}};
  for (const Case& c : cases) {
    SamplingParams params;
    params.no_repeat_ngram_size = c.size;
    EXPECT_EQ(banned(params, 5, c.text, 1), c.expected) << c.size << " on a text of " << c.text.size();
  }
}

TEST(NoRepeatNgram, ATextThatObeysItHasNoNgramTwice) {
  std::mt19937 random(5);
  for (const std::int32_t size : {1, 2, 3}) {
    SamplingParams params;
    params.no_repeat_ngram_size = size;
    Text text = {0};
    for (int i = 0; i < 40; ++i) {
      const Ids forbidden = banned(params, 4, text, 1);
      Ids allowed = {0, 1, 2, 3};
      for (const TokenId id : forbidden) {
        allowed.erase(id);
      }
      if (allowed.empty()) {
        break;
      }
      text.push_back(*std::next(allowed.begin(), static_cast<std::ptrdiff_t>(random() % allowed.size())));
    }
    std::set<Text> ngrams;
    for (auto end = text.begin() + size; end <= text.end(); ++end) {
      EXPECT_TRUE(ngrams.emplace(end - size, end).second) << "size " << size;
    }
    EXPECT_GE(text.size(), 4U);
  }
}

TEST(MinTokens, ForbidsEndsUntilEnoughWereGenerated) {
  const std::vector<TokenId> eos = {3, 9, -1};  // the model has no 9
  SamplingParams params;
  params.min_tokens = 2;
  params.stop_token_ids = {1};
  EXPECT_EQ(banned(params, 5, {0, 0}, 2, eos), (Ids{1, 3}));
  EXPECT_EQ(banned(params, 5, {0, 0, 0}, 2, eos), (Ids{1, 3}));
  EXPECT_EQ(banned(params, 5, {0, 0, 0, 0}, 2, eos), Ids{});
  EXPECT_EQ(banned(params, 5, {0, 0, 0, 0, 0}, 2, eos), Ids{});
}

TEST(TokenMask, BitsAreTokens) {
  std::mt19937 random(9);
  for (const std::size_t vocab_size : {1U, 31U, 32U, 33U, 100U}) {
    std::vector<std::uint32_t> mask((vocab_size + 31) / 32);
    for (std::uint32_t& word : mask) {
      word = random() % 4 == 0 ? 0xFFFFFFFF : static_cast<std::uint32_t>(random());
    }
    std::vector<float> logits(vocab_size, 1.0F);
    apply_token_mask(logits, mask);
    for (std::size_t i = 0; i < vocab_size; ++i) {
      EXPECT_EQ(logits[i], (mask[i / 32] >> (i % 32) & 1U) != 0 ? 1.0F : -kInf) << i << " of " << vocab_size;
    }
  }
}

TEST(TokenMask, RefusesAnotherSize) {
  std::vector<float> logits(33, 1.0F);
  for (const std::size_t words : {1U, 3U}) {
    EXPECT_THROW(apply_token_mask(logits, std::vector<std::uint32_t>(words, 0)), Error);
  }
  EXPECT_EQ(logits, std::vector<float>(33, 1.0F));
}

}  // namespace
}  // namespace aotllm
