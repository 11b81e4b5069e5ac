#include "manager/inflight_batcher.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "aotllm/errors.h"
#include "fake_runner.h"
#include "manager/limits.h"

namespace aotllm {
namespace {

using testing::expected_output;
using testing::FakeRunner;
using testing::kNanToken;
using testing::Output;
using testing::small_shape;

const std::vector<TokenId> kEos = {2, 3};

/// A batcher on the fake runner that is stepped by hand; invariants are checked between all moves.
class Batch {
 public:
  explicit Batch(const ManagerConfig& config, FakeRunner::Hook hook = {})
      : limits(resolve_limits(small_shape(), with_eos(config), std::nullopt)),
        runner(small_shape(), std::move(hook)),
        batcher(runner, limits) {
    runner.allocate_kv(limits.num_kv_blocks);
  }

  RequestId add(Request request) {
    validate_request(request, limits);
    batcher.add(std::make_unique<Sequence>(++last_id_, std::move(request), /*random_seed=*/0, limits));
    batcher.check_invariants();
    return last_id_;
  }

  void cancel(RequestId id) {
    batcher.cancel(id);
    collect();
  }

  void step() {
    batcher.plan();
    batcher.check_invariants();
    batcher.run();
    collect();
  }

  void run_to_end() {
    for (int i = 0; !batcher.idle(); ++i) {
      ASSERT_LT(i, 100000) << "the batch does not end";
      step();
    }
  }

  bool ended(RequestId id) const { return last.contains(id) && last.at(id).finish_reason.has_value(); }

  const Limits limits;
  FakeRunner runner;
  InflightBatcher batcher;
  std::map<RequestId, std::vector<TokenId>> tokens;
  std::map<RequestId, Response> last;

 private:
  static ManagerConfig with_eos(ManagerConfig config) {
    config.eos_token_ids = kEos;
    return config;
  }

  void collect() {
    batcher.check_invariants();
    for (Response& response : batcher.take_responses()) {
      const RequestId id = response.request_id;
      EXPECT_FALSE(ended(id)) << "news of request " << id << " after its last";
      tokens[id].insert(tokens[id].end(), response.token_ids.begin(), response.token_ids.end());
      last[id] = std::move(response);
    }
  }

  RequestId last_id_ = 0;
};

Request request(std::vector<TokenId> prompt, std::int32_t max_tokens) {
  Request request;
  request.prompt_token_ids = std::move(prompt);
  request.sampling.max_tokens = max_tokens;
  request.sampling.temperature = 0.0;
  request.sampling.ignore_eos = true;
  return request;
}

class Random {
 public:
  explicit Random(std::uint32_t seed) : engine_(seed) {}

  std::int32_t between(std::int32_t low, std::int32_t high) {
    return low + static_cast<std::int32_t>(engine_() % static_cast<std::uint32_t>(high - low + 1));
  }

  Request request(std::int32_t max_seq_len) {
    Request request;
    request.prompt_token_ids.resize(static_cast<std::size_t>(between(1, max_seq_len - 1)));
    for (TokenId& token : request.prompt_token_ids) {
      token = between(kNanToken + 1, small_shape().vocab_size - 1);
    }
    request.priority = between(0, 2);
    SamplingParams& params = request.sampling;
    params.max_tokens = between(1, max_seq_len);
    params.temperature = between(0, 1) == 0 ? 0.0 : 1.0;
    params.seed = between(0, 1000);
    params.top_k = between(0, 5);
    params.ignore_eos = between(0, 2) > 0;
    if (between(0, 3) == 0) {
      params.stop_token_ids = {between(0, small_shape().vocab_size - 1)};
    }
    return request;
  }

  ManagerConfig config() {
    ManagerConfig config;
    config.num_kv_blocks = between(1, 30);
    config.max_batch_size = between(1, 8);
    config.max_num_tokens = between(1, 32);
    config.max_chunk_tokens = between(0, 12);
    return config;
  }

 private:
  std::mt19937 engine_;
};

// ---------------------------------------------------------------------------------------------------------------------
// The oracle: whatever else runs, a request's answer is the one it gets alone.

TEST(InflightBatcher, AnswersAreThoseOfARequestAloneUnderRandomLoad) {
  std::int64_t preemptions = 0;
  std::int64_t cancelled = 0;
  for (std::uint32_t seed = 0; seed < 1000; ++seed) {
    SCOPED_TRACE(seed);
    Random random(seed);
    Batch batch(random.config());
    if (batch.limits.max_seq_len < 2) {
      continue;
    }
    std::map<RequestId, Request> requests;
    const std::int32_t count = random.between(1, 25);
    while (static_cast<std::int32_t>(requests.size()) < count || !batch.batcher.idle()) {
      while (static_cast<std::int32_t>(requests.size()) < count && random.between(0, 1) == 0) {
        const Request request = random.request(batch.limits.max_seq_len);
        requests[batch.add(request)] = request;
      }
      if (random.between(0, 30) == 0 && !requests.empty()) {
        batch.cancel(random.between(1, static_cast<std::int32_t>(requests.size())));
      }
      batch.step();
    }
    for (const auto& [id, request] : requests) {
      SCOPED_TRACE(id);
      ASSERT_TRUE(batch.ended(id));
      const Output expected = expected_output(request, small_shape(), batch.limits.max_seq_len, kEos);
      const Response& last = batch.last[id];
      ASSERT_NE(last.finish_reason, FinishReason::kError) << last.error_message;
      if (last.finish_reason == FinishReason::kCancelled) {
        const std::vector<TokenId> prefix(
            expected.tokens.begin(), expected.tokens.begin() + static_cast<std::ptrdiff_t>(batch.tokens[id].size()));
        ASSERT_EQ(batch.tokens[id], prefix);
        ++cancelled;
      } else {
        ASSERT_EQ((Output{batch.tokens[id], *last.finish_reason}), expected);
        ASSERT_EQ(last.stop_token_id.has_value(), expected.reason == FinishReason::kStop);
        ASSERT_EQ(last.num_prompt_tokens, static_cast<std::int32_t>(request.prompt_token_ids.size()));
      }
    }
    const Stats stats = batch.batcher.stats();
    ASSERT_EQ(stats.blocks_used, 0);
    ASSERT_EQ(stats.finished, count);
    preemptions += stats.preemptions;
  }
  EXPECT_GT(preemptions, 300);  // the load does test them
  EXPECT_GT(cancelled, 50);
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
    std::uint64_t hash = 0;
    for (std::size_t position = 0; position < sequence.size(); ++position) {
      hash = testing::fold(hash, {sequence[position], static_cast<std::int32_t>(position)});
    }
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
    Batch batch(config, [bad_step](std::int64_t step) {
      if (step == bad_step) {
        throw std::runtime_error("a blown fuse");
      }
    });
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
  auto sequence = std::make_unique<Sequence>(99, request({4, 5}, 6), 0, batch.limits);
  sequence->processors.constraints.push_back(std::make_unique<Broken>());
  batch.batcher.add(std::move(sequence));
  batch.run_to_end();
  EXPECT_EQ(batch.last[healthy].finish_reason, FinishReason::kLength);
  EXPECT_EQ(batch.last[99].finish_reason, FinishReason::kError);
  EXPECT_EQ(batch.tokens[99].size(), 1U);
  EXPECT_NE(batch.last[99].error_message.find("empty grammar stack"), std::string::npos);
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
  const Limits limits = resolve_limits(small_shape(), {}, std::nullopt);
  Sequence sequence(1, request({4}, 6), 0, limits);
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
