#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "aotllm/engine.h"
#include "aotllm/model_runner.h"

namespace aotllm {

namespace cpu {
struct Kernels;
}

struct CpuRunnerOptions {
  int num_threads = 0;                    ///< 0 = default_num_threads(); the calling thread is one of them
  const cpu::Kernels* kernels = nullptr;  ///< nullptr = cpu::kernels(), the best of this CPU
};

/// Runs an engine on the CPU. Logits are the same bit for bit whatever the batch, the chunks and the threads.
class CpuRunner final : public ModelRunner {
 public:
  /// Plans and reserves all memory of a step. Throws Error(kEngineIncompatible) where this CPU has no kernels,
  /// Error(kInvalidRequest) for a number of threads that is negative or above 4096, std::bad_alloc.
  explicit CpuRunner(Engine engine, const CpuRunnerOptions& options = {});
  CpuRunner(CpuRunner&&) noexcept;
  CpuRunner& operator=(CpuRunner&&) noexcept;
  ~CpuRunner() override;

  const ModelShape& shape() const override;
  void allocate_kv(std::int32_t num_blocks) override;
  void step(std::span<const SequenceStep> sequences, StepOutputs& outputs) override;
  void copy_block(BlockId from, BlockId to) override;

  int num_threads() const noexcept;
  /// Blocks of `allocate_kv`; 0 before it.
  std::int32_t num_blocks() const noexcept;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace aotllm
