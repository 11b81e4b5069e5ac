#include "aotllm/scheduler.h"

#include <algorithm>
#include <string>
#include <utility>

#include "aotllm/errors.h"
#include "scheduler/admission.h"
#include "scheduler/block_demand.h"

namespace aotllm {
namespace {

/// Contexts of a step, and the blocks that they have yet to compute.
class ContextsInStep {
 public:
  explicit ContextsInStep(std::int32_t tokens_per_block) : tokens_per_block_(tokens_per_block) {}

  void add(const SequenceView& context) {
    if (!context.block_keys.empty()) {
      contexts_.push_back({context.block_keys, static_cast<std::size_t>(context.num_computed / tokens_per_block_)});
    }
  }

  /// Whether one of them has yet to compute the next block of `newcomer`, or blocks behind that one. Equal keys at an
  /// index mean that all blocks up to it are equal.
  bool will_compute_next_of(const SequenceView& newcomer) const {
    const std::span<const std::uint64_t> keys = newcomer.block_keys;
    const auto missing = static_cast<std::size_t>((newcomer.num_computed + tokens_per_block_ - 1) / tokens_per_block_);
    return std::any_of(contexts_.begin(), contexts_.end(), [&](const Context& context) {
      const std::size_t next = std::max(missing, context.next);
      return next < keys.size() && next < context.keys.size() && keys[next] == context.keys[next];
    });
  }

 private:
  struct Context {
    std::span<const std::uint64_t> keys;
    std::size_t next;  ///< block that it is at
  };
  std::int32_t tokens_per_block_;
  std::vector<Context> contexts_;
};

/// Makes one plan: a value for the time of Scheduler::plan.
class Planner {
 public:
  Planner(const SchedulerConfig& config, const Snapshot& snapshot)
      : config_(config), demand_(config), snapshot_(snapshot), tokens_(snapshot.running.size(), 0) {}

  StepPlan plan() {
    share_budget();
    find_blocks();
    plan_.sequences.reserve(tokens_.size());
    std::int32_t budget = config_.max_num_tokens;
    for (std::size_t i = 0; i < tokens_.size(); ++i) {
      if (tokens_[i] > 0) {
        plan_.sequences.push_back({snapshot_.running[i].id, tokens_[i]});
        budget -= tokens_[i];
      }
    }
    if (plan_.preempted.empty() && budget > 0 && !snapshot_.waiting.empty() &&
        batch_has_room(snapshot_.running.size())) {
      admit(budget);
    }
    return std::move(plan_);
  }

 private:
  bool batch_has_room(std::size_t size) const { return size < static_cast<std::size_t>(config_.max_batch_size); }

  /// Sets tokens_ for those who run, as far as the budget goes and regardless of memory.
  void share_budget() {
    const std::vector<SequenceView>& running = snapshot_.running;
    std::int32_t budget = config_.max_num_tokens;
    for (std::size_t i = 0; i < running.size() && budget > 0; ++i) {
      if (i == 0 || !running[i].is_context) {
        tokens_[i] = 1;
        --budget;
      }
    }
    for (const bool contexts : {false, true}) {  // drafts, then chunks
      for (std::size_t i = 0; i < running.size() && budget > 0; ++i) {
        if (running[i].is_context == contexts) {
          const std::int32_t more = std::min(most_tokens(config_, running[i]) - tokens_[i], budget);
          tokens_[i] += more;
          budget -= more;
        }
      }
    }
  }

  /// Finds blocks for tokens_ in rank order. Where there are none for the first token of a sequence, preempts from the
  /// end of the ranks, then lowers its tokens to what fits.
  void find_blocks() {
    const std::vector<SequenceView>& running = snapshot_.running;
    const bool may_preempt = config_.capacity_policy == CapacityPolicy::kMaxUtilization;
    BlockCounts free_blocks = snapshot_.free_blocks;
    std::size_t end = running.size();  // those from here on are preempted
    for (std::size_t i = 0; i < end; ++i) {
      if (tokens_[i] == 0) {
        continue;
      }
      std::int32_t fitting = demand_.tokens_that_fit(running[i], tokens_[i], free_blocks);
      while (fitting == 0 && may_preempt && end > i + 1) {
        preempt(--end, free_blocks);
        fitting = demand_.tokens_that_fit(running[i], tokens_[i], free_blocks);
      }
      if (i == 0 && end == 1) {
        return;  // all blocks but its own are free, and alone it fits; num_shared may make it look otherwise
      }
      tokens_[i] = fitting;
      for (int group = 0; group < demand_.num_groups(); ++group) {
        free_blocks[static_cast<std::size_t>(group)] -= demand_.for_step(running[i], fitting, group);
      }
    }
  }

  void preempt(std::size_t victim, BlockCounts& free_blocks) {
    const SequenceView& sequence = snapshot_.running[victim];
    for (std::size_t group = 0; group < free_blocks.size(); ++group) {
      free_blocks[group] += sequence.num_blocks[group] - sequence.num_shared[group];
    }
    tokens_[victim] = 0;
    plan_.preempted.push_back(sequence.id);
  }

  void admit(std::int32_t budget) {
    ContextsInStep contexts(config_.tokens_per_block);
    for (std::size_t i = 0; i < tokens_.size(); ++i) {
      if (tokens_[i] > 0 && snapshot_.running[i].is_context) {
        contexts.add(snapshot_.running[i]);
      }
    }
    Admission admission(config_, demand_, snapshot_, tokens_);
    for (const SequenceView& newcomer : snapshot_.waiting) {
      if (budget == 0 || !batch_has_room(snapshot_.running.size() + plan_.admitted.size())) {
        break;
      }
      if (!newcomer.overdue && contexts.will_compute_next_of(newcomer)) {
        ++plan_.num_sharing;
        continue;
      }
      if (!admission.fits(newcomer)) {
        break;
      }
      admission.admit(newcomer);
      const std::int32_t tokens = std::min(most_tokens(config_, newcomer), budget);
      plan_.admitted.push_back(newcomer.id);
      plan_.sequences.push_back({newcomer.id, tokens});
      budget -= tokens;
      contexts.add(newcomer);
    }
  }

  const SchedulerConfig& config_;
  const BlockDemand demand_;
  const Snapshot& snapshot_;
  std::vector<std::int32_t> tokens_;  ///< of each who runs
  StepPlan plan_;
};

}  // namespace

bool ranks_before(const SequenceView& a, const SequenceView& b) noexcept {
  if (a.overdue != b.overdue) {
    return a.overdue;
  }
  return !a.overdue && a.priority != b.priority ? a.priority > b.priority : a.id < b.id;
}

Scheduler::Scheduler(const SchedulerConfig& config) : config_(config) {
  if (std::min({config.max_batch_size, config.max_num_tokens, config.max_chunk_tokens, config.tokens_per_block}) < 1 ||
      config.max_wait_steps < 1) {
    throw Error(ErrorKind::kInternal, "every limit of the scheduler must be ≥ 1");
  }
  if (config.windows.empty() || config.windows.size() > static_cast<std::size_t>(kMaxKvGroups) ||
      *std::min_element(config.windows.begin(), config.windows.end()) < 0) {
    throw Error(ErrorKind::kInternal, "the scheduler takes 1 to " + std::to_string(kMaxKvGroups) +
                                          " KV groups with windows ≥ 0, got " + std::to_string(config.windows.size()) +
                                          " groups");
  }
}

StepPlan Scheduler::plan(const Snapshot& snapshot) const {
  return Planner(config_, snapshot).plan();
}

std::int32_t Scheduler::most_blocks(std::int32_t max_len, int group) const {
  return BlockDemand(config_).most_blocks(max_len, group);
}

}  // namespace aotllm
