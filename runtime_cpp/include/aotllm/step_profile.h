#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace aotllm {

/// What a thread does within an op.
enum class StepPart : std::uint8_t {
  kPrepare,  ///< normalizes and quantizes the op's input
  kCompute,  ///< all else
  kWait,     ///< for other threads
};
inline constexpr int kNumStepParts = 3;

/// Time of ops of one kind and shape. Seconds are sums over steps and threads.
struct OpProfile {
  std::string op;          ///< as in the plan, e.g. "norm_swiglu"
  std::string shape;       ///< of its linears, "rows×columns format" each; empty = none
  std::int64_t count = 0;  ///< ops in a step, over all ranks
  std::int64_t bytes = 0;  ///< of weights that a step reads for them
  double prepare_seconds = 0.0;
  double compute_seconds = 0.0;
  double wait_seconds = 0.0;
};

/// Where the time of steps goes.
struct StepProfile {
  std::int64_t steps = 0;
  int threads = 0;
  double seconds = 0.0;  ///< of steps from begin to end, not summed over threads
  std::vector<OpProfile> ops;
};

}  // namespace aotllm
