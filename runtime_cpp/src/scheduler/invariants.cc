#include <algorithm>
#include <array>
#include <cstdint>
#include <string>
#include <unordered_map>

#include "aotllm/errors.h"
#include "aotllm/scheduler.h"
#include "scheduler/block_demand.h"

namespace aotllm {
namespace {

void require(bool holds, const char* rule) {
  if (!holds) {
    throw Error(ErrorKind::kInternal, std::string("step plan breaks the rule: ") + rule);
  }
}

void check_view(const SequenceView& sequence, const BlockDemand& demand) {
  require(0 <= sequence.num_computed && sequence.num_computed < sequence.num_tokens &&
              sequence.num_tokens < sequence.max_len,
          "0 ≤ num_computed < num_tokens < max_len");
  require(0 <= sequence.num_uncertain && sequence.num_uncertain <= sequence.num_computed,
          "0 ≤ num_uncertain ≤ num_computed");
  for (int group = 0; group < demand.num_groups(); ++group) {
    const auto g = static_cast<std::size_t>(group);
    require(0 <= sequence.num_shared[g] && sequence.num_shared[g] <= sequence.num_blocks[g],
            "0 ≤ num_shared ≤ num_blocks");
    require(0 <= sequence.cost[g] && sequence.cost[g] <= sequence.num_blocks[g], "0 ≤ cost ≤ num_blocks");
  }
}

/// Checks a plan as it is carried out: preempt, admit, run.
class PlanCheck {
 public:
  PlanCheck(const SchedulerConfig& config, const Snapshot& snapshot, const StepPlan& plan)
      : config_(config), demand_(config), snapshot_(snapshot), plan_(plan) {
    std::copy(snapshot.free_blocks.begin(), snapshot.free_blocks.end(), free_blocks_.begin());
  }

  void run() {
    check_snapshot();
    check_preempted();
    check_admitted();
    check_sequences();
    require(!plan_.sequences.empty() || (snapshot_.running.empty() && snapshot_.waiting.empty()),
            "a step runs something while anything runs or waits");
  }

 private:
  void check_snapshot() const {
    const std::vector<SequenceView>& waiting = snapshot_.waiting;
    require(std::is_sorted(snapshot_.running.begin(), snapshot_.running.end(), ranks_before),
            "those who run are in rank order");
    require(std::is_partitioned(waiting.begin(), waiting.end(), [](const SequenceView& s) { return s.overdue; }),
            "overdue ones are first in the queue");
    for (const std::vector<SequenceView>* sequences : {&snapshot_.running, &waiting}) {
      for (const SequenceView& sequence : *sequences) {
        check_view(sequence, demand_);
      }
    }
  }

  void check_preempted() {
    const std::size_t count = plan_.preempted.size();
    require(count == 0 || config_.capacity_policy == CapacityPolicy::kMaxUtilization,
            "guaranteed_no_evict preempts nobody");
    require(count == 0 || count < snapshot_.running.size(), "the first in rank keeps running");
    require(plan_.preempted.empty() || plan_.admitted.empty(), "no step both preempts and admits");
    for (const SequenceView& sequence : snapshot_.running) {
      may_run_.emplace(sequence.id, &sequence);
    }
    for (std::size_t i = 0; i < count; ++i) {
      const SequenceView& last = snapshot_.running[snapshot_.running.size() - 1 - i];
      require(plan_.preempted[i] == last.id, "the last in rank are preempted");
      may_run_.erase(last.id);
      for (std::size_t group = 0; group < free_blocks_.size(); ++group) {
        free_blocks_[group] += last.num_blocks[group] - last.num_shared[group];
      }
    }
  }

  /// Admitted ones are a subsequence of the queue: those between are held back.
  void check_admitted() {
    auto next = snapshot_.waiting.begin();
    std::int32_t overtaken = 0;
    for (const SequenceId id : plan_.admitted) {
      for (; next != snapshot_.waiting.end() && next->id != id; ++next) {
        require(!next->overdue, "nobody overtakes who is overdue");
        ++overtaken;
      }
      require(next != snapshot_.waiting.end(), "waiting sequences are admitted in queue order");
      may_run_.emplace(id, &*next);
      for (std::size_t group = 0; group < free_blocks_.size(); ++group) {
        free_blocks_[group] -= next->cost[group];
      }
      ++next;
    }
    require(overtaken <= plan_.num_sharing, "nobody is overtaken but those held back");
    require(may_run_.size() <= static_cast<std::size_t>(config_.max_batch_size), "at most max_batch_size run");
  }

  void check_sequences() {
    const bool runs_alone = may_run_.size() == 1;  // then it fits, however many blocks num_shared and cost hide
    std::int64_t budget = config_.max_num_tokens;
    for (const ScheduledSequence& scheduled : plan_.sequences) {
      const auto found = may_run_.find(scheduled.id);
      require(found != may_run_.end(), "a step holds running sequences, each once");
      const SequenceView& sequence = *found->second;
      require(scheduled.num_tokens >= 1 && scheduled.num_tokens <= most_tokens(config_, sequence),
              "a sequence runs within its chunk, what remains and its drafts");
      budget -= scheduled.num_tokens;
      for (int group = 0; group < demand_.num_groups(); ++group) {
        const auto g = static_cast<std::size_t>(group);
        free_blocks_[g] -= demand_.for_step(sequence, scheduled.num_tokens, group);
        require(free_blocks_[g] >= 0 || runs_alone, "a step takes no more blocks than are free");
      }
      may_run_.erase(found);
    }
    require(budget >= 0, "a step has at most max_num_tokens");
    require(snapshot_.running.empty() || !may_run_.contains(snapshot_.running.front().id),
            "the first in rank advances");
  }

  const SchedulerConfig& config_;
  const BlockDemand demand_;
  const Snapshot& snapshot_;
  const StepPlan& plan_;
  std::array<std::int64_t, kMaxKvGroups> free_blocks_{};
  std::unordered_map<SequenceId, const SequenceView*> may_run_;
};

}  // namespace

void Scheduler::check_invariants(const Snapshot& snapshot, const StepPlan& plan) const {
  PlanCheck(config_, snapshot, plan).run();
}

}  // namespace aotllm
