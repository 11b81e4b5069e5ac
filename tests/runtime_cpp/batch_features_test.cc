// Grammars, scored prompts, deadlines, plans ahead, the watchdog.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <mutex>
#include <numeric>

#include "aotllm/errors.h"
#include "batch_fixture.h"
#include "manager/background.h"

namespace aotllm {
namespace {

using namespace std::chrono_literals;
using testing::Batch;
using testing::BatchOptions;
using testing::expected_output;
using testing::greedy_request;
using testing::small_shape;

// ---------------------------------------------------------------------------------------------------------------------
// Grammars

/// Allows token 10 + i · step at place i, forces places that are listed, ends after `length`.
class CountingConstraint final : public Constraint {
 public:
  CountingConstraint(std::int32_t length, std::vector<std::int32_t> forced)
      : length_(length), forced_(std::move(forced)) {}

  void fill_mask(std::span<std::uint32_t> mask) override {
    if (place_ == fail_at) {
      throw Error(ErrorKind::kInvalidRequest, "lost");
    }
    std::fill(mask.begin(), mask.end(), 0U);
    const TokenId token = 10 + place_;
    mask[static_cast<std::size_t>(token / 32)] |= 1U << (token % 32);
  }
  void accept(TokenId token) override {
    if (token != 10 + place_) {
      throw Error(ErrorKind::kInternal, "not allowed");
    }
    ++place_;
  }
  std::vector<TokenId> take_forced(std::int32_t limit) override {
    std::vector<TokenId> tokens;
    while (std::find(forced_.begin(), forced_.end(), place_) != forced_.end() &&
           static_cast<std::int32_t>(tokens.size()) < limit) {
      tokens.push_back(10 + place_++);
    }
    return tokens;
  }
  bool finished() const override { return place_ == length_; }
  std::unique_ptr<Constraint> clone() const override { return std::make_unique<CountingConstraint>(*this); }

  std::int32_t fail_at = -1;

 private:
  std::int32_t length_;
  std::vector<std::int32_t> forced_;
  std::int32_t place_ = 0;
};

std::vector<TokenId> count_from_10(std::int32_t length) {
  std::vector<TokenId> tokens(static_cast<std::size_t>(length));
  std::iota(tokens.begin(), tokens.end(), 10);
  return tokens;
}

TEST(BatchConstraints, MasksGoToTheirRowsAndForcedTokensNeedNoStep) {
  for (const bool forces : {false, true}) {
    Batch batch({});
    const Request free_one = greedy_request({4, 5}, 30);
    const RequestId before = batch.add(free_one);
    Request asked = greedy_request({6}, 30);
    asked.constraint = std::make_shared<CountingConstraint>(
        20, forces ? std::vector<std::int32_t>{3, 4, 5, 6, 7, 12, 13} : std::vector<std::int32_t>{});
    asked.n = 2;
    const RequestId id = batch.add(asked);
    const RequestId after = batch.add(free_one);
    while (!batch.ended(id)) {
      batch.step();
    }
    EXPECT_EQ(batch.batcher.stats().steps, forces ? 13 : 20);
    batch.run_to_end();
    for (const std::int32_t index : {0, 1}) {
      EXPECT_EQ((batch.tokens_of[{id, index}]), count_from_10(20));
      EXPECT_EQ((batch.last_of[{id, index}].finish_reason), FinishReason::kStop);
    }
    EXPECT_EQ(batch.batcher.stats().forced_tokens, forces ? 14 : 0);
    for (const RequestId free_id : {before, after}) {
      EXPECT_EQ(batch.tokens[free_id], expected_output(free_one, small_shape(), 48, {}).tokens);
    }
  }
}

TEST(BatchConstraints, ForcedTokensStopAtTheLengthAndAtStopTokens) {
  Batch batch({});
  Request asked = greedy_request({6}, 5);
  asked.constraint = std::make_shared<CountingConstraint>(20, std::vector<std::int32_t>{1, 2, 3, 4, 5, 6, 7, 8});
  EXPECT_EQ(batch.answer(asked), count_from_10(5));
  EXPECT_EQ(batch.last[1].finish_reason, FinishReason::kLength);
  asked.sampling.max_tokens = 30;
  asked.sampling.stop_token_ids = {14};
  EXPECT_EQ(batch.answer(asked), count_from_10(5));
  EXPECT_EQ(batch.last[2].finish_reason, FinishReason::kStop);
  EXPECT_EQ(batch.last[2].stop_token_id, 14);
}

TEST(BatchConstraints, AGrammarThatFailsEndsItsSequenceOnly) {
  Batch batch({});
  const Request free_one = greedy_request({4, 5}, 10);
  const RequestId healthy = batch.add(free_one);
  Request asked = greedy_request({6}, 30);
  auto constraint = std::make_shared<CountingConstraint>(20, std::vector<std::int32_t>{});
  constraint->fail_at = 3;
  asked.constraint = constraint;
  const RequestId id = batch.add(asked);
  batch.run_to_end();
  EXPECT_EQ(batch.last[id].finish_reason, FinishReason::kError);
  EXPECT_NE(batch.last[id].error_message.find("lost"), std::string::npos);
  EXPECT_EQ(batch.tokens[id], count_from_10(3));
  EXPECT_EQ(batch.tokens[healthy], expected_output(free_one, small_shape(), 48, {}).tokens);
}

TEST(BatchConstraints, SurviveManyPreemptions) {
  ManagerConfig config;
  config.num_kv_blocks = 13;
  Batch batch(config);
  std::vector<Request> requests;
  for (TokenId first = 4; first < 8; ++first) {
    Request asked = greedy_request({first, 5, 6, 7, 8}, 40);
    asked.constraint = std::make_shared<CountingConstraint>(25, std::vector<std::int32_t>{5, 6, 7, 8, 9, 20, 21});
    batch.add(asked);
  }
  batch.run_to_end();
  EXPECT_GT(batch.batcher.stats().preemptions, 0);
  for (RequestId id = 1; id <= 4; ++id) {
    EXPECT_EQ(batch.tokens[id], count_from_10(25));
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// Scored prompts

TEST(BatchPromptLogprobs, AreThoseOfEachPrefixHoweverThePromptIsCut) {
  std::vector<TokenId> prompt(19);
  std::iota(prompt.begin(), prompt.end(), 7);
  Request asked = greedy_request(prompt, 2);
  asked.prompt_logprobs = 3;
  std::vector<double> expected;
  for (std::size_t i = 0; i + 1 < prompt.size(); ++i) {
    std::vector<float> row(37);
    const std::uint64_t hash =
        testing::hash_of(small_shape(), static_cast<std::int32_t>(i), [&](int, std::int32_t position) {
          return testing::Slot{prompt[static_cast<std::size_t>(position)], position, 0};
        });
    testing::fake_logits(hash, prompt[0], row);
    double sum = 0.0;
    for (const float logit : row) {
      sum += std::exp(static_cast<double>(logit));
    }
    expected.push_back(static_cast<double>(row[static_cast<std::size_t>(prompt[i + 1])]) - std::log(sum));
  }
  for (const std::int32_t chunk : {1, 4, 7, 0}) {
    ManagerConfig config;
    config.max_chunk_tokens = chunk;
    Batch batch(config);
    batch.answer(greedy_request(prompt, 2));  // what is cached must not cut it short
    batch.answer(asked);
    const std::vector<TokenLogprobs>& got = batch.prompt_logprobs[2];
    ASSERT_EQ(got.size(), expected.size());
    for (std::size_t i = 0; i < got.size(); ++i) {
      EXPECT_NEAR(got[i].logprob, expected[i], 1e-9);
      EXPECT_EQ(got[i].top.size(), 3U);
    }
    EXPECT_EQ(batch.last[2].num_cached_tokens, 0);
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// Time

TEST(BatchDeadlines, EndSequencesInEachStateWithWhatTheyHave) {
  ManagerConfig config;
  config.max_batch_size = 2;
  config.max_chunk_tokens = 5;
  Batch batch(config);
  const Clock::time_point start = Clock::now();
  const auto timed = [&](std::vector<TokenId> prompt, double timeout) {
    Request asked = greedy_request(std::move(prompt), 30);
    asked.timeout = timeout;
    return batch.add(asked, start);
  };
  const RequestId generating = timed({4}, 10);
  const RequestId in_context = timed(std::vector<TokenId>(20, 5), 20);
  const RequestId queued = timed({6}, 30);
  const RequestId patient = timed({7}, 0);
  batch.step();
  batch.step();
  EXPECT_EQ(batch.batcher.next_deadline(), start + 10s);
  batch.batcher.expire(start + 9s);
  batch.collect();
  EXPECT_FALSE(batch.ended(generating));
  batch.batcher.expire(start + 30s);
  batch.collect();
  for (const RequestId id : {generating, in_context, queued}) {
    EXPECT_EQ(batch.last[id].finish_reason, FinishReason::kTimeout);
  }
  EXPECT_EQ(batch.tokens[generating].size(), 2U);
  EXPECT_EQ(batch.batcher.next_deadline(), Clock::time_point::max());
  batch.run_to_end();
  EXPECT_EQ(batch.last[patient].finish_reason, FinishReason::kLength);
  EXPECT_EQ(batch.batcher.stats().timed_out, 3);
}

TEST(BatchPlans, SteadyGenerationsArePlannedAhead) {
  Batch batch({});
  batch.add(greedy_request({4}, 20));
  batch.add(greedy_request({5}, 20));
  batch.run_to_end();
  EXPECT_EQ(batch.batcher.stats().steps, 20);
  EXPECT_EQ(batch.batcher.stats().steps_planned_ahead, 19);
}

TEST(BatchPlans, ANewcomerDoesNotWaitForAPlanMadeWithoutIt) {
  Batch batch({});
  batch.add(greedy_request({4}, 20));
  batch.step();
  batch.step();
  const RequestId newcomer = batch.add(greedy_request({5}, 1));
  batch.step();
  EXPECT_TRUE(batch.ended(newcomer));
}

TEST(BatchPlans, WhoWaitsForASharedPrefixHoldsUpNobody) {
  ManagerConfig config;
  config.num_kv_blocks = 100;
  config.max_num_tokens = 8;
  config.max_chunk_tokens = 4;
  Batch batch(config);
  std::vector<TokenId> prompt(30);
  std::iota(prompt.begin(), prompt.end(), 4);
  batch.add(greedy_request(prompt, 1));
  batch.step();
  const RequestId sharer = batch.add(greedy_request(prompt, 1));
  const RequestId other = batch.add(greedy_request({5}, 1));
  batch.step();
  EXPECT_TRUE(batch.ended(other));
  EXPECT_FALSE(batch.ended(sharer));
  batch.step();
  const RequestId another = batch.add(greedy_request({6}, 1));
  batch.step();
  EXPECT_TRUE(batch.ended(another));
}

TEST(BatchPlans, AsManyAsFitAreAdmittedInOneStep) {
  ManagerConfig config;
  config.num_kv_blocks = 100;
  Batch batch(config);
  for (TokenId first = 4; first < 15; ++first) {
    batch.add(greedy_request({first, 5, 6}, 3));
  }
  batch.step();
  EXPECT_EQ(batch.batcher.stats().running, 8) << "max_batch_size, though candidates are looked at a few at a time";
}

TEST(BatchStats, TellOfEachStep) {
  ManagerConfig config;
  config.max_num_tokens = 6;
  Batch batch(config);
  batch.add(greedy_request({4}, 10));
  batch.step();
  batch.add(greedy_request(std::vector<TokenId>(12, 5), 1));
  batch.step();
  const std::vector<StepStats> steps = batch.batcher.take_step_stats();
  ASSERT_EQ(steps.size(), 2U);
  EXPECT_EQ(steps[0].context_tokens, 1);
  EXPECT_EQ(steps[0].generation_tokens, 0);
  EXPECT_EQ(steps[1].step, 2);
  EXPECT_EQ(steps[1].scheduled, 2);
  EXPECT_EQ(steps[1].context_tokens, 5);
  EXPECT_EQ(steps[1].generation_tokens, 1);
  EXPECT_GE(steps[1].latency_seconds, steps[1].run_seconds);
  EXPECT_TRUE(batch.batcher.take_step_stats().empty());
}

// ---------------------------------------------------------------------------------------------------------------------
// Watchdog

TEST(Watchdog, ReportsAStuckStepOnceWithWhatItDoes) {
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<std::string> reports;
  Watchdog watchdog(1e-3, [&](const std::string& report) {
    const std::lock_guard lock(mutex);
    reports.push_back(report);
    changed.notify_all();
  });
  BatchOptions options;
  options.watchdog = &watchdog;
  options.hook = [&](std::int64_t step) {
    if (step == 1) {  // stuck until it is seen
      std::unique_lock lock(mutex);
      changed.wait(lock, [&] { return !reports.empty(); });
    }
  };
  ManagerConfig config;
  Batch batch(config, options);
  batch.add(greedy_request({4, 5}, 4));
  batch.run_to_end();
  ASSERT_GE(reports.size(), 1U);
  EXPECT_NE(reports[0].find("running the model"), std::string::npos) << reports[0];
  EXPECT_NE(reports[0].find("step 2"), std::string::npos) << reports[0];
  EXPECT_NE(reports[0].find("(requests 1)"), std::string::npos) << reports[0];
  EXPECT_GE(batch.batcher.stats().stuck_steps, 1);
}

TEST(BackgroundThread, DoesEachJobBesideItsOwner) {
  BackgroundThread background;
  std::int64_t sum = 0;
  for (int i = 0; i < 1000; ++i) {
    const std::function<void()> job = [&sum, i] { sum += i; };
    background.start(job);
    background.wait();
  }
  EXPECT_EQ(sum, 999 * 1000 / 2);
}

}  // namespace
}  // namespace aotllm
