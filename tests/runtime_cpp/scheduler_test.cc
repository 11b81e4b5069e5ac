#include "aotllm/scheduler.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include "aotllm/errors.h"
#include "aotllm/kv_cache.h"

namespace aotllm {
namespace {

constexpr std::int32_t kFar = 1000;  // max_len of sequences whose end does not matter

SequenceView generation(SequenceId id, std::int32_t num_tokens, std::int32_t num_blocks, std::int32_t priority = 0) {
  return {.id = id,
          .priority = priority,
          .num_tokens = num_tokens,
          .num_computed = num_tokens - 1,
          .max_len = kFar,
          .num_blocks = {num_blocks}};
}

SequenceView context(SequenceId id, std::int32_t num_tokens, std::int32_t num_computed = 0,
                     std::int32_t num_blocks = 0) {
  return {.id = id,
          .num_tokens = num_tokens,
          .num_computed = num_computed,
          .max_len = kFar,
          .is_context = true,
          .num_blocks = {num_blocks}};
}

SchedulerConfig config(std::int32_t max_batch_size, std::int32_t max_num_tokens, std::int32_t max_chunk_tokens) {
  return {.max_batch_size = max_batch_size,
          .max_num_tokens = max_num_tokens,
          .max_chunk_tokens = max_chunk_tokens,
          .tokens_per_block = 4};
}

Scheduler scheduler(std::int32_t max_batch_size, std::int32_t max_num_tokens, std::int32_t max_chunk_tokens) {
  return Scheduler(config(max_batch_size, max_num_tokens, max_chunk_tokens));
}

using Tokens = std::map<SequenceId, std::int32_t>;

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
                             .free_blocks = {100}};
  // 16 tokens: one for each generation, a chunk of 10 for the first context, the other 4 for the second.
  EXPECT_EQ(tokens_of(checked_plan(scheduler(8, 16, 10), snapshot)), (Tokens{{1, 10}, {2, 1}, {3, 4}, {4, 1}}));
}

TEST(SchedulerBudget, TheFirstInRankAdvancesEvenIfItIsAContext) {
  const Snapshot snapshot = {.running = {context(1, 20), generation(2, 8, 2), generation(3, 8, 2)},
                             .free_blocks = {100}};
  EXPECT_EQ(tokens_of(checked_plan(scheduler(8, 2, 2), snapshot)), (Tokens{{1, 1}, {2, 1}}));
}

TEST(SchedulerBudget, AContextResumesWhereItStopped) {
  const Snapshot snapshot = {.running = {context(1, 20, 16, 4)}, .free_blocks = {100}};
  EXPECT_EQ(tokens_of(checked_plan(scheduler(8, 16, 10), snapshot)), (Tokens{{1, 4}}));
}

TEST(SchedulerAdmission, TakesWaitingOnesInOrderWhileBatchAndBudgetLast) {
  const Snapshot snapshot = {.running = {generation(1, 8, 2)},
                             .waiting = {context(2, 5), context(3, 5), context(4, 5), context(5, 5)},
                             .free_blocks = {100}};
  EXPECT_EQ(checked_plan(scheduler(3, 100, 100), snapshot).admitted, (std::vector<SequenceId>{2, 3}));  // batch
  const StepPlan plan = checked_plan(scheduler(9, 8, 8), snapshot);                                     // budget
  EXPECT_EQ(tokens_of(plan), (Tokens{{1, 1}, {2, 5}, {3, 2}}));
}

TEST(SchedulerAdmission, NobodyOvertakesTheFirstThatDoesNotFit) {
  const Snapshot snapshot = {
      .running = {generation(1, 8, 2)}, .waiting = {context(2, 40), context(3, 1)}, .free_blocks = {10}};
  // 40 tokens and a block of growth take 11 blocks.
  const StepPlan plan = checked_plan(scheduler(8, 100, 100), snapshot);
  EXPECT_TRUE(plan.admitted.empty());
  EXPECT_EQ(tokens_of(plan), (Tokens{{1, 1}}));
}

TEST(SchedulerAdmission, SetsAsideWhatRunningContextsStillNeed) {
  // The context holds 1 block and will need 6, with growth; 5 of the 8 free blocks are its own.
  const Snapshot snapshot = {.running = {context(1, 20, 4, 1)}, .waiting = {context(2, 9)}, .free_blocks = {8}};
  EXPECT_TRUE(checked_plan(scheduler(8, 100, 4), snapshot).admitted.empty());
  Snapshot roomier = snapshot;
  roomier.free_blocks = {9};
  EXPECT_EQ(checked_plan(scheduler(8, 100, 4), roomier).admitted, (std::vector<SequenceId>{2}));
}

TEST(SchedulerAdmission, SetsNothingAsideBeyondTheEnd) {
  SequenceView last_words = context(2, 16);
  last_words.max_len = 17;
  const Snapshot snapshot = {.running = {generation(1, 4, 1)}, .waiting = {last_words}, .free_blocks = {6}};
  // One block for the growth of the first, 5 for the second.
  EXPECT_EQ(checked_plan(scheduler(8, 99, 99), snapshot).admitted.size(), 1U);
  Snapshot longer = snapshot;
  longer.waiting[0].max_len = 21;
  longer.waiting[0].num_tokens = 17;
  EXPECT_TRUE(checked_plan(scheduler(8, 99, 99), longer).admitted.empty());
}

TEST(SchedulerAdmission, TheFirstWithNobodyRunningFitsWhateverLooksTaken) {
  // A projection: those who are about to end share all blocks, so that it cannot count any of them as free.
  const Snapshot snapshot = {.waiting = {context(1, 9), context(2, 1)}, .free_blocks = {0}, .total_blocks = {4}};
  EXPECT_EQ(checked_plan(scheduler(8, 99, 99), snapshot).admitted, (std::vector<SequenceId>{1}));
}

TEST(SchedulerAdmission, CachedBlocksCostWhatTheyPin) {
  SequenceView cached = context(2, 17, 16, 4);
  const Snapshot shared = {.running = {generation(1, 4, 1)}, .waiting = {cached}, .free_blocks = {3}};
  EXPECT_EQ(checked_plan(scheduler(8, 99, 99), shared).admitted.size(), 1U);  // 4 held by others, 2 new ones
  Snapshot pinned = shared;
  pinned.waiting[0].cost = {1};
  EXPECT_TRUE(checked_plan(scheduler(8, 99, 99), pinned).admitted.empty());
}

TEST(SchedulerAdmission, EveryPreemptionDoublesTheHorizonOfAll) {
  // Blocks that 1 and 2 need, 2 having 1 token: growth of 1, 2, 4 blocks each, for 1 behind its full block.
  const std::vector<std::pair<std::int32_t, std::int32_t>> cases = {{0, 1 + 2}, {1, 2 + 3}, {2, 4 + 5}, {3, 8 + 9}};
  for (const auto& [num_preemptions, blocks] : cases) {
    Snapshot snapshot = {.running = {generation(1, 4, 1)}, .waiting = {context(2, 1)}, .free_blocks = {blocks}};
    snapshot.waiting[0].num_preemptions = num_preemptions;
    EXPECT_EQ(checked_plan(scheduler(8, 99, 99), snapshot).admitted.size(), 1U);
    std::swap(snapshot.running[0].num_preemptions, snapshot.waiting[0].num_preemptions);  // whosever it is
    EXPECT_EQ(checked_plan(scheduler(8, 99, 99), snapshot).admitted.size(), 1U);
    --snapshot.free_blocks[0];
    EXPECT_TRUE(checked_plan(scheduler(8, 99, 99), snapshot).admitted.empty());
  }
}

TEST(SchedulerAdmission, GuaranteedNoEvictSetsAsideAllToTheEnds) {
  SchedulerConfig strict = config(8, 99, 99);
  strict.capacity_policy = CapacityPolicy::kGuaranteedNoEvict;
  Snapshot snapshot = {.running = {generation(1, 4, 1)}, .waiting = {context(2, 1)}, .free_blocks = {9 + 5}};
  snapshot.running[0].max_len = 40;
  snapshot.waiting[0].max_len = 20;
  EXPECT_EQ(checked_plan(Scheduler(strict), snapshot).admitted.size(), 1U);
  --snapshot.free_blocks[0];
  EXPECT_TRUE(checked_plan(Scheduler(strict), snapshot).admitted.empty());
}

TEST(SchedulerSharing, HoldsBackWhoFindsItsNextBlockLater) {
  const std::vector<std::uint64_t> keys = {11, 12, 13, 14};
  const std::vector<std::uint64_t> other = {11, 12, 93, 94};
  const auto with = [](SequenceView view, const std::vector<std::uint64_t>& block_keys) {
    view.block_keys = block_keys;
    return view;
  };
  SequenceView overdue = with(context(2, 16), keys);
  overdue.overdue = true;
  struct Case {
    const char* what;
    SequenceView running, waiting;
    bool held_back;
  };
  const std::vector<Case> cases = {
      {"equal from the start", with(context(1, 16), keys), with(context(2, 16), keys), true},
      {"equal at its next block", with(context(1, 16, 4, 1), keys), with(context(2, 16, 4, 1), other), true},
      {"different at its next block", with(context(1, 16, 8, 2), keys), with(context(2, 16, 8, 2), other), false},
      {"computed, and not yet in the tree", with(context(1, 16, 8, 2), keys), with(context(2, 16), keys), true},
      {"a generation computes no common block", with(generation(1, 16, 4), keys), with(context(2, 16), keys), false},
      {"only the last token is missing", with(context(1, 16, 15, 4), keys), with(context(2, 16, 15, 4), keys), false},
      {"overdue", with(context(1, 16), keys), overdue, false},
      {"shares nothing", with(context(1, 16), keys), context(2, 16), false},
  };
  for (const Case& c : cases) {
    const Snapshot snapshot = {
        .running = {c.running}, .waiting = {c.waiting, context(3, 5)}, .free_blocks = {100}, .total_blocks = {100}};
    const StepPlan plan = checked_plan(scheduler(8, 64, 8), snapshot);
    EXPECT_EQ(plan.num_sharing, c.held_back ? 1 : 0) << c.what;
    EXPECT_EQ(plan.admitted, c.held_back ? (std::vector<SequenceId>{3}) : (std::vector<SequenceId>{2, 3})) << c.what;
  }
}

TEST(SchedulerSharing, AmongNewcomersTheFirstComputes) {
  const std::vector<std::uint64_t> keys = {11, 12};
  Snapshot snapshot = {.waiting = {context(1, 8), context(2, 8), context(3, 8)}, .free_blocks = {100}};
  for (SequenceView& view : snapshot.waiting) {
    view.block_keys = keys;
  }
  const StepPlan plan = checked_plan(scheduler(8, 64, 8), snapshot);
  EXPECT_EQ(plan.admitted, (std::vector<SequenceId>{1}));
  EXPECT_EQ(plan.num_sharing, 2);
}

TEST(SchedulerBudget, DraftsTakeWhatGenerationsLeaveAndContextsTheRest) {
  Snapshot snapshot = {.running = {generation(1, 8, 2), context(2, 20), generation(3, 8, 2)}, .free_blocks = {100}};
  snapshot.running[0].num_drafts = 3;
  snapshot.running[2].num_drafts = 9;
  EXPECT_EQ(tokens_of(checked_plan(scheduler(8, 16, 8), snapshot)), (Tokens{{1, 4}, {2, 4}, {3, 8}}));
  EXPECT_EQ(tokens_of(checked_plan(scheduler(8, 6, 6), snapshot)), (Tokens{{1, 4}, {3, 2}}));
  snapshot.running[0].max_len = 10;  // 8 tokens, and one more beyond the drafts accepted
  EXPECT_EQ(tokens_of(checked_plan(scheduler(8, 16, 8), snapshot)), (Tokens{{1, 2}, {2, 6}, {3, 8}}));
}

TEST(SchedulerBudget, ASequenceMayLowerItsChunk) {
  Snapshot snapshot = {.running = {context(1, 20), context(2, 20)}, .free_blocks = {100}};
  snapshot.running[0].max_chunk = 3;
  EXPECT_EQ(tokens_of(checked_plan(scheduler(8, 16, 8), snapshot)), (Tokens{{1, 3}, {2, 8}}));
}

TEST(SchedulerMemory, DraftsPreemptNobody) {
  Snapshot snapshot = {.running = {generation(1, 8, 2), generation(2, 8, 2)}, .free_blocks = {0}};
  snapshot.running[0].num_drafts = 5;
  const StepPlan plan = checked_plan(scheduler(8, 16, 16), snapshot);
  EXPECT_TRUE(plan.preempted.empty());
  EXPECT_EQ(tokens_of(plan), (Tokens{{1, 1}, {2, 1}}));
}

TEST(SchedulerMemory, BlocksThatAVictimSharesDoNotBecomeFree) {
  Snapshot snapshot = {.running = {generation(1, 9, 2), generation(2, 8, 2), generation(3, 8, 2)}, .free_blocks = {0}};
  snapshot.running[2].num_shared = {2};
  EXPECT_EQ(checked_plan(scheduler(8, 16, 16), snapshot).preempted, (std::vector<SequenceId>{3, 2}));
}

TEST(SchedulerMemory, OverdueOnesArePreemptedLast) {
  SequenceView overdue = generation(9, 8, 2, /*priority=*/-1);
  overdue.overdue = true;
  const Snapshot snapshot = {.running = {overdue, generation(1, 9, 2), generation(2, 8, 2)}, .free_blocks = {0}};
  EXPECT_EQ(checked_plan(scheduler(8, 16, 16), snapshot).preempted, (std::vector<SequenceId>{2}));
}

TEST(SchedulerWindows, BlocksThatLeaveAWindowMakeRoomForNewOnes) {
  SchedulerConfig windowed = config(8, 16, 4);
  windowed.windows = {0, 8};
  // At token 16 of blocks 0 to 3; a window of 8 begins at token 9, in block 2.
  Snapshot snapshot = {.running = {generation(1, 17, 4)}, .free_blocks = {1, 0}};
  snapshot.running.push_back(generation(2, 17, 4));
  snapshot.running[0].num_blocks[1] = snapshot.running[1].num_blocks[1] = 3;
  EXPECT_EQ(tokens_of(checked_plan(Scheduler(windowed), snapshot)), (Tokens{{1, 1}}));  // full attention has one block
  snapshot.free_blocks[0] = 2;
  EXPECT_EQ(tokens_of(checked_plan(Scheduler(windowed), snapshot)), (Tokens{{1, 1}, {2, 1}}));
  snapshot.running[0].num_shared[1] = 3;  // what it gives back stays in use
  EXPECT_EQ(checked_plan(Scheduler(windowed), snapshot).preempted, (std::vector<SequenceId>{2}));
  snapshot.running[0].num_shared[1] = 0;
  snapshot.running[0].num_uncertain = 3;  // it may be at token 13 still and see block 1
  EXPECT_EQ(checked_plan(Scheduler(windowed), snapshot).preempted, (std::vector<SequenceId>{2}));
}

/// By trying all positions of a chunk.
TEST(SchedulerWindows, MostBlocksIsTheLeastUpperBound) {
  for (const std::int32_t tokens_per_block : {1, 3, 4}) {
    for (std::int32_t window = 0; window <= 13; ++window) {
      for (std::int32_t chunk = 1; chunk <= 9; ++chunk) {
        SchedulerConfig windowed = config(8, 99, chunk);
        windowed.tokens_per_block = tokens_per_block;
        windowed.windows = {window};
        constexpr std::int32_t kLength = 60;
        std::int32_t most = 0;
        for (std::int32_t begin = 0; begin + chunk <= kLength; ++begin) {
          most = std::max(most, blocks_in_step(begin, begin + chunk, window, tokens_per_block).size());
        }
        EXPECT_EQ(Scheduler(windowed).most_blocks(kLength, 0), most) << window << " " << chunk;
      }
    }
  }
}

TEST(SchedulerMemory, PreemptsTheLastInRankOnly) {
  const Snapshot snapshot = {.running = {generation(1, 9, 2), generation(2, 8, 2), generation(3, 7, 2)},
                             .waiting = {context(4, 1)},
                             .free_blocks = {0}};
  const StepPlan plan = checked_plan(scheduler(8, 16, 16), snapshot);
  EXPECT_EQ(plan.preempted, (std::vector<SequenceId>{3}));
  EXPECT_EQ(tokens_of(plan), (Tokens{{1, 1}, {2, 1}}));
  EXPECT_TRUE(plan.admitted.empty());  // although a block is free now
}

TEST(SchedulerMemory, PriorityDecidesWhoIsPreempted) {
  const Snapshot snapshot = {
      .running = {generation(7, 9, 2, /*priority=*/1), generation(1, 8, 2), generation(2, 8, 2)}};
  EXPECT_EQ(checked_plan(scheduler(8, 16, 16), snapshot).preempted, (std::vector<SequenceId>{2}));
}

TEST(SchedulerMemory, WithoutAVictimBehindItASequenceKeepsItsBlocksAndWaits) {
  const Snapshot snapshot = {.running = {generation(1, 8, 2), generation(2, 9, 2)}, .free_blocks = {0}};
  const StepPlan plan = checked_plan(scheduler(8, 16, 16), snapshot);
  EXPECT_TRUE(plan.preempted.empty());
  EXPECT_EQ(tokens_of(plan), (Tokens{{1, 1}}));
}

TEST(SchedulerMemory, AChunkShrinksToTheBlocksThereAre) {
  const Snapshot snapshot = {.running = {generation(1, 8, 2), context(2, 40, 3, 1)}, .free_blocks = {2}};
  EXPECT_EQ(tokens_of(checked_plan(scheduler(8, 100, 100), snapshot)), (Tokens{{1, 1}, {2, 1 + 2 * 4}}));
}

TEST(Scheduler, RefusesLimitsOutOfRange) {
  EXPECT_THROW(scheduler(0, 1, 1), Error);
  EXPECT_THROW(scheduler(1, 0, 1), Error);
  EXPECT_THROW(scheduler(1, 1, 0), Error);
  for (const std::vector<std::int32_t>& windows : {std::vector<std::int32_t>{}, {0, 1, 2, 3, 4}, {-1}}) {
    SchedulerConfig wrong = config(1, 1, 1);
    wrong.windows = windows;
    EXPECT_THROW(Scheduler{wrong}, Error);
  }
}

TEST(Scheduler, CheckNamesTheRuleThatAPlanBreaks) {
  const Scheduler strict = scheduler(2, 8, 4);
  const Snapshot snapshot = {.running = {generation(1, 9, 2), generation(2, 9, 3)},
                             .waiting = {context(3, 1), context(4, 1)},
                             .free_blocks = {1}};
  Snapshot full = snapshot;
  full.free_blocks = {0};
  Snapshot unordered = snapshot;
  std::swap(unordered.running[0], unordered.running[1]);
  Snapshot ended = snapshot;
  ended.running[0].max_len = 9;
  struct Case {
    const char* rule;
    StepPlan plan;
    const Snapshot& of;
  };
  const std::vector<Case> cases = {
      {"the first in rank keeps running", {.preempted = {2, 1}}, snapshot},
      {"the last in rank are preempted", {.preempted = {1}}, snapshot},
      {"nobody is overtaken", {.admitted = {4}}, snapshot},
      {"in queue order", {.admitted = {4, 3}}, snapshot},
      {"at most max_batch_size run", {.admitted = {3}}, snapshot},
      {"both preempts and admits", {.preempted = {2}, .admitted = {3}}, snapshot},
      {"each once", {.sequences = {{1, 1}, {1, 1}}}, snapshot},
      {"what remains", {.sequences = {{1, 2}}}, snapshot},
      {"the first in rank advances", {.sequences = {{2, 1}}}, snapshot},
      {"no more blocks than are free", {.sequences = {{1, 1}}}, full},
      {"in rank order", {}, unordered},
      {"num_tokens < max_len", {}, ended},
  };
  for (const auto& [rule, plan, of] : cases) {
    try {
      strict.check_invariants(of, plan);
      ADD_FAILURE() << "passed: " << rule;
    } catch (const Error& e) {
      EXPECT_NE(std::string(e.what()).find(rule), std::string::npos) << e.what();
    }
  }
}

}  // namespace
}  // namespace aotllm
