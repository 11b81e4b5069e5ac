#pragma once

#include <cstdint>
#include <vector>

#include "aotllm/request.h"

namespace aotllm {

/// The limits of a step.
struct SchedulerConfig {
  std::int32_t max_batch_size = 0;    ///< most sequences that run at a time; ≥ 1
  std::int32_t max_num_tokens = 0;    ///< most tokens in one step, over all sequences; ≥ 1
  std::int32_t max_chunk_tokens = 0;  ///< most tokens of one sequence in one step; ≥ 1
  std::int32_t tokens_per_block = 0;  ///< ≥ 1
};

/// What the scheduler sees of a sequence: its lengths, 0 ≤ num_computed < num_tokens < max_len.
struct SequenceView {
  RequestId id = 0;
  std::int32_t priority = 0;
  std::int32_t num_tokens = 0;    ///< tokens known: the prompt and those generated so far
  std::int32_t num_computed = 0;  ///< of those, tokens whose K and V are in the cache
  std::int32_t max_len = 0;       ///< tokens at which the sequence ends at the latest, prompt included
  std::int32_t num_blocks = 0;    ///< KV blocks held

  /// Tokens to compute before the next one can be sampled: 1 for a generation, more for a context.
  std::int32_t remaining() const { return num_tokens - num_computed; }
};

/// The one order of service: higher priority first, then first come (lowest id) first.
bool ranks_before(const SequenceView& a, const SequenceView& b) noexcept;

/// The state that a step is planned from.
struct Snapshot {
  std::vector<SequenceView> running{};  ///< in rank order
  std::vector<SequenceView> waiting{};  ///< in rank order; the first max_batch_size of them suffice
  std::int32_t free_blocks = 0;
};

/// `num_tokens` tokens of a sequence from its num_computed on.
struct ScheduledSequence {
  RequestId id = 0;
  std::int32_t num_tokens = 0;
};

/// What the next step does, in this order: preempt, admit, run.
struct StepPlan {
  std::vector<RequestId> preempted{};          ///< give all blocks back and wait again, last in rank first
  std::vector<RequestId> admitted{};           ///< start to run, in rank order
  std::vector<ScheduledSequence> sequences{};  ///< the step: of running and admitted ones
};

/// Decides who runs in the next step, and who holds KV memory. Pure: no clock, no kernels, no state but its limits.
///
/// *Budget.* A step has max_num_tokens tokens. The first in rank gets one, then every generation gets its one in rank
/// order; contexts share what is left in rank order, in chunks of at most max_chunk_tokens; then newcomers likewise.
///
/// *Memory* (in the manner of "max utilization"). A sequence holds blocks for what it has computed, not for what it
/// might generate. Where a running sequence needs a block and none is free, the last in rank of those behind it is
/// preempted: its blocks are freed, and it waits to recompute prompt and generated tokens. One that finds nobody behind
/// it runs fewer tokens, or pauses with its blocks kept. So the first in rank always advances and is never preempted,
/// whence every admitted request ends.
///
/// *Admission.* Waiting ones are admitted in rank order while batch, budget and memory last. The first that does not
/// fit ends the pass: nobody overtakes it, however small. It fits when the free blocks cover its known tokens plus one
/// block of growth, after the same is set aside for all who run: this spares newcomers from being preempted at once.
/// Nobody is admitted in a step that preempts, and nobody is preempted in order to admit another.
class Scheduler {
 public:
  /// Throws Error(kInternal) where a limit is below 1.
  explicit Scheduler(const SchedulerConfig& config);

  const SchedulerConfig& config() const { return config_; }

  /// The step after `snapshot`. Empty `sequences` only if nothing runs or waits, given that each sequence alone fits
  /// the blocks that there are: blocks(max_len) ≤ free + held by all.
  StepPlan plan(const Snapshot& snapshot) const;

  /// Throws Error(kInternal) naming the broken rule where `plan` is not a sound plan for `snapshot`.
  void check_invariants(const Snapshot& snapshot, const StepPlan& plan) const;

 private:
  std::int32_t blocks_for(std::int32_t num_tokens) const;
  std::int32_t reserved_blocks(const SequenceView& sequence) const;
  std::vector<std::int32_t> share_budget(const std::vector<SequenceView>& running) const;
  void find_blocks(const Snapshot& snapshot, std::vector<std::int32_t>& tokens, StepPlan& plan) const;
  void admit(const Snapshot& snapshot, std::int32_t budget, StepPlan& plan) const;

  SchedulerConfig config_;
};

}  // namespace aotllm
