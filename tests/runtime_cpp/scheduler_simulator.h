#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <random>
#include <set>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "aotllm/kv_cache.h"
#include "aotllm/scheduler.h"
#include "aotllm/waiting_queue.h"
#include "simulation_workload.h"

namespace aotllm::testing {

/// Runs random sequences to their ends with the scheduler, the waiting queue and `Memory` (see CountedMemory), and
/// checks at each step what they promise. Throws std::logic_error, or Error, where one breaks.
template <class Memory>
class SchedulerSimulator {
 public:
  SchedulerSimulator(const Workload& workload, std::uint32_t seed)
      : workload_(workload),
        random_(seed),
        scheduler_(workload.config),
        memory_(workload.config, workload.total_blocks),
        queue_(workload.config.queue_policy, workload.config.max_wait_steps,
               [this](SequenceId id) { return match(sequences_.at(id)).num_tokens; }) {
    std::int32_t longest = 1;
    for (; longest < blocks_for(workload.max_len); longest *= 2) {
      ++most_preemptions_;
    }
  }

  SimulationResult run() {
    while (submitted_ < workload_.num_requests || !sequences_.empty()) {
      step();
      require(result_.steps < 1000000, "every sequence ends");
    }
    for (std::size_t group = 0; group < workload_.config.windows.size(); ++group) {
      require(memory_.free_blocks()[group] == workload_.total_blocks[group], "all blocks are free after the end");
    }
    result_.distinct_prefix_tokens =
        static_cast<std::int64_t>(families_seen_.size()) * full_prefix_blocks() * workload_.config.tokens_per_block;
    return result_;
  }

 private:
  struct Sequence {
    SequenceView view;      ///< lengths and flags; blocks, keys and projection are filled in by view_of
    std::int32_t stop_len;  ///< num_tokens at which it ends, ≤ max_len
    std::int32_t family = -1;
    std::vector<TokenId> tokens;  ///< all that it comes to have, up to max_len
    typename Memory::Table table;
    bool runs = false;
    bool was_admitted = false;
    bool cancelled = false;             ///< while its step runs
    std::int32_t num_in_flight = 0;     ///< tokens of the step that runs now
    std::int32_t most_computed = 0;     ///< before preemptions
    std::int64_t deadline = INT64_MAX;  ///< step by which an overdue one must run
  };

  static void require(bool holds, const std::string& property) {
    if (!holds) {
      throw std::logic_error("the simulation breaks the property: " + property);
    }
  }

  std::int32_t between(std::int32_t low, std::int32_t high) {
    return low + static_cast<std::int32_t>(random_() % static_cast<std::uint32_t>(high - low + 1));
  }
  bool chance(std::int32_t percent) { return between(0, 99) < percent; }
  std::int32_t blocks_for(std::int32_t tokens) const {
    return (tokens + workload_.config.tokens_per_block - 1) / workload_.config.tokens_per_block;
  }
  std::int32_t full_prefix_blocks() const { return workload_.prefix_len / workload_.config.tokens_per_block; }

  void step() {
    ++result_.steps;
    while (submitted_ < workload_.num_requests && chance(workload_.arrival_percent)) {
      submit();
    }
    for (const SequenceId id : queue_.advance(result_.steps)) {
      set_overdue(sequences_.at(id));
    }
    queue_.check_invariants();
    if (!workload_.plans_ahead) {
      finish_step();
    }
    const Snapshot snapshot = project();
    const StepPlan plan = scheduler_.plan(snapshot);
    scheduler_.check_invariants(snapshot, plan);
    check_plan(snapshot, plan);
    if (workload_.plans_ahead) {
      cancel_some();
      finish_step();
    }
    cancel_some();
    start_step(plan);
  }

  void submit() {
    Sequence sequence;
    SequenceView& view = sequence.view;
    view.id = ++submitted_;
    view.priority = between(1, workload_.num_priorities);
    view.max_len = between(std::min(workload_.min_prompt + 1, workload_.max_len), workload_.max_len);
    view.num_tokens = between(workload_.min_prompt, std::min(view.max_len - 1, workload_.max_prompt));
    view.is_context = true;
    view.max_chunk = chance(10) ? between(1, workload_.config.max_chunk_tokens) : 0;
    view.num_drafts = between(0, workload_.max_drafts);
    sequence.stop_len = chance(workload_.stop_percent) ? between(view.num_tokens + 1, view.max_len) : view.max_len;
    if (workload_.num_families > 0 && view.num_tokens > workload_.prefix_len) {
      sequence.family = between(0, workload_.num_families - 1);
      families_seen_.insert(sequence.family);
    }
    for (std::int32_t i = 0; i < view.max_len; ++i) {
      const bool common = sequence.family >= 0 && i < workload_.prefix_len;
      sequence.tokens.push_back(static_cast<TokenId>(common ? sequence.family : workload_.num_families + view.id));
    }
    sequence.table = memory_.make_table(sequence.tokens);
    const SequenceId id = view.id;
    sequences_.emplace(id, std::move(sequence));
    queue_.insert({.id = id, .priority = sequences_.at(id).view.priority, .arrival_step = result_.steps});
  }

  /// It runs when all have ended that run now or go ahead of it. Each step computes a token of the first in rank at
  /// least, and each position is computed once and once more for each preemption.
  void set_overdue(Sequence& sequence) {
    sequence.view.overdue = true;
    ++result_.became_overdue;
    std::int64_t tokens = 0;
    for (const auto& [id, other] : sequences_) {
      if (other.runs || id < sequence.view.id) {
        tokens += other.view.max_len;
      }
    }
    sequence.deadline = result_.steps + 2 + tokens * (most_preemptions_ + 1);
  }

  std::span<const TokenId> first_tokens(const Sequence& sequence, std::int32_t count) const {
    return std::span(sequence.tokens).first(static_cast<std::size_t>(count));
  }

  PrefixMatch match(const Sequence& sequence) const {
    return memory_.match(sequence.table, first_tokens(sequence, sequence.view.num_tokens));
  }

  /// The state after the step that runs now, at most; the state itself where none does.
  Snapshot project() {
    Snapshot snapshot;
    BlockCounts soon_free{};
    snapshot.total_blocks = workload_.total_blocks;
    snapshot.free_blocks = memory_.free_blocks();
    for (const auto& [id, sequence] : sequences_) {
      if (!sequence.runs) {
        continue;
      }
      const SequenceView view = view_of(sequence);
      if (view.num_tokens < view.max_len) {
        snapshot.running.push_back(view);
        continue;
      }
      for (std::size_t group = 0; group < kMaxKvGroups; ++group) {
        soon_free[group] += view.num_blocks[group] - view.num_shared[group];
      }
    }
    for (std::size_t group = 0; group < kMaxKvGroups; ++group) {
      snapshot.free_blocks[group] += soon_free[group];
    }
    std::sort(snapshot.running.begin(), snapshot.running.end(), ranks_before);
    for (const SequenceId id : queue_.front(static_cast<std::size_t>(workload_.config.max_batch_size))) {
      snapshot.waiting.push_back(view_of_waiting(sequences_.at(id), soon_free));
    }
    return snapshot;
  }

  SequenceView view_of(const Sequence& sequence) const {
    SequenceView view = sequence.view;
    view.num_preemptions = workload_.hides_preemptions ? 0 : view.num_preemptions;
    view.num_blocks = memory_.held(sequence.table);
    view.num_shared = memory_.shared(sequence.table);
    if (sequence.num_in_flight > 0) {
      view.num_computed += sequence.num_in_flight;
      if (!view.is_context) {
        view.num_uncertain = sequence.num_in_flight - 1;
        view.num_tokens = view.num_computed + 1;
        if (view.num_uncertain > 0 && view.num_tokens == view.max_len) {  // if all are accepted; else it goes on
          --view.num_computed, --view.num_tokens, --view.num_uncertain;
        }
      } else if (view.num_computed == view.num_tokens) {
        view.is_context = false;
        ++view.num_tokens;
      }
    }
    view.block_keys = memory_.block_keys(sequence.table)
                          .first(static_cast<std::size_t>(view.num_tokens / workload_.config.tokens_per_block));
    return view;
  }

  SequenceView view_of_waiting(const Sequence& sequence, const BlockCounts& soon_free) const {
    SequenceView view = view_of(sequence);
    const PrefixMatch found = match(sequence);
    view.num_computed = found.num_tokens;
    view.num_blocks = found.num_blocks;
    for (std::size_t group = 0; group < kMaxKvGroups; ++group) {
      view.cost[group] = std::min(found.cost[group] + soon_free[group], found.num_blocks[group]);
    }
    return view;
  }

  /// What the scheduler's own check does not know: that nobody pauses in vain.
  void check_plan(const Snapshot& snapshot, const StepPlan& plan) {
    std::map<SequenceId, std::int32_t> tokens;
    std::int32_t total = 0;
    for (const ScheduledSequence& scheduled : plan.sequences) {
      tokens[scheduled.id] = scheduled.num_tokens;
      total += scheduled.num_tokens;
    }
    require(total <= workload_.config.max_num_tokens, "a step stays within its budget");
    result_.held_back += plan.num_sharing;
    if (workload_.config.capacity_policy == CapacityPolicy::kGuaranteedNoEvict) {
      require(plan.preempted.empty(), "guaranteed_no_evict preempts nobody");
      // Of two that give back a block that they share, in the same step, neither may count on it, and one may wait.
      bool window_is_shared = false;
      for (const SequenceView& view : snapshot.running) {
        for (std::size_t group = 0; group < workload_.config.windows.size(); ++group) {
          window_is_shared |= workload_.config.windows[group] > 0 && view.num_shared[group] > 0;
        }
      }
      for (const SequenceView& view : snapshot.running) {
        const std::int32_t chunk = view.max_chunk > 0 ? std::min(view.max_chunk, workload_.config.max_chunk_tokens)
                                                      : workload_.config.max_chunk_tokens;
        const std::int32_t drafts = std::min(view.num_drafts, view.max_len - view.num_tokens - 1);
        const std::int32_t wanted = std::min(chunk, view.remaining() + (view.is_context ? 0 : drafts));
        require(total == workload_.config.max_num_tokens || tokens[view.id] == wanted || window_is_shared,
                "under guaranteed_no_evict nobody lacks memory");
      }
    }
  }

  void cancel_some() {
    if (sequences_.empty() || !chance(workload_.cancel_percent)) {
      return;
    }
    auto chosen = sequences_.lower_bound(between(1, submitted_));
    chosen = chosen == sequences_.end() ? sequences_.begin() : chosen;
    if (chosen->second.num_in_flight > 0) {
      chosen->second.cancelled = true;
    } else {
      end(chosen->second);
    }
  }

  void end(Sequence& sequence) {
    queue_.erase(sequence.view.id);
    release(sequence);
    sequences_.erase(sequence.view.id);
  }

  void release(Sequence& sequence) {
    memory_.release(sequence.table, first_tokens(sequence, sequence.view.num_computed));
  }

  void start_step(const StepPlan& plan) {
    for (const SequenceId id : plan.preempted) {
      if (sequences_.contains(id)) {
        preempt(sequences_.at(id));
      }
    }
    for (const SequenceId id : plan.admitted) {
      if (sequences_.contains(id)) {
        admit(sequences_.at(id));
      }
    }
    for (const ScheduledSequence& scheduled : plan.sequences) {
      if (!sequences_.contains(scheduled.id)) {
        continue;
      }
      Sequence& sequence = sequences_.at(scheduled.id);
      const SequenceView& view = sequence.view;
      sequence.num_in_flight =
          view.is_context ? std::min(scheduled.num_tokens, view.remaining())
                          : 1 + between(0, std::min(scheduled.num_tokens - 1, view.max_len - view.num_tokens - 1));
      memory_.grow(sequence.table, view.num_computed, view.num_computed + sequence.num_in_flight);
    }
  }

  void preempt(Sequence& sequence) {
    SequenceView& view = sequence.view;
    ++result_.preemptions;
    ++view.num_preemptions;
    require(view.num_preemptions <= most_preemptions_ || workload_.hides_preemptions,
            "preemptions are at most the logarithm of the longest length");
    release(sequence);
    sequence.runs = false;
    view.num_computed = 0;
    view.is_context = true;
    queue_.insert({view.id, view.priority, result_.steps, view.overdue, /*preempted=*/true});
  }

  void admit(Sequence& sequence) {
    SequenceView& view = sequence.view;
    const SequenceId first = queue_.front(1).front();
    require(first == view.id || !sequences_.at(first).view.overdue, "nobody overtakes who is overdue");
    require(result_.steps <= sequence.deadline, "an overdue one waits for those ahead only");
    if (!sequence.was_admitted && workload_.num_families == 0 &&
        workload_.config.queue_policy != QueuePolicy::kLongestPrefix) {
      const bool by_priority = workload_.config.queue_policy == QueuePolicy::kPriority;
      SequenceId& latest = latest_newcomer_[by_priority ? view.priority : 0];
      require(view.id > latest, "first come, first served among equals");
      latest = view.id;
    }
    queue_.erase(view.id);
    sequence.runs = sequence.was_admitted = true;
    view.num_computed = memory_.acquire(sequence.table, first_tokens(sequence, view.num_tokens));
  }

  void finish_step() {
    for (auto it = sequences_.begin(); it != sequences_.end();) {
      Sequence& sequence = (it++)->second;
      if (sequence.num_in_flight > 0) {
        const std::int32_t tokens = std::exchange(sequence.num_in_flight, 0);
        count(sequence, tokens);
        advance(sequence, tokens);
      }
    }
  }

  void count(Sequence& sequence, std::int32_t tokens) {
    const std::int32_t begin = sequence.view.num_computed;
    const std::int32_t end = begin + tokens;
    result_.computed_tokens += tokens;
    result_.recomputed_tokens += std::max(std::min(end, sequence.most_computed) - begin, 0);
    if (sequence.family >= 0) {
      const std::int32_t prefix = full_prefix_blocks() * workload_.config.tokens_per_block;
      result_.prefix_tokens += std::max(std::min(end, prefix) - begin, 0);
    }
    sequence.most_computed = std::max(sequence.most_computed, end);
  }

  void advance(Sequence& sequence, std::int32_t tokens) {
    SequenceView& view = sequence.view;
    view.num_computed += view.is_context ? tokens : between(1, tokens);  // some drafts are rejected
    memory_.commit(sequence.table, first_tokens(sequence, view.num_computed));
    if (view.num_computed >= view.num_tokens) {
      result_.generated_tokens += view.num_computed + 1 - view.num_tokens;
      view.is_context = false;
      view.num_tokens = view.num_computed + 1;
    }
    if (sequence.cancelled || view.num_tokens >= sequence.stop_len) {
      end(sequence);
    }
  }

  Workload workload_;
  std::mt19937 random_;
  Scheduler scheduler_;
  Memory memory_;
  std::map<SequenceId, Sequence> sequences_;
  WaitingQueue queue_;
  SimulationResult result_;
  std::int32_t submitted_ = 0;
  std::int32_t most_preemptions_ = 0;  ///< of one sequence: ⌈log2(blocks of the longest)⌉
  std::set<std::int32_t> families_seen_;
  std::map<std::int32_t, SequenceId> latest_newcomer_;  ///< by priority
};

}  // namespace aotllm::testing
