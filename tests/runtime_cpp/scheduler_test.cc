#include "aotllm/scheduler.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "aotllm/errors.h"

namespace aotllm {
namespace {

constexpr std::int32_t kFar = 1000;  // max_len of sequences whose end does not matter

SequenceView generation(RequestId id, std::int32_t num_tokens, std::int32_t num_blocks, std::int32_t priority = 0) {
  return {id, priority, num_tokens, num_tokens - 1, kFar, num_blocks};
}

SequenceView context(RequestId id, std::int32_t num_tokens, std::int32_t num_computed = 0,
                     std::int32_t num_blocks = 0) {
  return {id, 0, num_tokens, num_computed, kFar, num_blocks};
}

Scheduler scheduler(std::int32_t max_batch_size, std::int32_t max_num_tokens, std::int32_t max_chunk_tokens) {
  return Scheduler({max_batch_size, max_num_tokens, max_chunk_tokens, /*tokens_per_block=*/4});
}

using Tokens = std::map<RequestId, std::int32_t>;

Tokens tokens_of(const StepPlan& plan) {
  Tokens tokens;
  for (const ScheduledSequence& scheduled : plan.sequences) {
    tokens[scheduled.id] = scheduled.num_tokens;
  }
  return tokens;
}

StepPlan checked_plan(const Scheduler& scheduler, const Snapshot& snapshot) {
  StepPlan plan = scheduler.plan(snapshot);
  scheduler.check_invariants(snapshot, plan);
  return plan;
}

TEST(SchedulerBudget, GenerationsComeFirstAndContextsShareTheRestInRankOrder) {
  const Snapshot snapshot = {.running = {context(1, 20), generation(2, 8, 2), context(3, 20), generation(4, 8, 2)},
                             .free_blocks = 100};
  // 16 tokens: one for each generation, a chunk of 10 for the first context, the other 4 for the second.
  EXPECT_EQ(tokens_of(checked_plan(scheduler(8, 16, 10), snapshot)), (Tokens{{1, 10}, {2, 1}, {3, 4}, {4, 1}}));
}

TEST(SchedulerBudget, TheFirstInRankAdvancesEvenIfItIsAContext) {
  const Snapshot snapshot = {.running = {context(1, 20), generation(2, 8, 2), generation(3, 8, 2)}, .free_blocks = 100};
  EXPECT_EQ(tokens_of(checked_plan(scheduler(8, 2, 2), snapshot)), (Tokens{{1, 1}, {2, 1}}));
}

TEST(SchedulerBudget, AContextResumesWhereItStopped) {
  const Snapshot snapshot = {.running = {context(1, 20, 16, 4)}, .free_blocks = 100};
  EXPECT_EQ(tokens_of(checked_plan(scheduler(8, 16, 10), snapshot)), (Tokens{{1, 4}}));
}

TEST(SchedulerAdmission, TakesWaitingOnesInOrderWhileBatchAndBudgetLast) {
  const Snapshot snapshot = {.running = {generation(1, 8, 2)},
                             .waiting = {context(2, 5), context(3, 5), context(4, 5), context(5, 5)},
                             .free_blocks = 100};
  EXPECT_EQ(checked_plan(scheduler(3, 100, 100), snapshot).admitted, (std::vector<RequestId>{2, 3}));  // batch
  const StepPlan plan = checked_plan(scheduler(9, 8, 8), snapshot);                                    // budget
  EXPECT_EQ(tokens_of(plan), (Tokens{{1, 1}, {2, 5}, {3, 2}}));
}

TEST(SchedulerAdmission, NobodyOvertakesTheFirstThatDoesNotFit) {
  const Snapshot snapshot = {
      .running = {generation(1, 8, 2)}, .waiting = {context(2, 40), context(3, 1)}, .free_blocks = 10};
  // 40 tokens and a block of growth take 11 blocks.
  const StepPlan plan = checked_plan(scheduler(8, 100, 100), snapshot);
  EXPECT_TRUE(plan.admitted.empty());
  EXPECT_EQ(tokens_of(plan), (Tokens{{1, 1}}));
}

TEST(SchedulerAdmission, SetsAsideWhatRunningContextsStillNeed) {
  // The context holds 1 block and will need 6, with growth; 5 of the 8 free blocks are its own.
  const Snapshot snapshot = {.running = {context(1, 20, 4, 1)}, .waiting = {context(2, 9)}, .free_blocks = 8};
  EXPECT_TRUE(checked_plan(scheduler(8, 100, 4), snapshot).admitted.empty());
  Snapshot roomier = snapshot;
  roomier.free_blocks = 9;
  EXPECT_EQ(checked_plan(scheduler(8, 100, 4), roomier).admitted, (std::vector<RequestId>{2}));
}

TEST(SchedulerAdmission, ReservesNoGrowthBeyondTheEnd) {
  SequenceView last_words = context(1, 16);
  last_words.max_len = 16 + 1;
  EXPECT_EQ(checked_plan(scheduler(8, 99, 99), {.waiting = {last_words}, .free_blocks = 5}).admitted.size(), 1U);
  last_words.max_len = 16;
  EXPECT_EQ(scheduler(8, 99, 99).plan({.waiting = {last_words}, .free_blocks = 4}).admitted.size(), 1U);
}

TEST(SchedulerMemory, PreemptsTheLastInRankOnly) {
  const Snapshot snapshot = {.running = {generation(1, 9, 2), generation(2, 8, 2), generation(3, 7, 2)},
                             .waiting = {context(4, 1)},
                             .free_blocks = 0};
  const StepPlan plan = checked_plan(scheduler(8, 16, 16), snapshot);
  EXPECT_EQ(plan.preempted, (std::vector<RequestId>{3}));
  EXPECT_EQ(tokens_of(plan), (Tokens{{1, 1}, {2, 1}}));
  EXPECT_TRUE(plan.admitted.empty());  // although a block is free now
}

TEST(SchedulerMemory, PriorityDecidesWhoIsPreempted) {
  const Snapshot snapshot = {
      .running = {generation(7, 9, 2, /*priority=*/1), generation(1, 8, 2), generation(2, 8, 2)}};
  EXPECT_EQ(checked_plan(scheduler(8, 16, 16), snapshot).preempted, (std::vector<RequestId>{2}));
}

TEST(SchedulerMemory, WithoutAVictimBehindItASequenceKeepsItsBlocksAndWaits) {
  const Snapshot snapshot = {.running = {generation(1, 8, 2), generation(2, 9, 2)}, .free_blocks = 0};
  const StepPlan plan = checked_plan(scheduler(8, 16, 16), snapshot);
  EXPECT_TRUE(plan.preempted.empty());
  EXPECT_EQ(tokens_of(plan), (Tokens{{1, 1}}));
}

TEST(SchedulerMemory, AChunkShrinksToTheBlocksThereAre) {
  const Snapshot snapshot = {.running = {generation(1, 8, 2), context(2, 40, 3, 1)}, .free_blocks = 2};
  EXPECT_EQ(tokens_of(checked_plan(scheduler(8, 100, 100), snapshot)), (Tokens{{1, 1}, {2, 1 + 2 * 4}}));
}

TEST(Scheduler, RefusesLimitsBelowOne) {
  EXPECT_THROW(Scheduler({0, 1, 1, 1}), Error);
  EXPECT_THROW(Scheduler({1, 0, 1, 1}), Error);
  EXPECT_THROW(Scheduler({1, 1, 0, 1}), Error);
  EXPECT_THROW(Scheduler({1, 1, 1, 0}), Error);
}

TEST(Scheduler, CheckNamesTheRuleThatAPlanBreaks) {
  const Scheduler strict = scheduler(2, 8, 4);
  const Snapshot snapshot = {.running = {generation(1, 9, 2), generation(2, 9, 3)},
                             .waiting = {context(3, 1), context(4, 1)},
                             .free_blocks = 1};
  const std::vector<std::pair<const char*, StepPlan>> cases = {
      {"the first in rank keeps running", {.preempted = {2, 1}}},
      {"the last in rank are preempted", {.preempted = {1}}},
      {"in rank order", {.admitted = {4}}},
      {"at most max_batch_size run", {.admitted = {3}}},
      {"both preempts and admits", {.preempted = {2}, .admitted = {3}}},
      {"each once", {.sequences = {{1, 1}, {1, 1}}}},
      {"within what remains", {.sequences = {{1, 2}}}},
      {"the first in rank advances", {.sequences = {{2, 1}}}},
  };
  for (const auto& [rule, plan] : cases) {
    try {
      strict.check_invariants(snapshot, plan);
      ADD_FAILURE() << "passed: " << rule;
    } catch (const Error& e) {
      EXPECT_NE(std::string(e.what()).find(rule), std::string::npos) << e.what();
    }
  }
}

/// Runs random requests to their ends with lengths for tokens and numbers for blocks.
class Simulation {
 public:
  explicit Simulation(std::uint32_t seed) : random_(seed) {
    config_.tokens_per_block = between(1, 8);
    config_.max_batch_size = between(1, 8);
    config_.max_num_tokens = between(1, 24);
    config_.max_chunk_tokens = between(1, config_.max_num_tokens);
    num_blocks_ = free_blocks_ = between(1, 24);
    num_requests_ = between(1, 40);
    num_priorities_ = between(1, 3);
  }

  /// Steps until all have ended. Returns their number.
  std::int64_t run() {
    const Scheduler scheduler(config_);
    std::int64_t steps = 0;
    for (; submitted_ < num_requests_ || !waiting_.empty() || !running_.empty(); ++steps) {
      while (submitted_ < num_requests_ && between(0, 2) == 0) {
        submit();
      }
      const Snapshot snapshot = {running_, waiting_, free_blocks_};
      const StepPlan plan = scheduler.plan(snapshot);
      scheduler.check_invariants(snapshot, plan);
      apply(plan);
      if (steps > 100000) {
        throw std::logic_error("the simulation does not end");
      }
    }
    EXPECT_EQ(free_blocks_, num_blocks_);
    return steps;
  }

 private:
  std::int32_t between(std::int32_t low, std::int32_t high) {
    return low + static_cast<std::int32_t>(random_() % static_cast<std::uint32_t>(high - low + 1));
  }

  std::int32_t blocks_for(std::int32_t tokens) const {
    return (tokens + config_.tokens_per_block - 1) / config_.tokens_per_block;
  }

  void submit() {
    const std::int32_t capacity = num_blocks_ * config_.tokens_per_block;
    const std::int32_t max_len = between(std::min(2, capacity), capacity);
    if (++submitted_; max_len >= 2) {
      insert(waiting_, {submitted_, between(1, num_priorities_), between(1, max_len - 1), 0, max_len, 0});
    }
  }

  static void insert(std::vector<SequenceView>& list, const SequenceView& sequence) {
    list.insert(std::upper_bound(list.begin(), list.end(), sequence, ranks_before), sequence);
  }

  static SequenceView take(std::vector<SequenceView>& list, RequestId id) {
    const auto found = std::find_if(list.begin(), list.end(), [id](const auto& s) { return s.id == id; });
    const SequenceView taken = *found;
    list.erase(found);
    return taken;
  }

  void apply(const StepPlan& plan) {
    for (const RequestId id : plan.preempted) {
      SequenceView victim = take(running_, id);
      free_blocks_ += victim.num_blocks;
      victim.num_blocks = victim.num_computed = 0;
      insert(waiting_, victim);
    }
    for (const RequestId id : plan.admitted) {
      const SequenceView admitted = take(waiting_, id);
      if (ever_admitted_.insert(id).second) {  // first come, first served among equals
        EXPECT_GT(id, latest_newcomer_[admitted.priority]);
        latest_newcomer_[admitted.priority] = id;
      }
      insert(running_, admitted);
    }
    for (const ScheduledSequence& scheduled : plan.sequences) {
      SequenceView sequence = take(running_, scheduled.id);
      sequence.num_computed += scheduled.num_tokens;
      const std::int32_t blocks = std::max(blocks_for(sequence.num_computed), sequence.num_blocks);
      free_blocks_ -= blocks - sequence.num_blocks;
      sequence.num_blocks = blocks;
      EXPECT_GE(free_blocks_, 0);
      sequence.num_tokens += sequence.remaining() == 0 ? 1 : 0;
      const bool ends = sequence.num_tokens == sequence.max_len || between(0, 99) == 0;
      if (ends) {
        free_blocks_ += sequence.num_blocks;
      } else {
        insert(running_, sequence);
      }
    }
  }

  std::mt19937 random_;
  SchedulerConfig config_;
  std::int32_t num_blocks_ = 0;
  std::int32_t free_blocks_ = 0;
  std::int32_t num_requests_ = 0;
  std::int32_t num_priorities_ = 0;
  std::int32_t submitted_ = 0;
  std::set<RequestId> ever_admitted_;
  std::map<std::int32_t, RequestId> latest_newcomer_;  ///< by priority
  std::vector<SequenceView> running_;
  std::vector<SequenceView> waiting_;
};

TEST(SchedulerProperty, EveryRequestEndsAndEveryPlanIsSound) {
  std::int64_t steps = 0;
  for (std::uint32_t seed = 0; steps < 300000; ++seed) {
    SCOPED_TRACE(seed);
    ASSERT_NO_THROW(steps += Simulation(seed).run());
    ASSERT_FALSE(HasFailure());
  }
}

}  // namespace
}  // namespace aotllm
