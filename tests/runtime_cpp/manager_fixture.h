#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "aotllm/gpt_manager.h"
#include "fake_runner.h"

// A manager over a fake runner, held inside its steps where a test needs to know where the loop is.
namespace aotllm::testing {

inline constexpr auto kLong = std::chrono::seconds(20);  // never waited for in a test that passes
inline constexpr std::chrono::duration<double> kForever(std::numeric_limits<double>::infinity());

inline Request request(std::vector<TokenId> prompt, std::int32_t max_tokens) {
  Request request;
  request.prompt_token_ids = std::move(prompt);
  request.sampling.max_tokens = max_tokens;
  request.sampling.temperature = 0.0;
  return request;
}

/// Holds the runner inside its steps, so that a test knows where the loop is.
class Gate {
 public:
  FakeRunner::Hook hook() {
    return [this](std::int64_t) {
      std::unique_lock lock(mutex_);
      ++entered_;
      changed_.notify_all();
      changed_.wait(lock, [this] { return open_ || passes_ > 0; });
      passes_ -= open_ ? 0 : 1;
    };
  }

  /// Waits until the loop is inside its n-th step (from 1).
  void await_step(std::int64_t n) {
    std::unique_lock lock(mutex_);
    ASSERT_TRUE(changed_.wait_for(lock, kLong, [this, n] { return entered_ >= n; }));
  }

  void pass_one() {
    const std::lock_guard lock(mutex_);
    ++passes_;
    changed_.notify_all();
  }

  void open() {
    const std::lock_guard lock(mutex_);
    open_ = true;
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::int64_t entered_ = 0;
  std::int64_t passes_ = 0;
  bool open_ = false;
};

inline std::unique_ptr<GptManager> manager(const ManagerConfig& config = {}, FakeRunner::Hook hook = {}) {
  return std::make_unique<GptManager>(std::make_unique<FakeRunner>(small_shape(), std::move(hook)), config);
}

/// A manager behind a gate that opens by itself when a test gives up.
class GatedManager {
 public:
  explicit GatedManager(const ManagerConfig& config = {}) : manager_(manager(config, gate.hook())) {}
  ~GatedManager() { gate.open(); }
  GptManager* operator->() const { return manager_.get(); }
  GptManager& operator*() const { return *manager_; }

  Gate gate;

 private:
  std::unique_ptr<GptManager> manager_;
};

inline ManagerConfig one_at_a_time(std::int32_t max_queue_size) {
  ManagerConfig config;
  config.max_batch_size = 1;
  config.max_queue_size = max_queue_size;
  return config;
}

/// What came of each request.
struct Outcome {
  std::vector<TokenId> tokens;
  std::optional<FinishReason> reason;
  std::string error;
};
using Outcomes = std::map<RequestId, Outcome>;

inline void collect(std::vector<Response> responses, Outcomes& outcomes) {
  for (const Response& response : responses) {
    Outcome& outcome = outcomes[response.request_id];
    EXPECT_FALSE(outcome.reason) << "news of request " << response.request_id << " after its last";
    outcome.tokens.insert(outcome.tokens.end(), response.token_ids.begin(), response.token_ids.end());
    outcome.reason = response.finish_reason;
    outcome.error = response.error_message;
  }
}

inline std::size_t num_ended(const Outcomes& outcomes) {
  std::size_t ended = 0;
  for (const auto& [id, outcome] : outcomes) {
    ended += outcome.reason ? 1 : 0;
  }
  return ended;
}

inline Outcomes poll_until_ended(GptManager& manager, std::size_t count) {
  Outcomes outcomes;
  while (num_ended(outcomes) < count) {
    std::vector<Response> responses = manager.poll(kLong);
    if (responses.empty()) {
      ADD_FAILURE() << "only " << num_ended(outcomes) << " of " << count << " requests ended";
      break;
    }
    collect(std::move(responses), outcomes);
  }
  return outcomes;
}

}  // namespace aotllm::testing
