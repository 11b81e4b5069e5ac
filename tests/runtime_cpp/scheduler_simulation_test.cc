#include <gtest/gtest.h>

#include <cstdint>
#include <cstdio>
#include <type_traits>
#include <vector>

#include "cached_memory.h"
#include "counted_memory.h"
#include "scheduler_simulator.h"

namespace aotllm {
namespace {

using testing::random_workload;
using testing::SimulationResult;
using testing::Workload;
using Simulator = testing::SchedulerSimulator<testing::CountedMemory>;

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr std::int64_t kSteps = 100'000;
#else
constexpr std::int64_t kSteps = 1'200'000;
#endif

template <class Memory>
class EverySimulation : public ::testing::Test {};
using Memories = ::testing::Types<testing::CountedMemory, testing::CachedMemory>;
TYPED_TEST_SUITE(EverySimulation, Memories);

TYPED_TEST(EverySimulation, EndsAllSequencesAndKeepsAllPromises) {
  constexpr std::int64_t kEnough = std::is_same_v<TypeParam, testing::CountedMemory> ? kSteps : kSteps / 4;
  SimulationResult sum;
  for (std::uint32_t seed = 0; sum.steps < kEnough; ++seed) {
    SCOPED_TRACE(seed);
    const Workload workload = random_workload(seed);
    if (workload.max_len < 2) {
      continue;  // a prompt and a token do not fit
    }
    SimulationResult result;
    ASSERT_NO_THROW(result = testing::SchedulerSimulator<TypeParam>(workload, seed).run());
    sum.steps += result.steps;
    sum.preemptions += result.preemptions;
    sum.held_back += result.held_back;
    sum.became_overdue += result.became_overdue;
  }
  // What the properties are about has happened.
  EXPECT_GT(sum.preemptions, kEnough / 10000);
  EXPECT_GT(sum.held_back, kEnough / 10000);
  EXPECT_GT(sum.became_overdue, kEnough / 10000);
}

/// Where memory, cancellations and age do not interfere, a common prefix is computed by one of its sequences alone.
TEST(SchedulerSimulation, CommonPrefixesAreComputedOnce) {
  std::int64_t held_back = 0;
  for (std::uint32_t seed = 0; seed < 60; ++seed) {
    SCOPED_TRACE(seed);
    Workload w;
    w.config = {.max_batch_size = 16, .max_num_tokens = 48, .max_chunk_tokens = 16, .tokens_per_block = 4};
    w.config.windows = seed % 3 == 0 ? std::vector<std::int32_t>{0, 24} : std::vector<std::int32_t>{0};
    w.config.max_wait_steps = 1'000'000;
    w.config.capacity_policy = static_cast<CapacityPolicy>(seed / 2 % 2);
    w.config.queue_policy = static_cast<QueuePolicy>(seed % 3);
    w.total_blocks = {10000, 10000};
    w.num_requests = 60;
    w.num_priorities = 2;
    w.min_prompt = 70;
    w.max_prompt = 120;
    w.max_len = 140;
    w.num_families = 4;
    w.prefix_len = 66;  // 16 blocks and a bit
    w.max_drafts = static_cast<std::int32_t>(seed % 4);
    w.plans_ahead = seed % 2 == 1;
    const SimulationResult result = Simulator(w, seed).run();
    EXPECT_EQ(result.prefix_tokens, result.distinct_prefix_tokens);
    held_back += result.held_back;
  }
  EXPECT_GT(held_back, 100);
}

/// Ten sequences want the memory of one: the horizon makes waste small, where a constant reserve of one block thrashes.
TEST(SchedulerSimulation, HysteresisBoundsWhatIsComputedAgain) {
  Workload w;
  w.config = {.max_batch_size = 64, .max_num_tokens = 512, .max_chunk_tokens = 256, .tokens_per_block = 16};
  w.total_blocks = {512};
  w.num_requests = 200;
  w.arrival_percent = 90;
  w.min_prompt = 16;
  w.max_prompt = 128;
  w.max_len = 1024;
  w.stop_percent = 100;
  const auto waste = [](const SimulationResult& result) {
    return static_cast<double>(result.recomputed_tokens) / static_cast<double>(result.generated_tokens);
  };
  const auto report = [&](const char* name, const SimulationResult& result) {
    std::printf("%-22s %6.3f tokens computed again per token generated, %5.2f preemptions per sequence, %6lld steps\n",
                name, waste(result), static_cast<double>(result.preemptions) / w.num_requests,
                static_cast<long long>(result.steps));
  };
  const SimulationResult ours = Simulator(w, 1).run();
  report("max_utilization", ours);
  w.hides_preemptions = true;
  const SimulationResult constant = Simulator(w, 1).run();
  report("a constant reserve", constant);
  w.config.capacity_policy = CapacityPolicy::kGuaranteedNoEvict;
  const SimulationResult guaranteed = Simulator(w, 1).run();
  report("guaranteed_no_evict", guaranteed);
  EXPECT_LT(waste(ours), 0.5 * waste(constant));
  EXPECT_LT(ours.steps, guaranteed.steps);
  EXPECT_EQ(guaranteed.recomputed_tokens, 0);
}

}  // namespace
}  // namespace aotllm
