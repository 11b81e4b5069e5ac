#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "aotllm/cpu_runner.h"
#include "runner/cpu_tactics.h"

namespace aotllm {

/// An engine's runner, and steps of any number of rows for it: one token each of as many sequences, or where the engine
/// has no room for so many, a prompt.
class StepBench {
 public:
  /// Steps of at most `most` rows.
  StepBench(std::vector<Engine> ranks, int num_threads, int most);

  const CpuRunner& runner() const noexcept { return runner_; }
  /// Ranks of a stage: each has its own share of every op, all at a time.
  int ranks_of_stage() const noexcept { return tp_; }
  /// Of a step, the most.
  int max_rows() const noexcept { return static_cast<int>(tokens_.size()); }
  /// Whether a step of `rows` rows gives logits of all of them.
  bool has_logits(int rows) const { return rows <= runner_.shape().max_batch_size; }

  /// Seconds of a step, the mean of enough of them to be measured.
  double seconds(int rows, const CpuTactics& tactics);

  struct Profile {
    double seconds = 0.0;                  ///< of the step
    std::map<std::string, double> shapes;  ///< shape_of a linear → seconds of a product (gate and up: of both)
  };
  /// The same by linear; `threads` is what `tactics` gives the step.
  Profile profile(int rows, const CpuTactics& tactics, int threads);

 private:
  void run(int rows);
  /// How often a step is run for a measurement.
  int repeats(int rows);

  int tp_;
  CpuRunner runner_;
  std::vector<std::vector<BlockId>> tables_;  ///< by sequence: a common context, a last block of its own
  std::vector<BlockId> prompt_table_;
  std::vector<TokenId> tokens_;
  std::map<int, int> repeats_;  ///< by rows
  std::vector<SequenceStep> sequences_;
  StepOutputs outputs_;
};

}  // namespace aotllm
