#pragma once

#include <map>
#include <memory>
#include <span>

#include "aotllm/cuda_runner.h"
#include "aotllm/engine.h"
#include "comm/communicator.h"
#include "runner/cuda/kv_memory.h"
#include "runner/cuda/pinned.h"
#include "runner/cuda/program.h"
#include "runner/cuda/step_data.h"
#include "runner/cuda/weight_store.h"
#include "runner/step_batch.h"

namespace aotllm::cuda {

/// Throws Error(kEngineIncompatible) for an engine of another target.
void check_target(const Plan& plan);

/// What steps of target cuda ask of their sequences: checked once, by the thread that steps, before any rank runs.
class StepCheck {
 public:
  explicit StepCheck(const ModelShape& shape) : batch_(shape), max_batch_size_(shape.max_batch_size) {}
  /// Throws Error(kInternal) where a precondition of ModelRunner::step is broken.
  void operator()(std::span<const SequenceStep> sequences, const BlockCounts& num_blocks);

 private:
  StepBatch batch_;
  int max_batch_size_;
};

/// One rank of an engine on its device: weights, KV blocks, scratch, stream and graphs. Used by one thread, whose
/// device `select` has made this rank's.
class Rank {
 public:
  /// `ranks` joins it to the others; null where it is alone. `options.device` is this rank's, and
  /// open_device was called for it and made it the thread's. Throws as CudaRunner.
  Rank(Engine engine, const CudaRunnerOptions& options, OwnedStream stream, std::unique_ptr<Communicator> ranks);

  void select() const;
  const Engine& engine() const noexcept { return engine_; }
  const KvAllocation& kv_allocation() const noexcept { return kv_.allocation(); }

  void allocate_kv(const KvAllocation& allocation);
  /// Does not wait for the copies; the next step does.
  void copy_blocks(std::span<const BlockCopy> copies) const { kv_.copy(copies, stream_.handle()); }

  /// Runs a step that was checked. Only rank 0 writes `outputs`.
  void step(std::span<const SequenceStep> sequences, StepOutputs& outputs);

 private:
  StepShape shape_for(std::span<const SequenceStep> sequences) const;
  void run_graph(const StepShape& shape);
  OwnedGraph capture(const StepShape& shape);
  void copy_rows(StepOutputs& outputs, const StepShape& shape);
  Stream launches() const noexcept { return {stream_.handle(), ranks_ == nullptr || !ranks_->shares_device()}; }
  bool is_first() const noexcept { return ranks_ == nullptr || ranks_->rank() == 0; }

  CudaRunnerOptions options_;
  Engine engine_;
  std::unique_ptr<Communicator> ranks_;
  WeightStore weights_;
  Program program_;
  OwnedStream stream_;
  StepData data_;
  KvBlocks kv_;
  std::map<StepShape, OwnedGraph> graphs_;
  PinnedArray<std::int32_t> tokens_;  ///< [head_rows], written by the sampling kernel
  PinnedArray<float> rows_;           ///< [head_rows, vocab_size], on their way to the caller
};

}  // namespace aotllm::cuda
