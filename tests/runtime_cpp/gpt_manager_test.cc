#include "aotllm/gpt_manager.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <map>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "aotllm/errors.h"
#include "error_kind_of.h"
#include "expected_output.h"
#include "fake_runner.h"
#include "manager_fixture.h"

namespace aotllm {
namespace {

using namespace std::chrono_literals;
using testing::collect;
using testing::error_kind_of;
using testing::expected_output;
using testing::GatedManager;
using testing::kForever;
using testing::kLong;
using testing::manager;
using testing::one_at_a_time;
using testing::Outcomes;
using testing::Output;
using testing::poll_until_ended;
using testing::request;
using testing::small_shape;

TEST(GptManager, AnswersStreamTokenByTokenUntilTheReason) {
  const auto mgr = manager();
  const Request asked = request({4, 5, 6}, 5);
  const RequestId id = mgr->submit(asked);
  Outcomes outcomes;
  std::size_t responses = 0;
  while (!outcomes[id].reason) {
    std::vector<Response> news = mgr->poll(kLong);
    responses += news.size();
    collect(std::move(news), outcomes);
  }
  EXPECT_EQ(responses, 5U);
  EXPECT_EQ((Output{outcomes[id].tokens, *outcomes[id].reason}), expected_output(asked, small_shape(), 48, {}));
  EXPECT_EQ(mgr->max_seq_len(), 48);
  EXPECT_EQ(mgr->vocab_size(), 37);
}

TEST(GptManager, ManySubmittersAndPollersGetEachAnswerOnce) {
  constexpr int kThreads = 4;
  constexpr int kEach = 60;
  ManagerConfig config;
  config.num_kv_blocks = 20;
  config.max_queue_size = kThreads * kEach;
  config.eos_token_ids = {2};
  const auto mgr = manager(config);

  std::mutex mutex;
  std::map<RequestId, Request> requests;
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < kEach; ++i) {
        Request asked = request({4 + t, 5 + i % 30, 6}, 1 + (i * 7) % 40);
        asked.sampling.temperature = i % 2;
        asked.sampling.seed = i;
        const RequestId id = mgr->submit(asked);
        const std::lock_guard lock(mutex);
        requests[id] = asked;
      }
    });
  }
  std::mutex outcomes_mutex;
  Outcomes outcomes;  // of single tokens in any order, for two pollers may hold news of one request
  std::map<RequestId, std::multiset<TokenId>> bags;
  std::atomic<std::size_t> ended = 0;
  for (int t = 0; t < 2; ++t) {
    threads.emplace_back([&] {
      while (ended < kThreads * kEach) {
        for (const Response& response : mgr->poll(1ms)) {
          const std::lock_guard lock(outcomes_mutex);
          bags[response.request_id].insert(response.token_ids.begin(), response.token_ids.end());
          if (response.finish_reason) {
            EXPECT_FALSE(outcomes[response.request_id].reason);
            outcomes[response.request_id].reason = response.finish_reason;
            ++ended;
          }
        }
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  ASSERT_EQ(requests.size(), static_cast<std::size_t>(kThreads * kEach));
  for (const auto& [id, asked] : requests) {
    const Output expected = expected_output(asked, small_shape(), 48, {2});
    EXPECT_EQ(bags[id], std::multiset<TokenId>(expected.tokens.begin(), expected.tokens.end()));
    EXPECT_EQ(outcomes[id].reason, expected.reason);
  }
  const Stats stats = mgr->stats();
  EXPECT_EQ(stats.finished, kThreads * kEach);
  EXPECT_EQ(stats.blocks_used, 0);
  EXPECT_EQ(stats.running, 0);
  EXPECT_EQ(stats.queued, 0);
}

TEST(GptManager, SeededAnswersDoNotDependOnTheBatch) {
  Request asked = request({4, 5}, 20);
  asked.sampling.temperature = 1.5;
  asked.sampling.seed = -7;
  const Output expected = expected_output(asked, small_shape(), 48, {});
  const auto mgr = manager();
  const RequestId alone = mgr->submit(asked);
  EXPECT_EQ(poll_until_ended(*mgr, 1)[alone].tokens, expected.tokens);
  std::set<RequestId> twins;
  for (int i = 0; i < 5; ++i) {
    mgr->submit(request({7 + i}, 30));
    twins.insert(mgr->submit(asked));
  }
  const Outcomes outcomes = poll_until_ended(*mgr, 10);
  for (const RequestId id : twins) {
    EXPECT_EQ(outcomes.at(id).tokens, expected.tokens);
  }
}

TEST(GptManager, WithoutASeedAnswersDiffer) {
  Request asked = request({4, 5}, 30);
  asked.sampling.temperature = 2.0;
  const auto mgr = manager();
  mgr->submit(asked);
  mgr->submit(asked);
  const Outcomes outcomes = poll_until_ended(*mgr, 2);
  EXPECT_NE(outcomes.at(1).tokens, outcomes.at(2).tokens);  // equal by chance: below 1e-15
}

TEST(GptManager, RefusesBadRequestsAtOnce) {
  const auto mgr = manager();
  EXPECT_EQ(error_kind_of([&] { mgr->submit(request({}, 1)); }), ErrorKind::kInvalidRequest);
  EXPECT_EQ(error_kind_of([&] { mgr->submit(request({4}, 0)); }), ErrorKind::kInvalidRequest);
  EXPECT_EQ(error_kind_of([&] { mgr->submit(request(std::vector<TokenId>(48, 4), 1)); }), ErrorKind::kContextTooLong);
  EXPECT_EQ(mgr->stats().queued, 0);
}

TEST(GptManager, APromptThatThePoolCanNeverHoldIsRefused) {
  ManagerConfig config;
  config.num_kv_blocks = 2;
  const auto mgr = manager(config);
  EXPECT_EQ(mgr->max_seq_len(), 8);
  EXPECT_EQ(error_kind_of([&] { mgr->submit(request(std::vector<TokenId>(8, 4), 1)); }), ErrorKind::kContextTooLong);
  const RequestId id = mgr->submit(request(std::vector<TokenId>(7, 4), 40));
  EXPECT_EQ(poll_until_ended(*mgr, 1)[id].tokens.size(), 1U);
}

TEST(GptManager, TheQueueIsBoundedWhateverTheTiming) {
  GatedManager mgr(one_at_a_time(/*max_queue_size=*/2));
  for (int i = 0; i < 3; ++i) {  // one for the batch and two for the queue, even if the loop is not there yet
    mgr->submit(request({4}, 2));
  }
  EXPECT_EQ(error_kind_of([&] { mgr->submit(request({4}, 2)); }), ErrorKind::kOverloaded);
  mgr.gate.await_step(1);
  for (int i = 0; i < 50; ++i) {
    EXPECT_EQ(error_kind_of([&] { mgr->submit(request({4}, 2)); }), ErrorKind::kOverloaded);
  }
  EXPECT_EQ(mgr->stats().queued, 2);
  EXPECT_EQ(mgr->stats().running, 1);
  mgr.gate.open();
  const Outcomes outcomes = poll_until_ended(*mgr, 3);
  for (const auto& [id, outcome] : outcomes) {
    EXPECT_EQ(outcome.reason, FinishReason::kLength);
  }
  EXPECT_NO_THROW(mgr->submit(request({4}, 2)));
}

TEST(GptManager, AFullKvCacheFillsTheQueueToo) {
  ManagerConfig config;
  config.num_kv_blocks = 12;  // one long sequence, though the batch has eight places
  config.max_queue_size = 1;
  GatedManager mgr(config);
  mgr->submit(request(std::vector<TokenId>(40, 4), 2));
  mgr.gate.await_step(1);
  mgr->submit(request(std::vector<TokenId>(40, 4), 2));
  mgr.gate.pass_one();
  mgr.gate.await_step(2);  // planned with the second one waiting
  EXPECT_EQ(error_kind_of([&] { mgr->submit(request({4}, 2)); }), ErrorKind::kOverloaded);
  mgr.gate.open();
  EXPECT_EQ(poll_until_ended(*mgr, 2).size(), 2U);
}

TEST(GptManager, CancelWorksOnQueuedAndRunningRequestsBeforeTheNextStep) {
  GatedManager mgr(one_at_a_time(8));
  const RequestId running = mgr->submit(request({4}, 40));
  mgr.gate.await_step(1);
  const RequestId queued = mgr->submit(request({5}, 40));
  const RequestId third = mgr->submit(request({6}, 3));
  mgr->cancel(running);
  mgr->cancel(queued);
  mgr->cancel(queued);
  mgr->cancel(third + 1);  // unknown yet
  mgr.gate.open();
  const Outcomes outcomes = poll_until_ended(*mgr, 3);
  EXPECT_EQ(outcomes.at(running).reason, FinishReason::kCancelled);
  EXPECT_EQ(outcomes.at(running).tokens.size(), 1U);  // of the step that it was in
  EXPECT_EQ(outcomes.at(queued).reason, FinishReason::kCancelled);
  EXPECT_TRUE(outcomes.at(queued).tokens.empty());
  EXPECT_EQ(outcomes.at(third).reason, FinishReason::kLength);
  mgr->cancel(running);  // finished
  EXPECT_TRUE(mgr->poll(0s).empty());
  EXPECT_EQ(mgr->stats().blocks_used, 0);
}

TEST(GptManager, CancelAtAnyMomentLeavesNothingBehind) {
  ManagerConfig config;
  config.num_kv_blocks = 15;
  config.max_chunk_tokens = 3;
  const auto mgr = manager(config);
  for (int round = 0; round < 100; ++round) {
    std::vector<RequestId> ids;
    for (int i = 0; i < 8; ++i) {
      ids.push_back(mgr->submit(request(std::vector<TokenId>(static_cast<std::size_t>(1 + 5 * i), 4 + i), 12)));
    }
    for (const RequestId id : ids) {
      mgr->cancel(id);
    }
    const Outcomes outcomes = poll_until_ended(*mgr, 8);
    EXPECT_EQ(outcomes.size(), 8U);
    ASSERT_EQ(mgr->stats().blocks_used, 0);
    ASSERT_EQ(mgr->stats().queued, 0);
  }
}

TEST(GptManager, PollTimesOutAndWakesUp) {
  const auto mgr = manager();
  EXPECT_TRUE(mgr->poll(0s).empty());
  EXPECT_TRUE(mgr->poll(-1s).empty());
  EXPECT_TRUE(mgr->poll(1ms).empty());
  EXPECT_TRUE(mgr->poll(std::chrono::duration<double>(std::nan(""))).empty());
  std::thread submitter([&] { mgr->submit(request({4}, 1)); });
  EXPECT_EQ(mgr->poll(kForever).size(), 1U);
  submitter.join();
}

TEST(GptManager, AStepThatThrowsDoesNotStopTheManager) {
  const auto mgr = manager({}, [](std::int64_t step) {
    if (step == 2) {
      throw std::runtime_error("a blown fuse");
    }
  });
  const RequestId hit = mgr->submit(request({4}, 10));
  Outcomes outcomes = poll_until_ended(*mgr, 1);
  EXPECT_EQ(outcomes[hit].reason, FinishReason::kError);
  EXPECT_NE(outcomes[hit].error.find("a blown fuse"), std::string::npos);
  EXPECT_EQ(outcomes[hit].tokens.size(), 2U);
  const RequestId next = mgr->submit(request({4}, 10));
  EXPECT_EQ(poll_until_ended(*mgr, 1)[next].reason, FinishReason::kLength);
  EXPECT_EQ(mgr->stats().blocks_used, 0);
}

}  // namespace
}  // namespace aotllm
