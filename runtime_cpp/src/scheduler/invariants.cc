#include <algorithm>
#include <cstdint>
#include <string>
#include <unordered_map>

#include "aotllm/errors.h"
#include "aotllm/scheduler.h"

namespace aotllm {
namespace {

void require(bool holds, const char* rule) {
  if (!holds) {
    throw Error(ErrorKind::kInternal, std::string("step plan breaks the rule: ") + rule);
  }
}

bool in_rank_order(const std::vector<SequenceView>& sequences) {
  return std::is_sorted(sequences.begin(), sequences.end(), ranks_before);
}

}  // namespace

void Scheduler::check_invariants(const Snapshot& snapshot, const StepPlan& plan) const {
  require(in_rank_order(snapshot.running) && in_rank_order(snapshot.waiting), "snapshots are in rank order");
  require(plan.preempted.empty() || plan.admitted.empty(), "no step both preempts and admits");
  require(plan.preempted.size() <= snapshot.running.size(), "only running sequences are preempted");
  require(plan.admitted.size() <= snapshot.waiting.size(), "only waiting sequences are admitted");

  std::int64_t free_blocks = snapshot.free_blocks;
  std::unordered_map<RequestId, const SequenceView*> may_run;
  for (const SequenceView& sequence : snapshot.running) {
    may_run.emplace(sequence.id, &sequence);
  }
  for (std::size_t i = 0; i < plan.preempted.size(); ++i) {
    const SequenceView& last = snapshot.running[snapshot.running.size() - 1 - i];
    require(plan.preempted[i] == last.id, "the last in rank are preempted");
    free_blocks += last.num_blocks;
    may_run.erase(last.id);
  }
  for (std::size_t i = 0; i < plan.admitted.size(); ++i) {
    require(plan.admitted[i] == snapshot.waiting[i].id, "waiting sequences are admitted in rank order");
    may_run.emplace(snapshot.waiting[i].id, &snapshot.waiting[i]);
  }
  require(may_run.size() <= static_cast<std::size_t>(config_.max_batch_size), "at most max_batch_size run");
  require(snapshot.running.empty() || may_run.contains(snapshot.running.front().id), "the first in rank keeps running");

  std::int64_t budget = config_.max_num_tokens;
  for (const ScheduledSequence& scheduled : plan.sequences) {
    const auto found = may_run.find(scheduled.id);
    require(found != may_run.end(), "a step holds running sequences, each once");
    const SequenceView& sequence = *found->second;
    require(scheduled.num_tokens >= 1 && scheduled.num_tokens <= sequence.remaining(),
            "a chunk is within what remains");
    require(scheduled.num_tokens <= config_.max_chunk_tokens, "a chunk has at most max_chunk_tokens");
    budget -= scheduled.num_tokens;
    free_blocks -= std::max(blocks_for(sequence.num_computed + scheduled.num_tokens) - sequence.num_blocks, 0);
    may_run.erase(found);
  }
  require(budget >= 0, "a step has at most max_num_tokens");
  require(free_blocks >= 0, "a step takes no more blocks than are free");
  require(snapshot.running.empty() || !may_run.contains(snapshot.running.front().id), "the first in rank advances");
  require(!plan.sequences.empty() || snapshot.waiting.empty(), "a step runs something while anything waits");
}

}  // namespace aotllm
