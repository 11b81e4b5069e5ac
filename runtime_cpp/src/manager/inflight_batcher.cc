#include "manager/inflight_batcher.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "aotllm/errors.h"

namespace aotllm {
namespace {

constexpr std::size_t kFewCandidates = 4;

/// Plans in a row that run nothing though something waits or runs. One is possible; many are a fault.
constexpr int kMostEmptyPlans = 100;

KvCacheConfig cache_config(const Limits& limits) {
  KvCacheConfig config;
  config.tokens_per_block = limits.kv_memory.tokens_per_block;
  config.max_events = limits.max_kv_events;
  for (const KvMemory::Group& group : limits.kv_memory.groups) {
    config.groups.push_back({group.window, group.device_blocks, group.host_blocks});
  }
  return config;
}

}  // namespace

InflightBatcher::InflightBatcher(ModelRunner& runner, const Limits& limits, const BatcherParts& parts)
    : runner_(runner),
      limits_(limits),
      parts_(parts),
      scheduler_(limits.scheduler),
      kv_(cache_config(limits)),
      sampler_(limits.vocab_size),
      waiting_(limits.scheduler.queue_policy, limits.scheduler.max_wait_steps,
               [this](SequenceId id) { return kv_.match(at(id).keys, at(id).tokens).num_tokens; }),
      count_slots_(runner.sampling_support().count_slots),
      step_(limits.scheduler, limits.vocab_size, runner, count_slots_),
      next_(limits.scheduler, limits.vocab_size, runner, count_slots_),
      side_job_([this] {
        fill_masks();
        plan_ahead();
      }) {}

void InflightBatcher::add(std::unique_ptr<Sequence> sequence) {
  Sequence& added = *sequence;
  by_request_.emplace(std::pair(added.request_id, added.index), added.id);
  if (added.deadline != Clock::time_point::max()) {
    deadlines_.emplace(added.deadline, added.id);
  }
  sequences_.emplace(added.id, std::move(sequence));
  enqueue(added, false);
  if (num_places() > 0) {
    ahead_.spoil();
  }
}

void InflightBatcher::enqueue(Sequence& sequence, bool preempted) {
  sequence.arrival_step = totals_.steps;
  waiting_.insert({.id = sequence.id,
                   .priority = sequence.priority,
                   .arrival_step = sequence.arrival_step,
                   .overdue = sequence.overdue,
                   .preempted = preempted});
  queued_tokens_ += sequence.num_prompt_tokens;
}

void InflightBatcher::plan() {
  step_begun_ = Clock::now();
  current_ = {.step = totals_.steps + 1};
  if (parts_.watchdog != nullptr) {
    parts_.watchdog->begin(current_.step);
  }
  for (const SequenceId id : waiting_.advance(totals_.steps)) {
    at(id).overdue = true;
  }
  if (under_way_) {
    current_.planned_ahead = true;
  } else {
    step_.clear();
    if (ahead_.valid()) {
      plan_ = ahead_.take();
      current_.planned_ahead = true;
      fill_step();
    }
    if (step_.empty()) {  // no plan was made ahead, or all of its sequences have ended
      plan_from_truth();
    }
    step_.schedule();
  }
  saturated_ = waiting_.size() > 0;
  num_running_before_ = running_.size();
}

/// Plans from the state of now. Of those that wait, first a few are looked at, since mostly the first does not fit;
/// more where all of them are taken. Those behind the first that does not fit change nothing.
void InflightBatcher::plan_from_truth() {
  Snapshot before = snapshot(false);
  std::size_t num_candidates = kFewCandidates;
  while (true) {
    add_candidates(before, num_candidates);
    plan_ = scheduler_.plan(before);
    const std::size_t passed = plan_.admitted.size() + static_cast<std::size_t>(plan_.num_sharing);
    if (passed < before.waiting.size() || before.waiting.size() < num_candidates) {
      break;
    }
    num_candidates *= 4;
  }
#ifndef NDEBUG
  scheduler_.check_invariants(before, plan_);
#endif
  current_.planned_ahead = false;
  for (const SequenceId id : plan_.preempted) {
    preempt(at(id));
  }
  for (const SequenceId id : plan_.admitted) {
    admit(at(id));
  }
  fill_step();
  if (!step_.empty()) {
    num_empty_plans_ = 0;
  } else if (!sequences_.empty() && ++num_empty_plans_ > kMostEmptyPlans) {
    num_empty_plans_ = 0;
    throw Error(ErrorKind::kInternal, "no sequence can advance: the plans of many steps have been empty");
  }
}

/// The state of now, or with `projected` the state that the step in hand leaves at most: see LookAhead.
Snapshot InflightBatcher::snapshot(bool projected) const {
  Snapshot snapshot;
  for (int group = 0; group < kv_.num_groups(); ++group) {
    snapshot.free_blocks[static_cast<std::size_t>(group)] = kv_.num_free(group);
    snapshot.total_blocks[static_cast<std::size_t>(group)] = kv_.num_blocks(group);
  }
  const bool scarce = memory_is_scarce();
  snapshot.running.reserve(running_.size());
  for (const Sequence* sequence : running_) {
    SequenceView view = sequence->view();
    if (scarce) {
      view.num_shared = kv_.num_shared(sequence->table);
    }
    bool may_speculate = sequence->may_speculate();
    if (projected && sequence->num_scheduled > 0) {
      view.num_computed += sequence->num_scheduled;
      view.num_uncertain = sequence->num_scheduled_drafts;
      if (view.num_computed >= view.num_tokens) {  // it samples
        view.num_tokens = view.num_computed + 1;
        view.is_context = false;
        may_speculate = sequence->constraint == nullptr;
        if (view.num_tokens >= view.max_len) {
          if (sequence->num_scheduled_drafts == 0) {
            continue;  // it ends
          }
          view.num_uncertain -= view.num_computed - (view.max_len - 2);
          view.num_tokens = view.max_len - 1;
          view.num_computed = view.num_tokens - 1;
        }
      }
    }
    if (parts_.proposer != nullptr && may_speculate) {
      view.num_drafts = std::max(0, std::min(limits_.num_speculative_tokens, view.max_len - view.num_tokens - 1));
    }
    snapshot.running.push_back(view);
  }
  return snapshot;
}

/// Fills `snapshot.waiting` up to `count`, where there are places in the batch.
void InflightBatcher::add_candidates(Snapshot& snapshot, std::size_t count) const {
  if (num_places() == 0 || waiting_.size() <= snapshot.waiting.size()) {
    return;
  }
  const std::vector<SequenceId> ids = waiting_.front(count);
  for (std::size_t i = snapshot.waiting.size(); i < ids.size(); ++i) {
    snapshot.waiting.push_back(waiting_view(at(ids[i])));
  }
}

/// Somebody may be admitted, or find no block, in the next step: who shares blocks matters then, and takes time to find
/// out.
bool InflightBatcher::memory_is_scarce() const {
  if (num_places() > 0 && waiting_.size() > 0) {
    return true;
  }
  const SchedulerConfig& limits = limits_.scheduler;
  const std::int64_t most =
      static_cast<std::int64_t>(running_.size()) * 2 + limits.max_num_tokens / limits.tokens_per_block;
  for (int group = 0; group < kv_.num_groups(); ++group) {
    if (kv_.num_free(group) < most) {
      return true;
    }
  }
  return false;
}

SequenceView InflightBatcher::waiting_view(const Sequence& sequence) const {
  SequenceView view = sequence.view();
  view.is_context = true;
  if (!sequence.computes_in_full()) {
    const PrefixMatch match = kv_.match(sequence.keys, sequence.tokens);
    view.num_computed = match.num_tokens;
    view.num_blocks = match.num_blocks;
    view.cost = match.cost;
  }
  return view;
}

void InflightBatcher::preempt(Sequence& sequence) {
  running_.erase(&sequence);
  count_slots_.release(sequence);
  sequence.move_to(SequenceState::kQueued);
  kv_.release(sequence.table, sequence.keys, computed(sequence), sequence.retention);
  sequence.num_computed = 0;
  ++sequence.num_preemptions;
  if (parts_.proposer != nullptr) {
    parts_.proposer->forget(sequence.id);
  }
  enqueue(sequence, true);
  ++totals_.preemptions;
  ++current_.preempted;
}

void InflightBatcher::admit(Sequence& sequence) {
  waiting_.erase(sequence.id);
  queued_tokens_ -= sequence.num_prompt_tokens;
  sequence.move_to(SequenceState::kContext);
  sequence.num_computed = kv_.acquire(sequence.table, sequence.keys, sequence.tokens, sequence.retention,
                                      sequence.computes_in_full() ? 0 : std::numeric_limits<std::int32_t>::max());
  if (sequence.num_cached < 0) {
    sequence.num_cached = std::min(sequence.num_computed, sequence.num_prompt_tokens);
    sequence.admitted = step_begun_;
  }
  running_.insert(&sequence);
}

/// Takes blocks for the planned tokens, as far as their sequences are still there, and packs them.
void InflightBatcher::fill_step() {
  propose_drafts();
  for (std::size_t i = 0; i < plan_.sequences.size(); ++i) {
    const auto found = sequences_.find(plan_.sequences[i].id);
    if (found == sequences_.end()) {
      continue;
    }
    Sequence& sequence = *found->second;
    const auto remaining = static_cast<std::int32_t>(sequence.tokens.size()) - sequence.num_computed;
    const std::int32_t num_tokens = std::min(plan_.sequences[i].num_tokens, remaining);
    std::span<const TokenId> drafts;
    if (num_tokens == remaining && i < drafts_.size()) {
      drafts = drafts_[i];
    }
    const std::int32_t end = sequence.num_computed + num_tokens + static_cast<std::int32_t>(drafts.size());
    if (!kv_.can_grow(sequence.table, sequence.num_computed, end)) {
      continue;  // two that were to drop a block that they share made room for one: this one pauses for a step
    }
    kv_.grow(sequence.table, sequence.num_computed, end);
    step_.add(sequence, num_tokens, drafts, kv_.num_groups());
  }
}

/// Fills drafts_, entry by entry of plan_.sequences, for generations that have room for some in the plan.
void InflightBatcher::propose_drafts() {
  drafts_.clear();
  if (parts_.proposer == nullptr) {
    return;
  }
  queries_.clear();
  query_entries_.clear();
  for (std::size_t i = 0; i < plan_.sequences.size(); ++i) {
    const auto found = sequences_.find(plan_.sequences[i].id);
    if (found == sequences_.end() || !found->second->may_speculate()) {
      continue;
    }
    const Sequence& sequence = *found->second;
    const auto num_tokens = static_cast<std::int32_t>(sequence.tokens.size());
    const std::int32_t room = std::min({plan_.sequences[i].num_tokens - (num_tokens - sequence.num_computed),
                                        sequence.max_len - num_tokens - 1, limits_.num_speculative_tokens});
    if (room > 0) {
      queries_.push_back({sequence.id, sequence.tokens, room, &sequence.keys.realm()});
      query_entries_.push_back(i);
    }
  }
  if (queries_.empty()) {
    return;
  }
  std::vector<std::vector<TokenId>> proposals;
  try {
    parts_.proposer->propose(queries_, proposals);
  } catch (const std::exception&) {
    return;  // speculation is an aid: the step goes on without it
  }
  drafts_.resize(plan_.sequences.size());
  for (std::size_t q = 0; q < std::min(proposals.size(), queries_.size()); ++q) {
    const auto count = std::min(proposals[q].size(), static_cast<std::size_t>(queries_[q].max_drafts));
    const auto valid = std::find_if(proposals[q].begin(), proposals[q].begin() + static_cast<std::ptrdiff_t>(count),
                                    [this](TokenId t) { return t < 0 || t >= limits_.vocab_size; });
    drafts_[query_entries_[q]].assign(proposals[q].begin(), valid);
  }
}

bool InflightBatcher::uses_adapter(AdapterId id) const {
  return std::any_of(sequences_.begin(), sequences_.end(),
                     [id](const auto& each) { return each.second->adapter == id; });
}

Stats InflightBatcher::stats() const {
  Stats stats = totals_;
  stats.queued = static_cast<std::int64_t>(waiting_.size());
  stats.running = static_cast<std::int64_t>(running_.size());
  stats.blocks_total = kv_.num_blocks(0);
  stats.blocks_used = kv_.num_used(0);
  stats.blocks_cached = kv_.num_cached(0);
  stats.host_blocks_used = kv_.num_host_used(0);
  stats.cache = kv_.stats();
  if (parts_.watchdog != nullptr) {
    stats.stuck_steps = parts_.watchdog->num_reports();
  }
  return stats;
}

void InflightBatcher::check_invariants() const {
  const auto require = [](bool holds, const char* rule) {
    if (!holds) {
      throw Error(ErrorKind::kInternal, std::string("batcher breaks the rule: ") + rule);
    }
  };
  require(waiting_.size() + running_.size() == sequences_.size(), "a sequence either waits or runs");
  require(by_request_.size() == sequences_.size(), "every sequence is filed under its request");
  require(running_.size() <= static_cast<std::size_t>(limits_.scheduler.max_batch_size), "max_batch_size run at most");
  std::int64_t queued_tokens = 0;
  std::int32_t num_slots = 0;
  std::vector<const BlockTable*> tables;
  for (const auto& [id, sequence] : sequences_) {
    const SequenceView view = sequence->view();
    const bool waits = waiting_.contains(id);
    queued_tokens += waits ? sequence->num_prompt_tokens : 0;
    require(id == view.id, "sequences are filed under their ids");
    require(waits != running_.contains(sequence.get()), "a sequence either waits or runs");
    require(waits == (sequence->state == SequenceState::kQueued), "the state says whether it waits");
    require(sequence->state != SequenceState::kFinished, "finished sequences are forgotten");
    require(0 <= view.num_computed && view.num_computed < view.num_tokens && view.num_tokens < view.max_len,
            "0 ≤ num_computed < num_tokens < max_len");
    require(!waits || sequence->table.empty(), "who waits holds no blocks");
    require(sequence->state != SequenceState::kGenerating || sequence->constraint != nullptr || view.remaining() == 1,
            "a generation without grammar lacks one token");
    require(sequence->count_slot < 0 || (!waits && count_slots_.belongs_to(sequence->count_slot, *sequence)),
            "who runs has its slot for itself");
    num_slots += sequence->count_slot < 0 ? 0 : 1;
    tables.push_back(&sequence->table);
  }
  require(num_slots == count_slots_.num_held(), "a slot that is held is that of a sequence");
  require(queued_tokens == queued_tokens_, "queued tokens are those of who waits");
  waiting_.check_invariants();
  kv_.check_invariants(tables);
}

}  // namespace aotllm
