#pragma once

#include <cstdint>

#include "aotllm/kv_cache.h"
#include "aotllm/model_runner.h"

namespace aotllm {

/// One step of a manager.
struct StepStats {
  std::int64_t step = 0;               ///< its number, from 1
  double latency_seconds = 0.0;        ///< from its planning to its last response
  double run_seconds = 0.0;            ///< of that, in the runner
  std::int32_t scheduled = 0;          ///< sequences in the step
  std::int32_t queued = 0;             ///< sequences that waited meanwhile, preempted ones included
  std::int32_t paused = 0;             ///< sequences that held blocks but had no part in the step
  std::int32_t preempted = 0;          ///< sequences that gave their blocks back before the step
  std::int32_t context_tokens = 0;     ///< prompt tokens and those computed again
  std::int32_t generation_tokens = 0;  ///< tokens run for generations, drafts included
  bool planned_ahead = false;          ///< its plan was made while the step before ran
};

/// Counters of a manager since its start, and its state after the latest step. Always on.
struct Stats {
  std::int64_t steps = 0;                ///< steps given to the runner
  std::int64_t steps_planned_ahead = 0;  ///< of those, planned while the one before ran
  std::int64_t steps_queued = 0;         ///< of those, begun before the one before had ended
  std::int64_t queued = 0;               ///< sequences that wait, preempted ones included
  std::int64_t running = 0;              ///< sequences that hold KV blocks
  std::int64_t finished = 0;             ///< sequences that ended, for whatever reason
  std::int64_t timed_out = 0;            ///< of those, by their timeout
  std::int64_t failed = 0;               ///< of those, with an error
  std::int64_t context_tokens = 0;       ///< prompt tokens run, recomputation after preemption included
  std::int64_t generated_tokens = 0;     ///< tokens sampled or forced by a grammar
  std::int64_t forced_tokens = 0;        ///< of those, forced
  std::int64_t draft_tokens = 0;         ///< tokens proposed and verified
  std::int64_t accepted_tokens = 0;      ///< of those, accepted
  std::int64_t preemptions = 0;
  std::int64_t stuck_steps = 0;   ///< steps that the watchdog has reported
  std::int64_t blocks_total = 0;  ///< of the first KV group, as the next three
  std::int64_t blocks_used = 0;
  std::int64_t blocks_cached = 0;  ///< free, but for the prefix tree
  std::int64_t host_blocks_used = 0;
  KvCacheStats cache;
  StepStats last_step;

  /// Share of queried tokens that were found in the prefix tree, in [0, 1].
  double hit_rate() const {
    return cache.queried_tokens == 0
               ? 0.0
               : static_cast<double>(cache.hit_tokens) / static_cast<double>(cache.queried_tokens);
  }
};

}  // namespace aotllm
