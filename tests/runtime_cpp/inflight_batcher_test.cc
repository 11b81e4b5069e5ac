#include "manager/inflight_batcher.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "aotllm/errors.h"
#include "batch_fixture.h"

namespace aotllm {
namespace {

using testing::Batch;
using testing::BatchOptions;
using testing::expected_output;
using testing::FakeRunner;
using testing::kNanToken;
using testing::Output;
using testing::small_shape;

Request request(std::vector<TokenId> prompt, std::int32_t max_tokens) {
  return testing::greedy_request(std::move(prompt), max_tokens);
}

/// Flips one entry of one block table in every step: a mistake that a real runner would not notice.
class FlippingRunner final : public FakeRunner {
 public:
  using FakeRunner::FakeRunner;

  void step(std::span<const SequenceStep> sequences, StepOutputs& outputs) override {
    std::vector<SequenceStep> flipped(sequences.begin(), sequences.end());
    std::vector<BlockId> table(sequences[0].block_tables[0].begin(), sequences[0].block_tables[0].end());
    if (sequences[0].start_position >= shape().tokens_per_block) {
      table[0] = table[0] == 0 ? 1 : table[0] - 1;
      flipped[0].block_tables[0] = table;
    }
    FakeRunner::step(flipped, outputs);
  }
};

TEST(InflightBatcher, TheOracleSeesASingleWrongBlock) {
  BatchOptions options;
  options.make_runner = [](const ModelShape& shape, FakeRunner::Hook hook) {
    return std::make_unique<FlippingRunner>(shape, std::move(hook));
  };
  Batch batch({}, options);
  const Request asked = request({4, 5, 6, 7, 8, 9}, 20);
  EXPECT_NE(batch.answer(asked), expected_output(asked, small_shape(), 48, {}).tokens);
}

TEST(InflightBatcher, PreemptionRecomputesAndLosesNothing) {
  ManagerConfig config;
  config.num_kv_blocks = 12;  // three sequences of 4 + 40 tokens want 33
  Batch batch(config);
  std::vector<Request> requests = {request({4, 5, 6, 7}, 40), request({8, 9, 10, 11}, 40),
                                   request({12, 13, 14, 15}, 40)};
  for (const Request& r : requests) {
    batch.add(r);
  }
  batch.run_to_end();
  EXPECT_GE(batch.batcher.stats().preemptions, 2);
  for (RequestId id = 1; id <= 3; ++id) {
    const Output expected = expected_output(requests[static_cast<std::size_t>(id - 1)], small_shape(), 48, {});
    EXPECT_EQ(batch.tokens[id], expected.tokens);
    EXPECT_EQ(batch.last[id].finish_reason, FinishReason::kLength);
  }
}

TEST(InflightBatcher, APoolOfOneSequenceServesAllInTurn) {
  ManagerConfig config;
  config.num_kv_blocks = 12;
  Batch batch(config);
  for (int i = 0; i < 10; ++i) {
    batch.add(request(std::vector<TokenId>(20, 5), 28));
  }
  batch.run_to_end();
  EXPECT_EQ(batch.batcher.stats().finished, 10);
  for (const auto& [id, last] : batch.last) {
    EXPECT_EQ(last.finish_reason, FinishReason::kLength);
    EXPECT_EQ(batch.tokens[id].size(), 28U);
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// Batching

TEST(InflightBatcher, RequestsJoinAndLeaveAtEveryStep) {
  Batch batch({});
  const RequestId first = batch.add(request({4}, 3));
  batch.step();
  const RequestId second = batch.add(request({5}, 1));
  batch.step();
  EXPECT_TRUE(batch.ended(second));
  EXPECT_EQ(batch.tokens[first].size(), 2U);
  batch.step();
  EXPECT_TRUE(batch.ended(first));
  EXPECT_EQ(batch.batcher.stats().steps, 3);
}

TEST(InflightBatcher, ALongPromptDoesNotHoldUpAGeneration) {
  ManagerConfig config;
  config.max_num_tokens = 8;
  config.max_chunk_tokens = 5;
  Batch batch(config);
  const RequestId short_one = batch.add(request({4}, 20));
  batch.step();
  const RequestId long_one = batch.add(request(std::vector<TokenId>(23, 5), 1));
  for (std::size_t step = 1; step <= 5; ++step) {
    EXPECT_FALSE(batch.ended(long_one));
    batch.step();
    EXPECT_EQ(batch.tokens[short_one].size(), 1 + step);
  }
  EXPECT_TRUE(batch.ended(long_one));  // 5 + 5 + 5 + 5 + 3
  EXPECT_EQ(batch.batcher.stats().context_tokens, 1 + 23);
}

TEST(InflightBatcher, HigherPriorityIsAdmittedFirst) {
  ManagerConfig config;
  config.max_batch_size = 1;
  Batch batch(config);
  const RequestId running = batch.add(request({4}, 2));
  batch.step();
  const RequestId normal = batch.add(request({5}, 1));
  Request urgent_request = request({6}, 1);
  urgent_request.priority = 1;
  const RequestId urgent = batch.add(urgent_request);
  batch.step();
  EXPECT_TRUE(batch.ended(running));
  batch.step();
  EXPECT_TRUE(batch.ended(urgent));
  EXPECT_FALSE(batch.ended(normal));
}

// ---------------------------------------------------------------------------------------------------------------------
// Ends

TEST(InflightBatcher, EndsOnStopTokensEosAndLengths) {
  const Request base = request({4, 5, 6}, 30);
  const std::vector<TokenId> tokens = expected_output(base, small_shape(), 48, {}).tokens;
  Batch batch({});

  Request stops = base;
  stops.sampling.stop_token_ids = {tokens[4]};
  const auto first = static_cast<std::size_t>(std::find(tokens.begin(), tokens.end(), tokens[4]) - tokens.begin());
  const RequestId stopped = batch.add(stops);
  const RequestId by_max_tokens = batch.add(base);
  Request endless = base;
  endless.sampling.max_tokens = 1000;
  const RequestId by_context = batch.add(endless);
  batch.run_to_end();

  EXPECT_EQ(batch.last[stopped].finish_reason, FinishReason::kStop);
  EXPECT_EQ(batch.last[stopped].stop_token_id, tokens[4]);
  EXPECT_EQ(batch.tokens[stopped],
            std::vector<TokenId>(tokens.begin(), tokens.begin() + static_cast<std::ptrdiff_t>(first) + 1));
  EXPECT_EQ(batch.last[by_max_tokens].finish_reason, FinishReason::kLength);
  EXPECT_EQ(batch.last[by_max_tokens].stop_token_id, std::nullopt);
  EXPECT_EQ(batch.tokens[by_max_tokens], tokens);
  EXPECT_EQ(batch.last[by_context].finish_reason, FinishReason::kLength);
  EXPECT_EQ(batch.tokens[by_context].size(), 45U);  // 3 + 45 = max_seq_len
}

TEST(InflightBatcher, LogprobsAndLogitsBelongToTheirTokens) {
  Request with_all = request({4, 5}, 4);
  with_all.logprobs = 2;
  with_all.return_logits = true;
  Batch batch({});
  batch.add(request({9}, 9));  // a mate in the batch
  const RequestId id = batch.add(with_all);
  std::vector<TokenId> sequence = with_all.prompt_token_ids;
  for (int i = 0; i < 4; ++i) {
    batch.step();
    const Response& response = batch.last[id];
    ASSERT_EQ(response.token_ids.size(), 1U);
    ASSERT_EQ(response.logprobs.size(), 1U);
    ASSERT_EQ(response.logits.size(), 1U);
    const std::uint64_t hash = testing::hash_of(
        small_shape(), static_cast<std::int32_t>(sequence.size()) - 1, [&](int, std::int32_t position) {
          return testing::Slot{sequence[static_cast<std::size_t>(position)], position, 0};
        });
    std::vector<float> row(37);
    testing::fake_logits(hash, sequence[0], row);
    EXPECT_EQ(response.logits[0], row);
    EXPECT_EQ(response.logprobs[0].token_id, response.token_ids[0]);
    EXPECT_EQ(response.logprobs[0].top.size(), 2U);
    EXPECT_EQ(response.logprobs[0].top[0].first, response.token_ids[0]);  // greedy
    EXPECT_EQ(response.logprobs[0].top[0].second, response.logprobs[0].logprob);
    sequence.push_back(response.token_ids[0]);
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// Cancellation and failures

TEST(InflightBatcher, CancelFreesEverythingInEachState) {
  ManagerConfig config;
  config.num_kv_blocks = 13;
  config.max_batch_size = 2;
  config.max_chunk_tokens = 5;
  config.enable_prefix_caching = false;
  Batch batch(config);
  for (int round = 0; round < 100; ++round) {
    const RequestId generating = batch.add(request({4}, 40));
    const RequestId in_context = batch.add(request(std::vector<TokenId>(20, 5), 10));
    const RequestId queued = batch.add(request({6}, 10));
    for (int i = 0; i < 2; ++i) {
      batch.step();
    }
    EXPECT_EQ(batch.batcher.stats().running, 2);
    EXPECT_EQ(batch.batcher.stats().queued, 1);
    EXPECT_FALSE(batch.tokens.contains(in_context));
    for (const RequestId id : {queued, in_context, generating}) {
      batch.cancel(id);
      EXPECT_EQ(batch.last[id].finish_reason, FinishReason::kCancelled);
      batch.cancel(id);  // once more: no-op
    }
    EXPECT_TRUE(batch.batcher.idle());
    EXPECT_EQ(batch.batcher.stats().blocks_used, 0);
  }
  batch.cancel(-1);
  batch.cancel(123456);
  EXPECT_EQ(batch.batcher.stats().finished, 300);
}

TEST(InflightBatcher, CancelOfAPreemptedRequest) {
  ManagerConfig config;
  config.num_kv_blocks = 12;
  Batch batch(config);
  batch.add(request(std::vector<TokenId>(8, 4), 40));
  const RequestId victim = batch.add(request(std::vector<TokenId>(8, 5), 40));
  while (batch.batcher.stats().preemptions == 0) {
    batch.step();
  }
  const auto said_before = batch.tokens[victim].size();
  EXPECT_GT(said_before, 0U);
  batch.cancel(victim);
  batch.run_to_end();
  EXPECT_EQ(batch.tokens[victim].size(), said_before);
  EXPECT_EQ(batch.last[victim].finish_reason, FinishReason::kCancelled);
  EXPECT_EQ(batch.batcher.stats().blocks_used, 0);
}

TEST(InflightBatcher, AStepThatThrowsEndsItsRequestsOnly) {
  ManagerConfig config;
  config.max_batch_size = 2;
  for (std::int64_t bad_step = 0; bad_step < 12; ++bad_step) {
    SCOPED_TRACE(bad_step);
    BatchOptions options;
    options.hook = [bad_step](std::int64_t step) {
      if (step == bad_step) {
        throw std::runtime_error("a blown fuse");
      }
    };
    Batch batch(config, options);
    std::vector<Request> requests;
    for (TokenId token = 4; token < 10; ++token) {
      requests.push_back(request({token}, 4));
      batch.add(requests.back());
    }
    batch.run_to_end();
    int failed = 0;
    for (RequestId id = 1; id <= 6; ++id) {
      const Response& last = batch.last[id];
      if (last.finish_reason == FinishReason::kError) {
        ++failed;
        EXPECT_EQ(last.error_kind, ErrorKind::kInternal);
        EXPECT_NE(last.error_message.find("a blown fuse"), std::string::npos);
      } else {
        EXPECT_EQ(batch.tokens[id],
                  expected_output(requests[static_cast<std::size_t>(id - 1)], small_shape(), 48, {}).tokens);
      }
    }
    EXPECT_EQ(failed, 2);
    EXPECT_EQ(batch.batcher.stats().blocks_used, 0);
  }
}

TEST(InflightBatcher, NanLogitsEndTheirRequestOnly) {
  Batch batch({});
  const Request healthy = request({4, 5}, 6);
  const RequestId before = batch.add(healthy);
  const RequestId poisoned = batch.add(request({kNanToken, 5}, 6));
  const RequestId after = batch.add(healthy);
  batch.run_to_end();
  EXPECT_EQ(batch.last[poisoned].finish_reason, FinishReason::kError);
  EXPECT_EQ(batch.last[poisoned].error_kind, ErrorKind::kInternal);
  EXPECT_NE(batch.last[poisoned].error_message.find("NaN"), std::string::npos);
  EXPECT_TRUE(batch.tokens[poisoned].empty());
  const std::vector<TokenId> expected = expected_output(healthy, small_shape(), 48, {}).tokens;
  EXPECT_EQ(batch.tokens[before], expected);
  EXPECT_EQ(batch.tokens[after], expected);
}

TEST(InflightBatcher, AProcessorThatThrowsEndsItsRequestOnly) {
  class Broken final : public LogitsProcessor {
    void apply(std::span<float>, std::span<const TokenId> tokens, std::int32_t) override {
      if (tokens.size() == 3) {
        throw std::runtime_error("empty grammar stack");
      }
    }
  };
  Batch batch({});
  const RequestId healthy = batch.add(request({4, 5}, 6));
  auto sequence = std::make_unique<Sequence>(99, 0, request({4, 5}, 6), 0, Clock::time_point{}, batch.limits);
  sequence->processors.constraints.push_back(std::make_unique<Broken>());
  batch.add_sequence(std::move(sequence));
  batch.run_to_end();
  EXPECT_EQ(batch.last[healthy].finish_reason, FinishReason::kLength);
  EXPECT_EQ(batch.last[99].finish_reason, FinishReason::kError);
  EXPECT_EQ(batch.tokens[99].size(), 1U);
  EXPECT_NE(batch.last[99].error_message.find("empty grammar stack"), std::string::npos);
}

TEST(InflightBatcher, ARequestThatRulesOutAllTokensEndsAlone) {
  Batch batch({});
  const Request healthy = request({4, 5}, 6);
  const RequestId before = batch.add(healthy);
  Request impossible = request({4, 5}, 6);
  impossible.sampling.allowed_token_ids = {7, 8};
  impossible.sampling.no_repeat_ngram_size = 1;  // the third token has nothing left
  const RequestId id = batch.add(impossible);
  const RequestId after = batch.add(healthy);
  batch.run_to_end();
  EXPECT_EQ(batch.last[id].finish_reason, FinishReason::kError);
  EXPECT_EQ(batch.last[id].error_kind, ErrorKind::kInvalidRequest);
  EXPECT_NE(batch.last[id].error_message.find("no token is allowed"), std::string::npos);
  EXPECT_EQ(batch.tokens[id].size(), 2U);
  const std::vector<TokenId> expected = expected_output(healthy, small_shape(), 48, {}).tokens;
  EXPECT_EQ(batch.tokens[before], expected);
  EXPECT_EQ(batch.tokens[after], expected);
}

TEST(InflightBatcher, FailAllEndsWaitingAndRunningOnes) {
  ManagerConfig config;
  config.max_batch_size = 1;
  Batch batch(config);
  batch.add(request({4}, 6));
  batch.add(request({5}, 6));
  batch.step();
  batch.batcher.plan();
  batch.batcher.fail_all("out of order");
  EXPECT_TRUE(batch.batcher.idle());
  EXPECT_EQ(batch.batcher.stats().blocks_used, 0);
  batch.batcher.run();  // nothing is left of the plan
  EXPECT_EQ(batch.batcher.take_responses().size(), 2U);
}

TEST(Sequence, RefusesMovesThatItsLifeDoesNotHave) {
  const Limits limits = resolve_limits(small_shape(), {}, {});
  Sequence sequence(1, 0, request({4}, 6), 0, Clock::time_point{}, limits);
  EXPECT_THROW(sequence.move_to(SequenceState::kGenerating), Error);
  sequence.move_to(SequenceState::kContext);
  EXPECT_THROW(sequence.move_to(SequenceState::kContext), Error);
  sequence.move_to(SequenceState::kGenerating);
  sequence.move_to(SequenceState::kQueued);  // preempted
  sequence.move_to(SequenceState::kFinished);
  EXPECT_THROW(sequence.move_to(SequenceState::kFinished), Error);
  EXPECT_THROW(sequence.move_to(SequenceState::kQueued), Error);
}

}  // namespace
}  // namespace aotllm