// Steps that are begun before the one before has ended.
#include <gtest/gtest.h>

#include <stdexcept>

#include "batch_fixture.h"

namespace aotllm {
namespace {

using testing::Batch;
using testing::BatchOptions;
using testing::expected_output;
using testing::FakeRunner;
using testing::greedy_request;
using testing::options_with;
using testing::QueueingRunner;
using testing::small_shape;

std::vector<TokenId> expected(const Request& request) {
  return expected_output(request, small_shape(), 48, testing::kEos).tokens;
}

TEST(BatchQueue, AllStepsOfASteadyGenerationButTheFirst) {
  Batch batch({}, options_with<QueueingRunner>());
  const std::vector<Request> requests = {greedy_request({4}, 20), greedy_request({5, 6}, 20)};
  for (const Request& request : requests) {
    batch.add(request);
  }
  batch.run_to_end();
  EXPECT_EQ(batch.batcher.stats().steps, 20);
  EXPECT_EQ(batch.batcher.stats().steps_queued, 19);
  EXPECT_EQ(batch.tokens[1], expected(requests[0]));
  EXPECT_EQ(batch.tokens[2], expected(requests[1]));
}

/// The step behind has a token of a sequence that is over: nobody sees what comes of it, and its blocks are free.
TEST(BatchQueue, AStopTokenEndsASequenceWhoseNextStepIsUnderWay) {
  Batch batch({}, options_with<QueueingRunner>());
  Request request = greedy_request({4, 5}, 30);
  request.sampling.stop_token_ids = {expected(request)[6]};
  batch.add(request);
  const Request longer = greedy_request({7, 8, 9}, 30);
  batch.add(longer);
  batch.run_to_end();
  EXPECT_EQ(batch.last[1].finish_reason, FinishReason::kStop);
  EXPECT_EQ(batch.tokens[1], expected(request));
  EXPECT_EQ(batch.tokens[2], expected(longer));
  EXPECT_EQ(batch.batcher.stats().blocks_used, 0);
}

TEST(BatchQueue, TheLastStepUnderWayIsWaitedForThoughNobodyWantsIt) {
  Batch batch({}, options_with<QueueingRunner>());
  const RequestId id = batch.add(greedy_request({4, 5}, 30));
  batch.step();
  batch.cancel(id);
  EXPECT_FALSE(batch.batcher.idle());
  batch.step();
  EXPECT_TRUE(batch.batcher.idle());
  const Request next = greedy_request({4, 5, 6}, 10);
  EXPECT_EQ(batch.answer(next), expected(next));
}

TEST(BatchQueue, ANewcomerGetsInWithTheStepAfterTheOneUnderWay) {
  Batch batch({}, options_with<QueueingRunner>());
  batch.add(greedy_request({4, 5}, 30));
  batch.step();
  const Request request = greedy_request({6, 7}, 1);
  const RequestId newcomer = batch.add(request);
  batch.step();
  EXPECT_FALSE(batch.ended(newcomer));
  batch.step();
  EXPECT_TRUE(batch.ended(newcomer));
  EXPECT_EQ(batch.tokens[newcomer], expected(request));
}

/// Requests whose next step needs to know the token of the last one.
TEST(BatchQueue, WhoNeedsTheTokenFirstIsWaitedFor) {
  const std::vector<std::function<void(Request&)>> needs = {
      [](Request& request) { request.logprobs = 2; },
      [](Request& request) { request.sampling.repetition_penalty = 1.5; },
  };
  for (const auto& need : needs) {
    Batch batch({}, options_with<QueueingRunner>());
    Request special = greedy_request({4, 5, 7}, 8);
    need(special);
    batch.add(special);
    const Request plain = greedy_request({4, 5, 6}, 12);
    batch.add(plain);
    batch.run_to_end();
    EXPECT_EQ(batch.tokens[1], expected(special));
    EXPECT_EQ(batch.tokens[2], expected(plain));
    EXPECT_GE(batch.batcher.stats().steps_queued, 3);
    EXPECT_LE(batch.batcher.stats().steps_queued, 4);  // once the special one has ended
  }
}

/// Throws in `queue` or in `finish`, at the step of a number.
class FailingRunner final : public QueueingRunner {
 public:
  using QueueingRunner::QueueingRunner;

  void queue(std::span<const SequenceStep> sequences) override {
    if (num_queued_++ == fails_at_queue) {
      QueueingRunner::forget_queue();
      throw std::runtime_error("no more launches");
    }
    QueueingRunner::queue(sequences);
  }
  void finish(StepOutputs& outputs) override {
    if (num_finished_++ == fails_at_finish) {
      QueueingRunner::forget_queue();
      throw std::runtime_error("an illegal address");
    }
    QueueingRunner::finish(outputs);
    if (num_finished_ == short_at) {
      outputs.tokens.pop_back();
    }
  }

  int fails_at_queue = -1;
  int fails_at_finish = -1;
  int short_at = -1;

 private:
  int num_queued_ = 0;
  int num_finished_ = 0;
};

/// Whatever fails, all sequences of the step end, and the next request is served.
TEST(BatchQueue, AFailureEndsTheStepsUnderWay) {
  const std::vector<std::function<void(FailingRunner&)>> failures = {
      [](FailingRunner& runner) { runner.fails_at_queue = 0; },
      [](FailingRunner& runner) { runner.fails_at_queue = 3; },
      [](FailingRunner& runner) { runner.fails_at_finish = 0; },
      [](FailingRunner& runner) { runner.fails_at_finish = 3; },
      [](FailingRunner& runner) { runner.short_at = 3; },
  };
  for (const auto& failure : failures) {
    Batch batch({}, options_with<FailingRunner>());
    failure(static_cast<FailingRunner&>(*batch.runner));
    const RequestId one = batch.add(greedy_request({4, 5}, 20));
    const RequestId two = batch.add(greedy_request({6, 7}, 20));
    batch.run_to_end();
    EXPECT_EQ(batch.last[one].finish_reason, FinishReason::kError);
    EXPECT_EQ(batch.last[two].finish_reason, FinishReason::kError);
    EXPECT_EQ(batch.batcher.stats().blocks_used, 0);
    const Request next = greedy_request({4, 5, 6}, 20);
    EXPECT_EQ(batch.answer(next), expected(next));
  }
}

TEST(BatchQueue, AFailureOfTheLoopLeavesNothingUnderWay) {
  Batch batch({}, options_with<QueueingRunner>());
  const RequestId id = batch.add(greedy_request({4, 5}, 20));
  batch.step();
  batch.batcher.fail_all("the end");
  batch.collect();
  EXPECT_EQ(batch.last[id].error_message, "the end");
  EXPECT_TRUE(batch.batcher.idle());
  const Request next = greedy_request({4, 5, 6}, 20);
  EXPECT_EQ(batch.answer(next), expected(next));
}

}  // namespace
}  // namespace aotllm
