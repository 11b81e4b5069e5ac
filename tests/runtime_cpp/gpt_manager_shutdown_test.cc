#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "aotllm/errors.h"
#include "aotllm/gpt_manager.h"
#include "error_kind_of.h"
#include "manager_fixture.h"

namespace aotllm {
namespace {

using namespace std::chrono_literals;
using testing::error_kind_of;
using testing::GatedManager;
using testing::kForever;
using testing::manager;
using testing::one_at_a_time;
using testing::Outcomes;
using testing::poll_until_ended;
using testing::request;

/// Waits until a shutdown has begun, given that the queue is full and the loop is held up.
void await_shutdown(GptManager& manager) {
  while (error_kind_of([&] { manager.submit(request({4}, 1)); }) != ErrorKind::kCancelled) {
    std::this_thread::yield();
  }
}

TEST(GptManagerShutdown, CancelsWhatIsQueuedAndRunning) {
  GatedManager mgr(one_at_a_time(2));
  const RequestId running = mgr->submit(request({4}, 40));
  mgr->submit(request({5}, 40));
  mgr->submit(request({6}, 40));
  mgr.gate.await_step(1);
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] { mgr->shutdown(); });
  }
  await_shutdown(*mgr);
  mgr.gate.open();
  for (std::thread& thread : threads) {
    thread.join();
  }
  const Outcomes outcomes = poll_until_ended(*mgr, 3);
  for (const auto& [id, outcome] : outcomes) {
    EXPECT_EQ(outcome.reason, FinishReason::kCancelled);
    EXPECT_EQ(outcome.tokens.size(), id == running ? 1U : 0U);  // of the step that it was in
  }
  EXPECT_TRUE(mgr->poll(kForever).empty());  // at once
  EXPECT_EQ(error_kind_of([&] { mgr->submit(request({4}, 1)); }), ErrorKind::kCancelled);
  mgr->cancel(running);
  mgr->shutdown(true);
  EXPECT_EQ(mgr->stats().blocks_used, 0);
}

TEST(GptManagerShutdown, DrainLetsAllFinish) {
  const auto mgr = manager(one_at_a_time(8));
  for (int i = 0; i < 5; ++i) {
    mgr->submit(request({4}, 20));
  }
  mgr->shutdown(true);
  const Outcomes outcomes = poll_until_ended(*mgr, 5);
  for (const auto& [id, outcome] : outcomes) {
    EXPECT_EQ(outcome.reason, FinishReason::kLength);
    EXPECT_EQ(outcome.tokens.size(), 20U);
  }
  EXPECT_TRUE(mgr->poll(kForever).empty());
}

TEST(GptManagerShutdown, CutsADrainShort) {
  // 80 steps of 10 ms: far more than the call below needs to come through.
  const auto mgr = manager(one_at_a_time(1), [](std::int64_t) { std::this_thread::sleep_for(10ms); });
  mgr->submit(request({4}, 40));
  const RequestId queued = mgr->submit(request({4}, 40));
  std::thread drainer([&] { mgr->shutdown(true); });
  await_shutdown(*mgr);
  mgr->shutdown(false);
  drainer.join();
  const Outcomes outcomes = poll_until_ended(*mgr, 2);
  EXPECT_EQ(outcomes.at(queued).reason, FinishReason::kCancelled);
  EXPECT_TRUE(outcomes.at(queued).tokens.empty());
}

TEST(GptManagerShutdown, WakesAllWhoPoll) {
  const auto mgr = manager();
  std::vector<std::thread> pollers;
  for (int i = 0; i < 4; ++i) {
    pollers.emplace_back([&] { EXPECT_TRUE(mgr->poll(kForever).empty()); });
  }
  mgr->shutdown();
  for (std::thread& poller : pollers) {
    poller.join();
  }
}

TEST(GptManagerShutdown, RacesWithSubmitsWithoutLosingARequest) {
  for (int round = 0; round < 50; ++round) {
    const auto mgr = manager();
    std::atomic<std::size_t> accepted = 0;
    std::thread submitter([&] {
      try {
        for (int i = 0; i < 100; ++i) {
          mgr->submit(request({4 + i % 30}, 1 + i % 5));
          ++accepted;
        }
      } catch (const Error& e) {
        EXPECT_EQ(e.kind(), ErrorKind::kCancelled);
      }
    });
    mgr->shutdown(round % 2 == 0);
    submitter.join();
    EXPECT_EQ(poll_until_ended(*mgr, accepted).size(), accepted);
  }
}

TEST(GptManagerShutdown, TheDestructorCancels) {
  GatedManager mgr;
  mgr->submit(request({4}, 40));
  mgr.gate.await_step(1);
  mgr.gate.open();
}

}  // namespace
}  // namespace aotllm
