#pragma once

#include <memory>
#include <span>
#include <string>

#include "aotllm/engine.h"
#include "aotllm/model_runner.h"

namespace aotllm {

struct CudaRunnerOptions {
  int device = 0;              ///< ordinal among the visible devices
  bool deterministic = false;  ///< a token's bits depend on what is at and before its position only; slower
  bool graphs = true;          ///< steps, but for long ones, are CUDA graphs
  std::string cublaslt;        ///< path of libcublasLt; empty = what the dynamic loader finds, if anything
  std::string tactics;         ///< text of the engine's tactics.json (`aotllm tune`); empty = the plan's tactics
};

/// Runs an engine of target cuda on one GPU. All memory is reserved when the runner is made, except the KV blocks and
/// the graphs of steps, which are captured when a shape, of those that steps are padded to, comes again.
class CudaRunner final : public ModelRunner {
 public:
  /// Copies the weights to the device. Throws Error(kEngineIncompatible) where there is no GPU, the driver is too old
  /// or the engine is for another GPU, Error(kInvalidRequest) for a device that is not there or has too little memory.
  explicit CudaRunner(Engine engine, const CudaRunnerOptions& options = {});
  ~CudaRunner() override;

  const ModelShape& shape() const override;
  FreeMemory free_memory() const override;
  bool samples() const noexcept override;
  SamplingSupport sampling_support() const noexcept override;
  void allocate_kv(const KvAllocation& allocation) override;
  void step(std::span<const SequenceStep> sequences, StepOutputs& outputs) override;
  bool queues() const noexcept override { return samples(); }
  void queue(std::span<const SequenceStep> sequences) override;
  void finish(StepOutputs& outputs) override;
  void copy_blocks(std::span<const BlockCopy> copies) override;

  const KvAllocation& kv_allocation() const noexcept;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace aotllm
