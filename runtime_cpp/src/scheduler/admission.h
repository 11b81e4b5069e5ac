#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "aotllm/scheduler.h"
#include "scheduler/block_demand.h"

namespace aotllm {

/// The promise that admission rests on (see Scheduler): all members can compute their known tokens and grow by the
/// horizon, or to their ends, with nobody preempted.
class Admission {
 public:
  /// Members are those who run, of which each runs `tokens` in this step, drafts included. The spans of `snapshot` must
  /// outlive this.
  Admission(const SchedulerConfig& config, const BlockDemand& demand, const Snapshot& snapshot,
            const std::vector<std::int32_t>& tokens);

  /// Whether the promise can be kept with `newcomer` as a member, at its horizon if that is wider.
  bool fits(const SequenceView& newcomer);

  /// Makes `newcomer` a member, after `fits`.
  void admit(const SequenceView& newcomer);

 private:
  struct Member {
    const SequenceView* sequence;
    std::int32_t tokens;  ///< of this step
    bool is_newcomer;
  };
  /// What members may come to, by group.
  struct Totals {
    std::array<std::int64_t, kMaxKvGroups> to_take{};  ///< blocks to take with none given back
    std::array<std::int64_t, kMaxKvGroups> held{};     ///< most blocks held at a time, shared ones counted for each
  };

  std::int64_t horizon_of(const SequenceView& sequence) const;
  void add(const Member& member, Totals& totals) const;
  void widen(std::int64_t horizon);

  const SchedulerConfig& config_;
  const BlockDemand& demand_;
  const Snapshot& snapshot_;
  std::vector<Member> members_;
  std::int64_t horizon_ = 0;  ///< tokens
  Totals totals_;             ///< of all members at this horizon
};

}  // namespace aotllm
