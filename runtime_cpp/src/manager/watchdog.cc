#include "manager/watchdog.h"

#include <algorithm>
#include <utility>

#include "support/strings.h"

namespace aotllm {
namespace {

const char* phase_name(Watchdog::Phase phase) {
  switch (phase) {
    case Watchdog::Phase::kIdle:
      return "idle";
    case Watchdog::Phase::kPlanning:
      return "planning";
    case Watchdog::Phase::kCopyingBlocks:
      return "copying KV blocks";
    case Watchdog::Phase::kRunning:
      return "running the model";
    case Watchdog::Phase::kSampling:
      return "sampling";
  }
  return "?";
}

}  // namespace

Watchdog::Watchdog(double seconds, std::function<void(const std::string&)> report)
    : limit_(std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(std::min(seconds, 1e9)))),
      report_(std::move(report)) {
  if (limit_.count() > 0) {
    thread_ = std::thread([this] { loop(); });
  }
}

Watchdog::~Watchdog() {
  {
    const std::lock_guard lock(mutex_);
    closing_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) {
    thread_.join();
  }
}

void Watchdog::begin(std::int64_t step) {
  const std::lock_guard lock(mutex_);
  step_ = step;
  phase_ = Phase::kPlanning;
  begun_ = Clock::now();
  reported_ = false;
  num_tokens_ = 0;
  requests_.clear();
  if (!watching_) {  // else it finds the new step when it wakes for the old one: no wake-up per step
    changed_.notify_all();
  }
}

void Watchdog::enter(Phase phase) {
  const std::lock_guard lock(mutex_);
  phase_ = phase;
}

void Watchdog::describe(std::span<const RequestId> requests, std::int32_t num_tokens) {
  const std::lock_guard lock(mutex_);
  requests_.assign(requests.begin(), requests.end());
  num_tokens_ = num_tokens;
}

void Watchdog::end() {
  enter(Phase::kIdle);
}

void Watchdog::loop() {
  std::unique_lock lock(mutex_);
  while (!closing_) {
    if (phase_ == Phase::kIdle || reported_) {
      watching_ = false;
      changed_.wait(lock, [this] { return closing_ || (phase_ != Phase::kIdle && !reported_); });
      continue;
    }
    watching_ = true;
    const Clock::time_point deadline = begun_ + limit_;
    const Clock::time_point now = Clock::now();
    if (now < deadline) {
      changed_.wait_until(lock, deadline, [this] { return closing_; });
      continue;  // another step may have begun meanwhile
    }
    reported_ = true;
    num_reports_.fetch_add(1, std::memory_order_relaxed);
    const std::string message = describe_step(now);
    lock.unlock();
    report_(message);
    lock.lock();
  }
}

std::string Watchdog::describe_step(Clock::time_point now) const {
  constexpr std::size_t kShown = 16;
  std::string requests;
  for (std::size_t i = 0; i < std::min(requests_.size(), kShown); ++i) {
    requests += cat(i == 0 ? " " : ", ", requests_[i]);
  }
  if (requests_.size() > kShown) {
    requests += ", …";
  }
  return cat("step ", step_, " has taken ", std::chrono::duration<double>(now - begun_).count(), " s so far: it is ",
             phase_name(phase_), ", ", num_tokens_, " tokens of ", requests_.size(), " sequences (requests", requests,
             ")");
}

}  // namespace aotllm
