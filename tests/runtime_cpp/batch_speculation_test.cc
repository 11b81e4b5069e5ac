// Drafts are verified, never believed: speculation changes how many steps an answer takes, and nothing else.
#include <gtest/gtest.h>

#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

#include "aotllm/draft_proposer.h"
#include "aotllm/errors.h"
#include "batch_fixture.h"

namespace aotllm {
namespace {

using testing::Batch;
using testing::BatchOptions;
using testing::expected_output;
using testing::greedy_request;
using testing::MockProposer;
using testing::small_shape;

TEST(BatchSpeculation, RightDraftsSaveStepsAndWrongOnesCostNothingElse) {
  ManagerConfig config;
  config.num_speculative_tokens = 4;
  for (const std::uint64_t wrong_every : {1, 2, 3, 1000}) {
    MockProposer proposer(small_shape(), wrong_every);
    BatchOptions options;
    options.proposer = &proposer;
    for (const double temperature : {0.0, 1.0}) {
      Batch batch(config, options);
      Request asked = greedy_request({4, 5, 6}, 40);
      asked.sampling.temperature = temperature;
      asked.sampling.seed = 3;
      EXPECT_EQ(batch.answer(asked), expected_output(asked, small_shape(), 48, {}).tokens);
      const Stats stats = batch.batcher.stats();
      EXPECT_EQ(stats.generated_tokens, 40);
      EXPECT_GT(stats.draft_tokens, 0);
      if (wrong_every == 1000 && temperature == 0.0) {
        EXPECT_EQ(stats.steps, 1 + 8) << "the prompt; then 39 tokens, five at a time";
        EXPECT_EQ(stats.accepted_tokens, stats.draft_tokens);
        EXPECT_EQ(batch.last[1].num_accepted_tokens, stats.accepted_tokens);
      }
      if (wrong_every == 1 && temperature == 0.0) {
        EXPECT_EQ(stats.accepted_tokens, 0);
        EXPECT_EQ(stats.steps, 40);
      }
    }
  }
}

TEST(BatchSpeculation, AProposerThatFailsOrTalksNonsenseIsIgnored) {
  class Broken final : public DraftProposer {
    void propose(std::span<const Query> queries, std::vector<std::vector<TokenId>>& drafts) override {
      if (++calls_ % 2 == 0) {
        throw std::runtime_error("no idea");
      }
      drafts.assign(queries.size(), {-5, 1000, 4});
    }
    void forget(SequenceId /*id*/) override {}
    int calls_ = 0;
  };
  Broken proposer;
  BatchOptions options;
  options.proposer = &proposer;
  ManagerConfig config;
  config.num_speculative_tokens = 2;
  Batch batch(config, options);
  const Request asked = greedy_request({4, 5, 6}, 20);
  EXPECT_EQ(batch.answer(asked), expected_output(asked, small_shape(), 48, {}).tokens);
}

TEST(BatchSpeculation, TokensBehindAStopTokenAreNotSaid) {
  const Request base = greedy_request({4, 5, 6}, 30);
  const std::vector<TokenId> all = expected_output(base, small_shape(), 48, {}).tokens;
  MockProposer proposer(small_shape(), 1000);
  BatchOptions options;
  options.proposer = &proposer;
  ManagerConfig config;
  config.num_speculative_tokens = 4;
  for (const TokenId stop : all) {
    Batch batch(config, options);
    Request asked = base;
    asked.sampling.stop_token_ids = {stop};
    EXPECT_EQ(batch.answer(asked), expected_output(asked, small_shape(), 48, {}).tokens);
    EXPECT_EQ(batch.last[1].stop_token_id, stop);
  }
}

TEST(NgramProposer, ProposesWhatFollowedTheLongestRepeatedEnd) {
  struct Case {
    std::vector<TokenId> tokens;
    std::int32_t min, max, count;
    std::vector<TokenId> drafts;
  };
  for (const Case& c : {Case{{1, 2, 3, 4, 1, 2}, 1, 3, 2, {3, 4}},        // "1 2" was followed by "3 4"
                        Case{{1, 2, 3, 4, 1, 2}, 1, 3, 9, {3, 4, 1, 2}},  // no further than the text goes
                        Case{{1, 2, 9, 5, 2, 8, 1, 2}, 1, 3, 1, {9}},     // the longer match wins
                        Case{{1, 2, 9, 5, 2, 8, 1, 2}, 1, 1, 1, {8}},     // of length 1, the latest
                        Case{{7, 2, 3, 7, 2, 4, 7, 2}, 1, 3, 1, {4}},     // of equal ones, the latest
                        Case{{5, 5, 5, 5}, 1, 3, 3, {5}},                 // overlapping itself
                        Case{{1, 2, 3, 4, 5, 2}, 2, 3, 3, {}},            // "5 2" is new
                        Case{{1, 2, 3}, 1, 3, 3, {}}, Case{{1}, 1, 3, 3, {}}}) {
    const auto proposer = make_ngram_proposer(c.min, c.max);
    std::vector<std::vector<TokenId>> drafts;
    const DraftProposer::Query query{1, c.tokens, c.count};
    proposer->propose({&query, 1}, drafts);
    EXPECT_EQ(drafts.at(0), c.drafts) << ::testing::PrintToString(c.tokens);
  }
  EXPECT_THROW(make_ngram_proposer(0, 3), Error);
  EXPECT_THROW(make_ngram_proposer(3, 2), Error);
}

TEST(EngineProposer, TheSameModelIsAlwaysRight) {
  ManagerConfig config;
  config.num_speculative_tokens = 3;
  for (const std::int32_t draft_blocks : {1, 12, 40}) {
    const auto proposer = make_engine_proposer(std::make_unique<testing::FakeRunner>(small_shape()), draft_blocks);
    BatchOptions options;
    options.proposer = proposer.get();
    Batch batch(config, options);
    std::vector<Request> requests;
    for (TokenId first = 4; first < 9; ++first) {
      requests.push_back(greedy_request({first, 5, 6}, 30));
      batch.add(requests.back());
    }
    batch.run_to_end();
    for (std::size_t i = 0; i < requests.size(); ++i) {
      EXPECT_EQ(batch.tokens[static_cast<RequestId>(i + 1)],
                expected_output(requests[i], small_shape(), 48, {}).tokens);
    }
    const Stats stats = batch.batcher.stats();
    EXPECT_EQ(stats.accepted_tokens, stats.draft_tokens);
    EXPECT_GT(stats.draft_tokens, draft_blocks == 1 ? -1 : 20);
  }
}

TEST(EngineProposer, KeepsPrefixesOfOtherSaltsApart) {
  for (const auto& [salt, shares] : {std::pair{"a", true}, std::pair{"b", false}}) {
    auto draft_runner = std::make_unique<testing::FakeRunner>(small_shape());
    const testing::FakeRunner& draft = *draft_runner;
    const auto proposer = make_engine_proposer(std::move(draft_runner), 40);
    BatchOptions options;
    options.proposer = proposer.get();
    ManagerConfig config;
    config.num_speculative_tokens = 3;
    Batch batch(config, options);
    Request asked = greedy_request(std::vector<TokenId>(20, 7), 4);
    asked.cache_salt = "a";
    batch.answer(asked);
    const std::int64_t first = draft.num_tokens();
    asked.cache_salt = salt;
    batch.answer(asked);
    EXPECT_EQ(draft.num_tokens() - first < first, shares) << salt;
  }
}

}  // namespace
}  // namespace aotllm
