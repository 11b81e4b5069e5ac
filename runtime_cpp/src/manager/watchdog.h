#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "aotllm/request.h"

namespace aotllm {

/// Reports steps that take too long, with what they were doing.
///
/// The loop says where it is, at the cost of a lock that nobody else wants; a thread looks from time to time, only
/// while something runs.
class Watchdog {
 public:
  /// Phases of a step.
  enum class Phase : std::uint8_t { kIdle, kPlanning, kCopyingBlocks, kRunning, kSampling };

  /// `report` is called on the watchdog's thread, once for a step. seconds = 0: never.
  Watchdog(double seconds, std::function<void(const std::string&)> report);
  ~Watchdog();
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

  /// A step begins: its number.
  void begin(std::int64_t step);
  /// It goes on to another phase.
  void enter(Phase phase);
  /// What it computes.
  void describe(std::span<const RequestId> requests, std::int32_t num_tokens);
  /// It is over.
  void end();

  /// Steps reported so far.
  std::int64_t num_reports() const { return num_reports_.load(std::memory_order_relaxed); }

 private:
  using Clock = std::chrono::steady_clock;

  void loop();
  std::string describe_step(Clock::time_point now) const;

  const Clock::duration limit_;
  const std::function<void(const std::string&)> report_;
  std::atomic<std::int64_t> num_reports_{0};

  std::mutex mutex_;  ///< of all below but the thread
  std::condition_variable changed_;
  bool closing_ = false;
  bool watching_ = false;  ///< the thread waits for the deadline of a step, not for a step
  bool reported_ = false;
  Phase phase_ = Phase::kIdle;
  Clock::time_point begun_{};
  std::int64_t step_ = 0;
  std::int32_t num_tokens_ = 0;
  std::vector<RequestId> requests_;
  std::thread thread_;
};

}  // namespace aotllm
