#pragma once

#include <memory>
#include <span>
#include <vector>

#include "aotllm/cuda_runner.h"
#include "aotllm/engine.h"
#include "aotllm/model_runner.h"

namespace aotllm {

/// Runs the ranks of an engine of target cuda in this process, those of all stages of a pipeline, each with a thread, a
/// stream and a device; several may share a device. In a step the stages take turns. Logits are gathered and tokens
/// sampled on the first rank of the last stage. A step that fails on any rank ends the runner: what the ranks hold no
/// longer agrees, so later calls are refused.
class TpRunner final : public ModelRunner {
 public:
  /// `ranks[r]` is the engine of rank r and runs on `devices[r]`; `options.device` is not used. Throws as CudaRunner,
  /// and Error(kEngineIncompatible) where the files are not the ranks of one engine or the devices cannot exchange.
  TpRunner(std::vector<Engine> ranks, const std::vector<int>& devices, const CudaRunnerOptions& options = {});
  ~TpRunner() override;

  /// A block takes what it takes on the rank where that is most.
  const ModelShape& shape() const override;
  /// For a rank's share of the KV blocks: that of the device with the least for each of its ranks, such that blocks for
  /// which it is enough by shape() fit all ranks.
  FreeMemory free_memory() const override;
  bool samples() const noexcept override;
  SamplingSupport sampling_support() const noexcept override;
  void allocate_kv(const KvAllocation& allocation) override;
  void step(std::span<const SequenceStep> sequences, StepOutputs& outputs) override;
  void copy_blocks(std::span<const BlockCopy> copies) override;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// The devices of `size` ranks: `given`, of which one stands for all ranks, or as many from `first` on where none are
/// given. Throws Error(kInvalidRequest) for any other number.
std::vector<int> rank_devices(const std::vector<int>& given, int first, int size);

}  // namespace aotllm
