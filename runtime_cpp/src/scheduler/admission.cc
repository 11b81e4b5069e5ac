#include "scheduler/admission.h"

#include <algorithm>
#include <limits>

namespace aotllm {
namespace {

constexpr std::int64_t kNoEnd = std::numeric_limits<std::int32_t>::max();

}  // namespace

Admission::Admission(const SchedulerConfig& config, const BlockDemand& demand, const Snapshot& snapshot,
                     const std::vector<std::int32_t>& tokens)
    : config_(config), demand_(demand), snapshot_(snapshot) {
  members_.reserve(snapshot.running.size() + 1);
  std::int64_t horizon = 0;
  for (std::size_t i = 0; i < snapshot.running.size(); ++i) {
    members_.push_back({&snapshot.running[i], tokens[i], /*is_newcomer=*/false});
    horizon = std::max(horizon, horizon_of(snapshot.running[i]));
  }
  widen(horizon);
}

/// Tokens by which a sequence is to grow undisturbed, beyond those known.
std::int64_t Admission::horizon_of(const SequenceView& sequence) const {
  constexpr std::int32_t kMostDoublings = 31;
  if (config_.capacity_policy == CapacityPolicy::kGuaranteedNoEvict) {
    return kNoEnd;
  }
  return std::int64_t{config_.tokens_per_block} << std::min(sequence.num_preemptions, kMostDoublings);
}

void Admission::add(const Member& member, Totals& totals) const {
  const SequenceView& sequence = *member.sequence;
  const auto grown =
      static_cast<std::int32_t>(std::min<std::int64_t>(sequence.num_tokens + horizon_, sequence.max_len));
  const std::int32_t target = std::max(grown, sequence.num_computed + member.tokens);
  for (int group = 0; group < demand_.num_groups(); ++group) {
    const auto g = static_cast<std::size_t>(group);
    totals.to_take[g] += demand_.to_grow(sequence, target, group) + (member.is_newcomer ? sequence.cost[g] : 0);
    if (demand_.has_window(group)) {
      totals.held[g] += std::max(demand_.most_blocks(target, group), sequence.num_blocks[g]);
    }
  }
}

void Admission::widen(std::int64_t horizon) {
  if (horizon <= horizon_) {
    return;
  }
  horizon_ = horizon;
  totals_ = {};
  for (const Member& member : members_) {
    add(member, totals_);
  }
}

bool Admission::fits(const SequenceView& newcomer) {
  if (members_.empty()) {
    return true;  // alone it fits; a projection may hide blocks of those who are about to end
  }
  widen(horizon_of(newcomer));
  Totals totals = totals_;
  add({&newcomer, 0, /*is_newcomer=*/true}, totals);
  for (int group = 0; group < demand_.num_groups(); ++group) {
    const auto g = static_cast<std::size_t>(group);
    const bool by_free_blocks = totals.to_take[g] <= snapshot_.free_blocks[g];
    const bool by_window = demand_.has_window(group) && totals.held[g] <= snapshot_.total_blocks[g];
    if (!by_free_blocks && !by_window) {
      return false;
    }
  }
  return true;
}

void Admission::admit(const SequenceView& newcomer) {
  widen(horizon_of(newcomer));
  members_.push_back({&newcomer, 0, /*is_newcomer=*/true});
  add(members_.back(), totals_);
}

}  // namespace aotllm
