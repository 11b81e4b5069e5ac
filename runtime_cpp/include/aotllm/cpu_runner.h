#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "aotllm/engine.h"
#include "aotllm/model_runner.h"
#include "aotllm/step_profile.h"

namespace aotllm {

namespace cpu {
struct Kernels;
}

struct CpuTactics;

struct CpuRunnerOptions {
  int num_threads = 0;                    ///< 0 = default_num_threads(); the calling thread is one of them
  const cpu::Kernels* kernels = nullptr;  ///< nullptr = cpu::kernels(), the best of this CPU
};

/// Runs an engine on the CPU, all of its ranks in this process. Logits are the same bit for bit whatever the batch, the
/// chunks and the threads.
///
/// The ranks of a stage divide the threads among them, at least one each: each computes its heads, neurons and tokens;
/// what is summed over ranks is summed in their order, by all threads together. The stages of a pipeline take turns.
class CpuRunner final : public ModelRunner {
 public:
  /// Plans and reserves all memory of a step. Throws Error(kEngineIncompatible) where this CPU has no kernels or the
  /// engine is one of several ranks, Error(kInvalidRequest) for a number of threads that is negative or above 4096,
  /// std::bad_alloc.
  explicit CpuRunner(Engine engine, const CpuRunnerOptions& options = {});
  /// All ranks of an engine, in order. Likewise; Error(kEngineIncompatible) where they are not those of one build.
  explicit CpuRunner(std::vector<Engine> ranks, const CpuRunnerOptions& options = {});
  CpuRunner(CpuRunner&&) noexcept;
  CpuRunner& operator=(CpuRunner&&) noexcept;
  ~CpuRunner() override;

  /// Blocks are those of all ranks together.
  const ModelShape& shape() const override;
  /// Entries of groups that the engine does not have are ignored.
  void allocate_kv(const KvAllocation& allocation) override;
  void step(std::span<const SequenceStep> sequences, StepOutputs& outputs) override;
  /// Tokens of rows without masks, penalties and log-probabilities: greedy ones from the maximum that is found while
  /// the head is computed, so that no logits are written; others drawn by all threads. They are those of `Sampler`.
  bool samples() const noexcept override { return true; }
  void copy_blocks(std::span<const BlockCopy> copies) override;
  /// Throws Error(kInvalidRequest) where the engine has several ranks.
  void load_adapter(AdapterId id, const Adapter& adapter) override;
  void unload_adapter(AdapterId id) override;
  std::int64_t adapter_bytes() const noexcept override;

  /// Goes on with what `text`, the engine's tactics.json, has chosen on this machine; with the defaults where it is
  /// empty or made elsewhere, which `tactics_note` tells. Between steps. Results stay the same bit for bit. Throws
  /// Error(kEngine) for a damaged text.
  void set_tactics(const std::string& text);
  /// The same for whoever measures them.
  void set_tactics(const CpuTactics& tactics);
  std::string tactics_note() const override;

  /// Begins to take the times of ops, from zero, or ceases to; between steps. Costs some 2 % of a short step, nothing
  /// while off.
  void set_profiling(bool on);
  /// What was taken since it began; empty while off.
  StepProfile profile() const;

  int num_threads() const noexcept;
  /// What `allocate_kv` reserved; zeros before it.
  const KvAllocation& kv_allocation() const noexcept;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace aotllm
