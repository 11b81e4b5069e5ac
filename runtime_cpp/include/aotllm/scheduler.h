#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "aotllm/model_runner.h"

namespace aotllm {

/// Numbers sequences in order of submission, from 1; never reused. A request with n > 1 has n sequences.
using SequenceId = std::int64_t;

/// Who may hold KV memory.
enum class CapacityPolicy : std::uint8_t {
  /// Sequences hold blocks for what they have computed; where a running one finds none, another one is preempted and
  /// computed again later. Fills the memory; the default.
  kMaxUtilization,
  /// A sequence is admitted when the blocks that it may need to its very end are free beside those of all who run.
  /// Nobody is ever preempted.
  kGuaranteedNoEvict,
};

/// Who is admitted first.
enum class QueuePolicy : std::uint8_t {
  kFcfs,           ///< first come, first served
  kPriority,       ///< higher priority first, then first come; the default
  kLongestPrefix,  ///< the longest cached prefix first, then first come
};

/// The limits of a step.
struct SchedulerConfig {
  std::int32_t max_batch_size = 0;       ///< most sequences that run at a time; ≥ 1
  std::int32_t max_num_tokens = 0;       ///< most tokens in one step, over all sequences; ≥ 1
  std::int32_t max_chunk_tokens = 0;     ///< most tokens of one sequence in one step; ≥ 1
  std::int32_t tokens_per_block = 0;     ///< ≥ 1
  std::vector<std::int32_t> windows{0};  ///< of each KV group, 0 = all; as ModelShape::kv_groups
  CapacityPolicy capacity_policy = CapacityPolicy::kMaxUtilization;
  QueuePolicy queue_policy = QueuePolicy::kPriority;
  /// The age bound: who has waited for this many steps goes ahead of all who have not, whatever the policy; ≥ 1.
  std::int64_t max_wait_steps = 2000;
};

/// What the scheduler sees of a sequence: its lengths, 0 ≤ num_computed < num_tokens < max_len.
struct SequenceView {
  SequenceId id = 0;
  std::int32_t priority = 0;
  std::int32_t num_tokens = 0;    ///< tokens known: the prompt and those generated so far
  std::int32_t num_computed = 0;  ///< of those, tokens whose K and V are in the cache (waiting: that are cached)
  std::int32_t max_len = 0;       ///< tokens at which the sequence ends at the latest, prompt included
  std::int32_t max_chunk = 0;     ///< lowers max_chunk_tokens for this sequence; 0 = does not
  std::int32_t num_drafts = 0;    ///< draft tokens to verify behind a generation's one, if the budget has room
  bool is_context = false;        ///< it has not generated a token yet, or generated ones are computed again
  BlockCounts num_blocks{};       ///< KV blocks held, by group (waiting: after it has taken what is cached)
  BlockCounts cost{};             ///< waiting: by how much taking what is cached lowers the free blocks
  std::int32_t num_preemptions = 0;
  std::int32_t num_uncertain = 0;  ///< in a projection: last ones of num_computed, drafts that may yet be rejected
  /// Running: of num_blocks, those that others hold as well, and that do not become free when it leaves them. May be
  /// too high, never too low. In a group with a window those that leave it next suffice, unless the sequence is
  /// preempted.
  BlockCounts num_shared{};
  bool overdue = false;  ///< has waited for longer than the age bound at some time; stays set
  /// Keys of the full blocks of its known tokens (see PrefixKeys); empty = shares nothing. Valid during `plan`.
  std::span<const std::uint64_t> block_keys{};

  /// Tokens to compute before the next one can be sampled: 1 for a generation, more for a context.
  std::int32_t remaining() const { return num_tokens - num_computed; }
};

/// The order of those who run: overdue ones by id, then higher priority first, then first come (lowest id) first.
bool ranks_before(const SequenceView& a, const SequenceView& b) noexcept;

/// The state that a step is planned from, or a projection of it while the step before runs. A projection has every
/// sequence at the most tokens that it may then have, with the blocks for them, and leaves out who surely ends. Blocks
/// that only those hold may count as free where the cost of each waiting one includes as many (it may take just them).
struct Snapshot {
  std::vector<SequenceView> running{};  ///< in rank order
  std::vector<SequenceView> waiting{};  ///< the first of the queue, in its order; as many as may be admitted suffice
  BlockCounts free_blocks{};            ///< by group: free and evictable ones
  BlockCounts total_blocks{};           ///< by group: of the pool; read for groups with a window
};

/// At most `num_tokens` tokens of a sequence from its num_computed on.
struct ScheduledSequence {
  SequenceId id = 0;
  std::int32_t num_tokens = 0;
};

/// What the next step does, in this order: preempt, admit, run. Its parts are upper bounds: where a sequence turns out
/// to have ended, or to have fewer tokens (rejected drafts), what is left is a sound plan, too.
struct StepPlan {
  std::vector<SequenceId> preempted{};         ///< give all blocks back and wait again, last in rank first
  std::vector<SequenceId> admitted{};          ///< start to run, in queue order
  std::vector<ScheduledSequence> sequences{};  ///< the step: of running and admitted ones
  std::int32_t num_sharing = 0;                ///< sequences held back, for another one computes their next block now
};

/// Decides who runs in the next step, and who holds KV memory. Pure: no clock, no kernels, no state but its limits.
///
/// *Budget.* A step has max_num_tokens tokens. The first in rank gets one, then every generation gets its one in rank
/// order, then generations get room for drafts; contexts share what is left in rank order, in chunks; then newcomers
/// likewise.
///
/// *Sharing.* A newcomer whose next block is among those that a context of this step has yet to compute (equal key at
/// the same index) is held back: it takes them from the prefix tree later. It stays in the queue, others may overtake
/// it, and once overdue it is held back no more. A projection shows a running context further than the prefix tree is:
/// what lies between counts as yet to compute.
///
/// *Memory.* Blocks are taken in rank order. A sequence runs as many of its tokens as there are blocks for. With max
/// utilization, where there is none even for its first one, the last in rank of those behind it is preempted; one that
/// finds nobody behind it pauses with its blocks kept. So the first in rank always advances and is never preempted,
/// whence every admitted sequence ends.
///
/// *Admission.* Waiting ones are admitted in queue order while batch, budget and memory last. The first that does not
/// fit ends the pass: nobody overtakes it, however small. Nobody is admitted in a step that preempts.
///
/// *Promise.* A newcomer fits where it and all who run can compute their known tokens and then grow by a horizon (or to
/// their ends) with nobody preempted. Guaranteed no evict: the horizon has no end. Max utilization: it is one block for
/// who was never preempted, doubles with each preemption, and the widest of all concerned counts for all. So memory is
/// filled while that goes well, and where it does not, fewer run: a sequence is preempted at most
/// ⌈log2(blocks of the longest sequence)⌉ times, since from then on all that run with it can reach their ends.
///
/// *Windows.* Blocks that leave a window while their sequence grows make room for its own new ones only. A promise
/// counts on that only as far as blocks are not shared: either Σ most_blocks ≤ total_blocks, or the free blocks suffice
/// with no block given back.
class Scheduler {
 public:
  /// Throws Error(kInternal) where a limit is below 1, or there is no group or more than kMaxKvGroups.
  explicit Scheduler(const SchedulerConfig& config);

  const SchedulerConfig& config() const { return config_; }

  /// The step after `snapshot`, O(running + admitted · contexts of the step). Empty `sequences` only if nothing runs or
  /// waits, given that each sequence alone fits the blocks that there are: what it may ever need ≤ free + held by all,
  /// in each group.
  StepPlan plan(const Snapshot& snapshot) const;

  /// Throws Error(kInternal) naming the broken rule where `plan` is not a sound plan for `snapshot`.
  void check_invariants(const Snapshot& snapshot, const StepPlan& plan) const;

  /// Blocks of a group that a sequence of `max_len` tokens may hold at most at a time: all, or with a window those that
  /// a chunk is in or can see.
  std::int32_t most_blocks(std::int32_t max_len, int group) const;

 private:
  SchedulerConfig config_;
};

}  // namespace aotllm
