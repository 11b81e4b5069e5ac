#pragma once

#include <cstdint>
#include <random>

#include "aotllm/scheduler.h"

namespace aotllm::testing {

/// What a simulation runs. Probabilities are in percent.
struct Workload {
  SchedulerConfig config;
  BlockCounts total_blocks{};
  std::int32_t num_requests = 0;
  std::int32_t arrival_percent = 50;  ///< of a further arrival in a step
  std::int32_t cancel_percent = 0;    ///< of a cancellation in a step
  std::int32_t stop_percent = 50;     ///< of a sequence that ends before its max_len
  std::int32_t num_priorities = 1;
  std::int32_t min_prompt = 1;
  std::int32_t max_prompt = 16;
  std::int32_t max_len = 32;
  std::int32_t num_families = 0;  ///< of sequences with a common prefix; 0 = nobody shares
  std::int32_t prefix_len = 0;
  std::int32_t max_drafts = 0;
  bool plans_ahead = false;        ///< plans each step while the one before runs, from a projection
  bool hides_preemptions = false;  ///< what a scheduler without hysteresis would do
};

struct SimulationResult {
  std::int64_t steps = 0;
  std::int64_t generated_tokens = 0;
  std::int64_t computed_tokens = 0;
  std::int64_t recomputed_tokens = 0;       ///< of those, at positions that were computed before
  std::int64_t prefix_tokens = 0;           ///< of those, in the full blocks of a common prefix
  std::int64_t distinct_prefix_tokens = 0;  ///< what prefix_tokens would be if each were computed once
  std::int64_t preemptions = 0;
  std::int64_t held_back = 0;
  std::int64_t became_overdue = 0;
};

/// Any configuration, with pools from 3 blocks up, in which every sequence fits alone.
inline Workload random_workload(std::uint32_t seed) {
  std::mt19937 random(seed);
  const auto between = [&random](std::int32_t low, std::int32_t high) {
    return low + static_cast<std::int32_t>(random() % static_cast<std::uint32_t>(high - low + 1));
  };
  Workload w;
  SchedulerConfig& config = w.config;
  const std::int32_t scale = between(0, 9) == 0 ? 4 : 1;  // now and then a large one
  config.tokens_per_block = between(1, 8);
  config.max_batch_size = between(1, 8 * scale);
  config.max_num_tokens = between(1, 24 * scale);
  config.max_chunk_tokens = between(1, config.max_num_tokens);
  config.capacity_policy = static_cast<CapacityPolicy>(between(0, 1));
  config.queue_policy = static_cast<QueuePolicy>(between(0, 2));
  config.max_wait_steps = between(0, 2) == 0 ? between(1, 30) : 2000;
  config.windows.assign(static_cast<std::size_t>(between(1, 3)), 0);
  for (std::size_t group = between(0, 3) == 0 ? 0 : 1; group < config.windows.size(); ++group) {
    config.windows[group] = between(1, 40);
  }
  w.max_len = 200;
  for (std::size_t group = 0; group < config.windows.size(); ++group) {
    w.total_blocks[group] = between(3, 30 * scale);
    while (Scheduler(config).most_blocks(w.max_len, static_cast<int>(group)) > w.total_blocks[group]) {
      --w.max_len;
    }
  }
  w.num_requests = between(1, 60 * scale);
  w.arrival_percent = between(10, 95);
  w.cancel_percent = between(0, 1) * between(0, 20);
  w.stop_percent = between(0, 100);
  w.num_priorities = between(1, 3);
  w.max_prompt = between(1, w.max_len);
  w.num_families = between(0, 1) * between(1, 3);
  w.prefix_len = between(1, w.max_prompt);
  w.max_drafts = between(0, 1) * between(1, 5);
  w.plans_ahead = between(0, 1) == 1;
  return w;
}

}  // namespace aotllm::testing
