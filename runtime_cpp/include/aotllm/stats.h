#pragma once

#include <cstdint>

namespace aotllm {

/// Counters of a manager since its start, and its state after the latest step. Always on.
struct Stats {
  std::int64_t steps = 0;             ///< steps given to the runner
  std::int64_t queued = 0;            ///< requests that wait, preempted ones included
  std::int64_t running = 0;           ///< requests that hold KV blocks
  std::int64_t finished = 0;          ///< requests that ended, for whatever reason
  std::int64_t context_tokens = 0;    ///< prompt tokens run, recomputation after preemption included
  std::int64_t generated_tokens = 0;  ///< tokens sampled
  std::int64_t blocks_total = 0;
  std::int64_t blocks_used = 0;
  std::int64_t preemptions = 0;
};

}  // namespace aotllm
