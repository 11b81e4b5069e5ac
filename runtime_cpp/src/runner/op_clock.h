#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "aotllm/step_profile.h"
#include "engine/plan.h"

namespace aotllm {

/// One thread's times of the ops of a plan. Time belongs to one op and one part of it at any moment.
class alignas(64) OpClock {
 public:
  using Times = std::array<std::int64_t, kNumStepParts>;  ///< nanoseconds

  explicit OpClock(std::size_t num_ops) : times_(num_ops) {}

  void begin(std::size_t op) noexcept {
    op_ = op;
    part_ = StepPart::kCompute;
    since_ = Clock::now();
  }
  void end() noexcept { enter(StepPart::kCompute); }

  /// Goes on with another part; returns the one before.
  StepPart enter(StepPart part) noexcept {
    const auto now = Clock::now();
    times_[op_][static_cast<std::size_t>(part_)] +=
        std::chrono::duration_cast<std::chrono::nanoseconds>(now - since_).count();
    since_ = now;
    return std::exchange(part_, part);
  }

  const Times& times(std::size_t op) const noexcept { return times_[op]; }

 private:
  using Clock = std::chrono::steady_clock;

  std::vector<Times> times_;  ///< by op
  std::size_t op_ = 0;
  StepPart part_ = StepPart::kCompute;
  Clock::time_point since_{};
};

/// Counts what is done in a scope as `part`; without a clock it is a test of a pointer.
class PartScope {
 public:
  PartScope(OpClock* clock, StepPart part) noexcept : clock_(clock) {
    if (clock_ != nullptr) before_ = clock_->enter(part);
  }
  ~PartScope() {
    if (clock_ != nullptr) clock_->enter(before_);
  }
  PartScope(const PartScope&) = delete;
  PartScope& operator=(const PartScope&) = delete;

 private:
  OpClock* clock_;
  StepPart before_ = StepPart::kCompute;
};

/// Adds the times of a plan's ops by all its threads to `ops`: one entry for each kind and shape.
void add_times(const Plan& plan, const std::vector<OpClock>& clocks, std::vector<OpProfile>& ops);

}  // namespace aotllm
