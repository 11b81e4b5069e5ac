#pragma once

#include <utility>

#include "aotllm/scheduler.h"

namespace aotllm {

/// The plan of the next step, made from what the step in hand will leave at most: each of its sequences goes on, with
/// all its drafts accepted, but for those that reach their length.
///
/// It is taken only where nothing better can be planned afterwards: it preempts, admits and holds back nobody, and
/// nothing has come or gone meanwhile that would let somebody in.
class LookAhead {
 public:
  void offer(StepPlan plan) {
    plan_ = std::move(plan);
    valid_ = !plan_.sequences.empty() && plan_.preempted.empty() && plan_.admitted.empty() && plan_.num_sharing == 0;
  }

  /// Something has happened that the plan does not know of.
  void spoil() { valid_ = false; }

  bool valid() const { return valid_; }

  /// Precondition of both: valid().
  const StepPlan& plan() const { return plan_; }
  StepPlan take() {
    valid_ = false;
    return std::exchange(plan_, {});
  }

 private:
  StepPlan plan_;
  bool valid_ = false;
};

}  // namespace aotllm
