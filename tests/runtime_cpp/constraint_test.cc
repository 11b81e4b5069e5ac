#include "aotllm/constraint.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "aotllm/errors.h"
#include "batch_fixture.h"
#include "constraint/byte_pair_tokenizer.h"
#include "constraint/grammar_state.h"

namespace aotllm {
namespace {

using testing::expected_output;
using testing::small_shape;

constexpr TokenId kEos = 2;

/// Allows, at each place of a text, one of a few tokens; after the last place it ends.
class Places final : public Constraint {
 public:
  enum class End { kByItself, kByEndToken };

  explicit Places(std::vector<std::set<TokenId>> places, End end = End::kByItself)
      : places_(std::move(places)), end_(end) {}

  void fill_mask(std::span<std::uint32_t> mask) override {
    ASSERT_EQ(mask.size(), 2U);  // 37 tokens
    std::fill(mask.begin(), mask.end(), 0U);
    for (const TokenId token : at_ < places_.size() ? places_[at_] : std::set{kEos}) {
      mask[static_cast<std::size_t>(token) / 32] |= std::uint32_t{1} << token % 32;
    }
  }

  void accept(TokenId token) override {
    if (at_ >= places_.size() || !places_[at_].contains(token)) {
      throw Error(ErrorKind::kInternal, "not allowed");
    }
    ++at_;
  }

  std::vector<TokenId> take_forced(std::int32_t) override { return {}; }
  bool finished() const override { return end_ == End::kByItself && at_ == places_.size(); }
  std::unique_ptr<Constraint> clone() const override { return std::make_unique<Places>(*this); }

 private:
  std::vector<std::set<TokenId>> places_;
  End end_;
  std::size_t at_ = 0;
};

/// Fails as `fill_mask` or `accept` of a grammar may.
class Failing final : public Constraint {
 public:
  explicit Failing(bool in_accept) : in_accept_(in_accept) {}
  void fill_mask(std::span<std::uint32_t> mask) override {
    if (!in_accept_) {
      throw Error(ErrorKind::kInvalidRequest, "too complex", "guided_regex");
    }
    std::fill(mask.begin(), mask.end(), ~0U);
  }
  void accept(TokenId) override { throw Error(ErrorKind::kInternal, "lost"); }
  std::vector<TokenId> take_forced(std::int32_t) override { return {}; }
  bool finished() const override { return false; }
  std::unique_ptr<Constraint> clone() const override { return std::make_unique<Failing>(*this); }

 private:
  bool in_accept_;
};

Request request(std::vector<TokenId> prompt, std::shared_ptr<const Constraint> constraint = nullptr) {
  Request request;
  request.prompt_token_ids = std::move(prompt);
  request.sampling.max_tokens = 8;
  request.sampling.temperature = 0.0;
  request.constraint = std::move(constraint);
  return request;
}

/// Runs requests together to their ends.
struct Outcome {
  explicit Outcome(const std::vector<Request>& requests, std::int32_t num_kv_blocks = 64) {
    ManagerConfig config;
    config.num_kv_blocks = num_kv_blocks;
    testing::BatchOptions options;
    options.eos_token_ids = {kEos};
    testing::Batch batch(config, options);
    for (const Request& request : requests) {
      batch.add(request);
    }
    batch.run_to_end();
    tokens = batch.tokens;
    last = batch.last;
    preemptions = batch.batcher.stats().preemptions;
  }

  std::map<RequestId, std::vector<TokenId>> tokens;
  std::map<RequestId, Response> last;
  std::int64_t preemptions = 0;
};

std::vector<std::set<TokenId>> random_places(std::uint64_t seed, std::size_t count) {
  std::vector<std::set<TokenId>> places(count);
  for (std::size_t i = 0; i < count; ++i) {
    for (std::uint64_t k = 0; k < 4; ++k) {
      places[i].insert(static_cast<TokenId>(3 + testing::mix(seed * 100 + i * 10 + k) % 34));
    }
  }
  return places;
}

TEST(Constraint, AnAnswerKeepsToItAndEndsByItself) {
  const Outcome run({request({5, 6}, std::make_shared<Places>(std::vector<std::set<TokenId>>{{7}, {36}, {30, 31}}))});
  ASSERT_EQ(run.tokens.at(1).size(), 3U);
  EXPECT_EQ(run.tokens.at(1)[0], 7);
  EXPECT_EQ(run.tokens.at(1)[1], 36);
  EXPECT_EQ(run.last.at(1).finish_reason, FinishReason::kStop);
  EXPECT_FALSE(run.last.at(1).stop_token_id.has_value());
}

TEST(Constraint, AnEndTokenEndsItEvenWithIgnoreEos) {
  Request ends =
      request({5, 6}, std::make_shared<Places>(std::vector<std::set<TokenId>>{{7}}, Places::End::kByEndToken));
  ends.sampling.ignore_eos = true;
  const Outcome run({ends});
  EXPECT_EQ(run.tokens.at(1), (std::vector<TokenId>{7, kEos}));
  EXPECT_EQ(run.last.at(1).stop_token_id, kEos);
}

TEST(Constraint, MaxTokensCutsItShort) {
  Request cut = request({5, 6}, std::make_shared<Places>(random_places(1, 20)));
  const Outcome run({cut});
  EXPECT_EQ(run.tokens.at(1).size(), 8U);
  EXPECT_EQ(run.last.at(1).finish_reason, FinishReason::kLength);
}

/// Masks reach the right rows, whatever the batch and however often sequences are preempted.
TEST(Constraint, EachSequenceHasItsOwnAndOthersAreUnchanged) {
  for (const std::int32_t num_kv_blocks : {64, 12}) {
    std::vector<Request> requests;
    for (TokenId i = 0; i < 16; ++i) {
      std::shared_ptr<Constraint> constraint;
      if (i % 2 == 0) {
        constraint = std::make_shared<Places>(random_places(static_cast<std::uint64_t>(i), 7));
      }
      requests.push_back(request({5, i, 9, static_cast<TokenId>(i + 3)}, constraint));
      requests.back().sampling.temperature = i % 3 == 0 ? 1.0 : 0.0;
      requests.back().sampling.seed = i;
    }
    const Outcome together(requests, num_kv_blocks);
    EXPECT_EQ(together.preemptions > 0, num_kv_blocks == 12);
    for (std::size_t i = 0; i < requests.size(); ++i) {
      const auto id = static_cast<RequestId>(i + 1);
      EXPECT_EQ(together.tokens.at(id), Outcome({requests[i]}).tokens.at(1)) << "request " << i;
      if (requests[i].constraint == nullptr) {
        const auto alone = expected_output(requests[i], small_shape(), small_shape().max_seq_len, {kEos});
        EXPECT_EQ(together.tokens.at(id), alone.tokens) << "request " << i;
      } else {
        const auto places = random_places(i, 7);
        for (std::size_t k = 0; k < 7; ++k) {
          EXPECT_TRUE(places[k].contains(together.tokens.at(id)[k])) << "request " << i << ", token " << k;
        }
      }
    }
  }
}

TEST(Constraint, AFailureEndsItsOwnSequenceOnly) {
  const Request free = request({5, 6});
  const Outcome run(
      {request({7, 8}, std::make_shared<Failing>(false)), free, request({7, 9}, std::make_shared<Failing>(true))});
  EXPECT_EQ(run.last.at(1).error_kind, ErrorKind::kInvalidRequest);
  EXPECT_NE(run.last.at(1).error_message.find("too complex"), std::string::npos);
  EXPECT_TRUE(run.tokens.at(1).empty());
  EXPECT_EQ(run.last.at(3).error_kind, ErrorKind::kInternal);
  EXPECT_EQ(run.tokens.at(2), expected_output(free, small_shape(), small_shape().max_seq_len, {kEos}).tokens);
}

TEST(BytePairTokenizer, JoinsInTheOrderOfTheVocabulary) {
  const std::vector<std::string> tokens = {"a", "b", "c", "", "bc", "ab", "abc", "\xC3", "\xA9", "\xC3\xA9", "a"};
  const BytePairTokenizer tokenizer(tokens);
  const std::pair<const char*, std::vector<TokenId>> cases[] = {
      {"", {}},           {"a", {10}},   // the last of equals
      {"ab", {5}},        {"abc", {6}},  // "bc" comes first, then "a" + "bc"
      {"ccc", {2, 2, 2}}, {"\xC3\xA9", {9}}, {"\xC3", {7}}, {"a?b", {10, 1}},
  };
  for (const auto& [text, expected] : cases) {
    EXPECT_EQ(tokenizer.tokenize(text), expected) << text;
  }
}

/// Against joining by exhaustive search.
TEST(BytePairTokenizer, AgreesWithTheDefinition) {
  const std::vector<std::string> tokens = {"a", "b", "c", "ab", "ca", "bb", "abb", "cab", "bbb", "aa", "aaa", "aaaa"};
  const BytePairTokenizer tokenizer(tokens);
  const auto find = [&](const std::string& bytes) {
    return std::find(tokens.begin(), tokens.end(), bytes) - tokens.begin();
  };
  for (std::uint64_t seed = 0; seed < 500; ++seed) {
    std::vector<std::string> pieces;
    for (std::uint64_t i = 0; i < 1 + seed % 13; ++i) {
      pieces.emplace_back(1, "abc"[testing::mix(seed * 64 + i) % 3]);
    }
    std::string text;
    for (const std::string& piece : pieces) {
      text += piece;
    }
    while (true) {
      auto best = static_cast<std::ptrdiff_t>(tokens.size());
      std::size_t at = 0;
      for (std::size_t i = 0; i + 1 < pieces.size(); ++i) {
        if (find(pieces[i] + pieces[i + 1]) < best) {
          best = find(pieces[i] + pieces[i + 1]);
          at = i;
        }
      }
      if (best == static_cast<std::ptrdiff_t>(tokens.size())) {
        break;
      }
      pieces[at] += pieces[at + 1];
      pieces.erase(pieces.begin() + static_cast<std::ptrdiff_t>(at) + 1);
    }
    std::vector<TokenId> expected;
    for (const std::string& piece : pieces) {
      expected.push_back(static_cast<TokenId>(find(piece)));
    }
    EXPECT_EQ(tokenizer.tokenize(text), expected) << text;
  }
}

TEST(GrammarCompiler, WhatIsNoLibraryIsRefused) {
  for (const char* path : {"/nowhere.so", "/dev/null", "libm.so.6"}) {
    try {
      const GrammarCompiler compiler(path, {{"a"}, {}, 1});
      FAIL() << path;
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kEngineIncompatible);
      EXPECT_NE(std::string(error.what()).find("pip install"), std::string::npos);
    }
  }
}

TEST(PlainReason, IsOneShortLineWithoutDumps) {
  EXPECT_EQ(plain_reason(nullptr), "no reason given");
  EXPECT_EQ(plain_reason("bad\n  | start\n<state>\nTokens: ..."), "bad | start");
  EXPECT_EQ(plain_reason("panic: x\n<backtrace>\n0: ..."), "panic: x");
  EXPECT_LT(plain_reason(std::string(10000, 'x').c_str()).size(), 320U);
}

}  // namespace
}  // namespace aotllm
