#pragma once

#include <span>
#include <vector>

#include "aotllm/engine.h"
#include "aotllm/model_runner.h"
#include "aotllm/thread_pool.h"
#include "kernels.h"
#include "runner/cpu_tactics.h"
#include "runner/kv_pool.h"
#include "runner/linear.h"
#include "runner/lora.h"
#include "runner/op_clock.h"
#include "runner/ops.h"
#include "runner/step_batch.h"
#include "runner/workspace.h"

namespace aotllm {

/// One rank of an engine of target cpu: what it holds, and what its threads write.
class CpuRank {
 public:
  /// `num_threads`: most threads that run it.
  CpuRank(Engine engine, int num_threads, const cpu::Kernels& kernels);
  CpuRank(CpuRank&&) = delete;

  const Engine& engine() const noexcept { return engine_; }
  const Plan& plan() const noexcept { return engine_.plan(); }
  const Workspace& space() const noexcept { return space_; }
  /// Goes on with other tactics for its linears; between steps. Throws as PlanTactics.
  void set_tactics(const CpuTactics& tactics, const cpu::Kernels& kernels) {
    tactics_ = PlanTactics(plan(), tactics, kernels);
  }
  Lora& lora() noexcept { return lora_; }
  KvPool& kv() noexcept { return kv_; }
  const KvPool& kv() const noexcept { return kv_; }

  /// Begins to take the times of ops, anew, or ceases to.
  void set_profiling(bool on);
  /// Adds those taken since then.
  void add_profile(std::vector<OpProfile>& ops) const { add_times(plan(), clocks_, ops); }

  /// What the ranks of a step share.
  struct Step {
    const cpu::Kernels& kernels;
    const StepBatch& batch;
    StepLogits& logits;
    float* hidden;
    ThreadPool& pool;
    int own_rows;  ///< CpuTactics
  };

  /// The rank's ops, on one of its threads. `spaces` are those of all ranks of the stage, `before` the rank of the same
  /// place in the stage before; null for the first stage.
  void run(const Step& step, std::span<const Workspace* const> spaces, const CpuRank* before, int thread) const;

 private:
  void receive(const Worker& worker, const CpuRank& before) const;

  Engine engine_;
  std::vector<std::vector<QkvUnit>> units_;  ///< per layer
  PlanTactics tactics_;
  Workspace space_;
  Lora lora_;
  KvPool kv_;
  int num_threads_;
  mutable std::vector<OpClock> clocks_;  ///< by thread, each written by its own; empty = not profiled
};

}  // namespace aotllm
